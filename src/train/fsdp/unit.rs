//! The state of one unit on one rank: what of it is here right now.

use std::sync::Arc;

use super::buffer::Buffer;

/// What a unit is doing. Everything in it belongs to one rank's thread.
#[derive(Debug, Default)]
pub(super) struct UnitState {
    /// This rank's part of the f32 masters, during a pass.
    pub(super) shard: Option<Arc<Buffer>>,
    /// The whole flat parameter in the data type of computation, while it is gathered.
    pub(super) full: Option<Arc<Buffer>>,
    /// The whole flat gradient, from the first parameter's gradient until it is reduced.
    pub(super) gradient: Option<Buffer>,
    /// Which of the unit's parameters `gradient` has a value of; as long as the unit has parameters once there is a gradient.
    pub(super) filled: Vec<bool>,
    /// This rank's part of the reduced gradient, during a pass.
    pub(super) reduced: Option<Vec<f32>>,
    /// What belongs to one pass.
    pub(super) pass: UnitPass,
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
    /// Its module's forward is running.
    pub(super) inside: bool,
    /// It was gathered for someone outside its own module, a tied head.
    pub(super) borrowed: bool,
    /// Its module's output leads to the loss, so that backward will come to it.
    pub(super) needs_pre_backward: bool,
    /// Backward has reached its module's output.
    pub(super) ran_pre_backward: bool,
    /// It was gathered ahead, in backward.
    pub(super) prefetched: bool,
    /// The unit in whose pre-forward it was gathered ahead. PyTorch creates its views there, before that unit's operations, and so reduces its gradient only
    /// when those have run backward.
    pub(super) behind: Option<usize>,
    /// Units that wait for this one in that sense.
    pub(super) waiting: Vec<usize>,
}
