//! `sweep devices`

use crate::cli::DevicesArguments;
use crate::error::CommandError;

/// Runs the command.
///
/// # Errors
/// See the README's exit codes.
pub fn devices(_arguments: &DevicesArguments) -> Result<(), CommandError> {
    Err(CommandError::user("`sweep devices` is not built yet"))
}
