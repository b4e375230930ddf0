//! The loop around the dispatcher: takes inputs from the one inbox, writes events down, carries commands out.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::dispatcher::{Command, Dispatcher, Finish, Input, SpawnOrder, Step, is_expected};
use super::executor::Executor;
use super::launcher::{Launch, Launcher, LauncherOptions};
use super::processes;
use super::slurm::Slurm;
use super::work::{Configuration, ConfigurationTrials, Work};
use crate::event::{Event, EventKind};
use crate::protocol::{CheckpointRequest, PROTOCOL, Placement, Timestamp, TrialRequest};
use crate::store::{AttemptRecord, CHECKPOINTS, JsonLines, MODEL, RunFolder, StoreError, TrialRecord, io_error, replace_json, sync, write_json};
use crate::trial::{AttemptEnding, Purpose, TrialId, TrialOutcome};

/// How often time is looked at.
const TICK: Duration = Duration::from_millis(50);

/// How a run ended.
#[derive(Debug)]
pub struct RunSummary {
    /// How.
    pub finish: Finish,
    /// Trials that failed, those of an earlier `sweep run` on the same folder among them, in row order.
    pub failed: Vec<FailedTrial>,
    /// Trials that ended well.
    pub done: usize,
    /// Trials that have not run.
    pub outstanding: usize,
}

/// A trial that failed.
#[derive(Clone, Debug, PartialEq)]
pub struct FailedTrial {
    /// Which trial.
    pub id: TrialId,
    /// Label of the first row it serves.
    pub label: String,
    /// What it was for.
    pub purpose: Purpose,
    /// Tokens per sequence.
    pub block_size: usize,
    /// How it ended.
    pub outcome: TrialOutcome,
}

/// Reads events as they happen.
pub trait Observer {
    /// Takes the next event.
    fn event(&mut self, event: &Event);
    /// Time passes.
    fn tick(&mut self) {}
}

/// Runs `work` in `folder`, which holds its manifest, and shows every event to `observer`. `signals` says whether INT, TERM and HUP are taken as a wish to
/// stop.
///
/// # Errors
/// The run could not begin: `events.jsonl` cannot be written, or signals cannot be watched. Later failures of the results folder end the run in an
/// orderly way and stand in the summary.
pub fn run(
    mut work: Work,
    folder: &RunFolder,
    launcher: impl Into<LauncherOptions>,
    signals: bool,
    observer: &mut dyn Observer,
) -> Result<RunSummary, StoreError> {
    // Where `sweep` and its supervisors were all killed, a trial may have left something behind.
    let marked = std::path::absolute(&folder.0).ok().filter(|_| work.resumed);
    let left_behind = marked.map_or(0, |folder| processes::kill_marked(&folder, None));
    if left_behind > 0 {
        work.remarks.push(format!("Processes that the last sweep on this run left behind were ended: {left_behind}."));
    }
    let (inbox, inputs) = mpsc::channel();
    let signals = if signals { Some(watch_signals(inbox.clone())?) } else { None };
    let mut run = RunLoop {
        events: JsonLines::append_to(&folder.events())?,
        dispatcher: Dispatcher::new(work),
        launcher: match launcher.into() {
            LauncherOptions::Local(options) => Box::new(Executor::new(options, inbox)),
            LauncherOptions::Slurm(options) => Box::new(Slurm::new(*options, folder, inbox)),
        },
        folder,
        observer,
        assigned: BTreeMap::new(),
        store_failed: false,
        stop_requested: false,
        pending: VecDeque::from([Input::Start]),
    };
    let began = Instant::now();
    let mut ticked = began;
    let ended = loop {
        let input = match run.pending.pop_front() {
            Some(input) => input,
            // Children that never stop talking must not stop the clock.
            None if ticked.elapsed() >= TICK => Input::Tick,
            None => run.next_input(&inputs, TICK.saturating_sub(ticked.elapsed())),
        };
        if matches!(input, Input::Tick) {
            ticked = Instant::now();
            run.observer.tick();
            run.launcher.flush();
        }
        let step = run.dispatcher.step(input, began.elapsed());
        if let Some(ended) = run.carry_out(step) {
            break ended;
        }
    };
    if !run.store_failed {
        // The last record is no more precious than the trials' own folders, which are on disk by now.
        drop(run.events.sync());
    }
    let failed = failed_trials(&run.dispatcher);
    run.launcher.join();
    if let Some((signals, over)) = signals {
        // The user who has asked for the end may still be asking: that must not cost the exit code.
        over.store(!run.stop_requested, Ordering::Relaxed);
        signals.close();
    }
    Ok(RunSummary { failed, ..ended })
}

/// Hands signals to the inbox, until the flag that is returned is set: from then on they do what they do to any program, so that the report of a run can be
/// interrupted.
fn watch_signals(inbox: Sender<Input>) -> Result<(signal_hook::iterator::Handle, Arc<AtomicBool>), StoreError> {
    let watched = [SIGINT, SIGTERM, SIGHUP];
    let over = Arc::new(AtomicBool::new(false));
    for signal in watched {
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&over)).map_err(io_error("watch signals of", "this process".as_ref()))?;
    }
    let mut signals = Signals::new(watched).map_err(io_error("watch signals of", "this process".as_ref()))?;
    let handle = signals.handle();
    thread::spawn(move || {
        for _ in signals.forever() {
            if inbox.send(Input::Signal).is_err() {
                return;
            }
        }
    });
    Ok((handle, over))
}

/// How the ranks of a configuration are spread over machines, where they are.
fn placement(work: &Work, configuration: &Configuration) -> Option<Placement> {
    let nodes = work.cluster.map_or(1, |cluster| cluster.nodes);
    (nodes > 1).then(|| Placement { nodes, ranks_per_node: configuration.settings.device.world_size.div_ceil(nodes) })
}

/// Trials that failed, in row order.
fn failed_trials(dispatcher: &Dispatcher) -> Vec<FailedTrial> {
    let mut failed = Vec::new();
    for configuration in &dispatcher.work().configurations {
        let searched = matches!(configuration.trials, ConfigurationTrials::Search(_));
        for trial in configuration.possible_trials() {
            if let Some(outcome) = dispatcher.outcome(&trial.id).filter(|outcome| !is_expected(trial.purpose, searched, outcome)) {
                let (label, outcome) = (configuration.label.clone(), outcome.clone());
                failed.push(FailedTrial { id: trial.id, label, purpose: trial.purpose, block_size: trial.block_size, outcome });
            }
        }
    }
    failed
}

struct RunLoop<'r> {
    dispatcher: Dispatcher,
    launcher: Box<dyn Launcher>,
    events: JsonLines,
    folder: &'r RunFolder,
    observer: &'r mut dyn Observer,
    /// When the running attempts were assigned.
    assigned: BTreeMap<TrialId, Timestamp>,
    /// Whether the results folder took something not: nothing more is written then, so that what is there stays whole.
    store_failed: bool,
    /// Whether the user has asked for the end.
    stop_requested: bool,
    /// Inputs that follow from carrying commands out; they go before the inbox.
    pending: VecDeque<Input>,
}

impl RunLoop<'_> {
    /// The next input of the inbox; a tick where none comes in time. What is to be started is held back until the inbox is empty or time has passed, so that
    /// it goes off together.
    fn next_input(&mut self, inputs: &Receiver<Input>, timeout: Duration) -> Input {
        match inputs.try_recv() {
            Ok(input) => input,
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => {
                self.launcher.flush();
                inputs.recv_timeout(timeout).unwrap_or(Input::Tick)
            }
        }
    }

    /// Writes events down, shows them, and carries commands out, in this order: an attempt is on record before its process exists. Returns the summary, but
    /// for the failed trials, when the run is over.
    fn carry_out(&mut self, step: Step) -> Option<RunSummary> {
        let (mut done, mut outstanding) = (0, 0);
        let boundary = step.events.iter().any(|kind| matches!(kind, EventKind::TrialStarted { .. } | EventKind::TrialEnded { .. }));
        for kind in step.events {
            if let EventKind::RunEnded { done: ended_well, outstanding: not_run, .. } = &kind {
                (done, outstanding) = (*ended_well, *not_run);
            }
            self.stop_requested |= matches!(kind, EventKind::StopRequested { .. });
            let event = Event { at: Timestamp::now(), kind };
            self.write_down(&event);
            self.observer.event(&event);
        }
        if boundary
            && !self.store_failed
            && let Err(error) = self.events.sync()
        {
            self.store_failure(&error);
        }
        for command in step.commands {
            match command {
                Command::Spawn(order) => self.spawn(order),
                Command::Examine { trial, last_words } => self.launcher.examine(&trial, &last_words),
                Command::Terminate(trial) => self.launcher.terminate(&trial),
                Command::Kill(trial) => self.launcher.kill(&trial),
                Command::Finish(finish) => return Some(RunSummary { finish, failed: Vec::new(), done, outstanding }),
            }
        }
        None
    }

    fn write_down(&mut self, event: &Event) {
        if self.store_failed {
            return;
        }
        let written = match &event.kind {
            EventKind::TrialProgress { .. } => return,
            EventKind::TrialStarted { trial, .. } => {
                self.assigned.insert(trial.clone(), event.at);
                self.events.push(event)
            }
            EventKind::TrialEnded { trial, attempt, outcome, seconds, stderr_tail, .. } => {
                let record = AttemptRecord {
                    trial: trial.clone(),
                    attempt: *attempt,
                    started_at: self.assigned.remove(trial).unwrap_or(event.at),
                    seconds: *seconds,
                    outcome: outcome.clone(),
                    stderr_tail: stderr_tail.clone(),
                };
                keep(self.folder, trial, &record).and_then(|()| self.events.push(event))
            }
            _ => self.events.push(event),
        };
        if let Err(error) = written {
            self.store_failure(&error);
        }
    }

    fn store_failure(&mut self, error: &StoreError) {
        self.store_failed = true;
        self.pending.push_back(Input::StoreFailed { reason: error.to_string() });
    }

    fn spawn(&mut self, order: SpawnOrder) {
        let attempt = self.folder.attempt(&order.trial.id, order.attempt);
        let prepared = if self.store_failed { Err(None) } else { self.prepare(&order).map_err(Some) };
        match prepared {
            Ok(()) => {
                let device = self.dispatcher.work().configurations[order.configuration].settings.device.clone();
                let trial = order.trial.id;
                self.launcher.spawn(Launch {
                    trial: trial.clone(),
                    attempt: order.attempt,
                    folder: attempt,
                    place: order.place,
                    ranks: device.world_size,
                    device: device.kind,
                });
                // What says which trial this is reaches the disk while the child runs.
                let paths = [self.folder.trial_record(&trial), self.folder.trial(&trial), self.folder.trials()];
                if let Err(error) = paths.iter().try_for_each(|path| sync(path)) {
                    self.store_failure(&error);
                }
            }
            Err(error) => {
                if let Some(error) = &error {
                    self.store_failure(error);
                }
                let reason = error.map_or_else(|| "the results folder cannot be written".to_owned(), |error| error.to_string());
                let ending = AttemptEnding { spawn_error: Some(reason), ..AttemptEnding::default() };
                self.pending.push_back(Input::Ended { trial: order.trial.id, attempt: order.attempt, ending: Box::new(ending) });
            }
        }
    }

    /// Writes the folder of an attempt and what the child is asked.
    fn prepare(&self, order: &SpawnOrder) -> Result<(), StoreError> {
        let work = self.dispatcher.work();
        let configuration = &work.configurations[order.configuration];
        let trial = &order.trial;
        let attempt = self.folder.attempt(&trial.id, order.attempt);
        fs::create_dir_all(&attempt.0).map_err(io_error("create", &attempt.0))?;
        // Also where there is one: it may be damaged.
        let contents = TrialRecord {
            id: trial.id.clone(),
            label: configuration.label.clone(),
            purpose: trial.purpose,
            configuration: configuration.id.clone(),
            block_size: trial.block_size,
            repeat: trial.repeat,
            settings: configuration.settings.clone(),
        };
        replace_json(&self.folder.trial_record(&trial.id), &contents)?;
        if order.afresh {
            let checkpoints = self.folder.checkpoints(&trial.id);
            match fs::remove_dir_all(&checkpoints) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_error("remove", &checkpoints)(error)),
                _ => {}
            }
        }
        let request = TrialRequest {
            protocol: PROTOCOL,
            trial: trial.id.clone(),
            label: configuration.label.clone(),
            purpose: trial.purpose,
            probe_steps: (trial.purpose == Purpose::Probe).then_some(work.probe_steps),
            block_size: trial.block_size,
            seed: configuration.settings.train.seed.wrapping_add(u64::from(trial.repeat)),
            settings: configuration.settings.clone(),
            model: configuration.model.clone(),
            data: configuration.data.clone(),
            cores: order.place.cores.clone(),
            placement: placement(work, configuration),
            // A probe is over too soon to be worth saving.
            checkpoint: (trial.purpose == Purpose::Train).then(|| CheckpointRequest {
                folder: Path::new("..").join(CHECKPOINTS),
                save_steps: work.checkpoint.save_steps,
                save_total_limit: work.checkpoint.save_total_limit,
            }),
            stall_timeout_seconds: Some(work.limits.stall_timeout.as_secs_f64()),
            save_model: (trial.purpose == Purpose::Train && work.checkpoint.save_model).then(|| Path::new("..").join(MODEL)),
        };
        replace_json(&attempt.request(), &request)
    }
}

/// Puts the end of an attempt on disk, and with it what it said.
fn keep(folder: &RunFolder, trial: &TrialId, record: &AttemptRecord) -> Result<(), StoreError> {
    let attempt = folder.attempt(trial, record.attempt);
    if attempt.messages().exists() {
        sync(&attempt.messages())?;
    }
    write_json(&attempt.outcome(), record)
}
