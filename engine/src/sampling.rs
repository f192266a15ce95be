//! From logits to a token.
//!
//! The order is vLLM's, with what vLLM does not have put where it belongs:
//!
//! 1. logit bias;
//! 2. repetition penalty, then presence and frequency penalties;
//! 3. watermark;
//! 4. masks, which exclude tokens for good: allowed tokens, a grammar's, bad words, ends before `min_tokens`;
//! 5. a greedy choice is made here. Otherwise temperature, then the filters top-k, top-p, typical-p and min-p, each over
//!    what the one before has left; then one draw.
//!
//! Log-probabilities are of the raw logits, before all that. Arithmetic is in f64 or in f32 whose every operation is rounded
//! once, with functions of our own, and sums run in a fixed order, so a choice is the same on every machine. Ties go to the
//! lowest id, in the greedy choice, at the border of a filter and among the likeliest.

mod adjust;
mod filter;
mod logprob;

use std::cmp::Ordering;

use proto::{SamplingParams, StopConditions, TokenId, TokenLogprob};

use crate::backend::cpu::isa::InstructionSet;
use crate::random::uniform;
use adjust::Seen;
use logprob::Distribution;

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

impl<'a> History<'a> {
    /// The tokens generated so far.
    fn output(&self) -> &'a [TokenId] {
        &self.tokens[self.tokens.len() - self.generated..]
    }
}

/// What a choice keeps to besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// How to choose.
    pub sampling: &'a SamplingParams,
    /// Which tokens end the output, and how early they may.
    pub stop: &'a StopConditions,
    /// What a grammar allows now: bit `id % 32` of word `id / 32` for each token; ids beyond are not allowed.
    /// `None` allows all.
    pub allowed: Option<&'a [u32]>,
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm of its probability under the raw logits.
    pub logprob: f32,
    /// The likeliest tokens under the raw logits, falling, as many as were asked for.
    pub top: Vec<TokenLogprob>,
}

/// Why no token can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum NoChoice {
    /// A logit is infinite or not a number.
    #[error("the logit of token {token} is {logit}")]
    NotFinite {
        /// The first such token.
        token: usize,
        /// Its logit.
        logit: f32,
    },
    /// The masks exclude every token.
    #[error("allowed_token_ids, bad_words, min_tokens and grammar together leave no token to choose")]
    NothingLeft,
}

/// Chooses tokens; keeps its memory from one to the next.
#[derive(Debug)]
pub struct Sampler {
    set: InstructionSet,
    /// Adjusted logits, negative infinity where masked; then, of kept tokens, weights: probabilities times an
    /// unknown constant. `[vocab]`
    scores: Vec<f64>,
    /// What a filter sorts by when that is not the weight. `[vocab]`
    keys: Vec<f64>,
    /// Times that a token is in the output, and whether it is anywhere. `[vocab]`, zero between choices.
    seen: Vec<Seen>,
    /// Ids that the filters have left, ascending.
    kept: Vec<TokenId>,
}

impl Sampler {
    /// A sampler for a vocabulary.
    pub fn new(vocab: usize) -> Self {
        Self {
            set: InstructionSet::detect(),
            scores: Vec::with_capacity(vocab),
            keys: Vec::new(),
            seen: vec![Seen::default(); vocab],
            kept: Vec::with_capacity(vocab),
        }
    }

    /// Chooses the next token. `logits: [vocab]`
    ///
    /// # Errors
    /// When a logit is not finite, or the rules leave no token.
    ///
    /// # Panics
    /// When a token of the history or of the sampling parameters is not in the vocabulary.
    pub fn choose(
        &mut self,
        logits: &[f32],
        history: History<'_>,
        rules: Rules<'_>,
    ) -> Result<Choice, NoChoice> {
        let distribution = Distribution::of(self.set, logits)?;
        let token = if rules.sampling.temperature == 0.0 && !adjust::is_needed(history, rules) {
            distribution.likeliest()
        } else {
            self.adjust(logits, history, rules);
            self.pick(history, rules.sampling)?
        };
        Ok(Choice {
            token,
            logprob: distribution.logprob(token),
            top: distribution.top(rules.sampling.logprobs.unwrap_or(0) as usize),
        })
    }

    /// The log-probability of `token` under raw logits, and the `count` likeliest tokens, falling.
    ///
    /// # Errors
    /// When a logit is not finite.
    pub fn logprobs(
        &self,
        logits: &[f32],
        token: TokenId,
        count: usize,
    ) -> Result<(f32, Vec<TokenLogprob>), NoChoice> {
        let distribution = Distribution::of(self.set, logits)?;
        Ok((distribution.logprob(token), distribution.top(count)))
    }

    /// Picks by the adjusted logits.
    fn pick(&mut self, history: History<'_>, sampling: &SamplingParams) -> Result<TokenId, NoChoice> {
        let best = first_maximum(&self.scores);
        if self.scores[best as usize] == f64::NEG_INFINITY {
            return Err(NoChoice::NothingLeft);
        }
        if sampling.temperature == 0.0 {
            return Ok(best);
        }
        self.filter(best, sampling);
        Ok(self.draw(uniform(sampling.seed, sampling.sequence, history.position as u64)))
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
