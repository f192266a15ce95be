//! Which worker of a pool takes a request. Without IO.
//!
//! A policy sees each worker that could take the request as a [`Candidate`]: what it has to do, and how much of the
//! prompt's KV it has. It names one of them. [`Pools`](crate::pools::Pools) makes the candidates and asks, once for each
//! role of a placement; whoever else has such views may ask as well. Of equals, the one placed longest ago is next.
//!
//! Every router decides for itself. What it cannot know (what others have just placed) is in the load that workers
//! report a moment later.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::mix::{WEYL, mix};
use proto::{Error, WorkerLoad};
use serde::{Deserialize, Serialize};

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Whoever was placed longest ago.
    #[default]
    RoundRobin,
    /// The fewest sequences, then the fewest tokens.
    LeastLoaded,
    /// The less loaded of two drawn by chance (Mitzenmacher, *The Power of Two Choices in Randomized Load Balancing*,
    /// 2001): nearly as even as the least loaded, and routers with the same stale view do not all choose the same one.
    PowerOfTwo,
    /// The least expected time: to compute what of the prompt is not cached, to transfer, behind what waits and runs.
    Prefix,
    /// Always the same worker for a session, by rendezvous hashing (Thaler and Ravishankar, 1998): routers agree without
    /// a word, and a worker that comes or goes moves only its own sessions. Requests of no session: the least loaded.
    Session,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Self; 5] =
        [Self::RoundRobin, Self::LeastLoaded, Self::PowerOfTwo, Self::Prefix, Self::Session];

    /// The name in options and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::PowerOfTwo => "power-of-two",
            Self::Prefix => "prefix",
            Self::Session => "session",
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

/// What the worker would do for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Compute the prompt and hand it off.
    Prefill,
    /// Take the prompt's KV over and make tokens.
    Decode,
    /// Both (a fused placement).
    Both,
}

/// What a policy must know of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ask {
    /// What it needs done.
    pub work: Work,
    /// Tokens of its prompt, and those generated so far.
    pub tokens: usize,
    /// Its session, as [`name_hash`] of the key; `None` for none.
    pub session: Option<u64>,
}

/// A worker that could take the request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The caller's name for it, which the choice gives back.
    pub id: usize,
    /// [`name_hash`] of its address: the same at every router.
    pub name: u64,
    /// When it was placed last, as a count of placements.
    pub turn: u64,
    /// What it has to do, with what was placed since it said so.
    pub load: WorkerLoad,
    /// Tokens of its KV blocks.
    pub block_tokens: usize,
    /// Tokens at the front of the prompt whose KV it has.
    pub cached_tokens: usize,
}

/// What work costs, microseconds. Only their proportions matter to a choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// To compute the KV of a token of a prompt.
    pub prefill_token_us: f64,
    /// To transfer the KV of a token.
    pub transfer_token_us: f64,
    /// What each sequence that a decode worker has takes from another, over the other's whole output.
    pub decode_sequence_us: f64,
}

impl Default for Costs {
    /// Until something was measured: a prompt's token is worth ten of transfer, and a decoding neighbour fifty of
    /// computing.
    fn default() -> Self {
        Self { prefill_token_us: 200.0, transfer_token_us: 20.0, decode_sequence_us: 10_000.0 }
    }
}

impl Costs {
    /// Expected time until the request's work is done there, with what it takes from others, microseconds.
    ///
    /// A worker without room for the sequence would refuse it or preempt another: that costs a prompt more.
    #[inline]
    pub fn of(&self, ask: &Ask, candidate: &Candidate) -> f64 {
        self.weights(ask).of(candidate)
    }

    fn weights(&self, ask: &Ask) -> Weights {
        let (missing_us, sequence_us) = match ask.work {
            Work::Prefill => (self.prefill_token_us, 0.0),
            Work::Decode => (self.transfer_token_us, self.decode_sequence_us),
            Work::Both => (self.prefill_token_us, self.decode_sequence_us),
        };
        let full_us = ask.tokens as f64 * self.prefill_token_us;
        Weights { tokens: ask.tokens, missing_us, queued_us: self.prefill_token_us, sequence_us, full_us }
    }
}

/// What a request costs at any worker, so that nothing needs to be told apart for each.
#[derive(Clone, Copy)]
struct Weights {
    tokens: usize,
    /// For a token that the worker does not have.
    missing_us: f64,
    /// For a token that waits there.
    queued_us: f64,
    /// For a sequence that it has.
    sequence_us: f64,
    /// Where there is no room.
    full_us: f64,
}

impl Weights {
    #[inline]
    fn of(&self, candidate: &Candidate) -> f64 {
        // Signed numbers become floating point in one instruction, unsigned ones in many.
        let number = |count: usize| count as i64 as f64;
        let load = &candidate.load;
        let missing = number(self.tokens.saturating_sub(candidate.cached_tokens));
        let queued = number(load.waiting_tokens) * self.queued_us;
        let beside = number(load.sequences()) * self.sequence_us;
        let room = load.blocks_free.saturating_mul(candidate.block_tokens);
        let is_full = load.blocks_total > 0 && room < self.tokens;
        missing * self.missing_us + queued + beside + if is_full { self.full_us } else { 0.0 }
    }
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
    pub fn choose(
        &self,
        ask: &Ask,
        costs: &Costs,
        candidates: impl Iterator<Item = Candidate>,
    ) -> Option<usize> {
        let chosen = match (self.policy, ask.session) {
            (Policy::RoundRobin, _) => candidates.min_by_key(|candidate| candidate.turn),
            (Policy::LeastLoaded, _) | (Policy::Session, None) => candidates.min_by_key(burden),
            (Policy::PowerOfTwo, _) => self.two(candidates).into_iter().flatten().min_by_key(burden),
            (Policy::Prefix, _) => {
                let [chosen] = cheapest(&[*ask], costs, candidates);
                return chosen;
            }
            (Policy::Session, Some(session)) => {
                candidates.max_by_key(|candidate| mix(candidate.name ^ session))
            }
        };
        chosen.map(|candidate| candidate.id)
    }

    /// Two of the candidates, each pair as likely as any other, or all there are (Vitter's algorithm R, 1985).
    fn two(&self, candidates: impl Iterator<Item = Candidate>) -> [Option<Candidate>; 2] {
        let mut kept = [None, None];
        for (seen, candidate) in candidates.enumerate() {
            match kept.get_mut(seen) {
                Some(place) => *place = Some(candidate),
                None => {
                    let draw = self.draw() % (seen as u64 + 1);
                    if let Some(place) = kept.get_mut(draw as usize) {
                        *place = Some(candidate);
                    }
                }
            }
        }
        kept
    }

    fn draw(&self) -> u64 {
        mix(self.draws.fetch_add(WEYL, Ordering::Relaxed))
    }
}

/// For each ask the `id` of the candidate with the least expected time; of equals, the one placed longest ago.
#[inline]
pub fn cheapest<const N: usize>(
    asks: &[Ask; N],
    costs: &Costs,
    candidates: impl Iterator<Item = Candidate>,
) -> [Option<usize>; N] {
    // A thousand of them are looked at for each request, each once: none is kept, only what tells them apart.
    const NONE: usize = usize::MAX;
    let weights = asks.each_ref().map(|ask| costs.weights(ask));
    let mut best = [(f64::INFINITY, u64::MAX, NONE); N];
    // What filters them is part of the loop where the iterator runs it itself.
    candidates.for_each(|candidate| {
        for at in 0..N {
            let next = (weights[at].of(&candidate), candidate.turn, candidate.id);
            let is_less = next.0 < best[at].0 || (next.0 == best[at].0 && next.1 < best[at].1);
            best[at] = if is_less { next } else { best[at] };
        }
    });
    best.map(|(_, _, id)| (id != NONE).then_some(id))
}

/// Orders by load: sequences, then tokens, then whose turn it is.
fn burden(candidate: &Candidate) -> (usize, usize, u64) {
    let load = &candidate.load;
    (load.sequences(), load.waiting_tokens + load.running_tokens, candidate.turn)
}

/// A number for a name, the same in every process (FNV-1a, then mixed).
pub fn name_hash(name: &str) -> u64 {
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
    mix(name.bytes().fold(0xCBF2_9CE4_8422_2325, fold))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(loads: &[usize]) -> Vec<Candidate> {
        let candidate = |(id, &running): (usize, &usize)| Candidate {
            id,
            name: name_hash(&format!("worker-{id}")),
            turn: 0,
            load: WorkerLoad { running, ..WorkerLoad::default() },
            block_tokens: 16,
            cached_tokens: 0,
        };
        loads.iter().enumerate().map(candidate).collect()
    }

    const ASK: Ask = Ask { work: Work::Decode, tokens: 100, session: None };

    #[test]
    fn names_read_back() {
        for policy in Policy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(toml::Value::try_from(policy).unwrap().as_str(), Some(policy.name()));
        }
        let message = "best".parse::<Policy>().unwrap_err().message;
        assert!(message.starts_with("policy: expected one of round-robin, "), "{message}");
    }

    #[test]
    fn two_choices_draw_every_pair_and_repeat_by_seed() {
        let loads = candidates(&[3, 2, 1, 0]);
        let draw = |seed| {
            let chooser = Chooser::new(Policy::PowerOfTwo, seed);
            (0..600)
                .map(|_| chooser.choose(&ASK, &Costs::default(), loads.iter().copied()).unwrap())
                .collect()
        };
        let (first, again): (Vec<usize>, Vec<usize>) = (draw(7), draw(7));
        assert_eq!(first, again);
        assert_ne!(first, draw(8));
        // Of six pairs worker 3 is the better in three, 2 in two, 1 in one, and 0 in none.
        let count = |id| first.iter().filter(|&&chosen| chosen == id).count();
        assert_eq!(count(0), 0);
        assert!((50..150).contains(&count(1)), "{}", count(1));
        assert!((150..250).contains(&count(2)), "{}", count(2));
        assert!((250..350).contains(&count(3)), "{}", count(3));
        let one = candidates(&[5]);
        let chooser = Chooser::new(Policy::PowerOfTwo, 1);
        assert_eq!(chooser.choose(&ASK, &Costs::default(), one.into_iter()), Some(0));
        assert_eq!(chooser.choose(&ASK, &Costs::default(), std::iter::empty()), None);
    }

    #[test]
    fn sessions_spread_and_stay_when_a_worker_goes() {
        let chooser = Chooser::new(Policy::Session, 0);
        let workers = candidates(&[0; 10]);
        let home = |workers: &[Candidate], session: usize| {
            let ask = Ask { session: Some(name_hash(&session.to_string())), ..ASK };
            chooser.choose(&ask, &Costs::default(), workers.iter().copied()).unwrap()
        };
        let before: Vec<usize> = (0..1000).map(|session| home(&workers, session)).collect();
        for worker in 0..10 {
            let sessions = before.iter().filter(|&&home| home == worker).count();
            assert!((60..150).contains(&sessions), "worker {worker}: {sessions}");
        }
        for (session, &at) in before.iter().enumerate().filter(|&(_, &at)| at != 9) {
            assert_eq!(home(&workers[..9], session), at);
        }
    }
}
