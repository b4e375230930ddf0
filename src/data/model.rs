//! Finds models: presets, folders and files on disk, repositories on the hub. Their sizes, their weights, their tokenizer.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::error::{DataError, read_file};
use super::hub::{Hub, Repository, is_hub_id};
use super::model_config;
use super::token_file::hexadecimal;
use crate::protocol::ResolvedModel;
use crate::spec::presets::{self, Preset};
use crate::spec::settings::{Init, ModelSettings};

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const WEIGHTS: &str = "model.safetensors";
const WEIGHTS_INDEX: &str = "model.safetensors.index.json";

/// Where a model is.
#[derive(Clone, Debug, PartialEq)]
enum Place {
    Preset(&'static Preset),
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
    let mut architecture = match &place {
        // A preset's sizes are known without asking anyone, so that `init = "random"` needs no network.
        Place::Preset(preset) => preset.architecture(data_vocab),
        Place::Folder(folder) => model_config::read(&folder.join(CONFIG))?,
        Place::File(file) => model_config::read(&file.with_file_name(CONFIG))?,
        Place::Hub(repository) => {
            let fetched = hub.list(repository).and_then(|listing| hub.fetch(repository, &listing, CONFIG));
            model_config::read(&with_hints(fetched, || model_hints(repository, hub))?)?
        }
    };
    model_config::apply(&mut architecture, &settings.config)?;
    if architecture.vocab_size() < data_vocab {
        return Err(DataError::VocabularyMismatch { data_vocab, model_vocab: architecture.vocab_size(), model: settings.id.clone() });
    }
    let (weights, fingerprint) = match settings.init {
        Init::Random => (None, None),
        Init::Pretrained => {
            let (weights, files) = find_weights(&place, settings, hub)?;
            (Some(weights), Some(fingerprint(&files)?))
        }
    };
    Ok(ResolvedModel { architecture, weights, fingerprint })
}

/// The tokenizer that a model comes with.
pub(crate) fn own_tokenizer(settings: &ModelSettings, hub: &Hub) -> Result<PathBuf, DataError> {
    let none = |reason: String| DataError::NotFound {
        what: "tokenizer (data.tokenizer is not set)".to_owned(),
        reason,
        hints: vec!["set data.tokenizer: a hub id, a tokenizer.json, or { train_bpe = 1024 }".to_owned()],
    };
    match locate(settings)? {
        Place::Preset(Preset { hub: None, .. }) => Err(none(format!("model {} has none of its own", settings.id))),
        Place::Preset(Preset { hub: Some(id), .. }) => tokenizer_on_hub(&Repository::model(id, settings.revision.as_deref()), hub),
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
    let id = presets::preset(source).and_then(|preset| preset.hub).unwrap_or(source);
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
    if let Some(preset) = presets::preset(id) {
        return Ok(Place::Preset(preset));
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
fn find_weights(place: &Place, settings: &ModelSettings, hub: &Hub) -> Result<(PathBuf, Vec<PathBuf>), DataError> {
    match place {
        Place::File(file) => Ok((file.clone(), vec![file.clone()])),
        Place::Folder(folder) => {
            let single = folder.join(WEIGHTS);
            if single.is_file() {
                return Ok((single.clone(), vec![single]));
            }
            let index = folder.join(WEIGHTS_INDEX);
            if !index.is_file() {
                return Err(no_safetensors(&settings.id, &folder.display().to_string()));
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
        Place::Preset(Preset { hub: None, .. }) => Err(DataError::BadSetting {
            setting: "model.init",
            reason: format!("{} was never trained, there are no pretrained weights", settings.id),
            hint: Some("write init = \"random\"".to_owned()),
        }),
        Place::Preset(Preset { hub: Some(hub_id), .. }) => weights_on_hub(&Repository::model(hub_id, settings.revision.as_deref()), hub),
        Place::Hub(repository) => weights_on_hub(repository, hub),
    }
}

fn weights_on_hub(repository: &Repository, hub: &Hub) -> Result<(PathBuf, Vec<PathBuf>), DataError> {
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
    with_hints(found, || model_hints(repository, hub))
}

fn model_hints(repository: &Repository, hub: &Hub) -> Vec<String> {
    vec![
        format!("put its {CONFIG} and {WEIGHTS} into {}", hub.place(repository).display()),
        "or name a folder on disk: --set 'model.id=\"path/to/folder\"', or a preset with random weights: --set 'model.init=\"random\"'".to_owned(),
    ]
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

#[cfg(test)]
mod tests {
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::protocol::{Activation, Architecture, Gpt2Config, LlamaConfig, RopeScaling};
    use crate::spec::settings::{AttnImplementation, ModelConfigOverrides};

    fn settings(id: &str, init: Init) -> ModelSettings {
        ModelSettings {
            id: id.to_owned(),
            init,
            revision: None,
            trainable: None,
            attn_implementation: AttnImplementation::Auto,
            config: ModelConfigOverrides::default(),
        }
    }

    fn no_hub() -> Hub {
        Hub::new("/nowhere/hf", "http://127.0.0.1:1", None, true)
    }

    fn gpt2(resolved: ResolvedModel) -> Gpt2Config {
        let Architecture::Gpt2(config) = resolved.architecture else { panic!("{resolved:?}") };
        config
    }

    fn llama(resolved: ResolvedModel) -> LlamaConfig {
        let Architecture::Llama(config) = resolved.architecture else { panic!("{resolved:?}") };
        config
    }

    fn weights(path: &Path, value: u8) {
        let data = [value; 16];
        let view = TensorView::new(Dtype::F32, vec![2, 2], &data).unwrap();
        std::fs::write(path, safetensors::serialize([("wte.weight", view)], None).unwrap()).unwrap();
    }

    const V5: &str = r#"{"model_type": "gpt2", "dtype": "float32", "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 128, "vocab_size": 1024,
        "n_inner": null, "layer_norm_epsilon": 1e-05, "resid_pdrop": 0.1, "activation_function": "gelu_new", "tie_word_embeddings": true}"#;

    /// Parameter counts are those of transformers (`param_counts` of published models): the sizes are right.
    #[test]
    fn presets_have_the_published_sizes() {
        let count = |id: &str, vocab: usize| {
            let Gpt2Config { vocab_size, n_positions, n_embd, n_layer, .. } = gpt2(resolve(&settings(id, Init::Random), vocab, &no_hub()).unwrap());
            vocab_size * n_embd + n_positions * n_embd + n_layer * (12 * n_embd * n_embd + 13 * n_embd) + 2 * n_embd
        };
        assert_eq!(count("gpt2", 1024), 124_439_808);
        assert_eq!(count("gpt2-medium", 1024), 354_823_168);
        assert_eq!(count("gpt2-large", 1024), 774_030_080);
        assert_eq!(count("gpt2-xl", 1024), 1_557_611_200);
        assert_eq!(gpt2(resolve(&settings("gpt2-tiny", Init::Random), 777, &no_hub()).unwrap()).vocab_size, 777);
    }

    #[test]
    fn overrides_belong_to_random_weights() {
        let mut model = settings("gpt2-tiny", Init::Random);
        model.config = ModelConfigOverrides {
            n_layer: Some(2),
            n_embd: Some(64),
            n_head: Some(2),
            vocab_size: Some(2000),
            dropout: Some(0.1),
            ..Default::default()
        };
        let config = gpt2(resolve(&model, 1024, &no_hub()).unwrap());
        assert_eq!(
            (config.n_layer, config.n_embd, config.n_head, config.n_positions, config.vocab_size, config.dropout),
            (2, 64, 2, 1024, 2000, 0.1)
        );
        model.config.n_head = Some(5);
        assert_eq!(resolve(&model, 1024, &no_hub()).unwrap_err().to_string(), "model.config: n_embd = 64 does not divide into n_head = 5 heads");
        model.config = ModelConfigOverrides { vocab_size: Some(1000), ..Default::default() };
        assert_eq!(
            resolve(&model, 1024, &no_hub()).unwrap_err().to_string(),
            "the data has token ids up to 1023, but model gpt2-tiny has a vocabulary of 1000"
        );
        model.init = Init::Pretrained;
        let error = resolve(&model, 1024, &no_hub()).unwrap_err();
        assert_eq!(error.to_string(), "model.config: pretrained weights fix the model's sizes, overrides would not fit them");
        let error = resolve(&settings("gpt2-tiny", Init::Pretrained), 1024, &no_hub()).unwrap_err();
        assert_eq!(error.to_string(), "model.init: gpt2-tiny was never trained, there are no pretrained weights");
    }

    #[test]
    fn folders_and_files_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let id = folder.path().display().to_string();
        std::fs::write(path("config.json"), V5).unwrap();
        let error = resolve(&settings(&id, Init::Pretrained), 1024, &no_hub()).unwrap_err().to_string();
        assert_eq!(error, format!("model.safetensors of model {id} is not there: {id} has neither it nor model.safetensors.index.json"));
        weights(&path("model.safetensors"), 1);
        let single = resolve(&settings(&id, Init::Pretrained), 1024, &no_hub()).unwrap();
        assert_eq!(single.weights, Some(path("model.safetensors")));
        let config = gpt2(single.clone());
        assert_eq!((config.n_embd, config.n_inner, config.dropout), (64, None, 0.0));
        let file = path("model.safetensors").display().to_string();
        assert_eq!(resolve(&settings(&file, Init::Pretrained), 1024, &no_hub()).unwrap(), single);
        weights(&path("model.safetensors"), 2);
        assert_ne!(resolve(&settings(&id, Init::Pretrained), 1024, &no_hub()).unwrap().fingerprint, single.fingerprint);
        // With random weights they are not even looked at.
        let random = resolve(&settings(&id, Init::Random), 1024, &no_hub()).unwrap();
        assert_eq!((random.weights, random.fingerprint), (None, None));
    }

    #[test]
    fn shards_are_all_needed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let id = folder.path().display().to_string();
        std::fs::write(path("config.json"), V5).unwrap();
        std::fs::write(path("model.safetensors.index.json"), r#"{"weight_map": {"b": "b.safetensors", "a": "a.safetensors", "c": "b.safetensors"}}"#)
            .unwrap();
        weights(&path("a.safetensors"), 1);
        let error = resolve(&settings(&id, Init::Pretrained), 1024, &no_hub()).unwrap_err().to_string();
        assert_eq!(error, format!("weights file {id}/b.safetensors is not there: {id}/model.safetensors.index.json names it"));
        weights(&path("b.safetensors"), 2);
        let resolved = resolve(&settings(&id, Init::Pretrained), 1024, &no_hub()).unwrap();
        assert_eq!(resolved.weights.as_deref(), Some(folder.path()));
        let good = std::fs::read(path("b.safetensors")).unwrap();
        std::fs::write(path("b.safetensors"), &good[..good.len() - 1]).unwrap();
        let error = resolve(&settings(&id, Init::Pretrained), 1024, &no_hub()).unwrap_err().to_string();
        assert!(error.contains("b.safetensors is not a safetensors file: it should have") && error.contains("not copied whole"), "{error}");
        std::fs::write(path("b.safetensors"), b"hello").unwrap();
        assert!(resolve(&settings(&id, Init::Pretrained), 1024, &no_hub()).unwrap_err().to_string().ends_with("it is shorter than a header"));
        std::fs::write(path("model.safetensors.index.json"), r#"{"weight_map": {"b": "../b.safetensors"}}"#).unwrap();
        assert!(resolve(&settings(&id, Init::Pretrained), 1024, &no_hub()).unwrap_err().to_string().contains("leads out of its folder"));
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_name() {
        let message = |id: &str| resolve(&settings(id, Init::Pretrained), 1024, &no_hub()).unwrap_err().to_string();
        assert_eq!(message("./models/mine"), "model ./models/mine is not there: there is no such file or folder");
        assert_eq!(message("distilgpt2"), "model distilgpt2 is not in the cache and cannot be fetched: HF_HUB_OFFLINE is set");
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config.json");
        let id = folder.path().display().to_string();
        for (from, to, expected) in [
            ("gpt2", "opt", "model_type \"opt\" is not one that sweep trains (gpt2, llama)"),
            (
                "gelu_new",
                "mish",
                "activation_function is \"mish\" rather than gelu_new, gelu, quick_gelu, silu, relu or tanh, which this trainer cannot do",
            ),
            (
                "\"n_inner\": null",
                "\"scale_attn_by_inverse_layer_idx\": true",
                "scale_attn_by_inverse_layer_idx is true, which this trainer cannot do",
            ),
            ("\"n_inner\": null", "\"add_cross_attention\": true", "add_cross_attention is true"),
            ("\"n_inner\": null", "\"scale_attn_weights\": false", "scale_attn_weights is false"),
            ("\"n_head\": 2", "\"n_head\": 3", "n_embd = 64 does not divide into n_head = 3 heads"),
            ("\"n_layer\": 2", "\"n_layer\": \"2\"", "invalid type: string"),
            ("{", "", "is not a model configuration that can be used"),
        ] {
            std::fs::write(&config, V5.replacen(from, to, 1)).unwrap();
            assert!(message(&id).contains(expected), "{} / {expected}", message(&id));
        }
    }

    const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-05, "hidden_act": "silu", "vocab_size": 1024, "pad_token_id": null,
        "attention_dropout": 0.1, MORE}"#;

    fn llama_of(more: &str) -> Result<LlamaConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), LLAMA.replace("MORE", more)).unwrap();
        let id = folder.path().display().to_string();
        resolve(&settings(&id, Init::Random), 1024, &no_hub()).map(llama).map_err(|error| error.to_string())
    }

    /// The same model as transformers 4 and transformers 5 write it, with and without scaled frequencies.
    #[test]
    fn llama_configurations_of_both_generations_are_read() {
        let plain = LlamaConfig {
            vocab_size: 1024,
            max_position_embeddings: 128,
            hidden_size: 64,
            intermediate_size: 172,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            rms_norm_eps: 1e-5,
            ..LlamaConfig::DEFAULT
        };
        let linear = LlamaConfig { rope_theta: 5000.0, rope_scaling: RopeScaling::Linear { factor: 2.0 }, ..plain.clone() };
        let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 64 };
        let llama3 = LlamaConfig { rope_scaling: scaling, ..plain.clone() };
        let table = [
            (r#""rope_theta": 10000.0, "rope_scaling": null, "torch_dtype": "float32""#, plain.clone()),
            (r#""head_dim": 16, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "dtype": "float32""#, plain.clone()),
            (r#""rope_theta": 5000, "rope_scaling": {"type": "linear", "factor": 2.0}"#, linear.clone()),
            (r#""rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2}"#, linear),
            (
                r#""rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}"#,
                llama3,
            ),
            (r#""head_dim": null, "num_key_value_heads": null"#, LlamaConfig { num_key_value_heads: 4, ..plain.clone() }),
            (
                r#""head_dim": 24, "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true, "pad_token_id": 3, "hidden_act": "gelu""#,
                LlamaConfig {
                    head_dim: 24,
                    attention_bias: true,
                    mlp_bias: true,
                    tie_word_embeddings: true,
                    pad_token_id: Some(3),
                    hidden_act: Activation::Gelu,
                    ..plain
                },
            ),
        ];
        for (more, want) in table {
            assert_eq!(llama_of(more), Ok(want), "{more}");
        }
    }

    #[test]
    fn llama_configurations_that_cannot_be_computed_are_refused_by_name() {
        for (more, expected) in [
            (r#""rope_scaling": {"rope_type": "yarn", "factor": 2.0}"#, "rope_type is \"yarn\" rather than default, linear or llama3"),
            (r#""rope_parameters": {"rope_type": "dynamic", "factor": 2.0}"#, "rope_type is \"dynamic\""),
            (r#""rope_parameters": {"rope_type": "linear"}"#, "rope_type \"linear\" comes without its factor"),
            (r#""rope_parameters": {"rope_type": "linear", "factor": -1.0}"#, "factor = -1 of the rotary embedding is not above 0"),
            (r#""rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}"#, "partial_rotary_factor is 0.5"),
            (r#""head_dim": 15"#, "head_dim = 15 is odd"),
            (r#""pad_token_id": 2000"#, "pad_token_id = 2000 is not in the vocabulary of 1024"),
        ] {
            let error = llama_of(more).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn overrides_of_a_llama_are_its_own_keys() {
        let mut model = settings("llama-tiny", Init::Random);
        let config = |model: &ModelSettings| resolve(model, 777, &no_hub()).map(llama);
        let tiny = config(&model).unwrap();
        assert_eq!((tiny.vocab_size, tiny.hidden_size, tiny.head_dim, tiny.num_key_value_heads), (777, 128, 32, 2));
        model.config = ModelConfigOverrides { hidden_size: Some(96), num_attention_heads: Some(6), dropout: Some(0.1), ..Default::default() };
        let changed = config(&model).unwrap();
        assert_eq!((changed.head_dim, changed.num_key_value_heads, changed.attention_dropout), (16, 2, 0.1));
        model.config.head_dim = Some(20);
        assert_eq!(config(&model).unwrap().head_dim, 20);
        model.config.num_key_value_heads = Some(4);
        let message = |model: &ModelSettings| config(model).unwrap_err().to_string();
        assert_eq!(message(&model), "model.config: num_attention_heads = 6 does not divide into num_key_value_heads = 4 groups");
        model.config = ModelConfigOverrides { n_layer: Some(2), ..Default::default() };
        assert_eq!(message(&model), "model.config: n_layer is a key of GPT-2, the model is a Llama: say num_hidden_layers");
        let mut model = settings("gpt2-tiny", Init::Random);
        model.config = ModelConfigOverrides { rope_theta: Some(1e6), ..Default::default() };
        let error = resolve(&model, 777, &no_hub()).unwrap_err().to_string();
        assert_eq!(error, "model.config: rope_theta is a key of Llama, the model is a GPT-2");
    }

    #[test]
    fn tokenizers_are_found_where_models_and_settings_say() {
        let folder = tempfile::tempdir().unwrap();
        let id = folder.path().display().to_string();
        let own = |id: &str| own_tokenizer(&settings(id, Init::Random), &no_hub());
        assert_eq!(
            own("gpt2-tiny").unwrap_err().to_string(),
            "tokenizer (data.tokenizer is not set) is not there: model gpt2-tiny has none of its own"
        );
        assert_eq!(
            own(&id).unwrap_err().to_string(),
            format!("tokenizer (data.tokenizer is not set) is not there: model folder {id} has no tokenizer.json")
        );
        let error = own("gpt2").unwrap_err();
        assert_eq!(error.to_string(), "model openai-community/gpt2 is not in the cache and cannot be fetched: HF_HUB_OFFLINE is set");
        assert_eq!(error.hints()[0], "put its tokenizer.json at /nowhere/hf/hub/models--openai-community--gpt2/snapshots/main/tokenizer.json");
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, "{}").unwrap();
        assert_eq!(own(&id).unwrap(), path);
        assert_eq!(find_tokenizer(&id, None, &no_hub()).unwrap(), path);
        assert_eq!(find_tokenizer(&path.display().to_string(), None, &no_hub()).unwrap(), path);
        let error = find_tokenizer("no/tokenizer.json", None, &no_hub()).unwrap_err();
        assert_eq!(error.to_string(), "tokenizer no/tokenizer.json is not there: there is no such file or folder");
    }
}
