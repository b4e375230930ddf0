//! Operations on each element: sums, activations, dropout.

use burn::tensor::Tensor;

use super::math::{dropout_factor, exp, normal_cdf, sigmoid};
use super::number::{change, wide};
use super::{Array, Number, dtype, for_rows, numbers, numbers_mut, record, take, vectorised, with_number};
use crate::protocol::Activation;

/// `a + b`. Keeps nothing; the sum takes the place of `b` where nothing else needs it.
pub fn add(a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
    let (left, left_parent) = take(a);
    let (mut sum, right_parent) = take(b);
    with_number!(dtype(&left), T => {
        let left = numbers::<T>(&left);
        for_rows(numbers_mut::<T>(&mut sum), CHUNK, |chunk, sum| {
            let mut room = Vec::new();
            let left = wide(&left[chunk * CHUNK..chunk * CHUNK + sum.len()], &mut room);
            change(sum, |sum| vectorised(|| sum.iter_mut().zip(left).for_each(|(sum, left)| *sum += left)));
        });
    });
    record([left_parent, right_parent], sum, |gradient| [Some(gradient.clone()), Some(gradient)])
}

/// Elements that are worked on at a time.
const CHUNK: usize = 1024;

/// A function of one number; a type of its own, so that loops over it can be vectorised.
trait Curve {
    /// Its value at `x`.
    fn at(x: f32) -> f32;

    /// Its derivative at `x`.
    fn slope(x: f32) -> f32;
}

/// Runs `$body` with `$curve` bound to the type of `$activation`.
macro_rules! with_curve {
    ($activation:expr, $curve:ident => $body:expr) => {
        match $activation {
            Activation::GeluNew => {
                type $curve = GeluNew;
                $body
            }
            Activation::Gelu => {
                type $curve = Gelu;
                $body
            }
            Activation::QuickGelu => {
                type $curve = QuickGelu;
                $body
            }
            Activation::Silu => {
                type $curve = Silu;
                $body
            }
            Activation::Relu => {
                type $curve = Relu;
                $body
            }
            Activation::Tanh => {
                type $curve = Tanh;
                $body
            }
        }
    };
}

/// GELU in its tanh form; `(1 + tanh(u)) / 2` is `sigmoid(2 u)`.
struct GeluNew;

impl GeluNew {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    const CUBIC: f32 = 0.044_715;

    /// The argument of tanh.
    #[inline(always)]
    fn inner(x: f32) -> f32 {
        Self::SQRT_2_OVER_PI * (x + Self::CUBIC * x * x * x)
    }
}

impl Curve for GeluNew {
    #[inline(always)]
    fn at(x: f32) -> f32 {
        x * sigmoid(2.0 * Self::inner(x))
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        let gate = sigmoid(2.0 * Self::inner(x));
        // d(inner)/dx, twice.
        let slope = 2.0 * Self::SQRT_2_OVER_PI * (1.0 + 3.0 * Self::CUBIC * x * x);
        gate + x * gate * (1.0 - gate) * slope
    }
}

/// GELU: `x` times the cumulative distribution of the normal distribution.
struct Gelu;

impl Curve for Gelu {
    #[inline(always)]
    fn at(x: f32) -> f32 {
        x * normal_cdf(x)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        const ONE_OVER_SQRT_2_PI: f32 = 0.398_942_3;
        normal_cdf(x) + x * ONE_OVER_SQRT_2_PI * exp(-0.5 * x * x)
    }
}

/// `x * sigmoid(factor * x)`, its value and its derivative.
#[inline(always)]
fn swish(x: f32, factor: f32) -> (f32, f32) {
    let gate = sigmoid(factor * x);
    (x * gate, gate + factor * x * gate * (1.0 - gate))
}

/// `x * sigmoid(x)`.
struct Silu;

impl Curve for Silu {
    #[inline(always)]
    fn at(x: f32) -> f32 {
        swish(x, 1.0).0
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        swish(x, 1.0).1
    }
}

/// `x * sigmoid(1.702 x)`.
struct QuickGelu;

impl Curve for QuickGelu {
    #[inline(always)]
    fn at(x: f32) -> f32 {
        swish(x, 1.702).0
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        swish(x, 1.702).1
    }
}

/// `max(x, 0)`.
struct Relu;

impl Curve for Relu {
    #[inline(always)]
    fn at(x: f32) -> f32 {
        // Not `max`, which would hide a NaN.
        if x < 0.0 { 0.0 } else { x }
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        if x > 0.0 { 1.0 } else { 0.0 }
    }
}

/// The hyperbolic tangent.
struct Tanh;

impl Curve for Tanh {
    #[inline(always)]
    fn at(x: f32) -> f32 {
        // Near zero the difference from a sigmoid would lose all digits.
        let cube = x - x * x * x * (1.0 / 3.0) + x * x * x * x * x * (2.0 / 15.0);
        let tanh = 2.0 * sigmoid(2.0 * x) - 1.0;
        if x.abs() < 0.05 { cube } else { tanh }
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        let tanh = Self::at(x);
        1.0 - tanh * tanh
    }
}

/// An activation and its inputs: `activation(x)` of one, `activation(gate) * up` of two.
pub(super) struct Activated<const N: usize> {
    pub(super) activation: Activation,
    pub(super) inputs: [Array; N],
}

impl<const N: usize> Activated<N> {
    /// Lends the activation's value, which lives no longer than that. Unless the inputs are to be kept the value takes the place of one of them.
    pub(super) fn with_value<T: Number, R>(&mut self, keep: bool, use_value: impl FnOnce(&[T]) -> R) -> R {
        let mut copy = Vec::new();
        let (value, others) = if keep {
            copy.extend_from_slice(numbers::<T>(&self.inputs[0]));
            (&mut copy[..], &self.inputs[1..])
        } else {
            let (first, others) = self.inputs.split_at_mut(1);
            (numbers_mut::<T>(&mut first[0]), &*others)
        };
        let up = others.first().map(numbers::<T>);
        for_rows(value, CHUNK, |chunk, value| {
            let up = up.map(|up| &up[chunk * CHUNK..chunk * CHUNK + value.len()]);
            let mut room = Vec::new();
            let up = up.map(|up| wide(up, &mut room));
            change(value, |value| {
                with_curve!(self.activation, C => vectorised(|| match up {
                    None => value.iter_mut().for_each(|x| *x = C::at(*x)),
                    Some(up) => value.iter_mut().zip(up).for_each(|(x, up)| *x = C::at(*x) * up),
                }));
            });
        });
        use_value(value)
    }

    /// `gradient` of the activation's value goes into the places of the inputs as the gradients of these; the value takes its place.
    pub(super) fn exchange<T: Number>(&mut self, gradient: &mut Array) {
        let activation = self.activation;
        let gradient = numbers_mut::<T>(gradient);
        match &mut self.inputs[..] {
            [x] => for_chunks([numbers_mut::<T>(x), gradient], &|[x, gradient]| {
                change(x, |x| {
                    change(gradient, |gradient| {
                        with_curve!(activation, C => vectorised(|| {
                            for (x, gradient) in x.iter_mut().zip(gradient) {
                                (*x, *gradient) = (*gradient * C::slope(*x), C::at(*x));
                            }
                        }));
                    });
                });
            }),
            [gate, up] => for_chunks([numbers_mut::<T>(gate), numbers_mut::<T>(up), gradient], &|[gate, up, gradient]| {
                let (mut gate_room, mut up_room) = (Vec::new(), Vec::new());
                change(gradient, |gradient| {
                    let (gates, ups) = (wide(gate, &mut gate_room), wide(up, &mut up_room));
                    let (mut gate_gradient, mut up_gradient) = ([0.0f32; CHUNK], [0.0f32; CHUNK]);
                    with_curve!(activation, C => vectorised(|| {
                        let gradients = gate_gradient.iter_mut().zip(&mut up_gradient);
                        for (((gate, up), gradient), (gate_gradient, up_gradient)) in gates.iter().zip(ups).zip(gradient).zip(gradients) {
                            let value = C::at(*gate);
                            *gate_gradient = *gradient * up * C::slope(*gate);
                            *up_gradient = *gradient * value;
                            *gradient = value * up;
                        }
                    }));
                    T::store_all(&gate_gradient[..gate.len()], gate);
                    T::store_all(&up_gradient[..up.len()], up);
                });
            }),
            _ => {}
        }
    }
}

/// Calls `each` for pieces of at most [`CHUNK`] elements of all `values`, which are equally long, on all threads of the pool.
fn for_chunks<T: Send, const N: usize>(values: [&mut [T]; N], each: &(impl Fn([&mut [T]; N]) + Sync)) {
    let length = values[0].len();
    if length <= CHUNK {
        return each(values);
    }
    let middle = (length / 2).next_multiple_of(CHUNK).min(length);
    let mut right: [&mut [T]; N] = std::array::from_fn(|_| Default::default());
    let mut at = 0;
    let left = values.map(|values| {
        let (left, rest) = values.split_at_mut(middle);
        right[at] = rest;
        at += 1;
        left
    });
    if length < 16_384 || rayon::current_num_threads() == 1 {
        for_chunks(left, each);
        for_chunks(right, each);
    } else {
        rayon::join(|| for_chunks(left, each), || for_chunks(right, each));
    }
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
    with_number!(dtype(values), T => for_rows(numbers_mut::<T>(values), CHUNK, |chunk, values| {
        change(values, |values| {
            vectorised(|| {
                for (index, value) in values.iter_mut().enumerate() {
                    *value *= dropout_factor(seed, (chunk * CHUNK + index) as u64, p);
                }
            });
        });
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Activation; 6] = [Activation::GeluNew, Activation::Gelu, Activation::QuickGelu, Activation::Silu, Activation::Relu, Activation::Tanh];

    /// The cumulative normal distribution by Simpson's rule.
    fn normal(x: f64) -> f64 {
        let steps = 2000;
        let width = x / f64::from(steps);
        let density = |x: f64| (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
        let weight = |step: i32| if step == 0 || step == steps { 1.0 } else { f64::from(2 + step % 2 * 2) };
        0.5 + width / 3.0 * (0..=steps).map(|step| weight(step) * density(f64::from(step) * width)).sum::<f64>()
    }

    fn exact(activation: Activation, x: f64) -> f64 {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        match activation {
            Activation::GeluNew => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()),
            Activation::Gelu => x * normal(x),
            Activation::QuickGelu => x * sigmoid(1.702 * x),
            Activation::Silu => x * sigmoid(x),
            Activation::Relu => x.max(0.0),
            Activation::Tanh => x.tanh(),
        }
    }

    /// Against the textbook formulas in f64, derivatives against their differences.
    #[test]
    fn activations_and_their_slopes_are_right() {
        for activation in ALL {
            for step in -900..=900 {
                let x = f64::from(step) * 0.011 + 0.003;
                let (value, slope) = with_curve!(activation, C => (C::at(x as f32), C::slope(x as f32)));
                let want = exact(activation, x);
                assert!((f64::from(value) - want).abs() < 4e-7 * (1.0 + x.abs()), "{activation:?}({x}) = {value}, not {want}");
                let want = (exact(activation, x + 1e-4) - exact(activation, x - 1e-4)) / 2e-4;
                assert!((f64::from(slope) - want).abs() < 2e-6 * (1.0 + x.abs()), "{activation:?}'({x}) = {slope}, not {want}");
            }
            let at_nan = with_curve!(activation, C => C::at(f32::NAN));
            assert!(at_nan.is_nan(), "{activation:?} hides a NaN");
        }
    }
}
