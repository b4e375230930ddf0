//! `config.json` of a model, as transformers 4 and 5 write it, and the overrides of the sweep file.

use std::path::Path;

use serde::Deserialize;

use super::error::{DataError, read_file};
use crate::protocol::Gpt2Config;
use crate::spec::settings::ModelConfigOverrides;

/// What transformers assumes where a GPT-2 `config.json` is silent; but dropout, which is 0 unless the sweep file says otherwise.
pub(super) const GPT2_DEFAULTS: Gpt2Config = Gpt2Config {
    vocab_size: 50_257,
    n_positions: 1024,
    n_embd: 768,
    n_layer: 12,
    n_head: 12,
    n_inner: None,
    layer_norm_epsilon: 1e-5,
    initializer_range: 0.02,
    dropout: 0.0,
};

/// Keys that decide what GPT-2 computes; the many others are of no consequence here.
#[derive(Deserialize)]
struct Gpt2Json {
    vocab_size: Option<usize>,
    n_positions: Option<usize>,
    n_embd: Option<usize>,
    n_layer: Option<usize>,
    n_head: Option<usize>,
    n_inner: Option<usize>,
    layer_norm_epsilon: Option<f64>,
    initializer_range: Option<f64>,
    activation_function: Option<String>,
    scale_attn_weights: Option<bool>,
    scale_attn_by_inverse_layer_idx: Option<bool>,
    add_cross_attention: Option<bool>,
    tie_word_embeddings: Option<bool>,
}

/// Reads a `config.json` of GPT-2. What the trainer would compute otherwise than the file says is refused by name.
pub(super) fn read(path: &Path) -> Result<Gpt2Config, DataError> {
    parse(&read_file("the model's configuration", path)?, path)
}

fn parse(json: &[u8], path: &Path) -> Result<Gpt2Config, DataError> {
    let malformed = |reason: String| DataError::Malformed { path: path.to_owned(), expected: "a model configuration that can be used", reason };
    let value: serde_json::Value = serde_json::from_slice(json).map_err(|error| malformed(error.to_string()))?;
    match value.get("model_type").and_then(serde_json::Value::as_str) {
        Some("gpt2") => {}
        Some("llama") => return Err(llama_refused(&path.display().to_string())),
        Some(other) => return Err(malformed(format!("model_type \"{other}\" is not one that sweep trains (gpt2)"))),
        None => return Err(malformed("it has no model_type".to_owned())),
    }
    let json: Gpt2Json = serde_json::from_value(value).map_err(|error| malformed(error.to_string()))?;
    let refused = [
        (json.activation_function.as_deref().is_some_and(|name| name != "gelu_new"), "activation_function is not gelu_new"),
        (json.scale_attn_weights == Some(false), "scale_attn_weights is false"),
        (json.scale_attn_by_inverse_layer_idx == Some(true), "scale_attn_by_inverse_layer_idx is true"),
        (json.add_cross_attention == Some(true), "add_cross_attention is true"),
        (json.tie_word_embeddings == Some(false), "tie_word_embeddings is false"),
    ];
    if let Some((_, reason)) = refused.into_iter().find(|(is_refused, _)| *is_refused) {
        return Err(malformed(format!("{reason}, which this trainer cannot do")));
    }
    let defaults = GPT2_DEFAULTS;
    let config = Gpt2Config {
        vocab_size: json.vocab_size.unwrap_or(defaults.vocab_size),
        n_positions: json.n_positions.unwrap_or(defaults.n_positions),
        n_embd: json.n_embd.unwrap_or(defaults.n_embd),
        n_layer: json.n_layer.unwrap_or(defaults.n_layer),
        n_head: json.n_head.unwrap_or(defaults.n_head),
        n_inner: json.n_inner,
        layer_norm_epsilon: json.layer_norm_epsilon.unwrap_or(defaults.layer_norm_epsilon),
        initializer_range: json.initializer_range.unwrap_or(defaults.initializer_range),
        dropout: defaults.dropout,
    };
    check(&config).map_err(malformed)?;
    Ok(config)
}

/// Applies the overrides of the sweep file and checks what comes out.
pub(super) fn apply(config: &mut Gpt2Config, overrides: &ModelConfigOverrides) -> Result<(), DataError> {
    let set = |value: &mut usize, new: Option<usize>| *value = new.unwrap_or(*value);
    set(&mut config.n_layer, overrides.n_layer);
    set(&mut config.n_embd, overrides.n_embd);
    set(&mut config.n_head, overrides.n_head);
    set(&mut config.n_positions, overrides.n_positions);
    set(&mut config.vocab_size, overrides.vocab_size);
    config.dropout = overrides.dropout.unwrap_or(config.dropout);
    check(config).map_err(|reason| DataError::BadSetting { setting: "model.config", reason, hint: None })
}

fn check(config: &Gpt2Config) -> Result<(), String> {
    let Gpt2Config { vocab_size, n_positions, n_embd, n_layer, n_head, dropout, .. } = *config;
    for (name, value) in [("vocab_size", vocab_size), ("n_positions", n_positions), ("n_embd", n_embd), ("n_layer", n_layer), ("n_head", n_head)] {
        if value == 0 {
            return Err(format!("{name} is 0"));
        }
    }
    if n_embd % n_head != 0 {
        return Err(format!("n_embd = {n_embd} does not divide into n_head = {n_head} heads"));
    }
    if !(0.0..1.0).contains(&dropout) {
        return Err(format!("dropout = {dropout} is not a probability below 1"));
    }
    Ok(())
}

/// Llama belongs to another piece of work.
pub(super) fn llama_refused(what: &str) -> DataError {
    DataError::BadSetting {
        setting: "model.id",
        reason: format!("{what} is a Llama model, and training Llama is not built yet"),
        hint: Some("use a GPT-2 model: gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-tiny".to_owned()),
    }
}
