//! `config.json` of a model, as transformers 4 and 5 write it, and the overrides of the sweep file.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::error::{DataError, read_file};
use crate::protocol::{Activation, Architecture, Gpt2Config, LlamaConfig, RopeScaling};
use crate::spec::settings::ModelConfigOverrides;

/// Keys that decide what GPT-2 computes; the many others are of no consequence here.
#[derive(Deserialize)]
struct Gpt2Json {
    vocab_size: Option<usize>,
    n_positions: Option<usize>,
    n_embd: Option<usize>,
    n_layer: Option<usize>,
    n_head: Option<usize>,
    n_inner: Option<usize>,
    activation_function: Option<String>,
    layer_norm_epsilon: Option<f64>,
    initializer_range: Option<f64>,
    scale_attn_weights: Option<bool>,
    scale_attn_by_inverse_layer_idx: Option<bool>,
    add_cross_attention: Option<bool>,
    tie_word_embeddings: Option<bool>,
}

/// The same of Llama.
#[derive(Deserialize)]
struct LlamaJson {
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    rms_norm_eps: Option<f64>,
    initializer_range: Option<f64>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    pad_token_id: Option<i64>,
    partial_rotary_factor: Option<f64>,
    /// transformers 4: base and scaling apart.
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeJson>,
    /// transformers 5: together.
    rope_parameters: Option<RopeJson>,
}

/// `rope_scaling` and `rope_parameters`.
#[derive(Deserialize)]
struct RopeJson {
    /// `type` in the oldest files.
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    partial_rotary_factor: Option<f64>,
}

/// Reads a `config.json`. What the trainer would compute otherwise than the file says is refused by name.
pub(super) fn read(path: &Path) -> Result<Architecture, DataError> {
    parse(&read_file("the model's configuration", path)?, path)
}

fn parse(json: &[u8], path: &Path) -> Result<Architecture, DataError> {
    let malformed = |reason: String| DataError::Malformed { path: path.to_owned(), expected: "a model configuration that can be used", reason };
    let value: Value = serde_json::from_slice(json).map_err(|error| malformed(error.to_string()))?;
    let family = value.get("model_type").and_then(Value::as_str).ok_or_else(|| malformed("it has no model_type".to_owned()))?;
    let architecture = match family {
        "gpt2" => gpt2(value),
        "llama" => llama(value),
        other => Err(format!("model_type \"{other}\" is not one that sweep trains (gpt2, llama)")),
    };
    let architecture = architecture.map_err(malformed)?;
    architecture.check().map_err(malformed)?;
    Ok(architecture)
}

fn cannot(reason: &str) -> String {
    format!("{reason}, which this trainer cannot do")
}

fn gpt2(value: Value) -> Result<Architecture, String> {
    let json: Gpt2Json = serde_json::from_value(value).map_err(|error| error.to_string())?;
    let refused = [
        (json.scale_attn_weights == Some(false), "scale_attn_weights is false"),
        (json.scale_attn_by_inverse_layer_idx == Some(true), "scale_attn_by_inverse_layer_idx is true"),
        (json.add_cross_attention == Some(true), "add_cross_attention is true"),
    ];
    if let Some((_, reason)) = refused.into_iter().find(|(is_refused, _)| *is_refused) {
        return Err(cannot(reason));
    }
    let defaults = Gpt2Config::DEFAULT;
    Ok(Architecture::Gpt2(Gpt2Config {
        vocab_size: json.vocab_size.unwrap_or(defaults.vocab_size),
        n_positions: json.n_positions.unwrap_or(defaults.n_positions),
        n_embd: json.n_embd.unwrap_or(defaults.n_embd),
        n_layer: json.n_layer.unwrap_or(defaults.n_layer),
        n_head: json.n_head.unwrap_or(defaults.n_head),
        n_inner: json.n_inner,
        activation_function: activation("activation_function", json.activation_function, defaults.activation_function)?,
        layer_norm_epsilon: json.layer_norm_epsilon.unwrap_or(defaults.layer_norm_epsilon),
        initializer_range: json.initializer_range.unwrap_or(defaults.initializer_range),
        tie_word_embeddings: json.tie_word_embeddings.unwrap_or(defaults.tie_word_embeddings),
        dropout: defaults.dropout,
    }))
}

fn llama(value: Value) -> Result<Architecture, String> {
    let json: LlamaJson = serde_json::from_value(value).map_err(|error| error.to_string())?;
    let defaults = LlamaConfig::DEFAULT;
    let hidden_size = json.hidden_size.unwrap_or(defaults.hidden_size);
    let num_attention_heads = json.num_attention_heads.unwrap_or(defaults.num_attention_heads);
    let max_position_embeddings = json.max_position_embeddings.unwrap_or(defaults.max_position_embeddings);
    // A file of transformers 5 that was made from one of transformers 4 may have both.
    let rope = json.rope_parameters.or(json.rope_scaling);
    let partial = rope.as_ref().and_then(|rope| rope.partial_rotary_factor).or(json.partial_rotary_factor);
    if let Some(part) = partial.filter(|part| *part != 1.0) {
        return Err(cannot(&format!("partial_rotary_factor is {part}")));
    }
    let pad_token_id = match json.pad_token_id {
        None => None,
        // Old files say -1 for none.
        Some(token) if token < 0 => None,
        Some(token) => Some(u32::try_from(token).map_err(|_| format!("pad_token_id = {token} is not a token"))?),
    };
    Ok(Architecture::Llama(LlamaConfig {
        vocab_size: json.vocab_size.unwrap_or(defaults.vocab_size),
        max_position_embeddings,
        hidden_size,
        intermediate_size: json.intermediate_size.unwrap_or(defaults.intermediate_size),
        num_hidden_layers: json.num_hidden_layers.unwrap_or(defaults.num_hidden_layers),
        num_attention_heads,
        num_key_value_heads: json.num_key_value_heads.unwrap_or(num_attention_heads),
        head_dim: json.head_dim.unwrap_or(hidden_size / num_attention_heads.max(1)),
        hidden_act: activation("hidden_act", json.hidden_act, defaults.hidden_act)?,
        rms_norm_eps: json.rms_norm_eps.unwrap_or(defaults.rms_norm_eps),
        initializer_range: json.initializer_range.unwrap_or(defaults.initializer_range),
        rope_theta: rope.as_ref().and_then(|rope| rope.rope_theta).or(json.rope_theta).unwrap_or(defaults.rope_theta),
        rope_scaling: rope.map_or(Ok(RopeScaling::Default), |rope| rope_scaling(&rope, max_position_embeddings))?,
        attention_bias: json.attention_bias.unwrap_or(defaults.attention_bias),
        mlp_bias: json.mlp_bias.unwrap_or(defaults.mlp_bias),
        tie_word_embeddings: json.tie_word_embeddings.unwrap_or(defaults.tie_word_embeddings),
        pad_token_id,
        attention_dropout: defaults.attention_dropout,
    }))
}

fn rope_scaling(rope: &RopeJson, positions: usize) -> Result<RopeScaling, String> {
    let kind = rope.rope_type.as_deref().unwrap_or("default");
    let needed = |name: &str, value: Option<f64>| value.ok_or_else(|| format!("rope_type \"{kind}\" comes without its {name}"));
    match kind {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: needed("factor", rope.factor)? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: needed("factor", rope.factor)?,
            low_freq_factor: needed("low_freq_factor", rope.low_freq_factor)?,
            high_freq_factor: needed("high_freq_factor", rope.high_freq_factor)?,
            original_max_position_embeddings: rope.original_max_position_embeddings.unwrap_or(positions),
        }),
        other => Err(cannot(&format!("rope_type is \"{other}\" rather than default, linear or llama3"))),
    }
}

fn activation(key: &str, name: Option<String>, default: Activation) -> Result<Activation, String> {
    let Some(name) = name else { return Ok(default) };
    match name.as_str() {
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_python_tanh" | "gelu_fast" | "gelu_accurate" => Ok(Activation::GeluNew),
        "gelu" | "gelu_python" => Ok(Activation::Gelu),
        "quick_gelu" => Ok(Activation::QuickGelu),
        "silu" | "swish" => Ok(Activation::Silu),
        "relu" => Ok(Activation::Relu),
        "tanh" => Ok(Activation::Tanh),
        _ => Err(cannot(&format!("{key} is \"{name}\" rather than gelu_new, gelu, quick_gelu, silu, relu or tanh"))),
    }
}

/// Applies the overrides of the sweep file and checks what comes out.
pub(super) fn apply(architecture: &mut Architecture, overrides: &ModelConfigOverrides) -> Result<(), DataError> {
    let bad = |reason: String| DataError::BadSetting { setting: "model.config", reason, hint: None };
    if let Some(reason) = overrides.foreign_to(architecture) {
        return Err(bad(reason));
    }
    fn set<T>(value: &mut T, new: Option<T>) {
        if let Some(new) = new {
            *value = new;
        }
    }
    match architecture {
        Architecture::Gpt2(config) => {
            set(&mut config.n_layer, overrides.n_layer);
            set(&mut config.n_embd, overrides.n_embd);
            set(&mut config.n_head, overrides.n_head);
            set(&mut config.n_positions, overrides.n_positions);
            set(&mut config.vocab_size, overrides.vocab_size);
            set(&mut config.dropout, overrides.dropout);
        }
        Architecture::Llama(config) => {
            // What followed from other keys follows them still.
            let all_heads_alone = config.num_key_value_heads == config.num_attention_heads;
            let heads_fill_width = config.head_dim * config.num_attention_heads == config.hidden_size;
            set(&mut config.num_hidden_layers, overrides.num_hidden_layers);
            set(&mut config.hidden_size, overrides.hidden_size);
            set(&mut config.intermediate_size, overrides.intermediate_size);
            set(&mut config.num_attention_heads, overrides.num_attention_heads);
            set(&mut config.num_key_value_heads, overrides.num_key_value_heads.or(all_heads_alone.then_some(config.num_attention_heads)));
            let follows = heads_fill_width.then(|| config.hidden_size / config.num_attention_heads.max(1));
            set(&mut config.head_dim, overrides.head_dim.or(follows));
            set(&mut config.max_position_embeddings, overrides.max_position_embeddings);
            set(&mut config.rope_theta, overrides.rope_theta);
            set(&mut config.vocab_size, overrides.vocab_size);
            set(&mut config.attention_dropout, overrides.dropout);
        }
    }
    architecture.check().map_err(bad)
}
