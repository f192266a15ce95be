//! Grammars made to take long: each compiles or is refused, and following it comes to an end or to an error. None of
//! this is timed here; `cargo run --release --example grammar_costs` is.

use checkpoint::grammar::GRAMMAR_BYTES_MAX;
use proto::Grammar;
use serde_json::{Map, Value, json};

use crate::{BYTES, Dice, SMOLLM2, json, lark, regex, wander};

/// Compiles, and follows a few outputs. Gives the refusal, if it is one.
fn run(grammar: &Grammar) -> Option<String> {
    for env in [&*BYTES, &*SMOLLM2] {
        match env.compile(grammar) {
            Err(fault) => return Some(fault.to_string()),
            Ok(compiled) => {
                for seed in 0..2 {
                    // An error is as good as an end: it is the request's, and nothing hangs.
                    let _ = wander(compiled.matcher(), &mut Dice(seed), 40, |_, _, _| {});
                }
            }
        }
    }
    None
}

#[track_caller]
fn runs(grammar: &Grammar) {
    assert_eq!(run(grammar), None);
}

#[track_caller]
fn is_refused(grammar: &Grammar, part: &str) {
    let refusal = run(grammar).expect("a refusal");
    assert!(refusal.contains(part), "{refusal}");
}

/// Alternatives told apart by `kind`, within each other.
fn one_of(depth: usize) -> Value {
    if depth == 0 {
        return json!({ "type": "null" });
    }
    let alternative = |kind: &str| {
        json!({
            "type": "object",
            "properties": { "kind": { "const": kind }, "next": one_of(depth - 1) },
            "required": ["kind", "next"],
            "additionalProperties": false
        })
    };
    json!({ "oneOf": [alternative("a"), alternative("b")] })
}

/// Alternatives that may both hold.
fn overlapping_one_of(depth: usize) -> Value {
    match depth {
        0 => json!({ "type": "string" }),
        _ => {
            json!({ "oneOf": [overlapping_one_of(depth - 1), { "properties": { "a": overlapping_one_of(depth - 1) } }] })
        }
    }
}

fn members<'a>(count: usize, schema: impl Fn(usize) -> Value + 'a) -> Map<String, Value> {
    (0..count).map(|index| (format!("p{index}"), schema(index))).collect()
}

#[test]
fn unions_of_unions() {
    for depth in [1, 5, 7] {
        runs(&json(&one_of(depth)));
    }
    is_refused(&json(&one_of(9)), "at most");
    for depth in [3, 9] {
        is_refused(&json(&overlapping_one_of(depth)), "oneOf");
    }
    let alternatives = |count: usize| -> Vec<Value> {
        (0..count).map(|i| json!({ "type": "object", "properties": { format!("a{i}"): {} } })).collect()
    };
    is_refused(
        &json(&json!({ "anyOf": alternatives(300), "allOf": [{ "anyOf": alternatives(300) }] })),
        "schema too large",
    );
    let constants = |branch: usize| -> Vec<String> { (0..600).map(|i| format!("{branch}.{i}")).collect() };
    let branches: Vec<Value> = (0..9).map(|branch| json!({ "enum": constants(branch) })).collect();
    is_refused(&json(&json!({ "oneOf": branches })), "constants within oneOf");
}

#[test]
fn many_constants() {
    let texts: Vec<String> = (0..5000).map(|i| format!("value {i}")).collect();
    runs(&json(&json!({ "enum": texts })));
    let numbers: Vec<f64> = (0..5000).map(|i| f64::from(i) * 0.37).collect();
    runs(&json(&json!({ "enum": numbers })));
    let objects: Vec<Value> = (0..2000).map(|i| json!({ "a": [i] })).collect();
    is_refused(&json(&json!({ "enum": objects })), "subschemas");
}

#[test]
fn recursion_through_references() {
    let chain = |len: usize, link: &dyn Fn(Value) -> Value| {
        let mut defs: Map<String, Value> = (0..len)
            .map(|i| (i.to_string(), link(json!({ "$ref": format!("#/$defs/{}", i + 1) }))))
            .collect();
        defs.insert(len.to_string(), json!({ "type": "null" }));
        json(&json!({ "$ref": "#/$defs/0", "$defs": defs }))
    };
    runs(&chain(3000, &|next| next));
    runs(&chain(1900, &|next| json!({ "properties": { "x": next } })));
    runs(&chain(
        1200,
        &|next| json!({ "type": ["object", "null"], "allOf": [{ "properties": { "x": next } }] }),
    ));
    is_refused(&chain(5000, &|next| next), "at most");
    runs(&json(
        &json!({ "$ref": "#/$defs/n", "$defs": { "n": { "type": "object", "properties": { "c": { "$ref": "#/$defs/n" } }, "required": ["c"] } } }),
    ));
    is_refused(
        &json(
            &json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } }),
        ),
        "nothing can match",
    );
    is_refused(
        &json(
            &json!({ "$ref": "#/$defs/n", "$defs": { "n": { "type": "object", "allOf": [{ "$ref": "#/$defs/n" }] } } }),
        ),
        "circular",
    );
    let tree = |name: &str| json!({ "type": "object", "properties": { "child": { "$ref": format!("#/$defs/{name}") } } });
    run(&json(
        &json!({ "allOf": [{ "$ref": "#/$defs/a" }, { "$ref": "#/$defs/b" }], "$defs": { "a": tree("a"), "b": tree("b") } }),
    ));
}

#[test]
fn deep_nesting() {
    let nested = |depth: usize| {
        let text = format!("{}{}{}", "{\"items\":".repeat(depth), "{}", "}".repeat(depth));
        Grammar::JsonSchema(text.into())
    };
    runs(&nested(100));
    is_refused(&nested(10_000), "recursion limit");
    for (open, close) in [("(", ")"), ("[", "]")] {
        for depth in [2000, 14_000] {
            is_refused(
                &lark(&format!("start: {}\"a\"{}\n", open.repeat(depth), close.repeat(depth))),
                "nested",
            );
        }
    }
    is_refused(&regex(&format!("{}a{}", "(".repeat(10_000), ")".repeat(10_000))), "regex parse error");
    runs(&regex(&format!("{}a{}", "(".repeat(200), ")".repeat(200))));
}

#[test]
fn many_members() {
    runs(&json(
        &json!({ "type": "object", "properties": members(450, |_| json!({ "type": "integer" })), "additionalProperties": false }),
    ));
    is_refused(&json(&json!({ "properties": members(1000, |_| json!({})) })), "optional members");
    let big = json!({ "type": "object", "properties": members(400, |_| json!({ "type": "integer" })) });
    let uses: Vec<Value> =
        (0..60).map(|i| json!({ "$ref": "#/$defs/big", "properties": { format!("x{i}"): {} } })).collect();
    is_refused(&json(&json!({ "anyOf": uses, "$defs": { "big": big } })), "too big");
    let pattern = |i: usize| (format!("^n{i}_"), json!({ "type": "integer" }));
    runs(&json(
        &json!({ "type": "object", "patternProperties": (0..32).map(pattern).collect::<Map<_, _>>() }),
    ));
    is_refused(
        &json(&json!({ "patternProperties": (0..1000).map(pattern).collect::<Map<_, _>>() })),
        "patternProperties",
    );
    let merged: Vec<Value> = (0..30).map(|_| json!({ "$ref": "#/$defs/m" })).collect();
    let names: Map<String, Value> = (0..30).map(pattern).collect();
    is_refused(
        &json(&json!({ "allOf": merged, "$defs": { "m": { "patternProperties": names } } })),
        "pairs of patternProperties",
    );
}

#[test]
fn patterns_of_catastrophic_size() {
    let patterns = [
        "^(a|aa)+$",
        "(x+x+)+y",
        "[a-q][^u-z]{13}x",
        ".*a.{60}b",
        "(.*a){12}",
        "((a{1,100}){1,100}){1,100}",
        "^.{0,5000}$",
        "(a?){500}a{500}",
        "(ab|ba|a.b|.*c){30}",
        r"^[\p{L}\p{N} ]{1,400}$",
        r"^(\w+\s?)*$",
    ];
    for pattern in patterns {
        run(&json(&json!({ "type": "string", "pattern": pattern })));
        run(&json(&json!({ "type": "string", "pattern": pattern, "maxLength": 1000 })));
        run(&regex(pattern));
    }
    let contains: Vec<Value> = (0..20).map(|i| json!({ "pattern": format!("w{i}x") })).collect();
    is_refused(&json(&json!({ "type": "string", "allOf": contains })), "hold at once");
    run(&json(
        &json!({ "properties": members(190, |i| json!({ "type": "string", "pattern": format!("a.{{3}}b{i}"), "maxLength": 50 + i })) }),
    ));
    is_refused(&regex(&"[a-z]".repeat(10_000)), "bytes");
}

#[test]
fn huge_numbers() {
    for bound in [100_000_u64, 1 << 40] {
        for keyword in ["maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties"] {
            run(&json(&json!({ keyword: bound })));
        }
    }
    for number in [999_999_937.0, 1e-300, 1e300, 123_456.789] {
        for keyword in ["multipleOf", "minimum", "maximum", "exclusiveMaximum"] {
            run(&json(&json!({ "type": "number", keyword: number })));
        }
    }
    is_refused(&json(&json!({ "type": "integer", "multipleOf": 999_999_937 })), "multipleOf");
    is_refused(&json(&json!({ "allOf": [{ "multipleOf": 9973 }, { "multipleOf": 9967 }] })), "multipleOf");
    runs(&json(&json!({ "type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1000 })));
    let cube = json!({ "minItems": 1000, "items": { "minItems": 1000, "items": { "minItems": 1000, "items": {} } } });
    run(&json(&cube));
}

#[test]
fn lark_that_multiplies() {
    let chain = |len: usize, link: &dyn Fn(usize) -> String| {
        let rules: Vec<String> = (0..len).map(|i| format!("T{i}: {}\n", link(i + 1))).collect();
        lark(&format!("start: T0\n{}T{len}: \"x\"\n", rules.concat()))
    };
    runs(&chain(1000, &|next| format!("\"a\" T{next} \"b\"")));
    runs(&chain(12, &|next| format!("T{next} T{next}")));
    is_refused(&chain(60, &|next| format!("T{next} T{next}")), "too big");
    is_refused(&chain(20, &|next| format!("T{next} & /.*w{next}x.*/")), "of & and ~");
    for text in [
        "start: s\ns: s s | s s s | \"a\" |\n",
        "start: start \"a\" | \"b\"\n",
        "start: (\"a\" \"b\"){1000000}\n",
        "start: ((((\"a\" \"b\"){100}){100}){100}){100}\n",
        "start: T\nT: /(.|\\n)*/ & ~/(.*a.{20})/ & ~/(.*b.{15})/\n",
    ] {
        run(&lark(text));
    }
    let rules: Vec<String> = (0..300).map(|i| format!("r{i}: r{n} r{n} r{n} |\n", n = i + 1)).collect();
    run(&lark(&format!("start: r0\n{}r300: \"x\" |\n", rules.concat())));
    is_refused(&lark("start: start\n"), "nothing can match");
    let schemas = "%json {\"anyOf\":[{},{}]} | ".repeat(2000);
    is_refused(&lark(&format!("start: {schemas} \"x\"\n")), "subschemas");
    let choices: Vec<String> = (0..1500).map(|i| format!("\"choice {i}\"")).collect();
    runs(&lark(&format!("start: {}\n", choices.join(" | "))));
    is_refused(&lark(&format!("start: \"{}\"\n", "a".repeat(GRAMMAR_BYTES_MAX))), "at most 131072 bytes");
}
