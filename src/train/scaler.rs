//! Dynamic loss scaling for fp16, as PyTorch's `GradScaler` does it.
//!
//! The loss is multiplied by the scale so that small gradients survive in fp16. A step whose gradients overflow is skipped and halves the scale; many
//! good steps in a row double it.

use serde::{Deserialize, Serialize};

use crate::spec::settings::{DType, FsdpSettings};

/// Growth of the scale after [`GROWTH_INTERVAL`] good steps.
const GROWTH_FACTOR: f64 = 2.0;
/// What the scale is multiplied by after an overflow.
const BACKOFF_FACTOR: f64 = 0.5;
/// Good steps in a row before the scale grows.
const GROWTH_INTERVAL: u32 = 2000;

/// Below this scale the trouble is not overflow: the gradients are not finite whatever the scale is.
const SMALLEST_SCALE: f64 = 1e-4;

/// What a [`GradScaler`] remembers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GradScalerState {
    /// What losses are multiplied by.
    pub scale: f64,
    /// Good steps in a row since the scale last changed.
    pub growth_tracker: u32,
}

/// The loss scale of a training. Every rank has one and all agree, since they agree on every overflow.
#[derive(Clone, Debug, PartialEq)]
pub struct GradScaler {
    scale: f64,
    good_steps: u32,
}

impl GradScaler {
    /// The scaler a training needs: `None` where neither computation nor reduction is in fp16.
    pub fn for_settings(settings: &FsdpSettings) -> Option<Self> {
        let precision = settings.mixed_precision;
        let fp16 = precision.param_dtype == DType::Fp16 || precision.reduce_dtype == DType::Fp16;
        fp16.then_some(Self { scale: settings.initial_loss_scale, good_steps: 0 })
    }

    /// What it remembers.
    pub fn state_dict(&self) -> GradScalerState {
        GradScalerState { scale: self.scale, growth_tracker: self.good_steps }
    }

    /// Goes on from a state.
    pub fn load_state_dict(&mut self, state: GradScalerState) {
        (self.scale, self.good_steps) = (state.scale, state.growth_tracker);
    }

    /// What losses are multiplied by now.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Learns whether the gradients of a step overflowed on any rank.
    pub fn update(&mut self, overflowed: bool) {
        if overflowed {
            self.scale *= BACKOFF_FACTOR;
            self.good_steps = 0;
            return;
        }
        self.good_steps += 1;
        if self.good_steps == GROWTH_INTERVAL {
            let grown = self.scale * GROWTH_FACTOR;
            if (grown as f32).is_finite() {
                self.scale = grown;
            }
            self.good_steps = 0;
        }
    }

    /// Whether the scale has shrunk to nothing: the model itself has diverged.
    pub fn is_exhausted(&self) -> bool {
        self.scale < SMALLEST_SCALE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_on_overflow_and_doubles_after_two_thousand_good_steps() {
        let mut scaler = GradScaler { scale: 65_536.0, good_steps: 0 };
        scaler.update(true);
        assert_eq!(scaler.scale(), 32_768.0);
        for _ in 0..1_999 {
            scaler.update(false);
        }
        assert_eq!(scaler.scale(), 32_768.0);
        scaler.update(false);
        assert_eq!(scaler.scale(), 65_536.0);
        // An overflow starts the count again.
        for _ in 0..1_999 {
            scaler.update(false);
        }
        scaler.update(true);
        for _ in 0..1_999 {
            scaler.update(false);
        }
        assert_eq!(scaler.scale(), 32_768.0);
    }

    #[test]
    fn never_grows_to_infinity() {
        let mut scaler = GradScaler { scale: f64::from(f32::MAX), good_steps: GROWTH_INTERVAL - 1 };
        scaler.update(false);
        assert_eq!(scaler.scale(), f64::from(f32::MAX));
    }

    #[test]
    fn is_exhausted_after_endless_overflow() {
        let mut scaler = GradScaler { scale: 65_536.0, good_steps: 0 };
        let mut steps = 0;
        while !scaler.is_exhausted() {
            scaler.update(true);
            steps += 1;
        }
        assert_eq!(steps, 30);
    }
}
