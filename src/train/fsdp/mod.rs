//! Fully sharded data parallelism: what one rank holds of a model, when it gathers the rest, and how ranks agree.
//!
//! Names and meaning of every switch are those of PyTorch's `FullyShardedDataParallel`.

pub mod buffer;
mod communicator;
mod core;
pub mod group;
pub mod layout;
mod load;
mod mesh;
pub mod ranks;
mod scope;
pub mod trace;
mod unit;
pub mod wrap;

#[cfg(test)]
pub(super) mod tests;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use self::core::Core;
use self::layout::{Cut, FlatLayout};
use self::mesh::DeviceMesh;
use self::scope::PassScope;
use self::trace::TraceEvent;
use super::error::TrainError;
use super::memory;
use super::model::{Model, Sequences, ops};
use crate::spec::settings::{DType, FsdpSettings};

pub use buffer::Buffer;
pub use group::{LocalProcessGroup, ProcessGroup};
pub use ranks::{RankContext, RankOptions, run_ranks};

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

    /// Whether every rank that asks gets the same numbers, and none of them is read from anywhere: then each rank asks for its own part.
    fn same_on_every_rank(&self) -> bool {
        false
    }
}

/// What an engine needs beside the sharding switches.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// Seed of dropout; each rank draws its own numbers from it.
    pub seed: u64,
    /// Parameters whose names it matches are trained, the others frozen; `None` trains all.
    pub trainable: Option<regex::Regex>,
}

/// State of the random numbers of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RngState {
    /// The seed.
    pub seed: u64,
    /// Training passes that ran, each with dropout of its own.
    pub passes: u64,
}

/// What one rank holds of one unit.
#[derive(Debug)]
pub struct Shard {
    /// Path of the unit's module; empty for the root.
    pub unit: String,
    /// Master values in f32, padding included. Under `NO_SHARD` the whole unit.
    pub values: Vec<f32>,
    /// Gradient in f32; `None` until there is one, and after [`FullyShardedDataParallel::zero_grad`]. As long as `values`, padding zero, but shorter where the
    /// unit is trained in part: [`Segment::gradient`] says where what lies.
    pub gradient: Option<Vec<f32>>,
    /// The parameters, or parts of them, that lie in this shard, in order. What no segment covers is padding.
    pub segments: Vec<Segment>,
    /// Whether values, gradient and optimiser state live in host memory, outside the device budget.
    pub offloaded: bool,
    /// Ranks that hold the same numbers, this one among them (`NO_SHARD` and the hybrid strategies): norms and sums over shards must count one of them.
    pub replicas: usize,
    /// Which of them this rank is.
    pub replica: usize,
}

/// A parameter, or a part of it, within a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Hugging Face's name.
    pub name: String,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// Where it lies inside this rank's shard.
    pub range: Range<usize>,
    /// Which of the flattened parameter's elements these are.
    pub parameter_range: Range<usize>,
    /// Where in the shard's gradient its gradient begins; `None` if it is frozen.
    pub gradient: Option<usize>,
    /// Whether weight decay acts on it by default: not on biases and norms.
    pub decays_by_default: bool,
}

/// One rank's view of a sharded model.
pub struct FullyShardedDataParallel {
    core: Arc<Core>,
    model: Arc<dyn Model>,
    options: EngineOptions,
    shards: Vec<Shard>,
    /// Passes that ran, each with dropout of its own.
    passes: u64,
}

impl FullyShardedDataParallel {
    /// Shards `model` as `settings` say and fills this rank's part with first values; which rank reads them `settings` say too. Every rank must call it.
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
        let mesh = DeviceMesh::new(&context, settings)?;
        let tree = model.modules();
        let paths = wrap::unit_paths(tree, settings, model.block_class())?;
        let trained = |name: &str| options.trainable.as_ref().is_none_or(|trainable| trainable.is_match(name));
        let layouts = layout::flat_layouts(tree, &paths, settings, mesh.shard_size, trained);
        if settings.fsdp_version == 1 && !settings.use_orig_params {
            refuse_partly_frozen_units(&layouts)?;
        }
        if !layouts.iter().any(FlatLayout::is_trained) {
            return Err(TrainError::Request("model.trainable matches no parameter, so there is nothing to train".to_owned()));
        }
        let mut shards = Vec::new();
        for layout in &layouts {
            let segments = layout.segments(mesh.shard_rank);
            let values = in_shard_memory(settings.cpu_offload, || vec![0.0; layout.cut.shard_numel[mesh.shard_rank]]);
            let (unit, offloaded) = (layout.unit.clone(), settings.cpu_offload);
            shards.push(Shard { unit, values, gradient: None, segments, offloaded, replicas: mesh.replicas, replica: mesh.replica });
        }
        load::load(&context, settings, &tree.parameters(), weights, &mut shards)?;
        let core = Arc::new(Core::new(context, mesh, layouts, settings.clone()));
        Ok(Self { core, model, options: options.clone(), shards, passes: 0 })
    }

    /// Runs forward and backward. The loss is the mean over this rank's scored targets, labels being the block's own tokens shifted inside it; its gradient
    /// times `gradient_scale` is added to the shards' gradients. With `synchronise` gradients are averaged over ranks, together with what passes without it
    /// have left; without, they stay on this rank.
    ///
    /// # Errors
    ///
    /// [`TrainError::Rank`] if another rank failed.
    pub fn forward_backward(&mut self, batch: &Batch, gradient_scale: f32, synchronise: bool) -> Result<LossSum, TrainError> {
        let targets = memory::host(|| batch.targets());
        let count = targets.iter().flatten().count();
        let scope = self.scope(true);
        let model = self.model.clone();
        self.pass(synchronise, move |core| {
            let logits = model.forward(&batch.ids, batch.sequences(), &scope);
            drop(scope);
            let loss = ops::cross_entropy(logits, &targets, gradient_scale / count.max(1) as f32);
            core.note(|| TraceEvent::Loss);
            loss.root.backward();
            core.note(|| TraceEvent::BackwardDone);
            core.end_backward();
            LossSum { sum: loss.sum, targets: count as u64 }
        })
    }

    /// Runs forward only, without dropout.
    ///
    /// # Errors
    ///
    /// [`TrainError::Rank`] if another rank failed.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<LossSum, TrainError> {
        let targets = memory::host(|| batch.targets());
        let scope = self.scope(false);
        let model = self.model.clone();
        self.pass(true, move |core| {
            let logits = model.forward(&batch.ids, batch.sequences(), &scope);
            let loss = ops::cross_entropy(logits, &targets, 0.0);
            core.end_pass();
            LossSum { sum: loss.sum, targets: targets.iter().flatten().count() as u64 }
        })
    }

    /// The logits of a batch, `[rows * block_size, vocabulary]`, row by row, without dropout.
    ///
    /// # Errors
    ///
    /// [`TrainError::Rank`] if another rank failed.
    pub fn logits(&mut self, batch: &Batch) -> Result<Vec<f32>, TrainError> {
        let scope = self.scope(false);
        let model = self.model.clone();
        self.pass(true, move |core| {
            let logits = model.forward(&batch.ids, batch.sequences(), &scope);
            core.end_pass();
            logits.into_data().iter::<f32>().collect()
        })
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
        for unit in 0..self.shards.len() {
            let mut state = self.core.unit(unit);
            state.gradient = None;
            state.unreduced = None;
            state.filled.clear();
        }
    }

    /// What dropout's next numbers follow from; the same on every rank, each of which draws its own.
    pub fn rng_state(&self) -> RngState {
        RngState { seed: self.options.seed, passes: self.passes }
    }

    /// Goes on drawing from a state.
    pub fn set_rng_state(&mut self, state: RngState) {
        (self.options.seed, self.passes) = (state.seed, state.passes);
    }

    /// The group of all ranks.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.core.context.group
    }

    /// The flat parameters, a unit each, in the order of [`Self::shards`].
    pub fn layouts(&self) -> &[FlatLayout] {
        &self.core.layouts
    }

    /// Switches a record of collectives and passes on, or off. Gives what was recorded since the last call.
    pub fn trace(&mut self, on: bool) -> Vec<TraceEvent> {
        self.core.set_trace(on)
    }

    /// Most gathers that were in flight at a time: at most two with `limit_all_gathers`.
    pub fn most_gathers_in_flight(&self) -> usize {
        self.core.most_gathers_in_flight()
    }

    /// The whole of one parameter in f32, gathered from all ranks; every rank must ask for it.
    ///
    /// # Errors
    ///
    /// [`TrainError::Request`] if there is no such parameter, [`TrainError::Rank`] if another rank failed.
    pub fn full_parameter(&mut self, name: &str) -> Result<Vec<f32>, TrainError> {
        self.full(name, |layout, placed| (&layout.cut, Some(placed.range.clone())), |shard, _| shard.values.clone())
    }

    /// The whole gradient of one parameter, gathered from all ranks; zeros where there is none. Every rank must ask for it.
    ///
    /// # Errors
    ///
    /// [`TrainError::Request`] if there is no such parameter, [`TrainError::Rank`] if another rank failed.
    pub fn full_gradient(&mut self, name: &str) -> Result<Vec<f32>, TrainError> {
        let part = |shard: &Shard, numel: usize| shard.gradient.clone().unwrap_or_else(|| vec![0.0; numel]);
        self.full(name, |layout, placed| (&layout.gradient_cut, placed.gradient.clone()), part)
    }

    /// Gathers one parameter's `which` of a unit's cut; zeros if it has none.
    fn full<'a>(
        &'a self,
        name: &str,
        which: impl Fn(&'a FlatLayout, &'a layout::Placed) -> (&'a Cut, Option<Range<usize>>),
        part: impl Fn(&Shard, usize) -> Vec<f32>,
    ) -> Result<Vec<f32>, TrainError> {
        let owner = self.model.modules().owner(name);
        for (layout, shard) in self.core.layouts.iter().zip(&self.shards) {
            let Some(placed) = layout.parameters.iter().find(|placed| placed.info.name == owner) else { continue };
            let (cut, range) = which(layout, placed);
            let Some(range) = range else { return Ok(vec![0.0; placed.info.numel()]) };
            // Only what lies in this parameter travels.
            let cut = cut.within(&range);
            let rank = self.core.mesh.shard_rank;
            let values = part(shard, which(layout, placed).0.shard_numel[rank]);
            let mut mine = Vec::with_capacity(cut.shard_numel[rank]);
            which(layout, placed).0.pieces[rank].iter().for_each(|piece| mine.extend_from_slice(&values[piece.within(&range).shard]));
            let Some(group) = self.core.mesh.shard_group.clone() else { return Ok(mine) };
            let room = Buffer::with_capacity(DType::Fp32, range.len());
            let gather = self.core.context.communicator.issue(move || group.all_gather(room, Arc::new(Buffer::F32(mine)), &cut));
            return Ok(gather.wait()?.into_f32(false));
        }
        Err(TrainError::Request(format!("the model has no parameter {name}")))
    }

    fn scope(&mut self, training: bool) -> PassScope {
        let anchor = Tensor::<1>::zeros([1], &self.core.context.device.clone().without_autodiff());
        let anchor = if training { anchor.autodiff().require_grad() } else { anchor };
        self.passes += u64::from(training);
        let rank = self.core.context.rank as u64;
        let seed = self.options.seed ^ self.passes.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ rank.wrapping_mul(0xD1B5_4A32_D192_ED03);
        PassScope {
            core: self.core.clone(),
            model: self.model.clone(),
            anchor,
            dropout_seed: training.then_some(seed),
            checkpoint: self.core.settings.activation_checkpointing,
            recompute: false,
            last_block: Arc::default(),
        }
    }

    /// Lends the shards to the units, runs `body`, and takes them back, whatever happens.
    fn pass<R>(&mut self, synchronise: bool, body: impl FnOnce(&Core) -> R) -> Result<R, TrainError> {
        self.core.begin_pass(synchronise);
        for (unit, shard) in self.shards.iter_mut().enumerate() {
            let mut state = self.core.unit(unit);
            state.shard = Some(Arc::new(Buffer::F32(std::mem::take(&mut shard.values))));
            state.reduced = shard.gradient.take();
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| body(&self.core)));
        if outcome.is_err() {
            self.core.abandon_pass();
        }
        for (unit, shard) in self.shards.iter_mut().enumerate() {
            let mut state = self.core.unit(unit);
            shard.gradient = state.reduced.take();
            if let Some(values) = state.shard.take() {
                shard.values = match Arc::try_unwrap(values) {
                    Ok(values) => values.into_f32(false),
                    Err(shared) => self.core.in_shard_memory(|| shared.to_f32()),
                };
            }
        }
        outcome.map_err(|panic| match panic.downcast::<TrainError>() {
            Ok(error) => *error,
            Err(panic) => resume_unwind(panic),
        })
    }
}

impl Batch {
    /// Rows and tokens per row.
    pub fn sequences(&self) -> Sequences {
        Sequences { rows: self.rows, block_size: self.block_size }
    }

    /// What each token should predict: the next one of its row, if that counts.
    fn targets(&self) -> Vec<Option<u32>> {
        let target = |index: usize| {
            let next = index + 1;
            let inside = !next.is_multiple_of(self.block_size);
            (inside && self.scored.as_ref().is_none_or(|scored| scored[next])).then(|| self.ids[next])
        };
        (0..self.ids.len()).map(target).collect()
    }
}

/// Runs `work` so that what it allocates counts where shards live: on the device, or on the host, outside the budget, where they are offloaded.
fn in_shard_memory<R>(offloaded: bool, work: impl FnOnce() -> R) -> R {
    if offloaded { memory::host(work) } else { work() }
}

/// With `use_orig_params = false` a unit is one parameter to the optimiser, so it is trained whole or not at all.
fn refuse_partly_frozen_units(layouts: &[FlatLayout]) -> Result<(), TrainError> {
    for layout in layouts {
        let trained = layout.parameters.iter().find(|placed| placed.gradient.is_some());
        let frozen = layout.parameters.iter().find(|placed| placed.gradient.is_none());
        if let (Some(trained), Some(frozen)) = (trained, frozen) {
            return Err(TrainError::Request(format!(
                "fsdp.use_orig_params = false needs all parameters of a unit trained or all frozen: model.trainable matches {} and not {}, which share the unit \"{}\"",
                trained.info.name, frozen.info.name, layout.unit
            )));
        }
    }
    Ok(())
}
