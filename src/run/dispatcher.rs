//! The one owner of run state. [`Dispatcher::step`] takes what happened and answers with events and commands; it has no threads, no clock and no files, so
//! that every race is a list of inputs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::leases::{Leases, Place};
use super::search::{self, Bounds, Decision, Fit};
use super::work::{ConfigurationTrials, PlannedTrial, Work};
use crate::event::{EventKind, LimitedBy};
use crate::format;
use crate::protocol::{Message, MessageKind};
use crate::trial::{AttemptEnding, EndedBy, Purpose, TrialId, TrialOutcome, UnreturnedMemory, classify};

/// Something that happened.
#[derive(Debug)]
pub enum Input {
    /// The run begins.
    Start,
    /// A child said something.
    Message {
        /// Which trial.
        trial: TrialId,
        /// Which attempt.
        attempt: u32,
        /// What it said.
        message: Message,
    },
    /// An attempt waits for its turn on a cluster, for the first time or again: its clocks stand still.
    Queued {
        /// Which trial.
        trial: TrialId,
        /// Which attempt.
        attempt: u32,
    },
    /// An attempt that waited for its turn runs.
    Began {
        /// Which trial.
        trial: TrialId,
        /// Which attempt.
        attempt: u32,
    },
    /// A sentence for the user from whoever watches an attempt.
    Notice(String),
    /// An attempt ended, or could not begin. Who ended it is the dispatcher's to know.
    Ended {
        /// Which trial.
        trial: TrialId,
        /// Which attempt.
        attempt: u32,
        /// What is known about it.
        ending: Box<AttemptEnding>,
    },
    /// Ctrl-C or TERM.
    Signal,
    /// Time has passed.
    Tick,
    /// The results folder could not be written.
    StoreFailed {
        /// What the system said, with the path.
        reason: String,
    },
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Start an attempt.
    Spawn(SpawnOrder),
    /// Record what an attempt is doing, before it is ended for doing nothing.
    Examine {
        /// Which trial.
        trial: TrialId,
        /// What it last said, in sentences.
        last_words: String,
    },
    /// Ask an attempt to end.
    Terminate(TrialId),
    /// End an attempt at once.
    Kill(TrialId),
    /// The run is over.
    Finish(Finish),
}

/// An attempt to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpawnOrder {
    /// Place of its configuration in the work.
    pub configuration: usize,
    /// Which trial.
    pub trial: PlannedTrial,
    /// Which attempt, from 1.
    pub attempt: u32,
    /// Where it may compute; it shares that with no other trial.
    pub place: Place,
    /// Whether it starts afresh, whatever checkpoints earlier attempts left.
    pub afresh: bool,
}

/// How the run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// Every selected trial is settled and none failed.
    Done,
    /// At least one trial failed, and nothing else stands in the way.
    TrialsFailed,
    /// The user or the sweep's time limit ended it with trials outstanding.
    Interrupted,
    /// The machine failed.
    Infrastructure {
        /// A sentence.
        reason: String,
    },
}

impl Finish {
    /// Exit code of `sweep run`.
    pub fn exit_code(&self) -> u8 {
        use crate::error::ErrorKind;
        match self {
            Self::Done => 0,
            Self::TrialsFailed => ErrorKind::TrialFailed.code(),
            Self::Interrupted => ErrorKind::Interrupted.code(),
            Self::Infrastructure { .. } => ErrorKind::Infrastructure.code(),
        }
    }
}

/// What follows from an input: events first, then commands, each in order.
#[derive(Debug, Default)]
pub struct Step {
    /// What happened, to be stored and shown before the commands are carried out.
    pub events: Vec<EventKind>,
    /// What to do.
    pub commands: Vec<Command>,
}

/// Why no more trials are started. A later one of higher rank replaces an earlier one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stop {
    FailFast,
    TimeLimit,
    Breaker { reason: String },
    User,
    Store { reason: String },
}

/// What is known about a trial.
#[derive(Clone, Debug, Default)]
struct TrialProgress {
    attempts: u32,
    settled: Option<TrialOutcome>,
    /// Infrastructure failures of this `sweep run`.
    infrastructure_failures: u32,
    /// Its retries are used up; the next `sweep run` tries again.
    given_up: bool,
    /// When it may be tried again.
    not_before: Duration,
    /// Its next attempt starts afresh.
    afresh: bool,
}

/// An attempt that runs.
#[derive(Debug)]
struct Running {
    configuration: usize,
    trial: PlannedTrial,
    attempt: u32,
    /// Whether it waits for its turn on a cluster.
    queued: bool,
    started: Duration,
    stepped: bool,
    last_progress: Duration,
    last_phase: Option<String>,
    /// The last step it took, and how many there are.
    last_step: Option<(u64, u64)>,
    ended_by: Option<EndedBy>,
    asked_at: Option<Duration>,
    killed: bool,
}

/// What a configuration needs next.
#[derive(Clone, Debug, Default)]
struct Need {
    /// Trials that may run now, beside each other.
    ready: Vec<PlannedTrial>,
    /// What the search found, once it has.
    found: Option<(Option<usize>, LimitedBy)>,
    /// Trials that are certain to be needed and have not ended, those in `ready` and running ones among them.
    outstanding: usize,
}

/// All state of a run.
#[derive(Debug)]
pub struct Dispatcher {
    work: Work,
    bounds: Vec<Bounds>,
    trials: BTreeMap<TrialId, TrialProgress>,
    running: BTreeMap<TrialId, Running>,
    leases: Leases,
    needs: Vec<Need>,
    /// Places of the needs that have something ready: a run of ten thousand trials must not look at all of them for each message.
    ready: BTreeSet<usize>,
    signals: u32,
    stop: Option<Stop>,
    consecutive_infrastructure_failures: u32,
    /// What watchers of attempts said; each sentence is passed on once.
    noticed: BTreeSet<String>,
    finished: bool,
}

impl Dispatcher {
    /// The state before the first input.
    pub fn new(work: Work) -> Self {
        let trials = work.known.iter().map(|(id, known)| {
            let progress =
                TrialProgress { attempts: known.attempts, settled: known.outcome.clone(), afresh: known.afresh, ..TrialProgress::default() };
            (id.clone(), progress)
        });
        let bounds = work.configurations.iter().map(|configuration| Bounds::of(&configuration.settings, &configuration.model, &configuration.data));
        let mut dispatcher = Self {
            trials: trials.collect(),
            bounds: bounds.collect(),
            running: BTreeMap::new(),
            leases: match work.cluster {
                // Its scheduler shares out what there is.
                Some(_) => Leases::elsewhere(work.limits.jobs.unwrap_or(usize::MAX)),
                None => Leases::new(&work.machine, work.limits.jobs.unwrap_or_else(|| jobs(&work))),
            },
            needs: Vec::new(),
            ready: BTreeSet::new(),
            signals: 0,
            stop: None,
            consecutive_infrastructure_failures: 0,
            noticed: BTreeSet::new(),
            finished: false,
            work,
        };
        dispatcher.adopt();
        dispatcher.needs = vec![Need::default(); dispatcher.work.configurations.len()];
        for index in 0..dispatcher.needs.len() {
            dispatcher.look_again(index);
        }
        dispatcher
    }

    /// Takes the attempts that run already, which an earlier `sweep run` started, as its own.
    fn adopt(&mut self) {
        for (index, configuration) in self.work.configurations.iter().enumerate() {
            for trial in configuration.possible_trials() {
                let Some(attempt) = self.work.adopted.get(&trial.id).copied() else { continue };
                if self.leases.take(&trial.id, configuration.demand()).is_some() {
                    let progress = self.trials.entry(trial.id.clone()).or_default();
                    progress.attempts = progress.attempts.max(attempt);
                    let running = Running { queued: true, ..Running::new(index, trial, attempt, Duration::ZERO) };
                    self.running.insert(running.trial.id.clone(), running);
                }
            }
        }
    }

    /// The work it was given.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// Whether there is nothing that may run.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.ready.is_empty()
    }

    /// Takes an input at the time `now` since the run began.
    pub fn step(&mut self, input: Input, now: Duration) -> Step {
        let mut step = Step::default();
        if self.finished {
            return step;
        }
        match input {
            Input::Start => self.start(&mut step),
            Input::Message { trial, attempt, message } => self.message(trial, attempt, message, now, &mut step),
            Input::Notice(text) => {
                if self.noticed.insert(text.clone()) {
                    step.events.push(EventKind::Notice { text });
                }
            }
            Input::Queued { trial, attempt } => self.turn(&trial, attempt, true, now),
            Input::Began { trial, attempt } => self.turn(&trial, attempt, false, now),
            Input::Ended { trial, attempt, ending } => self.ended(&trial, attempt, *ending, now, &mut step),
            Input::Signal => self.signal(now, &mut step),
            Input::Tick => self.tick(now, &mut step),
            Input::StoreFailed { reason } => self.stop(Stop::Store { reason }, now, &mut step),
        }
        self.schedule(now, &mut step);
        self.stop_if_nothing_fits(now, &mut step);
        self.finish_if_over(&mut step);
        step
    }

    fn start(&mut self, step: &mut Step) {
        step.events.push(EventKind::RunStarted {
            sweep: self.work.sweep.clone(),
            run: self.work.run.clone(),
            configurations: self.work.configurations.len(),
            resumed: self.work.resumed,
        });
        step.events.append(&mut self.work.recovered);
        step.events.extend(self.work.remarks.iter().map(|text| EventKind::Remark { text: text.clone() }));
        step.events.extend(self.work.notices.iter().map(|text| EventKind::Notice { text: text.clone() }));
        if let Some(asked) = self.work.limits.jobs.filter(|jobs| *jobs > self.leases.jobs()) {
            let text = format!("{asked} trials at a time were asked for; {} run, because trials never share a core", self.leases.jobs());
            step.events.push(EventKind::Remark { text });
        }
        for running in self.running.values() {
            step.events.push(self.started(running));
        }
        for index in 0..self.work.configurations.len() {
            self.announce(index, step);
        }
    }

    fn started(&self, running: &Running) -> EventKind {
        let configuration = &self.work.configurations[running.configuration];
        EventKind::TrialStarted {
            trial: running.trial.id.clone(),
            configuration: configuration.id.clone(),
            label: configuration.label.clone(),
            purpose: running.trial.purpose,
            block_size: running.trial.block_size,
            repeat: running.trial.repeat,
            attempt: running.attempt,
            budget_bytes: configuration.settings.device.memory,
        }
    }

    /// Its turn came, or is over without an end. Whatever it did before, it is at its beginning again.
    fn turn(&mut self, trial: &TrialId, attempt: u32, queued: bool, now: Duration) {
        if let Some(running) = self.running.get_mut(trial).filter(|running| running.attempt == attempt) {
            (running.queued, running.started, running.stepped, running.last_progress) = (queued, now, false, now);
        }
    }

    fn message(&mut self, trial: TrialId, attempt: u32, message: Message, now: Duration, step: &mut Step) {
        let Some(running) = self.running.get_mut(&trial).filter(|running| running.attempt == attempt) else { return };
        if matches!(message.kind, MessageKind::Step(_) | MessageKind::Eval { .. } | MessageKind::Checkpoint { .. } | MessageKind::Phase { .. }) {
            running.last_progress = now;
        }
        match &message.kind {
            MessageKind::Step(training) => {
                running.stepped = true;
                running.last_step = Some((training.step, training.steps));
            }
            MessageKind::Phase { phase } => running.last_phase = Some(phase.clone()),
            _ => {}
        }
        step.events.push(EventKind::TrialProgress { trial, message });
    }

    fn ended(&mut self, id: &TrialId, attempt: u32, mut ending: AttemptEnding, now: Duration, step: &mut Step) {
        if self.running.get(id).is_none_or(|running| running.attempt != attempt) {
            return;
        }
        let Some(running) = self.running.remove(id) else { return };
        self.leases.give_back(id);
        for UnreturnedMemory { device, bytes } in std::mem::take(&mut ending.unreturned_memory) {
            if self.leases.quarantine(&device) {
                let kept = format::bytes(bytes);
                let text = format!("{device} is used no more: {kept} of its memory did not come back after trial {id} had ended.");
                step.events.push(EventKind::Notice { text });
            }
        }
        ending.ended_by = running.ended_by;
        let outcome = classify(&ending);
        let configuration = &self.work.configurations[running.configuration];
        let label = configuration.label.clone();
        let searched = matches!(configuration.trials, ConfigurationTrials::Search(_));

        let progress = self.trials.entry(id.clone()).or_default();
        progress.settled = outcome.settles_the_trial().then(|| outcome.clone());
        self.work.lost.remove(id);
        // A child that asks to be run again without having taken a step would go round for ever.
        let infrastructure = outcome.is_infrastructure() || (outcome == TrialOutcome::Preempted && !running.stepped && running.ended_by.is_none());
        if infrastructure {
            progress.infrastructure_failures += 1;
            progress.given_up = progress.infrastructure_failures > self.work.limits.retries;
            progress.not_before = now + pause_before_retry(progress.infrastructure_failures);
            self.consecutive_infrastructure_failures += 1;
        } else if outcome.settles_the_trial() || running.stepped {
            self.consecutive_infrastructure_failures = 0;
        }

        let failed = outcome.settles_the_trial() && !is_expected(running.trial.purpose, searched, &outcome);
        step.events.push(EventKind::TrialEnded {
            trial: id.clone(),
            label: label.clone(),
            purpose: running.trial.purpose,
            block_size: running.trial.block_size,
            attempt,
            stderr_tail: if failed || infrastructure { ending.stderr_tail } else { String::new() },
            seconds: ending.seconds,
            outcome: outcome.clone(),
        });
        if searched && running.trial.purpose == Purpose::Train && matches!(outcome, TrialOutcome::OutOfDeviceMemory { .. }) {
            let text = format!(
                "{label}: training at block size {} ran out of device memory although its probe had fitted; the next smaller candidate is taken",
                running.trial.block_size
            );
            step.events.push(EventKind::Notice { text });
        }
        self.look_again(running.configuration);
        self.announce(running.configuration, step);

        if failed && self.work.fail_fast {
            self.stop(Stop::FailFast, now, step);
        }
        if infrastructure && self.consecutive_infrastructure_failures >= self.work.limits.max_consecutive_infra_failures.max(1) {
            let reason = format!(
                "{} attempts in a row ended because of the machine, not of what they ran; the last: {outcome}",
                self.consecutive_infrastructure_failures
            );
            step.events.push(EventKind::Remark { text: format!("The run stops: {reason}") });
            self.stop(Stop::Breaker { reason }, now, step);
        }
    }

    fn signal(&mut self, now: Duration, step: &mut Step) {
        self.signals += 1;
        let again = self.signals > 1;
        step.events.push(EventKind::StopRequested { now: again });
        self.stop(Stop::User, now, step);
        if again {
            for running in self.running.values_mut() {
                running.killed = true;
                step.commands.push(Command::Kill(running.trial.id.clone()));
            }
        }
    }

    /// Starts no more trials. What the machine, a failed trial or the sweep's time limit stops lets the running ones end by themselves; the user and a
    /// results folder that takes nothing more do not.
    fn stop(&mut self, reason: Stop, now: Duration, step: &mut Step) {
        let ends_running = matches!(reason, Stop::User | Stop::Store { .. });
        if self.stop.as_ref().is_none_or(|earlier| *earlier < reason) {
            self.stop = Some(reason);
        }
        // What has not begun is not started any more.
        for running in self.running.values_mut().filter(|running| ends_running || running.queued) {
            running.end(EndedBy::User, now, step);
        }
    }

    fn tick(&mut self, now: Duration, step: &mut Step) {
        let limits = &self.work.limits;
        for running in self.running.values_mut() {
            let ran = now.saturating_sub(running.started);
            // What waits for its turn takes no time of its own.
            let waits = running.queued;
            if let Some(asked_at) = running.asked_at {
                if !running.killed && now.saturating_sub(asked_at) >= limits.grace_period {
                    running.killed = true;
                    step.commands.push(Command::Kill(running.trial.id.clone()));
                }
            } else if waits {
                continue;
            } else if limits.trial_timeout.is_some_and(|limit| ran >= limit) {
                running.end(EndedBy::TimeLimit, now, step);
            } else {
                let (quiet, limit) =
                    if running.stepped { (now.saturating_sub(running.last_progress), limits.stall_timeout) } else { (ran, limits.startup_timeout) };
                if quiet >= limit {
                    let trial = running.trial.id.clone();
                    step.commands.push(Command::Examine { trial, last_words: running.last_words(quiet) });
                    running.end(EndedBy::Stall { seconds: quiet.as_secs_f64() }, now, step);
                }
            }
        }
        if self.work.limits.sweep_timeout.is_some_and(|limit| now >= limit) && self.stop.is_none() {
            let running = if self.running.is_empty() { "" } else { " What runs is finished first." };
            step.events.push(EventKind::Remark { text: format!("The run stops: its sweep_timeout is over.{running}") });
            self.stop(Stop::TimeLimit, now, step);
        }
    }

    /// Starts what may start, in row order.
    fn schedule(&mut self, now: Duration, step: &mut Step) {
        if self.stop.is_some() {
            return;
        }
        let mut from = 0;
        while self.running.len() < self.leases.jobs() {
            let Some(index) = self.ready.range(from..).next().copied() else { return };
            from = index + 1;
            let demand = self.work.configurations[index].demand();
            while let Some(place) = self.needs[index].ready.iter().position(|trial| self.may_start(&trial.id, now)) {
                let Some(lent) = self.leases.take(&self.needs[index].ready[place].id, demand) else { break };
                let trial = self.needs[index].ready.remove(place);
                let progress = self.trials.entry(trial.id.clone()).or_default();
                progress.attempts += 1;
                let attempt = progress.attempts;
                let afresh = std::mem::take(&mut progress.afresh);
                step.commands.push(Command::Spawn(SpawnOrder { configuration: index, trial: trial.clone(), attempt, place: lent, afresh }));
                let running = Running::new(index, trial, attempt, now);
                step.events.push(self.started(&running));
                self.running.insert(running.trial.id.clone(), running);
            }
            if self.needs[index].ready.is_empty() {
                self.ready.remove(&index);
            }
        }
    }

    /// Stops the run where everything that is left needs more GPUs than there are in health.
    fn stop_if_nothing_fits(&mut self, now: Duration, step: &mut Step) {
        if self.stop.is_some() || !self.running.is_empty() || self.ready.is_empty() {
            return;
        }
        let demands = self.ready.iter().map(|index| self.work.configurations[*index].demand());
        let Some(least) = demands.min_by_key(|demand| demand.gpus).filter(|least| !self.leases.could_ever_take(*least)) else { return };
        let least = least.gpus;
        let reason = format!("the trials that are left need {least} GPUs or more, and {} can be used", self.leases.healthy_gpus());
        step.events.push(EventKind::Remark { text: format!("The run stops: {reason}") });
        self.stop(Stop::Breaker { reason }, now, step);
    }

    /// Whether a trial's pause after an infrastructure failure, if any, is over.
    fn may_start(&self, id: &TrialId, now: Duration) -> bool {
        self.trials.get(id).is_none_or(|progress| progress.not_before <= now)
    }

    /// Finds out again what a configuration needs.
    fn look_again(&mut self, index: usize) {
        self.needs[index] = self.need(index);
        if self.needs[index].ready.is_empty() {
            self.ready.remove(&index);
        } else {
            self.ready.insert(index);
        }
    }

    /// Says what the search of a configuration found, where that is news.
    fn announce(&mut self, index: usize, step: &mut Step) {
        let Some((block_size, limited_by)) = self.needs[index].found else { return };
        let configuration = &self.work.configurations[index];
        if self.work.announced.insert(configuration.id.clone(), (block_size, limited_by)) != Some((block_size, limited_by)) {
            step.events.push(EventKind::BlockSizeFound {
                configuration: configuration.id.clone(),
                label: configuration.label.clone(),
                block_size,
                limited_by,
            });
        }
    }

    /// How a trial ended, where that settles it.
    pub fn outcome(&self, id: &TrialId) -> Option<&TrialOutcome> {
        self.settled(id)
    }

    fn settled(&self, id: &TrialId) -> Option<&TrialOutcome> {
        self.trials.get(id)?.settled.as_ref()
    }

    /// What a configuration needs next, from what is known about its trials.
    fn need(&self, index: usize) -> Need {
        let configuration = &self.work.configurations[index];
        let mut need = match &configuration.trials {
            ConfigurationTrials::Fixed { .. } => {
                let trainings = configuration.possible_trials();
                Need { outstanding: trainings.iter().filter(|trial| self.settled(&trial.id).is_none()).count(), ready: trainings, found: None }
            }
            ConfigurationTrials::Search(_) => self.search_need(index),
        };
        for trial in configuration.possible_trials() {
            if self.work.lost.contains(&trial.id) && !need.ready.contains(&trial) {
                need.ready.push(trial);
                need.outstanding += 1;
            }
        }
        let selects_training = |trial: &PlannedTrial| trial.purpose == Purpose::Train && self.work.selection.trials.contains(&trial.id);
        let probes_selected = configuration.possible_trials().iter().any(selects_training);
        need.ready.retain(|trial| {
            let selected = !self.work.selection.restricted
                || self.work.selection.configurations.contains(&index)
                || self.work.selection.trials.contains(&trial.id)
                || (trial.purpose == Purpose::Probe && probes_selected);
            let given_up = self.trials.get(&trial.id).is_some_and(|progress| progress.given_up);
            selected && !given_up && self.settled(&trial.id).is_none() && !self.running.contains_key(&trial.id)
        });
        need
    }

    fn search_need(&self, index: usize) -> Need {
        let configuration = &self.work.configurations[index];
        let possible = configuration.possible_trials();
        let mut known = BTreeMap::new();
        let mut training_too_large: Option<usize> = None;
        for trial in &possible {
            match (trial.purpose, self.settled(&trial.id)) {
                (_, None) => {}
                (_, Some(TrialOutcome::Done)) => {
                    known.insert(trial.block_size, Fit::Fits);
                }
                (Purpose::Probe, Some(TrialOutcome::OutOfDeviceMemory { .. })) => {
                    known.insert(trial.block_size, Fit::TooLarge);
                }
                (Purpose::Train, Some(TrialOutcome::OutOfDeviceMemory { .. })) => {
                    training_too_large = Some(training_too_large.map_or(trial.block_size, |smallest| smallest.min(trial.block_size)));
                }
                // A probe that failed says nothing about memory, and a training would fail as it did.
                (Purpose::Probe, Some(_)) => return Need::default(),
                (Purpose::Train, Some(_)) => {}
            }
        }
        let candidates: Vec<usize> = possible.iter().filter(|trial| trial.purpose == Purpose::Probe).map(|trial| trial.block_size).collect();
        let trials_at = |purpose, block_size| possible.iter().filter(move |trial| trial.purpose == purpose && trial.block_size == block_size);
        match search::decide(&candidates, self.bounds[index], &known, training_too_large) {
            Decision::Probe(block_size) => {
                let ready: Vec<PlannedTrial> = trials_at(Purpose::Probe, block_size).cloned().collect();
                Need { outstanding: ready.len() + trials_at(Purpose::Train, block_size).count(), ready, found: None }
            }
            Decision::Found { block_size, limited_by } => {
                let trainings = block_size.map_or_else(Vec::new, |block_size| trials_at(Purpose::Train, block_size).cloned().collect());
                let outstanding = trainings.iter().filter(|trial| self.settled(&trial.id).is_none()).count();
                Need { ready: trainings, found: Some((block_size, limited_by)), outstanding }
            }
        }
    }

    /// Trials that ended well, and those that failed. A training at a block size that the search has left behind counts for neither.
    fn counts(&self) -> (usize, usize) {
        let (mut done, mut failed) = (0, 0);
        for configuration in &self.work.configurations {
            let searched = matches!(configuration.trials, ConfigurationTrials::Search(_));
            for trial in configuration.possible_trials() {
                match self.settled(&trial.id) {
                    None => {}
                    Some(outcome) if is_expected(trial.purpose, searched, outcome) => done += 1,
                    Some(_) => failed += 1,
                }
            }
        }
        (done, failed)
    }

    fn finish_if_over(&mut self, step: &mut Step) {
        if !self.running.is_empty() || !(self.stop.is_some() || self.ready.is_empty()) {
            return;
        }
        let (done, failed) = self.counts();
        let outstanding: usize = self.needs.iter().map(|need| need.outstanding).sum();
        let given_up = self.trials.values().filter(|progress| progress.given_up).count();
        let finish = match &self.stop {
            Some(Stop::Store { reason } | Stop::Breaker { reason }) => Finish::Infrastructure { reason: reason.clone() },
            Some(Stop::User | Stop::TimeLimit) if outstanding > 0 => Finish::Interrupted,
            _ if failed > 0 => Finish::TrialsFailed,
            _ if given_up > 0 => {
                Finish::Infrastructure { reason: format!("{given_up} trials could not be run because of the machine, retries included") }
            }
            _ => Finish::Done,
        };
        self.finished = true;
        step.events.push(EventKind::RunEnded { exit_code: finish.exit_code(), done, failed, outstanding });
        step.commands.push(Command::Finish(finish));
    }
}

/// Trials at a time where the user does not say: as many as the GPUs hold. A processor is one device, and is not shared.
fn jobs(work: &Work) -> usize {
    let needs = work.configurations.iter().map(|configuration| configuration.demand().gpus).filter(|gpus| *gpus > 0);
    needs.min().map_or(1, |least| work.machine.gpus.len() / least)
}

/// How long a trial waits before it is tried again after its `failures`-th infrastructure failure: what ails a machine often passes, seldom at once.
fn pause_before_retry(failures: u32) -> Duration {
    const FIRST: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(300);
    FIRST.saturating_mul(4_u32.saturating_pow(failures.saturating_sub(1))).min(LONGEST)
}

impl Running {
    /// What is known about it when it has made no progress for `quiet`.
    fn last_words(&self, quiet: Duration) -> String {
        let phase = self.last_phase.as_deref().unwrap_or("none");
        let step = self.last_step.map_or_else(|| "none".to_owned(), |(step, steps)| format!("{step} of {steps}"));
        format!("No progress for {:.1} s. Last phase: {phase}. Last step: {step}.", quiet.as_secs_f64())
    }

    fn new(configuration: usize, trial: PlannedTrial, attempt: u32, now: Duration) -> Self {
        Self {
            configuration,
            attempt,
            queued: false,
            last_phase: None,
            last_step: None,
            started: now,
            stepped: false,
            last_progress: now,
            ended_by: None,
            asked_at: None,
            killed: false,
            trial,
        }
    }

    /// Asks the attempt to end, unless it was asked before: the first reason stands.
    fn end(&mut self, reason: EndedBy, now: Duration, step: &mut Step) {
        if self.asked_at.is_none() {
            self.ended_by = Some(reason);
            self.asked_at = Some(now);
            step.commands.push(Command::Terminate(self.trial.id.clone()));
        }
    }
}

/// Whether a trial that ended so did what it was run for: running out of memory answers a search, and nothing else.
pub fn is_expected(purpose: Purpose, searched: bool, outcome: &TrialOutcome) -> bool {
    match outcome {
        TrialOutcome::Done => true,
        TrialOutcome::OutOfDeviceMemory { .. } => purpose == Purpose::Probe || searched,
        _ => false,
    }
}

#[cfg(test)]
#[path = "dispatcher_tests.rs"]
mod tests;
