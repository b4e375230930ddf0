//! Layer normalisation over the last dimension.

use burn::tensor::Tensor;

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
    let (weight, bias) = (weight.numbers::<T>(), bias.numbers::<T>());
    let mut statistics = vec![[0.0; 2]; x.len() / width];
    for_rows(&mut statistics, 1, |row, statistics| {
        let x = &x[row * width..(row + 1) * width];
        statistics[0] = vectorised(|| {
            let mean = sum(x, |x| x) / width as f32;
            let variance = sum(x, |x| (x - mean) * (x - mean)) / width as f32;
            [mean, 1.0 / (variance + epsilon).sqrt()]
        });
    });
    let mut y = vec![T::zeroed(); x.len()];
    for_rows(&mut y, width, |row, y| {
        let x = &x[row * width..(row + 1) * width];
        let [mean, scale] = statistics[row];
        vectorised(|| {
            for (((y, x), weight), bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                *y = T::store((x.load() - mean) * scale * weight.load() + bias.load());
            }
        });
    });
    (new_array(y, [x.len() / width, width]), statistics)
}

/// The sum of `of` each number, in eight strands so that it can be vectorised.
#[inline(always)]
fn sum<T: Number>(values: &[T], of: impl Fn(f32) -> f32) -> f32 {
    let mut strands = [0.0f32; 16];
    let chunks = values.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (strand, value) in strands.iter_mut().zip(chunk) {
            *strand += of(value.load());
        }
    }
    strands.iter().sum::<f32>() + rest.iter().map(|value| of(value.load())).sum::<f32>()
}

fn backward<T: Number>(input: Array, gradient: Array, statistics: &[[f32; 2]], weight: &Parameter, bias: &Parameter) -> Array {
    let width = weight.shape()[0];
    let (x, dy) = (numbers::<T>(&input), numbers::<T>(&gradient));
    let value = weight.value();
    let weights = value.numbers::<T>();
    let mut dx = vec![T::zeroed(); x.len()];
    for_rows(&mut dx, width, |row, dx| {
        let (x, dy) = (&x[row * width..(row + 1) * width], &dy[row * width..(row + 1) * width]);
        let [mean, scale] = statistics[row];
        vectorised(|| {
            let (mut sum, mut sum_normal) = (0.0f32, 0.0f32);
            let mut strands = [[0.0f32; 2]; 16];
            let whole = width / 16 * 16;
            for start in (0..whole).step_by(16) {
                for (lane, strand) in strands.iter_mut().enumerate() {
                    let index = start + lane;
                    let g = dy[index].load() * weights[index].load();
                    strand[0] += g;
                    strand[1] += g * (x[index].load() - mean) * scale;
                }
            }
            for index in whole..width {
                let g = dy[index].load() * weights[index].load();
                sum += g;
                sum_normal += g * (x[index].load() - mean) * scale;
            }
            for strand in strands {
                sum += strand[0];
                sum_normal += strand[1];
            }
            let (average, average_normal) = (sum / width as f32, sum_normal / width as f32);
            for (((dx, x), dy), weight) in dx.iter_mut().zip(x).zip(dy).zip(weights) {
                let normal = (x.load() - mean) * scale;
                *dx = T::store((dy.load() * weight.load() - average - normal * average_normal) * scale);
            }
        });
    });
    drop(value);
    let (mut weight_sums, mut bias_sums) = (vec![0.0f32; width], vec![0.0f32; width]);
    vectorised(|| {
        for ((x, dy), [mean, scale]) in x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(statistics) {
            for (((weight, bias), x), dy) in weight_sums.iter_mut().zip(&mut bias_sums).zip(x).zip(dy) {
                *weight += dy.load() * (x.load() - mean) * scale;
                *bias += dy.load();
            }
        }
    });
    for (parameter, sums) in [(weight, &weight_sums), (bias, &bias_sums)] {
        parameter.add_gradient::<T>(|to, accumulate| {
            to.iter_mut().zip(sums).for_each(|(to, &sum)| *to = T::store(if accumulate { to.load() + sum } else { sum }));
        });
    }
    new_array(dx, [x.len() / width, width])
}
