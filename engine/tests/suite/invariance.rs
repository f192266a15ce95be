//! The tokens of a sequence depend on the sequence alone: not on chunks, batches, blocks, caches, preemptions or
//! attempts.

use engine::{EngineConfig, SequenceSpec};
use proto::FinishReason;

use crate::drive::{config, engine, prompt, reference, run, seeded, spec};

/// Prompt lengths around the borders of blocks of 4 and 16, greedy and seeded.
fn mixed() -> Vec<SequenceSpec> {
    let lens = [1, 3, 4, 5, 8, 15, 16, 17, 32, 47];
    lens.iter()
        .enumerate()
        .map(|(i, &len)| {
            let tokens = prompt(i, len);
            if i % 2 == 0 { spec(tokens, 9 + i) } else { seeded(tokens, 9 + i, i as u64) }
        })
        .collect()
}

#[track_caller]
fn check(config: EngineConfig, specs: &[SequenceSpec]) -> usize {
    let mut engine = engine(config);
    let ids: Vec<_> = specs.iter().map(|spec| engine.submit(spec.clone()).unwrap()).collect();
    let outcome = run(&mut engine);
    for (id, spec) in ids.iter().zip(specs) {
        assert_eq!(outcome.failed.get(id), None, "{config:?}");
        assert_eq!(outcome.tokens[id], reference(spec), "{config:?}");
    }
    assert_eq!(engine.kv_counts().used, 0);
    outcome.preempted_max
}

#[test]
fn chunks_batches_and_blocks_do_not_matter() {
    for step_tokens in [1, 2, 7, 16, 512] {
        for sequences_max in [1, 3, 8] {
            for block_tokens in [1, 3, 4, 16] {
                for prefix_cache in [false, true] {
                    let kv_blocks = 600 / block_tokens;
                    let config = EngineConfig {
                        kv_blocks,
                        block_tokens,
                        step_tokens,
                        sequences_max,
                        prefix_cache,
                        ..config()
                    };
                    check(config, &mixed());
                }
            }
        }
    }
}

#[test]
fn preemption_does_not_matter() {
    for step_tokens in [2, 16, 512] {
        let specs: Vec<_> = (0..8).map(|i| seeded(prompt(i, 6 + i), 30, i as u64)).collect();
        // 13 tokens of prompt and 30 of output fill 11 of the 12 blocks.
        let preempted = check(EngineConfig { kv_blocks: 12, step_tokens, ..config() }, &specs);
        assert!(preempted > 0, "the pool is small enough to preempt");
    }
}

#[test]
fn a_warm_cache_does_not_matter() {
    let mut engine = engine(config());
    let long = prompt(0, 33);
    for len in [33, 33, 32, 31, 16, 4, 3] {
        let spec = seeded(long[..len].to_vec(), 12, 5);
        let known = engine.cached_tokens(&spec.tokens);
        let id = engine.submit(spec.clone()).unwrap();
        let outcome = run(&mut engine);
        assert_eq!(outcome.tokens[&id], reference(&spec));
        // At least the last token is computed for its logits.
        assert_eq!(outcome.cached[&id], known.min(len - 1));
    }
}

#[test]
fn the_cache_is_the_models_own() {
    let spec = spec(prompt(0, 20), 4);
    let mut one = engine(config());
    one.submit(spec.clone()).unwrap();
    run(&mut one);
    assert_eq!(one.cached_tokens(&spec.tokens), 20);
    assert_eq!(one.cached_tokens(&prompt(1, 20)), 0);
    let mut without = engine(EngineConfig { prefix_cache: false, ..config() });
    without.submit(spec.clone()).unwrap();
    run(&mut without);
    assert_eq!((without.cached_tokens(&spec.tokens), without.kv_counts().cached), (0, 0));
}

#[test]
fn a_later_attempt_goes_on_where_the_earlier_ended() {
    let whole = seeded(prompt(3, 10), 20, 77);
    let expected = reference(&whole);
    for generated in 1..expected.len() {
        let mut tokens = whole.tokens.clone();
        tokens.extend(&expected[..generated]);
        let mut engine = engine(config());
        let id = engine.submit(SequenceSpec { tokens, generated, ..whole.clone() }).unwrap();
        let outcome = run(&mut engine);
        assert_eq!(outcome.tokens[&id], expected[generated..], "{generated} tokens were there");
    }
}

#[test]
fn stop_conditions_end_with_the_token_that_meets_them() {
    let plain = spec(prompt(2, 10), 20);
    let expected = reference(&plain);
    let check = |change: &dyn Fn(&mut SequenceSpec), len: usize, finish| {
        let mut spec = plain.clone();
        change(&mut spec);
        let mut engine = engine(config());
        let id = engine.submit(spec).unwrap();
        let outcome = run(&mut engine);
        assert_eq!((&outcome.tokens[&id][..], outcome.finished[&id]), (&expected[..len], finish));
    };
    let first_of = |token| expected.iter().position(|&t| t == token).unwrap() + 1;
    let (a, b) = (expected[4], expected[7]);
    check(&|s| s.stop.eos_ids = vec![a, 1000], first_of(a), FinishReason::Eos);
    check(&|s| s.stop.stop_token_ids = vec![b], first_of(b), FinishReason::StopToken);
    check(
        &|s| (s.stop.eos_ids, s.stop.stop_token_ids) = (vec![b], vec![a]),
        first_of(a),
        FinishReason::StopToken,
    );
    check(&|s| s.stop.max_tokens = 1, 1, FinishReason::Length);
    check(&|s| s.stop.max_tokens = 6, 6, FinishReason::Length);
}

#[test]
fn the_context_length_ends_a_sequence() {
    let config = EngineConfig { kv_blocks: 300, step_tokens: 512, ..config() };
    let spec = spec(prompt(2, 1000), 100);
    let mut engine = engine(config);
    let id = engine.submit(spec.clone()).unwrap();
    let outcome = run(&mut engine);
    assert_eq!(outcome.finished[&id], FinishReason::Length);
    assert_eq!(outcome.tokens[&id].len(), 24, "1024 tokens, prompt and output together");
    assert_eq!(outcome.tokens[&id], reference(&spec));
}
