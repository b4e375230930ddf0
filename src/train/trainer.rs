//! The training loop.
//!
//! [`train`] sets up what ranks share and starts them; [`Trainer::run`] is what each of them does, from top to bottom.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::checkpoint::{Checkpoint, Checkpoints, DataPosition, Progress, SchedulerState, TrainingState};
use super::config::TrialConfig;
use super::dataset::{self, TrialData};
use super::error::TrainError;
use super::eval::{Evaluated, evaluate, evaluate_full_batch};
use super::export;
use super::fsdp::{FullyShardedDataParallel, RankOptions, Shard, WeightSource, run_ranks};
use super::memory::{self, Accounts, Phase};
use super::model::tree::ParameterInfo;
use super::model::{self, ops::AttentionKind};
use super::optim::{self, AdamW, FlatShard, clip_coefficient};
use super::preemption::Preemption;
use super::reporter::Reporter;
use super::scaler::GradScaler;
use super::schedule::Schedule;
use super::timing::{self, StepTime};
use super::weights;
use crate::data::{Blocks, Dealing, Epoch};
use crate::protocol::{Evaluation, MessageKind, Number, PROTOCOL, Step, TrialEnding, TrialResult};
use crate::spec::settings::{AttnImplementation, FsdpSettings, TrainDuration, TrainSettings};

/// Runs a trial on all its ranks, from the newest of `checkpoints` on where there is one. `began` is when the process did; `abandon`
/// ends it where ranks cannot be ended.
///
/// # Errors
/// What a rank could not do, or what cannot be read. A loss that becomes NaN is no error but an ending, and so is a request to end.
pub fn train(
    config: &TrialConfig,
    reporter: &Reporter,
    checkpoints: Option<&Checkpoints>,
    preemption: &Preemption,
    began: Instant,
    abandon: &(dyn Fn(&TrainError) + Sync),
) -> Result<TrialResult, TrainError> {
    let request = &config.request;
    reporter.started(config.world_size())?;
    reporter.phase("load")?;
    let data = TrialData::load(config, reporter)?;
    let model = model::build(&request.model.architecture, attention(request.settings.model.attn_implementation));
    let parameters = model.modules().parameters();
    let resumed = resume(checkpoints, &parameters, reporter)?;
    let weights = if resumed.is_none() { Some(weights::open(&request.model, request.seed)?) } else { None };
    if !request.settings.fsdp.use_orig_params && request.settings.train.weight_decay > 0.0 && !request.settings.train.decay_norm_and_bias {
        reporter.warn("use_orig_params = false: norms and biases decay too, since a flat parameter is one to the optimiser, as in PyTorch")?;
    }
    let accounts = Arc::new(Accounts::new(config.world_size()).map_err(|error| TrainError::Request(error.to_string()))?);
    for account in accounts.ranks() {
        account.set_budget(request.settings.device.memory);
    }
    let on_thread = {
        let (accounts, cores) = (accounts.clone(), config.cores.clone());
        move |rank: usize| {
            accounts.rank(rank).adopt_thread();
            bind_to(&cores.of_rank[rank]);
        }
    };
    let mut options = RankOptions { on_blocked: abandon, ..RankOptions::new(config.world_size(), config.cores.threads_per_rank) };
    if let Some(seconds) = request.stall_timeout_seconds {
        // The rank is named before whoever started this trial ends it without knowing which it was.
        options.stall_timeout = options.stall_timeout.min(Duration::from_secs_f64(seconds.clamp(0.0, 1e9) / 2.0));
    }
    let mut outcomes = run_ranks(&options, on_thread, |context| {
        let shared = Shared { config, reporter, data: &data, parameters: &parameters, accounts: &accounts, checkpoints, preemption, began };
        let first_values = weights.as_deref().or(resumed.as_ref().map(|checkpoint| checkpoint as &dyn WeightSource));
        let first_values = first_values.ok_or_else(|| TrainError::Failed("there are no weights to begin with".to_owned()))?;
        let engine = FullyShardedDataParallel::new(context, model.clone(), &request.settings.fsdp, &config.engine, first_values)?;
        let mut trainer = Trainer::new(shared, engine);
        if let Some(checkpoint) = &resumed {
            trainer.load_state_dict(checkpoint)?;
        }
        trainer.run()
    })?;
    let outcome = outcomes.swap_remove(0);
    let (peak_bytes, host_bytes) = outcome.peaks(&accounts);
    let steps_per_epoch = data.train.count() as f64 / data.dealing.global_batch_size() as f64;
    let mut timing = timing::summarise(&outcome.times, &outcome.resumed_at, steps_per_epoch);
    timing.evaluation_seconds = outcome.evaluation_seconds;
    timing.checkpoint_seconds = outcome.checkpoint_seconds;
    timing.startup_seconds = outcome.startup_seconds;
    Ok(TrialResult {
        protocol: PROTOCOL,
        trial: request.trial.clone(),
        ending: outcome.ending.unwrap_or(TrialEnding::Done),
        optimizer_steps: outcome.times.len() as u64,
        skipped_steps: outcome.skipped_steps,
        tokens_seen: outcome.times.iter().map(|step| step.tokens).sum(),
        evaluation: outcome.evaluation,
        evaluation_common: outcome.evaluation_common,
        timing,
        peak_bytes,
        host_bytes,
        parameters: parameters.iter().map(|parameter| parameter.numel() as u64).sum(),
        data: data.counts(),
        warnings: reporter.warnings(),
    })
}

/// The newest checkpoint that an earlier attempt left, if any.
fn resume(checkpoints: Option<&Checkpoints>, parameters: &[ParameterInfo], reporter: &Reporter) -> Result<Option<Checkpoint>, TrainError> {
    let Some((checkpoint, warnings)) = checkpoints.map_or(Ok(None), |checkpoints| checkpoints.newest(parameters))? else { return Ok(None) };
    warnings.into_iter().try_for_each(|warning| reporter.warn(warning))?;
    Ok(Some(checkpoint))
}

/// `auto` is the attention that needs least memory and time.
fn attention(setting: AttnImplementation) -> AttentionKind {
    match setting {
        AttnImplementation::Eager => AttentionKind::Eager,
        AttnImplementation::Auto | AttnImplementation::Flash => AttentionKind::Flash,
    }
}

/// Binds this thread to these cores; to none in particular where none are named. A machine that refuses is slower, not wrong.
fn bind_to(cores: &[usize]) {
    if cores.is_empty() {
        return;
    }
    let mut set = rustix::thread::CpuSet::new();
    cores.iter().filter(|core| **core < rustix::thread::CpuSet::MAX_CPU).for_each(|core| set.set(*core));
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// What all ranks of a trial share.
#[derive(Clone, Copy)]
struct Shared<'a> {
    config: &'a TrialConfig,
    reporter: &'a Reporter,
    data: &'a TrialData,
    parameters: &'a [ParameterInfo],
    accounts: &'a Accounts,
    checkpoints: Option<&'a Checkpoints>,
    preemption: &'a Preemption,
    began: Instant,
}

/// What a rank knows at the end; the same on every rank but for times. Counts and times are those of the whole training, whichever attempt took them.
#[derive(Default)]
struct Outcome {
    /// Every optimiser step, skipped ones included.
    times: Vec<StepTime>,
    /// Steps before which an attempt went on from a checkpoint.
    resumed_at: Vec<usize>,
    skipped_steps: u64,
    /// How training ended early, if it did.
    ending: Option<TrialEnding>,
    evaluation: Option<Evaluation>,
    evaluation_common: Option<Evaluation>,
    evaluation_seconds: f64,
    checkpoint_seconds: f64,
    startup_seconds: f64,
    /// Device and host bytes that each rank of earlier attempts held at its peak.
    earlier_peaks: (Vec<u64>, Vec<u64>),
}

impl Outcome {
    /// Device and host bytes that each rank held at its peak, in this attempt or an earlier one.
    fn peaks(&self, accounts: &Accounts) -> (Vec<u64>, Vec<u64>) {
        let usage: Vec<_> = accounts.ranks().iter().map(|account| account.usage()).collect();
        let (device, host) = &self.earlier_peaks;
        let highest = |now: u64, earlier: &[u64], rank: usize| earlier.get(rank).map_or(now, |earlier| now.max(*earlier));
        let device = usage.iter().enumerate().map(|(rank, usage)| highest(usage.peak, device, rank)).collect();
        let host = usage.iter().enumerate().map(|(rank, usage)| highest(usage.host_peak, host, rank)).collect();
        (device, host)
    }
}

/// One rank in training.
struct Trainer<'a> {
    shared: Shared<'a>,
    settings: &'a TrainSettings,
    engine: FullyShardedDataParallel,
    optimizer: AdamW,
    scaler: Option<GradScaler>,
    schedule: Schedule,
    /// Optimiser steps of the whole training.
    total_steps: u64,
    /// Optimiser steps that were not skipped.
    applied: u64,
    /// Which data comes next.
    position: DataPosition,
    /// Steps that the newest checkpoint holds.
    saved: Option<u64>,
    /// Whether any rank was asked to end; all ranks learn it at the same point.
    preempted: bool,
    outcome: Outcome,
}

/// Gradients of one step, measured: the same on every rank.
struct Gradients {
    /// Global norm before clipping.
    norm: f64,
    /// What gradients are multiplied by to undo the loss scale.
    unscale: f32,
}

impl<'a> Trainer<'a> {
    fn new(shared: Shared<'a>, mut engine: FullyShardedDataParallel) -> Self {
        let settings = &shared.config.request.settings;
        let total_steps = total_steps(&settings.train, &shared.data.train, &shared.data.dealing);
        let layouts = engine.shards().iter().map(|shard| (trained_runs(shard, &settings.train, &settings.fsdp), shard.offloaded));
        Self {
            optimizer: AdamW::new(&settings.train, layouts),
            scaler: GradScaler::for_settings(&settings.fsdp),
            schedule: Schedule::new(&settings.train, total_steps),
            settings: &settings.train,
            total_steps,
            applied: 0,
            position: DataPosition::default(),
            saved: None,
            preempted: false,
            outcome: Outcome::default(),
            shared,
            engine,
        }
    }

    fn run(mut self) -> Result<Outcome, TrainError> {
        self.engine.group().barrier()?;
        let Shared { data, config, checkpoints, preemption, began, .. } = self.shared;
        self.outcome.startup_seconds += began.elapsed().as_secs_f64();
        if checkpoints.is_some() {
            preemption.await_next_step();
        }
        self.tell(|reporter| reporter.phase("train"))?;
        // A checkpoint is saved before the evaluation that is due at the same step.
        self.evaluate_during_training()?;
        let DataPosition { epoch: first_epoch, blocks } = self.position;
        'training: for number in first_epoch.. {
            let epoch = memory::host(|| data.dealing.epoch(&data.train, number)).map_err(|error| TrainError::Input(error.to_string()))?;
            let first_step = if number == first_epoch { blocks.div_ceil(data.dealing.global_batch_size()) } else { 0 };
            for step in first_step..epoch.steps() {
                if self.has_ended() || self.has_taken_all_steps() {
                    break 'training;
                }
                self.step(&epoch, step)?;
                self.position = DataPosition { epoch: number, blocks: epoch.steps_up_to(step).len() };
                self.save_if_due()?;
                self.evaluate_during_training()?;
            }
        }
        if !self.has_ended() {
            if config.probe_steps.is_some() { self.end_probe()? } else { self.end_training()? }
        }
        Ok(self.outcome)
    }

    /// Whether training is over before its last step.
    fn has_ended(&self) -> bool {
        self.outcome.ending.is_some()
    }

    fn has_taken_all_steps(&self) -> bool {
        match self.shared.config.probe_steps {
            // A step that was skipped allocated no optimiser state, so it proves nothing.
            Some(steps) => self.applied >= steps,
            None => self.steps_taken() >= self.total_steps,
        }
    }

    /// One optimiser step: forward and backward of every pass, then clip and update.
    fn step(&mut self, epoch: &Epoch, step: usize) -> Result<(), TrainError> {
        let began = Instant::now();
        #[cfg(feature = "test-fakes")]
        super::fault::strike(self.engine.group().rank(), self.steps_taken() + 1)?;
        let blocks = &self.shared.data.train;
        let (rank, world_size) = (self.engine.group().rank(), self.engine.group().world_size());
        let loss_scale = self.scaler.as_ref().map(GradScaler::scale);
        let targets = dataset::targets(blocks, epoch.step(step));
        let tokens = dataset::tokens(blocks, epoch.step(step));

        let mut loss = 0.0;
        let passes = epoch.passes(step);
        for pass in 0..passes {
            let rows = epoch.batch(step, pass, rank);
            let batch = dataset::batch(blocks, rows);
            // The engine takes the mean over this rank's targets and then over ranks; this makes it the mean over all targets of the step.
            let share = world_size as f64 * dataset::targets(blocks, rows) as f64 / targets as f64;
            let synchronise = self.settings.sync_each_batch || pass + 1 == passes;
            memory::set_phase(Phase::Forward);
            let sum = self.engine.forward_backward(&batch, (loss_scale.unwrap_or(1.0) * share) as f32, synchronise)?;
            loss += sum.sum;
        }

        memory::set_phase(Phase::Optimizer);
        let learning_rate = self.schedule.learning_rate(self.applied);
        let gradients = self.measure_gradients(loss_scale)?;
        let finite = gradients.norm.is_finite();
        // Without a loss scale there is no innocent overflow: the step is not taken, and training ends below.
        if finite {
            self.update(&gradients, learning_rate);
            self.applied += 1;
        }
        self.engine.zero_grad();
        if let Some(scaler) = &mut self.scaler {
            scaler.update(!finite);
        }
        // Also the point at which all ranks have ended their step, and at which they agree whether to end.
        let sums = self.engine.group().all_reduce_numbers(&[loss, f64::from(self.shared.preemption.is_requested())])?;
        let loss = sums[0] / targets as f64;
        self.preempted |= sums[1] > 0.0;

        let time = StepTime { seconds: began.elapsed().as_secs_f64(), tokens };
        memory::host(|| self.outcome.times.push(time));
        self.outcome.skipped_steps += u64::from(!finite);
        self.outcome.ending = self.divergence(loss, gradients.norm).map(|reason| TrialEnding::Diverged { reason });
        self.tell(|reporter| {
            let usage: Vec<_> = self.shared.accounts.ranks().iter().map(|account| account.usage()).collect();
            reporter.say(MessageKind::Step(Step {
                step: self.steps_taken(),
                steps: self.total_steps,
                loss: Number(loss),
                grad_norm: Number(gradients.norm),
                learning_rate,
                tokens,
                step_seconds: time.seconds,
                allocated_bytes: usage.iter().map(|usage| usage.allocated).collect(),
                peak_bytes: usage.iter().map(|usage| usage.peak).collect(),
                loss_scale,
                skipped: !finite,
            }))
        })
    }

    /// The global gradient norm over all shards of all ranks.
    fn measure_gradients(&mut self, loss_scale: Option<f64>) -> Result<Gradients, TrainError> {
        let unscale = loss_scale.map_or(1.0, |scale| (1.0 / scale) as f32);
        let replicas = self.engine.shards().first().map_or(1, |shard| shard.replicas);
        // Replicas have the same gradients; the sum over ranks must count each once.
        let squares = self.optimizer.squared_norm(self.engine.shards().iter().map(|shard| shard.gradient.as_deref()), unscale) / replicas as f64;
        let norm = self.engine.group().all_reduce_numbers(&[squares])?[0].sqrt();
        Ok(Gradients { norm, unscale })
    }

    /// Clips and applies the gradients.
    fn update(&mut self, gradients: &Gradients, learning_rate: f64) {
        let clip = clip_coefficient(gradients.norm, self.settings.max_grad_norm);
        let mut shards: Vec<FlatShard<'_>> =
            self.engine.shards().iter_mut().map(|shard| FlatShard { values: &mut shard.values, gradient: shard.gradient.as_deref() }).collect();
        self.optimizer.step(&mut shards, learning_rate, gradients.unscale, clip);
    }

    /// Why training cannot go on after a step with this loss and gradient norm, if so.
    fn divergence(&self, loss: f64, norm: f64) -> Option<String> {
        let step = self.steps_taken();
        match &self.scaler {
            // The optimiser skipped the step; a smaller scale may help.
            Some(scaler) if !scaler.is_exhausted() => None,
            Some(scaler) => {
                Some(format!("gradients overflow at step {step} although the loss scale has shrunk to {:e}; the loss is {loss}", scaler.scale()))
            }
            None if !loss.is_finite() => Some(format!("the loss is {loss} at step {step}")),
            None if !norm.is_finite() => Some(format!("the gradient norm is {norm} at step {step}, the loss {loss}")),
            None => None,
        }
    }

    /// Saves state where that is due, and ends training where that was asked.
    fn save_if_due(&mut self) -> Result<(), TrainError> {
        let Some(checkpoints) = self.shared.checkpoints.filter(|_| !self.has_ended()) else { return Ok(()) };
        let step = self.steps_taken();
        if (checkpoints.is_due(step) || self.preempted) && self.saved != Some(step) {
            self.tell(|reporter| reporter.phase("checkpoint"))?;
            memory::set_phase(Phase::Checkpoint);
            let began = Instant::now();
            let path = memory::host(|| {
                let state = self.state_dict();
                checkpoints.save(&mut self.engine, &self.optimizer, self.shared.parameters, step, state)
            })?;
            let seconds = began.elapsed().as_secs_f64();
            self.outcome.checkpoint_seconds += seconds;
            self.saved = Some(step);
            self.tell(|reporter| reporter.say(MessageKind::Checkpoint { step, path, seconds }))?;
            self.tell(|reporter| reporter.phase("train"))?;
        }
        if self.preempted {
            self.outcome.ending = Some(TrialEnding::Checkpointed { step });
        }
        Ok(())
    }

    /// Everything but parameters and moments, as it stands between two steps.
    fn state_dict(&self) -> TrainingState {
        let (peak_bytes, host_bytes) = self.outcome.peaks(self.shared.accounts);
        TrainingState {
            optimizer: self.optimizer.state_dict(),
            lr_scheduler: SchedulerState { last_epoch: self.applied },
            scaler: self.scaler.as_ref().map(GradScaler::state_dict),
            rng: self.engine.rng_state(),
            data: self.position,
            progress: Progress {
                steps: self.outcome.times.iter().map(|step| (step.seconds, step.tokens)).collect(),
                resumed_at: self.outcome.resumed_at.clone(),
                skipped_steps: self.outcome.skipped_steps,
                evaluation_seconds: self.outcome.evaluation_seconds,
                checkpoint_seconds: self.outcome.checkpoint_seconds,
                startup_seconds: self.outcome.startup_seconds,
                peak_bytes,
                host_bytes,
            },
        }
    }

    /// Goes on from a checkpoint, whose parameters the engine has already.
    fn load_state_dict(&mut self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let TrainingState { optimizer, lr_scheduler, scaler, rng, data, progress } = memory::host(|| checkpoint.state().clone());
        checkpoint.load_moments(self.engine.shards(), &mut self.optimizer)?;
        self.optimizer.load_state_dict(optimizer);
        if let (Some(scaler), Some(state)) = (&mut self.scaler, scaler) {
            scaler.load_state_dict(state);
        }
        self.engine.set_rng_state(rng);
        self.applied = lr_scheduler.last_epoch;
        self.position = data;
        self.saved = Some(checkpoint.step());
        memory::host(|| {
            let mut resumed_at = progress.resumed_at;
            resumed_at.push(progress.steps.len());
            self.outcome = Outcome {
                times: progress.steps.into_iter().map(|(seconds, tokens)| StepTime { seconds, tokens }).collect(),
                resumed_at,
                skipped_steps: progress.skipped_steps,
                evaluation_seconds: progress.evaluation_seconds,
                checkpoint_seconds: progress.checkpoint_seconds,
                startup_seconds: progress.startup_seconds,
                earlier_peaks: (progress.peak_bytes, progress.host_bytes),
                ..Outcome::default()
            };
        });
        Ok(())
    }

    /// Evaluates where `eval_steps` says so; after the last step the evaluation at the end follows anyway.
    fn evaluate_during_training(&mut self) -> Result<(), TrainError> {
        let taken = self.steps_taken();
        let due = self.settings.eval_steps.is_some_and(|every| taken > 0 && taken < self.total_steps && taken.is_multiple_of(every));
        if !due || self.has_ended() || self.shared.config.probe_steps.is_some() {
            return Ok(());
        }
        self.tell(|reporter| reporter.phase("evaluate"))?;
        self.evaluate(&self.shared.data.eval)?;
        self.tell(|reporter| reporter.phase("train"))
    }

    /// Evaluates, unless training is asked to end meanwhile: then its state is saved.
    fn evaluate(&mut self, blocks: &Blocks) -> Result<Option<Evaluation>, TrainError> {
        if blocks.count() == 0 || self.has_ended() {
            return Ok(None);
        }
        let preemption = self.shared.preemption;
        let evaluated = evaluate(&mut self.engine, blocks, self.settings.per_device_eval_batch_size, || preemption.is_requested())?;
        let Evaluated::Whole(evaluation) = evaluated else {
            self.preempted = true;
            self.save_if_due()?;
            return Ok(None);
        };
        if let Some(evaluation) = &evaluation {
            self.outcome.evaluation_seconds += evaluation.seconds;
            let said = MessageKind::Eval { step: self.steps_taken(), evaluation: evaluation.clone() };
            self.tell(|reporter| reporter.say(said))?;
        }
        Ok(evaluation)
    }

    /// Evaluates at the trial's own block size and at the common one.
    fn end_training(&mut self) -> Result<(), TrainError> {
        self.tell(|reporter| reporter.phase("evaluate"))?;
        let data = self.shared.data;
        self.outcome.evaluation = self.evaluate(&data.eval)?;
        self.outcome.evaluation_common = match &data.eval_common {
            Some(blocks) => self.evaluate(blocks)?,
            None if self.shared.config.request.settings.train.eval_block_size == data.eval.block_size() => self.outcome.evaluation.clone(),
            None => None,
        };
        if let Some(evaluation) = &self.outcome.evaluation
            && !evaluation.loss.0.is_finite()
        {
            let reason = format!("the evaluation loss is {} after the last step", evaluation.loss.0);
            self.outcome.ending = Some(TrialEnding::Diverged { reason });
        }
        if let Some(folder) = &self.shared.config.request.save_model
            && !self.has_ended()
        {
            self.tell(|reporter| reporter.phase("save"))?;
            let request = &self.shared.config.request;
            export::save_model(&mut self.engine, &request.model, &request.data.train, folder)?;
        }
        Ok(())
    }

    /// Runs one evaluation batch of full size: the probe's answer covers the memory that the evaluation of a real training takes.
    fn end_probe(&mut self) -> Result<(), TrainError> {
        self.tell(|reporter| reporter.phase("evaluate"))?;
        let data = self.shared.data;
        let own = if data.eval.count() > 0 { &data.eval } else { &data.train };
        let longer = data.eval_common.as_ref().filter(|blocks| blocks.count() > 0 && blocks.block_size() > own.block_size());
        for blocks in [Some(own), longer].into_iter().flatten() {
            evaluate_full_batch(&mut self.engine, blocks, self.settings.per_device_eval_batch_size)?;
        }
        Ok(())
    }

    /// Steps so far, skipped ones included.
    fn steps_taken(&self) -> u64 {
        self.outcome.times.len() as u64
    }

    /// Says something once, not once per rank. What messages are made of is host memory.
    fn tell(&self, say: impl FnOnce(&Reporter) -> Result<(), TrainError>) -> Result<(), TrainError> {
        if self.engine.group().rank() == 0 { memory::host(|| say(self.shared.reporter)) } else { Ok(()) }
    }
}

/// Optimiser steps of a training, as the HF Trainer counts them: the last step of an epoch may be a small one.
fn total_steps(settings: &TrainSettings, blocks: &Blocks, dealing: &Dealing) -> u64 {
    match settings.duration {
        TrainDuration::MaxSteps(steps) => steps,
        TrainDuration::NumTrainEpochs(epochs) => (epochs * dealing.steps_per_epoch(blocks.count()) as f64).ceil() as u64,
    }
}

/// What the optimiser trains of a shard, and which of it decays. A flat parameter (`use_orig_params = false`) is one parameter to the optimiser, so all of
/// it decays, whatever `decay_norm_and_bias` says: PyTorch cannot tell its parts apart either.
fn trained_runs(shard: &Shard, settings: &TrainSettings, fsdp: &FsdpSettings) -> Vec<optim::Run> {
    let decay_all = settings.decay_norm_and_bias || !fsdp.use_orig_params;
    optim::runs(shard.segments.iter().filter_map(|segment| Some((segment, segment.gradient?))).map(|(segment, gradient)| optim::Run {
        range: segment.range.clone(),
        gradient,
        decays: segment.decays_by_default || decay_all,
    }))
}
