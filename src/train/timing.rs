//! Time per epoch, from the times of single steps.

use crate::protocol::Timing;

/// Steps left out at the beginning, at least: first-step costs are not in time per epoch.
const WARMUP_STEPS: usize = 3;
/// Part of the steps left out at the beginning, at least, in percent.
const WARMUP_PERCENT: usize = 5;

/// One optimiser step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Synchronised wall time, data wait included.
    pub seconds: f64,
    /// Tokens over all ranks.
    pub tokens: u64,
}

/// Times of a trial from the times of its steps: the mean over all but the first max(3, 5 %) of them, and the first 3 of each attempt that went on from a
/// checkpoint, before the steps `resumed_at`.
pub fn summarise(steps: &[StepTime], resumed_at: &[usize], steps_per_epoch: f64) -> Timing {
    let warmup = (steps.len() * WARMUP_PERCENT).div_ceil(100).max(WARMUP_STEPS);
    let is_steady = |step: usize| step >= warmup && resumed_at.iter().all(|first| !(*first..*first + WARMUP_STEPS).contains(&step));
    let steady: Vec<&StepTime> = steps.iter().enumerate().filter(|(step, _)| is_steady(*step)).map(|(_, time)| time).collect();
    let seconds: f64 = steady.iter().map(|step| step.seconds).sum();
    let tokens: u64 = steady.iter().map(|step| step.tokens).sum();
    let step_seconds = (!steady.is_empty()).then(|| seconds / steady.len() as f64);
    Timing {
        steady_steps: steady.len() as u64,
        step_seconds,
        steps_per_epoch,
        epoch_seconds: step_seconds.map(|seconds| seconds * steps_per_epoch),
        tokens_per_second: (seconds > 0.0).then(|| tokens as f64 / seconds),
        ..Timing::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(seconds: &[f64]) -> Vec<StepTime> {
        seconds.iter().map(|seconds| StepTime { seconds: *seconds, tokens: 100 }).collect()
    }

    /// CASES 38.
    #[test]
    fn first_steps_do_not_count() {
        let timing = summarise(&steps(&[90.0, 9.0, 5.0, 0.5, 1.5]), &[], 7.5);
        assert_eq!(
            (timing.steady_steps, timing.step_seconds, timing.epoch_seconds, timing.tokens_per_second),
            (2, Some(1.0), Some(7.5), Some(100.0))
        );
    }

    #[test]
    fn five_percent_of_a_long_training_do_not_count() {
        let seconds: Vec<f64> = (0..100).map(|step| if step < 5 { 50.0 } else { 2.0 }).collect();
        let timing = summarise(&steps(&seconds), &[], 1.0);
        assert_eq!((timing.steady_steps, timing.step_seconds), (95, Some(2.0)));
        assert_eq!(summarise(&steps(&vec![1.0; 61]), &[], 1.0).steady_steps, 57);
    }

    /// The first steps of a process that goes on from a checkpoint are as slow as those of any other.
    #[test]
    fn first_steps_after_a_checkpoint_do_not_count() {
        let timing = summarise(&steps(&[90.0, 9.0, 5.0, 1.0, 70.0, 7.0, 5.0, 2.0, 50.0]), &[4, 8], 1.0);
        assert_eq!((timing.steady_steps, timing.step_seconds), (2, Some(1.5)));
    }

    #[test]
    fn a_short_trial_has_no_mean() {
        let timing = summarise(&steps(&[1.0, 1.0, 1.0]), &[], 2.0);
        assert_eq!((timing.steady_steps, timing.step_seconds, timing.epoch_seconds, timing.tokens_per_second), (0, None, None, None));
        assert_eq!(timing.steps_per_epoch, 2.0);
    }
}
