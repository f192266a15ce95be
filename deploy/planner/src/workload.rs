//! What users ask for: when requests come, how long they are, and what they share.
//!
//! A workload is a few parameters, from which a seed makes requests; or a trace, which has them. Requests come whether
//! or not earlier ones have been answered, so that every cluster meets the same ones.

mod arrivals;
mod presets;
mod trace;

use proto::{Error, TokenId};
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::random::{Random, mix};

pub use arrivals::Arrivals;
pub use presets::{NAMES, preset};
pub use trace::{TRACE_BLOCK_TOKENS, read_trace};

/// A workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Requests per second, on average.
    pub rate: f64,
    /// How long requests come, seconds; the first tenth warms up and does not count.
    pub seconds: f64,
    /// When they come.
    #[serde(default)]
    pub arrivals: Arrivals,
    /// How long they are: each request is of one of these classes.
    pub lengths: Vec<Lengths>,
    /// What they share.
    #[serde(default)]
    pub sharing: Sharing,
}

/// A class of requests: lengths are log-normal.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lengths {
    /// How many there are of the class, beside the others.
    #[serde(default = "one")]
    pub weight: f64,
    /// Median of the tokens that a request brings, without what it shares; at least 1.
    pub prompt_median: f64,
    /// Standard deviation of their logarithm.
    #[serde(default)]
    pub prompt_sigma: f64,
    /// Median of the tokens of an output; at least 1.
    pub output_median: f64,
    /// Standard deviation of their logarithm.
    #[serde(default)]
    pub output_sigma: f64,
}

fn one() -> f64 {
    1.0
}

/// What requests have in common at their beginnings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sharing {
    /// Different system prompts; 0 for none.
    pub system_prompts: usize,
    /// Tokens of each.
    pub system_tokens: usize,
    /// How uneven they are used: the n-th most popular one 1/n^skew as often as the first (Zipf).
    pub system_skew: f64,
    /// Requests of a session, on average; each brings all that was said before it. At least 1.
    pub turns: f64,
    /// From one request of a session to the next, seconds, on average.
    pub think_seconds: f64,
}

impl Default for Sharing {
    fn default() -> Self {
        Self { system_prompts: 0, system_tokens: 0, system_skew: 1.0, turns: 1.0, think_seconds: 0.0 }
    }
}

/// A run of tokens: those of a stream of random tokens from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which stream.
    pub stream: u64,
    /// The first token.
    pub start: usize,
    /// How many.
    pub len: usize,
}

/// A request that will come.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// When, seconds from the start.
    pub at: f64,
    /// Tokens of the prompt; at least 1.
    pub prompt: usize,
    /// Tokens of the output; at least 1.
    pub output: usize,
    /// What prompt and output are made of, one after the other.
    pub parts: Vec<Part>,
}

/// Ids of tokens are below this.
const VOCABULARY: u64 = 100_000;

impl Arrival {
    /// Appends the tokens of prompt and output.
    pub fn tokens(&self, out: &mut Vec<TokenId>) {
        out.reserve(self.prompt + self.output);
        for part in &self.parts {
            let tokens = part.start..part.start + part.len;
            out.extend(tokens.map(|index| (mix(part.stream, index as u64) % VOCABULARY) as TokenId));
        }
    }
}

/// Most requests of a session.
const TURNS_MAX: usize = 64;
/// Sessions begin this many of their lengths before the start, so that they are in all stages when it comes.
const AHEAD: f64 = 4.0;

impl Workload {
    /// Refuses what no workload can be. `at` is put before the names of fields.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the field.
    pub fn validate(&self, at: &str) -> Result<(), Error> {
        let above = |field: &str, value: f64, least: f64, open: bool| {
            if value.is_finite() && (value > least || (!open && value == least)) {
                return Ok(());
            }
            let bound = if open { format!("more than {least}") } else { format!("a number from {least}") };
            Err(Error::invalid(&format!("{at}{field}"), format_args!("{bound} expected, {value} came")))
        };
        above("rate", self.rate, 0.0, true)?;
        above("seconds", self.seconds, 0.0, true)?;
        self.arrivals.validate(&format!("{at}arrivals."))?;
        if self.lengths.is_empty() {
            return Err(Error::invalid(&format!("{at}lengths"), "at least one class expected, none came"));
        }
        for (index, class) in self.lengths.iter().enumerate() {
            let field = |name: &str| format!("lengths[{index}].{name}");
            above(&field("weight"), class.weight, 0.0, true)?;
            above(&field("prompt_median"), class.prompt_median, 1.0, false)?;
            above(&field("prompt_sigma"), class.prompt_sigma, 0.0, false)?;
            above(&field("output_median"), class.output_median, 1.0, false)?;
            above(&field("output_sigma"), class.output_sigma, 0.0, false)?;
        }
        above("sharing.system_skew", self.sharing.system_skew, 0.0, false)?;
        above("sharing.turns", self.sharing.turns, 1.0, false)?;
        above("sharing.think_seconds", self.sharing.think_seconds, 0.0, false)?;
        if self.sharing.system_prompts > 0 && self.sharing.system_tokens == 0 {
            let message = "at least 1 expected beside system_prompts, 0 came";
            return Err(Error::invalid(&format!("{at}sharing.system_tokens"), message));
        }
        Ok(())
    }

    /// The same, with requests that come `factor` times as often.
    #[must_use]
    pub fn faster(&self, factor: f64) -> Self {
        Self { rate: self.rate * factor, ..self.clone() }
    }

    /// The requests of that seed, in the order in which they come. Prompts and outputs are cut to `context_len`.
    pub fn requests(&self, seed: u64, context_len: usize) -> Vec<Arrival> {
        let ahead = if self.sharing.turns > 1.0 {
            AHEAD * self.sharing.turns * self.sharing.think_seconds
        } else {
            0.0
        };
        let sessions_rate = self.rate / self.sharing.turns;
        let starts = self.arrivals.times(sessions_rate, -ahead..self.seconds, &mut Random::new(mix(seed, 1)));
        let mut requests = Vec::new();
        for (session, start) in starts.into_iter().enumerate() {
            // Each session draws from its own stream, so that one that is longer does not change the others.
            let random = Random::new(mix(mix(seed, 2), session as u64));
            self.session(start, context_len, mix(mix(seed, 3), session as u64), random, &mut requests);
        }
        requests.sort_by(|a, b| a.at.total_cmp(&b.at));
        requests
    }

    /// The requests of a session that starts at that time.
    fn session(
        &self,
        start: f64,
        context_len: usize,
        stream: u64,
        mut random: Random,
        out: &mut Vec<Arrival>,
    ) {
        let system = self.system_part(&mut random).filter(|system| system.len + 2 <= context_len);
        let shared = system.map_or(0, |system| system.len);
        let (mut at, mut history) = (start, 0);
        for _ in 0..TURNS_MAX {
            let class = self.lengths[random.pick(self.lengths.iter().map(|class| class.weight))];
            let draw = |random: &mut Random, median, sigma| {
                (random.log_normal(median, sigma).round() as usize).max(1)
            };
            let brought = draw(&mut random, class.prompt_median, class.prompt_sigma);
            let output = draw(&mut random, class.output_median, class.output_sigma);
            // At least one token of output has room.
            let room = context_len.saturating_sub(shared + history + 1);
            if room == 0 {
                return;
            }
            let prompt = history + brought.min(room);
            let output = output.min(context_len - shared - prompt);
            if at >= 0.0 && at < self.seconds {
                let said = Part { stream, start: 0, len: prompt + output };
                let parts = system.into_iter().chain([said]).collect();
                out.push(Arrival { at, prompt: shared + prompt, output, parts });
            }
            history = prompt + output;
            if random.unit() >= 1.0 - 1.0 / self.sharing.turns {
                return;
            }
            at += random.exponential(self.sharing.think_seconds);
        }
    }

    fn system_part(&self, random: &mut Random) -> Option<Part> {
        let Sharing { system_prompts, system_tokens, system_skew, .. } = self.sharing;
        if system_prompts == 0 {
            return None;
        }
        let index = random.pick((1..=system_prompts).map(|rank| (rank as f64).powf(-system_skew)));
        Some(Part { stream: mix(0x5757, index as u64), start: 0, len: system_tokens })
    }
}

/// The share of a worker's time that a request takes when workers are well used, seconds: a first guess at what a
/// cluster can take, for rates and searches to start from.
pub fn demand_seconds(requests: &[Arrival], machine: &Machine) -> f64 {
    let (prices, sizes) = (machine.prices, machine.sizes);
    let mut sum = 0.0;
    for request in requests {
        let context = request.prompt as f64 + request.output as f64 / 2.0;
        let fit = (sizes.kv_blocks * sizes.block_tokens) as f64 / context;
        let batch = (sizes.sequences_max as f64 / 4.0).min(fit / 2.0).max(1.0);
        let token = prices.step_seconds / batch
            + prices.decode_sequence_seconds
            + prices.decode_context_seconds * context;
        sum += prices.prefill(request.prompt, sizes.step_tokens) + request.output as f64 * token;
    }
    sum / requests.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_valid_and_keep_their_rates() {
        for name in NAMES {
            let workload = Workload { rate: 20.0, seconds: 400.0, ..preset(name).unwrap() };
            workload.validate("").unwrap();
            let requests = workload.requests(1, 131_072);
            let rate = requests.len() as f64 / workload.seconds;
            assert!((rate / workload.rate - 1.0).abs() < 0.25, "{name}: {rate} requests/s");
            assert!(requests.windows(2).all(|pair| pair[0].at <= pair[1].at), "{name}");
            assert_eq!(requests, workload.requests(1, 131_072), "{name}");
            for request in &requests {
                let tokens: usize = request.parts.iter().map(|part| part.len).sum();
                assert_eq!(tokens, request.prompt + request.output, "{name}");
                assert!(
                    request.prompt + request.output <= 131_072 && request.prompt > 0 && request.output > 0
                );
            }
        }
    }

    #[test]
    fn a_turn_begins_with_all_that_was_said_before_it() {
        let sharing = Sharing {
            system_prompts: 1,
            system_tokens: 32,
            turns: 4.0,
            think_seconds: 5.0,
            ..Sharing::default()
        };
        let workload = Workload { rate: 2.0, seconds: 200.0, sharing, ..preset("chat").unwrap() };
        let requests = workload.requests(5, 8192);
        let mut continued = 0;
        for (index, request) in requests.iter().enumerate() {
            let stream = request.parts[1].stream;
            let Some(before) = requests[..index].iter().rev().find(|other| other.parts[1].stream == stream)
            else {
                continue;
            };
            let (mut old, mut new) = (Vec::new(), Vec::new());
            before.tokens(&mut old);
            request.tokens(&mut new);
            assert!(request.prompt > old.len() && new.starts_with(&old));
            continued += 1;
        }
        assert!(continued > 100, "{continued}");
    }

    #[test]
    fn faults_name_their_field() {
        let fault = |change: fn(&mut Workload)| {
            let mut workload = preset("chat").unwrap();
            change(&mut workload);
            workload.validate("workload.").unwrap_err().message
        };
        assert!(fault(|w| w.rate = 0.0).starts_with("workload.rate: more than 0 expected"));
        assert!(fault(|w| w.lengths.clear()).starts_with("workload.lengths: "));
        assert!(
            fault(|w| w.lengths[0].output_median = 0.5).starts_with("workload.lengths[0].output_median: ")
        );
        assert!(fault(|w| w.sharing.turns = 0.0).starts_with("workload.sharing.turns: "));
        assert!(fault(|w| w.sharing.system_prompts = 2).starts_with("workload.sharing.system_tokens: "));
        assert!(fault(|w| w.arrivals = Arrivals::Gamma { cv: 0.0 }).starts_with("workload.arrivals.cv: "));
    }
}
