//! What became of the requests: goodput, latencies, and how well the workers were used.

use proto::Error;
use serde::{Deserialize, Serialize};

use crate::machine::{Machine, StepWork};
use crate::workload::Arrival;

/// What a request must keep to be a good one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slo {
    /// Longest time to the first token, seconds.
    pub ttft_seconds: f64,
    /// Longest time per output token after the first, seconds, on average over the request.
    pub tpot_seconds: f64,
}

/// What [`Slo::of`] allows: tokens so many times as slow as one sequence alone makes them...
const TPOT_SLACK: f64 = 5.0;
/// ...and prompts so many times as long as one alone takes...
const TTFT_SLACK: f64 = 4.0;
/// ...with this on top, seconds.
const TTFT_LEAST: f64 = 0.25;

impl Slo {
    /// Limits that suit machine and requests where nobody names any: four times what nine tenths of the prompts take on
    /// an idle worker, and five times what a token does.
    pub fn of(machine: &Machine, requests: &[Arrival]) -> Self {
        let mut prompts: Vec<usize> = requests.iter().map(|request| request.prompt).collect();
        prompts.sort_unstable();
        let long = prompts.get(prompts.len() * 9 / 10).copied().unwrap_or(1);
        let mut token = StepWork::default();
        token.add_decode(long);
        let prefill = machine.prices.prefill(long, machine.sizes.step_tokens);
        // To two digits: it is a choice, not a measurement.
        let round = |seconds: f64| {
            let unit = 10_f64.powf(seconds.log10().floor() - 1.0);
            (seconds / unit).round() * unit
        };
        Self {
            ttft_seconds: round(TTFT_LEAST + TTFT_SLACK * prefill),
            tpot_seconds: round(TPOT_SLACK * machine.prices.step(&token)),
        }
    }

    /// Refuses limits that nothing can keep. `at` is put before the names of fields.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the field.
    pub fn validate(&self, at: &str) -> Result<(), Error> {
        let limits = [("ttft_seconds", self.ttft_seconds), ("tpot_seconds", self.tpot_seconds)];
        match limits.into_iter().find(|&(_, value)| !value.is_finite() || value <= 0.0) {
            Some((field, value)) => Err(Error::invalid(
                &format!("{at}{field}"),
                format_args!("more than 0 expected, {value} came"),
            )),
            None => Ok(()),
        }
    }
}

/// What became of a request. Times in seconds from the start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) at: f64,
    pub(crate) prompt: usize,
    pub(crate) output: usize,
    /// Tokens of the prompt that were cached where it was computed first.
    pub(crate) cached: Option<usize>,
    pub(crate) first: Option<f64>,
    pub(crate) last: Option<f64>,
    pub(crate) is_finished: bool,
}

impl Outcome {
    fn ttft(&self) -> Option<f64> {
        Some(self.first? - self.at)
    }

    /// `None` for an output of one token, which has no time between tokens.
    fn tpot(&self) -> Option<f64> {
        let gaps = self.output.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some((self.last? - self.first?) / gaps as f64)
    }

    fn is_good(&self, slo: Slo) -> bool {
        self.is_finished
            && self.ttft().is_some_and(|ttft| ttft <= slo.ttft_seconds)
            && self.tpot().is_none_or(|tpot| tpot <= slo.tpot_seconds)
    }
}

/// A distribution.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quantiles {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Quantiles {
    /// Of these values; zeros when there are none.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        // The smallest value that at least the share `part` of all do not exceed.
        let at =
            |part: f64| values[((values.len() as f64 * part).ceil() as usize).clamp(1, values.len()) - 1];
        Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: at(0.5),
            p95: at(0.95),
            p99: at(0.99),
        }
    }
}

/// What is counted over all requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    pub(crate) seconds: f64,
    pub(crate) workers: usize,
    pub(crate) prefill_used: f64,
    pub(crate) decode_used: f64,
    pub(crate) split: f64,
    pub(crate) switches: usize,
    pub(crate) retries: u64,
    pub(crate) preemptions: u64,
    pub(crate) transferred_bytes: f64,
    pub(crate) events: u64,
    pub(crate) tokens: u64,
}

/// What a simulation found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Requests that count: all but those of the warm-up.
    pub requests: usize,
    /// Those that got all their tokens.
    pub finished: usize,
    /// Requests per second that came.
    pub offered: f64,
    /// Requests per second that kept their limits.
    pub goodput: f64,
    /// Part of the requests that kept their limits.
    pub attainment: f64,
    /// Time to the first token, seconds.
    pub ttft: Quantiles,
    /// Time per output token after the first, seconds.
    pub tpot: Quantiles,
    /// Part of all tokens of prompts that were cached where they were needed.
    pub hit_rate: f64,
    /// Part of the time in which prefill workers stepped.
    pub prefill_used: f64,
    /// Part of the time in which decode workers stepped.
    pub decode_used: f64,
    /// Part of the placements that were split.
    pub split: f64,
    /// How often a router placed a request in another way than the one before it of the same size (to a power of two),
    /// per worker and minute.
    pub switches_per_worker_minute: f64,
    /// Attempts that were refused or failed.
    pub retries: u64,
    /// Sequences that had to make room for others.
    pub preemptions: u64,
    /// KV that was sent, bytes.
    pub transferred_bytes: f64,
    /// Events of the simulation.
    pub events: u64,
    /// Tokens of all outputs.
    pub tokens: u64,
}

impl Report {
    pub(crate) fn new(outcomes: &[Outcome], totals: Totals, slo: Slo) -> Self {
        let seconds = totals.seconds.max(1e-9);
        let good = outcomes.iter().filter(|outcome| outcome.is_good(slo)).count();
        let prompts: usize = outcomes.iter().filter(|o| o.cached.is_some()).map(|o| o.prompt).sum();
        let cached: usize = outcomes.iter().filter_map(|outcome| outcome.cached).sum();
        Self {
            requests: outcomes.len(),
            finished: outcomes.iter().filter(|outcome| outcome.is_finished).count(),
            offered: outcomes.len() as f64 / seconds,
            goodput: good as f64 / seconds,
            attainment: good as f64 / outcomes.len().max(1) as f64,
            ttft: Quantiles::of(outcomes.iter().filter_map(Outcome::ttft)),
            tpot: Quantiles::of(outcomes.iter().filter(|o| o.is_finished).filter_map(Outcome::tpot)),
            hit_rate: cached as f64 / prompts.max(1) as f64,
            prefill_used: totals.prefill_used,
            decode_used: totals.decode_used,
            split: totals.split,
            switches_per_worker_minute: totals.switches as f64 / (totals.workers as f64 * seconds / 60.0),
            retries: totals.retries,
            preemptions: totals.preemptions,
            transferred_bytes: totals.transferred_bytes,
            events: totals.events,
            tokens: totals.tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let quantiles = Quantiles::of((1..=100).map(f64::from));
        assert_eq!(quantiles, Quantiles { mean: 50.5, p50: 50.0, p95: 95.0, p99: 99.0 });
        assert_eq!(Quantiles::of([7.0].into_iter()).p99, 7.0);
        assert_eq!(Quantiles::of(std::iter::empty()), Quantiles::default());
    }

    #[test]
    fn a_good_request_keeps_both_limits_to_its_end() {
        let slo = Slo { ttft_seconds: 1.0, tpot_seconds: 0.1 };
        let good = Outcome {
            at: 10.0,
            prompt: 100,
            output: 11,
            cached: Some(50),
            first: Some(11.0),
            last: Some(12.0),
            is_finished: true,
        };
        let outcomes = [
            good,
            Outcome { first: Some(11.1), ..good },
            Outcome { last: Some(12.1), ..good },
            Outcome { is_finished: false, ..good },
            Outcome { output: 1, cached: None, last: Some(11.0), ..good },
        ];
        let report = Report::new(&outcomes, Totals { seconds: 2.0, workers: 1, ..Totals::default() }, slo);
        assert_eq!((report.requests, report.finished), (5, 4));
        assert_eq!((report.offered, report.goodput, report.attainment), (2.5, 1.0, 0.4));
        assert_eq!(report.hit_rate, 0.5);
    }

    #[test]
    fn limits_suit_the_machine() {
        let machine = Machine::preset("gpu-8b").unwrap();
        let requests = crate::workload::preset("code").unwrap().requests(1, 8192);
        let slo = Slo::of(&machine, &requests);
        assert!((0.3..3.0).contains(&slo.ttft_seconds), "{slo:?}");
        assert!((0.03..0.05).contains(&slo.tpot_seconds), "{slo:?}");
        let fault = Slo { tpot_seconds: 0.0, ..slo }.validate("slo.").unwrap_err().message;
        assert!(fault.starts_with("slo.tpot_seconds: more than 0"), "{fault}");
    }
}
