//! Runs attempts: a thread each, which starts the process, follows its messages, samples telemetry and says how it ended.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::child::{self, Exit, Handle, Process, Supervisors, TrialProgram};
use super::device_memory::Baselines;
use super::dispatcher::Input;
use super::launcher::{Launch, Launcher};
use super::leases::Place;
use super::log_end;
use super::messages::MessageTail;
use super::oom_kills::OomKills;
use super::ports::Ports;
use super::stacks;
use crate::protocol::MessageKind;
use crate::store::{AttemptFolder, read_json};
use crate::telemetry::{GpuLibrary, Recorder, Sampler};
use crate::trial::{AttemptEnding, TrialId};

/// How often a child's messages are looked for. Its end is noticed at once.
const POLL: Duration = Duration::from_millis(50);

/// Makes the samplers of an attempt from the id of its process and the GPUs that it was lent.
pub type MakeSamplers = Arc<dyn Fn(u32, &[String]) -> Vec<Box<dyn Sampler>> + Send + Sync>;

/// How processes are started and watched.
#[derive(Clone)]
pub struct ExecutorOptions {
    /// What is started.
    pub program: Arc<TrialProgram>,
    /// Time between two samples of telemetry.
    pub telemetry_interval: Duration,
    /// Whether processes are bound to the cores they were lent. Where a quota rather than a set of cores limits this process, the numbers of its cores mean
    /// nothing and only their count does.
    pub pin_cores: bool,
    /// What is sampled.
    pub samplers: MakeSamplers,
    /// What says how much memory of a GPU is in use.
    pub gpus: Option<Arc<dyn GpuLibrary>>,
}

impl std::fmt::Debug for ExecutorOptions {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ExecutorOptions").field("program", &self.program).finish_non_exhaustive()
    }
}

/// The attempts that run on this machine.
#[derive(Debug)]
pub(super) struct Executor {
    options: ExecutorOptions,
    inbox: Sender<Input>,
    shared: Arc<Shared>,
    attempts: BTreeMap<TrialId, (Arc<Handle>, JoinHandle<()>)>,
}

/// What the threads of all attempts share.
#[derive(Debug)]
struct Shared {
    supervisors: Supervisors,
    oom_kills: OomKills,
    ports: Ports,
    baselines: Baselines,
}

impl Executor {
    pub(super) fn new(options: ExecutorOptions, inbox: Sender<Input>) -> Self {
        Self {
            options,
            inbox,
            shared: Arc::new(Shared {
                supervisors: Supervisors::default(),
                oom_kills: OomKills::of_this_process(),
                ports: Ports::default(),
                baselines: Baselines::default(),
            }),
            attempts: BTreeMap::new(),
        }
    }

    /// Sends a signal to an attempt's process group, if it still runs.
    fn signal(&self, trial: &TrialId, signal: Signal) {
        if let Some((handle, _)) = self.attempts.get(trial) {
            handle.signal(signal);
        }
    }
}

impl Launcher for Executor {
    fn spawn(&mut self, launch: Launch) {
        let handle = Arc::new(Handle::default());
        let (options, inbox, shared) = (self.options.clone(), self.inbox.clone(), Arc::clone(&self.shared));
        let trial = launch.trial.clone();
        let watcher = {
            let handle = Arc::clone(&handle);
            move || {
                // A defect here must not leave the run waiting for ever. The process, if any, is ended when its owner unwinds.
                let ending = catch_unwind(AssertUnwindSafe(|| attend(&options, &launch, &shared, &handle, &inbox))).unwrap_or_else(|_| {
                    AttemptEnding { spawn_error: Some("the thread that watched it panicked".to_owned()), ..AttemptEnding::default() }
                });
                // Where nobody listens any more the run is over.
                drop(inbox.send(Input::Ended { trial: launch.trial, attempt: launch.attempt, ending: Box::new(ending) }));
            }
        };
        self.attempts.retain(|_, (_, thread)| !thread.is_finished());
        self.attempts.insert(trial, (handle, thread::spawn(watcher)));
    }

    fn examine(&mut self, trial: &TrialId, last_words: &str) {
        let Some((folder, process)) = self.attempts.get(trial).and_then(|(handle, _)| handle.examined()) else { return };
        let text = format!("{last_words}\n{}", stacks::of_family(process));
        // Evidence that cannot be kept stands in nobody's way.
        if let Err(error) = fs::write(folder.stacks(), text) {
            drop(self.inbox.send(Input::Notice(format!("What stalled trials were doing is not recorded: {}: {error}", folder.stacks().display()))));
        }
    }

    fn terminate(&mut self, trial: &TrialId) {
        self.signal(trial, Signal::TERM);
    }

    fn kill(&mut self, trial: &TrialId) {
        self.signal(trial, Signal::KILL);
    }

    /// Waits for the threads of attempts.
    fn join(self: Box<Self>) {
        for (_, thread) in self.attempts.into_values() {
            // Its panics were caught.
            drop(thread.join());
        }
    }
}

/// Runs one attempt from start to end.
fn attend(options: &ExecutorOptions, launch: &Launch, shared: &Shared, handle: &Handle, inbox: &Sender<Input>) -> AttemptEnding {
    let started = Instant::now();
    let cores = if options.pin_cores { launch.place.cores.clone() } else { Vec::new() };
    let place = Place { cores, gpus: launch.place.gpus.clone() };
    if let Some(library) = &options.gpus {
        shared.baselines.note(&place.gpus, &**library);
    }
    shared.oom_kills.take_note();
    let port = shared.ports.take();
    let mut ending = match child::spawn(&options.program, &shared.supervisors, &launch.folder, &place, port.as_ref(), handle) {
        Ok(process) => watch(options, launch, process, started, shared, inbox),
        Err(error) => AttemptEnding { spawn_error: Some(format!("the trial's process cannot be started: {error}")), ..AttemptEnding::default() },
    };
    if ending.signal == Some(Signal::KILL.as_raw()) && !handle.was_killed() {
        ending.kernel_oom_kill = shared.oom_kills.claim();
    }
    if let Some(library) = &options.gpus {
        ending.unreturned_memory = shared.baselines.unreturned(&place.gpus, &**library, thread::sleep);
    }
    if ending.exit_code != Some(0) && ending.result.is_none() {
        ending.disk_error = refusal(&launch.folder).err().map(|error| error.to_string());
    }
    ending.seconds = started.elapsed().as_secs_f64();
    ending
}

fn watch(
    options: &ExecutorOptions,
    launch: &Launch,
    mut process: Process<'_>,
    started: Instant,
    shared: &Shared,
    inbox: &Sender<Input>,
) -> AttemptEnding {
    let mut ending = AttemptEnding::default();
    let mut tail = MessageTail::new(&launch.folder.messages());
    let mut recorder =
        Recorder::create(&launch.folder.telemetry(), (options.samplers)(process.id(), &launch.place.gpus)).map_err(|error| error.to_string());
    // The first look is worth least and costs most: at a process that is still being loaded, past all others of the machine.
    let mut next_sample = options.telemetry_interval;
    let say = |input| drop(inbox.send(input));
    if let Err(error) = &recorder {
        say(Input::Notice(format!("Telemetry is not recorded: {error}")));
    }
    loop {
        let until_sample = if recorder.is_ok() { next_sample.saturating_sub(started.elapsed()) } else { POLL };
        let ended = process.wait_at_most(POLL.min(until_sample));
        for message in tail.read_new() {
            ending.started = true;
            match &message.kind {
                MessageKind::Phase { phase } => ending.last_phase = Some(phase.clone()),
                MessageKind::Oom(details) => ending.out_of_memory = Some(details.clone()),
                _ => {}
            }
            say(Input::Message { trial: launch.trial.clone(), attempt: launch.attempt, message });
        }
        if ended {
            break;
        }
        if started.elapsed() >= next_sample
            && let Ok(open) = &mut recorder
        {
            shared.oom_kills.take_note();
            match open.record(started.elapsed()) {
                Ok(reasons) => reasons.into_iter().for_each(|reason| say(Input::Notice(reason))),
                Err(error) => {
                    say(Input::Notice(format!("Telemetry is no longer recorded: {error}")));
                    recorder = Err(error.to_string());
                }
            }
            next_sample = started.elapsed() + options.telemetry_interval;
        }
    }
    let process_id = process.id();
    match process.reap() {
        Exit::Ended { code, signal, survivors } => {
            (ending.exit_code, ending.signal) = (code, signal);
            if !survivors.is_empty() {
                let ids: Vec<String> = survivors.iter().map(u32::to_string).collect();
                let what = format!("Of trial {} processes are left that do not end although they were killed: {}.", launch.trial, ids.join(", "));
                say(Input::Notice(what));
            }
        }
        Exit::Stuck => {
            let text = format!(
                "process {process_id} of the trial does not end although it was killed; it may hold its devices until the machine is restarted"
            );
            ending.spawn_error = Some(text);
        }
        Exit::SupervisorLost => ending.spawn_error = Some("the supervisor of the trial's process ended, and the trial with it".to_owned()),
    }
    if let Some((line, reason)) = tail.unreadable {
        say(Input::Notice(format!("{} line {line} cannot be read: {reason}", launch.folder.messages().display())));
    }
    ending.result = launch.folder.result().exists().then(|| read_json(&launch.folder.result()).map_err(|error| error.to_string()));
    let stderr = log_end::read(&launch.folder.stderr());
    ending.stderr_tail = log_end::last_lines(&stderr);
    ending.log_end = log_end::read(&launch.folder.stdout()) + &stderr;
    ending
}

/// Whether the attempt's folder still takes a small file. A child that finds the disk full has nowhere to say so.
fn refusal(folder: &AttemptFolder) -> io::Result<()> {
    let path = folder.0.join(".partial-probe");
    let written = fs::File::create(&path).and_then(|mut file| file.write_all(&[0; 64 << 10]).and_then(|()| file.sync_all()));
    let _ = fs::remove_file(&path);
    written.map_err(|error| io::Error::new(error.kind(), format!("cannot write {}: {error}", folder.0.display())))
}
