//! The one error type that commands return: its kind decides the exit code, its hints say what to do. Rendered in one place, `ui::render_error`.

use std::fmt;
use std::process::ExitCode;

use crate::store::StoreError;

/// Why a command ended without doing its job. Each kind is one exit code of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// `sweep devices --self-test` or a lint found something: exit 1.
    Findings,
    /// Bad command line, sweep file, or input named by it: exit 2.
    User,
    /// There is nothing to do: exit 4.
    NothingToDo,
    /// The run was interrupted with trials outstanding: exit 5.
    Interrupted,
    /// The disk, the network or the machine failed; trying again may help: exit 75.
    Infrastructure,
    /// At least one trial failed: exit 100.
    TrialFailed,
    /// `sweep compare` found a regression: exit 101.
    Regression,
    /// A defect of `sweep` itself: exit 70.
    Internal,
}

impl ErrorKind {
    /// The process exit code of the kind, as documented in the README.
    pub fn code(self) -> u8 {
        match self {
            Self::Findings => 1,
            Self::User => 2,
            Self::NothingToDo => 4,
            Self::Interrupted => 5,
            Self::Internal => 70,
            Self::Infrastructure => 75,
            Self::TrialFailed => 100,
            Self::Regression => 101,
        }
    }
}

/// An error on its way to the terminal.
#[derive(Debug)]
pub struct CommandError {
    /// Decides the exit code.
    pub kind: ErrorKind,
    /// What went wrong and where, in full sentences; may span lines (an excerpt of the sweep file).
    pub message: String,
    /// What the reader can do, a sentence each.
    pub hints: Vec<String>,
}

impl CommandError {
    /// An error of `kind` that says `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hints: Vec::new() }
    }

    /// Bad input: exit 2.
    pub fn user(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::User, message)
    }

    /// The machine failed us: exit 75.
    pub fn infrastructure(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Infrastructure, message)
    }

    /// A defect of our own: exit 70.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Adds what the reader can do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// The process exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.kind.code())
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for CommandError {}

/// A damaged or newer folder is the user's to choose otherwise; a disk that refuses is the machine's fault.
impl From<StoreError> for CommandError {
    fn from(error: StoreError) -> Self {
        let kind = match &error {
            StoreError::Io { .. } => ErrorKind::Infrastructure,
            StoreError::Malformed { .. } | StoreError::NewerFormat { .. } => ErrorKind::User,
        };
        Self::new(kind, error.to_string())
    }
}
