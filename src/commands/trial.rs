//! `sweep trial`: one trial, in the child process.

use std::process::ExitCode;

use crate::cli::TrialArguments;
use crate::error::CommandError;
use crate::ui;

/// Runs the trial and answers with the child's exit codes rather than `sweep`'s.
pub fn trial(_arguments: &TrialArguments) -> ExitCode {
    let error = CommandError::user("this sweep was built without training (--no-default-features)").hint("build it with the default features");
    ui::render_error(&error);
    error.exit_code()
}
