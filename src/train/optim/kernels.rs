//! The optimiser's inner loops, vectorised by hand for whatever instructions the machine has: a portable build may only assume the oldest ones, and these
//! loops touch every parameter of the model at every step.

use pulp::{Arch, Simd, WithSimd};

/// Scalars of one AdamW step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coefficients {
    /// 1 / loss scale.
    pub(super) unscale: f32,
    /// Clipping.
    pub(super) clip: f32,
    /// 1 - learning rate * weight decay.
    pub(super) keep: f32,
    /// 1 - beta 1.
    pub(super) one_minus_beta1: f32,
    /// Beta 2.
    pub(super) beta2: f32,
    /// 1 - beta 2.
    pub(super) one_minus_beta2: f32,
    /// Square root of the second moment's bias correction.
    pub(super) correction2_sqrt: f32,
    /// Added to the denominator.
    pub(super) epsilon: f32,
    /// -learning rate / first moment's bias correction.
    pub(super) minus_step_size: f32,
}

/// One AdamW step on equally long slices.
pub(super) fn adamw(values: &mut [f32], gradient: &[f32], average: &mut [f32], square: &mut [f32], coefficients: Coefficients) {
    Arch::new().dispatch(Update { values, gradient, average, square, coefficients });
}

struct Update<'a> {
    values: &'a mut [f32],
    gradient: &'a [f32],
    average: &'a mut [f32],
    square: &'a mut [f32],
    coefficients: Coefficients,
}

impl WithSimd for Update<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let c = self.coefficients;
        let (values, values_tail) = S::as_mut_simd_f32s(self.values);
        let (gradient, gradient_tail) = S::as_simd_f32s(self.gradient);
        let (average, average_tail) = S::as_mut_simd_f32s(self.average);
        let (square, square_tail) = S::as_mut_simd_f32s(self.square);
        let (unscale, clip, keep) = (simd.splat_f32s(c.unscale), simd.splat_f32s(c.clip), simd.splat_f32s(c.keep));
        let (one_minus_beta1, beta2, one_minus_beta2) =
            (simd.splat_f32s(c.one_minus_beta1), simd.splat_f32s(c.beta2), simd.splat_f32s(c.one_minus_beta2));
        let (correction2_sqrt, epsilon, minus_step_size) =
            (simd.splat_f32s(c.correction2_sqrt), simd.splat_f32s(c.epsilon), simd.splat_f32s(c.minus_step_size));
        for (((value, gradient), average), square) in values.iter_mut().zip(gradient).zip(average).zip(square) {
            let gradient = simd.mul_f32s(simd.mul_f32s(*gradient, unscale), clip);
            let kept = simd.mul_f32s(*value, keep);
            *average = simd.add_f32s(*average, simd.mul_f32s(one_minus_beta1, simd.sub_f32s(gradient, *average)));
            *square = simd.add_f32s(simd.mul_f32s(*square, beta2), simd.mul_f32s(simd.mul_f32s(one_minus_beta2, gradient), gradient));
            let denominator = simd.add_f32s(simd.div_f32s(simd.sqrt_f32s(*square), correction2_sqrt), epsilon);
            *value = simd.add_f32s(kept, simd.div_f32s(simd.mul_f32s(minus_step_size, *average), denominator));
        }
        // The same arithmetic for what does not fill a vector, so that it does not matter where a parameter lies in its shard.
        for (((value, gradient), average), square) in values_tail.iter_mut().zip(gradient_tail).zip(average_tail).zip(square_tail) {
            let gradient = *gradient * c.unscale * c.clip;
            let kept = *value * c.keep;
            *average += c.one_minus_beta1 * (gradient - *average);
            *square = *square * c.beta2 + c.one_minus_beta2 * gradient * gradient;
            let denominator = square.sqrt() / c.correction2_sqrt + c.epsilon;
            *value = kept + c.minus_step_size * *average / denominator;
        }
    }
}

/// Sum of the squares of `gradient * unscale`. Short runs are added in f32 and those sums in f64.
pub(super) fn squared_norm(gradient: &[f32], unscale: f32) -> f64 {
    let arch = Arch::new();
    gradient.chunks(1024).map(|chunk| f64::from(arch.dispatch(SquaredNorm { gradient: chunk, unscale }))).sum()
}

struct SquaredNorm<'a> {
    gradient: &'a [f32],
    unscale: f32,
}

impl WithSimd for SquaredNorm<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let (gradient, tail) = S::as_simd_f32s(self.gradient);
        let unscale = simd.splat_f32s(self.unscale);
        let (quads, rest) = gradient.as_chunks::<4>();
        // Four sums, so that additions do not wait for each other.
        let mut sums = [simd.splat_f32s(0.0); 4];
        for quad in quads {
            for (sum, gradient) in sums.iter_mut().zip(quad) {
                let gradient = simd.mul_f32s(*gradient, unscale);
                *sum = simd.mul_add_e_f32s(gradient, gradient, *sum);
            }
        }
        for gradient in rest {
            let gradient = simd.mul_f32s(*gradient, unscale);
            sums[0] = simd.mul_add_e_f32s(gradient, gradient, sums[0]);
        }
        let sum = simd.add_f32s(simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3]));
        let tail: f32 = tail.iter().map(|gradient| gradient * self.unscale).map(|gradient| gradient * gradient).sum();
        simd.reduce_sum_f32s(sum) + tail
    }
}
