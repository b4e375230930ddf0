//! `sweep trial` as a process: requests in, messages, result and exit code out.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::tensor::TensorView;
use safetensors::{Dtype as FileDtype, serialize_to_file};
use sweep::protocol::{
    Architecture, Gpt2Config, Message, MessageKind, OutOfMemory, PROTOCOL, PreparedData, ResolvedModel, Step, TrialEnding, TrialRequest, TrialResult,
};
use sweep::spec::settings::{DType, LrSchedulerType, MixedPrecision, Settings, ShardingStrategy, TrainDuration};
use sweep::spec::{self, Overlays, Surroundings};
use sweep::store::{AttemptFolder, read_json, read_json_lines, write_json};
use sweep::trial::{Purpose, TrialId};
use tempfile::TempDir;

/// An attempt's folder and the request in it.
pub(crate) struct Attempt {
    pub(crate) folder: TempDir,
    pub(crate) request: TrialRequest,
}

/// A trial that ended.
struct Ended {
    _folder: TempDir,
    output: Output,
    messages: Vec<MessageKind>,
    result: Option<TrialResult>,
}

impl Ended {
    fn code(&self) -> Option<i32> {
        self.output.status.code()
    }

    fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    #[track_caller]
    fn done(&self) -> &TrialResult {
        assert_eq!(self.code(), Some(0), "{}", self.stderr());
        let result = self.result.as_ref().unwrap();
        assert_eq!(result.ending, TrialEnding::Done);
        result
    }

    fn steps(&self) -> Vec<&Step> {
        self.messages.iter().filter_map(|message| if let MessageKind::Step(step) = message { Some(step) } else { None }).collect()
    }
}

impl Attempt {
    fn new(settings: Settings, model: ResolvedModel, data: PreparedData, block_size: usize) -> Self {
        let request = TrialRequest {
            protocol: PROTOCOL,
            trial: TrialId("test".to_owned()),
            label: "test".to_owned(),
            purpose: Purpose::Train,
            probe_steps: None,
            block_size,
            seed: 1,
            settings,
            model,
            data,
            cores: Vec::new(),
            placement: None,
            checkpoint: None,
            stall_timeout_seconds: None,
            save_model: None,
        };
        Self { folder: TempDir::new().unwrap(), request }
    }

    /// Training of the small GPT-2 of the reference runs on their batches.
    pub(crate) fn reference(world_size: usize) -> Self {
        let gold = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gold");
        let mut settings = settings(world_size);
        settings.train.per_device_train_batch_size = 8 / world_size;
        settings.train.duration = TrainDuration::MaxSteps(30);
        let data = PreparedData {
            train: gold.join("fsdp/batches.safetensors"),
            eval: None,
            fingerprint: String::new(),
            vocab_size: 1024,
            train_tokens: 30 * 8 * 64,
            eval_tokens: 0,
            floor_perplexity: None,
            description: String::new(),
        };
        Self::new(settings, ResolvedModel { weights: Some(gold.join("tiny-gpt2.safetensors")), ..tiny_model(1024) }, data, 64)
    }

    /// Training of a tiny random GPT-2 on a simple pattern of `blocks` blocks of 16 tokens; 5 more are for evaluation.
    pub(crate) fn pattern(world_size: usize, blocks: usize) -> Self {
        let mut attempt = Self::new(settings(world_size), tiny_model(32), tokens("", 0), 16);
        let path = |name: &str| attempt.folder.path().join(name);
        let ids = |count: usize| (0..count as i32 * 16).map(|index| (index * index / 3) % 32).collect::<Vec<_>>();
        let global_batch = world_size * 2;
        assert!(blocks.is_multiple_of(global_batch));
        write_tokens(&path("train.safetensors"), &[blocks / global_batch, global_batch, 16], &ids(blocks));
        write_tokens(&path("eval.safetensors"), &[5, 16], &ids(5));
        attempt.request.data = PreparedData {
            train: path("train.safetensors"),
            eval: Some(path("eval.safetensors")),
            train_tokens: blocks as u64 * 16,
            eval_tokens: 5 * 16,
            ..tokens("", 32)
        };
        attempt
    }

    fn path(&self) -> PathBuf {
        AttemptFolder(self.folder.path().to_owned()).request()
    }

    fn run(self) -> Ended {
        write_json(&self.path(), &self.request).unwrap();
        self.run_as_written()
    }

    fn run_as_written(self) -> Ended {
        self.run_with(&[])
    }

    fn run_with(self, environment: &[(&str, &str)]) -> Ended {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sweep"));
        let output = command.arg("trial").arg(self.path()).env_clear().envs(environment.iter().copied()).output().unwrap();
        let folder = AttemptFolder(self.folder.path().to_owned());
        let messages = read_json_lines::<Message>(&folder.messages()).unwrap();
        assert_eq!(messages.unreadable, []);
        Ended {
            output,
            messages: messages.records.into_iter().map(|message| message.kind).collect(),
            result: folder.result().exists().then(|| read_json(&folder.result()).unwrap()),
            _folder: self.folder,
        }
    }
}

fn tokens(train: &str, vocab_size: usize) -> PreparedData {
    PreparedData {
        train: train.into(),
        eval: None,
        fingerprint: String::new(),
        vocab_size,
        train_tokens: 0,
        eval_tokens: 0,
        floor_perplexity: None,
        description: String::new(),
    }
}

pub(crate) fn write_tokens(path: &Path, shape: &[usize], ids: &[i32]) {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    serialize_to_file([("ids", TensorView::new(FileDtype::I32, shape.to_vec(), &bytes).unwrap())], None, path).unwrap();
}

fn tiny_model(vocab_size: usize) -> ResolvedModel {
    let architecture = Architecture::Gpt2(Gpt2Config { vocab_size, n_positions: 128, n_embd: 64, n_layer: 2, n_head: 2, ..Gpt2Config::DEFAULT });
    ResolvedModel { architecture, weights: None, fingerprint: None }
}

/// The settings of the reference runs, two sequences a rank.
fn settings(world_size: usize) -> Settings {
    let text = r#"
        model = { id = "gpt2-tiny", init = "random" }
        data = { dataset = { token_blocks = "named in the request" }, shuffle = false }

        [train]
        block_size = 16
        eval_block_size = 16
        per_device_train_batch_size = 2
        per_device_eval_batch_size = 2
        num_train_epochs = 1
        learning_rate = 1e-3
        lr_scheduler_type = "constant"
        weight_decay = 0.01
        decay_norm_and_bias = true
        max_grad_norm = 1

        [fsdp]
        auto_wrap_policy = "TRANSFORMER_BASED_WRAP"
        use_orig_params = true

        [device]
        kind = "cpu"
    "#;
    let overlays = Overlays { profile: None, sets: vec![format!("device.world_size={world_size}")] };
    let plan = spec::load("test.toml", text, &overlays, &Surroundings::default()).unwrap();
    plan.rows.get(0).unwrap().settings
}

fn float(dtype: &serde_json::Value) -> Vec<f64> {
    dtype.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Thirty steps of the whole child follow PyTorch's: loss and gradient norm of every step.
#[test]
fn follows_the_reference_runs() {
    let text = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gold/fsdp/training_curves.json")).unwrap();
    let curves: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let expected = &curves["w1/single"];
    let (losses, norms) = (float(&expected["loss"]), float(&expected["grad_norm_before_clip"]));
    type Change = fn(&mut Settings);
    let cases: [(&str, usize, f64, f64, Change); 7] = [
        ("one rank", 1, 2e-6, 2e-6, |_| ()),
        ("FULL_SHARD", 2, 2e-6, 2e-6, |_| ()),
        ("NO_SHARD", 2, 2e-6, 2e-6, |settings| settings.fsdp.sharding_strategy = ShardingStrategy::NoShard),
        ("flat parameters, accumulated, offloaded", 2, 2e-6, 2e-6, |settings| {
            settings.train.per_device_train_batch_size = 2;
            settings.train.gradient_accumulation_steps = 2;
            settings.fsdp.use_orig_params = false;
            settings.fsdp.cpu_offload = true;
        }),
        // CASES 30: clipping sees the whole norm although shards and gradients live in host memory.
        ("offloaded, accumulated, each pass reduced", 2, 2e-6, 2e-6, |settings| {
            settings.train.per_device_train_batch_size = 2;
            settings.train.gradient_accumulation_steps = 2;
            settings.train.sync_each_batch = true;
            settings.fsdp.cpu_offload = true;
        }),
        ("bf16", 2, 2e-3, 1e-2, |settings| settings.fsdp.mixed_precision = MixedPrecision::uniform(DType::Bf16)),
        ("fp16", 2, 3e-4, 1e-3, |settings| settings.fsdp.mixed_precision = MixedPrecision::uniform(DType::Fp16)),
    ];
    for (name, world_size, loss_tolerance, norm_tolerance, change) in cases {
        let mut attempt = Attempt::reference(world_size);
        change(&mut attempt.request.settings);
        let ended = attempt.run();
        let result = ended.done();
        assert_eq!((result.optimizer_steps, result.skipped_steps, result.tokens_seen), (30, 0, 30 * 8 * 64), "{name}");
        assert_eq!((result.parameters, result.peak_bytes.len()), (173_824, world_size), "{name}");
        let steps = ended.steps();
        assert_eq!(steps.len(), 30, "{name}");
        for (index, step) in steps.iter().enumerate() {
            let (loss, norm) = (step.loss.0, step.grad_norm.0);
            assert!((loss - losses[index]).abs() < loss_tolerance, "{name}, step {index}: loss {loss} against {}", losses[index]);
            assert!((norm / norms[index] - 1.0).abs() < norm_tolerance, "{name}, step {index}: norm {norm} against {}", norms[index]);
        }
    }
}

#[test]
fn says_what_it_does_and_measures() {
    let mut attempt = Attempt::pattern(2, 96);
    attempt.request.settings.train.eval_steps = Some(10);
    attempt.request.settings.train.lr_scheduler_type = LrSchedulerType::Linear;
    let ended = attempt.run();
    let result = ended.done();
    let kinds: Vec<String> = ended
        .messages
        .iter()
        .map(|message| match message {
            MessageKind::Started { ranks, .. } => format!("started {ranks}"),
            MessageKind::Phase { phase } => phase.clone(),
            MessageKind::Step(step) => format!("step {}/{}", step.step, step.steps),
            MessageKind::Eval { step, evaluation } => format!("eval {step} at {}", evaluation.block_size),
            other => format!("{other:?}"),
        })
        .collect();
    let step = |steps: std::ops::RangeInclusive<u64>| steps.map(|step| format!("step {step}/24"));
    let mut expected: Vec<String> = ["started 2", "load", "train"].map(str::to_owned).to_vec();
    for (steps, evaluated) in [(1..=10, 10), (11..=20, 20)] {
        expected.extend(step(steps));
        expected.extend(["evaluate".to_owned(), format!("eval {evaluated} at 16"), "train".to_owned()]);
    }
    expected.extend(step(21..=24));
    expected.extend(["evaluate", "eval 24 at 16"].map(str::to_owned));
    assert_eq!(kinds, expected);

    let steps = ended.steps();
    assert!(steps[23].loss.0 < steps[0].loss.0 - 0.1, "it learns: {:?} then {:?}", steps[0].loss, steps[23].loss);
    assert_eq!((steps[0].learning_rate, steps[23].tokens), (1e-3, 64));
    assert!(steps[23].learning_rate < 5e-5);
    let timing = &result.timing;
    assert_eq!((timing.steady_steps, timing.steps_per_epoch), (21, 24.0));
    let steady: f64 = steps[3..].iter().map(|step| step.step_seconds).sum();
    assert!((timing.step_seconds.unwrap() / (steady / 21.0) - 1.0).abs() < 1e-9);
    assert!((timing.epoch_seconds.unwrap() / (steady / 21.0 * 24.0) - 1.0).abs() < 1e-9);
    let evaluation = result.evaluation.as_ref().unwrap();
    assert_eq!((evaluation.block_size, evaluation.scored_tokens), (16, 5 * 15));
    assert!((evaluation.perplexity.0.ln() - evaluation.loss.0).abs() < 1e-9);
    assert_eq!(result.evaluation_common, result.evaluation);
    assert_eq!((result.data.train_blocks, result.data.eval_blocks), (96, 5));
    // What is in use lies under the peak, which never falls, and both ranks hold the same amount within the padding of their shards.
    for step in &steps {
        for rank in 0..2 {
            assert!(step.allocated_bytes[rank] > 0 && step.allocated_bytes[rank] <= step.peak_bytes[rank]);
            assert!(step.peak_bytes[rank] <= result.peak_bytes[rank]);
        }
    }
}

/// Evaluation does not depend on how blocks are dealt: an uneven last batch, more ranks than blocks (CASES 35).
#[test]
fn perplexity_does_not_depend_on_batch_or_world_size() {
    let mut losses = Vec::new();
    for (world_size, batch) in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 4)] {
        let mut attempt = Attempt::pattern(world_size, 12);
        attempt.request.settings.train.per_device_eval_batch_size = batch;
        attempt.request.settings.train.duration = TrainDuration::MaxSteps(0);
        losses.push(attempt.run().done().evaluation.clone().unwrap().loss.0);
    }
    for loss in &losses {
        assert!((loss - losses[0]).abs() < 1e-6, "{losses:?}");
    }
}

#[test]
fn a_probe_ends_after_its_steps_without_a_perplexity() {
    let mut attempt = Attempt::pattern(2, 8);
    (attempt.request.purpose, attempt.request.probe_steps) = (Purpose::Probe, Some(3));
    let ended = attempt.run();
    let result = ended.done();
    // Two steps an epoch: the third is in the second epoch.
    assert_eq!((result.optimizer_steps, &result.evaluation, &result.evaluation_common), (3, &None, &None));
    assert_eq!(ended.messages.last(), Some(&MessageKind::Phase { phase: "evaluate".to_owned() }));
}

/// CASES 30: a step that overflows is skipped and counted, the scale is shown, and a probe does not count it.
#[test]
fn fp16_steps_that_overflow_are_skipped() {
    let mut attempt = Attempt::pattern(2, 8);
    attempt.request.settings.fsdp.mixed_precision = MixedPrecision::uniform(DType::Fp16);
    attempt.request.settings.fsdp.initial_loss_scale = (1_u64 << 30) as f64;
    (attempt.request.purpose, attempt.request.probe_steps) = (Purpose::Probe, Some(2));
    let ended = attempt.run();
    let result = ended.done();
    let steps = ended.steps();
    assert!(steps[0].skipped && !steps[0].grad_norm.0.is_finite() && steps[0].loss.0.is_finite());
    assert_eq!(result.optimizer_steps - result.skipped_steps, 2);
    assert_eq!(result.skipped_steps, steps.iter().filter(|step| step.skipped).count() as u64);
    for pair in steps.windows(2) {
        let factor = if pair[0].skipped { 0.5 } else { 1.0 };
        assert_eq!(pair[1].loss_scale.unwrap(), pair[0].loss_scale.unwrap() * factor);
    }
}

/// CASES 30: a loss that becomes NaN ends the trial as failed.
#[test]
fn a_diverging_loss_ends_the_trial() {
    for dtype in [DType::Fp32, DType::Fp16] {
        let mut attempt = Attempt::pattern(2, 96);
        attempt.request.settings.train.learning_rate = 1e30;
        attempt.request.settings.train.duration = TrainDuration::NumTrainEpochs(10.0);
        attempt.request.settings.fsdp.mixed_precision = MixedPrecision::uniform(dtype);
        let ended = attempt.run();
        assert_eq!(ended.code(), Some(3), "{}", ended.stderr());
        let TrialEnding::Diverged { reason } = ended.result.as_ref().unwrap().ending.clone() else { panic!("{:?}", ended.result) };
        assert!(ended.stderr().contains(&reason), "{}", ended.stderr());
        assert!(!ended.steps().last().unwrap().loss.0.is_finite());
    }
}

#[test]
fn a_rank_over_its_budget_says_so_and_exits() {
    let fits = Attempt::reference(2).run();
    let peak = *fits.done().peak_bytes.iter().max().unwrap();
    let run_with = |memory: u64| {
        let mut attempt = Attempt::reference(2);
        attempt.request.settings.device.memory = Some(memory);
        attempt.run()
    };
    run_with(peak + peak / 50).done();
    let ended = run_with(peak * 9 / 10);
    assert_eq!(ended.code(), Some(4), "{}", ended.stderr());
    assert_eq!(ended.result, None);
    let Some(MessageKind::Oom(OutOfMemory { rank, requested_bytes, in_use_bytes, budget_bytes, phase })) = ended.messages.last() else {
        panic!("{:?}", ended.messages)
    };
    assert!(*rank < 2 && in_use_bytes <= budget_bytes && in_use_bytes + requested_bytes > *budget_bytes);
    assert!(["forward", "backward", "optimizer"].contains(&phase.as_str()), "{phase}");
}

/// CASES 14: a rank that panics, fails or is blocked ends the trial within seconds, and is named with what it said; nothing hangs.
#[test]
fn a_rank_that_fails_ends_the_trial_and_is_named() {
    let cases = [
        ("panic", 70, "rank 1 failed: panicked: a fault was asked for"),
        ("error", 3, "rank 1 failed: a fault was asked for"),
        ("block", 3, "rank 1 failed: has been blocked"),
    ];
    for (kind, code, expected) in cases {
        let mut attempt = Attempt::pattern(3, 24);
        attempt.request.stall_timeout_seconds = Some(4.0);
        write_json(&attempt.path(), &attempt.request).unwrap();
        let ended = attempt.run_with(&[("SWEEP_FAULT", &format!(r#"{{"rank": 1, "step": 3, "kind": "{kind}"}}"#))]);
        assert_eq!(ended.code(), Some(code), "{kind}: {}", ended.stderr());
        assert_eq!(ended.steps().len(), 2, "{kind}");
        let TrialEnding::Failed { reason } = &ended.result.as_ref().unwrap().ending else { panic!("{kind}: {:?}", ended.result) };
        assert!(reason.starts_with(expected), "{kind}: {reason}");
        assert!(ended.stderr().contains(reason), "{kind}: {}", ended.stderr());
    }
}

#[test]
fn bad_requests_are_refused() {
    type Change = fn(&mut TrialRequest);
    let cases: [(Change, &str); 7] = [
        (|request| request.protocol = 99, "speaks protocol 99"),
        (|request| request.block_size = 256, "block_size = 256: the model takes 2 to 128 tokens"),
        (|request| request.data.vocab_size = 33, "the data has 33 token ids, the model only 32"),
        (|request| request.data.train = "/nowhere/tokens".into(), "/nowhere/tokens"),
        (|request| request.model.weights = Some("/nowhere/model".into()), "cannot read /nowhere/model"),
        (|request| request.probe_steps = Some(1), "purpose Train with probe_steps Some(1)"),
        (|request| request.settings.fsdp.transformer_layer_cls_to_wrap = Some("LlamaDecoderLayer".to_owned()), "GPT2Block"),
    ];
    for (change, expected) in cases {
        let mut attempt = Attempt::pattern(2, 8);
        change(&mut attempt.request);
        let ended = attempt.run();
        assert_eq!(ended.code(), Some(2), "{expected}: {}", ended.stderr());
        assert!(ended.stderr().contains(expected), "{expected}: {}", ended.stderr());
        assert_eq!(ended.result, None);
    }
    let missing = Attempt::pattern(2, 8).run_as_written();
    assert_eq!(missing.code(), Some(2));
    assert!(missing.stderr().contains("request.json"), "{}", missing.stderr());
    let unknown = Attempt::pattern(2, 8);
    let mut json = serde_json::to_value(&unknown.request).unwrap();
    json["settings"]["train"]["momentum"] = 0.9.into();
    write_json(&unknown.path(), &json).unwrap();
    let unknown = unknown.run_as_written();
    assert_eq!(unknown.code(), Some(2));
    assert!(unknown.stderr().contains("momentum"), "{}", unknown.stderr());
}

#[test]
fn data_shorter_than_one_global_batch_is_refused() {
    let mut attempt = Attempt::pattern(2, 4);
    attempt.request.settings.train.per_device_train_batch_size = 3;
    let ended = attempt.run();
    assert_eq!(ended.code(), Some(2));
    assert!(ended.stderr().contains("global batch"), "{}", ended.stderr());
}
