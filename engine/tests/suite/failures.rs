//! What goes wrong below or around the engine, and what is left of it afterwards.

use engine::sim::{SimConfig, SimModel};
use engine::{Engine, EngineConfig, SequenceSpec, Until};
use expect_test::expect;
use proto::Reason;

use crate::drive::{config, engine, prompt, reference, run, seeded, spec};
use crate::faulty::{Fault, faulty};

#[test]
fn a_device_that_fails_takes_its_batch_and_no_more() {
    for fault in [Fault::Device, Fault::ShortLogits] {
        let mut engine = faulty(fault, 2);
        let a = engine.submit(spec(prompt(0, 20), 8)).unwrap();
        let b = engine.submit(spec(prompt(1, 20), 8)).unwrap();
        let outcome = run(&mut engine);
        assert_eq!(outcome.failed.len(), 2);
        assert_eq!(
            (outcome.failed[&a].reason, outcome.failed[&b].reason),
            (Reason::Internal, Reason::Internal)
        );
        assert_eq!((engine.kv_counts().free, engine.kv_counts().total), (64, 64), "nothing of it is cached");
        let again = spec(prompt(0, 20), 8);
        let id = engine.submit(again.clone()).unwrap();
        assert_eq!(run(&mut engine).tokens[&id], reference(&again));
    }
}

#[test]
fn logits_that_are_no_numbers_fail_one_sequence() {
    let mut engine = faulty(Fault::NotANumber, 3);
    let good = spec(prompt(0, 4), 8);
    let a = engine.submit(good.clone()).unwrap();
    let b = engine.submit(spec(prompt(1, 4), 8)).unwrap();
    let outcome = run(&mut engine);
    assert_eq!(outcome.tokens[&a], reference(&good));
    expect!["sampling position 7: the logit of token 255 is NaN (INTERNAL)"]
        .assert_eq(&outcome.failed[&b].to_string());
    assert_eq!(engine.cached_tokens(&prompt(1, 4)), 0, "what it computed is not trusted");
}

#[test]
fn an_interrupted_step_is_taken_up_again() {
    let mut engine = engine(config());
    let specs: Vec<_> = (0..3).map(|i| seeded(prompt(i, 20), 6, 1)).collect();
    let ids: Vec<_> = specs.iter().map(|spec| engine.submit(spec.clone()).unwrap()).collect();
    let interrupt = engine.interrupt();
    let mut outcome = crate::drive::Outcome::default();
    for step in 0.. {
        if !engine.has_work() {
            break;
        }
        if step % 2 == 0 {
            interrupt.raise();
            let before = engine.kv_counts().used;
            let report = engine.step();
            assert!(report.interrupted && report.events.is_empty() && report.batch_tokens == 0);
            assert!(engine.kv_counts().used >= before);
            interrupt.clear();
        } else {
            engine.step().events.into_iter().for_each(|event| outcome.take(event));
        }
    }
    for (id, spec) in ids.iter().zip(&specs) {
        assert_eq!(outcome.tokens[id], reference(spec));
    }
}

#[test]
fn an_interrupt_loses_no_failure() {
    let mut engine = engine(EngineConfig { kv_blocks: 2, ..config() });
    let grows = engine.submit(spec(prompt(0, 8), 4)).unwrap();
    let next = engine.submit(spec(prompt(1, 4), 1)).unwrap();
    engine.step();
    engine.interrupt().raise();
    assert!(engine.step().interrupted);
    engine.interrupt().clear();
    let outcome = run(&mut engine);
    expect!["9 tokens need 3 kv blocks, 2 are there in all (OUT_OF_BLOCKS)"]
        .assert_eq(&outcome.failed[&grows].to_string());
    assert!(outcome.finished.contains_key(&next));
}

#[test]
fn cancel_frees_in_every_state() {
    let mut engine = engine(EngineConfig { kv_blocks: 16, sequences_max: 3, ..config() });
    let hold = |salt| SequenceSpec { until: Until::FirstToken, ..spec(prompt(salt, 8), 4) };
    let held = engine.submit(hold(0)).unwrap();
    run(&mut engine);
    let reserved = engine.reserve(spec(prompt(1, 8), 4)).unwrap().id;
    let running = engine.submit(spec(prompt(2, 8), 4)).unwrap();
    let to_hold = engine.submit(SequenceSpec { tokens: prompt(3, 20), ..hold(3) }).unwrap();
    let waiting = engine.submit(spec(prompt(4, 8), 4)).unwrap();
    engine.step();
    let counts = engine.sequence_counts();
    assert_eq!((counts.held, counts.reserved, counts.running, counts.waiting), (1, 1, 2, 1));
    for id in [waiting, to_hold, running, reserved, held, held] {
        engine.cancel(id);
        engine.check().unwrap();
    }
    assert_eq!((engine.kv_counts().used, engine.has_work()), (0, false));
    assert_eq!(engine.sequence_counts(), engine::SequenceCounts::default());
}

#[test]
fn no_event_follows_a_cancel() {
    let mut engine = engine(EngineConfig { kv_blocks: 2, ..config() });
    let grows = engine.submit(spec(prompt(0, 8), 4)).unwrap();
    engine.submit(spec(prompt(1, 4), 1)).unwrap();
    engine.step();
    engine.interrupt().raise();
    // The failure is known now, and its report is still to come.
    assert!(engine.step().interrupted);
    engine.interrupt().clear();
    engine.cancel(grows);
    assert!(run(&mut engine).failed.is_empty());
}

#[test]
fn bounds_are_kept() {
    let mut engine = engine(EngineConfig { kv_blocks: 8, waiting_max: 1, sequences_max: 2, ..config() });
    let never = engine.submit(spec(prompt(0, 33), 4)).unwrap_err();
    expect!["tokens: 33 tokens need 9 kv blocks of 4 tokens, 8 are there (INVALID_ARGUMENT)"]
        .assert_eq(&never.to_string());
    assert_eq!(engine.reserve(spec(prompt(0, 32), 4)).unwrap_err().reason, Reason::InvalidArgument);
    engine.submit(spec(prompt(0, 4), 4)).unwrap();
    let full = engine.submit(spec(prompt(0, 4), 4)).unwrap_err();
    expect!["1 sequences wait already, which is the bound (QUEUE_FULL)"].assert_eq(&full.to_string());
    engine.reserve(spec(prompt(1, 4), 4)).unwrap();
    assert_eq!(engine.reserve(spec(prompt(1, 4), 4)).unwrap_err().reason, Reason::QueueFull);
}

#[test]
fn reservations_leave_room_for_what_was_there_before() {
    let mut engine = engine(EngineConfig { kv_blocks: 8, ..config() });
    engine.submit(spec(prompt(0, 7), 20)).unwrap();
    engine.step();
    // 6 blocks are free, and the running decode may need one of them.
    assert_eq!(engine.reserve(spec(prompt(1, 23), 4)).unwrap_err().reason, Reason::OutOfBlocks);
    engine.reserve(spec(prompt(1, 19), 4)).unwrap();
    engine.step();
    engine.step();
    assert_eq!(engine.kv_counts().free, 0);
    assert_eq!(engine.reserve(spec(prompt(2, 3), 4)).unwrap_err().reason, Reason::OutOfBlocks);
}

#[test]
fn a_sequence_that_waits_for_others_blocks_does_not_spin() {
    let mut engine = engine(EngineConfig { kv_blocks: 4, ..config() });
    let spec_a = spec(prompt(0, 7), 9);
    let a = engine.submit(spec_a.clone()).unwrap();
    let mut outcome = crate::drive::Outcome::default();
    engine.step().events.into_iter().for_each(|event| outcome.take(event));
    let hold = engine.submit(SequenceSpec { until: Until::FirstToken, ..spec(prompt(1, 4), 2) }).unwrap();
    for _ in 0..50 {
        engine.step().events.into_iter().for_each(|event| outcome.take(event));
    }
    assert!(!engine.has_work(), "it waits for the hold to end");
    assert_eq!(engine.sequence_counts().preempted, 1);
    engine.release(hold);
    assert!(engine.has_work());
    while engine.has_work() {
        engine.step().events.into_iter().for_each(|event| outcome.take(event));
    }
    assert_eq!(outcome.tokens[&a], reference(&spec_a));
}

#[test]
fn configurations_are_checked() {
    let refused = |config| Engine::new(SimModel::new(SimConfig::default()), config).unwrap_err().to_string();
    expect!["kv_blocks: at least 1 expected, 0 came (INVALID_ARGUMENT)"]
        .assert_eq(&refused(EngineConfig { kv_blocks: 0, ..config() }));
    expect!["kv_blocks: at most 2^32 - 1 token slots in all expected (INVALID_ARGUMENT)"]
        .assert_eq(&refused(EngineConfig { kv_blocks: 1 << 28, block_tokens: 16, ..config() }));
}
