//! The only room that prints.
#![expect(clippy::print_stderr, reason = "this room is where printing happens")]

use crate::error::CommandError;

/// Prints an error and its hints to standard error: the one renderer.
pub fn render_error(error: &CommandError) {
    eprintln!("error: {error}");
    for hint in &error.hints {
        eprintln!("hint: {hint}");
    }
}
