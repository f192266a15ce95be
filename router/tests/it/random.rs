//! Random orders of everything that can happen to a request, and what must hold in all of them: tokens contiguous
//! and right, attempts rising, calls closed, workers fenced, one end and nothing after it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proto::{
    Attempt, Digest, Error, FinishReason, Generation, Handoff, HandoffId, KvDtype, KvLayout, Priority,
    Reason, SamplingParams, StopConditions, Token, TokenId, WorkerDescription, WorkerEpoch,
};
use router::dispatch::{Action, Dispatch, DispatchConfig, Emission, Event};
use router::pools::{PlacementMode, Pools};

use crate::fake::next_token;
use crate::script;

const WORKERS: [&str; 5] = ["p1", "p2", "d1", "d2", "d3"];
/// The token that ends a sequence.
const EOS: TokenId = 2;
/// More events than any request needs before its deadline.
const STEPS_MAX: usize = 20_000;

/// xorshift64*: small, seeded, and the same everywhere.
struct Chance(u64);

impl Chance {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A worker's side of a call: what it has said, as far as that has not arrived, and what it will say.
struct Call {
    attempt: Attempt,
    side: Side,
    /// Prompt and tokens as the worker sees them.
    tokens: Vec<TokenId>,
    generated: usize,
    max_tokens: usize,
    handoff: bool,
    stage: usize,
    over: bool,
    /// The router wants the sequence elsewhere.
    asked: bool,
    on_the_way: VecDeque<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Prefill,
    Decode,
}

impl Call {
    fn new(side: Side, generation: &Generation, handoff: bool) -> Self {
        Self {
            attempt: generation.attempt,
            side,
            tokens: generation.tokens.clone(),
            generated: generation.generated,
            max_tokens: generation.stop.max_tokens,
            handoff,
            stage: 0,
            over: false,
            asked: false,
            on_the_way: VecDeque::new(),
        }
    }

    /// Computes one token.
    fn sample(&mut self) -> Token {
        let id = next_token(&self.tokens);
        let index = self.generated;
        self.tokens.push(id);
        self.generated += 1;
        let finish = match id {
            EOS => Some(FinishReason::Eos),
            _ if self.generated == self.max_tokens => Some(FinishReason::Length),
            _ => None,
        };
        Token {
            index,
            id,
            logprob: 0.0,
            batch_size: 1,
            queue_wait: Duration::ZERO,
            finish,
            ..Token::default()
        }
    }

    /// Does the next thing that a well-behaved worker does.
    fn advance(&mut self) {
        let attempt = self.attempt;
        let event = match (self.side, self.stage) {
            (Side::Prefill, 0) => {
                Event::PrefillIssued { attempt, handoff: handoff(attempt, self.tokens.len()) }
            }
            (Side::Prefill, 1) => Event::PrefillDone { attempt, token: self.sample() },
            (Side::Prefill, _) => Event::PrefillEnded { attempt, error: None },
            (Side::Decode, 0) => Event::DecodeAdmitted { attempt },
            (Side::Decode, 2..) if self.asked => {
                self.over = true;
                Event::DecodeMoved { attempt, handoff: handoff(attempt, self.tokens.len() - 1) }
            }
            (Side::Decode, _) => {
                if self.stage == 1 && self.handoff && self.sample().finish.is_some() {
                    // Prefill's token was the last: the router drops this call.
                    self.over = true;
                    return;
                }
                let token = self.sample();
                self.over = token.finish.is_some();
                Event::DecodeToken { attempt, token }
            }
        };
        self.over |= matches!(event, Event::PrefillEnded { .. });
        self.stage += 1;
        self.on_the_way.push_back(event);
        if self.over && self.side == Side::Decode {
            self.on_the_way.push_back(Event::DecodeEnded { attempt, error: None });
        }
    }

    /// Ends before its time: with an error, or cleanly.
    fn fail(&mut self, error: Option<Error>) {
        let attempt = self.attempt;
        self.over = true;
        self.on_the_way.push_back(match self.side {
            Side::Prefill => Event::PrefillEnded { attempt, error },
            Side::Decode => Event::DecodeEnded { attempt, error },
        });
    }

    /// Gives a token that is not the next.
    fn misbehave(&mut self, chance: &mut Chance) {
        let attempt = self.attempt;
        let index = (self.generated + chance.below(5)).saturating_sub(2);
        let token = Token {
            index,
            id: 99,
            logprob: 0.0,
            batch_size: 1,
            queue_wait: Duration::ZERO,
            ..Token::default()
        };
        self.over = true;
        // The right index with a wrong token is beyond what a router can see.
        let expected = self.generated + usize::from(self.handoff && self.stage <= 1);
        if index != expected {
            self.on_the_way.push_back(match self.side {
                Side::Prefill => Event::PrefillDone { attempt, token },
                Side::Decode => Event::DecodeToken { attempt, token },
            });
        }
        self.fail(None);
    }
}

fn handoff(attempt: Attempt, tokens: usize) -> Handoff {
    Handoff {
        owner: "p".into(),
        epoch: WorkerEpoch(1),
        request: "r".into(),
        attempt,
        id: HandoffId([3; 16]),
        fingerprint: Digest([0xaa; 32]),
        layout: KvLayout { layers: 2, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 },
        tokens,
    }
}

/// What the validator knows of the present attempt and of the client's stream.
struct Seen {
    prompt: Vec<TokenId>,
    given: usize,
    emitted: Vec<TokenId>,
    /// The latest attempt, and whether its two calls are open.
    attempt: Option<Attempt>,
    prefill_open: bool,
    decode_open: bool,
    /// The workers called so far, each with the latest attempt that called it.
    called: BTreeMap<String, Attempt>,
    /// The highest fence at each worker.
    fences: BTreeMap<String, Attempt>,
    /// The worker that prefills in the present attempt.
    owner: String,
    /// The worker that decodes in the present attempt, and whether it was asked for the sequence.
    decoder: String,
    asked: bool,
    /// A decode worker that was asked for the sequence when its call was dropped.
    may_hold: Option<String>,
    /// Decode has given the sequence away, and nobody has gone on.
    moved: bool,
    /// The owner of a hand-off that decode was asked to take and has not admitted.
    untaken: Option<String>,
    finish: Option<Result<(), Error>>,
    last_token_was_last: bool,
    /// Sequences that went on elsewhere.
    moves: usize,
}

impl Seen {
    fn started(&mut self, worker: &str, generation: &Generation, continues: bool) {
        let mut expected = self.prompt.clone();
        expected.extend(&self.emitted);
        let follows = usize::from(continues && std::mem::take(&mut self.moved));
        expected.truncate(expected.len() - follows);
        assert_eq!(generation.tokens, expected, "a call starts from prompt and tokens so far");
        assert_eq!(generation.generated, self.given + self.emitted.len() - follows);
        if continues {
            assert_eq!(
                self.attempt,
                Some(generation.attempt),
                "decode belongs to the attempt of its prefill"
            );
        } else {
            assert!(self.attempt < Some(generation.attempt), "every placement has a number of its own");
            assert!(!self.prefill_open && !self.decode_open, "the calls of the last attempt are closed");
            for (worker, attempt) in &self.called {
                let fence = self.fences.get(worker);
                assert!(fence > Some(attempt), "{worker} is fenced against {attempt:?}, not {fence:?}");
            }
            self.attempt = Some(generation.attempt);
            (self.untaken, self.may_hold, self.moved) = (None, None, false);
        }
        self.called.insert(worker.to_owned(), generation.attempt);
    }

    /// The side whose call has its last item in this event of the present attempt.
    fn last_item(&self, event: &Event) -> Option<Side> {
        match event {
            Event::PrefillDone { attempt, .. } | Event::PrefillEnded { attempt, .. } => {
                (Some(*attempt) == self.attempt).then_some(Side::Prefill)
            }
            Event::DecodeEnded { attempt, .. } | Event::DecodeMoved { attempt, .. } => {
                (Some(*attempt) == self.attempt).then_some(Side::Decode)
            }
            Event::DecodeToken { attempt, token } => {
                (Some(*attempt) == self.attempt && token.finish.is_some()).then_some(Side::Decode)
            }
            _ => None,
        }
    }

    fn is_open(&self, side: Side) -> bool {
        match side {
            Side::Prefill => self.prefill_open,
            Side::Decode => self.decode_open,
        }
    }

    fn close(&mut self, side: Side) {
        match side {
            Side::Prefill => self.prefill_open = false,
            Side::Decode => self.decode_open = false,
        }
    }

    /// The decode worker has stopped and holds the KV: the call is over, and somebody has to take the hand-off.
    fn given_away(&mut self) {
        if self.decode_open {
            self.decode_open = false;
            (self.moved, self.asked) = (true, false);
            self.owner.clone_from(&self.decoder);
            self.untaken = Some(self.owner.clone());
        }
    }

    fn token(&mut self, token: &Token) {
        assert_eq!(token.index, self.given + self.emitted.len(), "tokens are contiguous");
        assert!(!self.last_token_was_last, "nothing follows the last token");
        let mut so_far = self.prompt.clone();
        so_far.extend(&self.emitted);
        assert_eq!(token.id, next_token(&so_far), "token {} is right", token.index);
        self.emitted.push(token.id);
        self.last_token_was_last = token.finish.is_some();
    }
}

struct World {
    seed: u64,
    chance: Chance,
    pools: Pools,
    now: Duration,
    wake: Option<Duration>,
    calls: Vec<Call>,
    prefill: Option<usize>,
    decode: Option<usize>,
    seen: Seen,
    /// How rare trouble is; `None` when there is none.
    faults: Option<usize>,
    /// What is wrong most of the time.
    mood: Reason,
}

impl World {
    /// `ending` is the side whose call has just had its last item: it may be dropped, and need not be.
    fn carry_out(&mut self, action: &Action, ending: Option<Side>) {
        assert!(self.seen.finish.is_none(), "nothing follows the end, but {action:?} came");
        match action {
            Action::StartPrefill { worker, generation } => {
                self.seen.started(worker, generation, false);
                self.seen.owner.clone_from(worker);
                self.seen.prefill_open = true;
                self.prefill = Some(self.calls.len());
                self.calls.push(Call::new(Side::Prefill, generation, false));
            }
            Action::StartDecode { worker, generation, handoff } => {
                self.seen.started(worker, generation, handoff.is_some());
                assert!(!self.seen.decode_open, "one decode call at a time");
                self.seen.decode_open = true;
                self.seen.asked = false;
                self.seen.decoder.clone_from(worker);
                // Nobody listens any more to a call that gave its sequence away.
                if let Some(earlier) = self.decode.take() {
                    self.calls[earlier].on_the_way.clear();
                }
                self.seen.untaken = handoff.as_ref().map(|_| self.seen.owner.clone());
                self.decode = Some(self.calls.len());
                self.calls.push(Call::new(Side::Decode, generation, handoff.is_some()));
            }
            Action::DropPrefill => {
                assert!(self.seen.prefill_open, "only an open call is dropped");
                self.seen.prefill_open = false;
                let call = self.prefill.take().expect("a call that is open");
                self.calls[call].over = true;
            }
            Action::DropDecode => {
                assert!(self.seen.decode_open, "only an open call is dropped");
                self.seen.decode_open = false;
                self.seen.may_hold = Some(self.seen.decoder.clone()).filter(|_| self.seen.asked);
                let call = self.decode.take().expect("a call that is open");
                self.calls[call].over = true;
            }
            Action::Fence { worker, attempt, .. } => {
                let fence = self.seen.fences.entry(worker.clone()).or_insert(*attempt);
                *fence = (*fence).max(*attempt);
            }
            Action::Move { worker, attempt, .. } => {
                assert!(self.seen.decode_open && *worker == self.seen.decoder, "only who has it is asked");
                assert_eq!(Some(*attempt), self.seen.attempt);
                self.seen.asked = true;
                let call = self.decode.expect("a call that is open");
                self.calls[call].asked = true;
            }
            Action::Moved { from, outcome, .. } => {
                assert!(self.seen.called.contains_key(from));
                self.seen.moves += usize::from(outcome.is_ok());
            }
            Action::Retry { failed, .. } => assert_eq!(Some(*failed), self.seen.attempt),
            Action::Emit(Emission::Placed(_)) => {}
            Action::Emit(Emission::Token(token)) => self.seen.token(token),
            Action::Finish(result) => {
                for side in [Side::Prefill, Side::Decode] {
                    assert!(
                        !self.seen.is_open(side) || ending == Some(side),
                        "the end comes after the calls'"
                    );
                }
                for owner in self.seen.untaken.iter().chain(&self.seen.may_hold) {
                    let (fence, attempt) = (self.seen.fences.get(owner), self.seen.attempt);
                    assert!(fence.copied() > attempt, "{owner} is told that nobody takes its hand-off");
                }
                self.seen.finish = Some(result.clone());
            }
            Action::WakeAt(at) => self.wake = Some(*at),
        }
    }

    /// Something happens.
    fn next(&mut self) -> Option<Event> {
        if self.faults.is_some() && self.chance.one_in(400) {
            return Some(Event::ClientGone);
        }
        if let Some(rarity) = self.faults
            && self.chance.one_in(rarity)
        {
            self.trouble();
        }
        if self.chance.one_in(15) {
            let name = WORKERS[self.chance.below(WORKERS.len())];
            if self.faults.is_some() && self.chance.one_in(2) {
                self.pools.lost(name, Error::new(Reason::WorkerLost, "by chance"));
            } else if self.chance.one_in(3) && (self.faults.is_some() || name == "d1") {
                let draining = WorkerDescription { draining: true, ..script::description(name) };
                self.pools.described(name, draining);
            } else {
                self.pools.described(name, script::description(name));
            }
            return Some(Event::PoolsChanged);
        }
        let moving: Vec<usize> = (0..self.calls.len()).filter(|call| !self.calls[*call].over).collect();
        if !moving.is_empty() && self.chance.one_in(2) {
            let call = moving[self.chance.below(moving.len())];
            self.calls[call].advance();
        }
        let speaking: Vec<usize> =
            (0..self.calls.len()).filter(|call| !self.calls[*call].on_the_way.is_empty()).collect();
        if !speaking.is_empty() && !self.chance.one_in(4) {
            let call = speaking[self.chance.below(speaking.len())];
            return self.calls[call].on_the_way.pop_front();
        }
        // Time passes, sometimes up to the next wake.
        self.now += Duration::from_millis(self.chance.below(20) as u64);
        let wake = self.wake.filter(|_| moving.is_empty() && speaking.is_empty());
        self.now = self.now.max(wake.unwrap_or_default());
        (self.wake? <= self.now).then_some(Event::Tick)
    }

    fn trouble(&mut self) {
        let moving: Vec<usize> = (0..self.calls.len()).filter(|call| !self.calls[*call].over).collect();
        let Some(&call) = moving.get(self.chance.below(moving.len().max(1))) else { return };
        match self.chance.below(6) {
            0 => self.calls[call].misbehave(&mut self.chance),
            1 => self.calls[call].fail(None),
            2 | 3 => self.calls[call].fail(Some(Error::new(self.mood, "by the mood"))),
            _ => {
                let reason = Reason::ALL[self.chance.below(Reason::ALL.len())];
                // The final reasons end a request at once and would hide the rest.
                let rare = !reason.is_retryable() && !self.chance.one_in(10);
                let reason = if rare { Reason::WorkerLost } else { reason };
                self.calls[call].fail(Some(Error::new(reason, "by chance")));
            }
        }
    }
}

/// Runs one request to its end.
fn run(seed: u64) -> Seen {
    let mut chance = Chance::new(seed);
    let mut pools = Pools::new();
    pools.set_members(WORKERS.iter().map(|name| (script::role(name), *name)));
    for name in WORKERS {
        pools.described(name, script::description(name));
    }
    let prompt: Vec<TokenId> = (0..=chance.below(6)).map(|_| chance.below(40) as TokenId).collect();
    let modes = [PlacementMode::Auto, PlacementMode::Split, PlacementMode::Fused];
    let config = DispatchConfig {
        placement: modes[chance.below(3)],
        retry_window: Duration::from_secs(2),
        attempts_max: 12,
        early_tokens_max: 1 + chance.below(8),
        ..DispatchConfig::default()
    };
    let generation = Generation {
        request: "r".into(),
        attempt: Attempt(chance.below(3) as u32),
        model: "m".into(),
        tokens: prompt.clone(),
        generated: 0,
        sampling: SamplingParams::default(),
        stop: StopConditions {
            max_tokens: 1 + chance.below(12),
            eos_ids: vec![EOS],
            stop_token_ids: vec![],
            min_tokens: 0,
        },
        time_left: Duration::from_millis(200 + chance.below(20_000) as u64),
        probe: false,
        beside: None,
        session: None,
        priority: Priority::default(),
    };
    let seen = Seen {
        prompt,
        given: 0,
        emitted: Vec::new(),
        attempt: None,
        prefill_open: false,
        decode_open: false,
        called: BTreeMap::new(),
        fences: BTreeMap::new(),
        owner: String::new(),
        decoder: String::new(),
        asked: false,
        may_hold: None,
        moved: false,
        moves: 0,
        untaken: None,
        finish: None,
        last_token_was_last: false,
    };
    let faults = [None, Some(2), Some(4), Some(8), Some(12), Some(12), Some(16), Some(30)][chance.below(8)];
    let mood = [Reason::WorkerLost, Reason::OutOfBlocks, Reason::QueueFull, Reason::ChecksumMismatch];
    let mood = mood[chance.below(4)];
    let mut world = World {
        seed,
        chance,
        pools,
        now: Duration::from_secs(5),
        wake: None,
        calls: Vec::new(),
        prefill: None,
        decode: None,
        seen,
        faults,
        mood,
    };
    let mut dispatch = Dispatch::new(generation, config);
    let mut event = Some(Event::Start);
    let mut out = Vec::new();
    for _ in 0..STEPS_MAX {
        if let Some(event) = event {
            let ending = world.seen.last_item(&event);
            if matches!(&event, Event::DecodeAdmitted { attempt } if Some(*attempt) == world.seen.attempt) {
                world.seen.untaken = None;
            }
            if matches!(event, Event::DecodeMoved { .. }) && ending.is_some() {
                world.seen.given_away();
            }
            let ending = ending.filter(|_| !matches!(event, Event::DecodeMoved { .. }));
            dispatch.on(event, &world.pools, world.now, &mut out);
            for action in out.drain(..) {
                world.carry_out(&action, ending);
            }
            if let Some(side) = ending {
                world.seen.close(side);
            }
        }
        if world.seen.finish.is_some() && world.calls.iter().all(|call| call.on_the_way.is_empty()) {
            return world.ended();
        }
        event = world.next();
    }
    panic!("seed {seed}: no end after {STEPS_MAX} events");
}

impl World {
    fn ended(self) -> Seen {
        let finish = self.seen.finish.as_ref().expect("the end was said");
        assert_eq!(finish.is_ok(), self.seen.last_token_was_last, "a good end is one with a last token");
        if self.faults.is_none() {
            assert!(finish.is_ok(), "seed {}: without faults the request succeeds: {finish:?}", self.seed);
        }
        self.seen
    }
}

/// Runs a seed, and says which one it was when something does not hold.
fn run_named(seed: u64) -> Seen {
    struct Name(u64);
    impl Drop for Name {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("seed {}", self.0);
            }
        }
    }
    let _name = Name(seed);
    run(seed)
}

#[test]
fn whatever_the_order() {
    let mut ends: BTreeMap<String, usize> = BTreeMap::new();
    let (mut replays, mut moves) = (0, 0);
    for seed in 0..20_000 {
        let seen = run_named(seed);
        let end = match seen.finish.clone().expect("the end was said") {
            Ok(()) => "OK",
            Err(error) => error.reason.name(),
        };
        *ends.entry(end.to_owned()).or_default() += 1;
        replays += usize::from(seen.called.len() > 2 && end == "OK");
        moves += seen.moves;
    }
    // The runs must have been worth something: ends of every kind, and good ends after replays.
    for end in ["OK", "CANCELLED", "DEADLINE", "INVALID_ARGUMENT", "WORKER_LOST", "OUT_OF_BLOCKS"] {
        assert!(ends.get(end).is_some_and(|count| *count > 10), "{end} is rare: {ends:?}");
    }
    assert!(replays > 1_000, "{replays} replays with a good end: {ends:?}");
    assert!(moves > 300, "{moves} sequences moved: {ends:?}");
}

#[cfg(feature = "planted")]
#[test]
fn every_planted_bug_is_caught() {
    use router::planted::{Bug, with};
    for bug in Bug::ALL {
        let fails = |seed: &u64| std::panic::catch_unwind(|| with(bug, || run(*seed))).is_err();
        assert!((0..2_000).find(fails).is_some(), "{bug:?} goes unnoticed");
    }
}
