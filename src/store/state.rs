//! The state of a run, read back from its folder.
//!
//! The trials' own folders are the truth about trials: what was deleted by hand is gone, and what finished is finished even where `events.jsonl` was lost.
//! The events add what no trial's folder can say.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use super::{AttemptFolder, AttemptRecord, RunFolder, StoreError, TrialRecord, io_error, read_json, read_json_lines};
use crate::event::{Event, EventKind, LimitedBy};
use crate::protocol::{Message, MessageKind, Timestamp, TrialEnding, TrialResult};
use crate::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

/// A run as its folder tells it.
#[derive(Debug, Default)]
pub struct RunState {
    /// Every trial that has a folder.
    pub trials: BTreeMap<TrialId, TrialState>,
    /// What the searches found, the last word of each.
    pub block_sizes: BTreeMap<ConfigurationId, BlockSizeResult>,
    /// What the user was told about the results, in order.
    pub notices: Vec<String>,
    /// What the user was told about the course of the run, in order.
    pub remarks: Vec<String>,
    /// When the run began.
    pub started_at: Option<Timestamp>,
    /// When the last event was written.
    pub last_event_at: Option<Timestamp>,
    /// Exit code of the last `sweep run` on this folder; `None` while it runs, or where it was killed.
    pub exit_code: Option<u8>,
    /// Trials that ended according to `events.jsonl`, with the attempt and the outcome of the last end.
    pub ended_events: BTreeMap<TrialId, (u32, TrialOutcome)>,
    /// Line number (from 1) and reason of each line of `events.jsonl` that cannot be read.
    pub unreadable_events: Vec<(usize, String)>,
    /// Trials' folders that cannot be read, and why; the trials run again.
    pub unreadable_trials: Vec<String>,
    /// The highest attempt in each of those folders, by the folder's name, which is the trial's id.
    pub unreadable_attempts: BTreeMap<TrialId, u32>,
}

/// A trial as its folder tells it.
#[derive(Clone, Debug)]
pub struct TrialState {
    /// What it is.
    pub record: TrialRecord,
    /// The highest attempt that was begun, from 1; 0 where none was.
    pub attempts: u32,
    /// The attempt that counts: the last one that settled the trial, or else the last that ended.
    pub ended: Option<AttemptRecord>,
}

impl TrialState {
    /// How the attempt that counts ended.
    pub fn outcome(&self) -> Option<&TrialOutcome> {
        self.ended.as_ref().map(|record| &record.outcome)
    }

    /// The outcome, where it settles the trial.
    pub fn settled(&self) -> Option<&TrialOutcome> {
        self.outcome().filter(|outcome| outcome.settles_the_trial())
    }
}

/// What the search of a configuration found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizeResult {
    /// The largest block size that fits; `None` when not even the smallest candidate does.
    pub block_size: Option<usize>,
    /// What stands in the way of a larger one.
    pub limited_by: LimitedBy,
}

impl RunState {
    /// Reads the state of the run in `folder`.
    ///
    /// # Errors
    /// The folder cannot be read. What is damaged inside it is told in the state instead.
    pub fn read(folder: &RunFolder) -> Result<Self, StoreError> {
        let mut state = Self::default();
        for path in subfolders(&folder.trials())? {
            match read_trial(&path) {
                Ok(trial) => {
                    state.trials.insert(trial.record.id.clone(), trial);
                }
                Err(error) => {
                    state.unreadable_trials.push(error.to_string());
                    let id = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    let last = attempts_in(&path)?.last().map_or(0, |(number, _)| *number);
                    state.unreadable_attempts.insert(TrialId(id), last);
                }
            }
        }
        let events = read_json_lines::<Event>(&folder.events())?;
        state.unreadable_events = events.unreadable;
        for event in events.records {
            state.fold(event);
        }
        Ok(state)
    }

    fn fold(&mut self, event: Event) {
        self.started_at.get_or_insert(event.at);
        self.last_event_at = Some(event.at);
        match event.kind {
            EventKind::RunStarted { .. } => self.exit_code = None,
            EventKind::RunEnded { exit_code, .. } => self.exit_code = Some(exit_code),
            EventKind::Notice { text } => self.notices.push(text),
            EventKind::Remark { text } => self.remarks.push(text),
            EventKind::BlockSizeFound { configuration, block_size, limited_by, .. } => {
                self.block_sizes.insert(configuration, BlockSizeResult { block_size, limited_by });
            }
            EventKind::TrialEnded { trial, attempt, outcome, .. } => {
                self.ended_events.insert(trial, (attempt, outcome));
            }
            EventKind::TrialStarted { .. } | EventKind::TrialProgress { .. } | EventKind::StopRequested { .. } => {}
        }
    }
}

fn subfolders(folder: &Path) -> Result<Vec<std::path::PathBuf>, StoreError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error("read", folder)(error)),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io_error("read", folder))?;
        if entry.path().is_dir() {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// The attempts in a trial's folder by their numbers, ascending.
fn attempts_in(folder: &Path) -> Result<Vec<(u32, AttemptFolder)>, StoreError> {
    let numbered = |path: std::path::PathBuf| Some((path.file_name()?.to_str()?.strip_prefix("attempt-")?.parse().ok()?, AttemptFolder(path)));
    let mut attempts: Vec<(u32, AttemptFolder)> = subfolders(folder)?.into_iter().filter_map(numbered).collect();
    attempts.sort_by_key(|(number, _)| *number);
    Ok(attempts)
}

fn read_trial(folder: &Path) -> Result<TrialState, StoreError> {
    let record: TrialRecord = read_json(&folder.join("trial.json"))?;
    let attempts = attempts_in(folder)?;
    let mut ended: Option<AttemptRecord> = None;
    for (number, attempt) in &attempts {
        if let Some(this) = read_attempt(&record, *number, attempt)? {
            let displaces = this.outcome.settles_the_trial() || !ended.as_ref().is_some_and(|earlier| earlier.outcome.settles_the_trial());
            if displaces {
                ended = Some(this);
            }
        }
    }
    Ok(TrialState { attempts: attempts.last().map_or(0, |(number, _)| *number), record, ended })
}

/// How an attempt ended, from its own folder: as the run wrote it down, or, where the run was killed before it could, as the child did.
fn read_attempt(trial: &TrialRecord, number: u32, attempt: &AttemptFolder) -> Result<Option<AttemptRecord>, StoreError> {
    let result: Option<TrialResult> = read_json(&attempt.result()).ok();
    if attempt.outcome().exists() {
        let record: AttemptRecord = read_json(&attempt.outcome())?;
        // A training whose numbers are gone fills no row: it is run again.
        let numbers_gone = record.outcome == TrialOutcome::Done && trial.purpose == Purpose::Train && result.is_none();
        return Ok((!numbers_gone).then_some(record));
    }
    let messages = read_json_lines::<Message>(&attempt.messages())?.records;
    let outcome = match result.map(|result| result.ending) {
        Some(TrialEnding::Done) => TrialOutcome::Done,
        Some(TrialEnding::Diverged { reason }) => TrialOutcome::Diverged { reason },
        Some(TrialEnding::Failed { reason }) => TrialOutcome::Failed { reason },
        Some(TrialEnding::Checkpointed { .. }) => TrialOutcome::Preempted,
        None => match messages.last() {
            Some(Message { kind: MessageKind::Oom(details), .. }) => TrialOutcome::OutOfDeviceMemory { details: Some(details.clone()) },
            _ => return Ok(None),
        },
    };
    let started_at = messages.first().map_or_else(Timestamp::now, |message| message.at);
    let seconds = messages.last().map_or(0.0, |message| message.at.seconds_since(started_at));
    Ok(Some(AttemptRecord { trial: trial.id.clone(), attempt: number, started_at, seconds, outcome, stderr_tail: String::new() }))
}
