//! Exponential and logarithm in plain f64 operations. The platform's own differ in the last bit between C libraries
//! and processors, and a sampled token must not.

/// e^x for x <= 0, to about one unit in the last place. Below -700 the result is that of -700 (about 1e-304), so
/// that no weight is zero; NaN gives NaN.
///
/// Cody and Waite's reduction, x = k ln 2 + r with |r| <= ln 2 / 2, then the Taylor series of e^r.
pub(crate) fn exp(x: f64) -> f64 {
    // ln 2 in two parts: the first has 21 low zero bits, so that its product with k is exact.
    const LN_2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    // Adding 1.5 * 2^52 rounds to an integer and leaves that integer in the low bits.
    const ROUNDER: f64 = 6_755_399_441_055_744.0;
    let x = x.max(-700.0);
    let shifted = x * std::f64::consts::LOG2_E + ROUNDER;
    let k = shifted - ROUNDER;
    let r = (x - k * LN_2_HIGH) - k * LN_2_LOW;
    let series = INVERSE_FACTORIALS.iter().rev().fold(0.0, |sum, term| sum * r + term);
    let power = f64::from_bits((shifted.to_bits().wrapping_add(1023)) << 52);
    series * power
}

/// 1 / n!
const INVERSE_FACTORIALS: [f64; 14] = {
    let mut terms = [1.0; 14];
    let mut n = 1;
    while n < terms.len() {
        terms[n] = terms[n - 1] / n as f64;
        n += 1;
    }
    terms
};

/// ln x for a normal x > 0, to about one unit in the last place of the larger of the result and 1.
///
/// x = 2^k m with m in [1/sqrt 2, sqrt 2), and ln m = 2 artanh((m - 1) / (m + 1)) by its series.
pub(crate) fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut k = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & 0x000F_FFFF_FFFF_FFFF | 0x3FF0_0000_0000_0000);
    if m > std::f64::consts::SQRT_2 {
        m /= 2.0;
        k += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let series = (0..12).rev().fold(0.0, |sum, n| sum * square + 1.0 / (2 * n + 1) as f64);
    k as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_platforms() {
        for i in 0..70_000 {
            let x = -f64::from(i) / 100.0;
            let (ours, theirs) = (exp(x), x.exp());
            assert!((ours - theirs).abs() <= 4.0 * f64::EPSILON * theirs, "{x}: {ours} {theirs}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e300), exp(-700.0));
        assert!(exp(f64::NEG_INFINITY) > 0.0);
    }

    #[test]
    fn ln_is_close_to_the_platforms() {
        for i in 1..100_000 {
            let x = f64::from(i) * 0.37;
            let (ours, theirs) = (ln(x), x.ln());
            assert!(
                (ours - theirs).abs() <= 4.0 * f64::EPSILON * theirs.abs().max(1.0),
                "{x}: {ours} {theirs}"
            );
        }
        assert_eq!(ln(1.0), 0.0);
    }
}
