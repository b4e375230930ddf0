//! The only room that prints: errors, the text of commands, and the events of a run as they happen.
//!
//! A run's events have three readers, chosen by [`events`]: a live terminal, plain lines where there is no terminal, and JSON lines. What a person reads
//! goes to standard output, errors to standard error. Nothing here fails: a reader that went away ends the printing, never the run.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use crate::error::CommandError;
use crate::event::Event;

mod columns;
mod devices;
mod json;
mod lines;
pub mod plan;
mod progress;
#[cfg(test)]
mod script;
mod status;
mod summary;
mod terminal;

pub use devices::{DevicesView, GpuView, Measurement, devices_text};
pub use status::{FailureStatus, RowStatus, Standing, StatusView, status_text};

/// Reads the events of a run as they happen.
pub trait EventSink: Send {
    /// Takes the next event.
    fn event(&mut self, event: &Event);

    /// Lets time pass on the screen; to be called a few times a second while trials run.
    fn tick(&mut self) {}

    /// Ends the printing with a summary, after [`crate::event::EventKind::RunEnded`] and with what came of the report, where one was written.
    fn finish(&mut self, report: Option<&ReportBrief>);
}

/// Table 1 in brief, for the end of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReportBrief {
    /// Where the whole report lies.
    pub folder: PathBuf,
    /// Rows of table 1, in order.
    pub rows: Vec<BriefRow>,
}

/// One row of table 1 in brief; what is missing is `None` and shown as an empty cell.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BriefRow {
    /// The row's label.
    pub method: String,
    /// Largest block size that fits, in tokens.
    pub block_size_max: Option<usize>,
    /// Time per epoch in seconds.
    pub time_per_epoch_seconds: Option<f64>,
    /// Perplexity at the row's own block size.
    pub perplexity: Option<f64>,
}

/// The reader of a run's events that suits where standard output goes: JSON lines where they are asked for, a live terminal, or plain lines.
pub fn events(json: bool) -> Box<dyn EventSink> {
    if json {
        Box::new(json::Json::new(io::stdout()))
    } else if terminal::can_be_drawn_on() {
        Box::new(terminal::Terminal::new())
    } else {
        Box::new(lines::Lines::new(io::stdout()))
    }
}

/// Prints an error and its hints to standard error: the one renderer.
pub fn render_error(error: &CommandError) {
    let mut stderr = io::stderr();
    // Where standard error is closed there is nobody left to tell.
    let _ = stderr.write_all(error_text(error, stderr.is_terminal() && colours_wanted()).as_bytes());
}

/// Table 1 in brief, as text.
pub fn brief_table(report: &ReportBrief) -> String {
    summary::table(&report.rows)
}

/// Writes the text of a command to standard output. A reader that went away (`| head`) is not an error.
pub fn print(text: &str) {
    let mut stdout = io::stdout();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

fn error_text(error: &CommandError, colour: bool) -> String {
    let (red, bold) = (console::Style::new().red().bold().force_styling(colour), console::Style::new().cyan().bold().force_styling(colour));
    let mut text = format!("{} {}\n", red.apply_to("error:"), printable(&error.message));
    for hint in &error.hints {
        let _ = writeln!(text, "{} {}", bold.apply_to("hint:"), printable(hint));
    }
    text
}

/// Whether the user left colours on (<https://no-color.org>).
fn colours_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Text of others made safe to print: escape sequences are dropped, other control characters but newlines become spaces. A line that a program wrote over
/// itself with carriage returns keeps what was seen last.
fn printable(text: &str) -> String {
    let text = console::strip_ansi_codes(text);
    let mut safe = String::with_capacity(text.len());
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            safe.push('\n');
        }
        let seen_last = line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default();
        safe.extend(seen_last.chars().map(|character| if character.is_control() { ' ' } else { character }));
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::{error_text, printable};
    use crate::error::CommandError;

    #[test]
    fn an_error_is_followed_by_its_hints() {
        let error = CommandError::user("x.toml:3:1: unknown key `modle`\n  3 | modle = 1").hint("did you mean `model`?").hint("see the README");
        assert_eq!(
            error_text(&error, false),
            "error: x.toml:3:1: unknown key `modle`\n  3 | modle = 1\nhint: did you mean `model`?\nhint: see the README\n"
        );
        assert_eq!(error_text(&CommandError::user("no"), true), "\u{1b}[31m\u{1b}[1merror:\u{1b}[0m no\n");
    }

    #[test]
    fn control_characters_of_others_are_not_printed() {
        for (text, safe) in [
            ("plain\ntwo", "plain\ntwo"),
            ("\u{1b}[31mred\u{1b}[0m", "red"),
            ("10%\r50%\r100%\nnext", "100%\nnext"),
            ("windows\r\nline\r\n", "windows\nline\n"),
            ("bell\u{7}null\0tab\t.", "bell null tab ."),
        ] {
            assert_eq!(printable(text), safe);
        }
    }
}
