//! Events as plain lines, for logs: no control characters, no colours, and progress of a trial only every few seconds.

use std::io::Write;

use super::progress::{Line, Progress};
use super::{EventSink, ReportBrief, printable, summary};
use crate::event::{Event, EventKind};
use crate::format;
use crate::protocol::Timestamp;

/// Seconds between two lines about the progress of one trial.
const PROGRESS_SECONDS: f64 = 5.0;

/// Writes a run as plain lines, each with the time since the run began.
pub(super) struct Lines<W> {
    output: W,
    open: bool,
    progress: Progress,
}

impl<W: Write + Send> Lines<W> {
    pub(super) fn new(output: W) -> Self {
        Self { output, open: true, progress: Progress::default() }
    }

    fn say(&mut self, at: Timestamp, word: &str, text: &str) {
        let time = format::minutes(self.progress.seconds_until(at));
        // Text of others may hold newlines; each is a line of its own.
        for text in printable(text).lines() {
            self.write(&format!("{time:>6}  {word:<8}  {text}\n"));
        }
    }

    fn write(&mut self, text: &str) {
        // After the reader went away there is nothing to do but run on.
        self.open = self.open && self.output.write_all(text.as_bytes()).and_then(|()| self.output.flush()).is_ok();
    }
}

impl<W: Write + Send> EventSink for Lines<W> {
    fn event(&mut self, event: &Event) {
        for Line { word, text, .. } in self.progress.apply(event) {
            self.say(event.at, word, &text);
        }
        match &event.kind {
            EventKind::TrialStarted { trial, .. } => {
                let started = self.progress.running.iter().find(|running| running.trial == *trial).map(|running| running.subject());
                if let Some(subject) = started {
                    self.say(event.at, "started", &subject);
                }
            }
            EventKind::TrialProgress { trial, .. } => {
                let due = self.progress.running.iter_mut().find(|running| running.trial == *trial);
                if let Some(running) = due
                    && event.at.seconds_since(running.said_at) >= PROGRESS_SECONDS
                {
                    running.said_at = event.at;
                    let text = format!("{}: {}", running.subject(), running.numbers());
                    self.say(event.at, "running", &text);
                }
            }
            _ => {}
        }
    }

    fn finish(&mut self, report: Option<&ReportBrief>) {
        let text = printable(&summary::summary(&self.progress, report));
        self.write(&text);
    }
}
