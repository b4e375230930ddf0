//! Fully sharded data parallelism: what one rank holds of a model, when it gathers the rest, and how ranks agree.
//!
//! Names and meaning of every switch are those of PyTorch's `FullyShardedDataParallel`.

pub mod buffer;
pub mod group;

use std::ops::Range;
use std::sync::Arc;

pub use buffer::Buffer;
pub use group::{LocalProcessGroup, ProcessGroup, RankContext, run_ranks};

use super::error::TrainError;
use super::model::Model;
use crate::spec::settings::FsdpSettings;

/// Sequences for one forward pass of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, `[rows, block_size]`.
    pub ids: Vec<u32>,
    /// Which tokens count as targets, as `ids`; `None`: all. The first token of a sequence is never a target.
    pub scored: Option<Vec<bool>>,
    /// Sequences.
    pub rows: usize,
    /// Tokens per sequence.
    pub block_size: usize,
}

/// The sum of cross-entropies of a rank's scored targets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossSum {
    /// Sum over targets, natural logarithm.
    pub sum: f64,
    /// Targets.
    pub targets: u64,
}

impl LossSum {
    /// Mean per target; NaN without targets.
    pub fn mean(self) -> f64 {
        self.sum / self.targets as f64
    }
}

/// Where a rank's part of the weights comes from.
pub trait WeightSource: Sync {
    /// Elements `elements` of the flattened parameter `name` (Hugging Face's layout: Conv1D weights are `[in, out]`), whose shape must be `shape`.
    fn read(&self, name: &str, shape: &[usize], elements: Range<usize>) -> Result<Vec<f32>, TrainError>;
}

/// What an engine needs beside the sharding switches.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// Seed of dropout; each rank draws its own numbers from it.
    pub seed: u64,
    /// Parameters whose names it matches are trained, the others frozen; `None` trains all.
    pub trainable: Option<regex::Regex>,
}

/// What one rank holds of one unit.
#[derive(Debug)]
pub struct Shard {
    /// Path of the unit's module; empty for the root.
    pub unit: String,
    /// Master values in f32, padding included. Under `NO_SHARD` the whole unit.
    pub values: Vec<f32>,
    /// Gradient in f32, as long as `values`, padding zero; `None` until there is one, and after [`FullyShardedDataParallel::zero_grad`].
    pub gradient: Option<Vec<f32>>,
    /// The parameters, or parts of them, that lie in this shard, in order. What no segment covers is padding.
    pub segments: Vec<Segment>,
    /// Whether values, gradient and optimiser state live in host memory, outside the device budget.
    pub offloaded: bool,
    /// Whether other ranks hold the same numbers (`NO_SHARD`): then norms and sums over shards must not add up the ranks.
    pub replicated: bool,
}

/// A parameter, or a part of it, within a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Hugging Face's name.
    pub name: String,
    /// Where it lies inside this rank's shard.
    pub range: Range<usize>,
    /// Which of the flattened parameter's elements these are.
    pub parameter_range: Range<usize>,
    /// Whether weight decay acts on it by default: not on biases and norms.
    pub decays_by_default: bool,
    /// Whether it is trained.
    pub requires_grad: bool,
}

/// One rank's view of a sharded model.
pub struct FullyShardedDataParallel {
    context: RankContext,
    shards: Vec<Shard>,
}

impl FullyShardedDataParallel {
    /// Shards `model` as `settings` say and reads this rank's part of the weights.
    ///
    /// # Errors
    ///
    /// [`TrainError::Request`] for a wrap class that the model lacks and for combinations that cannot be; whatever `weights` says.
    pub fn new(
        context: RankContext,
        model: Arc<dyn Model>,
        settings: &FsdpSettings,
        options: &EngineOptions,
        weights: &dyn WeightSource,
    ) -> Result<Self, TrainError> {
        let _ = (model, settings, options, weights);
        Ok(Self { context, shards: Vec::new() })
    }

    /// Runs forward and backward. The loss is the mean over this rank's scored targets, labels being the block's own tokens shifted inside it; its gradient
    /// times `gradient_scale` is added to the shards' gradients. With `synchronise` gradients are averaged over ranks, together with what passes without it
    /// have left; without, they stay on this rank.
    ///
    /// # Errors
    ///
    /// [`TrainError::Rank`] if another rank failed.
    pub fn forward_backward(&mut self, batch: &Batch, gradient_scale: f32, synchronise: bool) -> Result<LossSum, TrainError> {
        let _ = (batch, gradient_scale, synchronise);
        Err(TrainError::Failed("the forward pass is not built yet".to_owned()))
    }

    /// Runs forward only, without dropout.
    ///
    /// # Errors
    ///
    /// [`TrainError::Rank`] if another rank failed.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<LossSum, TrainError> {
        let _ = batch;
        Err(TrainError::Failed("the forward pass is not built yet".to_owned()))
    }

    /// This rank's shards, a unit each, in the order of the model.
    pub fn shards(&mut self) -> &mut [Shard] {
        &mut self.shards
    }

    /// Drops all gradients, as PyTorch's `zero_grad(set_to_none=True)`.
    pub fn zero_grad(&mut self) {
        for shard in &mut self.shards {
            shard.gradient = None;
        }
    }

    /// The group of all ranks.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.context.group
    }

    /// The whole of one parameter, gathered from all ranks; every rank must ask for it.
    ///
    /// # Errors
    ///
    /// [`TrainError::Request`] if there is no such parameter, [`TrainError::Rank`] if another rank failed.
    pub fn full_parameter(&mut self, name: &str) -> Result<Vec<f32>, TrainError> {
        Err(TrainError::Request(format!("the model has no parameter {name}")))
    }
}
