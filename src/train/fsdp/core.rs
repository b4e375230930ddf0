//! The life cycle of units: when each is gathered, freed and reduced. Follows PyTorch's `_runtime_utils.py` hook by hook.
//!
//! A collective has ended when the call returns, so a rank never has more than one in flight and `limit_all_gathers` bounds nothing yet; what prefetch
//! decides is when gathers happen and how many units are resident. `unshard` and `reduce` are the two places to hand over to a communication thread.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer::Buffer;
use super::group::RankContext;
use super::layout::FlatLayout;
use super::trace::TraceEvent;
use super::unit::{UnitPass, UnitState};
use crate::spec::settings::{BackwardPrefetch, DType, FsdpSettings, ShardingStrategy};
use crate::train::error::TrainError;
use crate::train::model::{Parameter, ParameterStore};

/// Where a parameter lives.
struct Home {
    unit: usize,
    /// Number among the unit's parameters.
    number: usize,
    range: Range<usize>,
    requires_grad: bool,
}

/// What all parts of one rank's engine share.
pub(super) struct Core {
    pub(super) context: RankContext,
    pub(super) layouts: Vec<FlatLayout>,
    pub(super) settings: FsdpSettings,
    units: Vec<Mutex<UnitState>>,
    homes: Vec<Home>,
    names: HashMap<String, usize>,
    unit_of_path: HashMap<String, usize>,
    pass: Mutex<Pass>,
    trace: Mutex<Option<Vec<TraceEvent>>>,
}

/// State of the pass as a whole.
#[derive(Debug, Default)]
struct Pass {
    synchronise: bool,
    /// Units in the order of their first forward, as the last pass saw it; empty before the first.
    known_order: Vec<usize>,
    /// The same, in the making.
    pre_forward: Vec<usize>,
    /// Units in the order in which their forward ended.
    post_forward: Vec<usize>,
    borrowed: Vec<usize>,
    /// A checkpointed block runs again: forward has promised its gradients already.
    recomputing: bool,
}

/// Ends the pass with `error`: unwinds without the panic hook to where the pass began.
pub(super) fn raise(error: TrainError) -> ! {
    std::panic::resume_unwind(Box::new(error))
}

fn or_raise<T>(result: Result<T, TrainError>) -> T {
    result.unwrap_or_else(|error| raise(error))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    pub(super) fn new(context: RankContext, layouts: Vec<FlatLayout>, settings: FsdpSettings) -> Self {
        let mut homes = Vec::new();
        let mut names = HashMap::new();
        for (unit, layout) in layouts.iter().enumerate() {
            for (number, placed) in layout.parameters.iter().enumerate() {
                names.insert(placed.info.name.clone(), homes.len());
                homes.push(Home { unit, number, range: placed.range.clone(), requires_grad: placed.requires_grad });
            }
        }
        // Units without parameters never act.
        let unit_of_path =
            layouts.iter().enumerate().filter(|(_, layout)| layout.numel > 0).map(|(unit, layout)| (layout.unit.clone(), unit)).collect();
        let units = layouts.iter().map(|_| Mutex::default()).collect();
        Self { context, layouts, settings, units, homes, names, unit_of_path, pass: Mutex::default(), trace: Mutex::default() }
    }

    pub(super) fn unit(&self, unit: usize) -> MutexGuard<'_, UnitState> {
        lock(&self.units[unit])
    }

    pub(super) fn unit_at(&self, path: &str) -> Option<usize> {
        self.unit_of_path.get(path).copied()
    }

    /// The handle of a parameter; `owner` is the name of its owner.
    pub(super) fn parameter(self: &Arc<Self>, owner: &str) -> Option<Parameter> {
        let index = *self.names.get(owner)?;
        let home = &self.homes[index];
        let shape = self.layouts[home.unit].parameters[home.number].info.shape.as_slice().into();
        Some(Parameter::new(self.clone(), index, shape, self.settings.mixed_precision.param_dtype))
    }

    fn strategy(&self) -> ShardingStrategy {
        self.settings.sharding_strategy
    }

    pub(super) fn is_sharded(&self) -> bool {
        self.strategy() != ShardingStrategy::NoShard
    }

    fn is_root(&self, unit: usize) -> bool {
        self.layouts[unit].unit.is_empty()
    }

    /// Switches the record of events on, or off and hands it over.
    pub(super) fn set_trace(&self, on: bool) -> Vec<TraceEvent> {
        let mut trace = lock(&self.trace);
        let events = trace.take().unwrap_or_default();
        *trace = on.then(Vec::new);
        events
    }

    pub(super) fn note(&self, event: impl FnOnce() -> TraceEvent) {
        if let Some(events) = &mut *lock(&self.trace) {
            events.push(event());
        }
    }

    fn note_collective(&self, operation: &'static str, unit: usize, dtype: DType) {
        self.note(|| TraceEvent::Collective {
            operation,
            full_numel: self.layouts[unit].padded_numel(),
            dtype,
            unit: self.layouts[unit].unit.clone(),
        });
    }

    // ------------------------------------------------------------------------------------------------ a pass

    pub(super) fn begin_pass(&self, synchronise: bool) {
        let mut pass = lock(&self.pass);
        pass.synchronise = synchronise;
        pass.pre_forward.clear();
        pass.post_forward.clear();
        pass.borrowed.clear();
        pass.recomputing = false;
        for unit in 0..self.units.len() {
            self.unit(unit).pass = UnitPass::default();
        }
    }

    /// Reduces what still waits for gradients that never came, and frees what is still gathered.
    pub(super) fn end_backward(&self) {
        for unit in (0..self.units.len()).rev() {
            let late = {
                let state = self.unit(unit);
                !state.pass.done && state.gradient.is_some()
            };
            if late {
                self.post_backward(unit);
            }
        }
        self.end_pass();
    }

    /// Frees what is still gathered, but for what `SHARD_GRAD_OP` keeps from one unsynchronised pass to the next.
    pub(super) fn end_pass(&self) {
        let mut pass = lock(&self.pass);
        if !pass.pre_forward.is_empty() {
            pass.known_order = std::mem::take(&mut pass.pre_forward);
        }
        if pass.synchronise || self.strategy() != ShardingStrategy::ShardGradOp {
            for unit in 0..self.units.len() {
                self.unit(unit).full = None;
            }
        }
    }

    /// Frees everything that a failed pass left.
    pub(super) fn abandon_pass(&self) {
        for unit in 0..self.units.len() {
            let mut state = self.unit(unit);
            state.full = None;
            state.gradient = None;
            state.filled.clear();
        }
    }

    // ------------------------------------------------------------------------------------------------ gather and free

    /// Makes the whole unit resident.
    fn unshard(&self, unit: usize) {
        let shard = {
            let state = self.unit(unit);
            if state.full.is_some() {
                return;
            }
            state.shard.clone()
        };
        let Some(shard) = shard else { raise(TrainError::Failed(format!("unit {} is used outside a pass", self.layouts[unit].unit))) };
        let dtype = self.settings.mixed_precision.param_dtype;
        // The low-precision copy of the shard, or the copy on the device of an offloaded one, lives only as long as the gather.
        let local = match &*shard {
            Buffer::F32(values) if dtype != DType::Fp32 || self.settings.cpu_offload => Arc::new(Buffer::from_f32(dtype, values)),
            _ => shard,
        };
        let full = if self.is_sharded() {
            self.note_collective("all_gather", unit, dtype);
            Arc::new(or_raise(self.context.group.all_gather(local)))
        } else {
            local
        };
        self.unit(unit).full = Some(full);
    }

    fn reshard(&self, unit: usize) {
        self.unit(unit).full = None;
    }

    // ------------------------------------------------------------------------------------------------ hooks

    /// A unit's module begins its forward.
    pub(super) fn pre_forward(&self, unit: usize, recompute: bool) {
        self.unshard(unit);
        self.unit(unit).pass.inside = true;
        if recompute {
            return;
        }
        let next = {
            let mut pass = lock(&self.pass);
            if !pass.pre_forward.contains(&unit) {
                pass.pre_forward.push(unit);
            }
            let place = pass.known_order.iter().position(|&known| known == unit);
            place.and_then(|place| pass.known_order.get(place + 1).copied())
        };
        if let Some(next) = next
            && self.settings.forward_prefetch
            && self.is_sharded()
            && self.unit(next).full.is_none()
        {
            self.unshard(next);
            self.unit(next).pass.behind = Some(unit);
        }
    }

    /// A checkpointed block begins, or ends, to run again.
    pub(super) fn set_recomputing(&self, recomputing: bool) {
        lock(&self.pass).recomputing = recomputing;
    }

    /// A unit's module ended its forward; `tracked` if backward will come to it.
    pub(super) fn post_forward(&self, unit: usize, recompute: bool, tracked: bool) {
        // PyTorch keeps the root gathered, since backward begins with it.
        if self.strategy() == ShardingStrategy::FullShard && !self.is_root(unit) {
            self.reshard(unit);
        }
        let mut state = self.unit(unit);
        state.pass.inside = false;
        state.pass.ran_pre_backward = false;
        state.pass.needs_pre_backward = tracked;
        drop(state);
        if !recompute {
            lock(&self.pass).post_forward.push(unit);
        }
    }

    /// Frees the units that a module used though they are not its own.
    pub(super) fn return_borrowed(&self) {
        let borrowed = std::mem::take(&mut lock(&self.pass).borrowed);
        for unit in borrowed {
            let mut state = self.unit(unit);
            state.pass.borrowed = false;
            if self.strategy() == ShardingStrategy::FullShard {
                state.full = None;
            }
        }
    }

    /// Backward reached the output of a unit's module.
    pub(super) fn pre_backward(&self, unit: usize) {
        {
            let mut state = self.unit(unit);
            if state.pass.ran_pre_backward {
                return;
            }
            state.pass.ran_pre_backward = true;
            state.pass.needs_pre_backward = false;
        }
        self.unshard(unit);
        if self.settings.backward_prefetch == BackwardPrefetch::BackwardPre {
            self.prefetch_in_backward(unit);
        }
        self.unit(unit).pass.prefetched = false;
    }

    /// Gathers the unit whose forward ended before this one's, if backward is still to come to it.
    fn prefetch_in_backward(&self, unit: usize) {
        let before = {
            let pass = lock(&self.pass);
            pass.post_forward.iter().rposition(|&known| known == unit).and_then(|place| place.checked_sub(1)).map(|place| pass.post_forward[place])
        };
        let Some(before) = before else { return };
        {
            let mut state = self.unit(before);
            if !state.pass.needs_pre_backward || state.pass.prefetched {
                return;
            }
            state.pass.prefetched = true;
        }
        self.unshard(before);
    }

    /// All gradients of a unit have arrived.
    fn complete(&self, unit: usize) {
        let (waiting, behind) = {
            let mut state = self.unit(unit);
            state.pass.complete = true;
            (std::mem::take(&mut state.pass.waiting), state.pass.behind)
        };
        for waiting in waiting {
            self.post_backward(waiting);
        }
        match behind {
            Some(other) if !self.unit(other).pass.complete => self.unit(other).pass.waiting.push(unit),
            _ => self.post_backward(unit),
        }
    }

    /// Frees a unit and reduces its gradient.
    fn post_backward(&self, unit: usize) {
        let synchronise = lock(&self.pass).synchronise;
        self.unit(unit).pass.done = true;
        if self.is_sharded() && (synchronise || self.strategy() == ShardingStrategy::FullShard) {
            self.reshard(unit);
        }
        if self.settings.backward_prefetch == BackwardPrefetch::BackwardPost {
            self.prefetch_in_backward(unit);
        }
        if synchronise {
            self.reduce(unit);
        }
    }

    /// Averages a unit's gradient over ranks and adds this rank's part to its shard's.
    fn reduce(&self, unit: usize) {
        let gradient = {
            let mut state = self.unit(unit);
            state.filled.clear();
            state.gradient.take()
        };
        let Some(mut gradient) = gradient else { return };
        let world_size = self.context.world_size;
        let dtype = self.settings.mixed_precision.reduce_dtype;
        if gradient.dtype() != dtype {
            gradient = gradient.converted(dtype);
        }
        // As PyTorch, the division is made in two halves, so that fp16 neither overflows in the sum nor loses small numbers before it.
        let before = predivide_factor(world_size);
        if world_size > 1 {
            gradient.divide(before as f32);
        }
        let reduced = if self.is_sharded() {
            self.note_collective("reduce_scatter", unit, dtype);
            or_raise(self.context.group.reduce_scatter(Arc::new(gradient)))
        } else if world_size > 1 {
            self.note_collective("all_reduce", unit, dtype);
            or_raise(self.context.group.all_reduce(Arc::new(gradient)))
        } else {
            gradient
        };
        let mut reduced = reduced;
        if world_size > 1 {
            reduced.divide(world_size as f32 / before as f32);
        }
        let mut state = self.unit(unit);
        state.reduced = Some(match state.reduced.take() {
            Some(mut sum) => {
                reduced.add_to(&mut sum);
                sum
            }
            None => self.in_shard_memory(|| reduced.into_f32(self.settings.cpu_offload)),
        });
    }

    /// Runs `work` so that what it allocates counts where shards live: on the device, or on the host where they are offloaded.
    pub(super) fn in_shard_memory<R>(&self, work: impl FnOnce() -> R) -> R {
        super::in_shard_memory(self.settings.cpu_offload, work)
    }
}

/// PyTorch's `_get_gradient_predivide_factor`: about the square root of the world size.
fn predivide_factor(world_size: usize) -> usize {
    let mut factor = 1;
    while world_size.is_multiple_of(factor) && world_size / factor > factor {
        factor *= 2;
    }
    factor
}

impl ParameterStore for Core {
    fn value(&self, index: usize) -> (Arc<Buffer>, Range<usize>) {
        let home = &self.homes[index];
        if self.unit(home.unit).full.is_none() {
            // Used outside its own module: a tied head under a policy that gives the embedding a unit of its own.
            self.unshard(home.unit);
            self.unit(home.unit).pass.borrowed = true;
            lock(&self.pass).borrowed.push(home.unit);
        }
        let full = self.unit(home.unit).full.clone();
        let Some(full) = full else { raise(TrainError::Failed("a unit was freed while in use".to_owned())) };
        (full, home.range.clone())
    }

    fn requires_grad(&self, index: usize) -> bool {
        self.homes[index].requires_grad
    }

    fn expect_gradient(&self, index: usize) {
        if !lock(&self.pass).recomputing {
            self.unit(self.homes[index].unit).pass.expected += 1;
        }
    }

    fn add_gradient(&self, index: usize, write: &mut dyn FnMut(&mut Buffer, Range<usize>, bool)) {
        let home = &self.homes[index];
        let layout = &self.layouts[home.unit];
        let complete = {
            let mut state = self.unit(home.unit);
            let state = &mut *state;
            let gradient = state.gradient.get_or_insert_with(|| Buffer::zeros(self.settings.mixed_precision.param_dtype, layout.padded_numel()));
            state.filled.resize(layout.parameters.len(), false);
            write(gradient, home.range.clone(), std::mem::replace(&mut state.filled[home.number], true));
            state.pass.arrived += 1;
            state.pass.arrived == state.pass.expected
        };
        self.return_borrowed();
        if complete {
            self.complete(home.unit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of PyTorch's formula.
    #[test]
    fn the_predivide_factor_is_pytorchs() {
        let factors: Vec<usize> = (1..=9).map(predivide_factor).collect();
        assert_eq!(factors, [1, 2, 2, 2, 2, 4, 2, 4, 2]);
    }
}
