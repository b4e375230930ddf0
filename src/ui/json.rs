//! `--json`: every event as one line, for programs.

use std::io::Write;

use super::{EventSink, ReportBrief};
use crate::event::Event;

/// Writes events as JSON lines.
pub(super) struct Json<W> {
    output: W,
    open: bool,
}

impl<W: Write + Send> Json<W> {
    pub(super) fn new(output: W) -> Self {
        Self { output, open: true }
    }
}

impl<W: Write + Send> EventSink for Json<W> {
    fn event(&mut self, event: &Event) {
        if !self.open {
            return;
        }
        if let Ok(mut line) = serde_json::to_vec(event) {
            line.push(b'\n');
            // After the reader went away there is nothing to do but run on.
            self.open = self.output.write_all(&line).and_then(|()| self.output.flush()).is_ok();
        }
    }

    fn finish(&mut self, _report: Option<&ReportBrief>) {}
}
