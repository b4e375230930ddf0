//! Canonical form and ids. An id hashes what decides a measurement and nothing else: the same on every machine, whatever the order of keys or axes.

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::settings::Settings;
use crate::protocol::{PreparedData, ResolvedModel};
use crate::trial::{ConfigurationId, Purpose, TrialId};

/// Hashes that stand for a model's and a data set's contents in place of their names and paths. `None`: not at hand yet, the id is provisional.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContentHashes {
    /// Of the architecture and the weights.
    pub model: Option<String>,
    /// Of the tokens, the tokenizer and the packing.
    pub data: Option<String>,
}

impl ContentHashes {
    /// The hashes of a model and data that are at hand.
    pub fn of(model: &ResolvedModel, data: &PreparedData) -> Self {
        let architecture = serde_json::to_value(&model.architecture).unwrap_or(Value::Null);
        let contents = json!({"architecture": architecture, "weights": model.fingerprint});
        Self { model: Some(hash(&contents)), data: Some(data.fingerprint.clone()) }
    }

    /// Whether the ids made with them may change once model and data are at hand.
    pub fn provisional(&self) -> bool {
        self.model.is_none() || self.data.is_none()
    }
}

/// What a trial is, apart from its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrialKey {
    /// Tokens per sequence.
    pub block_size: usize,
    /// What it is for.
    pub purpose: Purpose,
    /// Applied optimiser steps of a probe; `None` for training.
    pub probe_steps: Option<u64>,
    /// Which repeat, from 0.
    pub repeat: u32,
}

/// Identifies a configuration by its effective settings.
pub fn configuration_id(effective: &Settings, contents: &ContentHashes) -> ConfigurationId {
    ConfigurationId(short(&hash(&canonical(effective, contents))))
}

/// Identifies a trial of a configuration.
pub fn trial_id(effective: &Settings, contents: &ContentHashes, trial: TrialKey) -> TrialId {
    let trial = json!({
        "configuration": canonical(effective, contents),
        "block_size": trial.block_size,
        "purpose": trial.purpose,
        "probe_steps": trial.probe_steps,
        "repeat": trial.repeat,
    });
    TrialId(short(&hash(&trial)))
}

/// The settings as canonical JSON: names and paths of model and data replaced by their hashes where those are at hand.
fn canonical(effective: &Settings, contents: &ContentHashes) -> Value {
    let mut settings = serde_json::to_value(effective).unwrap_or(Value::Null);
    if let (Some(hash), Some(model)) = (&contents.model, settings.get_mut("model").and_then(Value::as_object_mut)) {
        // The architecture, and with it the configuration's overrides, is part of the hash.
        for name in ["id", "revision", "config"] {
            model.remove(name);
        }
        model.insert("contents".to_owned(), json!(hash));
    }
    if let (Some(hash), Some(data)) = (&contents.data, settings.get_mut("data").and_then(Value::as_object_mut)) {
        for name in ["dataset", "tokenizer"] {
            data.remove(name);
        }
        data.insert("contents".to_owned(), json!(hash));
    }
    settings
}

/// SHA-256 of canonical JSON, hexadecimal.
fn hash(value: &Value) -> String {
    let mut text = String::new();
    write_sorted(value, &mut text);
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Ids are 16 hexadecimal digits: short enough for a folder name, long enough for any number of trials.
fn short(hash: &str) -> String {
    hash.chars().take(16).collect()
}

/// JSON without blanks, keys in byte order, missing values left out, so that a key added later changes no id while it is unused.
fn write_sorted(value: &Value, text: &mut String) {
    match value {
        Value::Object(map) => write_object(map, text),
        Value::Array(values) => {
            text.push('[');
            for (index, value) in values.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write_sorted(value, text);
            }
            text.push(']');
        }
        other => text.push_str(&other.to_string()),
    }
}

fn write_object(map: &Map<String, Value>, text: &mut String) {
    let mut entries: Vec<_> = map.iter().filter(|(_, value)| !value.is_null()).collect();
    entries.sort_by_key(|(name, _)| *name);
    text.push('{');
    for (index, (name, value)) in entries.into_iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        text.push_str(&Value::String(name.clone()).to_string());
        text.push(':');
        write_sorted(value, text);
    }
    text.push('}');
}
