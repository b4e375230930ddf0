//! The operations models are made of, forward and backward, on flex's tensors.
//!
//! Each is one node of Burn's autodiff graph. It reads weights through [`Parameter`] handles, in forward and again in backward, and hands their gradients
//! straight back to where they are kept: no node ever holds a weight, so whoever keeps the weights may free them between forward and backward.
//! What a node keeps for backward is in its own comment.

mod activation;
mod attention;
mod cross_entropy;
mod embedding;
mod layer_norm;
mod linear;
mod math;
mod matmul;
mod number;
mod rms_norm;
mod rotary;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use rayon::prelude::*;

pub use activation::{add, dropout};
pub use attention::{AttentionKind, Heads, causal_attention, grouped_query_attention};
pub use cross_entropy::{Loss, cross_entropy};
pub use embedding::embedding;
pub use layer_norm::layer_norm;
pub use linear::{LinearInput, WeightLayout, linear};
pub use number::Number;
pub use rms_norm::rms_norm;
pub use rotary::{RotaryFrequencies, rotary};

use crate::spec::settings::DType;

/// A tensor of the CPU backend, outside any graph.
pub(crate) type Array = FloatTensor<Flex>;
type Graph = Autodiff<Flex, NoCheckpointing>;

/// Runs `$body` with `$type` bound to the Rust type of `$dtype`.
macro_rules! with_number {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            $crate::spec::settings::DType::Fp32 => {
                type $type = f32;
                $body
            }
            $crate::spec::settings::DType::Fp16 => {
                type $type = half::f16;
                $body
            }
            $crate::spec::settings::DType::Bf16 => {
                type $type = half::bf16;
                $body
            }
        }
    };
}
pub(crate) use with_number;

/// A tensor of `array`, outside any graph.
pub(crate) fn tensor<const D: usize>(array: Array) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(array)
}

/// A new array of this shape.
fn new_array<T: Number>(values: Vec<T>, shape: impl Into<Vec<usize>>) -> Array {
    Array::from_data(TensorData::new(values, shape.into()))
}

/// The data type of an array.
pub(crate) fn dtype(array: &Array) -> DType {
    match array.dtype() {
        burn::tensor::DType::F16 => DType::Fp16,
        burn::tensor::DType::BF16 => DType::Bf16,
        _ => DType::Fp32,
    }
}

/// The numbers of a contiguous array.
fn numbers<T: Number>(array: &Array) -> &[T] {
    array.as_slice::<T>().expect("arrays of models are contiguous and of one data type")
}

/// The numbers of a contiguous array to be changed; a copy is made only if someone else holds them too.
fn numbers_mut<T: Number>(array: &mut Array) -> &mut [T] {
    let length = array.layout().num_elements();
    assert!(array.is_contiguous() && array.layout().start_offset() == 0, "arrays of models are whole");
    &mut array.storage_mut::<T>()[..length]
}

type BackwardFunction<const N: usize> = Box<dyn FnOnce(Array) -> [Option<Array>; N] + Send>;

/// What an operation does in backward; taken out when it runs, so that what it keeps is freed right after.
struct Slot<const N: usize>(Arc<Mutex<Option<BackwardFunction<N>>>>);

impl<const N: usize> Clone for Slot<N> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<const N: usize> fmt::Debug for Slot<N> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Slot")
    }
}

#[derive(Debug)]
struct Operation;

impl<const N: usize> Backward<Flex, N> for Operation {
    type State = Slot<N>;

    fn backward(self, ops: Ops<Slot<N>, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Flex>(&ops.node);
        let function = ops.state.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(function) = function else { return };
        for (parent, gradient) in ops.parents.into_iter().zip(function(gradient)) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<Flex>(parent.id, gradient);
            }
        }
    }
}

/// An operation's input as backward sees it: a node without its numbers.
pub(crate) struct Parent {
    node: Option<NodeGuard>,
    tracked: bool,
}

impl Parent {
    /// Whether backward will come through it.
    pub(crate) fn is_tracked(&self) -> bool {
        self.tracked
    }
}

/// Takes a tensor apart into its numbers and its node. Where no one else holds the numbers they may now be overwritten.
pub(crate) fn take<const D: usize>(tensor: Tensor<D>) -> (Array, Parent) {
    let tracked = tensor.is_autodiff() && tensor.is_tracked();
    let (array, node) = if tensor.is_autodiff() {
        let (array, node) = tensor.try_into_primitive::<Graph>().expect("models compute on the flex backend").into_parts();
        (array, Some(node))
    } else {
        (tensor.try_into_primitive::<Flex>().expect("models compute on the flex backend"), None)
    };
    (if array.is_contiguous() { array } else { array.to_contiguous() }, Parent { node, tracked })
}

/// An operation that was computed: its output, and what turns the output's gradient into those of the parents. Without a tracked parent it is the output alone
/// and `backward` is dropped.
pub(crate) fn record<const D: usize, const N: usize>(
    parents: [Parent; N],
    output: Array,
    backward: impl FnOnce(Array) -> [Option<Array>; N] + Send + 'static,
) -> Tensor<D> {
    if !parents.iter().any(Parent::is_tracked) {
        return tensor(output);
    }
    let nodes = parents.map(|parent| parent.node.unwrap_or_else(untracked_node));
    let prepared = Backward::<Flex, N>::prepare::<NoCheckpointing>(Operation, nodes).compute_bound().stateful();
    Tensor::from_primitive::<Graph>(match prepared {
        OpsKind::Tracked(prepared) => prepared.finish(Slot(Arc::new(Mutex::new(Some(Box::new(backward))))), output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    })
}

/// Stands for an input outside the graph among inputs inside it.
fn untracked_node() -> NodeGuard {
    tensor::<1>(new_array(vec![0.0f32], [1])).autodiff().try_into_primitive::<Graph>().expect("models compute on the flex backend").into_parts().1
}

/// Calls `each` for every row of `values`, `width` long, on all threads of the pool.
fn for_rows<T: Send>(values: &mut [T], width: usize, each: impl Fn(usize, &mut [T]) + Sync) {
    let threads = rayon::current_num_threads();
    if threads == 1 || values.len() < 16_384 {
        values.chunks_mut(width).enumerate().for_each(|(row, values)| each(row, values));
        return;
    }
    let rows = values.len() / width;
    let chunk = rows.div_ceil(threads * 4).max(1);
    values.par_chunks_mut(chunk * width).enumerate().for_each(|(index, values)| {
        values.chunks_mut(width).enumerate().for_each(|(row, values)| each(index * chunk + row, values));
    });
}

/// Runs `work` compiled for the widest vectors this machine has.
#[inline(always)]
fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}
