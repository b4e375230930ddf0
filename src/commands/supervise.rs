//! `sweep supervise`: what `sweep run` puts between itself and the processes of trials.

use crate::error::CommandError;
use crate::run;

/// Serves until `sweep run` goes away.
///
/// # Errors
/// The system refuses what a supervisor needs, or it was started by hand.
pub fn supervise() -> Result<(), CommandError> {
    run::supervise().map_err(|error| CommandError::internal(format!("this command is for `sweep run` alone: {error}")))
}
