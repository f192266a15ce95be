//! Random numbers that are the same on every machine and in every run: a function of the seed alone.

use std::f64::consts::TAU;

use proto::mix::WEYL;

/// A 64-bit mix of two numbers without visible pattern.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    proto::mix::mix(a.wrapping_add(b.wrapping_mul(WEYL)).wrapping_add(WEYL))
}

/// A stream of random numbers: SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// The stream of that seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: mix(seed, 0x5eed) }
    }

    /// 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(WEYL);
        mix(self.state, 0)
    }

    /// Uniform in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Exponential with that mean.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Standard normal (Box and Muller, 1958; one of the pair).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (TAU * self.unit()).cos()
    }

    /// Log-normal by its median and the standard deviation of its logarithm.
    pub(crate) fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        median * (sigma * self.normal()).exp()
    }

    /// Gamma (Marsaglia and Tsang, *A simple method for generating gamma variables*, 2000).
    pub(crate) fn gamma(&mut self, shape: f64, scale: f64) -> f64 {
        if shape < 1.0 {
            // A gamma of a shape below one is one of shape + 1, times a power of a uniform number.
            let power = (1.0 - self.unit()).powf(1.0 / shape);
            return power * self.gamma(shape + 1.0, scale);
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v <= 0.0 {
                continue;
            }
            let u = 1.0 - self.unit();
            if u.ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v * scale;
            }
        }
    }

    /// An index by weights, of which one at least is positive.
    pub(crate) fn pick(&mut self, weights: impl Iterator<Item = f64> + Clone) -> usize {
        let total: f64 = weights.clone().sum();
        let mut left = self.unit() * total;
        let mut last = 0;
        for (index, weight) in weights.enumerate() {
            last = index;
            if left < weight {
                break;
            }
            left -= weight;
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and coefficient of variation of many draws.
    fn moments(mut draw: impl FnMut() -> f64) -> (f64, f64) {
        let draws: Vec<f64> = (0..40_000).map(|_| draw()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn distributions_have_their_moments() {
        let mut random = Random::new(7);
        let near = |(mean, cv): (f64, f64), expected: (f64, f64)| {
            assert!((mean / expected.0 - 1.0).abs() < 0.05, "{mean} for {}", expected.0);
            assert!((cv / expected.1 - 1.0).abs() < 0.05, "{cv} for {}", expected.1);
        };
        near(moments(|| random.exponential(3.0)), (3.0, 1.0));
        // Shape 1/cv², scale mean · cv².
        near(moments(|| random.gamma(0.25, 8.0)), (2.0, 2.0));
        near(moments(|| random.gamma(4.0, 0.5)), (2.0, 0.5));
        let sigma = 0.5_f64;
        let mean = 100.0 * (sigma * sigma / 2.0).exp();
        near(moments(|| random.log_normal(100.0, sigma)), (mean, ((sigma * sigma).exp() - 1.0).sqrt()));
    }

    #[test]
    fn a_seed_is_a_stream() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            [random.bits(), random.bits()]
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
