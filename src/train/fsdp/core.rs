//! The life cycle of units: when each is gathered, freed and reduced. Follows PyTorch's `_runtime_utils.py` (FSDP1) and `_fsdp_param_group.py` (FSDP2) hook
//! by hook.
//!
//! Collectives are issued to the rank's communication thread; the rank waits for a gather when it first reads a parameter, and for a reduction when it issues
//! the next one. Buffers are allocated and freed by the rank's own thread at these points, so that what it holds does not depend on how fast others are.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer::Buffer;
use super::communicator::Progress;
use super::layout::{Cut, FlatLayout, is_within};
use super::mesh::{DeviceMesh, Reshard};
use super::ranks::RankContext;
use super::trace::TraceEvent;
use super::unit::{Full, Reduction, UnitPass, UnitState};
use crate::spec::settings::{BackwardPrefetch, DType, FsdpSettings};
use crate::train::error::TrainError;
use crate::train::model::{Parameter, ParameterStore};

/// Gathers in flight with `limit_all_gathers`, as PyTorch's `_FreeEventQueue`.
const MOST_GATHERS_IN_FLIGHT: usize = 2;

/// Where a parameter lives.
struct Home {
    unit: usize,
    /// Number among the unit's parameters.
    number: usize,
    range: Range<usize>,
    /// Where in the whole gradient; `None` if it is frozen.
    gradient: Option<Range<usize>>,
}

/// What all parts of one rank's engine share.
pub(super) struct Core {
    pub(super) context: RankContext,
    pub(super) mesh: DeviceMesh,
    pub(super) layouts: Vec<FlatLayout>,
    pub(super) settings: FsdpSettings,
    units: Vec<Mutex<UnitState>>,
    /// Units inside each unit's module.
    inside: Vec<Vec<usize>>,
    homes: Vec<Home>,
    names: HashMap<String, usize>,
    unit_of_path: HashMap<String, usize>,
    pass: Mutex<Pass>,
    trace: Mutex<Option<Vec<TraceEvent>>>,
}

/// State of the pass as a whole.
#[derive(Default)]
struct Pass {
    synchronise: bool,
    /// Units in the order of their first forward, as the last pass saw it; empty before the first.
    known_order: Vec<usize>,
    /// The same, in the making.
    pre_forward: Vec<usize>,
    /// Units in the order in which their forward ended.
    post_forward: Vec<usize>,
    borrowed: Vec<usize>,
    /// Units all of whose gradients have arrived and which wait for others.
    complete: Vec<usize>,
    /// Units whose views were made.
    created: usize,
    /// A checkpointed block runs again: forward has promised its gradients already.
    recomputing: bool,
    /// Gathers that were issued, the oldest first, but for those that are known to have ended.
    gathers: VecDeque<Arc<dyn Progress>>,
    /// Most of them at a time.
    most_gathers: usize,
    /// The unit whose gradient is being reduced.
    reducing: Option<usize>,
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
    pub(super) fn new(context: RankContext, mesh: DeviceMesh, layouts: Vec<FlatLayout>, settings: FsdpSettings) -> Self {
        let mut homes = Vec::new();
        let mut names = HashMap::new();
        for (unit, layout) in layouts.iter().enumerate() {
            for (number, placed) in layout.parameters.iter().enumerate() {
                names.insert(placed.info.name.clone(), homes.len());
                homes.push(Home { unit, number, range: placed.range.clone(), gradient: placed.gradient.clone() });
            }
        }
        // Units without parameters never act.
        let unit_of_path =
            layouts.iter().enumerate().filter(|(_, layout)| layout.numel > 0).map(|(unit, layout)| (layout.unit.clone(), unit)).collect();
        let units = layouts.iter().map(|_| Mutex::default()).collect();
        let is_inside = |inner: usize, outer: usize| inner != outer && is_within(&layouts[inner].unit, &layouts[outer].unit);
        let inside = (0..layouts.len()).map(|outer| (0..layouts.len()).filter(|inner| is_inside(*inner, outer)).collect()).collect();
        Self { context, mesh, layouts, settings, units, inside, homes, names, unit_of_path, pass: Mutex::default(), trace: Mutex::default() }
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

    fn is_version_2(&self) -> bool {
        self.settings.fsdp_version == 2
    }

    pub(super) fn is_sharded(&self) -> bool {
        self.mesh.shard_group.is_some()
    }

    /// Whether units are freed when they have done their part, rather than kept for the next pass: FSDP1's `SHARD_GRAD_OP` keeps them between passes that are
    /// not synchronised.
    fn frees_after_backward(&self, synchronise: bool) -> bool {
        synchronise || self.is_version_2() || self.mesh.reshard != Reshard::Not
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

    fn note_collective(&self, operation: &'static str, unit: usize, full_numel: usize, dtype: DType) {
        self.note(|| TraceEvent::Collective { operation, full_numel, dtype, unit: self.layouts[unit].unit.clone() });
    }

    // ------------------------------------------------------------------------------------------------ a pass

    pub(super) fn begin_pass(&self, synchronise: bool) {
        let mut pass = lock(&self.pass);
        pass.synchronise = synchronise;
        pass.pre_forward.clear();
        pass.post_forward.clear();
        pass.borrowed.clear();
        pass.complete.clear();
        pass.created = 0;
        pass.recomputing = false;
        for unit in 0..self.units.len() {
            self.unit(unit).pass = UnitPass::default();
        }
    }

    /// Reduces what still waits for gradients that never came, fetches what is being reduced, and frees what is still gathered.
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
        self.finish_reduction();
        self.end_pass();
    }

    /// Frees what is still gathered, but for what is kept from one unsynchronised pass to the next.
    pub(super) fn end_pass(&self) {
        let synchronise = {
            let mut pass = lock(&self.pass);
            if !pass.pre_forward.is_empty() {
                pass.known_order = std::mem::take(&mut pass.pre_forward);
            }
            pass.synchronise
        };
        for unit in 0..self.units.len() {
            if self.frees_after_backward(synchronise) || !self.is_sharded() {
                self.free(unit);
            } else {
                self.fetch(unit);
            }
        }
    }

    /// Frees everything that a failed pass left.
    pub(super) fn abandon_pass(&self) {
        let mut pass = lock(&self.pass);
        pass.gathers.clear();
        pass.reducing = None;
        for unit in 0..self.units.len() {
            let mut state = self.unit(unit);
            *state = UnitState { shard: state.shard.take(), reduced: state.reduced.take(), ..UnitState::default() };
        }
    }

    // ------------------------------------------------------------------------------------------------ gather and free

    /// Issues the gather of a unit that is not here.
    fn unshard(&self, unit: usize) {
        let dtype = self.settings.mixed_precision.param_dtype;
        let layout = &self.layouts[unit];
        let (part, kept) = {
            let state = self.unit(unit);
            if !matches!(state.full, Full::Gone) {
                return;
            }
            (state.kept.clone().or_else(|| state.shard.clone()), state.kept.is_some())
        };
        let Some(part) = part else { raise(TrainError::Failed(format!("unit \"{}\" is used outside a pass", layout.unit))) };
        // The low-precision copy of the shard, or the copy on the device of an offloaded one, lives only as long as the gather.
        let part = match &*part {
            Buffer::F32(values) if !kept && (dtype != DType::Fp32 || self.settings.cpu_offload) => Arc::new(Buffer::from_f32(dtype, values)),
            _ => part,
        };
        let group = if kept { &self.mesh.post_forward_group } else { &self.mesh.shard_group };
        let Some(group) = group.clone() else {
            self.unit(unit).full = Full::Here(part);
            return;
        };
        let cut = if kept { Cut::even(layout.cut.full_numel, group.world_size()) } else { layout.cut.clone() };
        self.note_collective("all_gather", unit, cut.padded_numel(), dtype);
        let room = Buffer::with_capacity(dtype, cut.full_numel);
        if self.settings.limit_all_gathers {
            self.wait_for_gathers(MOST_GATHERS_IN_FLIGHT - 1);
        }
        let given = part.clone();
        let work = self.context.communicator.issue(move || group.all_gather(room, given, &cut));
        {
            let mut pass = lock(&self.pass);
            pass.gathers.retain(|gather| !gather.is_done());
            pass.gathers.push_back(work.progress());
            pass.most_gathers = pass.most_gathers.max(pass.gathers.len());
        }
        self.unit(unit).full = Full::Gathering { work, part };
    }

    /// Most gathers that were ever in flight.
    pub(super) fn most_gathers_in_flight(&self) -> usize {
        lock(&self.pass).most_gathers
    }

    /// Waits until at most `most` gathers are in flight.
    fn wait_for_gathers(&self, most: usize) {
        loop {
            let oldest = {
                let mut pass = lock(&self.pass);
                pass.gathers.retain(|gather| !gather.is_done());
                if pass.gathers.len() <= most {
                    return;
                }
                pass.gathers.front().cloned()
            };
            if let Some(oldest) = oldest {
                oldest.wait_until_done();
            }
        }
    }

    /// Waits for a unit's gather, if it was issued.
    fn fetch(&self, unit: usize) -> Option<Arc<Buffer>> {
        let mut state = self.unit(unit);
        match std::mem::take(&mut state.full) {
            Full::Gone => None,
            Full::Here(full) => {
                state.full = Full::Here(full.clone());
                Some(full)
            }
            Full::Gathering { work, part } => {
                drop(state);
                let full = Arc::new(or_raise(work.wait()));
                drop(part);
                let mut state = self.unit(unit);
                state.kept = None;
                state.full = Full::Here(full.clone());
                Some(full)
            }
        }
    }

    /// Frees a unit.
    fn free(&self, unit: usize) {
        drop(self.fetch(unit));
        let mut state = self.unit(unit);
        state.full = Full::Gone;
        state.kept = None;
    }

    /// Does with a gathered unit what is due after its forward.
    fn reshard_after_forward(&self, unit: usize) {
        // FSDP1 keeps the root gathered, since backward begins with it.
        let root = !self.is_version_2() && self.layouts[unit].unit.is_empty();
        match self.mesh.reshard {
            _ if root => {}
            Reshard::Not => {}
            Reshard::ToShards => self.free(unit),
            Reshard::ToRanks(ranks) => {
                let Some(full) = self.fetch(unit) else { return };
                let piece = Cut::even(full.len(), ranks).pieces[self.mesh.shard_rank % ranks][0].full.clone();
                let end = piece.end.min(full.len());
                let mut part = Buffer::with_capacity(full.dtype(), piece.len());
                or_raise(part.extend_from(&full, piece.start.min(end)..end));
                part.extend_zeros(piece.len() - part.len());
                drop(full);
                self.free(unit);
                self.unit(unit).kept = Some(Arc::new(part));
            }
        }
    }

    // ------------------------------------------------------------------------------------------------ hooks

    /// A unit's module begins its forward.
    pub(super) fn pre_forward(&self, unit: usize, recompute: bool) {
        self.unshard(unit);
        if recompute {
            return;
        }
        self.create_views(unit);
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
            && matches!(self.unit(next).full, Full::Gone)
        {
            self.unshard(next);
            self.create_views(next);
            self.unit(next).pass.behind = Some(unit);
        }
    }

    /// A unit's parameters become views of the gathered buffer, if they are not: the order of this is the order of backward.
    fn create_views(&self, unit: usize) {
        let created = {
            let mut pass = lock(&self.pass);
            pass.created += 1;
            pass.created
        };
        let state = &mut self.unit(unit).pass;
        if state.created == 0 {
            state.created = created;
        }
    }

    /// A checkpointed block begins, or ends, to run again.
    pub(super) fn set_recomputing(&self, recomputing: bool) {
        lock(&self.pass).recomputing = recomputing;
    }

    /// A unit's module ended its forward; `tracked` if backward will come to it.
    pub(super) fn post_forward(&self, unit: usize, recompute: bool, tracked: bool) {
        // FSDP2 leaves alone what a checkpointed block gathers when it runs again: its backward follows.
        if !(recompute && self.is_version_2()) {
            self.reshard_after_forward(unit);
        }
        let mut state = self.unit(unit);
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
            self.reshard_after_forward(unit);
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
        self.free_frozen(unit);
        self.unshard(unit);
        if self.is_version_2() || self.settings.backward_prefetch == BackwardPrefetch::BackwardPre {
            self.prefetch_in_backward(unit);
        }
        self.unit(unit).pass.prefetched = false;
    }

    /// Frees the units that backward has left behind and that wait for no gradient, being frozen, now that it has come to `reached`. (PyTorch hooks their
    /// inputs for this.)
    fn free_frozen(&self, reached: usize) {
        for unit in (0..self.units.len()).filter(|unit| !self.layouts[*unit].is_trained() && self.is_sharded()) {
            let left = self.unit(unit).pass.ran_pre_backward && !is_within(&self.layouts[reached].unit, &self.layouts[unit].unit);
            if left {
                self.free(unit);
            }
        }
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

    /// All gradients of a unit have arrived: it is done with, and so may others be that waited for it.
    fn complete(&self, unit: usize) {
        self.unit(unit).pass.complete = true;
        lock(&self.pass).complete.push(unit);
        loop {
            let complete = lock(&self.pass).complete.clone();
            // Autograd runs what was made last first.
            let Some(next) = complete.into_iter().filter(|unit| self.is_left(*unit)).max_by_key(|unit| self.unit(*unit).pass.created) else { return };
            lock(&self.pass).complete.retain(|unit| *unit != next);
            self.post_backward(next);
        }
    }

    /// Whether backward has left all operations that were made after a unit's views: those of the units inside its module, and those of the module in whose
    /// pre-forward it was gathered ahead.
    fn is_left(&self, unit: usize) -> bool {
        let behind = self.unit(unit).pass.behind;
        self.inside[unit].iter().copied().chain(behind).all(|other| {
            let pass = &self.unit(other).pass;
            pass.complete || pass.expected == 0
        })
    }

    /// Frees a unit and reduces its gradient.
    fn post_backward(&self, unit: usize) {
        let synchronise = lock(&self.pass).synchronise;
        self.unit(unit).pass.done = true;
        if self.is_sharded() && self.frees_after_backward(synchronise) {
            self.free(unit);
        }
        if !self.is_version_2() && self.settings.backward_prefetch == BackwardPrefetch::BackwardPost {
            self.prefetch_in_backward(unit);
        }
        if synchronise {
            self.reduce(unit);
        } else if self.is_version_2() {
            self.put_off(unit);
        }
    }

    /// Adds a unit's gradient, which is not reduced now, to those put off before (FSDP2; FSDP1 goes on in the data type of computation).
    fn put_off(&self, unit: usize) {
        let mut state = self.unit(unit);
        state.filled.clear();
        let Some(gradient) = state.gradient.take() else { return };
        state.unreduced = Some(self.with_put_off(state.unreduced.take(), gradient));
    }

    fn with_put_off(&self, put_off: Option<Buffer>, gradient: Buffer) -> Buffer {
        let dtype = self.settings.mixed_precision.reduce_dtype;
        let mut gradient = if gradient.dtype() == dtype { gradient } else { gradient.converted(dtype) };
        if let Some(put_off) = put_off {
            or_raise(gradient.add(0, &put_off, 0..put_off.len()));
        }
        gradient
    }

    /// Issues the reduction of a unit's gradient: its average over ranks, of which this rank's part is added to its shard's.
    fn reduce(&self, unit: usize) {
        let gradient = {
            let mut state = self.unit(unit);
            state.filled.clear();
            let put_off = state.unreduced.take();
            match state.gradient.take() {
                Some(gradient) => Some(self.with_put_off(put_off, gradient)),
                None => put_off,
            }
        };
        let Some(gradient) = gradient else { return };
        // One whole gradient may wait to be sent while the next one is computed, not more.
        self.finish_reduction();
        let world_size = self.context.world_size;
        if world_size == 1 {
            self.add_reduced(unit, gradient);
            return;
        }
        let (dtype, layout) = (gradient.dtype(), &self.layouts[unit]);
        let (before, after) = self.divisors(dtype);
        let (shard_group, replicate_group) = (self.mesh.shard_group.clone(), self.mesh.replicate_group.clone());
        let cut = layout.gradient_cut.clone();
        let part_numel = cut.shard_numel[self.mesh.shard_rank];
        if shard_group.is_some() {
            self.note_collective("reduce_scatter", unit, cut.padded_numel(), dtype);
        }
        if replicate_group.is_some() {
            self.note_collective("all_reduce", unit, part_numel, dtype);
        }
        let room = shard_group.as_ref().map(|_| Buffer::with_capacity(dtype, part_numel));
        let work = self.context.communicator.issue(move || {
            let mut gradient = gradient;
            gradient.divide(before);
            let (mut part, whole) = match shard_group.zip(room) {
                Some((group, room)) => {
                    let whole = Arc::new(gradient);
                    (group.reduce_scatter(room, whole.clone(), &cut)?, Some(whole))
                }
                None => (gradient, None),
            };
            if let Some(group) = replicate_group {
                part = group.all_reduce(part)?;
            }
            part.divide(after);
            Ok(Reduction { part, _whole: whole })
        });
        self.unit(unit).reducing = Some(work);
        lock(&self.pass).reducing = Some(unit);
    }

    /// What gradients are divided by before and after they are summed over ranks.
    fn divisors(&self, dtype: DType) -> (f32, f32) {
        let world_size = self.context.world_size;
        // FSDP2 has NCCL take the mean where nothing can overflow.
        let before = if self.is_version_2() && dtype != DType::Fp16 { 1 } else { predivide_factor(world_size) };
        (before as f32, world_size as f32 / before as f32)
    }

    /// Waits for the reduction in flight and adds up its result.
    fn finish_reduction(&self) {
        let Some(unit) = lock(&self.pass).reducing.take() else { return };
        let Some(work) = self.unit(unit).reducing.take() else { return };
        let Reduction { part, .. } = or_raise(work.wait());
        self.add_reduced(unit, part);
    }

    fn add_reduced(&self, unit: usize, part: Buffer) {
        let mut state = self.unit(unit);
        state.reduced = Some(match state.reduced.take() {
            Some(mut sum) => {
                part.add_to(&mut sum);
                sum
            }
            None => self.in_shard_memory(|| part.into_f32(self.settings.cpu_offload)),
        });
    }

    /// Runs `work` so that what it allocates counts where shards live: on the device, or on the host where they are offloaded.
    pub(super) fn in_shard_memory<R>(&self, work: impl FnOnce() -> R) -> R {
        super::in_shard_memory(self.settings.cpu_offload, work)
    }
}

/// PyTorch's `_get_gradient_predivide_factor`: about the square root of the world size. The division is made in two halves so that fp16 neither overflows in
/// the sum nor loses small numbers before it.
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
        let full = self.fetch(home.unit).or_else(|| {
            // Used outside its own module: a tied head under a policy that gives the embedding a unit of its own.
            self.unshard(home.unit);
            lock(&self.pass).borrowed.push(home.unit);
            self.fetch(home.unit)
        });
        let Some(full) = full else { raise(TrainError::Failed("a unit was freed while in use".to_owned())) };
        (full, home.range.clone())
    }

    fn requires_grad(&self, index: usize) -> bool {
        self.homes[index].gradient.is_some()
    }

    fn expect_gradient(&self, index: usize) {
        if !lock(&self.pass).recomputing {
            self.unit(self.homes[index].unit).pass.expected += 1;
        }
    }

    fn add_gradient(&self, index: usize, write: &mut dyn FnMut(&mut Buffer, Range<usize>, bool)) {
        let home = &self.homes[index];
        let Some(range) = home.gradient.clone() else { return };
        let layout = &self.layouts[home.unit];
        let complete = {
            let mut state = self.unit(home.unit);
            let state = &mut *state;
            let gradient =
                state.gradient.get_or_insert_with(|| Buffer::zeros(self.settings.mixed_precision.param_dtype, layout.gradient_cut.full_numel));
            state.filled.resize(layout.parameters.len(), false);
            write(gradient, range, std::mem::replace(&mut state.filled[home.number], true));
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
