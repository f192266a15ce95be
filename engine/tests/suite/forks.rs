//! Sequences that start with the same tokens share what is computed of them, to the token.

use std::collections::{BTreeMap, BTreeSet};

use engine::sim::SimModel;
use engine::{Engine, EngineConfig, EngineEvent, SequenceSpec, Until};
use proto::{SamplingParams, TokenId};

use crate::drive::{Outcome, config, engine, hand_over, prefill, prompt, reference, run, seeded, spec};

/// An engine with room for a prompt of 1,000 tokens.
fn roomy() -> Engine<SimModel> {
    engine(EngineConfig {
        kv_blocks: 256,
        block_tokens: 16,
        step_tokens: 1024,
        sequences_max: 16,
        ..config()
    })
}

fn sibling(of: &SequenceSpec, sequence: u32) -> SequenceSpec {
    SequenceSpec { sampling: SamplingParams { sequence, ..of.sampling.clone() }, ..of.clone() }
}

#[test]
fn a_fork_of_a_thousand_tokens_computes_one() {
    let mut engine = roomy();
    let leader = spec(prompt(0, 1000), 20);
    let first = engine.submit(leader.clone()).unwrap();
    assert_eq!(engine.step().batch_tokens, 1000);
    let forks: Vec<_> = (1..8).map(|i| engine.submit(sibling(&leader, i)).unwrap()).collect();
    let used = engine.kv_counts().used;
    let report = engine.step();
    assert_eq!(
        (report.batch_sequences, report.batch_tokens),
        (8, 8),
        "the leader's next token, and one of each fork"
    );
    assert_eq!(engine.kv_counts().used, used + 7, "a block for each fork");
    let mut outcome = Outcome::default();
    report.events.into_iter().for_each(|event| outcome.take(event));
    for fork in &forks {
        assert_eq!(outcome.cached[fork], 999);
        assert_eq!(outcome.prompts[fork].cached_tokens, 999);
    }
    let rest = run(&mut engine);
    let of = |id| [outcome.tokens[id].as_slice(), &rest.tokens[id]].concat();
    // Greedy sequences are all the same.
    assert!(forks.iter().all(|fork| of(fork) == reference(&leader)));
    assert_eq!(rest.tokens[&first], reference(&leader)[2..]);
    assert_eq!(engine.kv_counts().used, 0);
}

/// Eight sequences of one prompt, and each alone on an engine of its own.
#[test]
fn forks_give_the_tokens_of_separate_requests() {
    // Around the borders of blocks of 4.
    for len in [1, 3, 4, 5, 7, 8, 9, 30] {
        let leader = seeded(prompt(3, len), 15, 9);
        let mut together = engine(config());
        let mut ids = vec![together.submit(leader.clone()).unwrap()];
        let mut outcome = Outcome::default();
        // Some follow at once, and some when the leader decodes.
        ids.extend((1..3).map(|i| together.submit(sibling(&leader, i)).unwrap()));
        for _ in 0..3 {
            together.step().events.into_iter().for_each(|event| outcome.take(event));
        }
        ids.extend((3..8).map(|i| together.submit(sibling(&leader, i)).unwrap()));
        while together.has_work() {
            together.step().events.into_iter().for_each(|event| outcome.take(event));
        }
        let mut different = BTreeSet::new();
        for (sequence, id) in (0..).zip(&ids) {
            let alone = sibling(&leader, sequence);
            let mut engine = engine(config());
            let lone = engine.submit(alone.clone()).unwrap();
            assert_eq!(
                outcome.tokens[id],
                run(&mut engine).tokens[&lone],
                "sequence {sequence} of {len} tokens"
            );
            assert_eq!(outcome.tokens[id], reference(&alone));
            different.insert(outcome.tokens[id].clone());
        }
        assert!(different.len() > 1, "the index of the sequence decides");
        assert!(ids[3..].iter().all(|id| outcome.cached[id] == len - 1));
    }
}

#[test]
fn forks_are_handed_over_and_share_on_the_other_side() {
    let (mut from, mut to) = (roomy(), roomy());
    let leader = seeded(prompt(1, 1000), 12, 4);
    let specs: Vec<_> = (0..8).map(|i| sibling(&leader, i)).collect();
    let mut ids = Vec::new();
    for (sequence, spec) in specs.iter().enumerate() {
        let held = from.submit(SequenceSpec { until: Until::FirstToken, ..spec.clone() }).unwrap();
        let report = from.step();
        assert_eq!(report.batch_tokens, if sequence == 0 { 1000 } else { 1 });
        let mut outcome = Outcome::default();
        report.events.into_iter().for_each(|event| outcome.take(event));
        let first = outcome.tokens[&held][0];
        let reservation = to.reserve(spec.clone()).unwrap();
        assert_eq!(reservation.skip, if sequence == 0 { 0 } else { 1000 });
        hand_over((&from, held), (&mut to, reservation), &spec.tokens, first).unwrap();
        ids.push((reservation.id, first));
    }
    assert_eq!(from.kv_counts().used, 63 + 7);
    assert_eq!(to.kv_counts().used, 63 + 7);
    let outcome = run(&mut to);
    for ((id, first), spec) in ids.iter().zip(&specs) {
        assert_eq!([&[*first], outcome.tokens[id].as_slice()].concat(), reference(spec));
    }
}

/// A reservation that has a part of a block here gets the rest from the owner, whose blocks end elsewhere.
#[test]
fn a_reservation_may_begin_within_a_block() {
    for size in [1, 3, 4, 7, 16] {
        let mut from = engine(EngineConfig { block_tokens: size, ..config() });
        let mut to = engine(config());
        let tokens = prompt(5, 22);
        let living = to.submit(spec([&tokens[..14], &[250, 251]].concat(), 30)).unwrap();
        to.step();
        let wanted = seeded(tokens, 9, 2);
        let (held, first) = prefill(&mut from, &wanted);
        let reservation = to.reserve(wanted.clone()).unwrap();
        assert_eq!(reservation.skip, 14);
        hand_over((&from, held), (&mut to, reservation), &wanted.tokens, first).unwrap();
        to.cancel(living);
        assert_eq!(run(&mut to).tokens[&reservation.id], reference(&wanted)[1..]);
    }
}

#[test]
fn sequences_that_part_within_a_block_share_up_to_there() {
    let mut engine = engine(config());
    let tokens: Vec<TokenId> = prompt(0, 14);
    let first = spec(tokens.clone(), 12);
    let a = engine.submit(first.clone()).unwrap();
    engine.step();
    let other = spec([&tokens[..10], &[200, 201, 202]].concat(), 12);
    let b = engine.submit(other.clone()).unwrap();
    let outcome = run(&mut engine);
    assert_eq!(outcome.cached[&b], 10);
    assert_eq!(outcome.tokens[&b], reference(&other));
    // And the block that was copied from is as it was: its owner went on writing to it all the while.
    assert_eq!(outcome.tokens[&a], reference(&first)[1..]);
}

#[test]
fn a_prompt_that_ends_with_its_block_is_computed_from_its_last_token_on() {
    let mut engine = engine(config());
    let spec = spec(prompt(0, 12), 3);
    for cached in [0, 11, 11] {
        let id = engine.submit(spec.clone()).unwrap();
        let outcome = run(&mut engine);
        assert_eq!((outcome.cached[&id], &outcome.tokens[&id]), (cached, &reference(&spec)));
    }
}

/// The block that is copied from can be the very one that has to make room.
#[test]
fn a_copied_block_may_be_evicted_for_its_copy() {
    let mut engine = engine(EngineConfig { kv_blocks: 3, ..config() });
    let spec = spec(prompt(0, 12), 1);
    for cached in [0, 11, 11, 11] {
        let id = engine.submit(spec.clone()).unwrap();
        let outcome = run(&mut engine);
        assert_eq!((outcome.cached[&id], &outcome.tokens[&id]), (cached, &reference(&spec)));
    }
}

#[test]
fn nothing_is_shared_without_a_prefix_cache() {
    let mut engine = engine(EngineConfig { prefix_cache: false, ..config() });
    let spec = spec(prompt(0, 13), 6);
    engine.submit(spec.clone()).unwrap();
    engine.step();
    let fork = engine.submit(spec.clone()).unwrap();
    let outcome = run(&mut engine);
    assert_eq!((outcome.cached[&fork], &outcome.tokens[&fork]), (0, &reference(&spec)));
}

#[test]
fn forks_survive_preemption_and_the_end_of_their_leader() {
    let mut engine = engine(EngineConfig { kv_blocks: 14, ..config() });
    let leader = seeded(prompt(2, 18), 25, 6);
    let ids: Vec<_> = (0..4)
        .map(|i| {
            let id = engine.submit(sibling(&leader, i)).unwrap();
            engine.step();
            engine.step();
            id
        })
        .collect();
    engine.cancel(ids[0]);
    let mut preempted = 0;
    let mut tokens = BTreeMap::<_, Vec<TokenId>>::new();
    while engine.has_work() {
        for event in engine.step().events {
            if let EngineEvent::Token { id, index, token, .. } = event {
                let sequence = ids.iter().position(|other| *other == id).unwrap() as u32;
                assert_eq!(token, reference(&sibling(&leader, sequence))[index]);
                tokens.entry(id).or_default().push(token);
            }
        }
        preempted = preempted.max(engine.sequence_counts().preempted);
        engine.check().unwrap();
    }
    assert!(preempted > 0, "the pool is small enough to preempt");
    assert_eq!(engine.kv_counts().used, 0);
    assert_eq!(tokens.len(), 3);
}
