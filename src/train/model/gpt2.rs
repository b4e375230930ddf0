//! GPT-2 (Radford et al. 2019): pre-norm, learned positions, tied head; modules and parameters named as in transformers' `GPT2LMHeadModel`.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::ops::{AttentionKind, LinearInput, WeightLayout, add, causal_attention, dropout, embedding, layer_norm, linear};
use super::{Model, Module, ModuleTree, Scope, Sequences, activation_class, module};
use crate::protocol::Gpt2Config;

/// GPT-2 with a language-model head.
pub struct Gpt2 {
    config: Gpt2Config,
    attention: AttentionKind,
    modules: ModuleTree,
}

impl Gpt2 {
    /// A model of these sizes.
    pub fn new(config: Gpt2Config, attention: AttentionKind) -> Self {
        let modules = modules(&config);
        Self { config, attention, modules }
    }

    fn norm(&self, path: &str, x: Tensor<2>, scope: &dyn Scope) -> Tensor<2> {
        let [weight, bias] = ["weight", "bias"].map(|name| scope.parameter(&format!("{path}.{name}")));
        module(scope, path, || layer_norm(x, &weight, &bias, self.config.layer_norm_epsilon as f32))
    }

    fn conv1d(path: &str, x: impl Into<LinearInput>, scope: &dyn Scope) -> Tensor<2> {
        let [weight, bias] = ["weight", "bias"].map(|name| scope.parameter(&format!("{path}.{name}")));
        module(scope, path, || linear(x, &weight, Some(&bias), WeightLayout::InOut))
    }

    fn dropout(&self, path: &str, x: Tensor<2>, scope: &dyn Scope) -> Tensor<2> {
        match scope.dropout_seed(path) {
            Some(seed) if self.config.dropout > 0.0 => dropout(x, self.config.dropout as f32, seed),
            _ => x,
        }
    }

    fn attention(&self, path: &str, x: Tensor<2>, sequences: Sequences, scope: &dyn Scope) -> Tensor<2> {
        module(scope, path, || {
            let qkv = Self::conv1d(&format!("{path}.c_attn"), x, scope);
            let seed = scope.dropout_seed(&format!("{path}.attn_dropout")).filter(|_| self.config.dropout > 0.0);
            let dropout = seed.map(|seed| (self.config.dropout as f32, seed));
            let mixed = causal_attention(qkv, self.config.n_head, sequences, self.attention, dropout);
            let projected = Self::conv1d(&format!("{path}.c_proj"), mixed, scope);
            self.dropout(&format!("{path}.resid_dropout"), projected, scope)
        })
    }

    fn mlp(&self, path: &str, x: Tensor<2>, scope: &dyn Scope) -> Tensor<2> {
        module(scope, path, || {
            let wide = Self::conv1d(&format!("{path}.c_fc"), x, scope);
            let activated = LinearInput::Activated(self.config.activation_function, wide);
            let projected = Self::conv1d(&format!("{path}.c_proj"), activated, scope);
            self.dropout(&format!("{path}.dropout"), projected, scope)
        })
    }
}

impl Model for Gpt2 {
    fn modules(&self) -> &ModuleTree {
        &self.modules
    }

    fn block_class(&self) -> &'static str {
        "GPT2Block"
    }

    fn block(&self, index: usize, hidden: Tensor<2>, sequences: Sequences, scope: &dyn Scope) -> Tensor<2> {
        let path = format!("transformer.h.{index}");
        let normal = self.norm(&format!("{path}.ln_1"), hidden.clone(), scope);
        let hidden = add(hidden, self.attention(&format!("{path}.attn"), normal, sequences, scope));
        let normal = self.norm(&format!("{path}.ln_2"), hidden.clone(), scope);
        add(hidden, self.mlp(&format!("{path}.mlp"), normal, scope))
    }

    fn forward(&self, ids: &[u32], sequences: Sequences, scope: &dyn Scope) -> Tensor<2> {
        module(scope, "", || {
            let hidden = module(scope, "transformer", || {
                let tokens: Arc<[u32]> = ids.into();
                let positions: Arc<[u32]> = (0..sequences.rows).flat_map(|_| 0..sequences.block_size as u32).collect();
                let [wte, wpe] = ["transformer.wte.weight", "transformer.wpe.weight"].map(|name| scope.parameter(name));
                let tokens = module(scope, "transformer.wte", || embedding(&scope.anchor(), tokens, &wte, None));
                let positions = module(scope, "transformer.wpe", || embedding(&scope.anchor(), positions, &wpe, None));
                let mut hidden = self.dropout("transformer.drop", add(tokens, positions), scope);
                for index in 0..self.config.n_layer {
                    hidden = module(scope, &format!("transformer.h.{index}"), || scope.block(index, hidden, sequences));
                }
                self.norm("transformer.ln_f", hidden, scope)
            });
            let head = scope.parameter("lm_head.weight");
            module(scope, "lm_head", || linear(hidden, &head, None, WeightLayout::OutIn))
        })
    }
}

fn modules(config: &Gpt2Config) -> ModuleTree {
    let width = config.n_embd;
    let inner = config.n_inner.unwrap_or(4 * width);
    let norm = |name: &str| Module::leaf(name, "LayerNorm", vec![("weight", vec![width]), ("bias", vec![width])]);
    let conv1d = |name: &str, from: usize, to: usize| Module::leaf(name, "Conv1D", vec![("weight", vec![from, to]), ("bias", vec![to])]);
    let nothing = |name: &str, class: &'static str| Module::leaf(name, class, Vec::new());
    let block = |index: usize| {
        let attention = vec![
            conv1d("c_attn", width, 3 * width),
            conv1d("c_proj", width, width),
            nothing("attn_dropout", "Dropout"),
            nothing("resid_dropout", "Dropout"),
        ];
        let mlp = vec![
            conv1d("c_fc", width, inner),
            conv1d("c_proj", inner, width),
            nothing("act", activation_class(config.activation_function)),
            nothing("dropout", "Dropout"),
        ];
        Module::container(
            index.to_string(),
            "GPT2Block",
            vec![norm("ln_1"), Module::container("attn", "GPT2Attention", attention), norm("ln_2"), Module::container("mlp", "GPT2MLP", mlp)],
        )
    };
    let embedding = |name: &str, entries: usize| Module::leaf(name, "Embedding", vec![("weight", vec![entries, width])]);
    let transformer = vec![
        embedding("wte", config.vocab_size),
        embedding("wpe", config.n_positions),
        nothing("drop", "Dropout"),
        Module::container("h", "ModuleList", (0..config.n_layer).map(block).collect()),
        norm("ln_f"),
    ];
    let head = Module::leaf("lm_head", "Linear", vec![("weight", vec![config.vocab_size, width])]);
    ModuleTree {
        root: Module::container("", "GPT2LMHeadModel", vec![Module::container("transformer", "GPT2Model", transformer), head]),
        ties: if config.tie_word_embeddings { vec![("lm_head.weight".to_owned(), "transformer.wte.weight".to_owned())] } else { Vec::new() },
    }
}
