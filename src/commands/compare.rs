//! `sweep compare`

use crate::cli::CompareArguments;
use crate::error::CommandError;

/// Refuses: what is built measures and reports, it does not judge.
///
/// # Errors
/// Always, with the reason.
pub fn compare(arguments: &CompareArguments) -> Result<(), CommandError> {
    let reason = "`sweep compare` is not built yet: telling a regression from noise needs statistics over repeats that this version does not have";
    let hint = format!("`sweep report {}` and `sweep report {}` write the tables of both runs", arguments.base.display(), arguments.head.display());
    Err(CommandError::user(reason).hint(hint))
}
