//! `sweep trial`: one trial, in the child process. Its exit codes are the child's of the protocol, not `sweep`'s.

use std::process::ExitCode;

use crate::cli::TrialArguments;
use crate::error::CommandError;
use crate::ui;

/// Runs the trial.
#[cfg(feature = "cpu")]
pub fn trial(arguments: &TrialArguments) -> ExitCode {
    let exit_code = |failure: &crate::train::TrialFailure| {
        ui::render_error(&CommandError::user(failure.to_string()));
        failure.exit_code()
    };
    #[expect(clippy::exit, reason = "a blocked thread cannot be ended otherwise")]
    let give_up = |failure: &crate::train::TrialFailure| std::process::exit(exit_code(failure));
    let code = match crate::train::run(&arguments.request, &give_up) {
        Ok(end) => end.exit_code(),
        Err(failure) => exit_code(&failure),
    };
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}

/// Says that this build cannot train.
#[cfg(not(feature = "cpu"))]
pub fn trial(_arguments: &TrialArguments) -> ExitCode {
    let error = CommandError::user("this sweep was built without training (--no-default-features)").hint("build it with the default features");
    ui::render_error(&error);
    error.exit_code()
}
