//! Where parameters get their first values: drawn at random, or read from safetensors files. Either way any slice of a parameter can be had alone, so
//! that a rank never holds more than its shard.

mod random;
mod safetensors;

pub use self::random::RandomWeights;
pub use self::safetensors::SafetensorsWeights;

use super::error::TrainError;
use super::fsdp::WeightSource;
use crate::protocol::{Architecture, ResolvedModel};

/// The source of a model's first values: its files where it has any, random numbers otherwise.
///
/// # Errors
/// The files are missing, damaged or incomplete.
pub fn open(model: &ResolvedModel, seed: u64) -> Result<Box<dyn WeightSource>, TrainError> {
    let Architecture::Gpt2(config) = &model.architecture;
    match &model.weights {
        Some(path) => Ok(Box::new(SafetensorsWeights::open(path)?)),
        None => Ok(Box::new(RandomWeights::new(config, seed))),
    }
}

/// The name without the prefix that some files have and some lack.
fn bare(name: &str) -> &str {
    name.strip_prefix("transformer.").unwrap_or(name)
}
