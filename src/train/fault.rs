//! Ranks that fail on demand, for the tests of what the others do then. Part of builds with the feature `test-fakes` alone.

use serde::Deserialize;

use super::error::TrainError;

/// Environment variable with the JSON of a [`Fault`].
const FAULT: &str = "SWEEP_FAULT";

/// Which rank fails, and how.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fault {
    rank: usize,
    /// The optimiser step in which it does, from 1.
    step: u64,
    kind: Kind,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// Its thread panics.
    Panic,
    /// It returns an error.
    Error,
    /// It never goes on.
    Block,
}

/// Lets this rank fail in this step, if it is asked to.
///
/// # Errors
/// The fault, where that is an error.
pub(super) fn strike(rank: usize, step: u64) -> Result<(), TrainError> {
    let Ok(text) = std::env::var(FAULT) else { return Ok(()) };
    let fault: Fault = serde_json::from_str(&text).map_err(|error| TrainError::Request(format!("{FAULT}: {error}")))?;
    if (fault.rank, fault.step) != (rank, step) {
        return Ok(());
    }
    match fault.kind {
        Kind::Panic => panic!("a fault was asked for"),
        Kind::Error => Err(TrainError::Failed("a fault was asked for".to_owned())),
        Kind::Block => loop {
            std::thread::park();
        },
    }
}
