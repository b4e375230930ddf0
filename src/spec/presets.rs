//! Model names that stand for a hub id or for sizes of our own.

use crate::protocol::{Architecture, Gpt2Config, LlamaConfig};

/// A short name for a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Preset {
    /// What `model.id` says.
    pub id: &'static str,
    /// Where its configuration and weights are; `None` where it exists with random weights only.
    pub hub: Option<&'static str>,
    /// Sizes, as published.
    architecture: Architecture,
}

impl Preset {
    /// Its sizes; the vocabulary is the data's where it has no hub id.
    pub fn architecture(&self, data_vocab: usize) -> Architecture {
        let mut architecture = self.architecture.clone();
        if self.hub.is_none() {
            match &mut architecture {
                Architecture::Gpt2(config) => config.vocab_size = data_vocab,
                Architecture::Llama(config) => config.vocab_size = data_vocab,
            }
        }
        architecture
    }
}

const fn gpt2(id: &'static str, hub: Option<&'static str>, n_layer: usize, n_embd: usize, n_head: usize) -> Preset {
    Preset { id, hub, architecture: Architecture::Gpt2(Gpt2Config { n_layer, n_embd, n_head, ..Gpt2Config::DEFAULT }) }
}

/// `sizes` are width, width of the MLP, blocks, heads of queries, heads of keys and values.
const fn llama(id: &'static str, hub: Option<&'static str>, max_position_embeddings: usize, sizes: [usize; 5]) -> Preset {
    let [hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads] = sizes;
    let config = LlamaConfig {
        max_position_embeddings,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim: hidden_size / num_attention_heads,
        rms_norm_eps: 1e-5,
        ..LlamaConfig::DEFAULT
    };
    Preset { id, hub, architecture: Architecture::Llama(config) }
}

/// All presets.
pub static PRESETS: [Preset; 9] = [
    gpt2("gpt2-tiny", None, 4, 128, 4),
    gpt2("gpt2", Some("openai-community/gpt2"), 12, 768, 12),
    gpt2("gpt2-medium", Some("openai-community/gpt2-medium"), 24, 1024, 16),
    gpt2("gpt2-large", Some("openai-community/gpt2-large"), 36, 1280, 20),
    gpt2("gpt2-xl", Some("openai-community/gpt2-xl"), 48, 1600, 25),
    llama("llama-tiny", None, 1024, [128, 344, 4, 4, 2]),
    llama("llama-2-7b", Some("meta-llama/Llama-2-7b-hf"), 4096, [4096, 11_008, 32, 32, 32]),
    llama("llama-2-13b", Some("meta-llama/Llama-2-13b-hf"), 4096, [5120, 13_824, 40, 40, 40]),
    llama("llama-2-70b", Some("meta-llama/Llama-2-70b-hf"), 4096, [8192, 28_672, 80, 64, 8]),
];

/// The preset that `id` names.
pub fn preset(id: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.id == id)
}
