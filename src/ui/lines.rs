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

#[cfg(test)]
mod tests {
    use std::io::{self, Write};

    use super::super::{EventSink, script};
    use super::Lines;
    use crate::event::{Event, EventKind};

    /// CASES 8: a failed trial is shown when it fails, with the last lines of its stderr.
    #[test]
    fn a_run_reads_as_plain_lines() {
        let mut output = Vec::new();
        let mut lines = Lines::new(&mut output);
        for event in script::run() {
            lines.event(&event);
        }
        lines.finish(Some(&script::report()));
        let text = String::from_utf8(output).expect("UTF-8");
        assert!(!text.chars().any(|character| character.is_control() && character != '\n'), "{text:?}");
        insta::assert_snapshot!(text, @r#"
          0:00  sweep     gpt2_blocksize: run 20261130T120000Z-abc has 2 configurations
          0:00  note      [profile.cpu] was applied: there is no CUDA device.
          0:00  started   probe  block 128  FSDP + full_shard
          0:13  no fit    probe  block 128  0:12  FSDP + full_shard: out of device memory: rank 1 asked for 3.00 MiB with 62.00 MiB of 64.00 MiB in use (backward)
          0:13  started   probe  block 64  FSDP + full_shard
          0:25  fits      probe  block 64  0:12  FSDP + full_shard
          0:25  found     block 64  FSDP + full_shard: the largest that fits, limited by memory
          0:25  started   train  block 64  FSDP + full_shard
          0:25  warning   FSDP + full_shard: 96 tokens were dropped
          0:30  running   train  block 64  FSDP + full_shard: step 9/96, loss 5.5000, 12,288 tokens/s, peak 48.00 / 64.00 MiB, 1 skipped, loss scale 32768, train
          0:36  running   train  block 64  FSDP + full_shard: step 10/96, loss 5.2500, 12,288 tokens/s, peak 48.00 / 64.00 MiB, 1 skipped, loss scale 32768, perplexity 85.13, evaluate
          0:38  done      train  block 64  0:12  FSDP + full_shard: perplexity 85.13
          0:38  found     block 256  FSDP + size-based, 2K: the largest that fits, limited by the candidates
          0:38  started   train  block 256  FSDP + size-based, 2K
          0:50  FAILED    train  block 256  0:12  FSDP + size-based, 2K: crashed with exit code 1
          0:50            | rank 1: reading shard 2
          0:50            | Traceback (most recent call last):
          0:50            |   RuntimeError: no shard
          0:50  stopping  running trials are asked to end; Ctrl-C once more kills them
          0:50  stopping  running trials are killed

        3 trials done, 1 failed, 0 outstanding, in 1:52

        Block size max  Time per epoch (min)  Perplexity  Method
                    64                  1:52       85.13  FSDP + full_shard
                   256                                    FSDP + size-based, 2K

        Report: results/gpt2_blocksize/latest/report
        "#);
    }

    #[test]
    fn a_run_that_goes_on_says_so() {
        let mut output = Vec::new();
        let mut lines = Lines::new(&mut output);
        let mut event: Event = script::run().remove(0);
        event.kind = EventKind::RunStarted { sweep: "s".into(), run: "r".into(), configurations: 1, resumed: true };
        lines.event(&event);
        lines.finish(None);
        assert_eq!(String::from_utf8(output).expect("UTF-8"), "  0:00  sweep     s: run r goes on, with 1 configuration\n");
    }

    /// A reader that went away, as `head` does, ends the printing and nothing else.
    #[test]
    fn a_closed_pipe_is_no_panic() {
        struct Closed(usize);
        impl Write for &mut Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                self.0 += 1;
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut closed = Closed(0);
        let mut lines = Lines::new(&mut closed);
        for event in script::run() {
            lines.event(&event);
        }
        lines.finish(None);
        assert_eq!(closed.0, 1, "it is not tried again");
    }
}
