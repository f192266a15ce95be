//! What is done to logits before the temperature: bias, penalties, watermark and masks.

use proto::{SamplingParams, TokenId};

use super::{History, Rules, Sampler};
use crate::watermark::GreenList;

/// Where a token occurs in the history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    anywhere: bool,
    in_output: u32,
}

/// False when the adjusted logits would be the raw ones.
pub(super) fn is_needed(history: History<'_>, rules: Rules<'_>) -> bool {
    let sampling = rules.sampling;
    penalises(sampling)
        || !sampling.logit_bias.is_empty()
        || sampling.watermark.is_some()
        || !sampling.allowed_token_ids.is_empty()
        || rules.allowed.is_some()
        || !sampling.bad_words.is_empty()
        || history.generated < rules.stop.min_tokens
}

fn penalises(sampling: &SamplingParams) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
}

impl Sampler {
    /// Puts the adjusted logits into the scores; negative infinity excludes a token.
    pub(super) fn adjust(&mut self, logits: &[f32], history: History<'_>, rules: Rules<'_>) {
        self.scores.clear();
        self.scores.extend(logits.iter().map(|&logit| f64::from(logit)));
        for &(token, bias) in &rules.sampling.logit_bias {
            self.scores[token as usize] += f64::from(bias);
        }
        if penalises(rules.sampling) {
            self.penalise(history, rules.sampling);
        }
        if let (Some(watermark), Some(&previous)) = (&rules.sampling.watermark, history.tokens.last()) {
            let green = GreenList::new(watermark.key, watermark.gamma, previous);
            let scores = (0..).zip(&mut self.scores).filter(|(id, _)| green.has(*id));
            scores.for_each(|(_, score)| *score += f64::from(watermark.delta));
        }
        self.mask(history, rules);
    }

    /// Applies repetition penalty (CTRL, Keskar et al. 2019, section 4.1), presence and frequency penalties.
    pub(super) fn penalise(&mut self, history: History<'_>, sampling: &SamplingParams) {
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

    fn mask(&mut self, history: History<'_>, rules: Rules<'_>) {
        if !rules.sampling.allowed_token_ids.is_empty() {
            self.keep_only(&rules.sampling.allowed_token_ids);
        }
        if let Some(allowed) = rules.allowed {
            let words = allowed.iter().copied().chain(std::iter::repeat(0));
            for (scores, word) in self.scores.chunks_mut(32).zip(words) {
                let excluded = scores.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                excluded.for_each(|(_, score)| *score = f64::NEG_INFINITY);
            }
        }
        let output = history.output();
        for word in &rules.sampling.bad_words {
            if let Some((&last, before)) = word.split_last()
                && output.ends_with(before)
            {
                self.exclude(last);
            }
        }
        if history.generated < rules.stop.min_tokens {
            let ends = rules.stop.eos_ids.iter().chain(&rules.stop.stop_token_ids);
            ends.for_each(|&token| self.exclude(token));
        }
    }

    fn keep_only(&mut self, tokens: &[TokenId]) {
        self.kept.clear();
        self.kept.extend_from_slice(tokens);
        self.kept.sort_unstable();
        let mut kept = self.kept.iter().copied().peekable();
        for (id, score) in (0..).zip(&mut self.scores) {
            while kept.next_if(|&token| token < id).is_some() {}
            if kept.peek() != Some(&id) {
                *score = f64::NEG_INFINITY;
            }
        }
    }

    /// Stop ids may lie outside the vocabulary; they are never chosen anyway.
    fn exclude(&mut self, token: TokenId) {
        if let Some(score) = self.scores.get_mut(token as usize) {
            *score = f64::NEG_INFINITY;
        }
    }
}
