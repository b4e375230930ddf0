//! Where parameters get their first values: drawn at random, or read from safetensors files. Either way any slice of a parameter can be had alone, so
//! that a rank never holds more than its shard.

mod random;
mod safetensors;

pub use self::random::RandomWeights;
pub use self::safetensors::SafetensorsWeights;

use super::error::TrainError;
use super::fsdp::WeightSource;
use crate::protocol::ResolvedModel;

/// The source of a model's first values: its files where it has any, random numbers otherwise.
///
/// # Errors
/// The files are missing, damaged or incomplete.
pub fn open(model: &ResolvedModel, seed: u64) -> Result<Box<dyn WeightSource>, TrainError> {
    match &model.weights {
        Some(path) => Ok(Box::new(SafetensorsWeights::open(path)?)),
        None => Ok(Box::new(RandomWeights::new(&model.architecture, seed))),
    }
}

/// The name without the prefix of the base model, which some files have and some lack.
fn bare(name: &str) -> &str {
    ["transformer.", "model."].into_iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}
