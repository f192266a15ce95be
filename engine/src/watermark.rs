//! The green-list watermark of Kirchenbauer, Geiping, Wen, Katz, Miers and Goldstein, *A Watermark for Large Language
//! Models* (ICML 2023), algorithm 2, and its detector.
//!
//! Before a token is chosen, the key and the token before it decide which share `gamma` of the vocabulary is *green*;
//! `delta` is added to the logits of green tokens. A text written so has more green tokens than chance allows, which
//! whoever knows the key can count; no model is needed for that.
//!
//! The paper shuffles the vocabulary with a random generator that is seeded by the token before. Here each token is
//! hashed on its own, which gives lists of the same kind and needs no memory. In 64-bit arithmetic that wraps around:
//!
//! ```text
//! mix(z)      z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
//! seed        mix(key + 0x9E3779B97F4A7C15 * (previous + 1))
//! hash(id)    mix(seed + 0x9E3779B97F4A7C15 * (id + 1))
//! green       hash(id) >> 11 < floor(gamma * 2^53)
//! ```
//!
//! `mix` is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), so `hash(id)` is output `id` of that
//! generator, and `gamma` is the f32 of the request, widened. `previous` is the token right before, for the first
//! generated token the last of the prompt. The hash hides the list from readers, not from somebody who collects many
//! texts to find the key.

use std::collections::BTreeSet;

use proto::TokenId;
use proto::mix::{WEYL, mix};

/// The green tokens after one token.
#[derive(Clone, Copy, Debug)]
pub struct GreenList {
    seed: u64,
    /// Hashes below are green, of 2^53.
    bound: u64,
}

impl GreenList {
    /// The list that the key gives after `previous`; `gamma` is the share of the vocabulary that is green.
    pub fn new(key: u64, gamma: f32, previous: TokenId) -> Self {
        let seed = mix(key.wrapping_add(WEYL.wrapping_mul(u64::from(previous) + 1)));
        // A float that is negative or no number becomes 0.
        Self { seed, bound: (f64::from(gamma) * (1u64 << 53) as f64) as u64 }
    }

    /// True when the token is green.
    pub fn has(&self, id: TokenId) -> bool {
        mix(self.seed.wrapping_add(WEYL.wrapping_mul(u64::from(id) + 1))) >> 11 < self.bound
    }
}

/// What counting green tokens has shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Detection {
    /// Pairs of a token and the one before it that were counted.
    pub scored: usize,
    /// Those whose second token is green.
    pub green: usize,
    /// Standard deviations by which there are more green tokens than in a text without the watermark. Above 4 such a
    /// text is one in 30,000.
    pub z: f64,
}

/// Looks for the watermark in a text. `tokens` may begin with the prompt's last token, which the first generated one
/// depends on.
///
/// `z = (green - gamma n) / sqrt(n gamma (1 - gamma))` (equation 2 of the paper). A pair of tokens that occurs again is
/// counted once: its second occurrence says nothing new, and would let a text that repeats itself pass for marked.
pub fn detect(key: u64, gamma: f32, tokens: &[TokenId]) -> Detection {
    let pairs: BTreeSet<(TokenId, TokenId)> = tokens.windows(2).map(|pair| (pair[0], pair[1])).collect();
    let is_green = |(previous, id): &&(TokenId, TokenId)| GreenList::new(key, gamma, *previous).has(*id);
    let (scored, green) = (pairs.len(), pairs.iter().filter(is_green).count());
    let (n, gamma) = (scored as f64, f64::from(gamma));
    let deviation = (n * gamma * (1.0 - gamma)).sqrt();
    let z = if deviation > 0.0 { (green as f64 - gamma * n) / deviation } else { 0.0 };
    Detection { scored, green, z }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed from the formula above with other tools.
    #[test]
    fn the_list_is_that_of_the_formula() {
        let green = |key, gamma, previous| -> Vec<TokenId> {
            let list = GreenList::new(key, gamma, previous);
            (0..32).filter(|&id| list.has(id)).collect()
        };
        assert_eq!(green(0, 0.25, 0), [5, 11, 12, 19, 26]);
        assert_eq!(
            green(15_485_863, 0.5, 42),
            [1, 4, 5, 6, 8, 11, 12, 13, 14, 15, 16, 17, 18, 21, 23, 25, 26, 27, 28, 30, 31]
        );
    }

    #[test]
    fn a_list_is_the_share_that_was_asked_for() {
        for gamma in [0.01_f32, 0.25, 0.5, 0.9] {
            let mut counts = Vec::new();
            for (key, previous) in [(0, 0), (1, 0), (0, 1), (u64::MAX, 49_151)] {
                let list = GreenList::new(key, gamma, previous);
                counts.push((0..50_000).filter(|&id| list.has(id)).count());
            }
            let (mean, gamma) = (50_000.0 * f64::from(gamma), f64::from(gamma));
            for count in counts {
                assert!(
                    (count as f64 - mean).abs() < 4.0 * (mean * (1.0 - gamma)).sqrt(),
                    "{count} of {mean}"
                );
            }
        }
    }

    #[test]
    fn a_pair_is_counted_once() {
        let list = GreenList::new(7, 0.25, 1);
        let green = (0..100).find(|&id| id != 1 && list.has(id)).expect("a quarter is green");
        let found = detect(7, 0.25, &[1, green, 1, green, 1, green]);
        assert_eq!(found.scored, 2);
        assert!(found.green >= 1 && found.z < 4.0);
        assert_eq!(detect(7, 0.25, &[5]), Detection { scored: 0, green: 0, z: 0.0 });
    }
}
