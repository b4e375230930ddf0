//! Checks before anything starts: each row held against itself, the machine, the model and the data. Pure: what others found out comes in as [`Facts`],
//! and what is not known yet is not checked.

use std::collections::HashMap;

use super::mistakes::{list, nearest};
use super::plan::{Row, SweepPlan};
use super::presets::preset;
use super::settings::{
    AutoWrapPolicy, DType, DataSettings, Dataset, DeviceKind, Init, ModelConfigOverrides, ModelSettings, Packing, ReshardAfterForward, Settings,
    ShardingStrategy,
};
use crate::format;
use crate::protocol::{Architecture, PreparedData};

/// What is known about the world that a sweep is to run in. `None` and absent entries are unknown and nothing is held against them.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Architectures found, each with the settings that asked for it.
    pub models: Vec<(ModelSettings, Architecture)>,
    /// Data prepared, each with the settings that asked for it; a model's own tokenizer makes data depend on the model.
    pub data: Vec<(ModelSettings, DataSettings, PreparedData)>,
    /// Memory of the host in bytes.
    pub host_memory_bytes: Option<u64>,
    /// CUDA devices that may be used.
    pub cuda_devices: Option<usize>,
    /// Whether those devices compute in bf16.
    pub cuda_bf16: Option<bool>,
}

/// Why some rows cannot run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Places of the rows in the plan, from 0, ascending.
    pub rows: Vec<usize>,
    /// What is wrong, a sentence without a full stop.
    pub message: String,
    /// What to do.
    pub help: String,
}

/// Holds every row against itself and the facts. Rows with the same problem are named together.
pub fn check(plan: &SweepPlan, facts: &Facts) -> Vec<Problem> {
    let mut problems: Vec<Problem> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for (index, row) in plan.rows.iter().enumerate() {
        for (message, help) in problems_of(&row, plan, facts) {
            let place = *places.entry(message.clone()).or_insert_with(|| {
                problems.push(Problem { rows: Vec::new(), message, help });
                problems.len() - 1
            });
            problems[place].rows.push(index);
        }
    }
    problems
}

/// A message and what to do.
type Found = Vec<(String, String)>;

fn problems_of(row: &Row, plan: &SweepPlan, facts: &Facts) -> Found {
    let mut found = Found::new();
    let settings = &row.settings;
    contradictions(settings, &mut found);
    let model = Model::find(row, facts);
    of_model(row, &model, &mut found);
    of_data(row, plan, &model, facts, &mut found);
    of_devices(settings, facts, &mut found);
    found
}

/// What PyTorch refuses or silently gets wrong, and what cannot be meant.
fn contradictions(settings: &Settings, found: &mut Found) {
    let mut refuse = |message: &str, help: &str| found.push((message.to_owned(), help.to_owned()));
    let Settings { model, train, fsdp, device, .. } = settings;
    if model.init == Init::Pretrained {
        if preset(&model.id).is_some_and(|preset| preset.hub.is_none()) {
            refuse(&format!("{} has no pretrained weights", model.id), "say model.init = \"random\"");
        }
        if model.config != ModelConfigOverrides::default() {
            refuse("model.config changes the model, so its pretrained weights do not fit", "say model.init = \"random\", or remove model.config");
        }
    }
    if let Some(Err(error)) = model.trainable.as_deref().map(regex::Regex::new) {
        refuse(&format!("model.trainable is no regular expression: {error}"), "see https://docs.rs/regex for the syntax");
    }
    let version_1 = fsdp.fsdp_version == 1;
    if version_1 && model.trainable.is_some() && !fsdp.use_orig_params {
        let message = "frozen parameters with use_orig_params = false: PyTorch refuses flat parameters of which only a part is trained";
        refuse(message, "say fsdp.use_orig_params = true");
    }
    if version_1 && fsdp.cpu_offload && train.gradient_accumulation_steps > 1 && !train.sync_each_batch {
        let message =
            "cpu_offload with gradient_accumulation_steps above 1 and sync_each_batch = false: PyTorch accumulates unreduced gradients wrongly there";
        refuse(message, "say train.sync_each_batch = true, or turn cpu_offload off");
    }
    let hybrid = !version_1 || matches!(fsdp.sharding_strategy, ShardingStrategy::HybridShard | ShardingStrategy::HybridShardZero2);
    let shard_size = fsdp.hybrid_shard_size.filter(|_| hybrid).unwrap_or(device.world_size);
    if !device.world_size.is_multiple_of(shard_size) {
        refuse(
            &format!("shard groups of {shard_size} ranks do not divide {} ranks", device.world_size),
            "choose hybrid_shard_size among the divisors of world_size",
        );
    }
    if let Some(ReshardAfterForward::Ranks(ranks)) = fsdp.reshard_after_forward.filter(|_| !version_1)
        && (ranks == 0 || !shard_size.is_multiple_of(ranks))
    {
        refuse(
            &format!("reshard_after_forward = {ranks} does not divide the {shard_size} ranks that share a parameter"),
            "choose a divisor of them, true or false",
        );
    }
}

/// What is known of a model before or after it was looked up.
struct Model {
    /// Width and heads of queries, and their keys in the family's `config.json`.
    sizes: Option<[(usize, &'static str); 2]>,
    key_value_heads: Option<usize>,
    positions: Option<usize>,
    vocab_size: Option<usize>,
    /// Module classes that can be wrapped; empty while the family is unknown.
    classes: &'static [&'static str],
    /// Why an override cannot be one of this model's.
    foreign: Option<String>,
}

/// What `transformer_layer_cls_to_wrap` can name in a GPT-2.
const GPT2_CLASSES: &[&str] = &["GPT2Block", "GPT2Attention", "GPT2MLP", "Conv1D", "LayerNorm", "Embedding"];
/// And in a Llama.
const LLAMA_CLASSES: &[&str] = &["LlamaDecoderLayer", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm", "Linear", "Embedding"];

impl Model {
    fn find(row: &Row, facts: &Facts) -> Self {
        let model = &row.settings.model;
        // Overrides are part of an architecture that was found, and are still to be laid over a preset's.
        if let Some((_, architecture)) = facts.models.iter().find(|(asked, _)| asked == model) {
            return Self::of(architecture, &ModelConfigOverrides::default(), Some(architecture.vocab_size()));
        }
        match preset(&model.id) {
            Some(preset) => {
                let published = preset.hub.is_some().then(|| preset.architecture(0).vocab_size());
                Self::of(&preset.architecture(0), &model.config, model.config.vocab_size.or(published))
            }
            None => Self {
                sizes: None,
                key_value_heads: None,
                positions: model.config.positions(),
                vocab_size: model.config.vocab_size,
                classes: &[],
                foreign: None,
            },
        }
    }

    fn of(architecture: &Architecture, overrides: &ModelConfigOverrides, vocab_size: Option<usize>) -> Self {
        let foreign = overrides.foreign_to(architecture);
        match architecture {
            Architecture::Gpt2(config) => Self {
                sizes: Some([(overrides.n_embd.unwrap_or(config.n_embd), "n_embd"), (overrides.n_head.unwrap_or(config.n_head), "n_head")]),
                key_value_heads: None,
                positions: overrides.n_positions.or(Some(config.n_positions)),
                vocab_size,
                classes: GPT2_CLASSES,
                foreign,
            },
            Architecture::Llama(config) => {
                let heads = overrides.num_attention_heads.unwrap_or(config.num_attention_heads);
                let alone = config.num_key_value_heads == config.num_attention_heads;
                Self {
                    sizes: Some([(overrides.hidden_size.unwrap_or(config.hidden_size), "hidden_size"), (heads, "num_attention_heads")]),
                    key_value_heads: overrides.num_key_value_heads.or(Some(if alone { heads } else { config.num_key_value_heads })),
                    positions: overrides.max_position_embeddings.or(Some(config.max_position_embeddings)),
                    vocab_size,
                    classes: LLAMA_CLASSES,
                    foreign,
                }
            }
        }
    }
}

fn of_model(row: &Row, model: &Model, found: &mut Found) {
    let fsdp = &row.settings.fsdp;
    if fsdp.auto_wrap_policy == AutoWrapPolicy::TransformerBasedWrap
        && let Some(class) = &fsdp.transformer_layer_cls_to_wrap
        && !model.classes.is_empty()
        && !model.classes.contains(&class.as_str())
    {
        let near = nearest(class, model.classes.iter().copied()).map(|near| format!("did you mean `{near}`? "));
        found.push((
            format!("the model has no class `{class}` to wrap"),
            format!("{}candidates: {}", near.unwrap_or_default(), list(model.classes.iter().copied())),
        ));
    }
    if let Some(foreign) = &model.foreign {
        found.push((format!("model.config: {foreign}"), "use the keys of the model's own config.json".to_owned()));
    }
    if let Some([(width, width_key), (heads, heads_key)]) = model.sizes {
        if !width.is_multiple_of(heads) {
            found.push((format!("{heads} heads do not divide a width of {width}"), format!("choose {heads_key} among the divisors of {width_key}")));
        }
        if let Some(groups) = model.key_value_heads.filter(|groups| !heads.is_multiple_of(*groups)) {
            let help = format!("choose num_key_value_heads among the divisors of {heads_key}");
            found.push((format!("{groups} key-value heads do not divide {heads} heads"), help));
        }
    }
    if let Some(positions) = model.positions {
        // Candidates of a search above the positions are no mistake: the model limits what is found.
        if let Some(block_size) = row.block_size.filter(|block_size| *block_size > positions) {
            let help = format!("choose train.block_size up to {positions}, or more positions with random weights");
            found.push((format!("block size {block_size} exceeds the model's {positions} positions"), help));
        } else if row.settings.train.eval_block_size > positions {
            let size = row.settings.train.eval_block_size;
            found.push((
                format!("eval_block_size {size} exceeds the model's {positions} positions"),
                format!("choose train.eval_block_size up to {positions}"),
            ));
        }
    }
}

fn of_data(row: &Row, plan: &SweepPlan, model: &Model, facts: &Facts, found: &mut Found) {
    let settings = &row.settings;
    let prepared = facts.data.iter().find(|(model, data, _)| *model == settings.model && *data == settings.data).map(|(.., prepared)| prepared);
    let (vocab_size, train_tokens) = match (&settings.data.dataset, prepared) {
        (_, Some(prepared)) => (prepared.vocab_size, prepared.train_tokens),
        (Dataset::Synthetic { vocab, train_tokens, .. }, None) => (*vocab, *train_tokens as u64),
        _ => return,
    };
    if let Some(room) = model.vocab_size.filter(|room| vocab_size > *room) {
        let help = "choose the model's own tokenizer, or model.config.vocab_size with random weights".to_owned();
        found.push((format!("the data's vocabulary of {vocab_size} does not fit the model's {room}"), help));
    }
    // Where documents become blocks of their own, their number is not known from the tokens; cut blocks come with their batches.
    let cut = settings.data.packing == Packing::PerDocument || matches!(settings.data.dataset, Dataset::TokenBlocks { .. });
    let smallest = row.block_size.or_else(|| plan.search.as_ref().and_then(|search| search.candidates.first().copied()));
    if let Some(block_size) = smallest.filter(|_| !cut) {
        let global_batch = global_batch(settings);
        let blocks = train_tokens / block_size as u64;
        if blocks < global_batch {
            found.push((
                format!(
                    "the training data of {} tokens makes {} blocks of {block_size}, fewer than one global batch of {global_batch}",
                    format::count(train_tokens),
                    format::count(blocks)
                ),
                "give more data, a smaller block size, per_device_train_batch_size, gradient_accumulation_steps or world_size".to_owned(),
            ));
        }
    }
}

/// Sequences of one optimiser step over all ranks.
pub fn global_batch(settings: &Settings) -> u64 {
    let train = &settings.train;
    (train.per_device_train_batch_size as u64)
        .saturating_mul(train.gradient_accumulation_steps as u64)
        .saturating_mul(settings.device.world_size as u64)
}

fn of_devices(settings: &Settings, facts: &Facts, found: &mut Found) {
    let device = &settings.device;
    match device.kind {
        DeviceKind::Cpu => {
            if let (Some(memory), Some(host)) = (device.memory, facts.host_memory_bytes) {
                let wanted = memory.saturating_mul(device.world_size as u64);
                if wanted > host {
                    let message = format!(
                        "{} ranks of {} need {}, the host has {}",
                        device.world_size,
                        format::bytes(memory),
                        format::bytes(wanted),
                        format::bytes(host)
                    );
                    found.push((message, "choose a smaller device.memory or device.world_size".to_owned()));
                }
            }
        }
        DeviceKind::Cuda => {
            if let Some(devices) = facts.cuda_devices.filter(|devices| *devices < device.world_size) {
                found.push((
                    format!("{} ranks need as many CUDA devices, there are {devices}", device.world_size),
                    format!("choose device.world_size up to {devices}"),
                ));
            }
            let precision = settings.fsdp.mixed_precision;
            let bf16 = [precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype].contains(&DType::Bf16);
            if bf16 && facts.cuda_bf16 == Some(false) {
                found.push(("these CUDA devices do not compute in bf16".to_owned(), "choose mixed_precision = \"fp16\" or \"no\"".to_owned()));
            }
        }
    }
}
