//! Random operations in random order on two engines with tiny pools. After each, the accounts add up; whatever
//! tokens come, they are the reference's.

use engine::digest::handoff_digest;
use engine::sim::SimModel;
use engine::{Engine, EngineConfig, EngineEvent, KvBlock, SequenceId, SequenceSpec, Until};
use proptest::prelude::*;
use proto::{Reason, TokenId};

use crate::drive::{HANDOFF, config, engine, prompt, reference, seeded, spec};

/// Picks among the sequences there are, modulo their number.
type Pick = usize;

#[derive(Clone, Debug)]
enum Operation {
    Submit { salt: usize, len: usize, max_tokens: usize, seeded: bool, to_hold: bool },
    Step { decode: bool, interrupted: bool },
    Reserve(Pick),
    Import { pick: Pick, block: usize, damage: bool },
    Activate(Pick),
    Cancel(Pick),
    Release(Pick),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (0..3usize, 1..24usize, 1..20usize, any::<bool>(), any::<bool>()).prop_map(
            |(salt, len, max_tokens, seeded, to_hold)| Operation::Submit { salt, len, max_tokens, seeded, to_hold }
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
    sent: std::collections::BTreeMap<usize, Vec<u32>>,
}

struct World {
    prefill: Engine<SimModel>,
    decode: Engine<SimModel>,
    tracked: Vec<Tracked>,
}

impl World {
    fn new(prefill: EngineConfig, decode: EngineConfig) -> Self {
        Self { prefill: engine(prefill), decode: engine(decode), tracked: Vec::new() }
    }

    fn engine(&mut self, decode: bool) -> &mut Engine<SimModel> {
        if decode { &mut self.decode } else { &mut self.prefill }
    }

    /// The `pick`th of the sequences that `is` says yes to.
    fn pick(&self, pick: Pick, is: impl Fn(&Tracked) -> bool) -> Option<usize> {
        let all: Vec<_> = (0..self.tracked.len()).filter(|&i| is(&self.tracked[i])).collect();
        (!all.is_empty()).then(|| all[pick % all.len()])
    }

    fn apply(&mut self, operation: &Operation) {
        match *operation {
            Operation::Submit { salt, len, max_tokens, seeded: is_seeded, to_hold } => {
                let tokens = prompt(salt, 24)[..len].to_vec();
                let spec = if is_seeded { seeded(tokens, max_tokens, 3) } else { spec(tokens, max_tokens) };
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
            Err(error) => assert!(matches!(error.reason, Reason::QueueFull | Reason::InvalidArgument)),
        }
    }

    fn step(&mut self, decode: bool, interrupted: bool) {
        let engine = self.engine(decode);
        if interrupted {
            engine.interrupt().raise();
        }
        let report = engine.step();
        engine.interrupt().clear();
        assert!(!report.interrupted || interrupted && report.events.is_empty());
        for event in report.events {
            let at = self.tracked.iter().position(|t| t.decode == decode && t.id == event.id()).unwrap();
            let tracked = &mut self.tracked[at];
            assert!(!tracked.over, "after the end: {event:?}");
            match event {
                EngineEvent::Token { index, token, finish, .. } => {
                    assert_eq!(index, tracked.tokens.len());
                    tracked.tokens.push(token);
                    assert_eq!(tracked.tokens, tracked.expected[..=index]);
                    assert_eq!(finish.is_some(), index + 1 == tracked.expected.len());
                    tracked.over = finish.is_some() && tracked.spec.until == Until::Finished;
                }
                EngineEvent::Failed { error, .. } => {
                    assert_eq!(error.reason, Reason::OutOfBlocks);
                    tracked.over = true;
                }
                EngineEvent::Scheduled { .. } | EngineEvent::Sealed { .. } => {}
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
            }
            Err(error) => assert!(matches!(
                error.reason,
                Reason::QueueFull | Reason::OutOfBlocks | Reason::InvalidArgument
            )),
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
        } else {
            self.decode.import(*id, &exported).unwrap();
            source.sent.insert(first, exported.checksums);
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
        match self.decode.activate(tracked.id, HANDOFF, tracked.tokens[0], digest) {
            Ok(()) => {
                assert_eq!(source.sent.len(), blocks, "nothing decodes without all its KV");
                tracked.source = None;
            }
            Err(error) if tracked.expected.len() == 1 && source.sent.len() == blocks => {
                assert_eq!(error.reason, Reason::InvalidArgument);
            }
            Err(error) => {
                // The digest alone misses a run that the cache had already and the owner sends all the same.
                assert!(matches!(error.reason, Reason::Truncated | Reason::ChecksumMismatch));
                assert!(source.sent.len() < blocks);
            }
        }
    }

    fn end(&mut self, pick: Pick, how: impl Fn(&mut Engine<SimModel>, SequenceId)) {
        let Some(at) = self.pick(pick, |t| !t.over && t.spec.until == Until::FirstToken) else { return };
        let (decode, id) = (self.tracked[at].decode, self.tracked[at].id);
        how(self.engine(decode), id);
        self.tracked[at].over = true;
    }

    /// Ends holds and reservations; everything else must then come to its end, and leave no block used.
    fn finish(mut self) {
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
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn accounts_add_up_and_tokens_are_right(
        operations in proptest::collection::vec(operation(), 1..200),
        (prefill_blocks, prefill_size) in (6..24usize, 2..6usize),
        (decode_blocks, decode_size) in (6..24usize, 2..6usize),
        step_tokens in 1..20usize,
        sequences_max in 1..6usize,
        prefix_cache in any::<bool>(),
    ) {
        let shared = EngineConfig { step_tokens, sequences_max, waiting_max: 6, prefix_cache, ..config() };
        let mut world = World::new(
            EngineConfig { kv_blocks: prefill_blocks, block_tokens: prefill_size, ..shared },
            EngineConfig { kv_blocks: decode_blocks, block_tokens: decode_size, ..shared },
        );
        for operation in &operations {
            world.apply(operation);
        }
        world.finish();
    }
}
