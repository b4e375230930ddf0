//! What reaches a user's screen, through the real binary.

use std::io::Read;
use std::process::{Command, Stdio};

fn sweep(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sweep"));
    command.args(arguments).env_clear();
    command
}

#[test]
fn errors_go_to_standard_error_without_colours_where_it_is_no_terminal() {
    let output = sweep(&["compare", "a", "b"]).env("TERM", "xterm-256color").env("CLICOLOR_FORCE", "1").output().expect("sweep runs");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "error: `sweep compare` is not built yet: telling a regression from noise needs statistics over repeats that this version does not have
hint: `sweep report a` and `sweep report b` write the tables of both runs
"
    );
}

/// As with `sweep devices | head -0`: the reader is gone before anything is written.
#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child = sweep(&["devices"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("sweep starts");
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut stderr).expect("UTF-8");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    assert_eq!(stderr, "");
}
