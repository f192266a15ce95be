//! When requests come.

use std::f64::consts::TAU;
use std::ops::Range;

use proto::Error;
use serde::{Deserialize, Serialize};

use crate::random::Random;

/// A process of arrivals with a given average rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "shape", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Arrivals {
    /// Independent of each other.
    #[default]
    Poisson,
    /// Gamma-distributed gaps, as BurstGPT (Wang et al., 2024) finds them: a coefficient of variation of 1 is Poisson,
    /// above it requests come in bursts, below it evenly.
    Gamma {
        /// Coefficient of variation of the gaps.
        cv: f64,
    },
    /// A Markov-modulated Poisson process of two states, calm and burst, each of exponential length.
    OnOff {
        /// Rate in a burst, in average rates.
        burst: f64,
        /// Length of a burst, seconds, on average.
        burst_seconds: f64,
        /// Length of the calm between two, seconds, on average.
        calm_seconds: f64,
    },
    /// A Poisson process whose rate goes up and down like a day's.
    Diurnal {
        /// Length of a day, seconds.
        period_seconds: f64,
        /// How far the rate goes up and down, as a part of the average; at most 1.
        swing: f64,
    },
}

impl Arrivals {
    /// Refuses what no process can be. `at` is put before the names of fields.
    pub(super) fn validate(&self, at: &str) -> Result<(), Error> {
        let positive = |field: &str, value: f64| {
            if value.is_finite() && value > 0.0 {
                return Ok(());
            }
            Err(Error::invalid(&format!("{at}{field}"), format_args!("more than 0 expected, {value} came")))
        };
        match *self {
            Self::Poisson => Ok(()),
            Self::Gamma { cv } => positive("cv", cv),
            Self::OnOff { burst, burst_seconds, calm_seconds } => {
                positive("burst_seconds", burst_seconds)?;
                positive("calm_seconds", calm_seconds)?;
                let most = (burst_seconds + calm_seconds) / burst_seconds;
                if (1.0..=most).contains(&burst) {
                    return Ok(());
                }
                let message =
                    format_args!("1 to {most:.2} expected, so that the calm has the rest, {burst} came");
                Err(Error::invalid(&format!("{at}burst"), message))
            }
            Self::Diurnal { period_seconds, swing } => {
                positive("period_seconds", period_seconds)?;
                if (0.0..=1.0).contains(&swing) {
                    return Ok(());
                }
                Err(Error::invalid(&format!("{at}swing"), format_args!("0 to 1 expected, {swing} came")))
            }
        }
    }

    /// The times of a seed within `span`, seconds.
    pub(super) fn times(&self, rate: f64, span: Range<f64>, random: &mut Random) -> Vec<f64> {
        let mut times = Vec::new();
        let mut at = span.start;
        match *self {
            Self::Poisson => loop {
                at += random.exponential(1.0 / rate);
                if at >= span.end {
                    break;
                }
                times.push(at);
            },
            Self::Gamma { cv } => loop {
                at += random.gamma(1.0 / (cv * cv), cv * cv / rate);
                if at >= span.end {
                    break;
                }
                times.push(at);
            },
            Self::OnOff { burst, burst_seconds, calm_seconds } => {
                let calm = (burst_seconds + calm_seconds - burst * burst_seconds) / calm_seconds;
                let mut in_burst = false;
                while at < span.end {
                    let (length, factor) =
                        if in_burst { (burst_seconds, burst) } else { (calm_seconds, calm) };
                    let end = at + random.exponential(length);
                    // Arrivals of a Poisson process have no memory, so each state starts its own.
                    if factor > 0.0 {
                        let gap = 1.0 / (rate * factor);
                        let mut next = at + random.exponential(gap);
                        while next < end.min(span.end) {
                            times.push(next);
                            next += random.exponential(gap);
                        }
                    }
                    at = end;
                    in_burst = !in_burst;
                }
            }
            Self::Diurnal { period_seconds, swing } => loop {
                // Thinning (Lewis and Shedler, 1979): arrivals at the highest rate, of which each stays by chance.
                at += random.exponential(1.0 / (rate * (1.0 + swing)));
                if at >= span.end {
                    break;
                }
                let now = 1.0 + swing * (TAU * at / period_seconds).sin();
                if random.unit() * (1.0 + swing) < now {
                    times.push(at);
                }
            },
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [Arrivals; 4] = [
        Arrivals::Poisson,
        Arrivals::Gamma { cv: 3.0 },
        Arrivals::OnOff { burst: 4.0, burst_seconds: 5.0, calm_seconds: 20.0 },
        Arrivals::Diurnal { period_seconds: 100.0, swing: 0.8 },
    ];

    #[test]
    fn every_shape_keeps_the_average_rate_and_only_some_are_bursty() {
        // Variance of the counts of a second, over their mean: 1 for Poisson.
        let dispersion = SHAPES.map(|shape| {
            shape.validate("").unwrap();
            let times = shape.times(10.0, 0.0..4000.0, &mut Random::new(11));
            let rate = times.len() as f64 / 4000.0;
            assert!((rate / 10.0 - 1.0).abs() < 0.1, "{shape:?}: {rate}");
            let mut counts = vec![0.0; 4000];
            times.iter().for_each(|at| counts[*at as usize] += 1.0);
            counts.iter().map(|count| (count - rate).powi(2)).sum::<f64>() / 4000.0 / rate
        });
        assert!((dispersion[0] - 1.0).abs() < 0.15, "{dispersion:?}");
        assert!(dispersion[1..].iter().all(|other| *other > 2.0), "{dispersion:?}");
    }

    #[test]
    fn a_burst_leaves_something_for_the_calm() {
        let shape = Arrivals::OnOff { burst: 6.0, burst_seconds: 5.0, calm_seconds: 20.0 };
        assert!(
            shape
                .validate("arrivals.")
                .unwrap_err()
                .message
                .starts_with("arrivals.burst: 1 to 5.00 expected")
        );
    }
}
