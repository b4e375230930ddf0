//! Layer normalisation over the last dimension.

use burn::tensor::Tensor;

use super::number::{change, wide};
use super::{Array, Number, for_rows, new_array, numbers, record, take, vectorised, with_number};
use crate::train::model::Parameter;

/// `(x - mean) / sqrt(variance + epsilon) * weight + bias`, a row at a time, computed in f32. Keeps `x`, and mean and scale of each row.
pub fn layer_norm(x: Tensor<2>, weight: &Parameter, bias: &Parameter, epsilon: f32) -> Tensor<2> {
    let (input, parent) = take(x);
    let (output, statistics) = with_number!(weight.dtype(), T => forward::<T>(&input, weight, bias, epsilon));
    weight.expect_gradient();
    bias.expect_gradient();
    let (weight, bias) = (weight.clone(), bias.clone());
    record([parent], output, move |gradient| [Some(with_number!(weight.dtype(), T => backward::<T>(input, gradient, &statistics, &weight, &bias)))])
}

/// The normalised rows, and each row's mean and reciprocal standard deviation.
fn forward<T: Number>(input: &Array, weight: &Parameter, bias: &Parameter, epsilon: f32) -> (Array, Vec<[f32; 2]>) {
    let width = weight.shape()[0];
    let x = numbers::<T>(input);
    let (weight, bias) = (weight.value(), bias.value());
    let (mut weight_room, mut bias_room) = (Vec::new(), Vec::new());
    let (weight, bias) = (wide(weight.numbers::<T>(), &mut weight_room), wide(bias.numbers::<T>(), &mut bias_room));
    let mut statistics = vec![[0.0; 2]; x.len() / width];
    for_rows(&mut statistics, 1, |row, statistics| {
        let mut room = Vec::new();
        let x = wide(&x[row * width..(row + 1) * width], &mut room);
        statistics[0] = vectorised(|| {
            let mean = sum(x, |x| x) / width as f32;
            let variance = sum(x, |x| (x - mean) * (x - mean)) / width as f32;
            [mean, 1.0 / (variance + epsilon).sqrt()]
        });
    });
    let mut y = vec![T::zeroed(); x.len()];
    for_rows(&mut y, width, |row, y| {
        let mut room = Vec::new();
        let x = wide(&x[row * width..(row + 1) * width], &mut room);
        let [mean, scale] = statistics[row];
        change(y, |y| {
            vectorised(|| {
                for (((y, x), weight), bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                    *y = (x - mean) * scale * weight + bias;
                }
            });
        });
    });
    (new_array(y, [x.len() / width, width]), statistics)
}

/// The sum of `of` each number, in sixteen strands so that it can be vectorised.
#[inline(always)]
pub(super) fn sum(values: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let mut strands = [0.0f32; 16];
    let chunks = values.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (strand, &value) in strands.iter_mut().zip(chunk) {
            *strand += of(value);
        }
    }
    strands.iter().sum::<f32>() + rest.iter().map(|&value| of(value)).sum::<f32>()
}

fn backward<T: Number>(input: Array, gradient: Array, statistics: &[[f32; 2]], weight: &Parameter, bias: &Parameter) -> Array {
    let width = weight.shape()[0];
    let (x, dy) = (numbers::<T>(&input), numbers::<T>(&gradient));
    let value = weight.value();
    let mut weight_room = Vec::new();
    let weights = wide(value.numbers::<T>(), &mut weight_room);
    let mut dx = vec![T::zeroed(); x.len()];
    for_rows(&mut dx, width, |row, dx| {
        let (mut x_room, mut dy_room) = (Vec::new(), Vec::new());
        let (x, dy) = (wide(&x[row * width..(row + 1) * width], &mut x_room), wide(&dy[row * width..(row + 1) * width], &mut dy_room));
        change(dx, |dx| vectorised(|| backward_row(x, dy, weights, statistics[row], dx)));
    });
    drop(value);
    let (mut weight_sums, mut bias_sums) = (vec![0.0f32; width], vec![0.0f32; width]);
    let (mut x_room, mut dy_room) = (Vec::new(), Vec::new());
    for ((x, dy), &[mean, scale]) in x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(statistics) {
        let (x, dy) = (wide(x, &mut x_room), wide(dy, &mut dy_room));
        vectorised(|| {
            for (((weight, bias), x), dy) in weight_sums.iter_mut().zip(&mut bias_sums).zip(x).zip(dy) {
                *weight += dy * (x - mean) * scale;
                *bias += dy;
            }
        });
    }
    for (parameter, sums) in [(weight, &weight_sums), (bias, &bias_sums)] {
        parameter.add_gradient::<T>(|to, accumulate| {
            to.iter_mut().zip(sums).for_each(|(to, &sum)| *to = T::store(if accumulate { to.load() + sum } else { sum }));
        });
    }
    new_array(dx, [x.len() / width, width])
}

#[inline(always)]
fn backward_row(x: &[f32], dy: &[f32], weights: &[f32], [mean, scale]: [f32; 2], dx: &mut [f32]) {
    let width = x.len();
    for (((dx, x), dy), weight) in dx.iter_mut().zip(x).zip(dy).zip(weights) {
        // For now the gradient of the normalised number, times that number: its sum is needed.
        *dx = dy * weight * (x - mean) * scale;
    }
    let average_normal = sum(dx, |value| value) / width as f32;
    for ((dx, dy), weight) in dx.iter_mut().zip(dy).zip(weights) {
        *dx = dy * weight;
    }
    let average = sum(dx, |value| value) / width as f32;
    for (dx, x) in dx.iter_mut().zip(x) {
        *dx = (*dx - average - (x - mean) * scale * average_normal) * scale;
    }
}
