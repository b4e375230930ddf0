//! Random weights as transformers initialises GPT-2 and Llama.
//!
//! Each parameter has a random stream of its own, made from seed and name, in which every element has its place: what is drawn does not depend on the
//! number of ranks, on how parameters are cut into shards, or on the order in which they are asked for.

use std::f64::consts::TAU;
use std::ops::Range;

use super::bare;
use crate::protocol::Architecture;
use crate::train::error::TrainError;
use crate::train::fsdp::WeightSource;

/// Random first values of a model.
#[derive(Clone, Debug)]
pub struct RandomWeights {
    seed: u64,
    initializer_range: f64,
    /// Standard deviation of GPT-2's projections into the residual stream.
    residual_range: f64,
    /// The embedding of this token starts at zero, as PyTorch's `padding_idx`.
    padding: Option<u32>,
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Start {
    Constant(f32),
    /// Normally distributed around zero with this standard deviation.
    Normal(f64),
}

impl RandomWeights {
    /// Weights of a model with this configuration.
    pub fn new(architecture: &Architecture, seed: u64) -> Self {
        match architecture {
            Architecture::Gpt2(config) => Self {
                seed,
                initializer_range: config.initializer_range,
                // The stream gathers two projections a block; scaling them keeps its variance (Radford et al. 2019, section 2.3).
                residual_range: config.initializer_range / (2.0 * config.n_layer as f64).sqrt(),
                padding: None,
            },
            Architecture::Llama(config) => {
                Self { seed, initializer_range: config.initializer_range, residual_range: config.initializer_range, padding: config.pad_token_id }
            }
        }
    }

    fn start(&self, name: &str) -> Option<Start> {
        let mut parts = bare(name).rsplit('.');
        let (kind, module) = (parts.next()?, parts.next()?);
        match (module, kind) {
            (_, "bias") => Some(Start::Constant(0.0)),
            ("ln_1" | "ln_2" | "ln_f" | "norm" | "input_layernorm" | "post_attention_layernorm", "weight") => Some(Start::Constant(1.0)),
            ("c_proj", "weight") => Some(Start::Normal(self.residual_range)),
            ("wte" | "wpe" | "c_attn" | "c_fc" | "embed_tokens" | "lm_head", "weight") => Some(Start::Normal(self.initializer_range)),
            (_, "weight") if module.ends_with("_proj") => Some(Start::Normal(self.initializer_range)),
            _ => None,
        }
    }
}

impl WeightSource for RandomWeights {
    fn read(&self, name: &str, shape: &[usize], elements: Range<usize>) -> Result<Vec<f32>, TrainError> {
        let mut values = match self.start(name) {
            Some(Start::Constant(value)) => vec![value; elements.len()],
            Some(Start::Normal(deviation)) => Stream::new(self.seed, bare(name)).normal(deviation, elements.clone()),
            None => return Err(TrainError::Failed(format!("sweep's models have no parameter {name}, so it is unknown how it starts"))),
        };
        if let (Some(padding), "embed_tokens.weight", Some(width)) = (self.padding, bare(name), shape.get(1)) {
            let row = padding as usize * width..(padding as usize + 1) * width;
            let zeroed = row.start.clamp(elements.start, elements.end) - elements.start..row.end.clamp(elements.start, elements.end) - elements.start;
            values[zeroed].fill(0.0);
        }
        Ok(values)
    }

    fn same_on_every_rank(&self) -> bool {
        true
    }
}

/// A random stream with an element at every index: SplitMix64 (Steele et al. 2014) by position, and the Box-Muller transform on pairs.
struct Stream {
    key: u64,
}

impl Stream {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a of the name, then mixed with the seed so that neighbouring seeds share nothing.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        Self { key: mix(hash ^ mix(seed)) }
    }

    /// A uniform number above 0 and up to 1.
    fn uniform(&self, index: u64) -> f64 {
        let bits = mix(self.key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        ((bits >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    fn normal(&self, deviation: f64, elements: Range<usize>) -> Vec<f32> {
        let mut values = Vec::with_capacity(elements.len());
        let mut index = elements.start;
        while index < elements.end {
            let pair = (index & !1) as u64;
            let radius = deviation * (-2.0 * self.uniform(pair).ln()).sqrt();
            let (sine, cosine) = (TAU * self.uniform(pair + 1)).sin_cos();
            let both = [(radius * cosine) as f32, (radius * sine) as f32];
            let from = index & 1;
            let until = (elements.end - pair as usize).min(2);
            values.extend_from_slice(&both[from..until]);
            index = pair as usize + until;
        }
        values
    }
}

/// SplitMix64's output function: a bijection that scatters neighbouring numbers.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::protocol::LlamaConfig;

    fn weights(seed: u64) -> RandomWeights {
        RandomWeights { seed, initializer_range: 0.02, residual_range: 0.005, padding: None }
    }

    fn read(seed: u64, name: &str, elements: Range<usize>) -> Vec<f32> {
        weights(seed).read(name, &[100_000], elements).unwrap()
    }

    /// Mean and standard deviation.
    fn moments(values: &[f32]) -> (f64, f64) {
        let count = values.len() as f64;
        let mean = values.iter().copied().map(f64::from).sum::<f64>() / count;
        let variance = values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>() / count;
        (mean, variance.sqrt())
    }

    #[test]
    fn follows_transformers_initialisation() {
        let constants = [
            ("transformer.h.0.ln_1.weight", 1.0),
            ("transformer.h.3.ln_2.weight", 1.0),
            ("transformer.ln_f.weight", 1.0),
            ("transformer.ln_f.bias", 0.0),
            ("transformer.h.0.attn.c_attn.bias", 0.0),
            ("transformer.h.0.mlp.c_proj.bias", 0.0),
        ];
        for (name, value) in constants {
            assert_eq!(read(1, name, 3..6), [value; 3], "{name}");
        }
        let normals = [
            ("transformer.wte.weight", 0.02),
            ("transformer.wpe.weight", 0.02),
            ("transformer.h.0.attn.c_attn.weight", 0.02),
            ("transformer.h.0.mlp.c_fc.weight", 0.02),
            ("transformer.h.0.attn.c_proj.weight", 0.005),
            ("transformer.h.0.mlp.c_proj.weight", 0.005),
        ];
        for (name, deviation) in normals {
            let values = read(1, name, 0..100_000);
            let (mean, measured) = moments(&values);
            // Four standard errors.
            assert!(mean.abs() < 4.0 * deviation / 316.0, "{name}: mean {mean}");
            assert!((measured / deviation - 1.0).abs() < 4.0 / (2.0_f64 * 100_000.0).sqrt(), "{name}: deviation {measured}");
            // A normal distribution, not merely one with this deviation: 4.55 % lie beyond two deviations.
            let beyond = values.iter().filter(|value| f64::from(value.abs()) > 2.0 * deviation).count();
            assert!((4_285..4_815).contains(&beyond), "{name}: {beyond} beyond two deviations");
        }
    }

    #[test]
    fn llamas_start_as_transformers_says() {
        let config = LlamaConfig { initializer_range: 0.05, pad_token_id: Some(2), ..LlamaConfig::DEFAULT };
        let weights = RandomWeights::new(&Architecture::Llama(config), 1);
        let read = |name: &str, elements| weights.read(name, &[1000, 100], elements).unwrap();
        for name in ["model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.9.post_attention_layernorm.weight"] {
            assert_eq!(read(name, 0..3), [1.0; 3], "{name}");
        }
        assert_eq!(read("model.layers.0.self_attn.q_proj.bias", 0..3), [0.0; 3]);
        for name in ["model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"] {
            let (mean, deviation) = moments(&read(name, 0..100_000));
            assert!(mean.abs() < 1e-3 && (deviation / 0.05 - 1.0).abs() < 0.02, "{name}: {mean}, {deviation}");
        }
        // The padding token's row is zero, wherever a slice of it begins and ends.
        for slice in [0..1000, 150..250, 210..220, 250..400, 0..100, 900..1000] {
            let values = read("model.embed_tokens.weight", slice.clone());
            assert!(slice.zip(values).all(|(index, value)| (value == 0.0) == (200..300).contains(&index)));
        }
    }

    #[test]
    fn streams_differ_by_seed_and_name_and_not_by_prefix() {
        let first = read(1, "transformer.h.0.attn.c_attn.weight", 0..100);
        assert_eq!(first, read(1, "h.0.attn.c_attn.weight", 0..100));
        for other in
            [read(2, "h.0.attn.c_attn.weight", 0..100), read(1, "h.1.attn.c_attn.weight", 0..100), read(1, "h.0.attn.c_attn.weight", 100..200)]
        {
            assert!(first.iter().zip(&other).all(|(first, other)| first != other));
        }
    }

    #[test]
    fn unknown_parameters_are_refused() {
        assert_eq!(
            weights(1).read("transformer.h.0.rotary.weight", &[4], 0..4).unwrap_err().to_string(),
            "sweep's models have no parameter transformer.h.0.rotary.weight, so it is unknown how it starts"
        );
    }

    proptest! {
        /// However a parameter is cut, odd places included, the pieces are those of the whole.
        #[test]
        fn slices_are_those_of_the_whole(start in 0_usize..500, length in 0_usize..500) {
            let whole = read(7, "transformer.wte.weight", 0..1_000);
            prop_assert_eq!(read(7, "transformer.wte.weight", start..start + length), &whole[start..start + length]);
        }
    }
}
