//! What the terminal and the plain lines both know of a run, folded from its events; and how they word it. Pure.

use std::collections::{BTreeSet, VecDeque};

use super::printable;
use crate::event::{Event, EventKind, LimitedBy};
use crate::format;
use crate::protocol::{Evaluation, Message, MessageKind, Step, Timestamp};
use crate::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

/// Steps over which throughput is averaged: enough to be calm, few enough to follow a change.
const THROUGHPUT_STEPS: usize = 10;

/// Everything shown of a run.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) started: Option<Timestamp>,
    pub(super) last: Option<Timestamp>,
    /// Configurations to settle.
    pub(super) configurations: usize,
    settled: BTreeSet<ConfigurationId>,
    /// Configurations whose block size is searched, as far as events tell: for them running out of memory is an answer.
    searched: BTreeSet<ConfigurationId>,
    resumed: bool,
    /// Attempts that ended as a result.
    pub(super) results: usize,
    pub(super) running: Vec<Running>,
    /// Trials whose last attempt failed.
    failed: BTreeSet<TrialId>,
    pub(super) ended: Option<Totals>,
    warnings: BTreeSet<(String, String)>,
}

/// Counts of [`EventKind::RunEnded`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) done: usize,
    pub(super) failed: usize,
    pub(super) outstanding: usize,
}

/// A trial that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) trial: TrialId,
    configuration: ConfigurationId,
    pub(super) label: String,
    purpose: Purpose,
    block_size: usize,
    repeat: u32,
    attempt: u32,
    budget_bytes: Option<u64>,
    phase: Option<String>,
    step: Option<Step>,
    recent: VecDeque<(u64, f64)>,
    skipped: u64,
    /// The newest at the trial's own block size.
    evaluation: Option<Evaluation>,
    /// When plain lines last spoke of it.
    pub(super) said_at: Timestamp,
}

/// How a line is coloured where there are colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Good,
    Bad,
    Note,
    Quiet,
}

/// A line that stays on the screen: its first word, then the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) tone: Tone,
    pub(super) word: &'static str,
    pub(super) text: String,
}

fn line(tone: Tone, word: &'static str, text: impl Into<String>) -> Line {
    Line { tone, word, text: text.into() }
}

impl Progress {
    /// Takes the next event; answers with the lines that stay on the screen.
    pub(super) fn apply(&mut self, event: &Event) -> Vec<Line> {
        self.last = Some(event.at);
        self.started.get_or_insert(event.at);
        match &event.kind {
            EventKind::RunStarted { sweep, run, configurations, resumed } => {
                self.configurations = *configurations;
                self.resumed = *resumed;
                let noun = if *configurations == 1 { "configuration" } else { "configurations" };
                let verb = if *resumed { "goes on, with" } else { "has" };
                vec![line(Tone::Plain, "sweep", format!("{sweep}: run {run} {verb} {configurations} {noun}"))]
            }
            EventKind::Notice { text } | EventKind::Remark { text } => vec![line(Tone::Note, "note", text)],
            EventKind::TrialStarted { trial, configuration, label, purpose, block_size, repeat, attempt, budget_bytes } => {
                self.failed.remove(trial);
                if *purpose == Purpose::Probe {
                    self.searched.insert(configuration.clone());
                }
                self.running.retain(|running| running.trial != *trial);
                self.running.push(Running {
                    trial: trial.clone(),
                    configuration: configuration.clone(),
                    label: label.clone(),
                    purpose: *purpose,
                    block_size: *block_size,
                    repeat: *repeat,
                    attempt: *attempt,
                    budget_bytes: *budget_bytes,
                    phase: None,
                    step: None,
                    recent: VecDeque::new(),
                    skipped: 0,
                    evaluation: None,
                    said_at: event.at,
                });
                Vec::new()
            }
            EventKind::TrialProgress { trial, message } => self.message(trial, message),
            EventKind::TrialEnded { trial, label, purpose, block_size, attempt, outcome, seconds, stderr_tail } => {
                let running = self.running.iter().position(|running| running.trial == *trial).map(|index| self.running.remove(index));
                let what = subject(*purpose, *block_size, label, running.as_ref().map_or(0, |running| running.repeat), *attempt, Some(*seconds));
                // Where a search was in an earlier run of the same folder, events do not tell; most block sizes are searched.
                let searched = self.resumed || running.as_ref().is_none_or(|running| self.searched.contains(&running.configuration));
                let does_not_fit = matches!(outcome, TrialOutcome::OutOfDeviceMemory { .. });
                let failed = outcome.is_failure() || (does_not_fit && *purpose == Purpose::Train && !searched);
                if failed {
                    self.failed.insert(trial.clone());
                } else if outcome.is_result() {
                    self.results += 1;
                }
                // A training that does not fit after all is followed by one at the next smaller block size.
                if *purpose == Purpose::Train
                    && (failed || *outcome == TrialOutcome::Done)
                    && let Some(running) = &running
                {
                    self.settled.insert(running.configuration.clone());
                }
                ended(*purpose, outcome, failed, what, running.as_ref(), stderr_tail)
            }
            EventKind::BlockSizeFound { configuration, label, block_size, limited_by } => {
                self.searched.insert(configuration.clone());
                let limit = limited_by_words(*limited_by);
                match block_size {
                    Some(block_size) => {
                        vec![line(Tone::Good, "found", format!("block {block_size}  {label}: the largest that fits, limited by {limit}"))]
                    }
                    None => {
                        self.settled.insert(configuration.clone());
                        vec![line(Tone::Note, "found", format!("{label}: not even the smallest block size fits, limited by {limit}"))]
                    }
                }
            }
            EventKind::StopRequested { now: false } => {
                vec![line(Tone::Note, "stopping", "running trials are asked to end; Ctrl-C once more kills them")]
            }
            EventKind::StopRequested { now: true } => vec![line(Tone::Note, "stopping", "running trials are killed")],
            EventKind::RunEnded { exit_code: _, done, failed, outstanding } => {
                self.ended = Some(Totals { done: *done, failed: *failed, outstanding: *outstanding });
                self.running.clear();
                Vec::new()
            }
        }
    }

    fn message(&mut self, trial: &TrialId, message: &Message) -> Vec<Line> {
        let Some(running) = self.running.iter_mut().find(|running| running.trial == *trial) else { return Vec::new() };
        match &message.kind {
            MessageKind::Phase { phase } => running.phase = Some(phase.clone()),
            MessageKind::Step(step) => {
                running.skipped += u64::from(step.skipped);
                running.recent.push_back((step.tokens, step.step_seconds));
                if running.recent.len() > THROUGHPUT_STEPS {
                    running.recent.pop_front();
                }
                running.step = Some(step.clone());
            }
            MessageKind::Eval { evaluation, .. } if evaluation.block_size == running.block_size => running.evaluation = Some(evaluation.clone()),
            MessageKind::Warning { message } if self.warnings.insert((running.label.clone(), message.clone())) => {
                return vec![line(Tone::Note, "warning", format!("{}: {message}", running.label))];
            }
            // The ending tells of the last one, `status` of the rest.
            MessageKind::Started { .. }
            | MessageKind::Eval { .. }
            | MessageKind::Checkpoint { .. }
            | MessageKind::Warning { .. }
            | MessageKind::Oom(_) => {}
        }
        Vec::new()
    }

    /// Configurations that need no more trials, as far as events tell.
    pub(super) fn settled(&self) -> usize {
        self.settled.len().min(self.configurations)
    }

    /// Seconds from the first event to `now`.
    pub(super) fn seconds_until(&self, now: Timestamp) -> f64 {
        self.started.map_or(0.0, |started| now.seconds_since(started).max(0.0))
    }

    /// The counts beside the sweep bar.
    pub(super) fn counts(&self) -> String {
        let noun = if self.results == 1 { "trial" } else { "trials" };
        let mut counts = format!("{} {noun} done", self.results);
        if !self.failed.is_empty() {
            counts.push_str(&format!(", {} failed", self.failed.len()));
        }
        if !self.running.is_empty() {
            counts.push_str(&format!(", {} running", self.running.len()));
        }
        counts
    }
}

impl Running {
    /// Purpose, block size and label.
    pub(super) fn subject(&self) -> String {
        subject(self.purpose, self.block_size, &self.label, self.repeat, self.attempt, None)
    }

    /// Purpose and block size alone, for where the label stands elsewhere.
    pub(super) fn short_subject(&self) -> String {
        subject(self.purpose, self.block_size, "", self.repeat, self.attempt, None)
    }

    /// Step, loss, throughput, memory and phase, as far as they are known.
    pub(super) fn numbers(&self) -> String {
        let mut parts = Vec::new();
        if let Some(step) = &self.step {
            parts.push(format!("step {}/{}", step.step, step.steps));
            parts.push(format!("loss {:.4}", step.loss.0));
            let (tokens, seconds) = self.recent.iter().fold((0, 0.0), |(tokens, seconds), step| (tokens + step.0, seconds + step.1));
            if seconds > 0.0 {
                parts.push(format::tokens_per_second(tokens as f64 / seconds));
            }
            if let Some(peak) = step.peak_bytes.iter().copied().max() {
                parts.push(match self.budget_bytes {
                    Some(budget) => format!("peak {}", format::bytes_of(peak, budget)),
                    None => format!("peak {}", format::bytes(peak)),
                });
            }
            if self.skipped > 0 {
                let scale = step.loss_scale.map_or(String::new(), |scale| format!(", loss scale {scale}"));
                parts.push(format!("{} skipped{scale}", self.skipped));
            }
        }
        if let Some(evaluation) = &self.evaluation {
            parts.push(format!("perplexity {:.2}", evaluation.perplexity.0));
        }
        parts.extend(self.phase.clone());
        parts.join(", ")
    }
}

/// What stands in the way of a larger block size, in words.
pub(super) fn limited_by_words(limited_by: LimitedBy) -> &'static str {
    match limited_by {
        LimitedBy::Memory => "memory",
        LimitedBy::Model => "the model's positions",
        LimitedBy::Candidates => "the candidates",
        LimitedBy::Data => "the data",
    }
}

/// Purpose, block size, then the time it took where it ended, and the label last: it may be longer than the rest together.
fn subject(purpose: Purpose, block_size: usize, label: &str, repeat: u32, attempt: u32, seconds: Option<f64>) -> String {
    let purpose = match purpose {
        Purpose::Probe => "probe",
        Purpose::Train => "train",
    };
    let repeat = if repeat > 0 { format!("  repeat {repeat}") } else { String::new() };
    let attempt = if attempt > 1 { format!("  attempt {attempt}") } else { String::new() };
    let took = seconds.map_or(String::new(), |seconds| format!("  {}", format::minutes(seconds)));
    format!("{purpose}  block {block_size}{repeat}{attempt}{took}  {label}").trim_end().to_owned()
}

fn ended(purpose: Purpose, outcome: &TrialOutcome, failed: bool, what: String, running: Option<&Running>, stderr_tail: &str) -> Vec<Line> {
    match outcome {
        TrialOutcome::Done if purpose == Purpose::Probe => vec![line(Tone::Good, "fits", what)],
        TrialOutcome::Done => {
            let measured = running
                .and_then(|running| running.evaluation.as_ref())
                .map_or(String::new(), |evaluation| format!(": perplexity {:.2}", evaluation.perplexity.0));
            vec![line(Tone::Good, "done", what + &measured)]
        }
        TrialOutcome::OutOfDeviceMemory { .. } if !failed => vec![line(Tone::Quiet, "no fit", format!("{what}: {outcome}"))],
        TrialOutcome::KilledByUser | TrialOutcome::Preempted => vec![line(Tone::Note, "stopped", format!("{what}: {outcome}"))],
        _ => {
            let mut lines = vec![line(Tone::Bad, "FAILED", format!("{what}: {outcome}"))];
            let said = printable(stderr_tail);
            lines.extend(said.lines().filter(|text| !text.trim().is_empty()).map(|text| line(Tone::Quiet, "", format!("| {text}"))));
            lines
        }
    }
}
