//! Learning rate over optimiser steps, as transformers' schedules compute it.

use std::f64::consts::PI;

use crate::spec::settings::{LrSchedulerType, TrainSettings};

/// A learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// How it moves after the warm-up.
    pub kind: LrSchedulerType,
    /// The highest learning rate.
    pub peak: f64,
    /// Steps of linear warm-up from zero.
    pub warmup_steps: u64,
    /// Optimiser steps of the whole training; where the falling schedules reach zero.
    pub total_steps: u64,
}

impl Schedule {
    /// The schedule of a training that takes `total_steps`.
    pub fn new(settings: &TrainSettings, total_steps: u64) -> Self {
        Self { kind: settings.lr_scheduler_type, peak: settings.learning_rate, warmup_steps: settings.warmup_steps, total_steps }
    }

    /// Learning rate of the step after `applied` applied ones. A step skipped for overflow does not move the schedule, as in the HF Trainer.
    pub fn learning_rate(&self, applied: u64) -> f64 {
        self.peak * self.factor(applied)
    }

    fn factor(&self, applied: u64) -> f64 {
        if applied < self.warmup_steps {
            return applied as f64 / self.warmup_steps as f64;
        }
        let after_warmup = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        match self.kind {
            LrSchedulerType::Linear => self.total_steps.saturating_sub(applied) as f64 / after_warmup,
            LrSchedulerType::Cosine => {
                let progress = (applied - self.warmup_steps) as f64 / after_warmup;
                // Written as transformers does, half a period; beyond the end it would rise again, which a training never reaches.
                (0.5 * (1.0 + (PI * progress.min(1.0)).cos())).max(0.0)
            }
            LrSchedulerType::Constant => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: LrSchedulerType, warmup_steps: u64) -> Vec<f64> {
        let schedule = Schedule { kind, peak: 8.0, warmup_steps, total_steps: 6 };
        (0..7).map(|applied| (schedule.learning_rate(applied) * 1e6).round() / 1e6).collect()
    }

    /// The numbers of transformers' `get_*_schedule_with_warmup` for the same arguments.
    #[test]
    fn follows_transformers() {
        let cases = [
            (LrSchedulerType::Linear, 2, [0.0, 4.0, 8.0, 6.0, 4.0, 2.0, 0.0]),
            (LrSchedulerType::Linear, 0, [8.0, 6.666667, 5.333333, 4.0, 2.666667, 1.333333, 0.0]),
            (LrSchedulerType::Cosine, 2, [0.0, 4.0, 8.0, 6.828427, 4.0, 1.171573, 0.0]),
            (LrSchedulerType::Constant, 2, [0.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
            (LrSchedulerType::Constant, 0, [8.0; 7]),
        ];
        for (kind, warmup_steps, expected) in cases {
            assert_eq!(rates(kind, warmup_steps), expected, "{kind:?} with {warmup_steps} warm-up steps");
        }
    }

    /// A warm-up longer than the training: it never reaches its peak and never divides by zero.
    #[test]
    fn warmup_longer_than_the_training() {
        let schedule = Schedule { kind: LrSchedulerType::Cosine, peak: 1.0, warmup_steps: 10, total_steps: 5 };
        assert_eq!((0..=5).map(|applied| schedule.learning_rate(applied)).collect::<Vec<_>>(), [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]);
        assert_eq!(schedule.learning_rate(11), 0.5 * (1.0 + (PI).cos()));
    }
}
