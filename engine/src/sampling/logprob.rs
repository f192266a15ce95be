//! Log-probabilities of raw logits.

use proto::{TokenId, TokenLogprob};

use super::NoChoice;
use crate::backend::cpu::isa::{InstructionSet, Isa, Kernel, LANES, Lane, exp};
use crate::exp::ln;

/// The probabilities that logits stand for.
pub(super) struct Distribution<'a> {
    /// `[vocab]`, all finite
    logits: &'a [f32],
    maximum: f32,
    /// ln of the sum of e^(logit - maximum)
    ln_sum: f64,
}

impl<'a> Distribution<'a> {
    /// Reads the logits twice: for their maximum, and for the sum of their exponentials.
    pub(super) fn of(set: InstructionSet, logits: &'a [f32]) -> Result<Self, NoChoice> {
        let (maximum, are_finite) = set.run(Maximum(logits));
        if !are_finite {
            let token = logits.iter().position(|logit| !logit.is_finite()).unwrap_or_default();
            return Err(NoChoice::NotFinite { token, logit: logits[token] });
        }
        let ln_sum = ln(set.run(SumOfExponentials { logits, maximum }));
        Ok(Self { logits, maximum, ln_sum })
    }

    /// Log-softmax at `token`.
    pub(super) fn logprob(&self, token: TokenId) -> f32 {
        (f64::from(self.logits[token as usize]) - f64::from(self.maximum) - self.ln_sum) as f32
    }

    /// The lowest id of those with the highest logit.
    pub(super) fn likeliest(&self) -> TokenId {
        let (chunks, rest) = self.logits.as_chunks::<LANES>();
        // Without an early exit inside the chunk it takes a few instructions.
        let has = |lane: &Lane| lane.contains(&self.maximum);
        let chunk = chunks.iter().position(has);
        let (start, lane) = match chunk {
            Some(chunk) => (chunk * LANES, &chunks[chunk][..]),
            None => (chunks.len() * LANES, rest),
        };
        let at = lane.iter().position(|&logit| logit == self.maximum);
        (start + at.expect("the maximum is one of them")) as TokenId
    }

    /// The `count` likeliest tokens, falling; of equals the lowest id first.
    pub(super) fn top(&self, count: usize) -> Vec<TokenLogprob> {
        let count = count.min(self.logits.len());
        let mut best: Vec<TokenId> = Vec::with_capacity(count + 1);
        if count > 0 {
            let mut least = f32::NEG_INFINITY;
            for (id, &logit) in (0..).zip(self.logits) {
                if best.len() < count || logit > least {
                    // A later id goes behind its equals.
                    let place = best.partition_point(|&other| self.logits[other as usize] >= logit);
                    best.insert(place, id);
                    best.truncate(count);
                    if best.len() == count {
                        least = self.logits[best[count - 1] as usize];
                    }
                }
            }
        }
        best.into_iter().map(|id| TokenLogprob { id, logprob: self.logprob(id) }).collect()
    }
}

/// The greatest logit, and whether all are finite.
struct Maximum<'a>(&'a [f32]);

impl Kernel for Maximum<'_> {
    type Output = (f32, bool);

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) -> (f32, bool) {
        let (lanes, rest) = self.0.as_chunks::<LANES>();
        let (mut maximum, mut zeros) = (isa.splat(f32::MIN), isa.splat(0.0));
        for lane in lanes {
            let x = isa.load(lane);
            maximum = isa.max(maximum, x);
            // Infinity or NaN times 0 is NaN, and so is every sum with one.
            zeros = isa.fma(x, isa.splat(0.0), zeros);
        }
        let mut lane = [0.0; LANES];
        isa.store(maximum, &mut lane);
        let maximum = lane.iter().chain(rest).copied().fold(f32::MIN, f32::max);
        (maximum, isa.fold(zeros) == 0.0 && rest.iter().all(|logit| logit.is_finite()))
    }
}

/// The sum of e^(logit - maximum), each within 2 units in the last place of an f32; at least 1.
struct SumOfExponentials<'a> {
    logits: &'a [f32],
    maximum: f32,
}

/// Lanes that are summed in f32 before they go into the f64 sum.
const LANES_PER_SUM: usize = 32;

impl Kernel for SumOfExponentials<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) -> f64 {
        let maximum = isa.splat(self.maximum);
        let term = |lane: &Lane| exp(isa, isa.sub(isa.load(lane), maximum));
        let (lanes, rest) = self.logits.as_chunks::<LANES>();
        let mut sum = 0.0;
        for lanes in lanes.chunks(LANES_PER_SUM) {
            let terms = lanes.iter().fold(isa.splat(0.0), |terms, lane| isa.add(terms, term(lane)));
            sum += f64::from(isa.fold(terms));
        }
        if !rest.is_empty() {
            let mut lane = [self.maximum; LANES];
            lane[..rest.len()].copy_from_slice(rest);
            isa.store(term(&lane), &mut lane);
            sum += lane[..rest.len()].iter().copied().map(f64::from).sum::<f64>();
        }
        sum
    }
}
