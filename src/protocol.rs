//! What parent and child say to each other, through files: `request.json` in, `messages.jsonl` while it runs, `result.json` at the end.
//!
//! Files, not pipes: they survive the parent and work under SLURM. The JSON schemas in `tests/schema/` are generated from these types and tested.

use std::path::PathBuf;
use std::time::SystemTime;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::spec::settings::Settings;
use crate::trial::{Purpose, TrialId};

/// Version of request, messages and result. Raised when a reader of the old form would misread the new one.
pub const PROTOCOL: u32 = 1;

/// A point in time, RFC 3339 in UTC with milliseconds in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(pub SystemTime);

impl Timestamp {
    /// Now.
    pub fn now() -> Self {
        Self(SystemTime::now())
    }

    /// Seconds from `earlier` to `self`; negative when the clock was set back in between.
    pub fn seconds_since(self, earlier: Self) -> f64 {
        match self.0.duration_since(earlier.0) {
            Ok(duration) => duration.as_secs_f64(),
            Err(error) => -error.duration().as_secs_f64(),
        }
    }
}

impl Serialize for Timestamp {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_rfc3339_millis(self.0))
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_rfc3339(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Timestamp {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Timestamp".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "string", "format": "date-time"})
    }
}

/// A number that may be NaN or infinite, which JSON cannot say: then it is the string `"NaN"`, `"inf"` or `"-inf"`.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Number(pub f64);

impl Serialize for Number {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f64(self.0) } else { serializer.collect_str(&self.0) }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(f64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(number) => Ok(Self(number)),
            Written::Text(text) => match text.as_str() {
                "NaN" => Ok(Self(f64::NAN)),
                "inf" => Ok(Self(f64::INFINITY)),
                "-inf" => Ok(Self(f64::NEG_INFINITY)),
                _ => Err(serde::de::Error::custom(format!("\"{text}\" is not a number"))),
            },
        }
    }
}

impl JsonSchema for Number {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Number".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"anyOf": [{"type": "number"}, {"enum": ["NaN", "inf", "-inf"]}]})
    }
}

/// `request.json`: everything a child needs. It lies in the attempt's folder, where the child writes its answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrialRequest {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// Which trial.
    pub trial: TrialId,
    /// Label of the first row it serves.
    pub label: String,
    /// What it is for.
    pub purpose: Purpose,
    /// Applied optimiser steps after which a probe ends; `None` for training.
    pub probe_steps: Option<u64>,
    /// Tokens per sequence.
    pub block_size: usize,
    /// Seed of this repeat.
    pub seed: u64,
    /// All resolved parameters.
    pub settings: Settings,
    /// The model, found and described.
    pub model: ResolvedModel,
    /// The data, tokenised.
    pub data: PreparedData,
    /// CPU cores each rank may compute on; empty: as many threads as the machine has cores, shared evenly.
    pub cores: Vec<usize>,
    /// How its ranks are spread over machines; absent: all of them in one process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// Where and when state is saved, and where an earlier attempt may have left some to go on from; `None`: nothing is saved, every attempt starts afresh.
    #[serde(default)]
    pub checkpoint: Option<CheckpointRequest>,
    /// Seconds without progress after which the trial is ended; a rank that is blocked is found and named before. `None`: nobody waits for progress.
    #[serde(default)]
    pub stall_timeout_seconds: Option<f64>,
    /// Where the trained model is saved, as transformers reads it; `None`: it is not. A relative path starts at the folder of the request.
    #[serde(default)]
    pub save_model: Option<PathBuf>,
}

/// The checkpoints of a trial, shared by its attempts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckpointRequest {
    /// Holds a folder `step-<n>` for each checkpoint. A relative path starts at the folder of the request, so that a results folder may be moved.
    pub folder: PathBuf,
    /// Optimiser steps between checkpoints; `None` saves only when the trial is asked to end.
    pub save_steps: Option<u64>,
    /// How many checkpoints are kept; `None` keeps all.
    pub save_total_limit: Option<usize>,
}

/// Ranks of one trial on several machines: one process on each node, which holds the ranks of that node. Which node it is, a process learns from its
/// environment: see [`crate::place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Machines.
    pub nodes: usize,
    /// Ranks on each of them.
    pub ranks_per_node: usize,
}

/// A model that was found: its architecture is known and its weights, if any, lie on this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolvedModel {
    /// Its sizes.
    pub architecture: Architecture,
    /// Safetensors file, or folder with one or with an index; `None` for random weights.
    pub weights: Option<PathBuf>,
    /// SHA-256 of the weights' contents, hexadecimal; `None` for random weights.
    pub fingerprint: Option<String>,
}

/// Sizes of a model, by family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "model_type", rename_all = "snake_case")]
pub enum Architecture {
    /// GPT-2 (Radford et al. 2019): pre-norm, learned positions, tied head.
    Gpt2(Gpt2Config),
    /// Llama (Touvron et al. 2023): RMSNorm, rotary positions, SwiGLU, grouped-query attention.
    Llama(LlamaConfig),
}

impl Architecture {
    /// Largest block size the model can take.
    pub fn positions(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_positions,
            Self::Llama(config) => config.max_position_embeddings,
        }
    }

    /// Entries of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.vocab_size,
            Self::Llama(config) => config.vocab_size,
        }
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// What is wrong, in words of `config.json`.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Self::Gpt2(config) => config.check(),
            Self::Llama(config) => config.check(),
        }
    }
}

/// Activation functions of MLPs, by transformers' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// GELU in its tanh form, GPT-2's.
    GeluNew,
    /// GELU by the normal distribution.
    Gelu,
    /// `x * sigmoid(1.702 x)`.
    QuickGelu,
    /// `x * sigmoid(x)`, Llama's.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// The hyperbolic tangent.
    Tanh,
}

/// GPT-2's `config.json`, as far as training needs it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Gpt2Config {
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Largest block size.
    pub n_positions: usize,
    /// Width.
    pub n_embd: usize,
    /// Transformer blocks.
    pub n_layer: usize,
    /// Attention heads.
    pub n_head: usize,
    /// Width of the MLP; `None` is four times `n_embd`.
    pub n_inner: Option<usize>,
    /// Activation of the MLP.
    pub activation_function: Activation,
    /// Epsilon of the layer norms.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of random weights.
    pub initializer_range: f64,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Dropout probability of embeddings, attention and residuals.
    pub dropout: f64,
}

impl Gpt2Config {
    /// What transformers assumes where a `config.json` is silent; but dropout, which is 0 unless the sweep file says otherwise.
    pub const DEFAULT: Self = Self {
        vocab_size: 50_257,
        n_positions: 1024,
        n_embd: 768,
        n_layer: 12,
        n_head: 12,
        n_inner: None,
        activation_function: Activation::GeluNew,
        layer_norm_epsilon: 1e-5,
        initializer_range: 0.02,
        tie_word_embeddings: true,
        dropout: 0.0,
    };

    fn check(&self) -> Result<(), String> {
        let Self { vocab_size, n_positions, n_embd, n_layer, n_head, n_inner, .. } = *self;
        let inner = n_inner.unwrap_or(1);
        not_zero(&[
            ("vocab_size", vocab_size),
            ("n_positions", n_positions),
            ("n_embd", n_embd),
            ("n_layer", n_layer),
            ("n_head", n_head),
            ("n_inner", inner),
        ])?;
        if !n_embd.is_multiple_of(n_head) {
            return Err(format!("n_embd = {n_embd} does not divide into n_head = {n_head} heads"));
        }
        probability("dropout", self.dropout)
    }
}

/// Llama's `config.json`, as far as training needs it, with everything that follows from other keys filled in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Largest block size.
    pub max_position_embeddings: usize,
    /// Width.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub num_hidden_layers: usize,
    /// Heads of queries.
    pub num_attention_heads: usize,
    /// Heads of keys and values, each serving as many heads of queries as the others.
    pub num_key_value_heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// Activation of the MLP.
    pub hidden_act: Activation,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// Standard deviation of random weights.
    pub initializer_range: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// What is done to these frequencies for long blocks.
    pub rope_scaling: RopeScaling,
    /// Whether the attention's projections have biases.
    pub attention_bias: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Token whose embedding learns nothing from being read, PyTorch's `padding_idx`.
    pub pad_token_id: Option<u32>,
    /// Dropout probability of the attention.
    pub attention_dropout: f64,
}

impl LlamaConfig {
    /// What transformers assumes where a `config.json` is silent; but dropout, which is 0 unless the sweep file says otherwise.
    pub const DEFAULT: Self = Self {
        vocab_size: 32_000,
        max_position_embeddings: 2048,
        hidden_size: 4096,
        intermediate_size: 11_008,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: 32,
        head_dim: 128,
        hidden_act: Activation::Silu,
        rms_norm_eps: 1e-6,
        initializer_range: 0.02,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        attention_bias: false,
        mlp_bias: false,
        tie_word_embeddings: false,
        pad_token_id: None,
        attention_dropout: 0.0,
    };

    fn check(&self) -> Result<(), String> {
        let Self { vocab_size, max_position_embeddings, hidden_size, intermediate_size, num_hidden_layers, .. } = *self;
        let Self { num_attention_heads, num_key_value_heads, head_dim, rope_theta, .. } = *self;
        not_zero(&[
            ("vocab_size", vocab_size),
            ("max_position_embeddings", max_position_embeddings),
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
            ("num_hidden_layers", num_hidden_layers),
            ("num_attention_heads", num_attention_heads),
            ("num_key_value_heads", num_key_value_heads),
            ("head_dim", head_dim),
        ])?;
        if !hidden_size.is_multiple_of(num_attention_heads) {
            return Err(format!("hidden_size = {hidden_size} does not divide into num_attention_heads = {num_attention_heads} heads"));
        }
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            return Err(format!(
                "num_attention_heads = {num_attention_heads} does not divide into num_key_value_heads = {num_key_value_heads} groups"
            ));
        }
        if head_dim % 2 == 1 {
            return Err(format!("head_dim = {head_dim} is odd, so its numbers make no pairs to rotate"));
        }
        if !(rope_theta.is_finite() && rope_theta > 0.0) {
            return Err(format!("rope_theta = {rope_theta} is not above 0"));
        }
        if let Some(token) = self.pad_token_id.filter(|token| *token as usize >= vocab_size) {
            return Err(format!("pad_token_id = {token} is not in the vocabulary of {vocab_size}"));
        }
        self.rope_scaling.check()?;
        probability("attention_dropout", self.attention_dropout)
    }
}

fn not_zero(sizes: &[(&str, usize)]) -> Result<(), String> {
    sizes.iter().find(|(_, value)| *value == 0).map_or(Ok(()), |(name, _)| Err(format!("{name} is 0")))
}

fn probability(name: &str, value: f64) -> Result<(), String> {
    if (0.0..1.0).contains(&value) { Ok(()) } else { Err(format!("{name} = {value} is not a probability below 1")) }
}

/// What is done to rotary frequencies so that a model takes longer blocks than it was trained on; transformers' `rope_type`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "rope_type", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// Nothing.
    Default,
    /// All are divided.
    Linear {
        /// By this.
        factor: f64,
    },
    /// Slow ones are divided, fast ones are not, and those between in part: Llama 3.1.
    Llama3 {
        /// By this.
        factor: f64,
        /// Slow are those that turn fewer times within the original positions.
        low_freq_factor: f64,
        /// Fast are those that turn more often.
        high_freq_factor: f64,
        /// Positions the model was first trained on.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    fn check(&self) -> Result<(), String> {
        let (factor, low, high) = match *self {
            Self::Default => return Ok(()),
            Self::Linear { factor } => (factor, 1.0, 2.0),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, .. } => (factor, low_freq_factor, high_freq_factor),
        };
        if !(factor.is_finite() && factor > 0.0) {
            return Err(format!("factor = {factor} of the rotary embedding is not above 0"));
        }
        if !(low > 0.0 && high > low) {
            return Err(format!("low_freq_factor = {low} and high_freq_factor = {high} of the rotary embedding do not ascend from above 0"));
        }
        Ok(())
    }
}

/// Data that was fetched, tokenised and cached: what the trainer reads. Made by `data::prepare`, read by `data::load`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PreparedData {
    /// Token file of the training split.
    pub train: PathBuf,
    /// Token file of the evaluation split, if there is one.
    pub eval: Option<PathBuf>,
    /// SHA-256 of the token ids of both splits, vocabulary size and packing, hexadecimal: the same on every machine.
    pub fingerprint: String,
    /// Entries of the vocabulary; every token id is below it.
    pub vocab_size: usize,
    /// Tokens of the training split.
    pub train_tokens: u64,
    /// Tokens of the evaluation split.
    pub eval_tokens: u64,
    /// Perplexity no model can beat, where it is known: `exp(H(next | previous))` of the synthetic chain.
    pub floor_perplexity: Option<f64>,
    /// How many tokens of vocabulary, data set and tokenizer were used, in words, for the report.
    pub description: String,
}

/// One line of `messages.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Message {
    /// When.
    pub at: Timestamp,
    /// What.
    #[serde(flatten)]
    pub kind: MessageKind,
}

/// What a child says while it runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MessageKind {
    /// The child runs and has read its request.
    Started {
        /// [`PROTOCOL`].
        protocol: u32,
        /// Its process id.
        pid: u32,
        /// Ranks it holds.
        ranks: usize,
    },
    /// A new phase began: `load`, `train`, `evaluate`, `checkpoint` ...
    Phase {
        /// Its name.
        phase: String,
    },
    /// An optimiser step ended.
    Step(Step),
    /// An evaluation ended.
    Eval {
        /// Optimiser steps before it.
        step: u64,
        /// What was measured.
        #[serde(flatten)]
        evaluation: Evaluation,
    },
    /// A checkpoint is complete on disk.
    Checkpoint {
        /// Optimiser steps it holds.
        step: u64,
        /// Its folder.
        path: PathBuf,
        /// Seconds it took.
        seconds: f64,
    },
    /// Something the user should know; a sentence.
    Warning {
        /// The sentence.
        message: String,
    },
    /// A rank ran out of device memory; the last message.
    Oom(OutOfMemory),
}

/// Numbers of one optimiser step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Step {
    /// From 1; a step skipped for overflow counts, as in PyTorch's loop.
    pub step: u64,
    /// Optimiser steps this training will take.
    pub steps: u64,
    /// Mean training loss over targets and ranks.
    pub loss: Number,
    /// Global norm of the gradient before clipping.
    pub grad_norm: Number,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Tokens of this step over all ranks.
    pub tokens: u64,
    /// Synchronised wall time, data wait included.
    pub step_seconds: f64,
    /// Bytes in use on each rank.
    pub allocated_bytes: Vec<u64>,
    /// Most bytes ever in use on each rank.
    pub peak_bytes: Vec<u64>,
    /// The fp16 loss scale.
    pub loss_scale: Option<f64>,
    /// Whether the optimiser skipped it for overflow.
    pub skipped: bool,
}

/// What an evaluation measured: exp(sum of token losses / number of scored tokens) over all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Evaluation {
    /// Tokens per sequence, and the stride.
    pub block_size: usize,
    /// Mean loss per scored token.
    pub loss: Number,
    /// `exp(loss)`.
    pub perplexity: Number,
    /// Tokens scored.
    pub scored_tokens: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Where device memory ran out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OutOfMemory {
    /// Which rank.
    pub rank: usize,
    /// Bytes it asked for.
    pub requested_bytes: u64,
    /// Bytes in use when it asked.
    pub in_use_bytes: u64,
    /// Bytes it may use.
    pub budget_bytes: u64,
    /// What it was doing.
    pub phase: String,
}

/// `result.json`: written by temporary file, fsync and rename, so that it is whole or absent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TrialResult {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// Which trial.
    pub trial: TrialId,
    /// How it ended.
    #[serde(flatten)]
    pub ending: TrialEnding,
    /// Optimiser steps taken, skipped ones included.
    pub optimizer_steps: u64,
    /// Steps skipped for fp16 overflow.
    pub skipped_steps: u64,
    /// Tokens trained on, over all ranks.
    pub tokens_seen: u64,
    /// Evaluation at the trial's own block size; `None` where there is no evaluation split or it is shorter than a block.
    pub evaluation: Option<Evaluation>,
    /// Evaluation at `eval_block_size`, so that rows can be compared.
    pub evaluation_common: Option<Evaluation>,
    /// Times.
    pub timing: Timing,
    /// Most device bytes ever in use on each rank.
    pub peak_bytes: Vec<u64>,
    /// Host bytes of offloaded shards on each rank, at their peak.
    pub host_bytes: Vec<u64>,
    /// Parameters of the model.
    pub parameters: u64,
    /// What became of the data at this block size.
    pub data: DataCounts,
    /// What the user should know, a sentence each.
    pub warnings: Vec<String>,
}

/// How a child says that it ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "ending", rename_all = "snake_case")]
pub enum TrialEnding {
    /// All steps taken, all evaluations made.
    Done,
    /// The loss became NaN or infinite.
    Diverged {
        /// A sentence.
        reason: String,
    },
    /// Training failed.
    Failed {
        /// A sentence.
        reason: String,
    },
    /// State was saved; run it again to go on.
    Checkpointed {
        /// Optimiser steps it holds.
        step: u64,
    },
}

/// Times of a trial, in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Timing {
    /// Steps left after the first max(3, 5 %) and the first 3 after each checkpoint that training went on from, over which the mean is taken.
    pub steady_steps: u64,
    /// Mean synchronised step time over the steady steps, data wait included; `None` when there are none.
    pub step_seconds: Option<f64>,
    /// Optimiser steps of one pass over the training split; may be a fraction.
    pub steps_per_epoch: f64,
    /// `step_seconds * steps_per_epoch`.
    pub epoch_seconds: Option<f64>,
    /// Trained tokens per second over the steady steps.
    pub tokens_per_second: Option<f64>,
    /// Spent evaluating.
    pub evaluation_seconds: f64,
    /// Spent saving state.
    pub checkpoint_seconds: f64,
    /// Spent before the first step.
    pub startup_seconds: f64,
}

/// What became of the data at a block size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DataCounts {
    /// Blocks of the training split.
    pub train_blocks: u64,
    /// Tokens of its incomplete tail, dropped.
    pub train_dropped_tokens: u64,
    /// Blocks of the evaluation split.
    pub eval_blocks: u64,
    /// Tokens of its incomplete tail, dropped.
    pub eval_dropped_tokens: u64,
}
