//! Each planted bug does what it says, and something a checker can see comes of it.

use engine::digest::handoff_digest;
use engine::planted::{Bug, is, with};
use engine::{EngineConfig, SequenceSpec, Until};
use proto::Digest;

use crate::drive::{HANDOFF, config, engine, prefill, prompt, reference, run, seeded, spec, split};
use crate::faulty::{Fault, faulty};

#[test]
fn bugs_are_off_until_switched_on() {
    for bug in Bug::ALL {
        assert!(!is(bug));
        with(bug, || assert!(is(bug)));
        assert!(!is(bug));
    }
}

#[test]
fn free_before_quiescence_sends_what_others_wrote() {
    let export_after = |bug: bool| {
        let mut from = engine(EngineConfig { kv_blocks: 4, ..config() });
        let (held, _) = prefill(&mut from, &spec(prompt(0, 8), 4));
        let before = from.export(held, 0).unwrap().unwrap();
        let release = |from: &mut engine::Engine<_>| from.release(held);
        if bug {
            with(Bug::FreeBeforeQuiescence, || release(&mut from));
        } else {
            release(&mut from);
        }
        from.submit(spec(prompt(1, 15), 1)).unwrap();
        run(&mut from);
        from.export(held, 0).map(|after| after.unwrap() == before)
    };
    assert!(export_after(false).is_err());
    assert_eq!(export_after(true), Ok(false));
}

#[test]
fn import_without_checksum_decodes_damaged_bytes() {
    let (mut from, mut to) = (engine(config()), engine(config()));
    let spec = spec(prompt(0, 10), 12);
    let (held, first) = prefill(&mut from, &spec);
    let id = to.reserve(spec.clone()).unwrap().id;
    let mut checksums = Vec::new();
    with(Bug::ImportWithoutChecksum, || {
        for start in [0, 4, 8] {
            let mut block = from.export(held, start).unwrap().unwrap();
            block.slabs[3] ^= 4;
            checksums.extend_from_slice(&block.checksums);
            to.import(id, &block).unwrap();
        }
    });
    let digest = handoff_digest(HANDOFF, &spec.tokens, 0, checksums.into_iter(), first);
    to.activate(id, HANDOFF, first, digest).unwrap();
    assert_ne!(run(&mut to).tokens[&id], reference(&spec)[1..]);
}

#[test]
fn activate_without_proof_decodes_nothing() {
    let mut to = engine(config());
    let spec = spec(prompt(0, 10), 12);
    let id = to.reserve(spec.clone()).unwrap().id;
    with(Bug::ActivateWithoutProof, || to.activate(id, HANDOFF, reference(&spec)[0], Digest::default()))
        .unwrap();
    assert_ne!(run(&mut to).tokens[&id], reference(&spec)[1..]);
}

#[test]
fn cache_before_proof_lets_others_use_what_nobody_proved() {
    let (mut from, mut to) = (engine(config()), engine(config()));
    let spec = spec(prompt(0, 10), 12);
    let (held, _) = prefill(&mut from, &spec);
    let id = to.reserve(spec.clone()).unwrap().id;
    with(Bug::CacheBeforeProof, || to.import(id, &from.export(held, 0).unwrap().unwrap())).unwrap();
    assert_eq!(to.cached_tokens(&spec.tokens), 4);
}

#[test]
fn random_by_attempt_changes_a_handed_over_stream() {
    let (mut from, mut to) = (engine(config()), engine(config()));
    let spec = seeded(prompt(0, 10), 12, 5);
    let tokens = with(Bug::RandomByAttempt, || split(&mut from, &mut to, &spec));
    assert_ne!(tokens, reference(&spec));
}

#[test]
fn checksum_at_send_hides_an_overwritten_block() {
    let spec = spec(prompt(0, 8), 4);
    let mut from = faulty(Fault::Overwrites, 1);
    let held = from.submit(SequenceSpec { until: Until::FirstToken, ..spec.clone() }).unwrap();
    run(&mut from);
    from.submit(SequenceSpec { tokens: prompt(1, 4), ..spec.clone() }).unwrap();
    run(&mut from);
    let mut to = engine(config());
    let id = to.reserve(spec).unwrap().id;
    let sent = with(Bug::ChecksumAtSend, || from.export(held, 0)).unwrap().unwrap();
    assert_eq!(to.import(id, &sent), Ok(()));
}

#[test]
fn fork_without_copy_decodes_from_an_empty_block() {
    let fork = |bug: bool| {
        let mut engine = engine(config());
        let spec = spec(prompt(0, 11), 12);
        engine.submit(spec.clone()).unwrap();
        engine.step();
        let fork = engine.submit(spec.clone()).unwrap();
        let outcome = if bug { with(Bug::ForkWithoutCopy, || run(&mut engine)) } else { run(&mut engine) };
        outcome.tokens[&fork] == reference(&spec)
    };
    assert!(fork(false) && !fork(true));
}

#[test]
fn an_unsealed_last_block_has_no_checksums_of_its_own() {
    let tail = |bug: bool| {
        let mut engine = engine(config());
        let id = engine.submit(spec(prompt(0, 9), 12)).unwrap();
        while engine.step().events.len() < 2 {}
        let stop = |engine: &mut engine::Engine<_>| engine.hand_over(id).unwrap();
        let handed =
            if bug { with(Bug::HandedOverUnsealed, || stop(&mut engine)) } else { stop(&mut engine) };
        engine.export(id, handed.tokens.len() / 4 * 4).unwrap().unwrap().checksums.len()
    };
    assert_eq!((tail(false), tail(true)), (engine(config()).layout().layers, 0));
}
