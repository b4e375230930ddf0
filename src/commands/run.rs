//! `sweep run`

use crate::cli::RunArguments;
use crate::error::CommandError;

/// Runs the command.
///
/// # Errors
/// See the README's exit codes.
pub fn run(_arguments: &RunArguments) -> Result<(), CommandError> {
    Err(CommandError::user("`sweep run` is not built yet"))
}
