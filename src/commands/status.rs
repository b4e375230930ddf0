//! `sweep status`: how a run stands, from its folder alone, also while it runs.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use crate::cli::StatusArguments;
use crate::error::CommandError;
use crate::protocol::{Evaluation, Message, MessageKind, Step, Timestamp};
use crate::store::{self, ManifestRow, RunFolder, RunLock, RunManifest, RunState, StoreError, TrialState};
use crate::trial::{Purpose, TrialOutcome};
use crate::ui::{self, FailureStatus, RowStatus, Standing, StatusView};

/// Bytes read from the end of a `messages.jsonl`: enough for the last step and the evaluations after it, however long the training.
const MESSAGES_TAIL: u64 = 256 * 1024;

/// Runs the command.
///
/// # Errors
/// There is no such run, or its folder cannot be read.
pub fn status(arguments: &StatusArguments) -> Result<(), CommandError> {
    let chosen = store::choose_run(&arguments.run.results, arguments.run.run.as_deref()).map_err(unreadable)?;
    let Some(folder) = chosen else {
        let place = arguments.run.run.as_deref().unwrap_or(&arguments.run.results);
        return Err(CommandError::user(format!("there is no run in {}", place.display())).hint("`--results DIR` says where results are looked for"));
    };
    ui::print(&ui::status_text(&look(&folder).map_err(unreadable)?));
    Ok(())
}

fn unreadable(error: StoreError) -> CommandError {
    CommandError::user(error.to_string())
}

/// Everything there is to show of a run.
fn look(folder: &RunFolder) -> Result<StatusView, StoreError> {
    let manifest = folder.read_manifest()?;
    // Before the state: a run that ends in between is then shown as ended, not as cut off.
    let owned = RunLock::is_held(folder);
    let state = RunState::read(folder)?;
    let standing = match state.exit_code {
        _ if owned => Standing::Running,
        Some(code) => Standing::Ended(code),
        None => Standing::CutOff,
    };
    let until = if standing == Standing::Running { Some(Timestamp::now()) } else { state.last_event_at };
    let running = |trial: &&TrialState| owned && trial.attempts > trial.ended.as_ref().map_or(0, |ended| ended.attempt);
    let mut view = StatusView {
        sweep: manifest.sweep.clone(),
        folder: folder.0.clone(),
        standing,
        seconds: until.zip(state.started_at).map(|(until, started)| until.seconds_since(started)),
        running: state.trials.values().filter(running).count(),
        done: state.trials.values().filter(|trial| trial.outcome().is_some_and(TrialOutcome::is_result) && !failed(trial, &manifest)).count(),
        ..StatusView::default()
    };
    for row in &manifest.rows {
        view.rows.push(row_status(folder, row, &manifest, &state, owned));
    }
    for trial in state.trials.values().filter(|trial| !running(trial)) {
        view.failures.extend(failure(folder, trial, &manifest));
    }
    view.unreadable = state.unreadable_events.iter().map(|(line, reason)| format!("events.jsonl, line {line}: {reason}")).collect();
    view.unreadable.extend(state.unreadable_trials);
    view.report = Some(folder.report()).filter(|report| report.is_dir());
    Ok(view)
}

fn row_status(folder: &RunFolder, row: &ManifestRow, manifest: &RunManifest, state: &RunState, owned: bool) -> RowStatus {
    let of_row = || state.trials.values().filter(|trial| trial.record.configuration == row.configuration);
    let trainings = || of_row().filter(|trial| trial.record.purpose == Purpose::Train);
    let running = |trial: &&TrialState| owned && trial.attempts > trial.ended.as_ref().map_or(0, |ended| ended.attempt);
    let failed = |trial: &&TrialState| failed(trial, manifest);
    let done = |trial: &&TrialState| trial.outcome() == Some(&TrialOutcome::Done);
    let found = state.block_sizes.get(&row.configuration);
    // The training that says most about the row.
    let shown = trainings().find(running).or_else(|| trainings().find(done)).or_else(|| trainings().find(failed)).or_else(|| trainings().next_back());
    let label = row.row.label.clone();
    let mut status = match shown {
        Some(training) => {
            let last = LastMessages::of(&folder.attempt(&training.record.id, training.attempts).messages(), training.record.block_size);
            RowStatus {
                label,
                block_size: Some(training.record.block_size),
                steps: last.step.as_ref().map(|step| (step.step, step.steps)),
                loss: last.step.map(|step| step.loss.0),
                perplexity: last.evaluation.map(|evaluation| evaluation.perplexity.0),
                state: "",
            }
        }
        None => RowStatus { label, block_size: row.row.block_size.or(found.and_then(|found| found.block_size)), ..RowStatus::default() },
    };
    status.state = if trainings().any(|trial| running(&trial)) {
        "training"
    } else if of_row().any(|trial| running(&trial)) {
        "probing"
    } else if of_row().any(|trial| failed(&trial)) {
        "failed"
    } else if trainings().filter(done).count() >= manifest.repeats as usize {
        "done"
    } else if found.is_some_and(|found| found.block_size.is_none()) {
        "nothing fits"
    } else if of_row().next().is_some() {
        "unfinished"
    } else {
        "waiting"
    };
    status
}

/// Whether a trial failed. Running out of memory answers a search; where the block size is fixed it is a failure.
fn failed(trial: &TrialState, manifest: &RunManifest) -> bool {
    let fixed = || manifest.rows.iter().any(|row| row.configuration == trial.record.configuration && row.row.block_size.is_some());
    match trial.outcome() {
        Some(TrialOutcome::OutOfDeviceMemory { .. }) => trial.record.purpose == Purpose::Train && fixed(),
        outcome => outcome.is_some_and(TrialOutcome::is_failure),
    }
}

fn failure(folder: &RunFolder, trial: &TrialState, manifest: &RunManifest) -> Option<FailureStatus> {
    let ended = trial.ended.as_ref().filter(|_| failed(trial, manifest))?;
    let purpose = match trial.record.purpose {
        Purpose::Probe => "probe",
        Purpose::Train => "train",
    };
    Some(FailureStatus {
        what: format!("{purpose}  block {}  {}", trial.record.block_size, trial.record.label),
        reason: ended.outcome.to_string(),
        folder: folder.attempt(&trial.record.id, ended.attempt).0,
        stderr_tail: ended.stderr_tail.clone(),
    })
}

/// The newest numbers of an attempt.
#[derive(Debug, Default, PartialEq)]
struct LastMessages {
    step: Option<Step>,
    /// At the trial's own block size.
    evaluation: Option<Evaluation>,
}

impl LastMessages {
    /// Reads the end of a `messages.jsonl`; what is missing or torn is not there yet.
    fn of(path: &Path, block_size: usize) -> Self {
        let mut last = Self::default();
        let tail = read_tail(path).unwrap_or_default();
        for line in tail.split(|byte| *byte == b'\n').rev() {
            let Ok(Message { kind, .. }) = serde_json::from_slice(line) else { continue };
            match kind {
                MessageKind::Step(step) => {
                    last.step.get_or_insert(step);
                }
                MessageKind::Eval { evaluation, .. } if evaluation.block_size == block_size && last.evaluation.is_none() => {
                    last.evaluation = Some(evaluation);
                }
                _ => {}
            }
            if last.step.is_some() && last.evaluation.is_some() {
                break;
            }
        }
        last
    }
}

fn read_tail(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MESSAGES_TAIL)))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    Ok(tail)
}
