//! Which worker of a pool takes a request. Without IO.
//!
//! A policy sees each worker that could take the request as a [`Candidate`] and names one of them.
//! [`Pools`](crate::pools::Pools) makes the candidates and asks, once for each role of a placement. Of equals, the one
//! placed longest ago is next.
//!
//! Every router decides for itself, by what it has placed and what of that has not ended.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::Error;
use serde::{Deserialize, Serialize};

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Whoever was placed longest ago.
    #[default]
    RoundRobin,
    /// Whoever has the fewest requests.
    LeastLoaded,
    /// Whoever has fewer requests of two drawn by chance (Mitzenmacher, *The Power of Two Choices in Randomized Load
    /// Balancing*, 2001): nearly as even as the least loaded, and several routers do not all choose the same one.
    PowerOfTwo,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::RoundRobin, Self::LeastLoaded, Self::PowerOfTwo];

    /// The name in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::PowerOfTwo => "power-of-two",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|policy| policy.name() == word).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid("policy", format!("expected one of {names}; got {word}"))
        })
    }
}

/// A worker that could take the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The caller's name for it, which the choice gives back.
    pub id: usize,
    /// When it was placed last, as a count of placements.
    pub turn: u64,
    /// Requests placed on it that have not ended.
    pub requests: usize,
}

/// A policy that chooses, with what it remembers between choices: nothing but a place in its sequence of draws.
#[derive(Debug)]
pub struct Chooser {
    policy: Policy,
    /// State of the generator of [`mix`]; the seed, and a constant more for each draw.
    draws: AtomicU64,
}

impl Chooser {
    /// A chooser of that policy. Equal seeds draw equal workers from equal candidates.
    pub fn new(policy: Policy, seed: u64) -> Self {
        Self { policy, draws: AtomicU64::new(seed) }
    }

    /// How it chooses.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// The `id` of the candidate that takes the request; `None` without candidates.
    pub fn choose(&self, candidates: impl Iterator<Item = Candidate>) -> Option<usize> {
        let burden = |candidate: &Candidate| (candidate.requests, candidate.turn);
        let chosen = match self.policy {
            Policy::RoundRobin => candidates.min_by_key(|candidate| candidate.turn),
            Policy::LeastLoaded => candidates.min_by_key(burden),
            Policy::PowerOfTwo => self.two(candidates).into_iter().flatten().min_by_key(burden),
        };
        chosen.map(|candidate| candidate.id)
    }

    /// Two of the candidates, each pair as likely as any other, or all there are (Vitter's algorithm R, 1985).
    fn two(&self, candidates: impl Iterator<Item = Candidate>) -> [Option<Candidate>; 2] {
        let mut kept = [None, None];
        for (seen, candidate) in candidates.enumerate() {
            let place = if seen < kept.len() { seen as u64 } else { self.draw() % (seen as u64 + 1) };
            if let Some(place) = kept.get_mut(place as usize) {
                *place = Some(candidate);
            }
        }
        kept
    }

    fn draw(&self) -> u64 {
        mix(self.draws.fetch_add(GOLDEN, Ordering::Relaxed))
    }
}

/// The odd number nearest to 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// One step of `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014).
fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for policy in Policy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(toml::Value::try_from(policy).unwrap().as_str(), Some(policy.name()));
        }
        let message = "best".parse::<Policy>().unwrap_err().message;
        assert_eq!(message, "policy: expected one of round-robin, least-loaded, power-of-two; got best");
    }

    #[test]
    fn two_choices_draw_every_pair_and_repeat_by_seed() {
        let loads = [3, 2, 1, 0];
        let candidates =
            || loads.into_iter().enumerate().map(|(id, requests)| Candidate { id, turn: 0, requests });
        let draw = |seed| -> Vec<usize> {
            let chooser = Chooser::new(Policy::PowerOfTwo, seed);
            (0..600).map(|_| chooser.choose(candidates()).unwrap()).collect()
        };
        let first = draw(7);
        assert_eq!(first, draw(7));
        assert_ne!(first, draw(8));
        // Of six pairs worker 3 is the better in three, 2 in two, 1 in one, and 0 in none.
        let count = |id| first.iter().filter(|&&chosen| chosen == id).count();
        assert_eq!(count(0), 0);
        assert!((50..150).contains(&count(1)), "{}", count(1));
        assert!((150..250).contains(&count(2)), "{}", count(2));
        assert!((250..350).contains(&count(3)), "{}", count(3));
        let chooser = Chooser::new(Policy::PowerOfTwo, 1);
        assert_eq!(chooser.choose(candidates().take(1)), Some(0));
        assert_eq!(chooser.choose(std::iter::empty()), None);
    }
}
