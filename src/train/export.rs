//! The trained model as a folder that transformers' `from_pretrained` reads: `config.json`, weights in safetensors, the tokenizer where there is one.
//!
//! Weights are the f32 master values. They are written parameter by parameter and piece by piece, so that no rank ever holds more than its shard and a piece;
//! the folder appears whole or not at all.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::error::TrainError;
use super::fsdp::{Buffer, FullyShardedDataParallel};
use super::memory;
use super::model::ops::AttentionKind;
use super::model::{self, ParameterInfo};
use crate::protocol::{Architecture, Gpt2Config, LlamaConfig, ResolvedModel, RopeScaling};

/// Weights beyond this many bytes go into several files, as transformers cuts them.
const LARGEST_FILE: u64 = 5_000_000_000;

/// Elements that are sent and written at a time: 1 MiB.
const PIECE: usize = 256 * 1024;

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const INDEX: &str = "model.safetensors.index.json";

/// Writes the model to `folder`, which is replaced if it is there. Every rank must call it; rank 0 writes. `model` is what training began with, `tokens` the
/// file of the tokens it was trained on, beside which their tokenizer may lie.
///
/// # Errors
///
/// [`TrainError::Failed`] if it cannot be written, [`TrainError::Rank`] if another rank failed.
pub fn save_model(engine: &mut FullyShardedDataParallel, model: &ResolvedModel, tokens: &Path, folder: &Path) -> Result<(), TrainError> {
    save_in_files_of(LARGEST_FILE, engine, model, tokens, folder)
}

fn save_in_files_of(
    largest_file: u64,
    engine: &mut FullyShardedDataParallel,
    model: &ResolvedModel,
    tokens: &Path,
    folder: &Path,
) -> Result<(), TrainError> {
    let parameters = memory::host(|| model::build(&model.architecture, AttentionKind::Flash).modules().parameters());
    let writes = engine.group().rank() == 0;
    let draft = folder.with_extension("partial");
    let cannot = |error: io::Error| TrainError::Failed(format!("cannot save the model in {}: {error}", folder.display()));
    if writes {
        memory::host(|| begin(&draft, model, tokens)).map_err(cannot)?;
    }
    let files = memory::host(|| cut_into_files(&parameters, largest_file));
    for (name, parameters) in &files {
        let mut file = None;
        if writes {
            file = Some(memory::host(|| begin_file(&draft.join(name), parameters)).map_err(cannot)?);
        }
        for parameter in *parameters {
            each_piece(engine, parameter, |values| match &mut file {
                Some(file) => memory::host(|| write_values(file, values)).map_err(cannot),
                None => Ok(()),
            })?;
        }
        if let Some(mut file) = file {
            file.flush().map_err(cannot)?;
        }
    }
    // From here on no rank waits for another, however long the disk takes.
    if writes { memory::host(|| finish(&draft, folder, &files)).map_err(cannot) } else { Ok(()) }
}

/// Hands over a parameter from its first element to its last, in pieces, on every rank.
fn each_piece(
    engine: &mut FullyShardedDataParallel,
    parameter: &ParameterInfo,
    mut take: impl FnMut(&[f32]) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let group = engine.group().clone();
    let (rank, world_size) = (group.rank(), group.world_size());
    let find = |engine: &mut FullyShardedDataParallel| {
        engine.shards().iter().enumerate().find_map(|(shard, held)| {
            let segment = held.segments.iter().find(|segment| segment.name == parameter.name)?;
            Some((shard, segment.range.clone(), segment.parameter_range.clone()))
        })
    };
    let mine = find(engine);
    // Which elements each rank holds, so that all agree on who sends what.
    let mut bounds = vec![0.0; 2 * world_size];
    if let Some((.., elements)) = &mine {
        (bounds[2 * rank], bounds[2 * rank + 1]) = (elements.start as f64, elements.end as f64);
    }
    let bounds = group.all_reduce_numbers(&bounds)?;
    let numel = parameter.numel();
    let mut next = 0;
    while next < numel {
        let holds = |rank: &usize| (bounds[2 * rank] as usize..bounds[2 * rank + 1] as usize).contains(&next);
        let Some(owner) = (0..world_size).find(holds) else {
            return Err(TrainError::Failed(format!("no rank holds element {next} of {}", parameter.name)));
        };
        let end = (next + PIECE).min(bounds[2 * owner + 1] as usize).min(numel);
        let piece = mine.as_ref().filter(|_| rank == owner).map(|(shard, range, elements)| {
            let at = range.start + next - elements.start;
            Arc::new(Buffer::F32(engine.shards()[*shard].values[at..at + end - next].to_vec()))
        });
        let Buffer::F32(values) = group.broadcast(piece, owner)? else {
            return Err(TrainError::Failed("master values are f32".to_owned()));
        };
        take(&values)?;
        next = end;
    }
    Ok(())
}

/// The files of these parameters, in order, with their names; each holds one parameter at least.
fn cut_into_files(parameters: &[ParameterInfo], largest_file: u64) -> Vec<(String, &[ParameterInfo])> {
    let mut starts = vec![0];
    let mut bytes = 0;
    for (index, parameter) in parameters.iter().enumerate() {
        let more = 4 * parameter.numel() as u64;
        if bytes > 0 && bytes + more > largest_file {
            starts.push(index);
            bytes = 0;
        }
        bytes += more;
    }
    let count = starts.len();
    let name = |file: usize| if count == 1 { "model.safetensors".to_owned() } else { format!("model-{:05}-of-{count:05}.safetensors", file + 1) };
    let end = |file: usize| starts.get(file + 1).copied().unwrap_or(parameters.len());
    starts.iter().enumerate().map(|(file, &start)| (name(file), &parameters[start..end(file)])).collect()
}

/// Makes an empty draft with everything but the weights.
fn begin(draft: &Path, model: &ResolvedModel, tokens: &Path) -> io::Result<()> {
    remove(draft)?;
    fs::create_dir_all(draft)?;
    let config = serde_json::to_vec_pretty(&configuration(&model.architecture, original_configuration(model)))?;
    fs::write(draft.join(CONFIG), config)?;
    if let Some(tokenizer) = tokenizer(model, tokens) {
        fs::copy(tokenizer, draft.join(TOKENIZER))?;
    }
    Ok(())
}

/// A safetensors file up to where the numbers begin.
fn begin_file(path: &Path, parameters: &[ParameterInfo]) -> io::Result<BufWriter<File>> {
    let mut header = Map::new();
    // transformers refuses files that do not say who wrote them.
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut begin = 0;
    for parameter in parameters {
        let end = begin + 4 * parameter.numel() as u64;
        header.insert(parameter.name.clone(), json!({"dtype": "F32", "shape": parameter.shape, "data_offsets": [begin, end]}));
        begin = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(4 * PIECE, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    Ok(file)
}

fn write_values(file: &mut BufWriter<File>, values: &[f32]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(4 * values.len());
    values.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
    file.write_all(&bytes)
}

/// Puts the draft in the folder's place once all of it is on the disk.
fn finish(draft: &Path, folder: &Path, files: &[(String, &[ParameterInfo])]) -> io::Result<()> {
    if files.len() > 1 {
        let place = |(file, parameters): &(String, &[ParameterInfo])| {
            parameters.iter().map(|parameter| (parameter.name.clone(), Value::from(file.clone()))).collect::<Vec<_>>()
        };
        let map: Map<String, Value> = files.iter().flat_map(place).collect();
        let total: u64 = files.iter().flat_map(|(_, parameters)| *parameters).map(|parameter| 4 * parameter.numel() as u64).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        fs::write(draft.join(INDEX), serde_json::to_vec_pretty(&index)?)?;
    }
    for entry in fs::read_dir(draft)? {
        File::open(entry?.path())?.sync_all()?;
    }
    File::open(draft)?.sync_all()?;
    // A folder cannot be renamed over one that is not empty.
    let old = folder.with_extension("old");
    remove(&old)?;
    match fs::rename(folder, &old) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::rename(draft, folder)?;
    if let Some(parent) = folder.parent() {
        File::open(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })?.sync_all()?;
    }
    remove(&old)
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The `tokenizer.json` that made the data's tokens, or that the model came with.
fn tokenizer(model: &ResolvedModel, tokens: &Path) -> Option<PathBuf> {
    [Some(tokens.with_file_name(TOKENIZER)), beside_weights(model, TOKENIZER)].into_iter().flatten().find(|path| path.is_file())
}

/// A file beside the weights that training began with.
fn beside_weights(model: &ResolvedModel, name: &str) -> Option<PathBuf> {
    let weights = model.weights.as_ref()?;
    Some(if weights.is_dir() { weights.join(name) } else { weights.with_file_name(name) })
}

/// The `config.json` of the weights that training began with: it says much that is not training's business, such as which tokens begin and end a text.
fn original_configuration(model: &ResolvedModel) -> Option<Map<String, Value>> {
    let text = fs::read(beside_weights(model, CONFIG)?).ok()?;
    serde_json::from_slice(&text).ok()
}

/// A `config.json` that transformers 4 and 5 read.
fn configuration(architecture: &Architecture, original: Option<Map<String, Value>>) -> Map<String, Value> {
    let is_new = original.is_none();
    let mut config = original.unwrap_or_default();
    // Written anew below, if at all.
    for key in ["torch_dtype", "rope_scaling", "rope_parameters", "quantization_config"] {
        config.remove(key);
    }
    let sizes = match architecture {
        Architecture::Gpt2(sizes) => gpt2(sizes),
        Architecture::Llama(sizes) => llama(sizes),
    };
    let Value::Object(sizes) = sizes else { return config };
    // The original may know the activation by another name.
    let known = |key: &str, config: &Map<String, Value>| ["activation_function", "hidden_act"].contains(&key) && config.contains_key(key);
    sizes.into_iter().for_each(|(key, value)| {
        if !known(&key, &config) {
            config.insert(key, value);
        }
    });
    config.insert("dtype".to_owned(), json!("float32"));
    if is_new {
        // transformers' own defaults are tokens of the published models' vocabularies.
        config.insert("bos_token_id".to_owned(), Value::Null);
        config.insert("eos_token_id".to_owned(), Value::Null);
    }
    config
}

fn gpt2(sizes: &Gpt2Config) -> Value {
    json!({
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": sizes.vocab_size,
        "n_positions": sizes.n_positions,
        "n_embd": sizes.n_embd,
        "n_layer": sizes.n_layer,
        "n_head": sizes.n_head,
        "n_inner": sizes.n_inner,
        "activation_function": sizes.activation_function,
        "layer_norm_epsilon": sizes.layer_norm_epsilon,
        "initializer_range": sizes.initializer_range,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "embd_pdrop": sizes.dropout,
        "attn_pdrop": sizes.dropout,
        "resid_pdrop": sizes.dropout,
    })
}

fn llama(sizes: &LlamaConfig) -> Value {
    let mut config = json!({
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": sizes.hidden_act,
        "rms_norm_eps": sizes.rms_norm_eps,
        "initializer_range": sizes.initializer_range,
        "attention_bias": sizes.attention_bias,
        "mlp_bias": sizes.mlp_bias,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "pad_token_id": sizes.pad_token_id,
        "attention_dropout": sizes.attention_dropout,
        // transformers 4 reads the base and the scaling apart, transformers 5 reads them together.
        "rope_theta": sizes.rope_theta,
    });
    let scaling = json!(sizes.rope_scaling);
    if sizes.rope_scaling != RopeScaling::Default {
        config["rope_scaling"] = scaling.clone();
    }
    config["rope_parameters"] = scaling;
    config["rope_parameters"]["rope_theta"] = json!(sizes.rope_theta);
    config
}

#[cfg(test)]
mod tests;
