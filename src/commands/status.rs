//! `sweep status`

use crate::cli::StatusArguments;
use crate::error::CommandError;

/// Runs the command.
///
/// # Errors
/// See the README's exit codes.
pub fn status(_arguments: &StatusArguments) -> Result<(), CommandError> {
    Err(CommandError::user("`sweep status` is not built yet"))
}
