//! Rows of a table by index.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::{Number, new_array, record, take, with_number};
use crate::train::model::Parameter;

/// The rows `indices` of `table` `[entries, width]`: `[indices, width]`. Keeps the indices. `anchor` is a tracked leaf where gradients are wanted; its own
/// gradient is never made. The row `padding` learns nothing, as PyTorch's `padding_idx`.
pub fn embedding(anchor: &Tensor<1>, indices: Arc<[u32]>, table: &Parameter, padding: Option<u32>) -> Tensor<2> {
    let width = table.shape()[1];
    let output = with_number!(table.dtype(), T => {
        let value = table.value();
        let entries = value.numbers::<T>();
        let mut rows: Vec<T> = Vec::with_capacity(indices.len() * width);
        for &index in indices.iter() {
            rows.extend_from_slice(&entries[index as usize * width..(index as usize + 1) * width]);
        }
        new_array(rows, [indices.len(), width])
    });
    table.expect_gradient();
    let table = table.clone();
    record([take(anchor.clone()).1], output, move |gradient| {
        with_number!(table.dtype(), T => scatter::<T>(super::numbers(&gradient), &indices, width, &table, padding));
        [None]
    })
}

/// Adds each row of `gradient` to the table's row it came from.
fn scatter<T: Number>(gradient: &[T], indices: &[u32], width: usize, table: &Parameter, padding: Option<u32>) {
    table.add_gradient::<T>(|to, _| {
        for (&index, gradient) in indices.iter().zip(gradient.chunks(width)).filter(|(index, _)| Some(**index) != padding) {
            for (to, gradient) in to[index as usize * width..(index as usize + 1) * width].iter_mut().zip(gradient) {
                *to = T::store(to.load() + gradient.load());
            }
        }
    });
}
