//! Models, written forward only. A model names its modules and parameters as PyTorch and Hugging Face do and knows nothing of sharding: where its weights
//! are, and what happens around each module, is the [`Scope`]'s business.

pub mod gpt2;
pub mod llama;
pub mod ops;
pub mod parameter;
pub mod tree;

#[cfg(test)]
pub(super) mod tests;

use std::sync::Arc;

use burn::tensor::Tensor;

use self::gpt2::Gpt2;
use self::llama::Llama;
use self::ops::AttentionKind;
use crate::protocol::{Activation, Architecture};

pub use parameter::{Parameter, ParameterStore, ParameterValue};
pub use tree::{Module, ModuleTree, ParameterInfo};

/// Rows and tokens per row of the hidden states, which are `[rows * block_size, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequences {
    /// Sequences.
    pub rows: usize,
    /// Tokens per sequence.
    pub block_size: usize,
}

/// A causal language model.
pub trait Model: Send + Sync + 'static {
    /// Its modules and parameters, by PyTorch's class names and Hugging Face's parameter names.
    fn modules(&self) -> &ModuleTree;

    /// PyTorch's class of its transformer blocks.
    fn block_class(&self) -> &'static str;

    /// One transformer block: hidden states `[rows * block_size, width]` in and out.
    fn block(&self, index: usize, hidden: Tensor<2>, sequences: Sequences, scope: &dyn Scope) -> Tensor<2>;

    /// Logits `[rows * block_size, vocabulary]` of token ids `[rows, block_size]`.
    fn forward(&self, ids: &[u32], sequences: Sequences, scope: &dyn Scope) -> Tensor<2>;
}

/// The model that `architecture` describes.
pub fn build(architecture: &Architecture, attention: AttentionKind) -> Arc<dyn Model> {
    match architecture {
        Architecture::Gpt2(config) => Arc::new(Gpt2::new(config.clone(), attention)),
        Architecture::Llama(config) => Arc::new(Llama::new(config.clone(), attention)),
    }
}

/// The class of an activation's module in transformers.
fn activation_class(activation: Activation) -> &'static str {
    match activation {
        Activation::GeluNew => "NewGELUActivation",
        Activation::Gelu => "GELUActivation",
        Activation::QuickGelu => "QuickGELUActivation",
        Activation::Silu => "SiLUActivation",
        Activation::Relu => "ReLU",
        Activation::Tanh => "Tanh",
    }
}

/// What surrounds a model's forward pass.
pub trait Scope {
    /// The parameter of this Hugging Face name; a tied name gives its owner.
    fn parameter(&self, name: &str) -> Parameter;

    /// A leaf that embeddings hang from: tracked where gradients are wanted.
    fn anchor(&self) -> Tensor<1>;

    /// A module's forward pass begins; as PyTorch's forward pre-hook.
    fn enter(&self, path: &str);

    /// A module's forward pass ended with `output`, which goes on as what this returns; as PyTorch's forward hook.
    fn leave(&self, path: &str, output: Tensor<2>) -> Tensor<2>;

    /// Transformer block `index`, recomputed in backward where activations are checkpointed. Calls [`Model::block`].
    fn block(&self, index: usize, hidden: Tensor<2>, sequences: Sequences) -> Tensor<2>;

    /// The seed of the dropout at `path`, the same whenever it is asked within a pass; `None` where dropout does not act.
    fn dropout_seed(&self, path: &str) -> Option<u64>;
}

/// Runs `body` as the forward pass of the module at `path`.
pub fn module(scope: &dyn Scope, path: &str, body: impl FnOnce() -> Tensor<2>) -> Tensor<2> {
    scope.enter(path);
    scope.leave(path, body())
}
