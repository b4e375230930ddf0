//! `sweep compare`

use crate::cli::CompareArguments;
use crate::error::CommandError;

/// Runs the command.
///
/// # Errors
/// See the README's exit codes.
pub fn compare(_arguments: &CompareArguments) -> Result<(), CommandError> {
    Err(CommandError::user("`sweep compare` is not built yet"))
}
