//! What a hop costs and what it saves, learnt from requests as they go by. Without IO.
//!
//! A split placement computes a prompt on a worker that nobody decodes on, and pays for it with a hop: calls, and the
//! transfer of the KV. A fused one has no hop, and its prompt stands in the way of every sequence that decodes there.
//! Expected costs, in microseconds of delay to anybody:
//!
//! ```text
//! split:  P(waiting there + missing there)  +  H(tokens to transfer)
//! fused:  P(waiting there + missing there)  +  sequences that decode there · P(missing there)
//! ```
//!
//! `P(tokens)` is the time to compute a prompt and `H(tokens)` what a hop adds between the first token and the second;
//! both are lines (a fixed part and one for each token) by least squares, in which a sample counts less with each that
//! comes after it. Until there are [`SAMPLES_MIN`] of both, nothing is known, and requests are placed split.
//!
//! **No flapping.** For prompts of one size (to a power of two) the two costs are compared over the last few requests, not by
//! the queues of one moment: their ratio is smoothed. The kind that was chosen last is kept unless the other is better by
//! [`MARGIN`]. **No blindness.** Fused placements tell nothing of hops: after [`FUSED_MAX`] of them in a row one is placed
//! split, so that a link that has become better is noticed.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use proto::PlacementKind;

use crate::policy::Costs;

/// Samples before a line means anything.
pub const SAMPLES_MIN: f64 = 8.0;
/// What remains of a sample's weight with each that comes after it: about the last fifty count.
const DECAY: f64 = 0.98;
/// Share by which the other kind has to be better.
pub const MARGIN: f64 = 0.2;
/// How far one comparison moves what is remembered of those before it.
const SMOOTHING: f64 = 0.125;
/// Fused placements in a row after which one is split.
pub const FUSED_MAX: u32 = 256;

/// Something that a request has shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Observation {
    /// So many tokens of a prompt were computed in that time, without the wait before.
    Prefill {
        /// Tokens that were not cached.
        tokens: usize,
        /// From the first chunk's start to the token.
        took: Duration,
    },
    /// A hop has put that time between the first token and the second, beyond what lies between any two.
    Hop {
        /// Tokens whose KV was transferred.
        tokens: usize,
        /// The time.
        took: Duration,
    },
    /// A sequence has ended, on whatever grounds, that time after its first token on the decode worker.
    Decode {
        /// The time.
        took: Duration,
    },
}

/// Takes the times of one placement, and gives what they show.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    is_split: bool,
    /// Tokens of the sequence as it was placed.
    tokens: usize,
    placed: Duration,
    /// Of them those that the prefill worker had.
    cached: usize,
    /// Of them those that the decode worker had.
    skipped: usize,
    /// When the first token came, and the second.
    first: Option<Duration>,
    second: Option<Duration>,
    /// When the decode worker made its first.
    decoding_since: Option<Duration>,
    is_over: bool,
}

impl Stopwatch {
    /// A sequence of so many tokens was placed at `now`.
    pub fn start(is_split: bool, tokens: usize, now: Duration) -> Self {
        Self {
            is_split,
            tokens,
            placed: now,
            cached: 0,
            skipped: 0,
            first: None,
            second: None,
            decoding_since: None,
            is_over: false,
        }
    }

    /// The prefill worker had these tokens.
    pub fn cached(&mut self, tokens: usize) {
        self.cached = tokens;
    }

    /// The decode worker had these tokens.
    pub fn skipped(&mut self, tokens: usize) {
        self.skipped = tokens;
    }

    /// The prefill worker has computed the rest in that time, and the first token is here.
    pub fn prefilled(&mut self, took: Duration, now: Duration) -> Option<Observation> {
        self.first = Some(now);
        self.prefill(took)
    }

    /// A token of the decode worker is here. The first of a fused placement says how many tokens were cached, and how
    /// long it waited to be computed.
    pub fn token(&mut self, prompt: Option<(usize, Duration)>, now: Duration) -> Option<Observation> {
        self.decoding_since.get_or_insert(now);
        match (self.first, self.second) {
            _ if self.is_over => None,
            (None, _) if self.is_split => {
                // Decode is ahead of prefill's last item, so nothing is known of what it waited for.
                self.is_over = true;
                None
            }
            (None, _) => {
                self.is_over = true;
                let (cached, waited) = prompt?;
                self.cached = cached;
                self.prefill(now.saturating_sub(self.placed).saturating_sub(waited))
            }
            (Some(_), None) => {
                self.second = Some(now);
                None
            }
            (Some(first), Some(second)) => {
                self.is_over = true;
                let usual = now.saturating_sub(second);
                let took = second.saturating_sub(first).saturating_sub(usual);
                let tokens = self.tokens.saturating_sub(self.skipped);
                (tokens > 0).then_some(Observation::Hop { tokens, took })
            }
        }
    }

    /// The sequence has left the decode worker.
    pub fn ended(&self, now: Duration) -> Option<Observation> {
        let took = now.saturating_sub(self.decoding_since?);
        Some(Observation::Decode { took })
    }

    fn prefill(&self, took: Duration) -> Option<Observation> {
        let tokens = self.tokens.saturating_sub(self.cached);
        (tokens > 0).then_some(Observation::Prefill { tokens, took })
    }
}

/// What a placement of one kind would find.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Found {
    /// Tokens that wait to be computed on the worker that computes the prompt.
    pub waiting: usize,
    /// Tokens of the prompt that it does not have.
    pub missing: usize,
    /// Split: tokens to transfer. Fused: none.
    pub transferred: usize,
    /// Fused: sequences that decode there. Split: none.
    pub decoding: usize,
}

/// What is known of one model's costs.
#[derive(Debug, Default)]
pub struct CostModel {
    prefill: Line,
    hop: Line,
    /// A mean: a line that nothing is told of tokens.
    decode: Line,
    /// The kind chosen last, by the size of what was missing: 0 none, 1 split, 2 fused.
    last: [AtomicU8; SIZES],
    /// The logarithm of fused by split cost, smoothed, by the same size: bits of an `f64`.
    ratios: [AtomicU64; SIZES],
    /// Fused placements since a hop was seen.
    unseen: AtomicU32,
}

/// A comparison counts as at most this logarithm.
const RATIO_MAX: f64 = 2.0;

/// Sizes of prompts that are told apart: powers of two.
const SIZES: usize = 32;

impl CostModel {
    /// Takes in what a request has shown.
    pub fn observe(&mut self, observation: Observation) {
        match observation {
            Observation::Prefill { tokens, took } => self.prefill.add(tokens, took),
            Observation::Hop { tokens, took } => {
                *self.unseen.get_mut() = 0;
                self.hop.add(tokens, took);
            }
            Observation::Decode { took } => self.decode.add(0, took),
        }
    }

    /// How long sequences of late were decoded; `None` while nothing is known.
    pub fn decode(&self) -> Option<Duration> {
        self.decode.at(0).map(micros)
    }

    /// Time to compute that many tokens of a prompt; `None` while nothing is known.
    pub fn prefill(&self, tokens: usize) -> Option<Duration> {
        self.prefill.at(tokens).map(micros)
    }

    /// What a hop adds when the KV of that many tokens is transferred; `None` while nothing is known.
    pub fn hop(&self, tokens: usize) -> Option<Duration> {
        self.hop.at(tokens).map(micros)
    }

    /// Bytes that a hop's transfer moves in a second, for tokens of that many bytes; `None` while nothing is known, or
    /// when a transfer takes no time that could be told from the rest.
    pub fn link_bytes_per_second(&self, token_bytes: usize) -> Option<f64> {
        let (_, slope) = self.hop.fit()?;
        (slope > 0.0).then(|| token_bytes as f64 / slope * 1e6)
    }

    /// What choices between workers of one kind go by: what was learnt, in place of what is assumed.
    pub fn costs(&self, assumed: Costs) -> Costs {
        let Some((_, prefill_token_us)) = self.prefill.fit().filter(|(_, slope)| *slope > 0.0) else {
            return assumed;
        };
        let scale = prefill_token_us / assumed.prefill_token_us;
        let transfer = self.hop.fit().map(|(_, slope)| slope);
        Costs {
            prefill_token_us,
            transfer_token_us: transfer.unwrap_or(assumed.transfer_token_us * scale),
            decode_sequence_us: assumed.decode_sequence_us * scale,
        }
    }

    /// The kind of the next placement, where both are possible.
    pub fn decide(&self, split: Found, fused: Found) -> PlacementKind {
        let size = (usize::BITS - fused.missing.leading_zeros()) as usize % SIZES;
        let (last, ratio) = (&self.last[size], &self.ratios[size]);
        let (Some(in_split), Some(in_fused)) = (self.of_split(split), self.of_fused(fused)) else {
            return PlacementKind::Split;
        };
        let was = last.load(Ordering::Relaxed);
        let now = (in_fused.max(1.0) / in_split.max(1.0)).ln().clamp(-RATIO_MAX, RATIO_MAX);
        let before = if was == 0 { now } else { f64::from_bits(ratio.load(Ordering::Relaxed)) };
        let smoothed = before + SMOOTHING * (now - before);
        ratio.store(smoothed.to_bits(), Ordering::Relaxed);
        let margin = if was == 2 { 1.0 + MARGIN } else { 1.0 - MARGIN };
        let mut is_fused = smoothed < f64::ln(margin);
        last.store(if is_fused { 2 } else { 1 }, Ordering::Relaxed);
        if is_fused && self.unseen.fetch_add(1, Ordering::Relaxed) >= FUSED_MAX {
            self.unseen.store(0, Ordering::Relaxed);
            is_fused = false;
        }
        if is_fused { PlacementKind::Fused } else { PlacementKind::Split }
    }

    /// Expected cost of a split placement, microseconds.
    fn of_split(&self, found: Found) -> Option<f64> {
        Some(self.prefill.at(found.waiting + found.missing)? + self.hop.at(found.transferred)?)
    }

    /// Expected cost of a fused placement, microseconds.
    fn of_fused(&self, found: Found) -> Option<f64> {
        let stalls = found.decoding as f64 * self.prefill.at(found.missing)?;
        Some(self.prefill.at(found.waiting + found.missing)? + stalls)
    }
}

/// What workers say may be more than any time.
fn micros(us: f64) -> Duration {
    Duration::try_from_secs_f64(us / 1e6).unwrap_or(Duration::MAX)
}

/// A line through samples of tokens and microseconds, by weighted least squares.
#[derive(Debug, Default)]
struct Line {
    /// Sums of weights, of x, y, x² and xy.
    n: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
    samples: f64,
}

impl Line {
    fn add(&mut self, tokens: usize, took: Duration) {
        let (x, y) = (tokens as f64, took.as_secs_f64() * 1e6);
        for (sum, term) in [
            (&mut self.n, 1.0),
            (&mut self.x, x),
            (&mut self.y, y),
            (&mut self.xx, x * x),
            (&mut self.xy, x * y),
        ] {
            *sum = *sum * DECAY + term;
        }
        self.samples += 1.0;
    }

    /// The fixed part and that of each token, neither negative.
    fn fit(&self) -> Option<(f64, f64)> {
        if self.samples < SAMPLES_MIN {
            return None;
        }
        let (mean_x, mean_y) = (self.x / self.n, self.y / self.n);
        let spread = self.xx / self.n - mean_x * mean_x;
        // Where all samples are of about one size, time goes by tokens.
        let is_flat = spread <= 1e-3 * mean_x * mean_x;
        let through_origin = if self.xx > 0.0 { self.xy / self.xx } else { 0.0 };
        let slope = if is_flat { through_origin } else { (self.xy / self.n - mean_x * mean_y) / spread };
        let slope = slope.max(0.0);
        let fixed = mean_y - slope * mean_x;
        if fixed < 0.0 { Some((0.0, through_origin)) } else { Some((fixed, slope)) }
    }

    fn at(&self, tokens: usize) -> Option<f64> {
        self.fit().map(|(fixed, slope)| fixed + slope * tokens as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PlacementKind::{Fused, Split};

    fn ms(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1e3)
    }

    /// One millisecond for a token of a prompt and two for each prompt; a hop takes 20 ms and a tenth for each token.
    fn learnt() -> CostModel {
        let mut model = CostModel::default();
        for tokens in [10, 20, 40, 80, 160, 320, 640, 30, 60, 120] {
            model.observe(Observation::Prefill { tokens, took: ms(2.0 + tokens as f64) });
            model.observe(Observation::Hop { tokens, took: ms(20.0 + 0.1 * tokens as f64) });
        }
        model
    }

    fn found(missing: usize) -> (super::Found, super::Found) {
        let split = super::Found { missing, transferred: missing, ..super::Found::default() };
        (split, super::Found { missing, ..super::Found::default() })
    }

    #[test]
    fn without_observations_it_is_split() {
        let mut model = CostModel::default();
        let (split, fused) = found(1);
        assert_eq!(model.decide(split, fused), Split);
        for _ in 0..20 {
            model.observe(Observation::Prefill { tokens: 100, took: ms(100.0) });
        }
        assert_eq!((model.decide(split, fused), model.hop(1)), (Split, None), "nothing is known of hops");
        assert_eq!(CostModel::default().costs(Costs::default()), Costs::default());
    }

    #[test]
    fn a_split_placement_shows_its_prefill_and_its_hop() {
        let mut watch = Stopwatch::start(true, 100, ms(0.0));
        watch.cached(60);
        let prefill = Observation::Prefill { tokens: 40, took: ms(42.0) };
        assert_eq!(watch.prefilled(ms(42.0), ms(50.0)), Some(prefill));
        watch.skipped(20);
        assert_eq!(watch.token(None, ms(85.0)), None);
        let hop = Observation::Hop { tokens: 80, took: ms(30.0) };
        assert_eq!(watch.token(None, ms(90.0)), Some(hop), "35 ms, of which any token takes 5");
        assert_eq!(watch.token(None, ms(95.0)), None);
        let mut ahead = Stopwatch::start(true, 100, ms(0.0));
        assert_eq!(ahead.token(None, ms(5.0)), None);
        assert!(ahead.prefilled(ms(5.0), ms(6.0)).is_some());
        assert_eq!((ahead.token(None, ms(8.0)), ahead.token(None, ms(9.0))), (None, None));
    }

    #[test]
    fn the_end_of_a_sequence_shows_how_long_it_was_decoded() {
        let mut watch = Stopwatch::start(true, 100, ms(0.0));
        assert!(watch.prefilled(ms(42.0), ms(50.0)).is_some());
        assert_eq!(watch.ended(ms(60.0)), None, "it has taken no place yet");
        assert_eq!(watch.token(None, ms(85.0)), None);
        assert_eq!(watch.ended(ms(285.0)), Some(Observation::Decode { took: ms(200.0) }));
        let mut model = CostModel::default();
        for took in [100.0, 300.0].repeat(4) {
            assert_eq!(model.decode(), None);
            model.observe(Observation::Decode { took: ms(took) });
        }
        let mean = model.decode().expect("learnt").as_secs_f64();
        assert!((mean - 0.2).abs() < 0.01, "{mean}");
    }

    #[test]
    fn a_fused_placement_shows_its_prefill() {
        let mut watch = Stopwatch::start(false, 100, ms(10.0));
        let prefill = Observation::Prefill { tokens: 52, took: ms(55.0) };
        assert_eq!(watch.token(Some((48, ms(5.0))), ms(70.0)), Some(prefill));
        assert_eq!(watch.token(None, ms(75.0)), None);
        let mut cached = Stopwatch::start(false, 100, ms(0.0));
        assert_eq!(cached.token(None, ms(70.0)), None, "another attempt has told of the prompt");
    }

    #[test]
    fn lines_are_learnt_and_forgotten() {
        let mut model = learnt();
        let near = |got: Option<Duration>, expected: f64| {
            let got = got.expect("learnt").as_secs_f64() * 1e3;
            assert!((got - expected).abs() < 0.01 * expected, "{got} ms, {expected} expected");
        };
        near(model.prefill(1000), 1002.0);
        near(model.hop(500), 70.0);
        // 23,040 bytes a token at 0.1 ms: 230 MB/s.
        let rate = model.link_bytes_per_second(23_040).expect("learnt");
        assert!((rate / 230.4e6 - 1.0).abs() < 0.01, "{rate}");
        let costs = model.costs(Costs::default());
        assert!((costs.prefill_token_us - 1000.0).abs() < 10.0, "{costs:?}");
        assert!((costs.transfer_token_us - 100.0).abs() < 1.0, "{costs:?}");
        for tokens in (0..600).map(|at| 10 + at % 300) {
            model.observe(Observation::Prefill { tokens, took: ms(0.5 * tokens as f64) });
        }
        near(model.prefill(1000), 500.0);
    }

    #[test]
    fn equal_sizes_make_a_line_through_the_origin() {
        let mut model = CostModel::default();
        for _ in 0..10 {
            model.observe(Observation::Prefill { tokens: 100, took: ms(50.0) });
        }
        let half = model.prefill(50).expect("learnt").as_secs_f64();
        assert!((half - 0.025).abs() < 0.002, "{half}");
    }

    #[test]
    fn a_hop_pays_where_others_decode_or_wait() {
        let model = learnt();
        let (split, fused) = found(100);
        assert_eq!(model.decide(split, fused), Fused, "nobody is in the way: 102 ms, and a hop of 30 more");
        let beside = super::Found { decoding: 1, ..fused };
        let model = learnt();
        assert_eq!(model.decide(split, beside), Split, "a neighbour would stand for 102 ms");
        let model = learnt();
        let short = found(8);
        let beside = super::Found { decoding: 1, ..short.1 };
        assert_eq!(model.decide(short.0, beside), Fused, "ten are less than the hop's twenty");
        let model = learnt();
        let behind = super::Found { waiting: 2000, ..fused };
        assert_eq!(model.decide(split, behind), Split, "the decode worker has prompts of its own");
        let model = learnt();
        let queued = super::Found { waiting: 2000, ..split };
        assert_eq!(model.decide(queued, beside), Fused, "prefill workers are busy");
    }

    #[test]
    fn the_same_prompt_does_not_flap() {
        let model = learnt();
        // Fused costs as much as split, give or take a tenth: whatever was chosen first stays.
        let (split, fused) = found(100);
        let around = |waiting| super::Found { waiting, ..fused };
        let first = model.decide(split, around(30));
        for waiting in [25, 35, 28, 33, 20, 40] {
            assert_eq!(model.decide(split, around(waiting)), first);
        }
        let settled = |waiting| (0..32).map(|_| model.decide(split, around(waiting))).last();
        assert_eq!(settled(0), Some(Fused));
        assert_eq!(settled(35), Some(Fused), "now the other one stays");
        assert_eq!(model.decide(split, around(300)), Fused, "one moment is not enough");
        assert_eq!(settled(300), Some(Split));
        assert_eq!(model.decide(split, around(0)), Split);
        assert_eq!(settled(0), Some(Fused));
    }

    #[test]
    fn a_hop_is_tried_now_and_then() {
        let model = learnt();
        let (split, fused) = found(100);
        let kinds: Vec<_> = (0..=2 * FUSED_MAX + 1).map(|_| model.decide(split, fused)).collect();
        assert_eq!(kinds.iter().filter(|kind| **kind == Split).count(), 2);
    }
}
