//! From logits to a token.
//!
//! The order is that of most servers: penalties, then temperature, then top-k, then top-p over what top-k left,
//! then one draw. Arithmetic is in f64 with functions of our own and sums run in the order of ids, so the choice is
//! the same on every machine. Ties go to the lowest id, in the greedy choice and at the border of a filter.

use std::cmp::Ordering;

use proto::{SamplingParams, TokenId};

use crate::exp::{exp, ln};
use crate::random::uniform;

/// Which of a request's sequences this is; requests have one until they can ask for more.
const SEQUENCE: u32 = 0;

/// The tokens before the one to be chosen.
#[derive(Clone, Copy, Debug)]
pub struct History<'a> {
    /// Prompt and output.
    pub tokens: &'a [TokenId],
    /// How many at the end of `tokens` are output.
    pub generated: usize,
    /// Position of the token to be chosen, which picks its random number: `tokens.len()`.
    pub position: usize,
}

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability under the raw logits.
    pub logprob: f32,
}

/// A logit is infinite or not a number.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("the logit of token {token} is {logit}")]
pub struct NotFinite {
    /// The first such token.
    pub token: usize,
    /// Its logit.
    pub logit: f32,
}

/// Chooses tokens; keeps its memory from one to the next.
#[derive(Debug)]
pub struct Sampler {
    /// Logits after penalties, then weights: probabilities times an unknown constant. `[vocab]`
    scores: Vec<f64>,
    /// Times that a token is in the output, and whether it is anywhere. `[vocab]`, zero between choices.
    seen: Vec<Seen>,
    /// Ids that the filters have left.
    kept: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    anywhere: bool,
    in_output: u32,
}

impl Sampler {
    /// A sampler for a vocabulary.
    pub fn new(vocab: usize) -> Self {
        Self {
            scores: Vec::with_capacity(vocab),
            seen: vec![Seen::default(); vocab],
            kept: Vec::with_capacity(vocab),
        }
    }

    /// Chooses the next token. `logits: [vocab]`
    ///
    /// # Errors
    /// When a logit is not finite.
    ///
    /// # Panics
    /// When a token of the history is not in the vocabulary.
    pub fn choose(
        &mut self,
        logits: &[f32],
        history: History<'_>,
        sampling: &SamplingParams,
    ) -> Result<Choice, NotFinite> {
        if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
            return Err(NotFinite { token, logit: logits[token] });
        }
        self.scores.clear();
        self.scores.extend(logits.iter().map(|&logit| f64::from(logit)));
        self.penalise(history, sampling);
        let token = if sampling.temperature == 0.0 {
            first_maximum(&self.scores)
        } else {
            self.filter(sampling);
            self.draw(uniform(sampling.seed, SEQUENCE, history.position as u64))
        };
        Ok(Choice { token, logprob: self.logprob(logits, token) })
    }

    /// Applies repetition penalty (CTRL, Keskar et al. 2019, section 4.1), presence and frequency penalties.
    fn penalise(&mut self, history: History<'_>, sampling: &SamplingParams) {
        let none = sampling.repetition_penalty == 1.0
            && sampling.presence_penalty == 0.0
            && sampling.frequency_penalty == 0.0;
        if none {
            return;
        }
        let prompt_len = history.tokens.len() - history.generated;
        for (position, &token) in history.tokens.iter().enumerate() {
            let seen = &mut self.seen[token as usize];
            seen.anywhere = true;
            seen.in_output += u32::from(position >= prompt_len);
        }
        for &token in history.tokens {
            // Taking it leaves the entry zero: for the token's further occurrences, and for the next choice.
            let seen = std::mem::take(&mut self.seen[token as usize]);
            if !seen.anywhere {
                continue;
            }
            let score = &mut self.scores[token as usize];
            let repetition = f64::from(sampling.repetition_penalty);
            *score = if *score > 0.0 { *score / repetition } else { *score * repetition };
            if seen.in_output > 0 {
                *score -= f64::from(sampling.presence_penalty)
                    + f64::from(sampling.frequency_penalty) * f64::from(seen.in_output);
            }
        }
    }

    /// Puts the ids that top-k and top-p leave into `kept`, ascending, and turns scores into weights.
    fn filter(&mut self, sampling: &SamplingParams) {
        let vocab = self.scores.len();
        self.kept.clear();
        self.kept.extend(0..vocab as TokenId);
        let top_k = sampling.top_k.map_or(vocab, |k| k.max(1) as usize);
        if top_k < vocab {
            let scores = &self.scores;
            self.kept.select_nth_unstable_by(top_k - 1, |&a, &b| likelier(scores, a, b));
            self.kept.truncate(top_k);
            self.kept.sort_unstable();
        }
        let maximum = self.scores[first_maximum(&self.scores) as usize];
        let temperature = f64::from(sampling.temperature);
        for score in &mut self.scores {
            *score = exp((*score - maximum) / temperature);
        }
        if sampling.top_p < 1.0 {
            self.keep_mass(f64::from(sampling.top_p));
            self.kept.sort_unstable();
        }
    }

    /// Keeps the smallest set of the likeliest ids whose share of the kept weight reaches `share`.
    fn keep_mass(&mut self, share: f64) {
        let weights = &self.scores;
        let target = share * self.kept.iter().map(|&id| weights[id as usize]).sum::<f64>();
        // Few ids hold most of the mass as a rule, so the likeliest are sorted first, and all only at need.
        for sorted in [64, 2048, self.kept.len()] {
            let sorted = sorted.min(self.kept.len());
            if sorted < self.kept.len() {
                self.kept.select_nth_unstable_by(sorted - 1, |&a, &b| likelier(weights, a, b));
            }
            self.kept[..sorted].sort_unstable_by(|&a, &b| likelier(weights, a, b));
            let mut mass = 0.0;
            let reaches = self.kept[..sorted].iter().position(|&id| {
                mass += weights[id as usize];
                mass >= target
            });
            if let Some(last) = reaches {
                return self.kept.truncate(last + 1);
            }
        }
    }

    /// The kept id at which the running sum of weights passes `random` of their total.
    fn draw(&self, random: f64) -> TokenId {
        let weight = |id: &TokenId| self.scores[*id as usize];
        let target = random * self.kept.iter().map(weight).sum::<f64>();
        let mut mass = 0.0;
        let passes = self.kept.iter().find(|id| {
            mass += weight(id);
            mass > target
        });
        // `random < 1`, so only rounding can leave the target unpassed.
        *passes.or(self.kept.last()).expect("a filter keeps at least one id")
    }

    /// Log-softmax of the raw logits at `token`. Overwrites the scores.
    fn logprob(&mut self, logits: &[f32], token: TokenId) -> f32 {
        let maximum = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        self.scores.clear();
        self.scores.extend(logits.iter().map(|&logit| exp(f64::from(logit) - f64::from(maximum))));
        let sum: f64 = self.scores.iter().sum();
        (f64::from(logits[token as usize]) - f64::from(maximum) - ln(sum)) as f32
    }
}

/// Orders ids by falling score; equal scores by rising id.
fn likelier(scores: &[f64], a: TokenId, b: TokenId) -> Ordering {
    scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b))
}

/// The lowest id of those with the highest score.
fn first_maximum(scores: &[f64]) -> TokenId {
    let mut best = 0;
    for (id, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = id;
        }
    }
    best as TokenId
}

#[cfg(test)]
mod tests;
