//! The error of the training room: what went wrong, on which rank, and so which exit code of the child it means.

/// How the message of a rank that panicked begins.
pub(super) const PANICKED: &str = "panicked: ";

/// Why training could not go on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TrainError {
    /// The request asks for what cannot be done: exit code 2.
    #[error("{0}")]
    Request(String),
    /// Weights or data could not be read: exit code 2.
    #[error("{0}")]
    Input(String),
    /// Training itself failed: exit code 3.
    #[error("{0}")]
    Failed(String),
    /// Another rank failed first; this one stopped because of it: exit code 3.
    #[error("rank {rank} failed: {message}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// What it said.
        message: String,
    },
}

impl TrainError {
    /// Whether a rank panicked, which is a defect of ours: to whoever started the process it is a crash.
    pub fn is_panic(&self) -> bool {
        match self {
            Self::Failed(message) | Self::Rank { message, .. } => message.starts_with(PANICKED),
            Self::Request(_) | Self::Input(_) => false,
        }
    }
}
