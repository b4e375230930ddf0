//! `sweep plan`

use crate::cli::PlanArguments;
use crate::error::CommandError;

/// Runs the command.
///
/// # Errors
/// See the README's exit codes.
pub fn plan(_arguments: &PlanArguments) -> Result<(), CommandError> {
    Err(CommandError::user("`sweep plan` is not built yet"))
}
