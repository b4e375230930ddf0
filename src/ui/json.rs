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

#[cfg(test)]
mod tests {
    use super::super::{EventSink, script};
    use super::Json;
    use crate::event::Event;

    #[test]
    fn every_event_is_one_line_that_reads_back() {
        let mut output = Vec::new();
        let mut json = Json::new(&mut output);
        let events = script::run();
        for event in &events {
            json.event(event);
        }
        json.finish(Some(&script::report()));
        let text = String::from_utf8(output).expect("UTF-8");
        let read: Vec<Event> = text.lines().map(|line| serde_json::from_str(line).expect("an event")).collect();
        assert_eq!(read, events);
        assert_eq!(
            text.lines().nth(2).expect("a line"),
            r#"{"at":"1970-01-01T00:00:00.100Z","kind":"trial_started","trial":"p128","configuration":"FSDP + full_shard","label":"FSDP + full_shard","purpose":"probe","block_size":128,"repeat":0,"attempt":1,"budget_bytes":67108864}"#
        );
    }
}
