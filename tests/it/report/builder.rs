//! Writes results folders as a run would, for the tests and the bench of reports: same types, same layout, made-up numbers from fixed formulas.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sweep::event::{Event, EventKind, LimitedBy};
use sweep::protocol::{
    Architecture, DataCounts, Evaluation, Gpt2Config, Message, MessageKind, Number, OutOfMemory, PROTOCOL, PreparedData, ResolvedModel, Step,
    Timestamp, Timing, TrialEnding, TrialRequest, TrialResult,
};
use sweep::spec::plan::{BlockSizeSearch, Limits, ReportSettings, Row};
use sweep::spec::settings::{
    AttnImplementation, AutoWrapPolicy, BackwardPrefetch, DType, DataSettings, Dataset, DeviceKind, DeviceSettings, FsdpSettings, Init,
    LrSchedulerType, MixedPrecision, ModelConfigOverrides, ModelSettings, Packing, Settings, ShardingStrategy, StateDictType, TrainDuration,
    TrainSettings,
};
use sweep::store::{self, AttemptRecord, FORMAT_VERSION, Host, JsonLines, ManifestRow, RunFolder, RunManifest, TELEMETRY_COLUMNS, TrialRecord};
use sweep::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

pub(crate) const MIB: u64 = 1 << 20;

/// A run folder being written.
pub(crate) struct Run {
    pub(crate) folder: RunFolder,
    pub(crate) manifest: RunManifest,
    events: JsonLines,
    seconds: u64,
}

/// What a training left.
#[derive(Clone)]
pub(crate) struct Training {
    pub(crate) steps: u64,
    pub(crate) step_seconds: f64,
    pub(crate) perplexity: Option<f64>,
    pub(crate) perplexity_common: Option<f64>,
    pub(crate) peak_bytes: u64,
    pub(crate) tokens_per_step: u64,
    pub(crate) eval_every: u64,
    pub(crate) telemetry_samples: u64,
    pub(crate) outcome: TrialOutcome,
    pub(crate) warnings: Vec<String>,
}

impl Default for Training {
    fn default() -> Self {
        Self {
            steps: 60,
            step_seconds: 0.25,
            perplexity: Some(85.0),
            perplexity_common: Some(85.0),
            peak_bytes: 40 * MIB,
            tokens_per_step: 6144,
            eval_every: 20,
            telemetry_samples: 90,
            outcome: TrialOutcome::Done,
            warnings: Vec::new(),
        }
    }
}

impl Run {
    /// An empty run with a manifest of `rows`, in `folder`.
    pub(crate) fn begin(folder: &Path, rows: Vec<ManifestRow>) -> Self {
        let folder = RunFolder(folder.to_owned());
        fs::create_dir_all(folder.trials()).unwrap();
        let manifest = RunManifest {
            format_version: FORMAT_VERSION,
            sweep_version: "0.1.0".into(),
            sweep: "gpt2_blocksize".into(),
            run: "20261130T120000Z-abcdef".into(),
            description: Some("Four ways to shard GPT-2.".into()),
            created_at: at(0),
            sweep_file_sha256: "ab".repeat(32),
            profiles: vec!["cpu".into()],
            overrides: vec!["train.seed=7".into()],
            host: Host { name: "host".into(), cores: 2, memory_bytes: 16 << 30, gpus: Vec::new() },
            control: None,
            repeats: 1,
            rows,
            search: Some(BlockSizeSearch { candidates: vec![64, 128, 256, 512], probe_steps: 3 }),
            checkpoint: Default::default(),
            limits: Limits {
                trial_timeout: None,
                startup_timeout: Duration::from_secs(60),
                stall_timeout: Duration::from_secs(60),
                grace_period: Duration::from_secs(5),
                retries: 0,
                max_consecutive_infra_failures: 3,
                jobs: None,
                sweep_timeout: None,
            },
            report: ReportSettings::default(),
            notices: vec!["Profile cpu is applied, because no CUDA device was found.".into()],
        };
        let events = JsonLines::append_to(&folder.events()).unwrap();
        let mut run = Self { folder, manifest, events, seconds: 0 };
        run.write_manifest();
        let (sweep, name, configurations) = (run.manifest.sweep.clone(), run.manifest.run.clone(), run.manifest.rows.len());
        run.event(EventKind::RunStarted { sweep, run: name, configurations, resumed: false });
        run
    }

    /// Writes the manifest again, after a change.
    pub(crate) fn write_manifest(&self) {
        store::write_json(&self.folder.manifest(), &self.manifest).unwrap();
    }

    pub(crate) fn event(&mut self, kind: EventKind) {
        self.seconds += 1;
        self.events.push(&Event { at: at(self.seconds * 1000), kind }).unwrap();
    }

    /// Ends the run.
    pub(crate) fn end(&mut self, exit_code: u8, outstanding: usize) {
        self.event(EventKind::RunEnded { exit_code, done: 0, failed: 0, outstanding });
    }

    /// The end of a row's search.
    pub(crate) fn found(&mut self, row: usize, block_size: Option<usize>, limited_by: LimitedBy) {
        let (configuration, label) = (self.manifest.rows[row].configuration.clone(), self.manifest.rows[row].row.label.clone());
        self.event(EventKind::BlockSizeFound { configuration, label, block_size, limited_by });
    }

    /// A probe that fits, or runs out of memory.
    pub(crate) fn probe(&mut self, row: usize, block_size: usize, fits: bool) {
        let outcome = if fits { TrialOutcome::Done } else { out_of_memory() };
        let id = self.begin_trial(row, block_size, Purpose::Probe, 0);
        let attempt = self.folder.attempt(&id, 1);
        let mut messages = JsonLines::append_to(&attempt.messages()).unwrap();
        messages.push(&Message { at: at(self.seconds * 1000), kind: MessageKind::Started { protocol: PROTOCOL, pid: 1, ranks: 4 } }).unwrap();
        self.end_trial(row, &id, block_size, Purpose::Probe, outcome);
    }

    /// A training with all that it leaves behind.
    pub(crate) fn train(&mut self, row: usize, block_size: usize, repeat: u32, training: &Training) -> TrialId {
        let id = self.begin_trial(row, block_size, Purpose::Train, repeat);
        self.run_training(row, &id, block_size, training);
        self.end_trial(row, &id, block_size, Purpose::Train, training.outcome.clone());
        id
    }

    /// A training that has begun and not ended; it has no result.
    pub(crate) fn train_without_end(&mut self, row: usize, block_size: usize, training: &Training) -> TrialId {
        let id = self.begin_trial(row, block_size, Purpose::Train, 0);
        self.run_training(row, &id, block_size, training);
        fs::remove_file(self.folder.attempt(&id, 1).result()).unwrap();
        id
    }

    fn begin_trial(&mut self, row: usize, block_size: usize, purpose: Purpose, repeat: u32) -> TrialId {
        let manifest = self.manifest.rows[row].clone();
        let kind = if purpose == Purpose::Probe { "probe" } else { "train" };
        let id = TrialId(format!("{}-{kind}-{block_size}-{repeat}", manifest.configuration));
        let folder = self.folder.attempt(&id, 1);
        fs::create_dir_all(&folder.0).unwrap();
        let (label, configuration) = (manifest.row.label.clone(), manifest.configuration.clone());
        let record = TrialRecord {
            id: id.clone(),
            label: label.clone(),
            purpose,
            configuration: configuration.clone(),
            block_size,
            repeat,
            settings: manifest.row.effective.clone(),
        };
        write_json(&self.folder.trial(&id).join("trial.json"), &record);
        let request = TrialRequest {
            protocol: PROTOCOL,
            trial: id.clone(),
            label: label.clone(),
            purpose,
            probe_steps: (purpose == Purpose::Probe).then_some(3),
            block_size,
            seed: 7,
            settings: manifest.row.effective.clone(),
            model: ResolvedModel { architecture: architecture(), weights: None, fingerprint: None },
            data: manifest.data.clone(),
            cores: Vec::new(),
            placement: None,
            checkpoint: None,
            stall_timeout_seconds: None,
            save_model: None,
        };
        write_json(&folder.request(), &request);
        self.event(EventKind::TrialStarted {
            trial: id.clone(),
            configuration,
            label,
            purpose,
            block_size,
            repeat,
            attempt: 1,
            budget_bytes: manifest.row.effective.device.memory,
        });
        id
    }

    fn end_trial(&mut self, row: usize, id: &TrialId, block_size: usize, purpose: Purpose, outcome: TrialOutcome) {
        let failed = !outcome.is_result();
        let stderr_tail = if failed { "rank 1: gradient of wte\nerror: it went wrong\n".to_owned() } else { String::new() };
        let record = AttemptRecord {
            trial: id.clone(),
            attempt: 1,
            started_at: at(self.seconds * 1000),
            seconds: 10.0,
            outcome: outcome.clone(),
            stderr_tail: stderr_tail.clone(),
        };
        write_json(&self.folder.attempt(id, 1).outcome(), &record);
        let label = self.manifest.rows[row].row.label.clone();
        self.event(EventKind::TrialEnded { trial: id.clone(), label, purpose, block_size, attempt: 1, outcome, seconds: 10.0, stderr_tail });
    }

    /// Messages, telemetry and result.
    fn run_training(&mut self, row: usize, id: &TrialId, block_size: usize, training: &Training) {
        let attempt = self.folder.attempt(id, 1);
        let begun = self.seconds * 1000;
        let mut messages = Vec::new();
        let mut say = |milliseconds: u64, kind: MessageKind| {
            serde_json::to_writer(&mut messages, &Message { at: at(begun + milliseconds), kind }).unwrap();
            messages.push(b'\n');
        };
        say(0, MessageKind::Started { protocol: PROTOCOL, pid: 4711, ranks: 4 });
        say(5, MessageKind::Phase { phase: "load".into() });
        for warning in &training.warnings {
            say(6, MessageKind::Warning { message: warning.clone() });
        }
        let ending = match &training.outcome {
            TrialOutcome::Diverged { reason } => TrialEnding::Diverged { reason: reason.clone() },
            TrialOutcome::Failed { reason } => TrialEnding::Failed { reason: reason.clone() },
            _ => TrialEnding::Done,
        };
        let leaves_result = matches!(training.outcome, TrialOutcome::Done | TrialOutcome::Diverged { .. } | TrialOutcome::Failed { .. });
        let diverged = matches!(ending, TrialEnding::Diverged { .. });
        let last_loss = training.perplexity.unwrap_or(60.0).ln();
        for step in 1..=training.steps {
            let progress = step as f64 / training.steps as f64;
            let wave = (step as f64 * 1.7).sin() * 0.1;
            let loss = if diverged && step == training.steps { f64::NAN } else { last_loss + (6.9 - last_loss) * (-4.0 * progress).exp() + wave };
            let used = training.peak_bytes * (70 + step % 7 * 3) / 100;
            let milliseconds = (step as f64 * training.step_seconds * 1000.0) as u64 + 500;
            let step_seconds = if step <= 3 { training.step_seconds * 20.0 } else { training.step_seconds };
            say(
                milliseconds,
                MessageKind::Step(Step {
                    step,
                    steps: training.steps,
                    loss: Number(loss),
                    grad_norm: Number(1.0 / step as f64),
                    learning_rate: 5e-5 * (1.0 - progress),
                    tokens: training.tokens_per_step,
                    step_seconds,
                    allocated_bytes: vec![used, used - MIB / 2],
                    peak_bytes: vec![training.peak_bytes * step.min(4) / 4, training.peak_bytes * step.min(4) / 5],
                    loss_scale: None,
                    skipped: false,
                }),
            );
            if training.eval_every > 0 && step % training.eval_every == 0 && !diverged {
                say(milliseconds + 1, MessageKind::Eval { step, evaluation: evaluation(block_size, (loss.exp()).min(1e9)) });
            }
        }
        fs::write(attempt.messages(), messages).unwrap();

        let mut telemetry = TELEMETRY_COLUMNS.join(",") + "\n";
        for sample in 0..training.telemetry_samples {
            let elapsed = sample as f64 * training.steps as f64 * training.step_seconds / training.telemetry_samples as f64;
            let use_percent = 170.0 + (sample as f64 * 0.9).sin() * 25.0;
            let resident = 4 * training.peak_bytes + 90 * MIB + sample * MIB / 8;
            let _ = writeln!(telemetry, "{elapsed:.3},host,{use_percent:.1},{resident},{},,", 16_u64 << 30);
        }
        fs::write(attempt.telemetry(), telemetry).unwrap();

        let steady = training.steps.saturating_sub(training.steps.div_ceil(20).max(3));
        let steps_per_epoch = 447.5;
        let measured = steady > 0;
        let own_size = self.manifest.rows[row].row.settings.train.eval_block_size;
        let result = TrialResult {
            protocol: PROTOCOL,
            trial: id.clone(),
            ending,
            optimizer_steps: training.steps,
            skipped_steps: 0,
            tokens_seen: training.steps * training.tokens_per_step,
            evaluation: training.perplexity.map(|perplexity| evaluation(block_size, perplexity)),
            evaluation_common: training.perplexity_common.map(|perplexity| evaluation(own_size, perplexity)),
            timing: Timing {
                steady_steps: steady,
                step_seconds: measured.then_some(training.step_seconds),
                steps_per_epoch,
                epoch_seconds: measured.then_some(training.step_seconds * steps_per_epoch),
                tokens_per_second: measured.then_some(training.tokens_per_step as f64 / training.step_seconds),
                evaluation_seconds: 2.5,
                checkpoint_seconds: 0.25,
                startup_seconds: 0.4,
            },
            peak_bytes: vec![training.peak_bytes, training.peak_bytes - MIB],
            host_bytes: vec![0, 0],
            parameters: 1_234_567,
            data: DataCounts { train_blocks: 2864, train_dropped_tokens: 17, eval_blocks: 300, eval_dropped_tokens: 5 },
            warnings: training.warnings.clone(),
        };
        if leaves_result {
            write_json(&attempt.result(), &result);
        }
    }
}

/// Without fsync: a test's folder need not survive a power cut.
fn write_json<T: serde::Serialize>(path: &PathBuf, value: &T) {
    fs::write(path, serde_json::to_vec_pretty(value).unwrap()).unwrap();
}

pub(crate) fn at(milliseconds: u64) -> Timestamp {
    Timestamp(SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_953_600) + Duration::from_millis(milliseconds))
}

pub(crate) fn out_of_memory() -> TrialOutcome {
    TrialOutcome::OutOfDeviceMemory {
        details: Some(OutOfMemory { rank: 1, requested_bytes: 6 * MIB, in_use_bytes: 45 * MIB, budget_bytes: 48 * MIB, phase: "forward".into() }),
    }
}

fn evaluation(block_size: usize, perplexity: f64) -> Evaluation {
    Evaluation { block_size, loss: Number(perplexity.ln()), perplexity: Number(perplexity), scored_tokens: 19_200, seconds: 1.25 }
}

fn architecture() -> Architecture {
    Architecture::Gpt2(Gpt2Config { vocab_size: 1024, n_positions: 1024, n_embd: 128, n_layer: 4, n_head: 4, ..Gpt2Config::DEFAULT })
}

pub(crate) fn settings() -> Settings {
    Settings {
        model: ModelSettings {
            id: "gpt2-tiny".into(),
            init: Init::Random,
            revision: None,
            trainable: None,
            attn_implementation: AttnImplementation::Auto,
            config: ModelConfigOverrides::default(),
        },
        data: DataSettings {
            dataset: Dataset::Synthetic { vocab: 1024, train_tokens: 262_144, eval_tokens: 16_384 },
            tokenizer: None,
            shuffle: true,
            packing: Packing::Concatenate,
        },
        train: TrainSettings {
            per_device_train_batch_size: 24,
            per_device_eval_batch_size: 24,
            gradient_accumulation_steps: 1,
            sync_each_batch: false,
            duration: TrainDuration::MaxSteps(60),
            learning_rate: 5e-5,
            lr_scheduler_type: LrSchedulerType::Linear,
            warmup_steps: 0,
            weight_decay: 0.0,
            decay_norm_and_bias: false,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            max_grad_norm: 1.0,
            eval_block_size: 64,
            eval_steps: Some(20),
            seed: 7,
        },
        fsdp: FsdpSettings {
            fsdp_version: 1,
            sharding_strategy: ShardingStrategy::FullShard,
            hybrid_shard_size: None,
            auto_wrap_policy: AutoWrapPolicy::NoWrap,
            transformer_layer_cls_to_wrap: None,
            min_num_params: 0,
            backward_prefetch: BackwardPrefetch::BackwardPre,
            forward_prefetch: true,
            limit_all_gathers: true,
            use_orig_params: true,
            cpu_offload: true,
            activation_checkpointing: false,
            sync_module_states: true,
            cpu_ram_efficient_loading: true,
            state_dict_type: StateDictType::ShardedStateDict,
            reshard_after_forward: None,
            mixed_precision: MixedPrecision::uniform(DType::Fp32),
            initial_loss_scale: 65536.0,
        },
        device: DeviceSettings { kind: DeviceKind::Cpu, world_size: 4, memory: Some(48 * MIB) },
    }
}

/// A row with a configuration of its own.
pub(crate) fn row(name: &str, label: &str, settings: Settings) -> ManifestRow {
    ManifestRow {
        row: Row { label: label.into(), effective: settings.clone(), settings, block_size: None, collapsed: Vec::new() },
        configuration: ConfigurationId(name.into()),
        data: PreparedData {
            train: "train.tokens".into(),
            eval: Some("eval.tokens".into()),
            fingerprint: "0123456789abcdef".repeat(4),
            vocab_size: 1024,
            train_tokens: 262_144,
            eval_tokens: 16_384,
            floor_perplexity: Some(31.25),
            description: "synthetic Markov chain over 1,024 token ids".into(),
        },
    }
}

/// The four rows of the first table this project made.
pub(crate) fn four_rows() -> Vec<ManifestRow> {
    let no_wrap = settings();
    let mut transformer = settings();
    transformer.fsdp.auto_wrap_policy = AutoWrapPolicy::TransformerBasedWrap;
    let mut size = settings();
    size.fsdp.auto_wrap_policy = AutoWrapPolicy::SizeBasedWrap;
    size.fsdp.min_num_params = 2000;
    size.fsdp.backward_prefetch = BackwardPrefetch::NoPrefetch;
    size.fsdp.forward_prefetch = false;
    size.fsdp.use_orig_params = false;
    size.fsdp.mixed_precision = MixedPrecision::uniform(DType::Fp16);
    let mut checkpointing = size.clone();
    checkpointing.fsdp.activation_checkpointing = true;
    let long = "FSDP + full_shard + min_num_params = 2K + no-prefetch + no-use_original_params + MPT + fp16";
    vec![
        row("c1", "FSDP + full_shard", no_wrap),
        row("c2", "FSDP + full_shard + transformer_based_wrap", transformer),
        row("c3", long, size),
        row("c4", &format!("{long} + Gradient checkpointing"), checkpointing),
    ]
}

/// A whole run of the four rows: each block size is limited differently.
pub(crate) fn four_cases(folder: &Path) -> Run {
    let mut rows = four_rows();
    rows[0].row.collapsed = vec!["NO_WRAP makes backward_prefetch irrelevant".into()];
    let mut run = Run::begin(folder, rows);
    let trainings = [
        (64, LimitedBy::Memory, 85.0, 0.25, 44),
        (128, LimitedBy::Memory, 62.0, 0.239, 46),
        (256, LimitedBy::Memory, 45.36, 0.183, 47),
        (512, LimitedBy::Candidates, 35.09, 0.221, 40),
    ];
    for (row, (block_size, limited_by, perplexity, step_seconds, peak)) in trainings.into_iter().enumerate() {
        for candidate in [64, 128, 256, 512] {
            if candidate <= block_size * 2 {
                run.probe(row, candidate, candidate <= block_size);
            }
        }
        run.found(row, Some(block_size), limited_by);
        let training = Training {
            step_seconds,
            perplexity: Some(perplexity),
            perplexity_common: Some(perplexity + 3.0),
            peak_bytes: peak * MIB,
            ..Training::default()
        };
        run.train(row, block_size, 0, &training);
    }
    run.end(0, 0);
    run
}
