//! The one table of keys: what each accepts, its default, what it means, and where its value goes. Scalars, axes, cases, excludes, profiles and `--set`
//! are all typed by it.

use std::sync::LazyLock;
use std::time::Duration;

use toml::de::DeValue;

use super::plan::{CheckpointSettings, Limits};
use super::settings::*;
use super::slurm::SlurmSettings;
use super::value::{Bounds, Kind, LEAST_BLOCK_SIZE, Value};

/// A key of the sweep file.
pub(crate) struct Key {
    /// Table and name, dotted.
    pub(crate) path: &'static str,
    pub(crate) kind: Kind,
    /// What holds where nothing is written, as TOML. `None`: nothing, or it follows from other keys.
    pub(crate) default: Option<&'static str>,
    /// What it means, for messages.
    pub(crate) doc: &'static str,
    /// Where its value goes.
    pub(crate) target: Target,
}

/// Where a key's value goes.
pub(crate) enum Target {
    /// Into each point.
    Point(fn(&mut Point, &Value)),
    /// Into the sweep as a whole.
    Sweep(fn(&mut Sweep, &Value)),
}

/// Place of a key in [`KEYS`].
pub(crate) type KeyIndex = usize;

/// One point while it is put together. What follows from other keys is settled last, by `finish`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) settings: Settings,
    pub(crate) init: Option<Init>,
    pub(crate) seed: Option<u64>,
    pub(crate) block_size: Option<usize>,
    pub(crate) eval_block_size: Option<usize>,
}

/// What is not of a point but of the sweep, while it is put together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sweep {
    pub(crate) name: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) seed: u64,
    pub(crate) repeats: u32,
    pub(crate) control: Option<String>,
    pub(crate) kind: &'static str,
    pub(crate) candidates: Vec<usize>,
    pub(crate) probe_steps: u64,
    pub(crate) checkpoint: CheckpointSettings,
    pub(crate) limits: Limits,
    pub(crate) slurm: SlurmSettings,
    pub(crate) telemetry_interval: Duration,
    pub(crate) price_per_device_hour: Option<f64>,
}

const fn point(path: &'static str, kind: Kind, default: Option<&'static str>, doc: &'static str, set: fn(&mut Point, &Value)) -> Key {
    Key { path, kind, default, doc, target: Target::Point(set) }
}

const fn sweep(path: &'static str, kind: Kind, default: Option<&'static str>, doc: &'static str, set: fn(&mut Sweep, &Value)) -> Key {
    Key { path, kind, default, doc, target: Target::Sweep(set) }
}

const POSITIVE: Kind = Kind::Number(Bounds::Positive);
const NON_NEGATIVE: Kind = Kind::Number(Bounds::NonNegative);
const BELOW_ONE: Kind = Kind::Number(Bounds::BelowOne);

fn narrow(value: &Value) -> u32 {
    u32::try_from(value.integer()).unwrap_or(u32::MAX)
}

/// Every key there is. `[fsdp]` defaults are those of accelerate's launcher but for `backward_prefetch`, `[train]` defaults those of the HF Trainer.
#[rustfmt::skip]
pub(crate) static KEYS: &[Key] = &[
    sweep("sweep.name", Kind::Text, None, "name of the sweep and of its results folder; the file's name by default", |s, v| s.name = Some(v.text())),
    sweep("sweep.description", Kind::Text, None, "what the sweep is for", |s, v| s.description = Some(v.text())),
    sweep("sweep.seed", Kind::Integer(0), Some("42"), "what train.seed is where it is not given", |s, v| s.seed = v.integer()),
    sweep("sweep.repeats", Kind::Integer(1), Some("1"), "trainings of each configuration, each with its own seed", |s, v| s.repeats = narrow(v)),
    sweep("sweep.control", Kind::Text, None, "label of the row that others are compared with", |s, v| s.control = Some(v.text())),

    point("model.id", Kind::Text, None, "a preset, a hub id or a local folder", |p, v| p.settings.model.id = v.text()),
    point("model.init", Kind::Choice(&["pretrained", "random"]), None, "where the first weights come from", |p, v| {
        p.init = Some(if v.choice() == "random" { Init::Random } else { Init::Pretrained });
    }),
    point("model.revision", Kind::Text, None, "revision on the hub", |p, v| p.settings.model.revision = Some(v.text())),
    point("model.trainable", Kind::Regex, None, "parameters that are trained", |p, v| p.settings.model.trainable = Some(v.text())),
    point("model.attn_implementation", Kind::Choice(&["auto", "eager", "flash"]), Some("\"auto\""), "which attention is used", |p, v| {
        p.settings.model.attn_implementation = match v.choice() {
            "eager" => AttnImplementation::Eager,
            "flash" => AttnImplementation::Flash,
            _ => AttnImplementation::Auto,
        };
    }),
    point("model.config.n_layer", Kind::Integer(1), None, "transformer blocks", |p, v| p.settings.model.config.n_layer = Some(v.count())),
    point("model.config.n_embd", Kind::Integer(1), None, "width", |p, v| p.settings.model.config.n_embd = Some(v.count())),
    point("model.config.n_head", Kind::Integer(1), None, "attention heads", |p, v| p.settings.model.config.n_head = Some(v.count())),
    point("model.config.n_positions", Kind::Integer(2), None, "largest block size", |p, v| p.settings.model.config.n_positions = Some(v.count())),
    point("model.config.num_hidden_layers", Kind::Integer(1), None, "transformer blocks of a Llama", |p, v| p.settings.model.config.num_hidden_layers = Some(v.count())),
    point("model.config.hidden_size", Kind::Integer(1), None, "width of a Llama", |p, v| p.settings.model.config.hidden_size = Some(v.count())),
    point("model.config.intermediate_size", Kind::Integer(1), None, "width of a Llama's MLP", |p, v| p.settings.model.config.intermediate_size = Some(v.count())),
    point("model.config.num_attention_heads", Kind::Integer(1), None, "heads of queries of a Llama", |p, v| p.settings.model.config.num_attention_heads = Some(v.count())),
    point("model.config.num_key_value_heads", Kind::Integer(1), None, "heads of keys and values of a Llama", |p, v| p.settings.model.config.num_key_value_heads = Some(v.count())),
    point("model.config.head_dim", Kind::Integer(1), None, "numbers of a head of a Llama", |p, v| p.settings.model.config.head_dim = Some(v.count())),
    point("model.config.max_position_embeddings", Kind::Integer(2), None, "largest block size of a Llama", |p, v| p.settings.model.config.max_position_embeddings = Some(v.count())),
    point("model.config.rope_theta", POSITIVE, None, "base of a Llama's rotary frequencies", |p, v| p.settings.model.config.rope_theta = Some(v.number())),
    point("model.config.vocab_size", Kind::Integer(2), None, "vocabulary", |p, v| p.settings.model.config.vocab_size = Some(v.count())),
    point("model.config.dropout", BELOW_ONE, None, "dropout probability", |p, v| p.settings.model.config.dropout = Some(v.number())),

    point("data.dataset", Kind::Dataset, Some("{ synthetic = {} }"), "text or tokens to train on", |p, v| p.settings.data.dataset = v.dataset()),
    point("data.tokenizer", Kind::Tokenizer, None, "what turns text into tokens; the model's own by default", |p, v| p.settings.data.tokenizer = Some(v.tokenizer())),
    point("data.shuffle", Kind::Bool, Some("true"), "a new order of blocks every epoch", |p, v| p.settings.data.shuffle = v.bool()),
    point("data.packing", Kind::Choice(&["concatenate", "per_document"]), Some("\"concatenate\""), "how documents become blocks", |p, v| {
        p.settings.data.packing = if v.choice() == "per_document" { Packing::PerDocument } else { Packing::Concatenate };
    }),

    point("train.per_device_train_batch_size", Kind::Integer(1), Some("8"), "sequences per rank and forward pass", |p, v| p.settings.train.per_device_train_batch_size = v.count()),
    point("train.per_device_eval_batch_size", Kind::Integer(1), Some("8"), "sequences per rank and evaluation pass", |p, v| p.settings.train.per_device_eval_batch_size = v.count()),
    point("train.gradient_accumulation_steps", Kind::Integer(1), Some("1"), "passes per optimiser step", |p, v| p.settings.train.gradient_accumulation_steps = v.count()),
    point("train.sync_each_batch", Kind::Bool, Some("false"), "reduce gradients after every pass", |p, v| p.settings.train.sync_each_batch = v.bool()),
    point("train.num_train_epochs", POSITIVE, Some("3.0"), "passes over the training split", |p, v| p.settings.train.duration = TrainDuration::NumTrainEpochs(v.number())),
    point("train.max_steps", Kind::Integer(1), None, "optimiser steps, instead of num_train_epochs", |p, v| p.settings.train.duration = TrainDuration::MaxSteps(v.integer())),
    point("train.learning_rate", NON_NEGATIVE, Some("5e-5"), "peak learning rate", |p, v| p.settings.train.learning_rate = v.number()),
    point("train.lr_scheduler_type", Kind::Choice(&["linear", "cosine", "constant"]), Some("\"linear\""), "how the learning rate moves", |p, v| {
        p.settings.train.lr_scheduler_type = match v.choice() {
            "cosine" => LrSchedulerType::Cosine,
            "constant" => LrSchedulerType::Constant,
            _ => LrSchedulerType::Linear,
        };
    }),
    point("train.warmup_steps", Kind::Integer(0), Some("0"), "steps of linear warm-up", |p, v| p.settings.train.warmup_steps = v.integer()),
    point("train.weight_decay", NON_NEGATIVE, Some("0.0"), "AdamW's decoupled weight decay", |p, v| p.settings.train.weight_decay = v.number()),
    point("train.decay_norm_and_bias", Kind::Bool, Some("false"), "norms and biases decay too", |p, v| p.settings.train.decay_norm_and_bias = v.bool()),
    point("train.adam_beta1", BELOW_ONE, Some("0.9"), "AdamW's first beta", |p, v| p.settings.train.adam_beta1 = v.number()),
    point("train.adam_beta2", BELOW_ONE, Some("0.999"), "AdamW's second beta", |p, v| p.settings.train.adam_beta2 = v.number()),
    point("train.adam_epsilon", POSITIVE, Some("1e-8"), "AdamW's epsilon", |p, v| p.settings.train.adam_epsilon = v.number()),
    point("train.max_grad_norm", NON_NEGATIVE, Some("1.0"), "global norm that gradients are clipped to, 0 for none", |p, v| p.settings.train.max_grad_norm = v.number()),
    point("train.block_size", Kind::Integer(LEAST_BLOCK_SIZE), None, "tokens per sequence", |p, v| p.block_size = Some(v.count())),
    point("train.eval_block_size", Kind::Integer(LEAST_BLOCK_SIZE), None, "block size of the evaluation that makes rows comparable", |p, v| p.eval_block_size = Some(v.count())),
    point("train.eval_steps", Kind::Integer(1), None, "optimiser steps between evaluations", |p, v| p.settings.train.eval_steps = Some(v.integer())),
    point("train.seed", Kind::Integer(0), None, "seed of weights, data order and dropout; sweep.seed by default", |p, v| p.seed = Some(v.integer())),

    point("fsdp.fsdp_version", Kind::Among(&[1, 2]), Some("1"), "1: flat parameters, 2: per-parameter sharding", |p, v| p.settings.fsdp.fsdp_version = u8::try_from(v.integer()).unwrap_or(u8::MAX)),
    point("fsdp.sharding_strategy", Kind::Choice(&["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]), Some("\"FULL_SHARD\""), "what is sharded, and when it is gathered", |p, v| {
        p.settings.fsdp.sharding_strategy = match v.choice() {
            "SHARD_GRAD_OP" => ShardingStrategy::ShardGradOp,
            "NO_SHARD" => ShardingStrategy::NoShard,
            "HYBRID_SHARD" => ShardingStrategy::HybridShard,
            "HYBRID_SHARD_ZERO2" => ShardingStrategy::HybridShardZero2,
            _ => ShardingStrategy::FullShard,
        };
    }),
    point("fsdp.hybrid_shard_size", Kind::Integer(1), None, "ranks per shard group", |p, v| p.settings.fsdp.hybrid_shard_size = Some(v.count())),
    point("fsdp.auto_wrap_policy", Kind::Choice(&["NO_WRAP", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"]), Some("\"NO_WRAP\""), "what becomes an FSDP unit", |p, v| {
        p.settings.fsdp.auto_wrap_policy = match v.choice() {
            "TRANSFORMER_BASED_WRAP" => AutoWrapPolicy::TransformerBasedWrap,
            "SIZE_BASED_WRAP" => AutoWrapPolicy::SizeBasedWrap,
            _ => AutoWrapPolicy::NoWrap,
        };
    }),
    point("fsdp.transformer_layer_cls_to_wrap", Kind::Text, None, "class that TRANSFORMER_BASED_WRAP wraps; the model's block by default", |p, v| p.settings.fsdp.transformer_layer_cls_to_wrap = Some(v.text())),
    point("fsdp.min_num_params", Kind::Integer(1), Some("100_000_000"), "smallest unit of SIZE_BASED_WRAP", |p, v| p.settings.fsdp.min_num_params = v.integer()),
    point("fsdp.backward_prefetch", Kind::Choice(&["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]), Some("\"BACKWARD_PRE\""), "when the next unit is gathered in backward", |p, v| {
        p.settings.fsdp.backward_prefetch = match v.choice() {
            "BACKWARD_POST" => BackwardPrefetch::BackwardPost,
            "NO_PREFETCH" => BackwardPrefetch::NoPrefetch,
            _ => BackwardPrefetch::BackwardPre,
        };
    }),
    point("fsdp.forward_prefetch", Kind::Bool, Some("false"), "gather the next unit ahead in forward", |p, v| p.settings.fsdp.forward_prefetch = v.bool()),
    point("fsdp.limit_all_gathers", Kind::Bool, Some("true"), "at most two gathers in flight", |p, v| p.settings.fsdp.limit_all_gathers = v.bool()),
    point("fsdp.use_orig_params", Kind::Bool, Some("true"), "the optimiser sees original parameters", |p, v| p.settings.fsdp.use_orig_params = v.bool()),
    point("fsdp.cpu_offload", Kind::Bool, Some("false"), "shards, gradients and optimiser state in host memory", |p, v| p.settings.fsdp.cpu_offload = v.bool()),
    point("fsdp.activation_checkpointing", Kind::Bool, Some("false"), "recompute transformer blocks in backward", |p, v| p.settings.fsdp.activation_checkpointing = v.bool()),
    point("fsdp.sync_module_states", Kind::Bool, Some("true"), "broadcast rank 0's weights at the start", |p, v| p.settings.fsdp.sync_module_states = v.bool()),
    point("fsdp.cpu_ram_efficient_loading", Kind::Bool, Some("true"), "one rank alone reads the checkpoint", |p, v| p.settings.fsdp.cpu_ram_efficient_loading = v.bool()),
    point("fsdp.state_dict_type", Kind::Choice(&["FULL_STATE_DICT", "SHARDED_STATE_DICT"]), Some("\"FULL_STATE_DICT\""), "layout of saved state", |p, v| {
        p.settings.fsdp.state_dict_type = if v.choice() == "SHARDED_STATE_DICT" { StateDictType::ShardedStateDict } else { StateDictType::FullStateDict };
    }),
    point("fsdp.reshard_after_forward", Kind::Reshard, None, "version 2 only", |p, v| p.settings.fsdp.reshard_after_forward = Some(v.reshard())),
    point("fsdp.mixed_precision", Kind::MixedPrecision, Some("\"no\""), "data types of parameters, reductions and buffers", |p, v| p.settings.fsdp.mixed_precision = v.mixed_precision()),
    point("fsdp.initial_loss_scale", POSITIVE, Some("65536.0"), "first value of the fp16 loss scale", |p, v| p.settings.fsdp.initial_loss_scale = v.number()),

    sweep("device.kind", Kind::Choice(&["auto", "cpu", "cuda"]), Some("\"auto\""), "what a rank computes on", |s, v| s.kind = v.choice()),
    point("device.world_size", Kind::Integer(1), Some("1"), "ranks", |p, v| p.settings.device.world_size = v.count()),
    point("device.memory", Kind::Size, None, "budget per rank", |p, v| p.settings.device.memory = Some(v.size())),

    sweep("search.block_size.candidates", Kind::BlockSizes, Some("[64, 128, 256, 512, 1024]"), "block sizes to choose from", |s, v| {
        s.candidates = v.integers().iter().map(|size| usize::try_from(*size).unwrap_or(usize::MAX)).collect();
        s.candidates.sort_unstable();
        s.candidates.dedup();
    }),
    sweep("search.block_size.probe_steps", Kind::Integer(1), Some("3"), "applied optimiser steps of a probe", |s, v| s.probe_steps = v.integer()),

    sweep("checkpoint.save_steps", Kind::Integer(1), None, "optimiser steps between checkpoints", |s, v| s.checkpoint.save_steps = Some(v.integer())),
    sweep("checkpoint.save_total_limit", Kind::Integer(1), None, "checkpoints that are kept", |s, v| s.checkpoint.save_total_limit = Some(v.count())),
    sweep("checkpoint.save_model", Kind::Bool, Some("false"), "save the trained model", |s, v| s.checkpoint.save_model = v.bool()),

    sweep("limits.trial_timeout", Kind::Duration(1), None, "longest time of one attempt", |s, v| s.limits.trial_timeout = Some(v.duration())),
    sweep("limits.startup_timeout", Kind::Duration(1), Some("\"10m\""), "longest time before the first step", |s, v| s.limits.startup_timeout = v.duration()),
    sweep("limits.stall_timeout", Kind::Duration(1), Some("\"10m\""), "longest time without progress", |s, v| s.limits.stall_timeout = v.duration()),
    sweep("limits.grace_period", Kind::Duration(0), Some("\"10s\""), "time between TERM and KILL", |s, v| s.limits.grace_period = v.duration()),
    sweep("limits.retries", Kind::Integer(0), Some("1"), "attempts after the first, for infrastructure failures only", |s, v| s.limits.retries = narrow(v)),
    sweep("limits.max_consecutive_infra_failures", Kind::Integer(1), Some("3"), "infrastructure failures in a row that stop the run", |s, v| s.limits.max_consecutive_infra_failures = narrow(v)),
    sweep("limits.jobs", Kind::Integer(1), None, "trials at a time", |s, v| s.limits.jobs = Some(v.count())),
    sweep("limits.sweep_timeout", Kind::Duration(1), None, "longest time of the whole run", |s, v| s.limits.sweep_timeout = Some(v.duration())),

    sweep("slurm.partition", Kind::Line, None, "where jobs queue", |s, v| s.slurm.partition = Some(v.text())),
    sweep("slurm.account", Kind::Line, None, "which account pays", |s, v| s.slurm.account = Some(v.text())),
    sweep("slurm.qos", Kind::Line, None, "quality of service", |s, v| s.slurm.qos = Some(v.text())),
    sweep("slurm.constraint", Kind::Line, None, "features that nodes must have", |s, v| s.slurm.constraint = Some(v.text())),
    sweep("slurm.time", Kind::Duration(60_000), None, "time limit of one attempt", |s, v| s.slurm.time = Some(v.duration())),
    sweep("slurm.nodes", Kind::Integer(1), Some("1"), "nodes of one trial", |s, v| s.slurm.nodes = v.count()),
    sweep("slurm.gpus_per_node", Kind::Integer(1), None, "GPUs on each node; one for each rank by default where ranks compute on GPUs", |s, v| s.slurm.gpus_per_node = Some(v.count())),
    sweep("slurm.cpus_per_task", Kind::Integer(1), None, "cores on each node; one for each rank by default", |s, v| s.slurm.cpus_per_task = Some(v.count())),
    sweep("slurm.mem", Kind::Size, None, "memory on each node", |s, v| s.slurm.mem = Some(v.size())),
    sweep("slurm.setup", Kind::Lines, None, "shell lines that run before each attempt", |s, v| s.slurm.setup = v.lines()),
    sweep("slurm.array_limit", Kind::Integer(1), None, "trials of one job array that run at a time", |s, v| s.slurm.array_limit = Some(v.count())),
    sweep("slurm.signal_before", Kind::Duration(1_000), Some("\"2m\""), "how long before the time limit a trial is told to save its state", |s, v| s.slurm.signal_before = v.duration()),
    sweep("slurm.poll_interval", Kind::Duration(100), Some("\"15s\""), "time between two looks at the queue", |s, v| s.slurm.poll_interval = v.duration()),
    sweep("slurm.file_delay", Kind::Duration(0), Some("\"30s\""), "how long a file written on a node may take to be seen here", |s, v| s.slurm.file_delay = v.duration()),
    sweep("slurm.options", Kind::SbatchOptions, None, "more options of sbatch", |s, v| s.slurm.options = v.sbatch_options()),

    sweep("telemetry.interval", Kind::Duration(10), Some("\"200ms\""), "time between samples", |s, v| s.telemetry_interval = v.duration()),

    sweep("report.control", Kind::Text, None, "as sweep.control", |s, v| s.control = Some(v.text())),
    sweep("report.columns", Kind::Text, None, "columns of the tables", |_, _| {}),
    sweep("report.price_per_device_hour", NON_NEGATIVE, None, "price of one device for one hour", |s, v| s.price_per_device_hour = Some(v.number())),
];

/// Other spellings of a key.
const ALIASES: [(&str, &str); 1] = [("fsdp.use_original_params", "fsdp.use_orig_params")];

/// Keys of which a sweep has one: setting one in an overlay removes the other.
pub(crate) const EXCLUSIVE: [(&str, &str); 1] = [("train.max_steps", "train.num_train_epochs")];

/// Tables of the sweep file that are not lists of keys.
pub(crate) const STRUCTURAL: [&str; 4] = ["grid", "case", "exclude", "profile"];

/// Tables whose keys may differ between rows.
const VARYING_TABLES: [&str; 3] = ["model", "train", "fsdp"];

/// Defaults, typed once.
static DEFAULTS: LazyLock<Vec<Option<Value>>> = LazyLock::new(|| KEYS.iter().map(Key::parse_default).collect());

impl Key {
    /// The last part of its path.
    pub(crate) fn name(&self) -> &'static str {
        self.path.rsplit('.').next().unwrap_or(self.path)
    }

    /// The table it stands in.
    pub(crate) fn table(&self) -> &'static str {
        self.path.rsplit_once('.').map_or("", |(table, _)| table)
    }

    /// Whether it may be an axis, and stand in cases and excludes.
    pub(crate) fn varies(&self) -> bool {
        self.path == "device.world_size" || VARYING_TABLES.iter().any(|table| self.path.split('.').next() == Some(table))
    }

    fn parse_default(&self) -> Option<Value> {
        let written = self.default?;
        let value = DeValue::parse(written).unwrap_or_else(|error| unreachable!("default of {}: {error}", self.path));
        Some(self.kind.read(&value).unwrap_or_else(|refused| unreachable!("default of {}: {}", self.path, refused.message)))
    }
}

/// Default of a key, where it has one of its own.
pub(crate) fn default_of(key: KeyIndex) -> Option<&'static Value> {
    DEFAULTS[key].as_ref()
}

/// Finds a key by its dotted path or an alias of it.
pub(crate) fn by_path(path: &str) -> Option<KeyIndex> {
    let path = ALIASES.iter().find(|(alias, _)| *alias == path).map_or(path, |(_, key)| key);
    KEYS.iter().position(|key| key.path == path)
}

/// A key that the table is sure to have.
pub(crate) fn key(path: &'static str) -> KeyIndex {
    by_path(path).unwrap_or_else(|| unreachable!("{path} is not in the schema"))
}

/// Finds keys by their bare name or an alias of it, among those `accepted`.
pub(crate) fn by_name(name: &str, accepted: impl Fn(&Key) -> bool) -> Vec<KeyIndex> {
    let alias = ALIASES.iter().find(|(alias, _)| alias.rsplit('.').next() == Some(name)).map(|(_, key)| *key);
    let matches = |key: &Key| accepted(key) && (key.name() == name || alias == Some(key.path));
    KEYS.iter().enumerate().filter(|(_, key)| matches(key)).map(|(index, _)| index).collect()
}

/// Whether `path` is a table that has keys or tables below it.
pub(crate) fn is_table(path: &str) -> bool {
    KEYS.iter().any(|key| key.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

/// Names of the tables at the top of a sweep file.
pub(crate) fn top_tables() -> Vec<&'static str> {
    let mut names: Vec<&str> = Vec::new();
    for key in KEYS {
        let name = key.path.split('.').next().unwrap_or(key.path);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.extend(STRUCTURAL);
    names
}

/// Names directly below a table.
pub(crate) fn names_in(table: &str) -> Vec<&'static str> {
    let mut names: Vec<&str> = Vec::new();
    for key in KEYS {
        if let Some(rest) = key.path.strip_prefix(table).and_then(|rest| rest.strip_prefix('.')) {
            let name = rest.split('.').next().unwrap_or(rest);
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names
}

impl Point {
    /// A point with every default of the table.
    pub(crate) fn with_defaults() -> Self {
        let mut point = Self { settings: unset(), init: None, seed: None, block_size: None, eval_block_size: None };
        for (index, key) in KEYS.iter().enumerate() {
            if let (Target::Point(set), Some(value)) = (&key.target, default_of(index)) {
                set(&mut point, value);
            }
        }
        point
    }
}

impl Sweep {
    /// A sweep with every default of the table.
    pub(crate) fn with_defaults() -> Self {
        let mut sweep = Self {
            name: None,
            description: None,
            seed: 0,
            repeats: 1,
            control: None,
            kind: "auto",
            candidates: Vec::new(),
            probe_steps: 0,
            checkpoint: CheckpointSettings::default(),
            limits: Limits {
                trial_timeout: None,
                startup_timeout: Duration::ZERO,
                stall_timeout: Duration::ZERO,
                grace_period: Duration::ZERO,
                retries: 0,
                max_consecutive_infra_failures: 0,
                jobs: None,
                sweep_timeout: None,
            },
            slurm: SlurmSettings::default(),
            telemetry_interval: Duration::ZERO,
            price_per_device_hour: None,
        };
        for (index, key) in KEYS.iter().enumerate() {
            if let (Target::Sweep(set), Some(value)) = (&key.target, default_of(index)) {
                set(&mut sweep, value);
            }
        }
        sweep
    }
}

/// Settings before anything is set: the table's defaults overwrite every field that is not optional.
fn unset() -> Settings {
    Settings {
        model: ModelSettings {
            id: String::new(),
            init: Init::Pretrained,
            revision: None,
            trainable: None,
            attn_implementation: AttnImplementation::Auto,
            config: ModelConfigOverrides::default(),
        },
        data: DataSettings { dataset: Dataset::Hub(String::new()), tokenizer: None, shuffle: false, packing: Packing::Concatenate },
        train: TrainSettings {
            per_device_train_batch_size: 0,
            per_device_eval_batch_size: 0,
            gradient_accumulation_steps: 0,
            sync_each_batch: false,
            duration: TrainDuration::MaxSteps(0),
            learning_rate: 0.0,
            lr_scheduler_type: LrSchedulerType::Linear,
            warmup_steps: 0,
            weight_decay: 0.0,
            decay_norm_and_bias: false,
            adam_beta1: 0.0,
            adam_beta2: 0.0,
            adam_epsilon: 0.0,
            max_grad_norm: 0.0,
            eval_block_size: 0,
            eval_steps: None,
            seed: 0,
        },
        fsdp: FsdpSettings {
            fsdp_version: 0,
            sharding_strategy: ShardingStrategy::FullShard,
            hybrid_shard_size: None,
            auto_wrap_policy: AutoWrapPolicy::NoWrap,
            transformer_layer_cls_to_wrap: None,
            min_num_params: 0,
            backward_prefetch: BackwardPrefetch::NoPrefetch,
            forward_prefetch: false,
            limit_all_gathers: false,
            use_orig_params: false,
            cpu_offload: false,
            activation_checkpointing: false,
            sync_module_states: false,
            cpu_ram_efficient_loading: false,
            state_dict_type: StateDictType::FullStateDict,
            reshard_after_forward: None,
            mixed_precision: MixedPrecision::uniform(DType::Fp32),
            initial_loss_scale: 0.0,
        },
        device: DeviceSettings { kind: DeviceKind::Cpu, world_size: 0, memory: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that a kind accepts, as TOML.
    fn samples(kind: Kind) -> Vec<String> {
        match kind {
            Kind::Bool => vec!["true".to_owned(), "false".to_owned()],
            Kind::Integer(least) => vec![least.to_string(), "4_000".to_owned(), "0x1F4".to_owned()],
            Kind::Among(numbers) => numbers.iter().map(u64::to_string).collect(),
            Kind::Number(_) => vec!["0.5".to_owned(), "5e-1".to_owned()],
            Kind::Choice(names) => names.iter().map(|name| format!("\"{name}\"")).collect(),
            Kind::Size => vec!["\"16GiB\"".to_owned(), "\"1.5 GB\"".to_owned()],
            Kind::Duration(_) => vec!["\"4h 10m\"".to_owned()],
            Kind::BlockSizes => vec!["[64, 128]".to_owned()],
            Kind::Line => vec!["\"gpu\"".to_owned()],
            Kind::Lines => vec!["[]".to_owned(), "[\"module load cuda\"]".to_owned()],
            Kind::SbatchOptions => vec!["{ exclusive = true, mail-type = \"END\", nice = 100 }".to_owned()],
            Kind::Text | Kind::Regex => vec!["\"h.0\"".to_owned()],
            Kind::Tokenizer => vec!["\"gpt2\"".to_owned(), "{ train_bpe = 512 }".to_owned()],
            Kind::MixedPrecision => vec!["\"bf16\"".to_owned(), "{ reduce_dtype = \"fp16\" }".to_owned()],
            Kind::Reshard => vec!["true".to_owned(), "2".to_owned()],
            Kind::Dataset => {
                ["\"a/b\"", "{ train = \"a\" }", "{ synthetic = { vocab = 8 } }", "{ token_blocks = \"a\" }"].map(str::to_owned).to_vec()
            }
        }
    }

    #[test]
    fn every_key_takes_the_values_of_its_kind() {
        for key in KEYS {
            for written in samples(key.kind) {
                let value = DeValue::parse(&written).expect("TOML");
                let value = key.kind.read(&value).unwrap_or_else(|refused| panic!("{} = {written}: {}", key.path, refused.message));
                match key.target {
                    Target::Point(set) => set(&mut Point::with_defaults(), &value),
                    Target::Sweep(set) => set(&mut Sweep::with_defaults(), &value),
                }
            }
        }
    }

    #[test]
    fn a_value_that_is_set_changes_a_point() {
        for key in KEYS {
            let Target::Point(set) = key.target else { continue };
            let changed = samples(key.kind).iter().any(|written| {
                let mut point = Point::with_defaults();
                let value = DeValue::parse(written).expect("TOML");
                set(&mut point, &key.kind.read(&value).unwrap_or_else(|refused| panic!("{}", refused.message)));
                point != Point::with_defaults()
            });
            assert!(changed, "{} goes nowhere", key.path);
        }
    }

    #[test]
    fn paths_are_unique_and_bare_names_of_axes_too() {
        for (index, key) in KEYS.iter().enumerate() {
            assert_eq!(by_path(key.path), Some(index), "{}", key.path);
            assert!(!key.varies() || by_name(key.name(), Key::varies) == [index], "{} is ambiguous in [grid]", key.name());
        }
    }
}
