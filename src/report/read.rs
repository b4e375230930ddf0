//! Reads a run folder into memory: each file once, trials spread over the machine's cores. What cannot be read is named with its file and line, and
//! the rest is still reported.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::num::NonZero;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::de::DeserializeOwned;

use crate::protocol::{Evaluation, Message, MessageKind, Step, Timestamp, TrialRequest, TrialResult};
use crate::store::{self, AttemptFolder, AttemptRecord, BlockSizeResult, RunFolder, RunManifest, RunState, StoreError};
use crate::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

use super::telemetry::{self, Sample};

/// Everything a report is made of.
#[derive(Debug)]
pub(super) struct RunContents {
    pub(super) manifest: RunManifest,
    /// Whether the last thing the run loop wrote is its end, and nothing is outstanding.
    pub(super) progress: Progress,
    /// How each search ended, as the run loop said.
    pub(super) searches: BTreeMap<ConfigurationId, BlockSizeResult>,
    /// In the order of their ids.
    pub(super) trials: Vec<Trial>,
    /// What the run told its user, each sentence once.
    pub(super) notices: Vec<String>,
    /// What could not be read, in the order of paths.
    pub(super) problems: Vec<Problem>,
}

/// How far the run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It ended and nothing is outstanding.
    Complete,
    /// It ended early, with trials outstanding.
    Stopped,
    /// Its end is not on record: it runs, or was killed.
    Open,
}

/// A file, or a line of one, that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Problem {
    /// Relative to the run folder; a whole sentence where there is no reason beside it.
    pub(super) path: String,
    /// From 1.
    pub(super) line: Option<usize>,
    pub(super) reason: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(formatter, "{} line {line}: {}", self.path, self.reason),
            None if self.reason.is_empty() => formatter.write_str(&self.path),
            None => write!(formatter, "{}: {}", self.path, self.reason),
        }
    }
}

/// One trial with all that its attempts left.
#[derive(Debug)]
pub(super) struct Trial {
    pub(super) id: TrialId,
    pub(super) label: String,
    pub(super) purpose: Purpose,
    pub(super) configuration: ConfigurationId,
    /// Tokens per sequence.
    pub(super) block_size: usize,
    pub(super) repeat: u32,
    pub(super) state: TrialState,
    /// The attempt that counts, from 1; 0 where there is none.
    pub(super) attempt: u32,
    /// Last lines of stderr, as the run loop kept them.
    pub(super) stderr_tail: String,
    /// Of the attempt that counts; of trainings only.
    pub(super) result: Option<TrialResult>,
    /// Up to the attempt that counts; of trainings only.
    pub(super) series: Series,
    /// Largest block size of the model, where the request says.
    pub(super) positions: Option<usize>,
}

/// How far a trial is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum TrialState {
    /// It ended so.
    Ended(TrialOutcome),
    /// An attempt began and its end is not on record.
    Open,
    /// Its folder is there and no attempt began.
    NotStarted,
}

/// What a child said over time; `elapsed` is in seconds since the trial's first sign of life.
#[derive(Debug, Default)]
pub(super) struct Series {
    pub(super) steps: Vec<(f64, Step)>,
    pub(super) evaluations: Vec<(u64, Evaluation)>,
    pub(super) warnings: Vec<String>,
    pub(super) telemetry: Vec<Sample>,
}

/// Reads everything.
///
/// # Errors
/// The manifest cannot be read or is of a newer format; the folder cannot be listed.
pub(super) fn read(folder: &RunFolder) -> Result<RunContents, StoreError> {
    let manifest = folder.read_manifest()?;
    let state = RunState::read(folder)?;
    let mut problems = Vec::new();
    for (line, reason) in state.unreadable_events {
        problems.push(Problem { path: relative(folder, &folder.events()), line: Some(line), reason: without_line(&reason) });
    }
    // The store's sentences name whole paths; a report is the same wherever the folder lies.
    let here = format!("{}/", folder.0.display());
    for sentence in state.unreadable_trials {
        problems.push(Problem { path: sentence.replace(&here, ""), line: None, reason: String::new() });
    }
    let mut notices: Vec<String> = Vec::new();
    for notice in manifest.notices.iter().chain(&state.notices) {
        if !notices.contains(notice) {
            notices.push(notice.clone());
        }
    }
    let progress = match state.exit_code {
        None => Progress::Open,
        Some(COMPLETE | TRIAL_FAILED) => Progress::Complete,
        Some(_) => Progress::Stopped,
    };

    let listed: Vec<store::TrialState> = state.trials.into_values().collect();
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, NonZero::get).min(listed.len().max(1));
    let mut read: Vec<(usize, Trial, Vec<Problem>)> = std::thread::scope(|scope| {
        let work = || {
            let mut done = Vec::new();
            while let Some((index, trial)) = {
                let index = next.fetch_add(1, Ordering::Relaxed);
                listed.get(index).map(|trial| (index, trial))
            } {
                let mut problems = Vec::new();
                let trial = read_trial(folder, trial, &mut problems);
                done.push((index, trial, problems));
            }
            done
        };
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    read.sort_by_key(|(index, ..)| *index);
    let mut trials = Vec::with_capacity(read.len());
    for (_, trial, trial_problems) in read {
        trials.push(trial);
        problems.extend(trial_problems);
    }
    problems.sort();
    Ok(RunContents { manifest, progress, searches: state.block_sizes, trials, notices, problems })
}

/// Exit codes of a `sweep run` that left nothing outstanding.
const COMPLETE: u8 = 0;
const TRIAL_FAILED: u8 = 100;

fn read_trial(folder: &RunFolder, trial: &store::TrialState, problems: &mut Vec<Problem>) -> Trial {
    let record = &trial.record;
    let counts = trial.ended.as_ref().map_or(trial.attempts, |ended| ended.attempt);
    let mut series = Series::default();
    let mut result: Option<TrialResult> = None;
    let mut positions = None;
    let mut ended: Option<AttemptRecord> = trial.ended.clone();
    if record.purpose == Purpose::Train && counts > 0 {
        let mut began: Option<Timestamp> = None;
        for attempt in 1..=counts {
            read_attempt(folder, &folder.attempt(&record.id, attempt), &mut began, &mut series, problems);
        }
        let attempt = folder.attempt(&record.id, counts);
        result = read_optional(folder, &attempt.result(), problems);
        if ended.is_none() {
            // The store calls a training whose numbers are gone unfinished, so that it runs again; the report says how it ended all the same.
            ended = read_optional(folder, &attempt.outcome(), problems);
        }
        let request: Option<TrialRequest> = read_optional(folder, &attempt.request(), problems);
        positions = request.map(|request| request.model.architecture.positions());
    }
    Trial {
        id: record.id.clone(),
        label: record.label.clone(),
        purpose: record.purpose,
        configuration: record.configuration.clone(),
        block_size: record.block_size,
        repeat: record.repeat,
        state: match &ended {
            Some(ended) => TrialState::Ended(ended.outcome.clone()),
            None if trial.attempts == 0 => TrialState::NotStarted,
            None => TrialState::Open,
        },
        attempt: counts,
        stderr_tail: ended.as_ref().map(|ended| ended.stderr_tail.clone()).unwrap_or_default(),
        result,
        series,
        positions,
    }
}

fn read_attempt(folder: &RunFolder, attempt: &AttemptFolder, began: &mut Option<Timestamp>, series: &mut Series, problems: &mut Vec<Problem>) {
    let messages = read_lines::<Message>(folder, &attempt.messages(), problems);
    let offset = match (messages.first(), &began) {
        (Some(first), Some(began)) => first.at.seconds_since(*began).max(0.0),
        _ => 0.0,
    };
    if began.is_none() {
        *began = messages.first().map(|message| message.at);
    }
    for message in messages {
        let elapsed = began.map_or(0.0, |began| message.at.seconds_since(began));
        match message.kind {
            MessageKind::Step(step) => {
                // An attempt that goes on from a checkpoint repeats the steps after it.
                while series.steps.last().is_some_and(|(_, last)| last.step >= step.step) {
                    series.steps.pop();
                }
                series.steps.push((elapsed, step));
            }
            MessageKind::Eval { step, evaluation } => {
                series.evaluations.retain(|(at, known)| *at < step || (*at == step && known.block_size != evaluation.block_size));
                series.evaluations.push((step, evaluation));
            }
            MessageKind::Warning { message } if !series.warnings.contains(&message) => series.warnings.push(message),
            MessageKind::Warning { .. }
            | MessageKind::Started { .. }
            | MessageKind::Phase { .. }
            | MessageKind::Checkpoint { .. }
            | MessageKind::Oom(_) => {}
        }
    }
    let path = attempt.telemetry();
    match fs::read(&path) {
        Ok(contents) => {
            let (samples, unreadable) = telemetry::parse(&String::from_utf8_lossy(&contents));
            series.telemetry.extend(samples.into_iter().map(|sample| Sample { elapsed: sample.elapsed + offset, ..sample }));
            problems.extend(unreadable.into_iter().map(|(line, reason)| Problem { path: relative(folder, &path), line: Some(line), reason }));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => problems.push(Problem { path: relative(folder, &path), line: None, reason: error.to_string() }),
    }
}

/// A path for the reader: relative to the run folder, so that a report is the same wherever the folder lies.
fn relative(folder: &RunFolder, path: &Path) -> String {
    path.strip_prefix(&folder.0).unwrap_or(path).display().to_string()
}

/// Reads a JSON file that need not be there; one that is malformed is noted and counts as absent.
fn read_optional<T: DeserializeOwned>(folder: &RunFolder, path: &Path, problems: &mut Vec<Problem>) -> Option<T> {
    match store::read_json(path) {
        Ok(value) => Some(value),
        Err(StoreError::Io { error, .. }) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => None,
        Err(error) => {
            let reason = match error {
                StoreError::Io { error, .. } => error.to_string(),
                StoreError::Malformed { reason, .. } => reason,
                newer @ StoreError::NewerFormat { .. } => newer.to_string(),
            };
            problems.push(Problem { path: relative(folder, path), line: None, reason });
            None
        }
    }
}

/// Reads a JSON-lines file that need not be there; unreadable lines are noted, kinds that a newer writer added are skipped.
fn read_lines<T: DeserializeOwned>(folder: &RunFolder, path: &Path, problems: &mut Vec<Problem>) -> Vec<T> {
    match store::read_json_lines(path) {
        Ok(contents) => {
            problems.extend(contents.unreadable.into_iter().map(|(line, reason)| Problem {
                path: relative(folder, path),
                line: Some(line),
                reason: without_line(&reason),
            }));
            contents.records
        }
        Err(error) => {
            let reason = match error {
                StoreError::Io { error, .. } => error.to_string(),
                other => other.to_string(),
            };
            problems.push(Problem { path: relative(folder, path), line: None, reason });
            Vec::new()
        }
    }
}

/// serde_json counts lines inside the record, which is always the first: `at line 1 column 7` would contradict the line of the file.
fn without_line(reason: &str) -> String {
    reason.replace(" at line 1 column ", " at column ")
}
