//! Root-mean-square normalisation over the last dimension.

use burn::tensor::Tensor;

use super::layer_norm::sum;
use super::number::{change, wide};
use super::{Array, Number, for_rows, new_array, numbers, record, take, vectorised, with_number};
use crate::train::model::Parameter;

/// `x / sqrt(mean(x^2) + epsilon) * weight`, a row at a time, computed in f32. Keeps `x`, and the scale of each row.
pub fn rms_norm(x: Tensor<2>, weight: &Parameter, epsilon: f32) -> Tensor<2> {
    let (input, parent) = take(x);
    let (output, scales) = with_number!(weight.dtype(), T => forward::<T>(&input, weight, epsilon));
    weight.expect_gradient();
    let weight = weight.clone();
    record([parent], output, move |gradient| [Some(with_number!(weight.dtype(), T => backward::<T>(&input, &gradient, &scales, &weight)))])
}

/// The normalised rows, and what each was multiplied by.
fn forward<T: Number>(input: &Array, weight: &Parameter, epsilon: f32) -> (Array, Vec<f32>) {
    let width = weight.shape()[0];
    let x = numbers::<T>(input);
    let value = weight.value();
    let mut room = Vec::new();
    let weights = wide(value.numbers::<T>(), &mut room);
    let mut scales = vec![0.0; x.len() / width];
    for_rows(&mut scales, 1, |row, scale| {
        let mut room = Vec::new();
        let x = wide(&x[row * width..(row + 1) * width], &mut room);
        let mean = vectorised(|| sum(x, |x| x * x)) / width as f32;
        scale[0] = 1.0 / (mean + epsilon).sqrt();
    });
    let mut y = vec![T::zeroed(); x.len()];
    for_rows(&mut y, width, |row, y| {
        let mut room = Vec::new();
        let x = wide(&x[row * width..(row + 1) * width], &mut room);
        let scale = scales[row];
        change(y, |y| vectorised(|| y.iter_mut().zip(x).zip(weights).for_each(|((y, x), weight)| *y = x * scale * weight)));
    });
    (new_array(y, [x.len() / width, width]), scales)
}

fn backward<T: Number>(input: &Array, gradient: &Array, scales: &[f32], weight: &Parameter) -> Array {
    let width = weight.shape()[0];
    let (x, dy) = (numbers::<T>(input), numbers::<T>(gradient));
    let value = weight.value();
    let mut room = Vec::new();
    let weights = wide(value.numbers::<T>(), &mut room);
    let mut dx = vec![T::zeroed(); x.len()];
    for_rows(&mut dx, width, |row, dx| {
        let (mut x_room, mut dy_room) = (Vec::new(), Vec::new());
        let (x, dy) = (wide(&x[row * width..(row + 1) * width], &mut x_room), wide(&dy[row * width..(row + 1) * width], &mut dy_room));
        change(dx, |dx| vectorised(|| backward_row(x, dy, weights, scales[row], dx)));
    });
    drop(value);
    let mut sums = vec![0.0f32; width];
    let (mut x_room, mut dy_room) = (Vec::new(), Vec::new());
    for ((x, dy), &scale) in x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(scales) {
        let (x, dy) = (wide(x, &mut x_room), wide(dy, &mut dy_room));
        vectorised(|| sums.iter_mut().zip(x).zip(dy).for_each(|((sum, x), dy)| *sum += dy * x * scale));
    }
    weight.add_gradient::<T>(|to, accumulate| {
        to.iter_mut().zip(&sums).for_each(|(to, &sum)| *to = T::store(if accumulate { to.load() + sum } else { sum }));
    });
    new_array(dx, [x.len() / width, width])
}

#[inline(always)]
fn backward_row(x: &[f32], dy: &[f32], weights: &[f32], scale: f32, dx: &mut [f32]) {
    for (((dx, x), dy), weight) in dx.iter_mut().zip(x).zip(dy).zip(weights) {
        // For now the gradient of the normalised number, times that number: its mean is needed.
        *dx = dy * weight * x * scale;
    }
    let average = sum(dx, |value| value) / x.len() as f32;
    for (((dx, x), dy), weight) in dx.iter_mut().zip(x).zip(dy).zip(weights) {
        *dx = (dy * weight - x * scale * average) * scale;
    }
}
