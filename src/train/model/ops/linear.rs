//! Linear layers.

use burn::tensor::Tensor;

use super::matmul::{Matrix, multiply};
use super::number::{change, wide};
use super::{Array, Number, for_rows, new_array, numbers, record, take, vectorised, with_number};
use crate::train::model::Parameter;

/// `x * weight + bias` with `weight` `[in, out]`: GPT-2's `Conv1D`. Keeps `x`.
pub fn linear(x: Tensor<2>, weight: &Parameter, bias: &Parameter) -> Tensor<2> {
    apply(x, weight, Some(bias), false)
}

/// `x * weight^T` with `weight` `[out, in]`: `nn.Linear` without bias. Keeps `x`.
pub fn linear_transposed(x: Tensor<2>, weight: &Parameter) -> Tensor<2> {
    apply(x, weight, None, true)
}

fn apply(x: Tensor<2>, weight: &Parameter, bias: Option<&Parameter>, transposed: bool) -> Tensor<2> {
    let (input, parent) = take(x);
    let output = with_number!(weight.dtype(), T => forward::<T>(&input, weight, bias, transposed));
    weight.expect_gradient();
    if let Some(bias) = bias {
        bias.expect_gradient();
    }
    let (weight, bias) = (weight.clone(), bias.cloned());
    let input_tracked = parent.is_tracked();
    record([parent], output, move |gradient| {
        [with_number!(weight.dtype(), T => backward::<T>(input, gradient, &weight, bias.as_ref(), transposed, input_tracked))]
    })
}

fn sizes(weight: &Parameter, transposed: bool) -> (usize, usize) {
    let shape = weight.shape();
    if transposed { (shape[1], shape[0]) } else { (shape[0], shape[1]) }
}

fn forward<T: Number>(input: &Array, weight: &Parameter, bias: Option<&Parameter>, transposed: bool) -> Array {
    let (inputs, outputs) = sizes(weight, transposed);
    let x = numbers::<T>(input);
    let rows = x.len() / inputs;
    let value = weight.value();
    let weights = Matrix::new(value.numbers::<T>(), weight.shape()[0], weight.shape()[1]);
    let weights = if transposed { weights.transposed() } else { weights };
    let mut y = vec![T::zeroed(); rows * outputs];
    if let Some(bias) = bias {
        let bias = bias.value();
        let bias = bias.numbers::<T>();
        if T::as_f32(bias).is_some() {
            // The product is added to the bias, which saves a pass over the output.
            for_rows(&mut y, outputs, |_, row| row.copy_from_slice(bias));
            multiply(&mut y, true, Matrix::new(x, rows, inputs), weights);
        } else {
            multiply(&mut y, false, Matrix::new(x, rows, inputs), weights);
            let mut room = Vec::new();
            let bias = wide(bias, &mut room);
            for_rows(&mut y, outputs, |_, row| change(row, |row| vectorised(|| row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias))));
        }
    } else {
        multiply(&mut y, false, Matrix::new(x, rows, inputs), weights);
    }
    new_array(y, [rows, outputs])
}

fn backward<T: Number>(
    input: Array,
    gradient: Array,
    weight: &Parameter,
    bias: Option<&Parameter>,
    transposed: bool,
    input_tracked: bool,
) -> Option<Array> {
    let (inputs, outputs) = sizes(weight, transposed);
    let (x, dy) = (numbers::<T>(&input), numbers::<T>(&gradient));
    let rows = x.len() / inputs;
    let dx = input_tracked.then(|| {
        let value = weight.value();
        let weights = Matrix::new(value.numbers::<T>(), weight.shape()[0], weight.shape()[1]);
        let mut dx = vec![T::zeroed(); rows * inputs];
        multiply(&mut dx, false, Matrix::new(dy, rows, outputs), if transposed { weights } else { weights.transposed() });
        new_array(dx, [rows, inputs])
    });
    if let Some(bias) = bias {
        bias.add_gradient::<T>(|to, accumulate| {
            let mut sums = vec![0.0f32; outputs];
            let mut room = Vec::new();
            for row in dy.chunks(outputs) {
                let row = wide(row, &mut room);
                vectorised(|| sums.iter_mut().zip(row).for_each(|(sum, dy)| *sum += dy));
            }
            to.iter_mut().zip(&sums).for_each(|(to, &sum)| *to = T::store(if accumulate { to.load() + sum } else { sum }));
        });
    }
    weight.add_gradient::<T>(|to, accumulate| {
        let (x, dy) = (Matrix::new(x, rows, inputs), Matrix::new(dy, rows, outputs));
        if transposed {
            multiply(to, accumulate, dy.transposed(), x);
        } else {
            multiply(to, accumulate, x.transposed(), dy);
        }
    });
    dx
}
