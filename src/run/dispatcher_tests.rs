//! Every race as a list of inputs, without a process.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::protocol::{
    Architecture, DataCounts, Gpt2Config, Number, OutOfMemory, PROTOCOL, PreparedData, ResolvedModel, Step as TrainingStep, Timestamp, Timing,
    TrialEnding, TrialResult,
};
use crate::run::leases::Machine;
use crate::run::work::{Candidate, Cluster, Configuration, KnownTrial, Selection};
use crate::spec::plan::Limits;
use crate::spec::settings::{DeviceKind, Settings};
use crate::trial::ConfigurationId;

fn settings() -> Settings {
    serde_json::from_value(json!({
        "model": {"id": "gpt2-tiny", "init": "random", "attn_implementation": "auto", "config": {}},
        "data": {"dataset": {"synthetic": {"vocab": 64, "train_tokens": 65536, "eval_tokens": 4096}}, "shuffle": true, "packing": "concatenate"},
        "train": {
            "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 1, "sync_each_batch": false,
            "duration": {"max_steps": 4}, "learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0,
            "decay_norm_and_bias": false, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "eval_block_size": 64,
            "seed": 42
        },
        "fsdp": {
            "fsdp_version": 1, "sharding_strategy": "FULL_SHARD", "auto_wrap_policy": "NO_WRAP", "min_num_params": 0,
            "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": false, "limit_all_gathers": true, "use_orig_params": true, "cpu_offload": false,
            "activation_checkpointing": false, "sync_module_states": true, "cpu_ram_efficient_loading": true, "state_dict_type": "FULL_STATE_DICT",
            "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}, "initial_loss_scale": 65536.0
        },
        "device": {"kind": "cpu", "world_size": 2, "memory": 1000}
    }))
    .unwrap()
}

fn configuration(name: &str, trials: ConfigurationTrials) -> Configuration {
    let config = Gpt2Config { vocab_size: 64, n_positions: 512, n_embd: 8, n_layer: 1, n_head: 1, ..Gpt2Config::DEFAULT };
    Configuration {
        id: ConfigurationId(name.to_owned()),
        label: format!("label {name}"),
        settings: settings(),
        model: ResolvedModel { architecture: Architecture::Gpt2(config), weights: None, fingerprint: None },
        data: PreparedData {
            train: "train".into(),
            eval: None,
            fingerprint: "f".into(),
            vocab_size: 64,
            train_tokens: 65536,
            eval_tokens: 4096,
            floor_perplexity: None,
            description: String::new(),
        },
        trials,
    }
}

fn id(name: &str) -> TrialId {
    TrialId(name.to_owned())
}

/// A configuration of fixed block size whose training is called `<name>-train`.
fn fixed(name: &str) -> Configuration {
    configuration(name, ConfigurationTrials::Fixed { block_size: 64, trainings: vec![id(&format!("{name}-train"))] })
}

/// A configuration with a search; its trials are called `<name>-probe-<block size>` and `<name>-train-<block size>`.
fn searched(name: &str, candidates: &[usize]) -> Configuration {
    let candidate = |block_size: &usize| Candidate {
        block_size: *block_size,
        probe: id(&format!("{name}-probe-{block_size}")),
        trainings: vec![id(&format!("{name}-train-{block_size}"))],
    };
    configuration(name, ConfigurationTrials::Search(candidates.iter().map(candidate).collect()))
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn work(configurations: Vec<Configuration>) -> Work {
    Work {
        sweep: "sweep".into(),
        run: "run".into(),
        resumed: false,
        configurations,
        probe_steps: 3,
        selection: Selection::default(),
        checkpoint: Default::default(),
        limits: Limits {
            trial_timeout: Some(seconds(1000)),
            startup_timeout: seconds(100),
            stall_timeout: seconds(50),
            grace_period: seconds(10),
            retries: 1,
            max_consecutive_infra_failures: 3,
            jobs: None,
            sweep_timeout: None,
        },
        fail_fast: false,
        machine: Machine { cores: vec![0, 1, 2, 3], memory_bytes: 10_000, gpus: Vec::new() },
        cluster: None,
        adopted: BTreeMap::new(),
        known: BTreeMap::new(),
        lost: BTreeSet::new(),
        recovered: Vec::new(),
        announced: BTreeMap::new(),
        notices: Vec::new(),
        remarks: Vec::new(),
    }
}

/// A dispatcher, what it did since the last look, and the time.
struct World {
    dispatcher: Dispatcher,
    now: Duration,
    events: Vec<EventKind>,
    commands: Vec<Command>,
}

impl World {
    fn begin(work: Work) -> Self {
        let mut world = Self { dispatcher: Dispatcher::new(work), now: Duration::ZERO, events: Vec::new(), commands: Vec::new() };
        world.give(Input::Start);
        world
    }

    fn give(&mut self, input: Input) {
        let step = self.dispatcher.step(input, self.now);
        self.events.extend(step.events);
        self.commands.extend(step.commands);
    }

    /// Commands since the last look, in short.
    fn did(&mut self) -> Vec<String> {
        let short = |command| match command {
            Command::Spawn(order) => format!("spawn {} #{}", order.trial.id, order.attempt),
            Command::Examine { trial, last_words } => format!("examine {trial}: {last_words}"),
            Command::Terminate(trial) => format!("terminate {trial}"),
            Command::Kill(trial) => format!("kill {trial}"),
            Command::Finish(finish) => format!("finish {}", finish.exit_code()),
        };
        std::mem::take(&mut self.commands).into_iter().map(short).collect()
    }

    fn end(&mut self, trial: &str, attempt: u32, ending: AttemptEnding) {
        self.give(Input::Ended { trial: id(trial), attempt, ending: Box::new(ending) });
    }

    fn tick(&mut self, now: u64) {
        self.now = seconds(now);
        self.give(Input::Tick);
    }

    fn say(&mut self, trial: &str, kind: MessageKind) {
        self.give(Input::Message { trial: id(trial), attempt: 1, message: Message { at: Timestamp::now(), kind } });
    }

    fn outcomes(&self) -> Vec<String> {
        let outcome = |event: &EventKind| match event {
            EventKind::TrialEnded { trial, outcome, .. } => Some(format!("{trial}: {outcome}")),
            _ => None,
        };
        self.events.iter().filter_map(outcome).collect()
    }

    fn found(&self) -> Vec<(Option<usize>, LimitedBy)> {
        let found = |event: &EventKind| match event {
            EventKind::BlockSizeFound { block_size, limited_by, .. } => Some((*block_size, *limited_by)),
            _ => None,
        };
        self.events.iter().filter_map(found).collect()
    }
}

fn done() -> AttemptEnding {
    let result = TrialResult {
        protocol: PROTOCOL,
        trial: id("any"),
        ending: TrialEnding::Done,
        optimizer_steps: 1,
        skipped_steps: 0,
        tokens_seen: 1,
        evaluation: None,
        evaluation_common: None,
        timing: Timing::default(),
        peak_bytes: vec![],
        host_bytes: vec![],
        parameters: 1,
        data: DataCounts::default(),
        warnings: vec![],
    };
    AttemptEnding { started: true, exit_code: Some(0), result: Some(Ok(result)), ..AttemptEnding::default() }
}

fn exited(code: i32) -> AttemptEnding {
    AttemptEnding { started: true, exit_code: Some(code), ..AttemptEnding::default() }
}

fn signalled(signal: i32) -> AttemptEnding {
    AttemptEnding { started: true, signal: Some(signal), ..AttemptEnding::default() }
}

fn cannot_start() -> AttemptEnding {
    AttemptEnding { spawn_error: Some("no such file".into()), ..AttemptEnding::default() }
}

fn training_step() -> MessageKind {
    MessageKind::Step(TrainingStep {
        step: 1,
        steps: 4,
        loss: Number(1.0),
        grad_norm: Number(1.0),
        learning_rate: 0.1,
        tokens: 1,
        step_seconds: 0.1,
        allocated_bytes: vec![],
        peak_bytes: vec![],
        loss_scale: None,
        skipped: false,
    })
}

#[test]
fn trials_run_in_row_order_one_at_a_time() {
    let mut world = World::begin(work(vec![fixed("a"), fixed("b")]));
    assert_eq!(world.did(), ["spawn a-train #1"]);
    world.end("a-train", 1, done());
    assert_eq!(world.did(), ["spawn b-train #1"]);
    world.end("b-train", 1, done());
    assert_eq!(world.did(), ["finish 0"]);
    assert_eq!(world.events.last(), Some(&EventKind::RunEnded { exit_code: 0, done: 2, failed: 0, outstanding: 0 }));
    world.end("b-train", 1, done());
    assert_eq!(world.did(), [""; 0], "nothing follows the end");
}

#[test]
fn jobs_run_beside_each_other_and_share_neither_cores_nor_memory() {
    let mut two = work(vec![fixed("a"), fixed("b"), fixed("c")]);
    two.limits.jobs = Some(2);
    let world = World::begin(two.clone());
    let cores = |command: &Command| match command {
        Command::Spawn(order) => order.place.cores.clone(),
        _ => vec![],
    };
    assert_eq!(world.commands.iter().map(cores).collect::<Vec<_>>(), [vec![0, 1], vec![2, 3]]);
    // Two ranks of 1000 bytes each: the host holds one such trial.
    two.machine.memory_bytes = 3000;
    assert_eq!(World::begin(two).did(), ["spawn a-train #1"]);
}

/// Three out-of-memory results in a row are results: they neither fail the run nor trip its breaker (case 6).
#[test]
fn a_search_walks_to_the_block_size_that_fits() {
    let mut world = World::begin(work(vec![searched("a", &[32, 64, 128, 256, 1024])]));
    assert_eq!(world.did(), ["spawn a-probe-128 #1"]);
    world.end("a-probe-128", 1, exited(4));
    assert_eq!(world.did(), ["spawn a-probe-64 #1"]);
    world.end("a-probe-64", 1, exited(4));
    assert_eq!(world.did(), ["spawn a-probe-32 #1"]);
    world.end("a-probe-32", 1, exited(4));
    assert_eq!(world.did(), ["finish 0"]);
    assert_eq!(world.found(), [(None, LimitedBy::Memory)]);
}

/// Case 36: 1024 is above the 512 positions of the model.
#[test]
fn the_model_limits_without_a_probe() {
    let mut world = World::begin(work(vec![searched("a", &[512, 1024])]));
    assert_eq!(world.did(), ["spawn a-probe-512 #1"]);
    world.end("a-probe-512", 1, done());
    assert_eq!(world.did(), ["spawn a-train-512 #1"]);
    assert_eq!(world.found(), [(Some(512), LimitedBy::Model)]);
}

/// Case 37.
#[test]
fn training_that_runs_out_of_memory_takes_the_next_smaller() {
    let mut world = World::begin(work(vec![searched("a", &[64, 128])]));
    world.end("a-probe-128", 1, done());
    assert_eq!(world.did(), ["spawn a-probe-128 #1", "spawn a-train-128 #1"]);
    world.end("a-train-128", 1, exited(4));
    assert_eq!(world.did(), ["spawn a-train-64 #1"]);
    assert_eq!(world.found(), [(Some(128), LimitedBy::Candidates), (Some(64), LimitedBy::Memory)]);
    assert!(world.events.iter().any(|event| matches!(event, EventKind::Notice { text } if text.contains("next smaller candidate"))));
    world.end("a-train-64", 1, done());
    assert_eq!(world.did(), ["finish 0"]);
}

#[test]
fn a_failed_probe_ends_its_search_and_no_other() {
    let mut world = World::begin(work(vec![searched("a", &[64]), searched("b", &[64])]));
    world.end("a-probe-64", 1, exited(3));
    assert_eq!(world.did(), ["spawn a-probe-64 #1", "spawn b-probe-64 #1"]);
    world.end("b-probe-64", 1, done());
    world.end("b-train-64", 1, done());
    assert_eq!(world.did(), ["spawn b-train-64 #1", "finish 100"]);
}

#[test]
fn out_of_memory_at_a_fixed_block_size_is_a_failure() {
    let mut world = World::begin(work(vec![fixed("a")]));
    world.end("a-train", 1, exited(4));
    assert_eq!(world.did(), ["spawn a-train #1", "finish 100"]);
}

#[test]
fn a_signal_asks_and_a_second_one_kills() {
    let mut world = World::begin(work(vec![fixed("a"), fixed("b")]));
    world.give(Input::Signal);
    assert_eq!(world.did(), ["spawn a-train #1", "terminate a-train"]);
    world.tick(5);
    assert_eq!(world.did(), [""; 0], "the grace period is not over");
    world.give(Input::Signal);
    assert_eq!(world.did(), ["kill a-train"]);
    world.tick(50);
    assert_eq!(world.did(), [""; 0], "it is killed once");
    world.end("a-train", 1, signalled(9));
    assert_eq!(world.did(), ["finish 5"]);
    assert_eq!(world.outcomes(), ["a-train: ended because the run was stopped"]);
    assert_eq!(world.events.last(), Some(&EventKind::RunEnded { exit_code: 5, done: 0, failed: 0, outstanding: 2 }));
}

#[test]
fn what_ignores_the_request_is_killed_after_the_grace_period() {
    let mut world = World::begin(work(vec![fixed("a")]));
    world.give(Input::Signal);
    world.tick(10);
    assert_eq!(world.did(), ["spawn a-train #1", "terminate a-train", "kill a-train"]);
}

#[test]
fn a_signal_that_crosses_the_last_trials_end_loses_nothing() {
    let mut world = World::begin(work(vec![fixed("a")]));
    world.give(Input::Signal);
    world.end("a-train", 1, done());
    assert_eq!(world.did(), ["spawn a-train #1", "terminate a-train", "finish 0"]);
    assert_eq!(world.outcomes(), ["a-train: done"]);
}

#[test]
fn a_trial_that_saves_its_state_on_the_signal_is_outstanding() {
    let mut world = World::begin(work(vec![fixed("a")]));
    world.say("a-train", training_step());
    world.give(Input::Signal);
    world.end("a-train", 1, exited(75));
    assert_eq!(world.did(), ["spawn a-train #1", "terminate a-train", "finish 5"]);
}

#[test]
fn messages_of_the_dead_are_ignored() {
    let mut world = World::begin(work(vec![fixed("a"), fixed("b")]));
    world.end("a-train", 1, done());
    let before = world.events.len();
    world.say("a-train", training_step());
    world.end("a-train", 1, exited(1));
    world.end("b-train", 7, exited(1));
    assert_eq!(world.events.len(), before);
    assert_eq!(world.did(), ["spawn a-train #1", "spawn b-train #1"]);
}

/// Case 15: no step for `stall_timeout`. Time before the first step is measured by `startup_timeout`.
#[test]
fn what_makes_no_progress_is_stalled() {
    let mut world = World::begin(work(vec![fixed("a"), fixed("b")]));
    world.tick(99);
    world.say("a-train", training_step());
    world.tick(148);
    assert_eq!(world.did(), ["spawn a-train #1"]);
    world.tick(149);
    assert_eq!(world.did(), ["examine a-train: No progress for 50.0 s. Last phase: none. Last step: 1 of 4.", "terminate a-train"]);
    world.end("a-train", 1, AttemptEnding { last_phase: Some("train".into()), ..signalled(15) });
    world.tick(200);
    world.say("b-train", MessageKind::Phase { phase: "load".into() });
    world.tick(249);
    let examined = "examine b-train: No progress for 100.0 s. Last phase: load. Last step: none.";
    assert_eq!(world.did(), ["spawn b-train #1", examined, "terminate b-train"]);
    world.end("b-train", 1, signalled(15));
    assert_eq!(world.outcomes(), ["a-train: stalled: no progress for 50 s in phase train", "b-train: stalled: no progress for 100 s"]);
    assert_eq!(world.did(), ["finish 100"]);
}

#[test]
fn what_takes_too_long_is_timed_out() {
    let mut world = World::begin(work(vec![fixed("a")]));
    for now in (40..=1000).step_by(40) {
        world.tick(now);
        world.say("a-train", training_step());
    }
    world.end("a-train", 1, AttemptEnding { seconds: 1000.0, ..signalled(15) });
    assert_eq!(world.did(), ["spawn a-train #1", "terminate a-train", "finish 100"]);
    assert_eq!(world.outcomes(), ["a-train: timed out after 1000 s"]);
}

#[test]
fn infrastructure_failures_are_tried_again_and_no_other() {
    let mut world = World::begin(work(vec![fixed("a"), fixed("b")]));
    world.end("a-train", 1, cannot_start());
    assert_eq!(world.did(), ["spawn a-train #1", "spawn b-train #1"], "others go on while it waits");
    world.end("b-train", 1, exited(1));
    assert_eq!(world.did(), [""; 0], "the run waits for the retry");
    world.tick(1);
    assert_eq!(world.did(), ["spawn a-train #2"]);
    world.end("a-train", 2, done());
    assert_eq!(world.did(), ["finish 100"]);
}

/// Case 19: a trial that cannot be started is given up after its retries and the sweep goes on.
#[test]
fn retries_end_and_the_run_says_try_again() {
    let mut world = World::begin(work(vec![fixed("a"), fixed("b")]));
    world.end("a-train", 1, cannot_start());
    world.end("b-train", 1, done());
    world.tick(1);
    world.end("a-train", 2, cannot_start());
    assert_eq!(world.did(), ["spawn a-train #1", "spawn b-train #1", "spawn a-train #2", "finish 75"]);
}

/// Case 6: failures in a row that are infrastructure stop the run.
#[test]
fn the_breaker_stops_a_run_on_a_broken_machine() {
    let mut world = World::begin(work(vec![fixed("a"), fixed("b"), fixed("c")]));
    let dies = || AttemptEnding { started: false, ..exited(127) };
    world.end("a-train", 1, dies());
    world.end("b-train", 1, dies());
    world.end("c-train", 1, dies());
    assert_eq!(world.did(), ["spawn a-train #1", "spawn b-train #1", "spawn c-train #1", "finish 75"], "it waits for no retry");
    assert!(world.events.iter().any(|event| matches!(event, EventKind::Remark { text } if text.starts_with("The run stops: 3 attempts in a row"))));
}

#[test]
fn a_child_that_only_asks_to_be_run_again_trips_the_breaker() {
    let mut world = World::begin(work(vec![fixed("a"), fixed("b")]));
    world.end("a-train", 1, exited(75));
    world.end("b-train", 1, exited(75));
    world.tick(1);
    world.end("a-train", 2, exited(75));
    assert_eq!(world.did(), ["spawn a-train #1", "spawn b-train #1", "spawn a-train #2", "finish 75"]);
}

#[test]
fn a_preempted_trial_that_made_progress_goes_on_for_ever() {
    let mut world = World::begin(work(vec![fixed("a")]));
    for attempt in 1..=9 {
        let message = Message { at: Timestamp::now(), kind: training_step() };
        world.give(Input::Message { trial: id("a-train"), attempt, message });
        world.end("a-train", attempt, exited(75));
    }
    assert_eq!(world.did().last().map(String::as_str), Some("spawn a-train #10"));
}

#[test]
fn fail_fast_lets_running_trials_end_and_starts_no_other() {
    let mut eager = work(vec![fixed("a"), fixed("b"), fixed("c")]);
    eager.fail_fast = true;
    eager.limits.jobs = Some(2);
    let mut world = World::begin(eager);
    world.end("a-train", 1, exited(1));
    world.end("b-train", 1, done());
    assert_eq!(world.did(), ["spawn a-train #1", "spawn b-train #1", "finish 100"]);
}

/// Two ranks of each trial need a GPU each: two trials at a time on four. Case 26: a GPU whose memory does not come back is used no more, the others go on, and
/// what then fits nowhere ends the run.
#[test]
fn trials_on_gpus_are_packed_and_bad_gpus_left_out() {
    let on_gpus = |name: &str| {
        let mut configuration = fixed(name);
        configuration.settings.device.kind = DeviceKind::Cuda;
        configuration
    };
    let mut plan = work(["a", "b", "c", "d", "e"].map(on_gpus).into());
    plan.machine.gpus = ["g0", "g1", "g2", "g3"].map(str::to_owned).into();
    let mut world = World::begin(plan);
    let gpus = |world: &mut World| -> Vec<String> {
        let gpus = |command| match command {
            Command::Spawn(order) => format!("{}: {}", order.trial.id, order.place.gpus.join(" ")),
            other => format!("{other:?}"),
        };
        std::mem::take(&mut world.commands).into_iter().map(gpus).collect()
    };
    assert_eq!(gpus(&mut world), ["a-train: g0 g1", "b-train: g2 g3"]);
    let leaves = |device: &str| AttemptEnding { unreturned_memory: vec![UnreturnedMemory { device: device.to_owned(), bytes: 3 << 30 }], ..done() };
    world.end("a-train", 1, leaves("g1"));
    assert_eq!(gpus(&mut world), [""; 0], "one GPU is too few");
    let said = "g1 is used no more: 3.00 GiB of its memory did not come back after trial a-train had ended.";
    assert!(world.events.iter().any(|event| matches!(event, EventKind::Notice { text } if text == said)), "{:?}", world.events);
    world.end("b-train", 1, done());
    assert_eq!(gpus(&mut world), ["c-train: g0 g2"]);
    world.end("c-train", 1, leaves("g0"));
    assert_eq!(gpus(&mut world), ["d-train: g2 g3"]);
    world.end("d-train", 1, leaves("g3"));
    let reason = "the trials that are left need 2 GPUs or more, and 1 can be used".to_owned();
    assert_eq!(world.commands, [Command::Finish(Finish::Infrastructure { reason })]);
    assert_eq!(world.events.last(), Some(&EventKind::RunEnded { exit_code: 75, done: 4, failed: 0, outstanding: 1 }));
}

/// Case 7: the results folder takes nothing more.
#[test]
fn a_full_disk_ends_the_run_as_infrastructure() {
    let mut world = World::begin(work(vec![fixed("a"), fixed("b")]));
    world.give(Input::StoreFailed { reason: "cannot write events.jsonl: no space left".into() });
    assert_eq!(world.did(), ["spawn a-train #1", "terminate a-train"]);
    world.end("a-train", 1, signalled(15));
    let reason = "cannot write events.jsonl: no space left".to_owned();
    assert_eq!(world.commands, [Command::Finish(Finish::Infrastructure { reason })]);
}

#[test]
fn the_sweeps_own_time_limit_interrupts_it() {
    let mut short = work(vec![fixed("a"), fixed("b")]);
    short.limits.sweep_timeout = Some(seconds(30));
    let mut world = World::begin(short.clone());
    world.tick(30);
    assert_eq!(world.did(), ["spawn a-train #1"], "what runs is finished");
    world.tick(31);
    world.end("a-train", 1, done());
    assert_eq!(world.did(), ["finish 5"]);
    assert_eq!(world.events.last(), Some(&EventKind::RunEnded { exit_code: 5, done: 1, failed: 0, outstanding: 1 }));
    let notices = world.events.iter().filter(|event| matches!(event, EventKind::Remark { text } if text.contains("sweep_timeout"))).count();
    assert_eq!(notices, 1);

    // Nothing is missing once the last trial has ended, and what still waits to be tried again is.
    short.configurations.truncate(1);
    let mut world = World::begin(short.clone());
    world.tick(30);
    world.end("a-train", 1, done());
    assert_eq!(world.did(), ["spawn a-train #1", "finish 0"]);
    let mut world = World::begin(short);
    world.tick(29);
    world.end("a-train", 1, cannot_start());
    world.tick(30);
    assert_eq!(world.did(), ["spawn a-train #1", "finish 5"]);
}

/// The user may end what a time limit lets run on, and a stall is a stall.
#[test]
fn a_stopping_run_still_looks_after_what_runs() {
    let mut short = work(vec![fixed("a")]);
    short.limits.sweep_timeout = Some(seconds(30));
    let mut world = World::begin(short.clone());
    world.tick(30);
    world.give(Input::Signal);
    assert_eq!(world.did(), ["spawn a-train #1", "terminate a-train"]);
    let mut world = World::begin(short);
    world.tick(30);
    world.tick(100);
    assert_eq!(world.did().last().map(String::as_str), Some("terminate a-train"));
}

#[test]
fn pauses_before_retries_grow_and_end_somewhere() {
    let pauses: Vec<u64> = (1..=7).map(|failures| pause_before_retry(failures).as_secs()).collect();
    assert_eq!(pauses, [1, 4, 16, 64, 256, 300, 300]);
    assert_eq!(pause_before_retry(u32::MAX).as_secs(), 300);
}

/// Cases 1 to 4: what is known is not run again, attempts go on counting.
#[test]
fn a_resumed_run_does_what_is_missing() {
    let mut resumed = work(vec![fixed("a"), fixed("b"), fixed("c"), searched("d", &[64, 128])]);
    let known = |attempts, outcome| KnownTrial { attempts, outcome, afresh: false };
    resumed.known = BTreeMap::from([
        (id("a-train"), known(1, Some(TrialOutcome::Done))),
        (id("b-train"), known(1, None)),
        (id("c-train"), known(2, Some(TrialOutcome::Crashed { code: Some(1), signal: None }))),
        (id("d-probe-128"), known(1, Some(TrialOutcome::OutOfDeviceMemory { details: None }))),
    ]);
    let mut world = World::begin(resumed);
    world.end("b-train", 2, done());
    world.end("d-probe-64", 1, done());
    world.end("d-train-64", 1, done());
    assert_eq!(world.did(), ["spawn b-train #2", "spawn d-probe-64 #1", "spawn d-train-64 #1", "finish 100"]);
}

/// Case 2: a probe whose folder was deleted by hand runs again, although a training has settled the search.
#[test]
fn a_lost_trial_runs_again_and_no_other() {
    let mut resumed = work(vec![searched("a", &[64, 128])]);
    resumed.known = BTreeMap::from([
        (id("a-train-64"), KnownTrial { attempts: 1, outcome: Some(TrialOutcome::Done), afresh: false }),
        (id("a-probe-128"), KnownTrial { attempts: 1, outcome: Some(TrialOutcome::OutOfDeviceMemory { details: None }), afresh: false }),
    ]);
    resumed.announced = BTreeMap::from([(ConfigurationId("a".into()), (Some(64), LimitedBy::Memory))]);
    let idle = Dispatcher::new(resumed.clone());
    assert!(idle.is_idle());
    resumed.lost = BTreeSet::from([id("a-probe-64")]);
    let mut world = World::begin(resumed);
    assert_eq!(world.did(), ["spawn a-probe-64 #1"]);
    world.end("a-probe-64", 1, done());
    assert_eq!(world.did(), ["finish 0"]);
    assert_eq!(world.found(), [], "what was announced is no news");
}

#[test]
fn a_selection_leaves_the_rest_alone() {
    let mut some = work(vec![fixed("a"), searched("b", &[64, 128]), fixed("c")]);
    some.selection = Selection { restricted: true, configurations: BTreeSet::from([2]), trials: BTreeSet::from([id("b-train-64")]) };
    let mut world = World::begin(some);
    world.end("b-probe-128", 1, exited(4));
    world.end("b-probe-64", 1, done());
    world.end("b-train-64", 1, done());
    world.end("c-train", 1, done());
    assert_eq!(world.did(), ["spawn b-probe-128 #1", "spawn b-probe-64 #1", "spawn b-train-64 #1", "spawn c-train #1", "finish 0"]);
    assert!(matches!(world.events.last(), Some(EventKind::RunEnded { outstanding: 1, .. })));
}

/// What a random world does next.
#[derive(Clone, Debug)]
enum Move {
    End(usize, u8),
    Signal,
    Advance(u64),
    Step(usize),
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        8 => (0_usize..4, 0_u8..6).prop_map(|(which, how)| Move::End(which, how)),
        1 => Just(Move::Signal),
        3 => (1_u64..60).prop_map(Move::Advance),
        3 => (0_usize..4).prop_map(Move::Step),
    ]
}

proptest! {
    /// Whatever happens in whatever order: no trial runs twice at once, no more run than there are jobs, cores are never shared, nothing starts after a
    /// signal, what was settled is never run again, and once every attempt has ended the run ends exactly once.
    #[test]
    fn no_order_of_events_breaks_the_run(jobs in 1_usize..4, moves in prop::collection::vec(moves(), 0..60)) {
        let mut plan = work(vec![searched("a", &[32, 64, 128, 512, 1024]), fixed("b"), searched("c", &[64, 128]), fixed("d")]);
        plan.limits.jobs = Some(jobs);
        plan.limits.max_consecutive_infra_failures = 4;
        let mut world = World::begin(plan);
        let mut running: BTreeMap<TrialId, (u32, Vec<usize>)> = BTreeMap::new();
        let mut settled: BTreeSet<TrialId> = BTreeSet::new();
        let mut finished = 0;
        let mut stopped = false;
        let endings = [done(), exited(4), exited(1), cannot_start(), exited(75), signalled(9)];
        let quiet = (0..400).map(|_| Move::End(0, 0));
        for next in moves.into_iter().chain(quiet) {
            for event in std::mem::take(&mut world.events) {
                if let EventKind::TrialEnded { trial, outcome, .. } = event && outcome.settles_the_trial() {
                    settled.insert(trial);
                }
            }
            for command in std::mem::take(&mut world.commands) {
                match command {
                    Command::Spawn(order) => {
                        prop_assert!(!stopped, "started after a signal");
                        prop_assert!(!settled.contains(&order.trial.id), "ran a settled trial");
                        prop_assert!(running.values().all(|(_, cores)| cores.iter().all(|core| !order.place.cores.contains(core))), "shared a core");
                        prop_assert!(running.insert(order.trial.id, (order.attempt, order.place.cores)).is_none(), "ran twice at once");
                        prop_assert!(running.len() <= jobs);
                    }
                    Command::Examine { trial, .. } | Command::Terminate(trial) | Command::Kill(trial) => prop_assert!(running.contains_key(&trial)),
                    Command::Finish(_) => {
                        prop_assert!(running.is_empty(), "left something running");
                        finished += 1;
                    }
                }
            }
            let nth = |which: usize| running.keys().nth(which % running.len().max(1)).cloned();
            match next {
                Move::End(which, how) => if let Some(trial) = nth(which) {
                    let (attempt, _) = running.remove(&trial).unwrap();
                    world.give(Input::Ended { trial, attempt, ending: Box::new(endings[how as usize].clone()) });
                } else {
                    // What waits for its next try gets it.
                    let now = world.now.as_secs() + 1;
                    world.tick(now);
                },
                Move::Signal => {
                    stopped |= finished == 0;
                    world.give(Input::Signal);
                }
                Move::Advance(by) => {
                    let now = world.now.as_secs() + by;
                    world.tick(now);
                }
                Move::Step(which) => if let Some(trial) = nth(which) {
                    let attempt = running[&trial].0;
                    world.give(Input::Message { trial, attempt, message: Message { at: Timestamp::now(), kind: training_step() } });
                },
            }
        }
        prop_assert_eq!(finished, 1);
    }
}

#[test]
fn the_details_of_out_of_memory_reach_the_event() {
    let mut world = World::begin(work(vec![searched("a", &[64])]));
    let details = OutOfMemory { rank: 1, requested_bytes: 20_480, in_use_bytes: 990, budget_bytes: 1000, phase: "backward".into() };
    world.end("a-probe-64", 1, AttemptEnding { out_of_memory: Some(details), ..exited(4) });
    assert_eq!(world.outcomes(), ["a-probe-64: out of device memory: rank 1 asked for 0.02 MiB with 990 B of 1000 B in use (backward)"]);
}

/// A run of fixed configurations on a cluster, everything that was started in its queue.
fn on_a_cluster(names: &[&str], limits: impl FnOnce(&mut Work)) -> World {
    let mut work = work(names.iter().copied().map(fixed).collect());
    work.cluster = Some(Cluster { nodes: 1 });
    limits(&mut work);
    let mut run = World::begin(work);
    for name in names {
        run.give(Input::Queued { trial: id(&format!("{name}-train")), attempt: 1 });
    }
    run
}

/// On a cluster everything that is ready goes off at once; what waits for its turn takes no time, and what was requeued begins anew.
#[test]
fn clocks_stand_still_in_a_queue() {
    let mut run = on_a_cluster(&["a", "b", "c", "d", "e", "f"], |_| {});
    assert_eq!(run.did().len(), 6);
    run.tick(100_000);
    run.give(Input::Began { trial: id("a-train"), attempt: 1 });
    run.tick(100_099);
    run.give(Input::Queued { trial: id("a-train"), attempt: 1 });
    run.tick(200_000);
    run.give(Input::Began { trial: id("a-train"), attempt: 1 });
    // A word on an attempt that is none.
    run.give(Input::Began { trial: id("b-train"), attempt: 2 });
    run.tick(200_099);
    assert_eq!(run.did(), [""; 0]);
    run.tick(200_100);
    assert_eq!(run.did(), ["examine a-train: No progress for 100.0 s. Last phase: none. Last step: none.", "terminate a-train"]);
}

/// What has not begun does not begin any more after a failure that ends the run, and what runs ends by itself.
#[test]
fn what_waits_is_taken_back_when_the_run_stops() {
    let mut run = on_a_cluster(&["a", "b", "c"], |work| work.fail_fast = true);
    run.give(Input::Began { trial: id("a-train"), attempt: 1 });
    run.give(Input::Began { trial: id("b-train"), attempt: 1 });
    run.did();
    run.end("a-train", 1, exited(3));
    assert_eq!(run.did(), ["terminate c-train"]);
}

/// Attempts that an earlier `sweep run` left running are this one's: they are not started again.
#[test]
fn attempts_that_run_already_are_adopted() {
    let mut resumed = work(vec![fixed("a"), searched("b", &[64, 128]), fixed("c")]);
    resumed.cluster = Some(Cluster { nodes: 1 });
    resumed.adopted = BTreeMap::from([(id("a-train"), 2), (id("b-probe-128"), 1)]);
    resumed.known = BTreeMap::from([(id("a-train"), KnownTrial { attempts: 2, outcome: None, afresh: false })]);
    let mut run = World::begin(resumed);
    assert_eq!(run.did(), ["spawn c-train #1"]);
    assert_eq!(run.events.iter().filter(|event| matches!(event, EventKind::TrialStarted { .. })).count(), 3);
    run.give(Input::Began { trial: id("a-train"), attempt: 2 });
    run.give(Input::Message { trial: id("a-train"), attempt: 2, message: Message { at: Timestamp::now(), kind: training_step() } });
    run.end("a-train", 2, exited(75));
    assert_eq!(run.did(), ["spawn a-train #3"]);
    run.end("b-probe-128", 1, done());
    assert_eq!(run.did(), ["spawn b-train-128 #1"]);
}
