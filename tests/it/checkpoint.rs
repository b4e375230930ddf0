//! State saved by one process and gone on from by another: the same numbers to the last bit, whatever ended the first.

use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::Signal;
use sweep::protocol::{Architecture, CheckpointRequest, Message, MessageKind, Step, TrialEnding, TrialRequest, TrialResult};
use sweep::spec::settings::{DType, LrSchedulerType, MixedPrecision, ReshardAfterForward, Settings, ShardingStrategy, StateDictType, TrainDuration};
use sweep::store::{AttemptFolder, RunFolder, read_json, read_json_lines, write_json};
use sweep::trial::{Purpose, TrialId, TrialOutcome};

use crate::trial::{Attempt, write_tokens};
use crate::world::{Ended as SweepEnded, World, lives, signal, wait_until};

/// A trial's folder: attempts, and the checkpoints they share.
struct Trial {
    attempt: Attempt,
}

/// An attempt that ended.
struct Ended {
    output: Output,
    messages: Vec<MessageKind>,
    result: Option<TrialResult>,
}

impl Trial {
    /// A trial on this data that saves every `save_steps` steps.
    fn new(mut attempt: Attempt, save_steps: Option<u64>) -> Self {
        attempt.request.checkpoint = Some(CheckpointRequest { folder: "../checkpoints".into(), save_steps, save_total_limit: None });
        Self { attempt }
    }

    fn request(&mut self) -> &mut TrialRequest {
        &mut self.attempt.request
    }

    fn asks(&mut self) -> &mut CheckpointRequest {
        self.attempt.request.checkpoint.as_mut().unwrap()
    }

    fn checkpoint(&self, step: u64) -> PathBuf {
        self.attempt.folder.path().join(format!("checkpoints/step-{step}"))
    }

    fn folder(&self, number: u32) -> AttemptFolder {
        AttemptFolder(self.attempt.folder.path().join(format!("attempt-{number}")))
    }

    fn start(&self, number: u32) -> Child {
        self.start_with(number, &[])
    }

    fn start_with(&self, number: u32, environment: &[(&str, &str)]) -> Child {
        let folder = self.folder(number);
        fs::create_dir_all(&folder.0).unwrap();
        write_json(&folder.request(), &self.attempt.request).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sweep"));
        command
            .arg("trial")
            .arg(folder.request())
            .env_clear()
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn messages(&self, number: u32) -> Vec<MessageKind> {
        read_json_lines::<Message>(&self.folder(number).messages()).unwrap().records.into_iter().map(|message| message.kind).collect()
    }

    fn ended(&self, number: u32, child: Child) -> Ended {
        let output = child.wait_with_output().unwrap();
        let result = self.folder(number).result();
        Ended { output, messages: self.messages(number), result: result.exists().then(|| read_json(&result).unwrap()) }
    }

    fn run(&self, number: u32) -> Ended {
        self.ended(number, self.start(number))
    }
}

impl Ended {
    #[track_caller]
    fn with_code(self, code: i32) -> Self {
        assert_eq!(self.output.status.code(), Some(code), "{}", self.stderr());
        self
    }

    fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    fn result(&self) -> &TrialResult {
        self.result.as_ref().unwrap()
    }

    /// What every step measured, but for time and memory; as JSON, since NaN equals nothing.
    fn steps(&self) -> Vec<String> {
        let measured = |step: &Step| Step { step_seconds: 0.0, allocated_bytes: Vec::new(), peak_bytes: Vec::new(), ..step.clone() };
        let steps = self.messages.iter().filter_map(|message| if let MessageKind::Step(step) = message { Some(measured(step)) } else { None });
        steps.map(|step| serde_json::to_string(&step).unwrap()).collect()
    }

    /// Step and loss of every evaluation.
    fn evaluations(&self) -> Vec<(u64, f64)> {
        let evaluation = |message: &MessageKind| match message {
            MessageKind::Eval { step, evaluation } => Some((*step, evaluation.loss.0)),
            _ => None,
        };
        self.messages.iter().filter_map(evaluation).collect()
    }

    fn saved(&self) -> Vec<u64> {
        let saved = |message: &MessageKind| match message {
            MessageKind::Checkpoint { step, path, seconds } => {
                assert!(path.ends_with(format!("checkpoints/step-{step}")) && *seconds > 0.0, "{message:?}");
                Some(*step)
            }
            _ => None,
        };
        self.messages.iter().filter_map(saved).collect()
    }

    fn warnings(&self) -> Vec<&str> {
        self.messages
            .iter()
            .filter_map(|message| if let MessageKind::Warning { message } = message { Some(message.as_str()) } else { None })
            .collect()
    }
}

/// Asserts that both attempts together measured what the undisturbed one did.
#[track_caller]
fn assert_same(name: &str, whole: &Ended, first: &Ended, second: &Ended, resumed_from: u64) {
    let expected = whole.steps();
    let (before, after) = (first.steps(), second.steps());
    assert_eq!(before[..], expected[..before.len()], "{name}: before the checkpoint");
    assert!(after[0].starts_with(&format!("{{\"step\":{},", resumed_from + 1)), "{name}: messages begin at the next step: {}", after[0]);
    assert_eq!(after[..], expected[resumed_from as usize..], "{name}: after the checkpoint");
    let (whole, second) = (whole.result(), second.result());
    assert_eq!(second.ending, TrialEnding::Done, "{name}");
    assert_eq!((second.optimizer_steps, second.skipped_steps, second.tokens_seen), (whole.optimizer_steps, whole.skipped_steps, whole.tokens_seen));
    let losses = |result: &TrialResult| [&result.evaluation, &result.evaluation_common].map(|evaluation| evaluation.as_ref().map(|found| found.loss));
    assert_eq!(losses(second), losses(whole), "{name}");
}

/// Three epochs of four or two steps.
fn pattern(world_size: usize) -> Attempt {
    let mut attempt = Attempt::pattern(world_size, 4 * world_size * 2);
    let settings = &mut attempt.request.settings;
    settings.train.duration = TrainDuration::NumTrainEpochs(3.0);
    settings.train.lr_scheduler_type = LrSchedulerType::Cosine;
    settings.train.warmup_steps = 2;
    settings.train.eval_steps = Some(5);
    attempt
}

/// Saving changes nothing, and a new process that goes on from any checkpoint measures to the last bit what an undisturbed one does: every strategy, layout,
/// precision, dropout, accumulation, offload and kind of state dict.
#[test]
fn training_goes_on_to_the_last_bit() {
    type Change = fn(&mut Settings);
    let cases: [(&str, usize, Change); 11] = [
        ("one rank", 1, |_| ()),
        ("FULL_SHARD, sharded", 2, |settings| settings.fsdp.state_dict_type = StateDictType::ShardedStateDict),
        ("FULL_SHARD, full", 3, |settings| settings.fsdp.state_dict_type = StateDictType::FullStateDict),
        ("NO_SHARD, sharded", 2, |settings| {
            settings.fsdp.sharding_strategy = ShardingStrategy::NoShard;
            settings.fsdp.state_dict_type = StateDictType::ShardedStateDict;
        }),
        ("HYBRID_SHARD, 2 x 2, sharded", 4, |settings| {
            settings.fsdp.sharding_strategy = ShardingStrategy::HybridShard;
            settings.fsdp.hybrid_shard_size = Some(2);
            settings.fsdp.state_dict_type = StateDictType::ShardedStateDict;
        }),
        ("FSDP2, full", 2, |settings| {
            settings.fsdp.fsdp_version = 2;
            settings.fsdp.reshard_after_forward = Some(ReshardAfterForward::Flag(true));
        }),
        ("fp16, overflowing", 2, |settings| {
            settings.fsdp.mixed_precision = MixedPrecision::uniform(DType::Fp16);
            settings.fsdp.initial_loss_scale = (1_u64 << 19) as f64;
        }),
        ("bf16, SHARD_GRAD_OP, flat", 2, |settings| {
            settings.fsdp.mixed_precision = MixedPrecision::uniform(DType::Bf16);
            settings.fsdp.sharding_strategy = ShardingStrategy::ShardGradOp;
            settings.fsdp.use_orig_params = false;
            settings.fsdp.activation_checkpointing = true;
        }),
        ("accumulated", 2, |settings| settings.train.gradient_accumulation_steps = 2),
        ("accumulated, each pass reduced, offloaded, flat", 2, |settings| {
            settings.train.gradient_accumulation_steps = 2;
            settings.train.sync_each_batch = true;
            settings.fsdp.cpu_offload = true;
            settings.fsdp.use_orig_params = false;
            settings.fsdp.state_dict_type = StateDictType::ShardedStateDict;
        }),
        ("norms do not decay", 2, |settings| settings.train.decay_norm_and_bias = false),
    ];
    for (name, world_size, change) in cases {
        let mut trial = Trial::new(pattern(world_size), None);
        change(&mut trial.request().settings);
        if trial.request().settings.train.gradient_accumulation_steps == 2 {
            trial.request().settings.train.per_device_train_batch_size = 1;
        }
        if let Architecture::Gpt2(sizes) = &mut trial.request().model.architecture {
            sizes.dropout = 0.1;
        }
        let checkpoint = trial.request().checkpoint.take();
        let whole = trial.run(1).with_code(0);
        let steps = whole.result().optimizer_steps;
        assert_eq!(steps, 12, "{name}");
        trial.request().checkpoint = checkpoint;

        trial.asks().save_steps = Some(5);
        let saved = trial.run(2).with_code(0);
        assert_same(name, &whole, &saved, &saved, 0);
        assert_eq!(saved.saved(), [5, 10], "{name}");
        let timing = &saved.result().timing;
        assert!(timing.checkpoint_seconds > 0.0 && timing.steady_steps == 9, "{name}: {timing:?}");

        // Also the epoch that the checkpoint stands in the middle of, and an evaluation that was due when it was saved.
        for (number, step) in [(3, 10), (4, 5)] {
            let second = trial.run(number).with_code(0);
            assert_same(name, &whole, &saved, &second, step);
            let expected: Vec<_> = whole.evaluations().into_iter().filter(|(at, _)| *at >= step).collect();
            assert_eq!(second.evaluations(), expected, "{name}");
            assert!(second.result().timing.steady_steps <= 9 - 2, "the first steps of the second process do not count");
            fs::remove_dir_all(trial.checkpoint(10)).unwrap();
        }
        if name.starts_with("fp16") {
            assert!(whole.result().skipped_steps > 0 && whole.result().skipped_steps < 5);
        }
    }
}

/// A trial that takes long enough to be asked to end in the middle.
fn long() -> Trial {
    let mut attempt = pattern(2);
    attempt.request.settings.train.duration = TrainDuration::MaxSteps(150);
    attempt.request.settings.train.eval_steps = None;
    Trial::new(attempt, None)
}

/// Asked to end, a trial saves its state at the next step though nobody asked for checkpoints, and goes on where it was; again and again.
#[test]
fn a_trial_that_is_asked_to_end_goes_on_where_it_was() {
    let mut trial = long();
    let checkpoint = trial.request().checkpoint.take();
    let whole = trial.run(1).with_code(0);
    trial.request().checkpoint = checkpoint;
    let mut from = 0;
    for (number, asked) in [(2, Signal::USR2), (3, Signal::TERM)] {
        let child = trial.start(number);
        wait_until("it takes steps", || trial.messages(number).iter().any(|message| matches!(message, MessageKind::Step(_))));
        signal(&child, asked);
        let ended = trial.ended(number, child).with_code(75);
        assert_eq!(ended.stderr(), "");
        let TrialEnding::Checkpointed { step } = ended.result().ending else { panic!("{:?}", ended.result) };
        assert_eq!(ended.saved(), [step]);
        assert_eq!(ended.steps()[..], whole.steps()[from as usize..step as usize]);
        assert!(trial.checkpoint(step).exists() && step > from);
        assert!(from == 0 || !trial.checkpoint(from).exists(), "a checkpoint that nobody asked for is superseded by the next");
        from = step;
    }
    let last = trial.run(4).with_code(0);
    assert_same("asked to end twice", &whole, &whole, &last, from);
    assert!(!trial.checkpoint(from).parent().unwrap().exists(), "nobody asked for checkpoints, so none are left");
}

/// During an evaluation there is no next step: the state after the last one is saved at once.
#[test]
fn a_trial_that_is_asked_to_end_while_it_evaluates_evaluates_again() {
    let mut attempt = pattern(2);
    let eval = attempt.folder.path().join("long.safetensors");
    let blocks = 4000;
    write_tokens(&eval, &[blocks, 16], &(0..blocks as i32 * 16).map(|index| index / 3 % 32).collect::<Vec<_>>());
    attempt.request.data.eval = Some(eval);
    attempt.request.data.eval_tokens = blocks as u64 * 16;
    attempt.request.settings.train.eval_steps = None;
    let trial = Trial::new(attempt, None);
    let child = trial.start(1);
    let evaluates = |message: &MessageKind| matches!(message, MessageKind::Phase { phase } if phase == "evaluate");
    wait_until("it evaluates", || trial.messages(1).iter().any(evaluates));
    signal(&child, Signal::USR2);
    let first = trial.ended(1, child).with_code(75);
    assert_eq!((first.result().ending.clone(), first.saved(), first.steps().len()), (TrialEnding::Checkpointed { step: 12 }, vec![12], 12));
    assert_eq!(first.evaluations(), []);
    let second = trial.run(2).with_code(0);
    assert_eq!((second.steps().len(), second.result().optimizer_steps), (0, 12));
    assert_eq!(second.result().evaluation.as_ref().unwrap().scored_tokens, blocks as u64 * 15);
}

/// Before the first step there is nothing to save, and nothing of a probe ever is: both end at once.
#[test]
fn where_there_is_nothing_to_save_a_request_to_end_ends_at_once() {
    for purpose in [Purpose::Train, Purpose::Probe] {
        let mut trial = Trial::new(pattern(2), Some(1));
        if purpose == Purpose::Probe {
            let request = trial.request();
            (request.purpose, request.probe_steps, request.checkpoint) = (purpose, Some(1_000_000), None);
        } else {
            // A pipe that nobody writes to: it waits there for ever.
            let pipe = trial.attempt.folder.path().join("pipe");
            assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
            trial.request().data.train = pipe;
        }
        let child = trial.start(1);
        let last = if purpose == Purpose::Probe { "train" } else { "load" };
        wait_until("it begins", || trial.messages(1).iter().any(|message| matches!(message, MessageKind::Phase { phase } if phase == last)));
        signal(&child, Signal::TERM);
        let ended = trial.ended(1, child).with_code(75);
        assert!(ended.result.is_none() && !trial.checkpoint(1).parent().unwrap().exists());
    }
}

/// A trial that does not come to its next step ends by the second TERM, with nothing saved.
#[test]
fn a_second_request_ends_a_trial_at_once() {
    let trial = long();
    let mut child = trial.start_with(1, &[("SWEEP_FAULT", r#"{"rank": 1, "step": 2, "kind": "block"}"#)]);
    wait_until("a rank is blocked", || trial.messages(1).iter().any(|message| matches!(message, MessageKind::Step(_))));
    // Two that come at the same time are one.
    while child.try_wait().unwrap().is_none() {
        signal(&child, Signal::TERM);
        std::thread::yield_now();
    }
    let ended = trial.ended(1, child);
    assert_eq!((ended.output.status.signal(), ended.saved()), (Some(15), Vec::new()));
    assert!(ended.result.is_none() && !trial.checkpoint(1).exists());
}

#[test]
fn old_checkpoints_go_once_a_new_one_is_complete() {
    let mut trial = Trial::new(pattern(2), Some(3));
    trial.asks().save_total_limit = Some(2);
    let ended = trial.run(1).with_code(0);
    assert_eq!(ended.saved(), [3, 6, 9, 12]);
    let mut left: Vec<_> = fs::read_dir(trial.attempt.folder.path().join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["step-12", "step-9"]);
    // All steps are taken: only the evaluation is left to do.
    let again = trial.run(2).with_code(0);
    let losses = [&ended, &again].map(|ended| ended.result().evaluation.as_ref().unwrap().loss);
    assert!(again.steps().is_empty() && losses[0] == losses[1]);
}

/// Files of a checkpoint by name.
fn files(checkpoint: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// CASES 32: a damaged checkpoint is refused by name; the one before it is taken instead, and where there is none the trial ends before it begins.
#[test]
fn a_damaged_checkpoint_is_refused_by_name() {
    let mut trial = Trial::new(pattern(2), Some(4));
    trial.request().settings.fsdp.state_dict_type = StateDictType::ShardedStateDict;
    trial.request().settings.train.duration = TrainDuration::MaxSteps(10);
    let whole = trial.run(1).with_code(0);
    let names: Vec<_> = files(&trial.checkpoint(8)).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
    assert_eq!(names, ["index.json", "rank-0.safetensors", "rank-1.safetensors"]);
    let flip: fn(&Path) = |file| {
        let mut bytes = fs::read(file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    let truncate: fn(&Path) = |file| fs::File::options().write(true).open(file).unwrap().set_len(fs::metadata(file).unwrap().len() - 1).unwrap();
    let remove: fn(&Path) = |file| fs::remove_file(file).unwrap();
    let cases = [
        ("rank-1.safetensors", flip, "rank-1.safetensors is damaged"),
        ("index.json", flip, "index.json is damaged"),
        ("rank-0.safetensors", truncate, "rank-0.safetensors is"),
        ("index.json", truncate, "index.json is damaged"),
        ("rank-0.safetensors", remove, "rank-0.safetensors is missing"),
        ("index.json", remove, "index.json is missing, so it is incomplete"),
    ];
    for (number, (file, damage, expected)) in (2..).zip(cases) {
        damage(&trial.checkpoint(8).join(file));
        let ended = trial.run(number).with_code(0);
        assert_same(expected, &whole, &whole, &ended, 4);
        let warnings = ended.warnings();
        assert!(warnings.len() == 1 && warnings[0].contains("step-8 cannot be used") && warnings[0].contains(expected), "{warnings:?}");
        assert!(warnings[0].ends_with("training goes on from step 4"), "{warnings:?}");
        assert_eq!((ended.saved(), ended.result().warnings.len()), (vec![8], 1), "and the damaged one is replaced");
    }
    fs::remove_dir_all(trial.checkpoint(4)).unwrap();
    flip(&trial.checkpoint(8).join("rank-0.safetensors"));
    let ended = trial.run(20).with_code(2);
    assert!(ended.stderr().contains("step-8 cannot be used: rank-0.safetensors is damaged"), "{}", ended.stderr());
    assert_eq!(ended.steps().len(), 0);
}

/// A checkpoint of another trial is refused, however well it would fit.
#[test]
fn a_checkpoint_of_another_trial_is_refused() {
    let mut trial = Trial::new(pattern(2), Some(4));
    trial.run(1).with_code(0);
    trial.request().trial = TrialId("another".to_owned());
    let ended = trial.run(2).with_code(2);
    assert!(ended.stderr().contains("it belongs to trial test, not to another"), "{}", ended.stderr());
}

/// An attempt that was killed while it saved leaves nothing that is taken for a checkpoint.
#[test]
fn what_was_not_saved_whole_is_no_checkpoint() {
    let trial = Trial::new(pattern(2), Some(8));
    let whole = trial.run(1).with_code(0);
    let complete = trial.checkpoint(8);
    let partial = complete.with_file_name(".partial-step-8");
    fs::rename(&complete, &partial).unwrap();
    let ended = trial.run(2).with_code(0);
    assert_same("killed while it saved", &whole, &whole, &ended, 0);
    assert!(complete.exists() && !partial.exists());
    assert_eq!(ended.warnings(), [""; 0]);
}

/// A small training on synthetic data, shuffled, by the real trainer.
const REAL: &str = r#"
[sweep]
name = "real"
[model]
id = "gpt2-tiny"
init = "random"
config = { n_layer = 1, n_embd = 32, n_head = 2, dropout = 0.1 }
[data]
dataset = { synthetic = { vocab = 64, train_tokens = 4096, eval_tokens = 512 } }
[train]
per_device_train_batch_size = 2
block_size = 32
max_steps = 150
[device]
kind = "cpu"
world_size = 2
[limits]
grace_period = "60s"
"#;

/// A world in which `sweep` starts itself for trials.
fn real() -> World {
    let mut world = World::new(REAL);
    world.program = env!("CARGO_BIN_EXE_sweep").into();
    world
}

fn of_attempt(run: &RunFolder, id: &TrialId, attempt: u32) -> Vec<MessageKind> {
    read_json_lines::<Message>(&run.attempt(id, attempt).messages()).unwrap().records.into_iter().map(|message| message.kind).collect()
}

/// Step and loss of the steps of these attempts, later attempts after earlier ones.
fn losses(run: &RunFolder, id: &TrialId, attempts: RangeInclusive<u32>) -> Vec<(u64, f64)> {
    let all = attempts.flat_map(|attempt| of_attempt(run, id, attempt));
    all.filter_map(|message| if let MessageKind::Step(step) = message { Some((step.step, step.loss.0)) } else { None }).collect()
}

/// A trial that is preempted runs again in the same `sweep run`; one that Ctrl-C interrupts runs again in the next. Both go on where they were.
#[test]
fn a_run_goes_on_with_what_was_preempted_or_interrupted() {
    let world = real();
    world.run(&[]).with_code(0);
    let whole = world.newest();
    let id = world.state().trials.into_keys().next().unwrap();
    let expected = losses(&whole, &id, 1..=1);
    assert_eq!(expected.len(), 150);

    let run = world.start(&["--new"]);
    let running = || {
        let newest = world.newest();
        let messages = of_attempt(&newest, &id, 1);
        let started = messages.iter().find_map(|message| if let MessageKind::Started { pid, .. } = message { Some(*pid) } else { None });
        started.filter(|_| newest != whole && messages.iter().any(|message| matches!(message, MessageKind::Step(_))))
    };
    wait_until("the trial takes steps", || running().is_some());
    let child = rustix::process::Pid::from_raw(running().unwrap().cast_signed()).unwrap();
    rustix::process::kill_process(child, Signal::USR2).unwrap();
    let newest = world.newest();
    wait_until("the second attempt takes steps", || of_attempt(&newest, &id, 2).iter().any(|message| matches!(message, MessageKind::Step(_))));
    signal(&run, Signal::INT);
    SweepEnded::of(run.wait_with_output().unwrap()).with_code(5);
    assert_eq!(world.state().trials[&id].outcome(), Some(&TrialOutcome::Preempted));

    world.run(&[]).with_code(0);
    assert_eq!((world.newest(), world.state().trials[&id].attempts), (newest.clone(), 3));
    assert_eq!(losses(&newest, &id, 1..=3), expected);
    let results = [(&whole, 1), (&newest, 3)].map(|(run, attempt)| read_json::<TrialResult>(&run.attempt(&id, attempt).result()).unwrap());
    assert_eq!(results[0].evaluation.as_ref().unwrap().loss, results[1].evaluation.as_ref().unwrap().loss);
    assert_eq!((results[1].optimizer_steps, results[1].tokens_seen), (results[0].optimizer_steps, results[0].tokens_seen));
}

/// `sweep` and its trial are killed in the middle: the trial goes on from its last checkpoint, and ends as one that nobody disturbed.
#[test]
fn a_killed_run_goes_on_from_the_last_checkpoint() {
    let world = real();
    world.run(&[]).with_code(0);
    let whole = world.newest();
    let id = world.state().trials.into_keys().next().unwrap();
    let saving = format!("{REAL}[checkpoint]\nsave_steps = 20\nsave_total_limit = 2\n[fsdp]\nstate_dict_type = \"FULL_STATE_DICT\"\n");
    fs::write(world.path("sweep.toml"), saving).unwrap();
    let mut run = world.start(&[]);
    let attempt = |number| of_attempt(&world.newest(), &id, number);
    let saved = |message: &MessageKind| matches!(message, MessageKind::Checkpoint { .. });
    wait_until("a checkpoint is saved", || world.newest() != whole && attempt(1).iter().any(saved));
    let Some(MessageKind::Started { pid, .. }) = attempt(1).first().cloned() else { panic!("{:?}", attempt(1)) };
    run.kill().unwrap();
    run.wait().unwrap();
    wait_until("its child is gone", || !lives(pid));
    let last =
        attempt(1).iter().filter_map(|message| if let MessageKind::Checkpoint { step, .. } = message { Some(*step) } else { None }).max().unwrap();

    world.run(&[]).with_code(0);
    let newest = world.newest();
    let expected = losses(&whole, &id, 1..=1);
    let second = losses(&newest, &id, 2..=2);
    let resumed = second[0].0 - 1;
    // A checkpoint may have become complete in the moment of the kill, before it could be told of.
    assert!(resumed == last || resumed == last + 20, "it went on from step {resumed}, the last checkpoint was {last}");
    assert_eq!(second, expected[resumed as usize..]);
    let mut left: Vec<_> = fs::read_dir(newest.checkpoints(&id)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["step-120", "step-140"]);
}
