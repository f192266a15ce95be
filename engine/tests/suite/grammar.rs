//! Outputs that a grammar bounds: the same tokens wherever they are computed, and an honest end.

use std::sync::Arc;

use checkpoint::grammar::{GrammarEnv, Word};
use engine::sim::{SimConfig, SimModel};
use engine::{Engine, EngineConfig, SequenceSpec, Until};
use expect_test::{Expect, expect};
use proto::{FinishReason, Grammar, Reason, TokenId};
use serde_json::{Value, json};

use crate::drive::{self, config, hand_over, prefill, prompt, run, seeded, spec, split};

/// Ends a generation in the vocabulary of these tests; every other token is a byte.
const EOS: TokenId = 0;

fn vocabulary() -> Arc<GrammarEnv> {
    Arc::new(GrammarEnv::of_bytes(SimConfig::default().vocab, EOS).unwrap())
}

fn engine(config: EngineConfig) -> Engine<SimModel> {
    let mut engine = drive::engine(config);
    engine.set_vocabulary(vocabulary());
    engine
}

fn json_schema(schema: &Value) -> Grammar {
    Grammar::JsonSchema(schema.to_string().into())
}

fn regex(text: &str) -> Grammar {
    Grammar::Regex(text.into())
}

/// An object of some 20 to 60 bytes.
fn person() -> Grammar {
    json_schema(&json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "minLength": 1, "maxLength": 12 },
            "code": { "type": "string", "pattern": "^[a-z]{1,8}$", "maxLength": 4 },
            "tags": { "type": "array", "items": { "enum": ["x", "yy"] }, "maxItems": 3 },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 }
        },
        "required": ["name", "age"],
        "additionalProperties": false
    }))
}

fn under(grammar: Grammar, mut spec: SequenceSpec) -> SequenceSpec {
    spec.sampling.grammar = Some(grammar);
    spec
}

fn reference(spec: &SequenceSpec) -> Vec<TokenId> {
    let follower =
        spec.sampling.grammar.as_ref().map(|grammar| vocabulary().compile(grammar).unwrap().matcher());
    SimModel::reference_under(SimConfig::default(), &spec.tokens, &spec.sampling, &spec.stop, follower)
}

fn text(tokens: &[TokenId]) -> Vec<u8> {
    tokens.iter().filter(|&&token| token != EOS).map(|&token| token as u8).collect()
}

/// Grammars of every kind, greedy and seeded, and sequences without one.
fn mixed() -> Vec<SequenceSpec> {
    let grammars = [
        person(),
        regex("[a-f]{3,9}x?"),
        Grammar::Lark("start: \"<\" %json {\"type\": \"boolean\"} (\",\" /[0-9]+/)* \">\"\n".into()),
        regex("a(b|c)*"),
    ];
    let mut specs: Vec<_> = (0..12)
        .map(|i| {
            let base = seeded(prompt(i, 3 + 5 * i), 80, i as u64);
            under(grammars[i % grammars.len()].clone(), base)
        })
        .collect();
    for (i, grammar) in grammars.into_iter().enumerate() {
        specs.push(under(grammar, spec(prompt(20 + i, 7), 50)));
        specs.push(seeded(prompt(30 + i, 9), 20, 5));
    }
    specs
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
    outcome.preempted_max
}

#[test]
fn chunks_batches_and_blocks_do_not_matter() {
    for (step_tokens, sequences_max, block_tokens, prefix_cache) in
        [(1, 1, 4, true), (2, 3, 3, false), (7, 8, 16, true), (512, 8, 1, false)]
    {
        let kv_blocks = 1200 / block_tokens;
        check(
            EngineConfig { kv_blocks, block_tokens, step_tokens, sequences_max, prefix_cache, ..config() },
            &mixed(),
        );
    }
}

#[test]
fn preemption_keeps_the_place_in_the_grammar() {
    for step_tokens in [2, 16, 512] {
        let specs: Vec<_> = (0..8).map(|i| under(person(), seeded(prompt(i, 6 + i), 60, i as u64))).collect();
        let preempted = check(EngineConfig { kv_blocks: 20, step_tokens, ..config() }, &specs);
        assert!(preempted > 0, "the pool is small enough to preempt");
    }
}

#[test]
fn what_comes_is_what_the_grammar_allows() {
    let mut ended = 0;
    for seed in 0..20 {
        let spec = under(person(), seeded(prompt(1, 10), 120, seed));
        let mut engine = engine(config());
        let id = engine.submit(spec).unwrap();
        let outcome = run(&mut engine);
        if outcome.finished[&id] == FinishReason::Length {
            continue;
        }
        assert_eq!(outcome.finished[&id], FinishReason::Grammar);
        let value: Value = serde_json::from_slice(&text(&outcome.tokens[&id])).unwrap();
        assert!(
            value["name"].as_str().is_some_and(|name| (1..=12).contains(&name.chars().count())),
            "{value}"
        );
        assert!(value["age"].as_u64().is_some_and(|age| age <= 120), "{value}");
        assert!(value["code"].as_str().is_none_or(|code| (1..=4).contains(&code.len())), "{value}");
        ended += 1;
    }
    assert!(ended >= 15, "{ended} of 20 came to their end");
}

#[test]
fn split_gives_the_tokens_of_fused() {
    let (mut from, mut to) = (engine(config()), engine(EngineConfig { block_tokens: 8, ..config() }));
    for spec in mixed() {
        assert_eq!(split(&mut from, &mut to, &spec), reference(&spec), "{spec:?}");
        assert_eq!((from.kv_counts().used, to.kv_counts().used), (0, 0));
    }
}

/// A later attempt replays what was generated, on one engine and on two, whatever the cut: in the middle of a string, a
/// number, a name.
#[test]
fn a_later_attempt_goes_on_where_the_earlier_ended() {
    for whole in [under(person(), seeded(prompt(3, 10), 60, 77)), under(person(), spec(prompt(4, 10), 60))] {
        let expected = reference(&whole);
        assert!(expected.len() > 15);
        let (mut from, mut to) = (engine(config()), engine(config()));
        for generated in 1..expected.len() {
            let mut tokens = whole.tokens.clone();
            tokens.extend(&expected[..generated]);
            let rest = SequenceSpec { tokens, generated, ..whole.clone() };
            let mut fused = engine(config());
            let id = fused.submit(rest.clone()).unwrap();
            assert_eq!(run(&mut fused).tokens[&id], expected[generated..], "{generated} tokens were there");
            if generated + 1 < expected.len() {
                assert_eq!(
                    split(&mut from, &mut to, &rest),
                    expected[generated..],
                    "{generated} tokens were there"
                );
            }
        }
    }
}

#[test]
fn an_output_ends_in_its_own_way() {
    let end = |spec: SequenceSpec| {
        let mut engine = engine(config());
        let id = engine.submit(spec).unwrap();
        let outcome = run(&mut engine);
        (outcome.finished[&id], text(&outcome.tokens[&id]))
    };
    let with = |pattern: &str, max_tokens| under(regex(pattern), spec(prompt(1, 5), max_tokens));
    // Complete, and nothing more may come: the last token belongs to the text.
    assert_eq!(end(with("abc", 10)), (FinishReason::Grammar, b"abc".to_vec()));
    // The same where the length would have ended it, too.
    assert_eq!(end(with("abc", 3)), (FinishReason::Grammar, b"abc".to_vec()));
    assert_eq!(end(with("abc", 2)), (FinishReason::Length, b"ab".to_vec()));
    // The end of a generation may come where the output is complete, though the request ignores it elsewhere.
    let (mut eos, mut length) = (0, 0);
    for seed in 0..200 {
        let sampled = under(regex("a[b-d]*"), seeded(prompt(1, 5), 12, seed));
        assert!(sampled.stop.eos_ids.is_empty());
        match end(sampled) {
            (FinishReason::Eos, text) => {
                assert!(text.starts_with(b"a"));
                eos += 1;
            }
            (finish, text) => {
                assert_eq!((finish, text.len()), (FinishReason::Length, 12));
                length += 1;
            }
        }
    }
    assert!(eos > 0 && eos + length == 200, "{eos} ended by themselves");
    // A stop token ends it in the middle.
    let mut stopped = with("ab{5}c", 10);
    stopped.stop.stop_token_ids = vec![b'b'.into()];
    assert_eq!(end(stopped), (FinishReason::StopToken, b"ab".to_vec()));
}

#[test]
fn a_first_token_may_complete_the_output() {
    let (mut from, mut to) = (engine(config()), engine(config()));
    let spec = under(regex("a"), spec(prompt(1, 9), 5));
    let held = from.submit(SequenceSpec { until: Until::FirstToken, ..spec.clone() }).unwrap();
    let outcome = run(&mut from);
    assert_eq!(outcome.finished[&held], FinishReason::Grammar);
    let reservation = to.reserve(spec.clone()).unwrap();
    hand_over((&from, held), (&mut to, reservation), &spec.tokens, b'a'.into()).unwrap();
    assert!(!to.has_work(), "there is nothing to decode");
    to.cancel(reservation.id);
    from.release(held);
    assert_eq!((from.kv_counts().used, to.kv_counts().used), (0, 0));
}

#[track_caller]
fn refused(spec: SequenceSpec, expected: Expect) {
    let mut engine = engine(config());
    let error = engine.submit(spec.clone()).unwrap_err();
    assert_eq!(engine.reserve(spec).unwrap_err(), error, "both ways in refuse alike");
    expected.assert_eq(&error.to_string());
    assert_eq!(engine.sequence_counts(), engine::SequenceCounts::default());
}

#[test]
fn what_cannot_be_followed_is_refused() {
    let plain = spec(prompt(1, 5), 10);
    refused(
        under(json_schema(&json!({ "not": {} })), plain.clone()),
        expect![[r#"grammar: json schema: unimplemented keys: ["not"] (INVALID_ARGUMENT)"#]],
    );
    refused(
        under(regex("("), plain.clone()),
        expect![[
            r#"grammar: regex: at 1(8): invalid regex "(" (in regex): regex parse error: unclosed group (INVALID_ARGUMENT)"#
        ]],
    );
    let after = |pattern: &str, generated: &[u8]| {
        let mut spec = under(regex(pattern), plain.clone());
        spec.tokens.extend(generated.iter().map(|&byte| TokenId::from(byte)));
        SequenceSpec { generated: generated.len(), ..spec }
    };
    refused(
        after("abc", b"ax"),
        expect![
            "tokens: generated under the grammar expected, but token 120 may not come as number 1 of the output (INVALID_ARGUMENT)"
        ],
    );
    refused(
        after("abc", b"abc"),
        expect!["generated: the 3 tokens are all that the grammar allows (INVALID_ARGUMENT)"],
    );
    refused(
        after("a*", b"a\0"),
        expect!["generated: the 2 tokens are all that the grammar allows (INVALID_ARGUMENT)"],
    );
    let mut without = drive::engine(config());
    let error = without.submit(under(regex("a"), plain)).unwrap_err();
    expect!["grammar: none expected, as there is no vocabulary for grammars here (INVALID_ARGUMENT)"]
        .assert_eq(&error.to_string());
}

#[test]
fn a_hand_off_may_not_bring_what_the_grammar_forbids() {
    let (mut from, mut to) = (engine(config()), engine(config()));
    let free = spec(prompt(1, 9), 5);
    let (held, first) = prefill(&mut from, &free);
    assert_ne!(first, TokenId::from(b'a'));
    let bounded = under(regex("ab"), free);
    let reservation = to.reserve(bounded.clone()).unwrap();
    let error = hand_over((&from, held), (&mut to, reservation), &bounded.tokens, first).unwrap_err();
    assert_eq!(error.reason, Reason::InvalidArgument);
    assert!(error.message.starts_with("first: "), "{error}");
}

/// A vocabulary that cannot spell what the grammar asks for.
#[test]
fn an_output_that_cannot_go_on_fails_and_no_other() {
    let mut words = vec![Word::Special(b"<eos>"); SimConfig::default().vocab];
    for byte in [b'a', b'b'] {
        words[usize::from(byte)] = Word::Text(if byte == b'a' { b"a" } else { b"b" });
    }
    let mut engine = drive::engine(config());
    engine.set_vocabulary(Arc::new(GrammarEnv::new(words, &[EOS]).unwrap()));
    let stuck = engine.submit(under(regex("aaac"), spec(prompt(1, 5), 10))).unwrap();
    let other = engine.submit(under(regex("ab"), spec(prompt(2, 5), 10))).unwrap();
    let outcome = run(&mut engine);
    assert_eq!(outcome.tokens[&stuck], [b'a'; 3].map(TokenId::from));
    expect!["grammar after 3 tokens: nothing can match (INTERNAL)"]
        .assert_eq(&outcome.failed[&stuck].to_string());
    assert_eq!(outcome.finished[&other], FinishReason::Grammar);
    assert_eq!(engine.kv_counts().used, 0);
}
