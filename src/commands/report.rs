//! `sweep report`

use crate::cli::ReportArguments;
use crate::error::CommandError;

/// Runs the command.
///
/// # Errors
/// See the README's exit codes.
pub fn report(_arguments: &ReportArguments) -> Result<(), CommandError> {
    Err(CommandError::user("`sweep report` is not built yet"))
}
