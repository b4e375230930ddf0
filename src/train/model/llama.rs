//! Llama (Touvron et al. 2023): pre-norm, rotary positions, SwiGLU, grouped-query attention; modules and parameters named as in transformers'
//! `LlamaForCausalLM`.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::ops::{
    AttentionKind, Heads, LinearInput, RotaryFrequencies, WeightLayout, add, embedding, grouped_query_attention, linear, rms_norm, rotary,
};
use super::{Model, Module, ModuleTree, Scope, Sequences, activation_class, module};
use crate::protocol::LlamaConfig;

/// Llama with a language-model head.
pub struct Llama {
    config: LlamaConfig,
    attention: AttentionKind,
    frequencies: RotaryFrequencies,
    modules: ModuleTree,
}

impl Llama {
    /// A model of these sizes.
    pub fn new(config: LlamaConfig, attention: AttentionKind) -> Self {
        let modules = modules(&config);
        let frequencies = RotaryFrequencies::new(config.head_dim, config.rope_theta, &config.rope_scaling);
        Self { config, attention, frequencies, modules }
    }

    fn norm(&self, path: &str, x: Tensor<2>, scope: &dyn Scope) -> Tensor<2> {
        let weight = scope.parameter(&format!("{path}.weight"));
        module(scope, path, || rms_norm(x, &weight, self.config.rms_norm_eps as f32))
    }

    fn linear(path: &str, x: impl Into<LinearInput>, biased: bool, scope: &dyn Scope) -> Tensor<2> {
        let weight = scope.parameter(&format!("{path}.weight"));
        let bias = biased.then(|| scope.parameter(&format!("{path}.bias")));
        module(scope, path, || linear(x, &weight, bias.as_ref(), WeightLayout::OutIn))
    }

    fn attention(&self, path: &str, x: Tensor<2>, sequences: Sequences, scope: &dyn Scope) -> Tensor<2> {
        let LlamaConfig { num_attention_heads, num_key_value_heads, head_dim, attention_bias, attention_dropout, .. } = self.config;
        let heads = Heads { query: num_attention_heads, key_value: num_key_value_heads, size: head_dim };
        module(scope, path, || {
            let project = |name: &str, x: Tensor<2>| Self::linear(&format!("{path}.{name}"), x, attention_bias, scope);
            let [q, k] = ["q_proj", "k_proj"].map(|name| rotary(project(name, x.clone()), &self.frequencies, sequences));
            let v = project("v_proj", x);
            let seed = scope.dropout_seed(path).filter(|_| attention_dropout > 0.0);
            let dropout = seed.map(|seed| (attention_dropout as f32, seed));
            let mixed = grouped_query_attention([q, k, v], heads, sequences, self.attention, dropout);
            project("o_proj", mixed)
        })
    }

    fn mlp(&self, path: &str, x: Tensor<2>, scope: &dyn Scope) -> Tensor<2> {
        let LlamaConfig { mlp_bias, hidden_act, .. } = self.config;
        module(scope, path, || {
            let gate = Self::linear(&format!("{path}.gate_proj"), x.clone(), mlp_bias, scope);
            let up = Self::linear(&format!("{path}.up_proj"), x, mlp_bias, scope);
            Self::linear(&format!("{path}.down_proj"), LinearInput::Gated(hidden_act, [gate, up]), mlp_bias, scope)
        })
    }
}

impl Model for Llama {
    fn modules(&self) -> &ModuleTree {
        &self.modules
    }

    fn block_class(&self) -> &'static str {
        "LlamaDecoderLayer"
    }

    fn block(&self, index: usize, hidden: Tensor<2>, sequences: Sequences, scope: &dyn Scope) -> Tensor<2> {
        let path = format!("model.layers.{index}");
        let normal = self.norm(&format!("{path}.input_layernorm"), hidden.clone(), scope);
        let hidden = add(hidden, self.attention(&format!("{path}.self_attn"), normal, sequences, scope));
        let normal = self.norm(&format!("{path}.post_attention_layernorm"), hidden.clone(), scope);
        add(hidden, self.mlp(&format!("{path}.mlp"), normal, scope))
    }

    fn forward(&self, ids: &[u32], sequences: Sequences, scope: &dyn Scope) -> Tensor<2> {
        module(scope, "", || {
            let hidden = module(scope, "model", || {
                let tokens: Arc<[u32]> = ids.into();
                let table = scope.parameter("model.embed_tokens.weight");
                let mut hidden = module(scope, "model.embed_tokens", || embedding(&scope.anchor(), tokens, &table, self.config.pad_token_id));
                for index in 0..self.config.num_hidden_layers {
                    hidden = module(scope, &format!("model.layers.{index}"), || scope.block(index, hidden, sequences));
                }
                self.norm("model.norm", hidden, scope)
            });
            Self::linear("lm_head", hidden, false, scope)
        })
    }
}

fn modules(config: &LlamaConfig) -> ModuleTree {
    let LlamaConfig { hidden_size: width, intermediate_size: inner, head_dim, .. } = *config;
    let [queries, keys] = [config.num_attention_heads, config.num_key_value_heads].map(|heads| heads * head_dim);
    let norm = |name: &str| Module::leaf(name, "LlamaRMSNorm", vec![("weight", vec![width])]);
    let linear = |name: &str, from: usize, to: usize, biased: bool| {
        let mut parameters = vec![("weight", vec![to, from])];
        parameters.extend(biased.then(|| ("bias", vec![to])));
        Module::leaf(name, "Linear", parameters)
    };
    let block = |index: usize| {
        let biased = config.attention_bias;
        let attention = vec![
            linear("q_proj", width, queries, biased),
            linear("k_proj", width, keys, biased),
            linear("v_proj", width, keys, biased),
            linear("o_proj", queries, width, biased),
        ];
        let biased = config.mlp_bias;
        let mlp = vec![
            linear("gate_proj", width, inner, biased),
            linear("up_proj", width, inner, biased),
            linear("down_proj", inner, width, biased),
            Module::leaf("act_fn", activation_class(config.hidden_act), Vec::new()),
        ];
        let children = vec![
            Module::container("self_attn", "LlamaAttention", attention),
            Module::container("mlp", "LlamaMLP", mlp),
            norm("input_layernorm"),
            norm("post_attention_layernorm"),
        ];
        Module::container(index.to_string(), "LlamaDecoderLayer", children)
    };
    let model = vec![
        Module::leaf("embed_tokens", "Embedding", vec![("weight", vec![config.vocab_size, width])]),
        Module::container("layers", "ModuleList", (0..config.num_hidden_layers).map(block).collect()),
        norm("norm"),
        Module::leaf("rotary_emb", "LlamaRotaryEmbedding", Vec::new()),
    ];
    let head = linear("lm_head", width, config.vocab_size, false);
    ModuleTree {
        root: Module::container("", "LlamaForCausalLM", vec![Module::container("model", "LlamaModel", model), head]),
        ties: if config.tie_word_embeddings { vec![("lm_head.weight".to_owned(), "model.embed_tokens.weight".to_owned())] } else { Vec::new() },
    }
}
