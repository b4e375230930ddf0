//! What the engine does around a model's modules: PyTorch's forward hooks, the hooks on their outputs, and activation checkpointing.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Device, Tensor};

use super::core::{Core, raise};
use super::trace::TraceEvent;
use crate::train::error::TrainError;
use crate::train::model::ops::{self, record, take};
use crate::train::model::{Model, Parameter, Scope, Sequences};

/// One forward pass.
#[derive(Clone)]
pub(super) struct PassScope {
    pub(super) core: Arc<Core>,
    pub(super) model: Arc<dyn Model>,
    /// Tracked where gradients are wanted.
    pub(super) anchor: Tensor<1>,
    /// Seed of dropout in this pass; `None` in evaluation.
    pub(super) dropout_seed: Option<u64>,
    /// Whether blocks are checkpointed.
    pub(super) checkpoint: bool,
    /// Whether this is a checkpointed block run again.
    pub(super) recompute: bool,
    /// The block whose forward ended last: its output is about to leave its module.
    pub(super) last_block: Arc<Mutex<Option<usize>>>,
}

impl PassScope {
    /// Calls `then` when backward reaches `output`, before anything that lies behind it.
    fn hook(output: Tensor<2>, then: impl FnOnce() + Send + 'static) -> Tensor<2> {
        let (array, parent) = take(output);
        record([parent], array, move |gradient| {
            then();
            [Some(gradient)]
        })
    }

    fn checkpointed_block(&self, index: usize, hidden: Tensor<2>, sequences: Sequences) -> Tensor<2> {
        let (input, parent) = take(hidden);
        let output = self.model.block(index, ops::tensor(input.clone()), sequences, self);
        // A tracked tensor kept in a node would keep the whole graph; blocks need no anchor.
        let anchor = Tensor::zeros([1], &Device::flex());
        let again = Self { anchor, checkpoint: false, recompute: true, ..self.clone() };
        record([parent], ops::take(output).0, move |gradient| {
            again.core.note(|| TraceEvent::Forward(index));
            let input = ops::tensor::<2>(input).autodiff().require_grad();
            again.core.set_recomputing(true);
            let (_, output) = take(again.model.block(index, input.clone(), sequences, &again));
            again.core.set_recomputing(false);
            // Backward begins at one element, so this node puts the known gradient in its place.
            let root: Tensor<1> = record([output], ops::take(Tensor::<1>::zeros([1], &Device::flex())).0, move |_| [Some(gradient)]);
            let gradients = root.backward();
            [input.grad(&gradients).map(|gradient| ops::take(gradient).0)]
        })
    }
}

impl Scope for PassScope {
    fn parameter(&self, name: &str) -> Parameter {
        let owner = self.model.modules().owner(name);
        self.core.parameter(owner).unwrap_or_else(|| raise(TrainError::Failed(format!("the model has no parameter {name}"))))
    }

    fn anchor(&self) -> Tensor<1> {
        self.anchor.clone()
    }

    fn enter(&self, path: &str) {
        if let Some(unit) = self.core.unit_at(path) {
            self.core.pre_forward(unit, self.recompute);
        }
    }

    fn leave(&self, path: &str, output: Tensor<2>) -> Tensor<2> {
        self.core.return_borrowed();
        let block = self.last_block.lock().unwrap_or_else(PoisonError::into_inner).take();
        let unit = self.core.unit_at(path);
        let tracked = output.is_autodiff() && output.is_tracked();
        if let Some(unit) = unit {
            self.core.post_forward(unit, self.recompute, tracked);
        }
        if !tracked || (unit.is_none() && block.is_none()) {
            return output;
        }
        let core = self.core.clone();
        // FSDP2's own hook lies inside the module, unless activation checkpointing lies around it.
        let unit_first = core.settings.fsdp_version == 2 && !self.checkpoint;
        Self::hook(output, move || {
            if let Some(unit) = unit.filter(|_| unit_first) {
                core.pre_backward(unit);
            }
            if let Some(block) = block {
                core.note(|| TraceEvent::Backward(block));
            }
            if let Some(unit) = unit.filter(|_| !unit_first) {
                core.pre_backward(unit);
            }
        })
    }

    fn block(&self, index: usize, hidden: Tensor<2>, sequences: Sequences) -> Tensor<2> {
        self.core.note(|| TraceEvent::Forward(index));
        let tracked = hidden.is_autodiff() && hidden.is_tracked();
        let output = if self.checkpoint && tracked {
            self.checkpointed_block(index, hidden, sequences)
        } else {
            self.model.block(index, hidden, sequences, self)
        };
        *self.last_block.lock().unwrap_or_else(PoisonError::into_inner) = Some(index);
        output
    }

    fn dropout_seed(&self, path: &str) -> Option<u64> {
        // FNV-1a, so that every place draws its own numbers.
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        self.dropout_seed.map(|seed| path.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, mix))
    }
}
