//! Every parameter of a point, resolved: defaults filled in, aliases gone, sizes in bytes. What identifies a trial and what the child trains by.
//!
//! Field names are the sweep file's, which are PyTorch's and accelerate's. Block size is not here: a configuration is a point without it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::protocol::Architecture;

/// All resolved parameters of one configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Which model, and how it starts.
    pub model: ModelSettings,
    /// What it is trained and evaluated on.
    pub data: DataSettings,
    /// The training loop.
    pub train: TrainSettings,
    /// Sharding and what goes with it.
    pub fsdp: FsdpSettings,
    /// Ranks and their memory.
    pub device: DeviceSettings,
}

/// `[model]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// A preset (`gpt2`, `gpt2-tiny`), a hub id or a local folder, as written.
    pub id: String,
    /// Where the first weights come from.
    pub init: Init,
    /// Revision on the hub.
    pub revision: Option<String>,
    /// Regular expression over parameter names; only those that match are trained.
    pub trainable: Option<String>,
    /// Which attention is used.
    pub attn_implementation: AttnImplementation,
    /// Overrides of the model's own configuration; only with `init = "random"`.
    pub config: ModelConfigOverrides,
}

/// Where the first weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// The safetensors weights of the model.
    Pretrained,
    /// Random weights drawn as transformers draws them.
    Random,
}

/// Which attention is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttnImplementation {
    /// Whatever is fastest on the device.
    Auto,
    /// Softmax over explicit scores.
    Eager,
    /// A fused kernel that never holds all scores.
    Flash,
}

/// Overrides of the model's configuration, named as in `config.json` of its family. `None` keeps the model's own value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelConfigOverrides {
    /// Transformer blocks of a GPT-2.
    pub n_layer: Option<usize>,
    /// Width of a GPT-2.
    pub n_embd: Option<usize>,
    /// Attention heads of a GPT-2.
    pub n_head: Option<usize>,
    /// Largest block size of a GPT-2.
    pub n_positions: Option<usize>,
    /// Transformer blocks of a Llama.
    pub num_hidden_layers: Option<usize>,
    /// Width of a Llama.
    pub hidden_size: Option<usize>,
    /// Width of a Llama's MLP.
    pub intermediate_size: Option<usize>,
    /// Heads of queries of a Llama.
    pub num_attention_heads: Option<usize>,
    /// Heads of keys and values of a Llama.
    pub num_key_value_heads: Option<usize>,
    /// Numbers of a head of a Llama; its width over its heads where neither the model nor this says otherwise.
    pub head_dim: Option<usize>,
    /// Largest block size of a Llama.
    pub max_position_embeddings: Option<usize>,
    /// Base of a Llama's rotary frequencies.
    pub rope_theta: Option<f64>,
    /// Vocabulary; from the data when nothing says otherwise.
    pub vocab_size: Option<usize>,
    /// Dropout probability: of embeddings, attention and residuals in a GPT-2, of the attention in a Llama.
    pub dropout: Option<f64>,
}

impl ModelConfigOverrides {
    /// The first override that belongs to another family than this model's, and what to say instead.
    pub fn foreign_to(&self, architecture: &Architecture) -> Option<String> {
        let size = |value: Option<usize>| value.is_some();
        let gpt2 = [
            ("n_layer", "num_hidden_layers", size(self.n_layer)),
            ("n_embd", "hidden_size", size(self.n_embd)),
            ("n_head", "num_attention_heads", size(self.n_head)),
            ("n_positions", "max_position_embeddings", size(self.n_positions)),
        ];
        let llama = [
            ("num_hidden_layers", "n_layer", size(self.num_hidden_layers)),
            ("hidden_size", "n_embd", size(self.hidden_size)),
            ("num_attention_heads", "n_head", size(self.num_attention_heads)),
            ("max_position_embeddings", "n_positions", size(self.max_position_embeddings)),
            ("intermediate_size", "", size(self.intermediate_size)),
            ("num_key_value_heads", "", size(self.num_key_value_heads)),
            ("head_dim", "", size(self.head_dim)),
            ("rope_theta", "", self.rope_theta.is_some()),
        ];
        let (foreign, theirs, ours): (&[_], _, _) = match architecture {
            Architecture::Gpt2(_) => (&llama, "Llama", "GPT-2"),
            Architecture::Llama(_) => (&gpt2, "GPT-2", "Llama"),
        };
        let (name, instead, _) = foreign.iter().find(|(.., is_set)| *is_set)?;
        let instead = if instead.is_empty() { String::new() } else { format!(": say {instead}") };
        Some(format!("{name} is a key of {theirs}, the model is a {ours}{instead}"))
    }

    /// The largest block size it asks for.
    pub fn positions(&self) -> Option<usize> {
        self.n_positions.or(self.max_position_embeddings)
    }
}

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataSettings {
    /// Where the text or the tokens come from.
    pub dataset: Dataset,
    /// What turns text into tokens; `None` where the data set is tokens already, or where the model's own is meant.
    pub tokenizer: Option<Tokenizer>,
    /// Whether blocks are visited in a new order every epoch.
    pub shuffle: bool,
    /// How documents become blocks.
    pub packing: Packing,
}

/// Where the text or the tokens come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Dataset {
    /// A data set on the hub: `wikitext-2-v1`, `wikitext-2-raw-v1` (configurations of `Salesforce/wikitext`) or any hub id.
    Hub(String),
    /// Text files.
    Files {
        /// Training text.
        train: String,
        /// Evaluation text.
        eval: Option<String>,
    },
    /// The embedded default: a first-order Markov chain over token ids.
    Synthetic {
        /// Token ids are below this.
        vocab: usize,
        /// Length of the training split in tokens.
        train_tokens: usize,
        /// Length of the evaluation split in tokens.
        eval_tokens: usize,
    },
    /// Tokens that are cut already: safetensors files with one int32 tensor each.
    TokenBlocks {
        /// `[steps, global batch, block]`.
        train: String,
        /// `[n, block]`.
        eval: Option<String>,
    },
}

/// What turns text into tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Tokenizer {
    /// A hub id, or the path of a `tokenizer.json` or of a folder that holds one.
    Source(String),
    /// Byte-level BPE with this many entries, trained on the training text.
    TrainBpe(usize),
}

/// How documents become blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// One long run of tokens, cut; an incomplete tail is dropped and counted.
    Concatenate,
    /// Each document padded to a block of its own, padding masked.
    PerDocument,
}

/// `[train]`; defaults are those of the HF Trainer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrainSettings {
    /// Sequences per rank and forward pass.
    pub per_device_train_batch_size: usize,
    /// Sequences per rank and evaluation pass.
    pub per_device_eval_batch_size: usize,
    /// Forward and backward passes per optimiser step.
    pub gradient_accumulation_steps: usize,
    /// Whether gradients are reduced after every pass rather than once per optimiser step.
    pub sync_each_batch: bool,
    /// How long to train.
    pub duration: TrainDuration,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// How the learning rate moves after the warm-up.
    pub lr_scheduler_type: LrSchedulerType,
    /// Steps of linear warm-up from zero.
    pub warmup_steps: u64,
    /// AdamW's decoupled weight decay.
    pub weight_decay: f64,
    /// Whether norms and biases decay too.
    pub decay_norm_and_bias: bool,
    /// AdamW's first beta.
    pub adam_beta1: f64,
    /// AdamW's second beta.
    pub adam_beta2: f64,
    /// AdamW's epsilon.
    pub adam_epsilon: f64,
    /// Global norm that gradients are clipped to; 0 turns clipping off.
    pub max_grad_norm: f64,
    /// Block size of the evaluation that makes rows comparable.
    pub eval_block_size: usize,
    /// Optimiser steps between evaluations during training; `None` evaluates at the end only.
    pub eval_steps: Option<u64>,
    /// Seed of weights, data order and dropout. Repeat `r` uses `seed + r`.
    pub seed: u64,
}

/// How long to train.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainDuration {
    /// Passes over the training split; may be a fraction.
    NumTrainEpochs(f64),
    /// Optimiser steps.
    MaxSteps(u64),
}

/// How the learning rate moves after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// Falls to zero along a line.
    Linear,
    /// Falls to zero along half a cosine.
    Cosine,
    /// Stays.
    Constant,
}

/// `[fsdp]`; defaults are those of accelerate's launcher, but `backward_prefetch = BACKWARD_PRE`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FsdpSettings {
    /// 1: flat parameters. 2: per-parameter sharding.
    pub fsdp_version: u8,
    /// What is sharded, and when it is gathered.
    pub sharding_strategy: ShardingStrategy,
    /// Ranks per shard group of the hybrid strategies; `None` is the node's ranks.
    pub hybrid_shard_size: Option<usize>,
    /// What becomes an FSDP unit of its own.
    pub auto_wrap_policy: AutoWrapPolicy,
    /// Class wrapped by `TRANSFORMER_BASED_WRAP`; `None` is the model's own block class.
    pub transformer_layer_cls_to_wrap: Option<String>,
    /// Smallest unit of `SIZE_BASED_WRAP`, in parameters.
    pub min_num_params: u64,
    /// When the next unit is gathered in backward.
    pub backward_prefetch: BackwardPrefetch,
    /// Whether the next unit is gathered ahead in forward.
    pub forward_prefetch: bool,
    /// Whether at most two gathers are in flight.
    pub limit_all_gathers: bool,
    /// Whether the optimiser sees original parameters instead of flat ones.
    pub use_orig_params: bool,
    /// Whether shards, gradients and optimiser state live in host memory.
    pub cpu_offload: bool,
    /// Whether transformer blocks are recomputed in backward.
    pub activation_checkpointing: bool,
    /// Whether rank 0's first values are broadcast and win over those of the other ranks. Random ones are the same on every rank anyway.
    pub sync_module_states: bool,
    /// Whether rank 0 alone reads the weights and passes each rank its part, piece by piece; otherwise every rank reads its own part. Implies
    /// `sync_module_states`, as in accelerate.
    pub cpu_ram_efficient_loading: bool,
    /// Layout of saved state.
    pub state_dict_type: StateDictType,
    /// Version 2 only.
    pub reshard_after_forward: Option<ReshardAfterForward>,
    /// Which data types parameters, reductions and buffers use.
    pub mixed_precision: MixedPrecision,
    /// First value of the fp16 loss scale.
    pub initial_loss_scale: f64,
}

/// PyTorch's `ShardingStrategy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ShardingStrategy {
    /// Parameters, gradients and optimiser state sharded; resharded after forward.
    FullShard,
    /// As `FULL_SHARD`, but parameters stay gathered from forward to backward.
    ShardGradOp,
    /// Everything replicated, as DDP.
    NoShard,
    /// `FULL_SHARD` within a group, replicated across groups.
    HybridShard,
    /// `SHARD_GRAD_OP` within a group, replicated across groups.
    #[serde(rename = "HYBRID_SHARD_ZERO2")]
    HybridShardZero2,
}

/// accelerate's `fsdp_auto_wrap_policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum AutoWrapPolicy {
    /// The whole model is one unit.
    NoWrap,
    /// Each transformer block is a unit.
    TransformerBasedWrap,
    /// Each module of at least `min_num_params` unwrapped parameters is a unit.
    SizeBasedWrap,
}

/// PyTorch's `BackwardPrefetch`, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum BackwardPrefetch {
    /// Before the current unit's backward.
    BackwardPre,
    /// After it, before its reduction.
    BackwardPost,
    /// When the next unit needs it.
    NoPrefetch,
}

/// Layout of saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum StateDictType {
    /// One file, written by rank 0.
    FullStateDict,
    /// A file per rank and an index.
    ShardedStateDict,
}

/// FSDP2's `reshard_after_forward`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum ReshardAfterForward {
    /// Whether to reshard.
    Flag(bool),
    /// Reshard to this many ranks.
    Ranks(usize),
}

/// PyTorch FSDP's `MixedPrecision`, three data types apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MixedPrecision {
    /// Parameters and computation.
    pub param_dtype: DType,
    /// Gradient reduction.
    pub reduce_dtype: DType,
    /// Buffers.
    pub buffer_dtype: DType,
}

impl MixedPrecision {
    /// All three the same, as `mixed_precision = "fp16"` means it.
    pub const fn uniform(dtype: DType) -> Self {
        Self { param_dtype: dtype, reduce_dtype: dtype, buffer_dtype: dtype }
    }
}

/// A floating-point data type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DType {
    /// 32-bit.
    Fp32,
    /// IEEE half.
    Fp16,
    /// Brain float.
    Bf16,
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::Fp32 => 4,
            Self::Fp16 | Self::Bf16 => 2,
        }
    }
}

/// `[device]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceSettings {
    /// Resolved: `auto` is gone.
    pub kind: DeviceKind,
    /// Ranks.
    pub world_size: usize,
    /// Budget per rank in bytes; `None` is all there is.
    pub memory: Option<u64>,
}

/// What a rank computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// Burn's flex backend.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}
