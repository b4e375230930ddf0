//! Model names that stand for a hub id or for sizes of our own.

/// A short name for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// What `model.id` says.
    pub id: &'static str,
    /// Where its configuration and weights are; `None` where it exists with random weights only.
    pub hub: Option<&'static str>,
    /// Sizes; the vocabulary is the data's where it has no hub id.
    pub sizes: Sizes,
}

/// Sizes of a GPT-2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Transformer blocks.
    pub n_layer: usize,
    /// Width.
    pub n_embd: usize,
    /// Attention heads.
    pub n_head: usize,
    /// Largest block size.
    pub n_positions: usize,
    /// Entries of the vocabulary; `None` takes the data's.
    pub vocab_size: Option<usize>,
}

const fn gpt2(id: &'static str, hub: Option<&'static str>, n_layer: usize, n_embd: usize, n_head: usize, vocab_size: Option<usize>) -> Preset {
    Preset { id, hub, sizes: Sizes { n_layer, n_embd, n_head, n_positions: 1024, vocab_size } }
}

/// All presets.
pub const PRESETS: [Preset; 5] = [
    gpt2("gpt2-tiny", None, 4, 128, 4, None),
    gpt2("gpt2", Some("openai-community/gpt2"), 12, 768, 12, Some(50257)),
    gpt2("gpt2-medium", Some("openai-community/gpt2-medium"), 24, 1024, 16, Some(50257)),
    gpt2("gpt2-large", Some("openai-community/gpt2-large"), 36, 1280, 20, Some(50257)),
    gpt2("gpt2-xl", Some("openai-community/gpt2-xl"), 48, 1600, 25, Some(50257)),
];

/// The preset that `id` names.
pub fn preset(id: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.id == id)
}
