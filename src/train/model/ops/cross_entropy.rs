//! Cross-entropy of a causal language model, in f32 whatever the logits are.

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::math::exp;
use super::number::{change, wide};
use super::{Number, dtype, numbers_mut, record, take, vectorised, with_number};

/// What [`cross_entropy`] gives.
pub struct Loss {
    /// Where backward starts: the gradient of the logits is already known, and is taken as it is. Its own value means nothing.
    pub root: Tensor<2>,
    /// Sum of `-ln p(target)` over all targets.
    pub sum: f64,
}

/// The cross-entropy of logits `[tokens, vocabulary]` against `targets`, one per token; tokens without a target do not count.
///
/// Tracked logits are overwritten with their own gradient, `gradient_scale * (p - onehot)`, rounded once: nothing of their size is allocated.
pub fn cross_entropy(logits: Tensor<2>, targets: &[Option<u32>], gradient_scale: f32) -> Loss {
    let [tokens, vocabulary] = logits.dims();
    assert_eq!(tokens, targets.len(), "a target, or none, for every token");
    let (mut values, parent) = take(logits);
    let scale = parent.is_tracked().then_some(gradient_scale);
    let sum = with_number!(dtype(&values), T => {
        let logits = numbers_mut::<T>(&mut values);
        // Summed in order of the tokens, whatever the number of threads.
        let losses: Vec<f64> = if rayon::current_num_threads() == 1 {
            logits.chunks_mut(vocabulary).zip(targets).map(|(row, target)| one_token(row, *target, scale)).collect()
        } else {
            logits.par_chunks_mut(vocabulary).zip(targets).map(|(row, target)| one_token(row, *target, scale)).collect()
        };
        losses.iter().sum()
    });
    // One element stands for the loss, so that backward has somewhere to start.
    let root = super::new_array(vec![0.0f32], [1, 1]);
    Loss { root: record([parent], root, move |_| [Some(values)]), sum }
}

/// The loss of one token, 0 without a target. With `scale` the logits become their gradient.
fn one_token<T: Number>(logits: &mut [T], target: Option<u32>, scale: Option<f32>) -> f64 {
    let Some(target) = target else {
        if scale.is_some() {
            logits.fill(T::zeroed());
        }
        return 0.0;
    };
    let target = target as usize;
    match scale {
        Some(scale) => change(logits, |logits| vectorised(|| with_gradient(logits, target, scale))),
        None => {
            let mut room = Vec::new();
            let logits = wide(logits, &mut room);
            vectorised(|| {
                let maximum = maximum(logits);
                let mut sums = [0.0f32; 16];
                for chunk in logits.chunks(16) {
                    for (sum, logit) in sums.iter_mut().zip(chunk) {
                        *sum += exp(logit - maximum);
                    }
                }
                loss(maximum, sums, logits[target])
            })
        }
    }
}

#[inline(always)]
fn with_gradient(logits: &mut [f32], target: usize, scale: f32) -> f64 {
    let maximum = maximum(logits);
    let at_target = logits[target];
    let mut sums = [0.0f32; 16];
    for chunk in logits.chunks_mut(16) {
        for (sum, logit) in sums.iter_mut().zip(chunk) {
            *logit = exp(*logit - maximum);
            *sum += *logit;
        }
    }
    let factor = scale / sums.iter().sum::<f32>();
    logits.iter_mut().for_each(|logit| *logit *= factor);
    logits[target] -= scale;
    loss(maximum, sums, at_target)
}

/// The largest number; NaN if there is one, so that it becomes the loss.
#[inline(always)]
fn maximum(logits: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a >= b { a } else { b };
    let mut strands = [f32::NEG_INFINITY; 16];
    for chunk in logits.chunks(16) {
        for (strand, &logit) in strands.iter_mut().zip(chunk) {
            *strand = larger(*strand, logit);
        }
    }
    strands.into_iter().fold(f32::NEG_INFINITY, larger)
}

#[inline(always)]
fn loss(maximum: f32, sums: [f32; 16], at_target: f32) -> f64 {
    f64::from(maximum - at_target) + f64::from(sums.iter().sum::<f32>()).ln()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// Against the textbook formula in f64, one token without a target among them.
    #[test]
    fn losses_are_minus_log_probabilities() {
        let (tokens, vocabulary) = (5, 37);
        let values: Vec<f32> = (0..tokens * vocabulary).map(|index| ((index * 7919 % 101) as f32 - 50.0) / 9.0).collect();
        let logits = Tensor::<1>::from_floats(values.as_slice(), &Device::flex()).reshape([tokens, vocabulary]);
        let targets = [Some(3), Some(36), None, Some(0), Some(17)];
        let row = |token: usize| &values[token * vocabulary..(token + 1) * vocabulary];
        let loss =
            |token: usize, target: u32| row(token).iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln() - f64::from(row(token)[target as usize]);
        let want: f64 = targets.iter().enumerate().filter_map(|(token, target)| target.map(|target| loss(token, target))).sum();
        let got = cross_entropy(logits, &targets, 1.0).sum;
        assert!((got - want).abs() < 1e-5, "{got} against {want}");
    }

    /// A logit that is not a number makes a loss that is not a number, rather than hiding.
    #[test]
    fn a_nan_is_not_hidden() {
        for place in 0..5 {
            let mut values = [0.5f32; 5];
            values[place] = f32::NAN;
            let logits = Tensor::<1>::from_floats(values, &Device::flex()).reshape([1, 5]);
            assert!(cross_entropy(logits, &[Some(1)], 1.0).sum.is_nan());
        }
    }
}
