//! Finds models: presets, folders and files on disk, repositories on the hub. Their sizes, their weights, their tokenizer.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::error::{DataError, read_file};
use super::hub::{Hub, Repository, is_hub_id};
use super::model_config;
use super::token_file::hexadecimal;
use crate::protocol::{Architecture, Gpt2Config, ResolvedModel};
use crate::spec::settings::{Init, ModelSettings};

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const WEIGHTS: &str = "model.safetensors";
const WEIGHTS_INDEX: &str = "model.safetensors.index.json";

/// A model known by name: sizes without asking anyone, so that `init = "random"` needs no network.
#[derive(Clone, Debug, PartialEq)]
struct Preset {
    /// Where its weights and tokenizer are, if it was ever published.
    hub_id: Option<&'static str>,
    /// `[n_layer, n_embd, n_head]`
    sizes: [usize; 3],
    /// `None`: from the data.
    vocab_size: Option<usize>,
}

const PRESETS: [(&str, Preset); 5] = [
    ("gpt2", Preset { hub_id: Some("openai-community/gpt2"), sizes: [12, 768, 12], vocab_size: Some(50_257) }),
    ("gpt2-medium", Preset { hub_id: Some("openai-community/gpt2-medium"), sizes: [24, 1024, 16], vocab_size: Some(50_257) }),
    ("gpt2-large", Preset { hub_id: Some("openai-community/gpt2-large"), sizes: [36, 1280, 20], vocab_size: Some(50_257) }),
    ("gpt2-xl", Preset { hub_id: Some("openai-community/gpt2-xl"), sizes: [48, 1600, 25], vocab_size: Some(50_257) }),
    ("gpt2-tiny", Preset { hub_id: None, sizes: [4, 128, 4], vocab_size: None }),
];

/// Where a model is.
#[derive(Clone, Debug, PartialEq)]
enum Place {
    Preset(Preset),
    Folder(PathBuf),
    /// A safetensors file, its `config.json` beside it.
    File(PathBuf),
    Hub(Repository),
}

/// Finds a model and describes it; its weights are fetched where it starts from them. `data_vocab` is [`crate::protocol::PreparedData::vocab_size`].
///
/// # Errors
/// The model cannot be found, read or used, or its vocabulary is smaller than the data's; see [`DataError`].
pub fn resolve(settings: &ModelSettings, data_vocab: usize, hub: &Hub) -> Result<ResolvedModel, DataError> {
    let place = locate(settings)?;
    if settings.init == Init::Pretrained && settings.config != Default::default() {
        return Err(DataError::BadSetting {
            setting: "model.config",
            reason: "pretrained weights fix the model's sizes, overrides would not fit them".to_owned(),
            hint: Some("leave model.config out, or write init = \"random\"".to_owned()),
        });
    }
    let mut config = match &place {
        Place::Preset(preset) => preset.config(data_vocab),
        Place::Folder(folder) => model_config::read(&folder.join(CONFIG))?,
        Place::File(file) => model_config::read(&file.with_file_name(CONFIG))?,
        Place::Hub(repository) => model_config::read(&hub.fetch(repository, &hub.list(repository)?, CONFIG)?)?,
    };
    model_config::apply(&mut config, &settings.config)?;
    if config.vocab_size < data_vocab {
        return Err(DataError::VocabularyMismatch { data_vocab, model_vocab: config.vocab_size, model: settings.id.clone() });
    }
    let (weights, fingerprint) = match settings.init {
        Init::Random => (None, None),
        Init::Pretrained => {
            let (weights, files) = find_weights(&place, &settings.id, hub)?;
            (Some(weights), Some(fingerprint(&files)?))
        }
    };
    Ok(ResolvedModel { architecture: Architecture::Gpt2(config), weights, fingerprint })
}

/// The tokenizer that a model comes with.
pub(crate) fn own_tokenizer(settings: &ModelSettings, hub: &Hub) -> Result<PathBuf, DataError> {
    let none = |reason: String| DataError::NotFound {
        what: "tokenizer (data.tokenizer is not set)".to_owned(),
        reason,
        hints: vec!["set data.tokenizer: a hub id, a tokenizer.json, or { train_bpe = 1024 }".to_owned()],
    };
    match locate(settings)? {
        Place::Preset(Preset { hub_id: None, .. }) => Err(none(format!("model {} has none of its own", settings.id))),
        Place::Preset(Preset { hub_id: Some(id), .. }) => tokenizer_on_hub(&Repository::model(id, settings.revision.as_deref()), hub),
        Place::Hub(repository) => tokenizer_on_hub(&repository, hub),
        Place::Folder(folder) => tokenizer_in(&folder).ok_or_else(|| none(format!("model folder {} has no {TOKENIZER}", folder.display()))),
        Place::File(file) => {
            let path = file.with_file_name(TOKENIZER);
            if path.is_file() { Ok(path) } else { Err(none(format!("there is no {} beside the model", path.display()))) }
        }
    }
}

/// The tokenizer that `data.tokenizer` names: a file, a folder, a preset's or a hub id.
pub(crate) fn find_tokenizer(source: &str, revision: Option<&str>, hub: &Hub) -> Result<PathBuf, DataError> {
    let path = Path::new(source);
    if path.is_dir() {
        return tokenizer_in(path).ok_or_else(|| DataError::NotFound {
            what: format!("{TOKENIZER} of {source}"),
            reason: "the folder does not hold one".to_owned(),
            hints: vec![
                "older folders have vocab.json and merges.txt alone: convert them with transformers' AutoTokenizer.save_pretrained".to_owned(),
            ],
        });
    }
    if path.is_file() {
        return Ok(path.to_owned());
    }
    let id = PRESETS.iter().find(|(name, _)| *name == source).and_then(|(_, preset)| preset.hub_id).unwrap_or(source);
    if looks_like_a_path(source) || !is_hub_id(id) {
        return Err(missing("tokenizer", source));
    }
    tokenizer_on_hub(&Repository::model(id, revision), hub)
}

fn tokenizer_in(folder: &Path) -> Option<PathBuf> {
    Some(folder.join(TOKENIZER)).filter(|path| path.is_file())
}

fn tokenizer_on_hub(repository: &Repository, hub: &Hub) -> Result<PathBuf, DataError> {
    let place = hub.place(repository).join(TOKENIZER);
    let fetched = hub.list(repository).and_then(|listing| hub.fetch(repository, &listing, TOKENIZER));
    with_hints(fetched, || {
        vec![
            format!("put its {TOKENIZER} at {}", place.display()),
            "or name a file: --set 'data.tokenizer=\"tokenizer.json\"', or train one: --set 'data.tokenizer={ train_bpe = 1024 }'".to_owned(),
        ]
    })
}

/// Replaces the hints of a missing network.
fn with_hints<T>(result: Result<T, DataError>, new_hints: impl FnOnce() -> Vec<String>) -> Result<T, DataError> {
    result.map_err(|error| match error {
        DataError::NoNetwork { what, reason, .. } => DataError::NoNetwork { what, reason, hints: new_hints() },
        error => error,
    })
}

fn locate(settings: &ModelSettings) -> Result<Place, DataError> {
    let id = settings.id.as_str();
    if let Some((_, preset)) = PRESETS.iter().find(|(name, _)| *name == id) {
        return Ok(Place::Preset(preset.clone()));
    }
    if id.starts_with("llama-") {
        return Err(model_config::llama_refused(id));
    }
    let path = Path::new(id);
    if path.exists() {
        if settings.revision.is_some() {
            return Err(DataError::BadSetting {
                setting: "model.revision",
                reason: format!("{id} is on this disk and has no revisions"),
                hint: None,
            });
        }
        return Ok(if path.is_dir() { Place::Folder(path.to_owned()) } else { Place::File(path.to_owned()) });
    }
    if looks_like_a_path(id) || !is_hub_id(id) {
        return Err(missing("model", id));
    }
    Ok(Place::Hub(Repository::model(id, settings.revision.as_deref())))
}

fn looks_like_a_path(text: &str) -> bool {
    text.starts_with(['/', '.', '~']) || text.ends_with(".json") || text.ends_with(".safetensors") || text.ends_with('/')
}

fn missing(what: &str, source: &str) -> DataError {
    DataError::NotFound {
        what: format!("{what} {source}"),
        reason: "there is no such file or folder".to_owned(),
        hints: vec!["paths are relative to the folder that sweep is started in".to_owned()],
    }
}

/// The weights (a file, or the folder of an index) and all files they consist of, in order.
fn find_weights(place: &Place, id: &str, hub: &Hub) -> Result<(PathBuf, Vec<PathBuf>), DataError> {
    match place {
        Place::File(file) => Ok((file.clone(), vec![file.clone()])),
        Place::Folder(folder) => {
            let single = folder.join(WEIGHTS);
            if single.is_file() {
                return Ok((single.clone(), vec![single]));
            }
            let index = folder.join(WEIGHTS_INDEX);
            if !index.is_file() {
                return Err(no_safetensors(id, &folder.display().to_string()));
            }
            let shards = shards(&index)?.into_iter().map(|shard| folder.join(shard)).collect::<Vec<_>>();
            match shards.iter().find(|shard| !shard.is_file()) {
                Some(shard) => Err(DataError::NotFound {
                    what: format!("weights file {}", shard.display()),
                    reason: format!("{} names it", index.display()),
                    hints: vec!["copy all files of the model into the folder".to_owned()],
                }),
                None => Ok((folder.clone(), shards)),
            }
        }
        Place::Preset(Preset { hub_id: None, .. }) => Err(DataError::BadSetting {
            setting: "model.init",
            reason: format!("{id} was never trained, there are no pretrained weights"),
            hint: Some("write init = \"random\"".to_owned()),
        }),
        Place::Preset(Preset { hub_id: Some(hub_id), .. }) => weights_on_hub(&Repository::model(hub_id, None), hub),
        Place::Hub(repository) => weights_on_hub(repository, hub),
    }
}

fn weights_on_hub(repository: &Repository, hub: &Hub) -> Result<(PathBuf, Vec<PathBuf>), DataError> {
    let place = hub.place(repository);
    let found = (|| {
        let listing = hub.list(repository)?;
        let has = |name: &str| listing.files.iter().any(|file| file == name);
        if !has(WEIGHTS) && has(WEIGHTS_INDEX) {
            let index = hub.fetch(repository, &listing, WEIGHTS_INDEX)?;
            let files = shards(&index)?.iter().map(|shard| hub.fetch(repository, &listing, shard)).collect::<Result<Vec<_>, _>>()?;
            return Ok((index.parent().map(Path::to_owned).unwrap_or_default(), files));
        }
        if !has(WEIGHTS) && listing.unreachable.is_none() {
            return Err(no_safetensors(&repository.id, "the hub"));
        }
        let file = hub.fetch(repository, &listing, WEIGHTS)?;
        Ok((file.clone(), vec![file]))
    })();
    with_hints(found, || {
        vec![
            format!("put its {CONFIG} and {WEIGHTS} into {}", place.display()),
            "or name a folder on disk: --set 'model.id=\"path/to/folder\"', or start from random weights: --set 'model.init=\"random\"'".to_owned(),
        ]
    })
}

fn no_safetensors(id: &str, place: &str) -> DataError {
    DataError::NotFound {
        what: format!("{WEIGHTS} of model {id}"),
        reason: format!("{place} has neither it nor {WEIGHTS_INDEX}"),
        hints: vec!["weights in other formats (pytorch_model.bin) are converted with transformers' save_pretrained".to_owned()],
    }
}

/// File names in a weights index, sorted, each once.
fn shards(index: &Path) -> Result<Vec<String>, DataError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let malformed = |reason: String| DataError::Malformed { path: index.to_owned(), expected: "an index of safetensors files", reason };
    let parsed: Index = serde_json::from_slice(&read_file("the weights index", index)?).map_err(|error| malformed(error.to_string()))?;
    let files: std::collections::BTreeSet<String> = parsed.weight_map.into_values().collect();
    match files.iter().find(|file| file.contains('/') || file.starts_with('.')) {
        Some(file) => Err(malformed(format!("file name \"{file}\" leads out of its folder"))),
        None if files.is_empty() => Err(malformed("it names no files".to_owned())),
        None => Ok(files.into_iter().collect()),
    }
}

/// SHA-256 over the contents of safetensors files, whose headers are checked on the way: a file cut short is found here and not in the child.
fn fingerprint(files: &[PathBuf]) -> Result<String, DataError> {
    let mut all = Sha256::new();
    for path in files {
        let unreadable = |error| DataError::Unreadable { what: "the weights".to_owned(), path: path.clone(), error };
        let malformed = |reason: String| DataError::Malformed { path: path.clone(), expected: "a safetensors file", reason };
        let mut file = File::open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        let mut prefix = [0; 8];
        file.read_exact(&mut prefix).map_err(|_| malformed("it is shorter than a header".to_owned()))?;
        let header_length = u64::from_le_bytes(prefix);
        if header_length > length.saturating_sub(8) {
            return Err(malformed(format!("its header says {header_length} bytes, the file has {length}")));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header).map_err(unreadable)?;
        let end = data_end(&header).map_err(malformed)?;
        if 8 + header_length + end != length {
            return Err(malformed(format!(
                "it should have {} bytes and has {length}: it is damaged or was not copied whole",
                8 + header_length + end
            )));
        }
        let mut hasher = Sha256::new();
        hasher.update(prefix);
        hasher.update(&header);
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer).map_err(unreadable)? {
                0 => break,
                read => hasher.update(&buffer[..read]),
            }
        }
        all.update(hasher.finalize());
    }
    Ok(hexadecimal(&all.finalize()))
}

/// Where the last tensor of a safetensors header ends.
fn data_end(header: &[u8]) -> Result<u64, String> {
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).map_err(|error| error.to_string())?;
    let mut end = 0;
    for (name, tensor) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let tensor_end = tensor.get("data_offsets").and_then(|offsets| offsets.get(1)).and_then(serde_json::Value::as_u64);
        end = end.max(tensor_end.ok_or_else(|| format!("tensor `{name}` has no data_offsets"))?);
    }
    Ok(end)
}

impl Preset {
    fn config(&self, data_vocab: usize) -> Gpt2Config {
        let [n_layer, n_embd, n_head] = self.sizes;
        Gpt2Config { n_layer, n_embd, n_head, vocab_size: self.vocab_size.unwrap_or(data_vocab), ..model_config::GPT2_DEFAULTS }
    }
}
