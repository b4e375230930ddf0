//! Events on a live terminal: finished trials scroll by, running ones have a line each, and the sweep has a bar.

use std::collections::HashMap;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use console::{Style, Term};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::progress::{Line, Progress, Running, Tone};
use super::{EventSink, ReportBrief, colours_wanted, printable, summary};
use crate::event::Event;
use crate::format;
use crate::protocol::Timestamp;
use crate::trial::TrialId;

/// Widest a line gets where the terminal does not say how wide it is.
const DEFAULT_WIDTH: usize = 120;

/// How often running lines are written anew at most; a child may send far more messages than an eye can follow.
const REDRAW: Duration = Duration::from_millis(100);

/// A live terminal.
pub(super) struct Terminal {
    bars: MultiProgress,
    sweep: ProgressBar,
    trials: HashMap<TrialId, ProgressBar>,
    progress: Progress,
    colour: bool,
    drawn: Option<Instant>,
}

/// Whether standard output is a terminal that can move its cursor.
pub(super) fn can_be_drawn_on() -> bool {
    io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

impl Terminal {
    pub(super) fn new() -> Self {
        let bars = MultiProgress::with_draw_target(ProgressDrawTarget::stdout());
        let sweep = bars.add(ProgressBar::new(0));
        let template = ProgressStyle::with_template("{bar:24} {pos}/{len} configurations, {wide_msg}");
        sweep.set_style(template.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("##-"));
        Self { bars, sweep, trials: HashMap::new(), progress: Progress::default(), colour: colours_wanted(), drawn: None }
    }

    /// Writes a line above the bars.
    fn say(&self, line: &Line) {
        let tone = match line.tone {
            Tone::Plain => Style::new().bold(),
            Tone::Good => Style::new().green(),
            Tone::Bad => Style::new().red().bold(),
            Tone::Note => Style::new().yellow(),
            Tone::Quiet => Style::new().dim(),
        };
        let tone = tone.force_styling(self.colour);
        for text in printable(&line.text).lines() {
            // A terminal that went away is no reason to end the run.
            let _ = self.bars.println(format!("{} {text}", tone.apply_to(format!("{:>9}", line.word))));
        }
    }

    fn draw(&mut self) {
        self.drawn = Some(Instant::now());
        let width = Term::stdout().size_checked().map_or(DEFAULT_WIDTH, |(_, columns)| usize::from(columns));
        self.trials.retain(|trial, bar| {
            let runs = self.progress.running.iter().any(|running| running.trial == *trial);
            if !runs {
                bar.finish_and_clear();
                self.bars.remove(bar);
            }
            runs
        });
        for running in &self.progress.running {
            let bar = self.trials.entry(running.trial.clone()).or_insert_with(|| {
                let bar = self.bars.insert_before(&self.sweep, ProgressBar::new_spinner());
                bar.set_style(ProgressStyle::with_template("{wide_msg}").unwrap_or_else(|_| ProgressStyle::default_spinner()));
                bar
            });
            bar.set_message(running_line(running, width));
        }
        self.sweep.set_length(self.progress.configurations as u64);
        self.sweep.set_position(self.progress.settled() as u64);
        self.sweep.set_message(format!("{}, {}", self.progress.counts(), format::minutes(self.progress.seconds_until(Timestamp::now()))));
    }

    fn clear(&mut self) {
        for (_, bar) in self.trials.drain() {
            bar.finish_and_clear();
        }
        self.sweep.finish_and_clear();
        let _ = self.bars.clear();
    }
}

impl EventSink for Terminal {
    fn event(&mut self, event: &Event) {
        let lines = self.progress.apply(event);
        for line in &lines {
            self.say(line);
        }
        if !lines.is_empty() || self.drawn.is_none_or(|drawn| drawn.elapsed() >= REDRAW) {
            self.draw();
        }
    }

    fn tick(&mut self) {
        self.draw();
    }

    fn finish(&mut self, report: Option<&ReportBrief>) {
        self.clear();
        super::print(&printable(&summary::summary(&self.progress, report)));
    }
}

impl Drop for Terminal {
    /// An error on the way out must not be written into the bars.
    fn drop(&mut self) {
        self.clear();
    }
}

/// The line of a running trial, at most `width` columns: what is measured in full, the label cut short where need be.
fn running_line(running: &Running, width: usize) -> String {
    const SHORTEST_LABEL: usize = 12;
    let numbers = running.numbers();
    let front = format!("{:>9} {}  ", "running", running.short_subject());
    let taken = console::measure_text_width(&front) + 2 + console::measure_text_width(&numbers);
    let label = printable(&running.label).replace('\n', " ");
    let room = width.saturating_sub(taken + 1).max(SHORTEST_LABEL);
    let label = console::truncate_str(&label, room, "...");
    let line = format!("{front}{label}  {numbers}");
    console::truncate_str(line.trim_end(), width.max(1), "").into_owned()
}

#[cfg(test)]
mod tests {
    use super::super::script;
    use super::running_line;
    use crate::event::Event;
    use crate::ui::progress::Progress;

    /// The lines of running trials after the first `events` of the script.
    fn running(events: &[Event], width: usize) -> Vec<String> {
        let mut progress = Progress::default();
        for event in events {
            progress.apply(event);
        }
        progress.running.iter().map(|running| running_line(running, width)).collect()
    }

    #[test]
    fn a_running_trial_fits_the_terminal() {
        let events = script::run();
        let position = events.iter().position(|event| event.at == script::at(36.5)).expect("in the script");
        assert_eq!(
            running(&events[..position], 200),
            [
                "  running train  block 64  FSDP + full_shard  step 10/96, loss 5.2500, 12,288 tokens/s, peak 48.00 / 64.00 MiB, 1 skipped, loss scale 32768, perplexity 85.13, evaluate"
            ]
        );
        assert_eq!(running(&events[..3], 60), ["  running probe  block 128  FSDP + full_shard"]);
        for width in 0..220 {
            for line in running(&events[..position], width) {
                assert!(console::measure_text_width(&line) <= width.max(1), "{width}: {line}");
            }
        }
        assert_eq!(
            running(&events[..position], 128),
            ["  running train  block 64  FSDP + fu...  step 10/96, loss 5.2500, 12,288 tokens/s, peak 48.00 / 64.00 MiB, 1 skipped, loss scale"]
        );
    }

    #[test]
    fn the_sweep_bar_counts_what_is_settled() {
        let mut progress = Progress::default();
        let mut seen = Vec::new();
        for event in script::run() {
            progress.apply(&event);
            seen.push((progress.settled(), progress.counts()));
        }
        seen.dedup();
        let seen: Vec<(usize, &str)> = seen.iter().map(|(settled, counts)| (*settled, counts.as_str())).collect();
        assert_eq!(
            seen,
            [
                (0, "0 trials done"),
                (0, "0 trials done, 1 running"),
                (0, "1 trial done"),
                (0, "1 trial done, 1 running"),
                (0, "2 trials done"),
                (0, "2 trials done, 1 running"),
                (1, "3 trials done"),
                (1, "3 trials done, 1 running"),
                (2, "3 trials done, 1 failed"),
            ]
        );
    }
}
