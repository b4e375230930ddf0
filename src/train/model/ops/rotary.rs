//! Rotary position embeddings (Su et al. 2021), as Llama applies them.

use std::f64::consts::TAU;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::number::change;
use super::{Array, dtype, for_rows, numbers_mut, record, take, vectorised, with_number};
use crate::protocol::RopeScaling;
use crate::train::model::Sequences;

/// By how much each pair of a head's numbers is rotated from one position to the next.
#[derive(Clone, Debug)]
pub struct RotaryFrequencies(Arc<[f32]>);

impl RotaryFrequencies {
    /// The frequencies of heads of `size` numbers. Computed in f32 step by step as transformers does, so that far positions are turned by the same angle.
    pub fn new(size: usize, theta: f64, scaling: &RopeScaling) -> Self {
        let default = |pair: usize| 1.0 / (theta as f32).powf((2 * pair) as f32 / size as f32);
        let scaled = |frequency: f32| match *scaling {
            RopeScaling::Default => frequency,
            RopeScaling::Linear { factor } => frequency / factor as f32,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let turns = original_max_position_embeddings as f32 / (TAU as f32 / frequency);
                if turns < low_freq_factor as f32 {
                    frequency / factor as f32
                } else if turns > high_freq_factor as f32 {
                    frequency
                } else {
                    let smooth = (turns - low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
                    (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
                }
            }
        };
        Self((0..size / 2).map(|pair| scaled(default(pair))).collect())
    }

    /// Cosines and sines of the angles at positions `0..block_size`, a row a position: `[block_size, pairs]` each.
    fn angles(&self, block_size: usize) -> (Vec<f32>, Vec<f32>) {
        let each = (0..block_size).flat_map(|position| self.0.iter().map(move |frequency| position as f32 * frequency));
        each.map(|angle| (angle.cos(), angle.sin())).unzip()
    }
}

/// Rotates each pair (i, i + size / 2) of each head of `x` `[tokens, heads * size]` by its position's angle. Keeps nothing; the result takes the place of `x`
/// where nothing else needs it.
pub fn rotary(x: Tensor<2>, frequencies: &RotaryFrequencies, sequences: Sequences) -> Tensor<2> {
    let (mut output, parent) = take(x);
    rotate(&mut output, frequencies, sequences, 1.0);
    let frequencies = frequencies.clone();
    record([parent], output, move |mut gradient| {
        rotate(&mut gradient, &frequencies, sequences, -1.0);
        [Some(gradient)]
    })
}

fn rotate(values: &mut Array, frequencies: &RotaryFrequencies, sequences: Sequences, direction: f32) {
    let width = values.layout().shape()[1];
    let pairs = frequencies.0.len();
    let (cosines, sines) = frequencies.angles(sequences.block_size);
    with_number!(dtype(values), T => for_rows(numbers_mut::<T>(values), width, |token, row| {
        let at = token % sequences.block_size * pairs;
        let (cosines, sines) = (&cosines[at..at + pairs], &sines[at..at + pairs]);
        change(row, |row| vectorised(|| {
            for head in row.chunks_exact_mut(2 * pairs) {
                let (first, second) = head.split_at_mut(pairs);
                for (((first, second), cosine), sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
                    let sine = sine * direction;
                    (*first, *second) = (*first * cosine - *second * sine, *second * cosine + *first * sine);
                }
            }
        }));
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that transformers 5 computes for these settings.
    #[test]
    fn frequencies_are_transformers() {
        let close = |got: RotaryFrequencies, want: &[f32]| {
            assert_eq!(got.0.len(), want.len());
            got.0.iter().zip(want).for_each(|(got, want)| assert!((got / want - 1.0).abs() < 3e-7, "{got} against {want}"));
        };
        close(RotaryFrequencies::new(8, 10_000.0, &RopeScaling::Default), &[1.0, 0.1, 0.01, 0.001]);
        close(RotaryFrequencies::new(8, 10_000.0, &RopeScaling::Linear { factor: 4.0 }), &[0.25, 0.025, 0.0025, 0.00025]);
        let llama3 = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 64 };
        let want = [1.0, 0.079_403_01, 0.004_700_754, 0.000_911_583_1, 0.000_176_776_68, 3.428_102_4e-5, 6.647_869_7e-6, 1.289_173_2e-6];
        close(RotaryFrequencies::new(16, 500_000.0, &llama3), &want);
    }
}
