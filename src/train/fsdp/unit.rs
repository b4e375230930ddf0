//! The state of one unit on one rank: what of it is here right now.

use std::sync::Arc;

use super::buffer::Buffer;
use super::communicator::Work;

/// What a unit is doing. Everything in it belongs to one rank's thread.
#[derive(Debug, Default)]
pub(super) struct UnitState {
    /// This rank's part of the f32 masters, during a pass.
    pub(super) shard: Option<Arc<Buffer>>,
    /// The whole of the unit's parameters in the data type of computation.
    pub(super) full: Full,
    /// This rank's part of what a smaller group keeps from forward to backward.
    pub(super) kept: Option<Arc<Buffer>>,
    /// The whole gradient, from the first parameter's gradient until it is reduced.
    pub(super) gradient: Option<Buffer>,
    /// Which of the unit's parameters `gradient` has a value of; as long as the unit has parameters once there is a gradient.
    pub(super) filled: Vec<bool>,
    /// FSDP2: the sum of whole gradients that were not synchronised, in the data type of reduction.
    pub(super) unreduced: Option<Buffer>,
    /// The reduction in flight.
    pub(super) reducing: Option<Work<Reduction>>,
    /// This rank's part of the reduced gradient, during a pass.
    pub(super) reduced: Option<Vec<f32>>,
    /// What belongs to one pass.
    pub(super) pass: UnitPass,
}

/// Whether the whole of a unit's parameters is here.
#[derive(Debug, Default)]
pub(super) enum Full {
    /// It is not.
    #[default]
    Gone,
    /// Its gather was issued. The part that this rank gives is kept until the result is fetched, so that memory does not depend on when the gather ends.
    Gathering { work: Work<Buffer>, part: Arc<Buffer> },
    /// It is.
    Here(Arc<Buffer>),
}

/// What a reduction gives back. The whole gradient is freed when the result is fetched, so that memory does not depend on when the reduction ends.
#[derive(Debug)]
pub(super) struct Reduction {
    /// This rank's part.
    pub(super) part: Buffer,
    /// The whole, used up; `None` where `part` is it.
    pub(super) _whole: Option<Arc<Buffer>>,
}

/// The part of a unit's state that begins anew with every pass.
#[derive(Debug, Default)]
pub(super) struct UnitPass {
    /// Gradients that forward promised.
    pub(super) expected: usize,
    /// Gradients that backward brought.
    pub(super) arrived: usize,
    /// All promised gradients have arrived.
    pub(super) complete: bool,
    /// The unit was freed and its gradient reduced.
    pub(super) done: bool,
    /// Its module's output leads to the loss, so that backward will come to it.
    pub(super) needs_pre_backward: bool,
    /// Backward has reached its module's output.
    pub(super) ran_pre_backward: bool,
    /// It was gathered ahead, in backward.
    pub(super) prefetched: bool,
    /// The unit in whose pre-forward it was gathered ahead. PyTorch creates its views there, before that unit's operations, and so reduces its gradient only
    /// when those have run backward.
    pub(super) behind: Option<usize>,
    /// When its views were made, from 1; 0 before.
    pub(super) created: usize,
}
