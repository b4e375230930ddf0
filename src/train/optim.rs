//! AdamW and global-norm clipping on flat shards, as `torch.optim.AdamW` and `clip_grad_norm_` compute them.
//!
//! A rank updates the shards it owns and nothing else; the only thing ranks tell each other is the squared norm of their gradients. Undoing the loss
//! scale and clipping are factors applied while gradients are read, in PyTorch's order of operations, so that gradients are never rewritten.

mod kernels;

use std::ops::Range;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::memory;
use crate::spec::settings::TrainSettings;

/// Elements a worker thread takes at a time: 64 KiB each of values, gradient and the two moments.
const CHUNK: usize = 16 * 1024;

/// Elements of a shard that are optimised alike. Frozen parameters and padding are in no run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which elements of the shard.
    pub range: Range<usize>,
    /// Where in the shard's gradient theirs begins.
    pub gradient: usize,
    /// Whether weight decay applies.
    pub decays: bool,
}

/// Joins neighbouring elements that are optimised alike, so that loops are long. `parts` are in ascending order and do not overlap.
pub fn runs(parts: impl IntoIterator<Item = Run>) -> Vec<Run> {
    let mut joined: Vec<Run> = Vec::new();
    for part in parts.into_iter().filter(|part| !part.range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.decays == part.decays && last.range.end == part.range.start && last.gradient + last.range.len() == part.gradient => {
                last.range.end = part.range.end;
            }
            _ => joined.push(part),
        }
    }
    joined
}

impl Run {
    fn gradient_range(&self) -> Range<usize> {
        self.gradient..self.gradient + self.range.len()
    }
}

/// A shard as the optimiser sees it: this rank's part of a unit's parameters in f32, and their gradient.
#[derive(Debug)]
pub struct FlatShard<'a> {
    /// Parameters.
    pub values: &'a mut [f32],
    /// Their gradient, still multiplied by the loss scale. Without one the shard stays as it is.
    pub gradient: Option<&'a [f32]>,
}

/// What AdamW remembers beside its moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamWState {
    /// Steps applied so far.
    pub step: u64,
}

/// AdamW (Loshchilov and Hutter 2019) over the shards of a rank.
#[derive(Debug)]
pub struct AdamW {
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
    /// Steps applied so far.
    steps: u64,
    shards: Vec<ShardState>,
}

#[derive(Debug)]
struct ShardState {
    runs: Vec<Run>,
    /// Whether moments live in host memory.
    offload: bool,
    /// Absent until the first applied step: a training whose every step overflows never needs them.
    moments: Option<Moments>,
}

/// Exponential averages of the gradient and of its square, for the elements in runs, one run after another.
#[derive(Debug)]
struct Moments {
    average: Vec<f32>,
    square: Vec<f32>,
}

impl AdamW {
    /// An optimiser for shards with these runs, in the order in which [`AdamW::step`] gets them. The flag says whether a shard's state is kept in host
    /// memory.
    pub fn new(settings: &TrainSettings, shards: impl IntoIterator<Item = (Vec<Run>, bool)>) -> Self {
        Self {
            beta1: settings.adam_beta1,
            beta2: settings.adam_beta2,
            epsilon: settings.adam_epsilon,
            weight_decay: settings.weight_decay,
            steps: 0,
            shards: shards.into_iter().map(|(runs, offload)| ShardState { runs, offload, moments: None }).collect(),
        }
    }

    /// What it remembers beside its moments.
    pub fn state_dict(&self) -> AdamWState {
        AdamWState { step: self.steps }
    }

    /// Goes on from a state; the moments belong to it.
    pub fn load_state_dict(&mut self, state: AdamWState) {
        self.steps = state.step;
    }

    /// PyTorch's `exp_avg` and `exp_avg_sq` of these elements of a shard, which are trained alike; `None` before the first applied step and where nothing is
    /// trained.
    pub fn moments(&self, shard: usize, elements: &Range<usize>) -> Option<[&[f32]; 2]> {
        let state = &self.shards[shard];
        let place = state.place(elements)?;
        let moments = state.moments.as_ref()?;
        Some([&moments.average[place.clone()], &moments.square[place]])
    }

    /// The same, to be filled: zeros where there are none yet. `None` where nothing is trained.
    pub fn moments_mut(&mut self, shard: usize, elements: &Range<usize>) -> Option<[&mut [f32]; 2]> {
        let state = &mut self.shards[shard];
        let place = state.place(elements)?;
        let moments = state.moments.get_or_insert_with(|| Moments::zeros(&state.runs, state.offload));
        Some([&mut moments.average[place.clone()], &mut moments.square[place]])
    }

    /// Sum over this rank's trained elements of the squared gradient, each element first multiplied by `unscale`. Not finite when an element is not.
    pub fn squared_norm<'a>(&self, gradients: impl IntoIterator<Item = Option<&'a [f32]>>, unscale: f32) -> f64 {
        let mut sum = 0.0;
        for (state, gradient) in self.shards.iter().zip(gradients) {
            let Some(gradient) = gradient else { continue };
            for run in &state.runs {
                let chunks: Vec<f64> = gradient[run.gradient_range()].par_chunks(CHUNK).map(|chunk| kernels::squared_norm(chunk, unscale)).collect();
                // Added in order: the same bits whatever the number of threads.
                sum += chunks.iter().sum::<f64>();
            }
        }
        sum
    }

    /// Applies one step. Each gradient element is multiplied by `unscale` and then by `clip` as it is read.
    pub fn step(&mut self, shards: &mut [FlatShard<'_>], learning_rate: f64, unscale: f32, clip: f32) {
        self.steps += 1;
        let correction1 = 1.0 - self.beta1.powf(self.steps as f64);
        let correction2 = 1.0 - self.beta2.powf(self.steps as f64);
        // Scalars are computed in f64 and rounded once, where PyTorch hands them to its f32 loops.
        let coefficients = |decays: bool| kernels::Coefficients {
            unscale,
            clip,
            keep: if decays { (1.0 - learning_rate * self.weight_decay) as f32 } else { 1.0 },
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            correction2_sqrt: correction2.sqrt() as f32,
            epsilon: self.epsilon as f32,
            minus_step_size: -(learning_rate / correction1) as f32,
        };
        let (decaying, plain) = (coefficients(true), coefficients(false));
        for (state, shard) in self.shards.iter_mut().zip(shards) {
            let Some(gradient) = shard.gradient else { continue };
            let moments = state.moments.get_or_insert_with(|| Moments::zeros(&state.runs, state.offload));
            let mut offset = 0;
            for run in &state.runs {
                let of_run = offset..offset + run.range.len();
                offset = of_run.end;
                let coefficients = if run.decays { decaying } else { plain };
                let chunks = shard.values[run.range.clone()]
                    .par_chunks_mut(CHUNK)
                    .zip(gradient[run.gradient_range()].par_chunks(CHUNK))
                    .zip(moments.average[of_run.clone()].par_chunks_mut(CHUNK))
                    .zip(moments.square[of_run].par_chunks_mut(CHUNK));
                chunks.for_each(|(((values, gradient), average), square)| kernels::adamw(values, gradient, average, square, coefficients));
            }
        }
    }
}

impl ShardState {
    /// Where the moments of these elements lie among those of the shard; `None` where they are in no run.
    fn place(&self, elements: &Range<usize>) -> Option<Range<usize>> {
        let mut offset = 0;
        for run in &self.runs {
            if run.range.start <= elements.start && elements.end <= run.range.end {
                let start = offset + elements.start - run.range.start;
                return Some(start..start + elements.len());
            }
            offset += run.range.len();
        }
        None
    }
}

impl Moments {
    fn zeros(runs: &[Run], offload: bool) -> Self {
        let length = runs.iter().map(|run| run.range.len()).sum();
        let zeros = || Self { average: vec![0.0; length], square: vec![0.0; length] };
        if offload { memory::host(zeros) } else { zeros() }
    }
}

/// What gradients are multiplied by so that their global norm is at most `max_norm`: PyTorch's `clip_grad_norm_`. 1 turns nothing; `max_norm` 0 never clips.
pub fn clip_coefficient(total_norm: f64, max_norm: f64) -> f32 {
    if max_norm == 0.0 {
        return 1.0;
    }
    // In f32, as PyTorch's norms are.
    (max_norm as f32 / (total_norm as f32 + 1e-6)).min(1.0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::spec::settings::{LrSchedulerType, TrainDuration};

    /// The optimiser of the reference trainings.
    pub(in crate::train) fn settings() -> TrainSettings {
        TrainSettings {
            per_device_train_batch_size: 1,
            per_device_eval_batch_size: 1,
            gradient_accumulation_steps: 1,
            sync_each_batch: false,
            duration: TrainDuration::MaxSteps(1),
            learning_rate: 1e-3,
            lr_scheduler_type: LrSchedulerType::Constant,
            warmup_steps: 0,
            weight_decay: 0.01,
            decay_norm_and_bias: true,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            max_grad_norm: 1.0,
            eval_block_size: 64,
            eval_steps: None,
            seed: 0,
        }
    }

    fn run(range: Range<usize>, decays: bool) -> Run {
        Run { gradient: range.start, range, decays }
    }

    fn numbers(length: usize, seed: u64) -> Vec<f32> {
        (0..length as u64).map(|index| ((index * 2_654_435_761 + seed * 40_503) % 2_001) as f32 / 1_000.0 - 1.0).collect()
    }

    /// AdamW as in the paper, in f64.
    fn reference(values: &mut [f64], gradients: &[Vec<f32>], decay: f64, learning_rate: f64) {
        for (index, value) in values.iter_mut().enumerate() {
            let (mut average, mut square) = (0.0, 0.0);
            for (step, gradient) in gradients.iter().enumerate() {
                let gradient = f64::from(gradient[index]);
                average = 0.9 * average + 0.1 * gradient;
                square = 0.999 * square + 0.001 * gradient * gradient;
                let step = step as i32 + 1;
                let (hat_average, hat_square): (f64, f64) = (average / (1.0 - 0.9_f64.powi(step)), square / (1.0 - 0.999_f64.powi(step)));
                *value -= learning_rate * decay * *value;
                *value -= learning_rate * hat_average / (hat_square.sqrt() + 1e-8);
            }
        }
    }

    #[test]
    fn follows_the_paper_with_and_without_decay() {
        // Long enough for several chunks, and not a multiple of any vector width.
        let length = 2 * CHUNK + 37;
        let parts = [run(0..CHUNK + 5, true), run(CHUNK + 5..length, false)];
        let mut optimizer = AdamW::new(&settings(), [(parts.to_vec(), false)]);
        let start = numbers(length, 1);
        let gradients: Vec<Vec<f32>> = (2..7).map(|seed| numbers(length, seed)).collect();
        let mut values = start.clone();
        for gradient in &gradients {
            // Gradients arrive scaled by 1024, which must leave no trace: powers of two are exact.
            let scaled: Vec<f32> = gradient.iter().map(|value| value * 1024.0).collect();
            optimizer.step(&mut [FlatShard { values: &mut values, gradient: Some(&scaled) }], 1e-3, 1.0 / 1024.0, 1.0);
        }
        let mut expected: Vec<f64> = start.iter().copied().map(f64::from).collect();
        let (decaying, plain) = expected.split_at_mut(CHUNK + 5);
        reference(decaying, &gradients.iter().map(|gradient| gradient[..CHUNK + 5].to_vec()).collect::<Vec<_>>(), 0.01, 1e-3);
        reference(plain, &gradients.iter().map(|gradient| gradient[CHUNK + 5..].to_vec()).collect::<Vec<_>>(), 0.0, 1e-3);
        for (index, (value, expected)) in values.iter().zip(&expected).enumerate() {
            assert!((f64::from(*value) - expected).abs() < 5e-7, "element {index}: {value} against {expected}");
        }
    }

    /// Frozen parameters and padding lie in no run: they keep their bits.
    #[test]
    fn touches_nothing_outside_its_runs() {
        let mut values = numbers(100, 1);
        let before = values.clone();
        let mut optimizer = AdamW::new(&settings(), [(vec![run(10..20, true), run(50..51, false)], false)]);
        optimizer.step(&mut [FlatShard { values: &mut values, gradient: Some(&numbers(100, 2)) }], 1e-3, 1.0, 1.0);
        for index in 0..100 {
            assert_eq!(values[index] != before[index], (10..20).contains(&index) || index == 50, "element {index}");
        }
    }

    #[test]
    fn cutting_parameters_differently_changes_no_bit() {
        let gradient = numbers(40_000, 3);
        let update = |cuts: &[Range<usize>]| {
            let mut values = numbers(40_000, 1);
            let mut optimizer = AdamW::new(&settings(), cuts.iter().map(|cut| (vec![run(0..cut.len(), true)], false)));
            for _ in 0..3 {
                let mut rest = values.as_mut_slice();
                let mut shards = Vec::new();
                for cut in cuts {
                    let (shard, after) = rest.split_at_mut(cut.len());
                    rest = after;
                    shards.push(FlatShard { values: shard, gradient: Some(&gradient[cut.clone()]) });
                }
                optimizer.step(&mut shards, 1e-3, 1.0, 0.3);
            }
            values
        };
        assert_eq!(update(std::slice::from_ref(&(0..40_000))), update(&[0..1, 1..17, 17..33_333, 33_333..40_000]));
    }

    #[test]
    fn norm_counts_trained_elements_and_shows_what_is_not_finite() {
        let optimizer = AdamW::new(&settings(), [0..3, 1..2].map(|range| (vec![run(range, true)], false)));
        assert_eq!(optimizer.squared_norm([Some(&[2.0, 4.0, 4.0, f32::NAN][..]), Some(&[f32::INFINITY, 16.0])], 0.5), 1.0 + 4.0 + 4.0 + 64.0);
        assert!(optimizer.squared_norm([Some(&[2.0, f32::NAN, 4.0, 0.0][..]), None], 1.0).is_nan());
        assert!(optimizer.squared_norm([None, Some(&[0.0, f32::NEG_INFINITY][..])], 1.0).is_infinite());
    }

    #[test]
    fn norm_is_exact_over_many_elements() {
        let length = 1_000_003;
        let gradient = numbers(length, 9);
        let optimizer = AdamW::new(&settings(), [(vec![run(0..length, true)], false)]);
        let exact: f64 = gradient.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
        let norm = optimizer.squared_norm([Some(gradient.as_slice())], 1.0);
        assert!((norm / exact - 1.0).abs() < 1e-7, "{norm} against {exact}");
    }

    #[test]
    fn clipping_is_pytorchs() {
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(4.0, 1.0), 1.0 / (4.0_f32 + 1e-6));
        assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
        assert_eq!(clip_coefficient(1e30, 0.0), 1.0);
    }

    #[test]
    fn runs_join_neighbours_that_are_alike() {
        assert_eq!(
            runs([run(0..4, true), run(4..4, false), run(4..9, true), run(9..12, false), run(13..14, false)]),
            [run(0..9, true), run(9..12, false), run(13..14, false)]
        );
    }

    #[test]
    fn state_is_allocated_at_the_first_step_where_it_belongs() {
        for offload in [false, true] {
            let accounts = memory::Accounts::new(1).unwrap();
            let account = accounts.rank(0);
            let (mut values, gradient) = (vec![0.0; 1_000], vec![0.0; 1_000]);
            let _guard = account.enter();
            let mut optimizer = AdamW::new(&settings(), [(vec![run(0..1_000, true)], offload)]);
            assert_eq!(account.usage().allocated, 0);
            optimizer.step(&mut [FlatShard { values: &mut values, gradient: Some(&gradient) }], 1e-3, 1.0, 1.0);
            let usage = account.usage();
            assert_eq!((usage.allocated, usage.host), if offload { (0, 8_000) } else { (8_000, 0) });
        }
    }
}
