//! Operations on each element: sums, GELU, dropout.

use burn::tensor::Tensor;

use super::math::{dropout_factor, sigmoid};
use super::number::{change, wide};
use super::{Array, Number, dtype, for_rows, new_array, numbers, numbers_mut, record, take, vectorised, with_number};

/// `a + b`. Keeps nothing; the sum takes the place of `b` where nothing else needs it.
pub fn add(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    let (left, left_parent) = take(a);
    let (mut sum, right_parent) = take(b);
    with_number!(dtype(&left), T => {
        let left = numbers::<T>(&left);
        for_rows(numbers_mut::<T>(&mut sum), 1024, |chunk, sum| {
            let mut room = Vec::new();
            let left = wide(&left[chunk * 1024..chunk * 1024 + sum.len()], &mut room);
            change(sum, |sum| vectorised(|| sum.iter_mut().zip(left).for_each(|(sum, left)| *sum += left)));
        });
    });
    record([left_parent, right_parent], sum, |gradient| [Some(gradient.clone()), Some(gradient)])
}

/// GELU in its tanh form, GPT-2's `gelu_new`. Keeps `x`.
pub fn gelu_tanh(x: Tensor<2>) -> Tensor<2> {
    let (input, parent) = take(x);
    let output = with_number!(dtype(&input), T => map::<T>(&input, |x| x * sigmoid(2.0 * inner(x))));
    record([parent], output, move |mut gradient| {
        with_number!(dtype(&input), T => {
            let x = numbers::<T>(&input);
            for_rows(numbers_mut::<T>(&mut gradient), 1024, |chunk, gradient| {
                let mut room = Vec::new();
                let x = wide(&x[chunk * 1024..chunk * 1024 + gradient.len()], &mut room);
                change(gradient, |gradient| {
                    vectorised(|| {
                        for (gradient, &x) in gradient.iter_mut().zip(x) {
                            let gate = sigmoid(2.0 * inner(x));
                            // d(inner)/dx, twice.
                            let slope = 2.0 * SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x);
                            *gradient *= gate + x * gate * (1.0 - gate) * slope;
                        }
                    });
                });
            });
        });
        [Some(gradient)]
    })
}

const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

/// The argument of tanh in GELU; `(1 + tanh(u)) / 2` is `sigmoid(2 u)`.
#[inline(always)]
fn inner(x: f32) -> f32 {
    SQRT_2_OVER_PI * (x + CUBIC * x * x * x)
}

/// Zeroes each element with probability `p` and scales the others by `1 / (1 - p)`; the random numbers follow from `seed`. Keeps nothing.
pub fn dropout(x: Tensor<2>, p: f32, seed: u64) -> Tensor<2> {
    let (mut output, parent) = take(x);
    drop_out(&mut output, p, seed);
    record([parent], output, move |mut gradient| {
        drop_out(&mut gradient, p, seed);
        [Some(gradient)]
    })
}

fn drop_out(values: &mut Array, p: f32, seed: u64) {
    with_number!(dtype(values), T => for_rows(numbers_mut::<T>(values), 1024, |chunk, values| {
        change(values, |values| {
            vectorised(|| {
                for (index, value) in values.iter_mut().enumerate() {
                    *value *= dropout_factor(seed, (chunk * 1024 + index) as u64, p);
                }
            });
        });
    }));
}

fn map<T: Number>(input: &Array, f: impl Fn(f32) -> f32 + Sync) -> Array {
    let x = numbers::<T>(input);
    let mut y = vec![T::zeroed(); x.len()];
    for_rows(&mut y, 1024, |chunk, y| {
        let mut room = Vec::new();
        let x = wide(&x[chunk * 1024..chunk * 1024 + y.len()], &mut room);
        change(y, |y| vectorised(|| y.iter_mut().zip(x).for_each(|(y, &x)| *y = f(x))));
    });
    new_array(y, input.layout().shape().to_vec())
}
