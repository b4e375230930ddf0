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
    /// Where and when state is saved, and where an earlier attempt may have left some to go on from; `None`: nothing is saved, every attempt starts afresh.
    #[serde(default)]
    pub checkpoint: Option<CheckpointRequest>,
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
}

impl Architecture {
    /// Largest block size the model can take.
    pub fn positions(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.n_positions,
        }
    }

    /// Entries of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.vocab_size,
        }
    }
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
    /// Epsilon of the layer norms.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of random weights.
    pub initializer_range: f64,
    /// Dropout probability of embeddings, attention and residuals.
    pub dropout: f64,
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
    /// Steps left after the first max(3, 5 %), over which the mean is taken.
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
