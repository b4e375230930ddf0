//! The thread that submits, asks the queue, follows the files that tasks write, and says how attempts ended.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::adopt::Found;
use super::batch::{Batch, ExitRecord};
use super::client::{self, ClientError, Queue};
use super::script::{self, Array, Needs};
use super::{SlurmOptions, needs};
use crate::protocol::MessageKind;
use crate::run::dispatcher::Input;
use crate::run::launcher::Launch;
use crate::run::log_end;
use crate::run::messages::MessageTail;
use crate::spec::settings::DeviceKind;
use crate::store::{AttemptFolder, RunFolder, read_json};
use crate::trial::{AttemptEnding, EndedJob, JobEnd, JobState, TrialId, child_exit};

/// Most tasks of one array: SLURM's own default limit is 1001.
const MOST_TASKS: usize = 1000;
/// Most ids in one call.
const MOST_IDS: usize = 500;
/// How often the files of running tasks are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How long after it was killed a job may still be in the queue before it is left to itself.
const LAST_WAIT: Duration = Duration::from_secs(60);

/// What the run loop asks.
#[derive(Debug)]
pub(super) enum Order {
    /// Attempts to submit, together where they need the same.
    Submit(Vec<Launch>),
    /// An attempt to end.
    End { trial: TrialId, at_once: bool },
}

/// An attempt in the queue or on a node.
#[derive(Debug)]
struct Job {
    trial: TrialId,
    attempt: u32,
    folder: AttemptFolder,
    batch: Batch,
    /// Its place in the array.
    task: usize,
    /// `<array>_<task>`
    id: String,
    /// The last that the queue said of it.
    state: Option<JobState>,
    began: Option<Instant>,
    /// Since when it has ended according to the queue.
    ended: Option<Instant>,
    /// Since when the queue does not know it.
    missing: Option<Instant>,
    /// Whether we asked it to end, and since when it was to be killed.
    cancelled: bool,
    killed: Option<Instant>,
    tail: MessageTail,
    /// What is known so far.
    ending: AttemptEnding,
}

impl Job {
    fn new(trial: TrialId, attempt: u32, folder: AttemptFolder, batch: Batch, task: usize, array: &str) -> Self {
        Self {
            id: format!("{array}_{task}"),
            state: None,
            began: None,
            ended: None,
            missing: None,
            cancelled: false,
            killed: None,
            tail: MessageTail::new(&folder.messages()),
            ending: AttemptEnding::default(),
            trial,
            attempt,
            folder,
            batch,
            task,
        }
    }
}

pub(super) struct Watcher {
    options: SlurmOptions,
    run: RunFolder,
    inbox: Sender<Input>,
    jobs: BTreeMap<TrialId, Job>,
    /// When the queue was asked last, and when it last answered.
    asked: Option<Instant>,
    answered: Instant,
    looked: Option<Instant>,
}

impl Watcher {
    pub(super) fn new(options: SlurmOptions, run: RunFolder, inbox: Sender<Input>) -> Self {
        Self { options, run, inbox, jobs: BTreeMap::new(), asked: None, answered: Instant::now(), looked: None }
    }

    /// Works until the run loop lets go of it. A defect here must not leave the run waiting for ever.
    pub(super) fn run(mut self, orders: &Receiver<Order>) {
        if catch_unwind(AssertUnwindSafe(|| self.work(orders))).is_err() {
            let reason = "the thread that watched its SLURM job panicked";
            for job in std::mem::take(&mut self.jobs).into_values() {
                self.end_without_word(&job.trial, job.attempt, reason);
            }
            for order in orders {
                if let Order::Submit(launches) = order {
                    launches.iter().for_each(|launch| self.end_without_word(&launch.trial, launch.attempt, reason));
                }
            }
        }
    }

    fn work(&mut self, orders: &Receiver<Order>) {
        for found in std::mem::take(&mut self.options.found) {
            let Found { trial, attempt, batch, task, array } = found;
            let folder = self.run.attempt(&trial, attempt);
            self.follow(Job::new(trial, attempt, folder, batch, task, &array));
        }
        let look = LOOK.min(self.options.settings.poll_interval);
        loop {
            let mut ends = Vec::new();
            let mut order = match orders.recv_timeout(look) {
                Ok(order) => Some(order),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            while let Some(this) = order.take() {
                match this {
                    Order::Submit(launches) => self.submit(launches),
                    Order::End { trial, at_once } => ends.push((trial, at_once)),
                }
                order = orders.try_recv().ok();
            }
            self.end(&ends);
            let now = Instant::now();
            if !self.jobs.is_empty() && self.asked.is_none_or(|asked| now.duration_since(asked) >= self.options.settings.poll_interval) {
                self.ask();
            }
            if self.looked.is_none_or(|looked| now.duration_since(looked) >= look) {
                self.look();
            }
        }
    }

    fn say(&self, input: Input) {
        // Where nobody listens any more the run is over.
        drop(self.inbox.send(input));
    }

    fn notice(&self, text: String) {
        self.say(Input::Notice(text));
    }

    fn end_without_word(&self, trial: &TrialId, attempt: u32, reason: &str) {
        let ending = AttemptEnding { spawn_error: Some(reason.to_owned()), ..AttemptEnding::default() };
        self.say(Input::Ended { trial: trial.clone(), attempt, ending: Box::new(ending) });
    }

    fn follow(&mut self, job: Job) {
        self.say(Input::Queued { trial: job.trial.clone(), attempt: job.attempt });
        self.jobs.insert(job.trial.clone(), job);
    }

    /// Submits attempts, those that need the same as one array.
    fn submit(&mut self, launches: Vec<Launch>) {
        let mut groups: BTreeMap<Needs, Vec<Launch>> = BTreeMap::new();
        for launch in launches {
            let needs = needs(&self.options.settings, launch.ranks, launch.device == DeviceKind::Cuda);
            groups.entry(needs).or_default().push(launch);
        }
        for (needs, group) in groups {
            for part in group.chunks(MOST_TASKS) {
                match self.submit_array(needs, part) {
                    Ok((batch, array)) => {
                        for (index, launch) in part.iter().enumerate() {
                            let Launch { trial, attempt, folder, .. } = launch.clone();
                            self.follow(Job::new(trial, attempt, folder, batch.clone(), index + 1, &array));
                        }
                        let trials = if part.len() == 1 { "1 trial".to_owned() } else { format!("{} trials", part.len()) };
                        self.notice(format!("SLURM job {array} holds {trials}."));
                    }
                    Err(reason) => {
                        let reason = format!("the trial cannot be submitted: {reason}");
                        part.iter().for_each(|launch| self.end_without_word(&launch.trial, launch.attempt, &reason));
                    }
                }
            }
        }
    }

    fn submit_array(&mut self, needs: Needs, launches: &[Launch]) -> Result<(Batch, String), String> {
        let batch = Batch::create(&self.run).map_err(|error| error.to_string())?;
        let array = Array { name: &batch.name, tasks: launches.len(), needs, folder: &batch.folder, program: &self.options.program };
        let script = script::script(&array, &self.options.settings);
        let attempts: Vec<AttemptFolder> = launches.iter().map(|launch| self.run.attempt(&launch.trial, launch.attempt)).collect();
        batch.prepare(&script, &attempts).map_err(|error| error.to_string())?;
        let job = match client::sbatch(&batch.script()) {
            Ok(job) => job,
            // Its answer may have been lost on the way after the job was taken.
            Err(error) => {
                let queue = if error.may_pass() { client::squeue().ok() } else { None };
                queue.and_then(|queue| array_of(&queue, &batch.name)).ok_or_else(|| error.to_string())?
            }
        };
        batch.submitted(&job).map_err(|error| error.to_string())?;
        // Soon enough to see short trials begin.
        self.asked = Some(Instant::now());
        Ok((batch, job))
    }

    /// Takes attempts out of the queue or off their nodes.
    fn end(&mut self, ends: &[(TrialId, bool)]) {
        for at_once in [false, true] {
            let mut ids = Vec::new();
            for (trial, _) in ends.iter().filter(|(_, this)| *this == at_once) {
                let Some(job) = self.jobs.get_mut(trial) else { continue };
                job.cancelled = true;
                if at_once {
                    job.killed.get_or_insert_with(Instant::now);
                }
                ids.push(job.id.clone());
            }
            for part in ids.chunks(MOST_IDS) {
                if let Err(error) = client::scancel(part, at_once) {
                    self.notice(format!("Jobs could not be cancelled: {error}. `scancel {}` ends what still runs.", part.join(" ")));
                }
            }
            if !ids.is_empty() {
                self.asked = None;
            }
        }
    }

    /// Asks the queue about all jobs at once.
    fn ask(&mut self) {
        self.asked = Some(Instant::now());
        match client::squeue() {
            Ok(queue) => {
                self.answered = Instant::now();
                self.compare(&queue);
            }
            Err(error) => self.notice(format!("The queue cannot be asked: {error}. Jobs go on; how they end is read from their files.")),
        }
    }

    fn compare(&mut self, queue: &Queue) {
        let mut inputs = Vec::new();
        for job in self.jobs.values_mut() {
            let (trial, attempt) = (job.trial.clone(), job.attempt);
            let Some(queued) = queue.get(&job.id) else {
                job.missing.get_or_insert_with(Instant::now);
                continue;
            };
            job.missing = None;
            let had_begun = job.began.is_some();
            match &queued.state {
                JobState::Pending => {
                    job.ended = None;
                    if had_begun {
                        job.began = None;
                        inputs.push(Input::Notice(format!("SLURM job {} is back in the queue: {}", job.id, queued.reason)));
                        inputs.push(Input::Queued { trial, attempt });
                    }
                    if queued.reason.to_lowercase().contains("held") {
                        let text = format!("SLURM job {id} is held: {}. `scontrol release {id}` lets it go.", queued.reason, id = job.id);
                        inputs.push(Input::Notice(text));
                    }
                }
                JobState::Running => {
                    job.ended = None;
                    if !had_begun {
                        job.began = Some(Instant::now());
                        inputs.push(Input::Began { trial, attempt });
                    }
                }
                JobState::Completing => {}
                JobState::Ended(_) => {
                    job.ended.get_or_insert_with(Instant::now);
                }
            }
            job.state = Some(queued.state.clone());
        }
        inputs.into_iter().for_each(|input| self.say(input));
    }

    /// Looks at the files of jobs that run, have ended, or are nowhere to be seen; what waits has written none.
    fn look(&mut self) {
        self.looked = Some(Instant::now());
        let silent = self.answered.elapsed() > self.options.settings.poll_interval * 2;
        let waits = |job: &Job| matches!(job.state, None | Some(JobState::Pending)) && job.missing.is_none() && !silent && job.killed.is_none();
        let trials: Vec<TrialId> = self.jobs.values().filter(|job| !waits(job)).map(|job| job.trial.clone()).collect();
        for trial in trials {
            let Some(mut job) = self.jobs.remove(&trial) else { continue };
            self.read_messages(&mut job);
            match self.last_word(&mut job) {
                Some(end) => self.ended(job, end),
                None => {
                    self.jobs.insert(trial, job);
                }
            }
        }
    }

    fn read_messages(&self, job: &mut Job) {
        for message in job.tail.read_new() {
            // The queue is asked seldom: a message says earlier that a trial runs.
            if job.began.is_none() && job.ended.is_none() {
                job.began = Some(Instant::now());
                self.say(Input::Began { trial: job.trial.clone(), attempt: job.attempt });
            }
            job.ending.started = true;
            match &message.kind {
                MessageKind::Phase { phase } => job.ending.last_phase = Some(phase.clone()),
                MessageKind::Oom(details) => job.ending.out_of_memory = Some(details.clone()),
                _ => {}
            }
            self.say(Input::Message { trial: job.trial.clone(), attempt: job.attempt, message });
        }
    }

    /// How the job of an attempt ended, once there is nothing more to wait for.
    fn last_word(&self, job: &mut Job) -> Option<JobEnd> {
        let delay = self.options.settings.file_delay;
        let waited = |since: Option<Instant>| since.is_some_and(|since| since.elapsed() >= delay);
        let exit = ExitRecord::read(&job.folder);
        let state_of_end = || match &job.state {
            Some(JobState::Ended(end)) => Some(end.clone()),
            _ => None,
        };
        // A child that ended by itself has had the last word, unless it asks to be run again: its job may come back.
        if exit.is_some_and(|exit| exit.is_final) {
            return Some(state_of_end().unwrap_or(JobEnd::Completed));
        }
        if let Some(end) = state_of_end() {
            let said_all = exit.is_some() || waited(job.ended) || (job.cancelled && end == JobEnd::Cancelled);
            return said_all.then_some(end);
        }
        if waited(job.missing) && self.answered > job.missing.unwrap_or(self.answered) {
            return Some(match client::sacct(&job.id) {
                Ok(Some(JobState::Ended(end))) => end,
                // It says that the job lives where it is behind the queue.
                Ok(Some(_)) => return None,
                Ok(None) | Err(_) => JobEnd::Forgotten,
            });
        }
        if exit.is_some() && self.answered.elapsed() > delay.max(LAST_WAIT) {
            return Some(JobEnd::Forgotten);
        }
        if job.killed.is_some_and(|killed| killed.elapsed() > LAST_WAIT) {
            self.notice(format!("SLURM job {id} was cancelled and may still run; `scancel {id}` ends it.", id = job.id));
            return Some(JobEnd::Forgotten);
        }
        None
    }

    fn ended(&self, mut job: Job, end: JobEnd) {
        let exit = ExitRecord::read(&job.folder);
        // What it wrote last may have come after the last look.
        self.read_messages(&mut job);
        let mut ending = job.ending;
        (ending.exit_code, ending.signal) = exit.map_or((None, None), ExitRecord::code_and_signal);
        let watched = job.began.map(|began| began.elapsed().as_secs_f64());
        ending.seconds = exit.map(|exit| exit.seconds as f64).or(watched).unwrap_or(0.0);
        ending.result = job.folder.result().exists().then(|| read_json(&job.folder.result()).map_err(|error| error.to_string()));
        let stderr = log_end::read(&job.folder.stderr());
        ending.stderr_tail = log_end::last_lines(&stderr);
        ending.log_end = log_end::read(&job.folder.stdout()) + &stderr;
        if ending.stderr_tail.is_empty() {
            // What SLURM has to say when there was no trial yet.
            ending.stderr_tail = log_end::last_lines(&log_end::read(&job.batch.log(job.task)));
        }
        if exit.is_some_and(|exit| exit.requeue_failed) {
            self.notice(format!(
                "SLURM job {} saved its state and could not go back into the queue by itself: it is submitted again. Its log, {}, says why; without scontrol on \
                 the nodes this is so every time, and while no `sweep run` is there it waits for the next one.",
                job.id,
                job.batch.log(job.task).display()
            ));
        }
        if let Some((line, reason)) = job.tail.unreadable {
            self.notice(format!("{} line {line} cannot be read: {reason}", job.folder.messages().display()));
        }
        if ending.exit_code == Some(child_exit::CHECKPOINTED) && !matches!(job.state, Some(JobState::Ended(_))) {
            // Another attempt takes its place: it must not come back. Where it is gone already nothing is lost.
            drop::<Result<(), ClientError>>(client::scancel(std::slice::from_ref(&job.id), false));
        }
        ending.job = Some(EndedJob { id: job.id, end });
        self.say(Input::Ended { trial: job.trial, attempt: job.attempt, ending: Box::new(ending) });
    }
}

/// The array whose jobs have this name.
pub(super) fn array_of(queue: &Queue, name: &str) -> Option<String> {
    queue.iter().find(|(_, queued)| queued.name == name).and_then(|(id, _)| id.split('_').next()).map(str::to_owned)
}
