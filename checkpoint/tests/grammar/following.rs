//! Following an output: what may come, when it is complete, and that the tokens alone decide.

use checkpoint::grammar::{GrammarEnv, GrammarError, Mask, Word};
use expect_test::expect;
use serde_json::json;

use crate::{BYTES, Dice, EOS, SMOLLM2, check, compiled, json, lark, regex, wander};

#[test]
fn an_end_may_come_exactly_when_the_output_is_complete() {
    let mut matcher = compiled(&BYTES, &regex("a{1,2}")).matcher();
    let mut mask = Mask::default();
    let mut step = |token: u8, is_accepting, is_stopped| {
        matcher.accept(token.into()).unwrap();
        assert_eq!((matcher.is_accepting().unwrap(), matcher.is_stopped()), (is_accepting, is_stopped));
        matcher.allowed(&mut mask).map(|()| mask.iter().collect::<Vec<_>>())
    };
    assert_eq!(step(b'a', true, false), Ok(vec![EOS, b'a'.into()]));
    assert_eq!(step(b'a', true, true), Ok(vec![EOS]));

    let mut early = compiled(&BYTES, &regex("a{1,2}")).matcher();
    assert_eq!(early.accept(EOS), Err(GrammarError::NotAllowed { token: EOS, index: 0 }));
    assert_eq!(early.accept(b'b'.into()), Err(GrammarError::NotAllowed { token: 98, index: 0 }));
    early.accept(b'a'.into()).unwrap();
    early.accept(EOS).unwrap();
    assert!(early.is_stopped() && early.is_accepting().unwrap());
    expect!["token 97 may not come as number 2 of the output"]
        .assert_eq(&early.accept(b'a'.into()).unwrap_err().to_string());
    expect!["grammar after 2 tokens: the output has ended"]
        .assert_eq(&early.allowed(&mut Mask::default()).unwrap_err().to_string());
}

#[test]
fn a_token_out_of_the_vocabulary_is_a_refusal() {
    let mut matcher = compiled(&BYTES, &regex("a+")).matcher();
    assert!(matcher.accept(1 << 30).is_err());
}

#[test]
fn every_end_of_a_generation_is_one() {
    let words =
        [Word::Text(b"a"), Word::Special(b"<eos>"), Word::Special(b"<turn>"), Word::Special(b"<pad>")];
    let env = GrammarEnv::new(words, &[1, 2]).unwrap();
    for eos in [1, 2] {
        let mut matcher = compiled(&env, &regex("a+")).matcher();
        matcher.accept(0).unwrap();
        let mut mask = Mask::default();
        matcher.allowed(&mut mask).unwrap();
        assert_eq!(mask.iter().collect::<Vec<_>>(), [0, 1, 2]);
        matcher.accept(eos).unwrap();
        assert!(matcher.is_stopped());
    }
}

#[test]
fn a_vocabulary_that_cannot_carry_grammars_is_told() {
    let refused = |words: &[Word<'_>], eos: &[u32]| {
        GrammarEnv::new(words.iter().copied(), eos).unwrap_err().to_string()
    };
    expect!["vocabulary: from 1 to 4194304 tokens expected, 0 came"].assert_eq(&refused(&[], &[0]));
    expect!["vocabulary: a token that ends a generation expected, none came"]
        .assert_eq(&refused(&[Word::Text(b"a")], &[]));
    expect!["vocabulary: ends of generation below 1 expected, 1 came"]
        .assert_eq(&refused(&[Word::Text(b"a")], &[1]));
}

/// A state is a function of the tokens: had again by accepting them, without any mask between, it allows the same; so
/// does a clone, and so does a matcher of a grammar compiled anew.
#[test]
fn the_tokens_alone_decide() {
    let object = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "minLength": 2, "maxLength": 12 },
            "code": { "type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$", "maxLength": 7 },
            "n": { "type": "integer", "minimum": -20, "maximum": 3000 },
            "list": { "type": "array", "items": { "enum": ["red", "green", "grün"] }, "maxItems": 4 },
            "free": {}
        },
        "required": ["name", "code"]
    });
    let grammars = [
        json(&object),
        json(&json!({ "type": "object" })),
        regex("(ab|a|b{2,5})+[0-9]{3}"),
        lark("start: \"<t>\" %json {\"type\": \"array\", \"items\": {\"type\": \"number\"}} \"</t>\"\n"),
    ];
    let other = GrammarEnv::of_bytes(256, EOS).unwrap();
    for (env, again) in [(&*BYTES, &other), (&*SMOLLM2, &*SMOLLM2)] {
        for grammar in &grammars {
            for seed in 0..4 {
                let mut tokens = Vec::new();
                let walk =
                    wander(compiled(env, grammar).matcher(), &mut Dice(seed), 60, |matcher, mask, token| {
                        let mut replayed = compiled(again, grammar).matcher();
                        for &token in &tokens {
                            replayed.accept(token).unwrap();
                        }
                        let mut found = Mask::default();
                        for mut twin in [replayed, matcher.clone()] {
                            twin.allowed(&mut found).unwrap();
                            assert_eq!(found, *mask, "{grammar:?} after {tokens:?}");
                            assert_eq!(twin.is_accepting(), matcher.is_accepting());
                        }
                        tokens.push(token);
                    });
                walk.unwrap();
            }
        }
    }
}

#[test]
fn regular_expressions_match_from_end_to_end() {
    check(&regex("[a-c]+x?"), &["a", "cabx"], &["", "x", "ax ", " a"]);
    check(&regex("^(yes|no)$"), &["yes", "no"], &["yesno", "maybe"]);
    check(&regex(r"\d{2}/\d{2}"), &["12/30"], &["1/3"]);
    check(&regex("Grüße, .{1,3}"), &["Grüße, 日本"], &["Gr\u{fc}", "Grüße, abcd"]);
}

#[test]
fn lark_grammars_start_at_start() {
    let grammar =
        lark("start: \"f(\" (arg (\",\" arg)*)? \")\"\narg: NAME \"=\" NUM\nNAME: /[a-z]+/\nNUM: /[0-9]+/\n");
    check(&grammar, &["f()", "f(a=1)", "f(a=1,b=22)"], &["f(a=)", "g()", "f(a=1,)"]);
    // Special tokens come where the grammar names them, and nowhere else.
    let words = [Word::Text(b"a"), Word::Special(b"<eos>"), Word::Special(b"<|call|>")];
    let env = GrammarEnv::new(words, &[1]).unwrap();
    for text in ["start: <|call|> \"a\"\n", "start: <[2]> \"a\"\n"] {
        let mut matcher = compiled(&env, &lark(text)).matcher();
        let mut mask = Mask::default();
        matcher.allowed(&mut mask).unwrap();
        assert_eq!(mask.iter().collect::<Vec<_>>(), [2]);
        matcher.accept(2).unwrap();
        matcher.allowed(&mut mask).unwrap();
        assert_eq!(mask.iter().collect::<Vec<_>>(), [0]);
    }
}

#[test]
fn the_same_grammar_is_compiled_once() {
    let env = GrammarEnv::of_bytes(256, EOS).unwrap();
    let schema = json(&json!({ "type": "string", "maxLength": 3 }));
    let first = compiled(&env, &schema).matcher();
    // What one matcher went through is nothing to the next.
    wander(first, &mut Dice(1), 3, |_, _, _| {}).unwrap();
    let mut second = compiled(&env, &schema).matcher();
    second.accept(b'"'.into()).unwrap();
    assert!(!second.is_accepting().unwrap());
}
