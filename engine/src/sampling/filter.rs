//! Temperature, and the filters that cut off what is unlikely.

use std::cmp::Ordering;

use proto::{SamplingParams, TokenId};

use super::{Sampler, likelier};
use crate::exp::{exp, ln};

impl Sampler {
    /// Puts the ids that masks and filters leave into `kept`, ascending, and turns their scores into weights.
    /// `best` is the likeliest of all.
    pub(super) fn filter(&mut self, best: TokenId, sampling: &SamplingParams) {
        self.kept.clear();
        let scores = (0..).zip(&self.scores);
        self.kept.extend(scores.filter(|(_, score)| **score != f64::NEG_INFINITY).map(|(id, _)| id));
        let top_k = sampling.top_k.map_or(self.kept.len(), |k| k.max(1) as usize);
        if top_k < self.kept.len() {
            let scores = &self.scores;
            self.kept.select_nth_unstable_by(top_k - 1, |&a, &b| likelier(scores, a, b));
            self.kept.truncate(top_k);
            self.kept.sort_unstable();
        }
        let (maximum, temperature) = (self.scores[best as usize], f64::from(sampling.temperature));
        for &id in &self.kept {
            let score = &mut self.scores[id as usize];
            *score = exp((*score - maximum) / temperature);
        }
        if sampling.top_p < 1.0 {
            let scores = &self.scores;
            keep_mass(&mut self.kept, scores, f64::from(sampling.top_p), |a, b| likelier(scores, a, b));
        }
        if sampling.typical_p < 1.0 {
            self.keep_typical(f64::from(sampling.typical_p));
        }
        if sampling.min_p > 0.0 {
            let weight = |id: &TokenId| self.scores[*id as usize];
            let least = f64::from(sampling.min_p) * self.kept.iter().map(weight).fold(0.0, f64::max);
            self.kept.retain(|id| self.scores[*id as usize] >= least);
        }
    }

    /// Locally typical sampling (Meister et al. 2022, *Locally Typical Sampling*, section 4): keeps the smallest set
    /// whose share of the weight reaches `share`, of the tokens whose surprise -ln p is nearest to the entropy.
    fn keep_typical(&mut self, share: f64) {
        let Self { scores, keys, kept, .. } = self;
        let total: f64 = kept.iter().map(|&id| scores[id as usize]).sum();
        let ln_total = ln(total);
        keys.resize(scores.len(), 0.0);
        let mut entropy = 0.0;
        for &id in kept.iter() {
            let surprise = ln_total - ln(scores[id as usize]);
            keys[id as usize] = surprise;
            entropy += scores[id as usize] / total * surprise;
        }
        for &id in kept.iter() {
            keys[id as usize] = -(keys[id as usize] - entropy).abs();
        }
        keep_mass(kept, scores, share, |a, b| likelier(keys, a, b));
    }
}

/// Keeps the smallest set of the ids that come first whose share of the kept weight reaches `share`; leaves them
/// ascending.
fn keep_mass(
    kept: &mut Vec<TokenId>,
    weights: &[f64],
    share: f64,
    order: impl Fn(TokenId, TokenId) -> Ordering,
) {
    let target = share * kept.iter().map(|&id| weights[id as usize]).sum::<f64>();
    // Few ids hold most of the mass as a rule, so the first are sorted first, and all only at need.
    for sorted in [64, 2048, kept.len()] {
        let sorted = sorted.min(kept.len());
        if sorted < kept.len() {
            kept.select_nth_unstable_by(sorted - 1, |&a, &b| order(a, b));
        }
        kept[..sorted].sort_unstable_by(|&a, &b| order(a, b));
        let mut mass = 0.0;
        let reaches = kept[..sorted].iter().position(|&id| {
            mass += weights[id as usize];
            mass >= target
        });
        if let Some(last) = reaches {
            kept.truncate(last + 1);
            break;
        }
    }
    kept.sort_unstable();
}
