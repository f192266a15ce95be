//! Random operations in random order on two engines with tiny pools. After each, the accounts add up; whatever
//! tokens come, they are the reference's.

use std::collections::BTreeMap;

use engine::digest::handoff_digest;
use engine::sim::SimModel;
use engine::{Engine, EngineConfig, EngineEvent, KvBlock, SequenceId, SequenceSpec, Until};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use proto::{Reason, TokenId};

use crate::drive::{HANDOFF, config, engine, prompt, reference, seeded, spec};

/// Picks among the sequences there are, modulo their number.
type Pick = usize;

#[derive(Clone, Debug)]
enum Operation {
    Submit { salt: usize, len: usize, max_tokens: usize, seeded: bool, reports: bool, to_hold: bool },
    Step { decode: bool, interrupted: bool },
    Reserve(Pick),
    Import { pick: Pick, block: usize, damage: bool },
    Activate(Pick),
    Cancel(Pick),
    Release(Pick),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (0..3usize, 1..24usize, 1..20usize, any::<(bool, bool)>(), proptest::bool::weighted(0.2)).prop_map(
            |(salt, len, max_tokens, (seeded, to_hold), reports)| {
                Operation::Submit { salt, len, max_tokens, seeded, reports, to_hold }
            }
        ),
        12 => (any::<bool>(), proptest::bool::weighted(0.1))
            .prop_map(|(decode, interrupted)| Operation::Step { decode, interrupted }),
        4 => any::<Pick>().prop_map(Operation::Reserve),
        12 => (any::<Pick>(), 0..6usize, proptest::bool::weighted(0.1))
            .prop_map(|(pick, block, damage)| Operation::Import { pick, block, damage }),
        4 => any::<Pick>().prop_map(Operation::Activate),
        1 => any::<Pick>().prop_map(Operation::Cancel),
        1 => any::<Pick>().prop_map(Operation::Release),
    ]
}

/// One sequence as the test sees it: where it is, and what it should come to.
struct Tracked {
    decode: bool,
    id: SequenceId,
    spec: SequenceSpec,
    expected: Vec<TokenId>,
    /// Tokens so far, that of the prefill side included.
    tokens: Vec<TokenId>,
    /// For reservations: the sequence whose KV is fetched, and what was sent.
    source: Option<Source>,
    over: bool,
}

struct Source {
    held: SequenceId,
    skip: usize,
    sent: BTreeMap<usize, Vec<u32>>,
}

/// How often what happened.
type Tally = BTreeMap<String, usize>;

struct World {
    tally: Tally,
    prefill: Engine<SimModel>,
    decode: Engine<SimModel>,
    tracked: Vec<Tracked>,
}

impl World {
    fn new(prefill: EngineConfig, decode: EngineConfig) -> Self {
        Self { prefill: engine(prefill), decode: engine(decode), tracked: Vec::new(), tally: Tally::new() }
    }

    fn engine(&mut self, decode: bool) -> &mut Engine<SimModel> {
        if decode { &mut self.decode } else { &mut self.prefill }
    }

    fn count(&mut self, outcome: impl Into<String>) {
        *self.tally.entry(outcome.into()).or_default() += 1;
    }

    /// The `pick`th of the sequences that `is` says yes to.
    fn pick(&self, pick: Pick, is: impl Fn(&Tracked) -> bool) -> Option<usize> {
        let all: Vec<_> = (0..self.tracked.len()).filter(|&i| is(&self.tracked[i])).collect();
        (!all.is_empty()).then(|| all[pick % all.len()])
    }

    fn apply(&mut self, operation: &Operation) {
        match *operation {
            Operation::Submit { salt, len, max_tokens, seeded: is_seeded, reports, to_hold } => {
                let tokens = prompt(salt, 24)[..len].to_vec();
                let mut spec =
                    if is_seeded { seeded(tokens, max_tokens, 3) } else { spec(tokens, max_tokens) };
                spec.sampling.prompt_logprobs = reports.then_some(1);
                self.submit(spec, to_hold);
            }
            Operation::Step { decode, interrupted } => self.step(decode, interrupted),
            Operation::Reserve(pick) => self.reserve(pick),
            Operation::Import { pick, block, damage } => self.import(pick, block, damage),
            Operation::Activate(pick) => self.activate(pick),
            Operation::Cancel(pick) => self.end(pick, Engine::cancel),
            Operation::Release(pick) => self.end(pick, |engine, id| {
                let before = engine.sequence_counts();
                engine.release(id);
                engine.release(id);
                let after = engine.sequence_counts();
                assert!(before.reserved == after.reserved && before.preempted == after.preempted);
            }),
        }
        self.prefill.check().unwrap();
        self.decode.check().unwrap();
    }

    fn submit(&mut self, spec: SequenceSpec, to_hold: bool) {
        let until = if to_hold { Until::FirstToken } else { Until::Finished };
        let expected = reference(&spec);
        let decode = !to_hold;
        match self.engine(decode).submit(SequenceSpec { until, ..spec.clone() }) {
            Ok(id) => self.tracked.push(Tracked {
                decode,
                id,
                spec: SequenceSpec { until, ..spec },
                expected,
                tokens: Vec::new(),
                source: None,
                over: false,
            }),
            Err(error) => {
                assert!(matches!(error.reason, Reason::QueueFull | Reason::InvalidArgument));
                self.count(format!("submission refused: {}", error.reason));
            }
        }
    }

    fn step(&mut self, decode: bool, interrupted: bool) {
        let engine = self.engine(decode);
        let size = engine.layout().block_tokens;
        if interrupted {
            engine.interrupt().raise();
        }
        let report = engine.step();
        let preempted = engine.sequence_counts().preempted > 0;
        engine.interrupt().clear();
        assert!(!report.interrupted || interrupted && report.events.is_empty());
        if preempted {
            self.count("preempted");
        }
        if report.interrupted {
            self.count("interrupted");
        }
        for event in report.events {
            let at = self.tracked.iter().position(|t| t.decode == decode && t.id == event.id()).unwrap();
            let tracked = &mut self.tracked[at];
            assert!(!tracked.over, "after the end: {event:?}");
            match event {
                EngineEvent::Token { index, token, finish, prompt, .. } => {
                    assert_eq!(index, tracked.tokens.len());
                    let spec = &tracked.spec;
                    let reports = spec.sampling.prompt_logprobs.map_or(0, |_| spec.tokens.len() - 1);
                    // The decode side has the token of the prefill side before it.
                    let expected = (index == 0).then_some(reports);
                    assert_eq!(prompt.map(|report| report.logprobs.len()), expected);
                    tracked.tokens.push(token);
                    assert_eq!(tracked.tokens, tracked.expected[..=index]);
                    assert_eq!(finish.is_some(), index + 1 == tracked.expected.len());
                    tracked.over = finish.is_some() && tracked.spec.until == Until::Finished;
                    if tracked.over {
                        self.count("finished");
                    }
                }
                EngineEvent::Failed { error, .. } => {
                    assert_eq!(error.reason, Reason::OutOfBlocks);
                    tracked.over = true;
                    self.count(format!("failed: {}", error.reason));
                }
                EngineEvent::Scheduled { cached, .. } => {
                    if !cached.is_multiple_of(size) {
                        self.count("shared a part of a block");
                    }
                }
                EngineEvent::Sealed { .. } => {}
            }
        }
    }

    fn is_held(tracked: &Tracked) -> bool {
        tracked.spec.until == Until::FirstToken && !tracked.over && tracked.tokens.len() == 1
    }

    fn reserve(&mut self, pick: Pick) {
        let Some(held) = self.pick(pick, Self::is_held) else { return };
        let held = &self.tracked[held];
        let spec = SequenceSpec { until: Until::Finished, ..held.spec.clone() };
        match self.decode.reserve(spec.clone()) {
            Ok(reservation) => {
                let is_cached = reservation.skip > 0;
                let block = self.prefill.layout().block_tokens;
                let skip = reservation.skip / block * block;
                let source = Source { held: held.id, skip, sent: Default::default() };
                let (expected, tokens) = (held.expected.clone(), held.tokens.clone());
                self.tracked.push(Tracked {
                    decode: true,
                    id: reservation.id,
                    spec,
                    expected,
                    tokens,
                    source: Some(source),
                    over: false,
                });
                if is_cached {
                    self.count("reserved with a cached prefix");
                }
            }
            Err(error) => {
                let expected = [Reason::QueueFull, Reason::OutOfBlocks, Reason::InvalidArgument];
                assert!(expected.contains(&error.reason));
                self.count(format!("reservation refused: {}", error.reason));
            }
        }
    }

    fn import(&mut self, pick: Pick, block: usize, damage: bool) {
        let Some(at) = self.pick(pick, |t| t.source.is_some() && !t.over) else { return };
        let Tracked { id, spec, source, .. } = &mut self.tracked[at];
        let Some(source) = source else { return };
        let size = self.prefill.layout().block_tokens;
        let first = source.skip + block * size;
        if first >= spec.tokens.len() {
            return;
        }
        let exported = match self.prefill.export(source.held, first) {
            Ok(exported) => exported.expect("a held sequence is sealed"),
            Err(error) => return assert_eq!(error.reason, Reason::UnknownHandoff),
        };
        if damage {
            let mut damaged = KvBlock { slabs: exported.slabs.clone(), ..exported.clone() };
            let byte = damaged.slabs.len() * block / 7;
            damaged.slabs[byte] ^= 0x10;
            assert_eq!(self.decode.import(*id, &damaged).unwrap_err().reason, Reason::ChecksumMismatch);
            self.count("damage refused");
        } else {
            self.decode.import(*id, &exported).unwrap();
            source.sent.insert(first, exported.checksums);
            self.count("imported");
        }
    }

    fn activate(&mut self, pick: Pick) {
        let Some(at) = self.pick(pick, |t| t.source.is_some() && !t.over) else { return };
        let size = self.prefill.layout().block_tokens;
        let tracked = &mut self.tracked[at];
        let Some(source) = &tracked.source else { return };
        let tokens = &tracked.spec.tokens;
        let blocks = (source.skip..tokens.len()).step_by(size).count();
        let checksums = source.sent.values().flatten().copied();
        let digest = handoff_digest(HANDOFF, tokens, source.skip, checksums, tracked.tokens[0]);
        let is_complete = source.sent.len() == blocks;
        match self.decode.activate(tracked.id, HANDOFF, tracked.tokens[0], digest) {
            Ok(finish) => {
                assert!(is_complete, "nothing decodes without all its KV");
                assert_eq!(finish.is_some(), tracked.expected.len() == 1);
                if finish.is_none() {
                    tracked.source = None;
                }
                self.count(if finish.is_none() { "activated" } else { "ended by its first token" });
            }
            Err(error) => {
                // The digest alone misses a run that the cache had already and the owner sends all the same.
                let expected = [Reason::Truncated, Reason::ChecksumMismatch];
                assert!(expected.contains(&error.reason) && !is_complete);
                self.count(format!("activation refused: {}", error.reason));
            }
        }
    }

    fn end(&mut self, pick: Pick, how: impl Fn(&mut Engine<SimModel>, SequenceId)) {
        let Some(at) = self.pick(pick, |t| !t.over && t.spec.until == Until::FirstToken) else { return };
        let (decode, id) = (self.tracked[at].decode, self.tracked[at].id);
        how(self.engine(decode), id);
        self.tracked[at].over = true;
        self.count("cancelled or released");
    }

    /// Ends holds and reservations; everything else must then come to its end, and leave no block used.
    fn finish(mut self) -> Tally {
        for at in 0..self.tracked.len() {
            let Tracked { decode, id, ref source, over, ref spec, .. } = self.tracked[at];
            if !over && (source.is_some() || spec.until == Until::FirstToken) {
                self.engine(decode).cancel(id);
                self.tracked[at].over = true;
            }
        }
        let mut steps = 0;
        while self.prefill.has_work() || self.decode.has_work() {
            self.step(false, false);
            self.step(true, false);
            steps += 1;
            assert!(steps < 10_000, "no end");
        }
        for tracked in &self.tracked {
            assert!(tracked.over, "sequence {} of {:?} never ended", tracked.id, tracked.spec);
        }
        assert_eq!((self.prefill.kv_counts().used, self.decode.kv_counts().used), (0, 0));
        self.tally
    }
}

/// Sizes of the two engines.
fn sizes() -> impl Strategy<Value = [EngineConfig; 2]> {
    (6..24usize, 2..6usize, 6..24usize, 2..6usize, 1..20usize, 1..6usize, any::<bool>()).prop_map(
        |(
            prefill_blocks,
            prefill_size,
            decode_blocks,
            decode_size,
            step_tokens,
            sequences_max,
            prefix_cache,
        )| {
            let shared =
                EngineConfig { step_tokens, sequences_max, waiting_max: 6, prefix_cache, ..config() };
            [
                EngineConfig { kv_blocks: prefill_blocks, block_tokens: prefill_size, ..shared },
                EngineConfig { kv_blocks: decode_blocks, block_tokens: decode_size, ..shared },
            ]
        },
    )
}

fn play(operations: &[Operation], [prefill, decode]: [EngineConfig; 2]) -> Tally {
    let mut world = World::new(prefill, decode);
    for operation in operations {
        world.apply(operation);
    }
    world.finish()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn accounts_add_up_and_tokens_are_right(
        operations in proptest::collection::vec(operation(), 1..200),
        sizes in sizes(),
    ) {
        play(&operations, sizes);
    }
}

/// A random test that never gets anywhere proves nothing.
#[test]
fn random_operations_reach_every_outcome() {
    let mut runner = TestRunner::deterministic();
    let strategy = (proptest::collection::vec(operation(), 200), sizes());
    let mut tally = Tally::new();
    for _ in 0..200 {
        let (operations, sizes) = strategy.new_tree(&mut runner).unwrap().current();
        for (outcome, count) in play(&operations, sizes) {
            *tally.entry(outcome).or_default() += count;
        }
    }
    let outcomes = [
        "activated",
        "activation refused: CHECKSUM_MISMATCH",
        "ended by its first token",
        "activation refused: TRUNCATED",
        "cancelled or released",
        "damage refused",
        "failed: OUT_OF_BLOCKS",
        "finished",
        "imported",
        "interrupted",
        "preempted",
        "reservation refused: OUT_OF_BLOCKS",
        "reservation refused: QUEUE_FULL",
        "reserved with a cached prefix",
        "shared a part of a block",
        "submission refused: INVALID_ARGUMENT",
        "submission refused: QUEUE_FULL",
    ];
    for outcome in outcomes {
        assert!(tally.get(outcome).is_some_and(|&count| count >= 10), "{outcome}: too few of {tally:#?}");
    }
}
