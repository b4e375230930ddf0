//! Elementary functions that compilers can vectorise, accurate to an ulp or two of f32.

/// `e^x`; 0 below -87.3 and 2.4e38 above 88.3, so that no infinity is made.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts, so that `x - n ln 2` is exact enough.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.3);
    let shifted = clamped * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut p = 1.987_569_2e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let value = (p * r * r + r) + 1.0;
    let scale = f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    let result = value * scale;
    if x < -87.3 { 0.0 } else { result }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The probability that a normally distributed number is below `x`, to 1.5e-7: Abramowitz and Stegun 7.1.26.
#[inline(always)]
pub(crate) fn normal_cdf(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let polynomial = t * (0.254_829_6 + t * (-0.284_496_74 + t * (1.421_413_7 + t * (-1.453_152 + t * 1.061_405_4))));
    let tail = 0.5 * polynomial * exp(-z * z);
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// A well-mixed 64-bit hash of `seed` and `index`: the random numbers of dropout, which can be drawn again in backward instead of being kept.
#[inline(always)]
pub(crate) fn hash(seed: u64, index: u64) -> u64 {
    // The finaliser of SplitMix64.
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Factor of a value under dropout: 0 with probability `p`, otherwise `1 / (1 - p)`.
#[inline(always)]
pub(crate) fn dropout_factor(seed: u64, index: u64, p: f32) -> f32 {
    let uniform = (hash(seed, index) >> 40) as f32 / (1u64 << 24) as f32;
    if uniform < p { 0.0 } else { 1.0 / (1.0 - p) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the standard library over all of the range that matters.
    #[test]
    fn exponentials_are_accurate() {
        for step in -870_000..=880_000 {
            let x = step as f32 * 1e-4;
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) - want).abs() / want;
            assert!(error < 3e-7, "exp({x}): relative error {error}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    /// Dropout with p = 0.1 keeps nine of ten, whatever the seed, and is the same when asked again.
    #[test]
    fn dropout_keeps_its_share() {
        for seed in 0..4 {
            let kept = (0..100_000).filter(|&index| dropout_factor(seed, index, 0.1) > 0.0).count();
            assert!((89_500..90_500).contains(&kept), "kept {kept}");
            assert_eq!(dropout_factor(seed, 7, 0.5), dropout_factor(seed, 7, 0.5));
        }
    }
}
