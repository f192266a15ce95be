//! JSON schemas: what they let come, and what is refused by name rather than let pass.

use expect_test::{Expect, expect};
use proto::Grammar;
use serde_json::{Value, json};

use crate::{BYTES, Dice, check, compiled, json, refusal, wander};

#[test]
fn there_is_no_white_space_unless_the_schema_says_so() {
    let list = json!({ "type": "array", "items": { "type": "integer", "minimum": 0, "maximum": 9 } });
    check(&json(&list), &["[1,2]", "[]"], &["[1, 2]", " [1]", "[ ]", "[1]\n"]);
    let mut roomy = list.clone();
    roomy["x-guidance"] = json!({ "whitespace_flexible": true });
    check(&json(&roomy), &["[1, 2]", "[ 1,\n2 ]", "[1,2]"], &["[1,,2]"]);
    let mut spaced = list;
    spaced["x-guidance"] = json!({ "whitespace_flexible": false, "item_separator": ", " });
    check(&json(&spaced), &["[1, 2]"], &["[1,2]"]);
}

#[test]
fn anything_goes_where_the_schema_says_nothing() {
    for schema in [json!({}), json!(true)] {
        check(&json(&schema), &["1", "null", "{\"a\":[true,\"x\"]}", "-1.5e3"], &["nul", "{a:1}", "1,2"]);
    }
    check(&json(&json!({ "type": "object" })), &["{}", "{\"k\":1}"], &["[]", "1"]);
}

#[test]
fn bounds_hold_together() {
    let both = json!({ "type": "string", "pattern": "^[a-z]+$", "maxLength": 4 });
    check(&json(&both), &["\"a\"", "\"abcd\""], &["\"\"", "\"abcde\"", "\"A\""]);
    let all = json!({ "type": "string", "pattern": "^[0-9-]+$", "format": "date", "minLength": 10, "maxLength": 10 });
    check(&json(&all), &["\"2024-02-29\""], &["\"2023-02-29\"", "\"24-02-29\""]);
    let number = json!({ "type": "integer", "minimum": -2, "exclusiveMaximum": 12, "multipleOf": 5 });
    check(&json(&number), &["0", "5", "10"], &["-5", "12", "15", "1", "5.0"]);
    // However the walk goes: what comes to its end keeps both bounds.
    for seed in 0..50 {
        let mut text = Vec::new();
        let matcher = compiled(&BYTES, &json(&both)).matcher();
        let is_over = wander(matcher, &mut Dice(seed), 30, |_, _, token| text.push(token as u8)).unwrap();
        let text: String = serde_json::from_slice(&text).unwrap();
        assert!(is_over && (1..=4).contains(&text.len()), "{text}");
        assert!(text.bytes().all(|byte| byte.is_ascii_lowercase()), "{text}");
    }
}

#[test]
fn formats_are_exact() {
    let format = |name: &str| json(&json!({ "type": "string", "format": name }));
    check(
        &format("date"),
        &["\"2024-02-29\"", "\"2000-02-29\"", "\"1999-12-31\"", "\"2023-02-28\""],
        &["\"2023-02-29\"", "\"1900-02-29\"", "\"2024-02-30\"", "\"2024-13-01\"", "\"2024-04-31\""],
    );
    check(
        &format("date-time"),
        &["\"2024-02-29T23:59:59Z\"", "\"2024-01-01T00:00:00.5+01:30\""],
        &[
            "\"2023-02-29T00:00:00Z\"",
            "\"2024-01-01T00:00:60Z\"",
            "\"2024-01-01 00:00:00Z\"",
            "\"2024-01-01T00:00:00\"",
        ],
    );
    check(&format("time"), &["\"12:00:00Z\""], &["\"24:00:00Z\"", "\"12:00:60Z\""]);
    check(&format("ipv4"), &["\"192.168.0.1\""], &["\"256.1.1.1\"", "\"01.2.3.4\""]);
    check(&format("uuid"), &["\"123e4567-e89b-12d3-a456-426614174000\""], &["\"123e4567\""]);
    // What is no text is not a format's business.
    let nullable = json!({ "type": ["string", "null"], "format": "date", "pattern": "^2" });
    check(&json(&nullable), &["null", "\"2024-01-01\""], &["\"1999-01-01\"", "\"2\"", "1"]);
}

#[test]
fn data_is_not_read_as_a_schema() {
    let literal = json!({ "const": { "format": "date", "minProperties": 9, "x": ["format"] } });
    check(&json(&literal), &["{\"format\":\"date\",\"minProperties\":9,\"x\":[\"format\"]}"], &["{}"]);
    let named = json!({
        "type": "object",
        "properties": { "format": { "enum": ["date", null] }, "enum": { "type": "boolean" } },
        "required": ["format", "enum"],
        "additionalProperties": false,
        "default": { "format": "date" }
    });
    check(
        &json(&named),
        &["{\"format\":\"date\",\"enum\":true}", "{\"format\":null,\"enum\":false}"],
        &["{}"],
    );
}

#[test]
fn references_lead_anywhere_in_the_schema() {
    let tree = json!({
        "$ref": "#/components/node",
        "components": { "node": {
            "type": "object",
            "properties": { "v": { "type": "null" }, "kids": { "type": "array", "items": { "$ref": "#/components/node" } } },
            "required": ["v"],
            "additionalProperties": false
        } }
    });
    check(
        &json(&tree),
        &["{\"v\":null}", "{\"v\":null,\"kids\":[{\"v\":null},{\"v\":null,\"kids\":[]}]}"],
        &["{}", "{\"v\":null,\"kids\":[{}]}"],
    );
}

#[test]
fn alternatives_that_cannot_meet_are_one_of() {
    let shape = |kind: &str, field: &str| {
        json!({
            "type": "object",
            "properties": { "kind": { "const": kind }, field: { "type": "boolean" } },
            "required": ["kind", field],
            "additionalProperties": false
        })
    };
    let shapes = json!({ "oneOf": [shape("a", "x"), shape("b", "y")] });
    check(
        &json(&shapes),
        &["{\"kind\":\"a\",\"x\":true}", "{\"kind\":\"b\",\"y\":false}"],
        &["{\"kind\":\"a\",\"y\":true}"],
    );
}

#[test]
fn names_come_once_and_in_one_spelling() {
    let open = json!({
        "type": "object",
        "properties": { "a": { "type": "integer" } },
        "required": ["a"],
        "additionalProperties": { "type": "boolean" }
    });
    check(
        &json(&open),
        &["{\"a\":1}", "{\"a\":1,\"b\":true}"],
        &["{\"a\":1,\"a\":true}", "{\"a\":1,\"\\u0061\":true}"],
    );
    check(
        &json(&json!({ "type": "string" })),
        &["\"\\n\\\"\\\\\"", "\"é\""],
        &["\"\\u00e9\"", "\"\n\"", "\"\\ud800\""],
    );
}

/// The schema is refused, with these words.
#[track_caller]
fn refuse(schema: &Value, expected: Expect) {
    expected.assert_eq(&refusal(&json(schema)));
}

#[test]
fn what_is_not_supported_is_named() {
    refuse(&json!({ "not": {} }), expect![[r#"json schema: unimplemented keys: ["not"]"#]]);
    refuse(
        &json!({ "type": "array", "uniqueItems": true, "contains": {} }),
        expect![[r#"json schema: unimplemented keys: ["contains", "uniqueItems"]"#]],
    );
    refuse(
        &json!({ "properties": { "a": { "if": {}, "then": {} } } }),
        expect![[r#"json schema: unimplemented keys: ["if", "then"]"#]],
    );
    refuse(
        &json!({ "type": "string", "format": "postcode" }),
        expect!["json schema: unknown format: postcode"],
    );
    refuse(
        &json!({ "oneOf": [{ "type": "integer" }, { "type": "number" }] }),
        expect![
            "json schema: oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
        ],
    );
    refuse(
        &json!({ "type": "object", "minProperties": 2 }),
        expect![[
            r#"json schema: unimplemented keys: ["minProperties"] above 1 where names are open: nothing keeps them apart"#
        ]],
    );
    refuse(
        &json!({ "const": "\u{1}" }),
        expect!["json schema: control characters in constants and names are not supported"],
    );
    refuse(
        &json!({ "x-guidance": { "lenient": true } }),
        expect!["json schema: x-guidance: lenient is not supported, as it ignores what it does not know"],
    );
}

#[test]
fn what_is_no_schema_is_told() {
    refuse(&json!([]), expect!["json schema: an object expected, an array came"]);
    refuse(&json!(false), expect!["json schema: an object expected, a boolean came"]);
    refuse(&json!({ "type": "strnig" }), expect!["json schema: invalid type: strnig"]);
    refuse(&json!({ "properties": [1] }), expect!["json schema: properties must be an object"]);
    refuse(&json!({ "$ref": "#/$defs/none" }), expect!["json schema: pointer '/$defs/none' does not exist"]);
    refuse(
        &json!({ "$ref": "http://example.com/schema" }),
        expect![
            "json schema: resource 'http://example.com/schema' is not present in a registry and retrieving it failed: Default retriever does not fetch resources"
        ],
    );
    refuse(
        &json!({ "type": "string", "pattern": "(" }),
        expect!["json schema: regex parse error: unclosed group"],
    );
    refuse(
        &json!({ "type": "string", "minLength": 3, "maxLength": 2 }),
        expect!["json schema: unsatisfiable schema: minLength (3) is greater than maxLength (2)"],
    );
    refuse(&json!({ "$ref": "#" }), expect!["json schema: nothing can match"]);
    for (text, expected) in [
        ("", "json schema: some text expected, none came"),
        ("{", "json schema: EOF while parsing an object at line 1 column 1"),
        ("{\"type\":\"null\"} x", "json schema: trailing characters at line 1 column 17"),
    ] {
        assert_eq!(refusal(&Grammar::JsonSchema(text.into())), expected);
    }
}
