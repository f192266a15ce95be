//! KV on its way from one engine to another.

use engine::digest::handoff_digest;
use engine::sim::SimModel;
use engine::{
    Engine, EngineConfig, EngineEvent, HandedOver, KvBlock, Reservation, SequenceId, SequenceSpec, Until,
};
use expect_test::{Expect, expect};
use proto::{Digest, Error, FinishReason, Reason, TokenId};

use crate::drive::{
    HANDOFF, config, engine, hand_over, prefill, prompt, reference, run, seeded, spec, split,
};
use crate::faulty::{Fault, faulty};

fn with_blocks(block_tokens: usize) -> EngineConfig {
    EngineConfig { block_tokens, kv_blocks: 512 / block_tokens, ..config() }
}

#[test]
fn split_gives_the_tokens_of_fused() {
    for (from, to) in [(4, 4), (16, 16), (16, 8), (8, 16), (5, 3), (1, 16)] {
        // Cold for the first of each salt; later lengths find a shared prefix on both sides.
        let (mut prefill, mut decode) = (engine(with_blocks(from)), engine(with_blocks(to)));
        for len in [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 64, 48, 47] {
            let spec = seeded(prompt(1, 64)[..len].to_vec(), 21, len as u64);
            assert_eq!(
                split(&mut prefill, &mut decode, &spec),
                reference(&spec),
                "{from} to {to}, {len} tokens"
            );
            assert_eq!(prefill.kv_counts().used, 0);
            assert_eq!(decode.kv_counts().used, 0);
        }
    }
}

#[test]
fn an_activated_sequence_can_be_preempted() {
    let (mut from, mut to) = (engine(config()), engine(EngineConfig { kv_blocks: 12, ..config() }));
    let specs: Vec<_> = (0..3).map(|i| seeded(prompt(i, 8), 30, i as u64)).collect();
    let mut sequences = Vec::new();
    for spec in &specs {
        let (held, first) = prefill(&mut from, spec);
        let reservation = to.reserve(spec.clone()).unwrap();
        hand_over((&from, held), (&mut to, reservation), &spec.tokens, first).unwrap();
        sequences.push((reservation.id, first));
    }
    let outcome = run(&mut to);
    assert!(outcome.preempted_max > 0);
    for (spec, (id, first)) in specs.iter().zip(sequences) {
        let mut tokens = vec![first];
        tokens.extend(&outcome.tokens[&id]);
        assert_eq!(tokens, reference(spec));
    }
}

#[test]
fn blocks_stream_while_later_chunks_are_computed() {
    let mut from = engine(EngineConfig { step_tokens: 6, ..config() });
    let id = from.submit(SequenceSpec { until: Until::FirstToken, ..spec(prompt(0, 15), 5) }).unwrap();
    assert_eq!(from.export(id, 0), Ok(None), "nothing is computed");
    from.step();
    assert!(from.export(id, 0).unwrap().is_some());
    assert_eq!(from.export(id, 4), Ok(None), "6 tokens seal one block of 4");
    from.step();
    assert!(from.export(id, 8).unwrap().is_some());
    assert_eq!(from.export(id, 12), Ok(None));
    from.step();
    assert_eq!(from.export(id, 12).unwrap().unwrap().tokens, 3);
    assert_eq!(from.sequence_counts().held, 1);
    assert_eq!(from.kv_counts().held, 4);
}

#[test]
fn a_whole_prompt_in_the_cache_needs_no_transfer() {
    let (mut from, mut to) = (engine(config()), engine(config()));
    let spec = spec(prompt(0, 16), 8);
    split(&mut from, &mut to, &spec);
    let (_, first) = prefill(&mut from, &spec);
    let reservation = to.reserve(spec.clone()).unwrap();
    assert_eq!(reservation.skip, 16);
    let digest = handoff_digest(HANDOFF, &spec.tokens, 16, std::iter::empty(), first);
    to.activate(reservation.id, HANDOFF, first, digest).unwrap();
    assert_eq!(run(&mut to).tokens[&reservation.id], reference(&spec)[1..]);
}

/// A prefilled prompt of 10 tokens in blocks of 4, and a reservation for it elsewhere.
struct Pair {
    to: Engine<SimModel>,
    reservation: Reservation,
    blocks: Vec<KvBlock>,
    spec: SequenceSpec,
    first: TokenId,
}

impl Pair {
    fn new() -> Self {
        let (mut from, mut to) = (engine(config()), engine(config()));
        let spec = spec(prompt(0, 10), 8);
        let (held, first) = prefill(&mut from, &spec);
        let blocks = [0, 4, 8].map(|first| from.export(held, first).unwrap().unwrap()).to_vec();
        let reservation = to.reserve(spec.clone()).unwrap();
        Self { to, reservation, blocks, spec, first }
    }

    fn import(&mut self, block: usize) -> Result<(), Error> {
        self.to.import(self.reservation.id, &self.blocks[block])
    }

    fn digest(&self) -> Digest {
        let checksums = self.blocks.iter().flat_map(|block| block.checksums.iter().copied());
        handoff_digest(HANDOFF, &self.spec.tokens, 0, checksums, self.first)
    }

    fn activate(&mut self, digest: Digest) -> Result<Option<FinishReason>, Error> {
        self.to.activate(self.reservation.id, HANDOFF, self.first, digest)
    }

    /// The sequence still comes to the right tokens.
    fn check_tokens(mut self) {
        let outcome = run(&mut self.to);
        assert_eq!(outcome.tokens[&self.reservation.id], reference(&self.spec)[1..]);
    }
}

#[track_caller]
fn check(result: Result<(), Error>, expected: Expect) {
    expected.assert_eq(&result.unwrap_err().to_string());
}

#[test]
fn blocks_may_come_twice_and_in_any_order() {
    let mut pair = Pair::new();
    for block in [2, 0, 2, 1, 0] {
        pair.import(block).unwrap();
    }
    pair.activate(pair.digest()).unwrap();
    pair.check_tokens();
}

#[test]
fn a_run_may_cross_this_sides_blocks() {
    let mut pair = Pair::new();
    let mut from = engine(EngineConfig { block_tokens: 7, ..config() });
    let (held, first) = prefill(&mut from, &pair.spec);
    assert_eq!(first, pair.first);
    hand_over((&from, held), (&mut pair.to, pair.reservation), &pair.spec.tokens, first).unwrap();
    pair.check_tokens();
}

#[test]
fn bytes_that_were_not_sealed_are_refused() {
    let mut pair = Pair::new();
    pair.blocks[1].slabs[70] ^= 1;
    check(
        pair.import(1),
        expect!["kv of tokens from 4 on, layer 1: not the bytes sealed (CHECKSUM_MISMATCH)"],
    );
    pair.blocks[1].slabs[70] ^= 1;
    pair.blocks[0].slabs.pop();
    check(
        pair.import(0),
        expect!["kv of 4 tokens takes 128 bytes, 127 came for tokens from 0 on (TRUNCATED)"],
    );
    pair.blocks[0].slabs.clear();
    check(pair.import(0), expect!["kv of 4 tokens takes 128 bytes, 0 came for tokens from 0 on (TRUNCATED)"]);
    pair.blocks[2].checksums.push(0);
    check(pair.import(2), expect!["layers: 2 here, 3 checksums came (LAYOUT_MISMATCH)"]);
}

#[test]
fn runs_outside_the_sequence_are_refused() {
    let mut pair = Pair::new();
    pair.blocks[2].first = 9;
    check(
        pair.import(2),
        expect!["first: tokens within 0..10 expected, 2 came from 9 on (INVALID_ARGUMENT)"],
    );
    pair.blocks[2].first = usize::MAX;
    check(
        pair.import(2),
        expect![
            "first: tokens within 0..10 expected, 2 came from 18446744073709551615 on (INVALID_ARGUMENT)"
        ],
    );
    pair.blocks[2].tokens = 0;
    check(
        pair.import(2),
        expect![
            "first: tokens within 0..10 expected, 0 came from 18446744073709551615 on (INVALID_ARGUMENT)"
        ],
    );
    pair.import(0).unwrap();
    pair.blocks[1].first = 2;
    check(pair.import(1), expect!["first: tokens 2..6 overlap what came before (INVALID_ARGUMENT)"]);
    // Another block of equal length in the place of the first.
    pair.blocks[1].first = 0;
    check(
        pair.import(1),
        expect!["tokens 0.. came twice, with other length or checksums the second time (CHECKSUM_MISMATCH)"],
    );
}

#[test]
fn decoding_needs_every_token_and_the_digest() {
    let mut pair = Pair::new();
    check(
        pair.activate(pair.digest()).map(drop),
        expect!["kv of 10 tokens expected, none came for token 0 (TRUNCATED)"],
    );
    pair.import(0).unwrap();
    pair.import(2).unwrap();
    check(
        pair.activate(pair.digest()).map(drop),
        expect!["kv of 10 tokens expected, none came for token 4 (TRUNCATED)"],
    );
    pair.import(1).unwrap();
    let reason = pair.activate(Digest::default()).unwrap_err().reason;
    assert_eq!(reason, Reason::ChecksumMismatch);
    pair.first ^= 1;
    let other_first = pair.digest();
    pair.first ^= 1;
    assert_eq!(pair.activate(other_first).unwrap_err().reason, Reason::ChecksumMismatch);
    assert_eq!(pair.to.cached_tokens(&pair.spec.tokens), 0, "nothing unproven is cached");
    pair.activate(pair.digest()).unwrap();
    assert_eq!(pair.to.cached_tokens(&pair.spec.tokens), 8);
    pair.check_tokens();
}

#[test]
fn a_first_token_that_ends_the_sequence_leaves_nothing_to_decode() {
    let mut pair = Pair::new();
    let mut ending = pair.spec.clone();
    ending.stop.eos_ids = vec![pair.first];
    pair.to.cancel(pair.reservation.id);
    pair.reservation = pair.to.reserve(ending).unwrap();
    (0..3).for_each(|block| pair.import(block).unwrap());
    assert_eq!(pair.activate(pair.digest()), Ok(Some(FinishReason::Eos)));
    assert_eq!(pair.to.sequence_counts().reserved, 1, "it is its owner's to cancel");
    pair.first = 256;
    check(
        pair.activate(pair.digest()).map(drop),
        expect!["first: an id below 256 expected, 256 came (INVALID_ARGUMENT)"],
    );
}

#[test]
fn what_is_gone_is_unknown() {
    let mut pair = Pair::new();
    pair.import(0).unwrap();
    pair.to.cancel(pair.reservation.id);
    check(pair.import(1), expect!["sequence 0 is not here (UNKNOWN_HANDOFF)"]);
    check(pair.activate(pair.digest()).map(drop), expect!["sequence 0 is not here (UNKNOWN_HANDOFF)"]);
    assert_eq!(pair.to.kv_counts().free, 64, "a cancelled reservation leaves nothing");
    let mut from = engine(config());
    let (held, _) = prefill(&mut from, &pair.spec);
    from.release(held);
    from.release(held);
    check(from.export(held, 0).map(drop), expect!["sequence 0 is not here (UNKNOWN_HANDOFF)"]);
    check(from.export(SequenceId(99), 0).map(drop), expect!["sequence 99 is not here (UNKNOWN_HANDOFF)"]);
    assert_eq!(from.kv_counts().used, 0);
    assert_eq!(from.kv_counts().cached, 2, "the full blocks of a released hold are prefix cache");
}

#[test]
fn exports_start_at_blocks_of_sequences_to_be_held() {
    let mut from = engine(config());
    let (held, _) = prefill(&mut from, &spec(prompt(0, 8), 4));
    check(
        from.export(held, 2).map(drop),
        expect!["first: a multiple of 4 below 8 expected, 2 came (INVALID_ARGUMENT)"],
    );
    check(
        from.export(held, 8).map(drop),
        expect!["first: a multiple of 4 below 8 expected, 8 came (INVALID_ARGUMENT)"],
    );
    let fused = from.submit(spec(prompt(1, 8), 4)).unwrap();
    from.step();
    check(from.export(fused, 0).map(drop), expect!["sequence 1 is not here (UNKNOWN_HANDOFF)"]);
}

#[test]
fn a_block_overwritten_after_its_seal_is_refused() {
    let spec = spec(prompt(0, 8), 4);
    let mut from = faulty(Fault::Overwrites, 1);
    let held = from.submit(SequenceSpec { until: Until::FirstToken, ..spec.clone() }).unwrap();
    run(&mut from);
    from.submit(SequenceSpec { tokens: prompt(1, 4), ..spec.clone() }).unwrap();
    run(&mut from);
    let mut to = engine(config());
    let id = to.reserve(spec).unwrap().id;
    check(
        to.import(id, &from.export(held, 0).unwrap().unwrap()),
        expect!["kv of tokens from 0 on, layer 1: not the bytes sealed (CHECKSUM_MISMATCH)"],
    );
    to.import(id, &from.export(held, 4).unwrap().unwrap()).unwrap();
}

#[test]
fn the_scheduled_event_of_a_reservation_tells_what_the_cache_had() {
    let (mut from, mut to) = (engine(config()), engine(config()));
    let tokens = prompt(0, 18);
    split(&mut from, &mut to, &spec(tokens[..9].to_vec(), 3));
    let spec = spec(tokens, 5);
    let (held, first) = prefill(&mut from, &spec);
    let reservation = to.reserve(spec.clone()).unwrap();
    hand_over((&from, held), (&mut to, reservation), &spec.tokens, first).unwrap();
    assert_eq!((reservation.skip, run(&mut to).cached[&reservation.id]), (8, 8));
}

#[test]
fn a_running_sequence_is_handed_over_between_any_two_steps() {
    for (cached, len) in [(true, 7), (true, 8), (false, 8), (false, 9)] {
        let spec = seeded(prompt(0, len), 12, 3);
        let whole = reference(&spec);
        for given in 1..whole.len() {
            let cold = EngineConfig { prefix_cache: cached, ..config() };
            let (mut from, mut to) = (engine(cold), engine(cold));
            let id = from.submit(spec.clone()).unwrap();
            let mut tokens = Vec::new();
            while tokens.len() < given {
                let events = from.step().events;
                tokens.extend(events.into_iter().filter_map(|event| match event {
                    EngineEvent::Token { token, .. } => Some(token),
                    _ => None,
                }));
            }
            let HandedOver { tokens: known, next } = from.hand_over(id).expect("it runs");
            assert_eq!((known.len(), next), (len + given - 1, tokens[given - 1]));
            assert_eq!(from.hand_over(id), None, "once");
            assert!(!from.has_work() && from.sequence_counts().held == 1);
            let generated = given - 1;
            let rest = SequenceSpec { tokens: known.clone(), generated, ..spec.clone() };
            let reservation = to.reserve(rest).unwrap();
            hand_over((&from, id), (&mut to, reservation), &known, next).unwrap();
            tokens.extend(&run(&mut to).tokens[&reservation.id]);
            assert_eq!(tokens, whole);
            from.release(id);
            assert_eq!((from.kv_counts().used, to.kv_counts().used), (0, 0));
            from.check().unwrap();
        }
    }
}

#[test]
fn what_has_no_kv_or_no_token_of_its_own_is_not_handed_over() {
    let mut from = engine(EngineConfig { step_tokens: 4, ..config() });
    let id = from.submit(spec(prompt(0, 8), 4)).unwrap();
    assert_eq!(from.hand_over(id), None, "it waits");
    from.step();
    assert_eq!(from.hand_over(id), None, "half of the prompt");
    let short = from.submit(spec(prompt(1, 1), 4)).unwrap();
    let held = from.submit(SequenceSpec { until: Until::FirstToken, ..spec(prompt(2, 3), 4) }).unwrap();
    let reserved = from.reserve(spec(prompt(3, 4), 4)).unwrap().id;
    assert_eq!(from.hand_over(short), None, "one token, and it is not computed");
    assert_eq!(from.hand_over(reserved), None, "its kv has not come");
    while from.has_work() {
        from.step();
    }
    assert_eq!(from.hand_over(held), None, "it is held as it is");
    assert_eq!(from.hand_over(id), None, "it is over");
}
