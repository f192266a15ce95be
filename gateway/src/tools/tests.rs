//! Texts, and the calls in them.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value};

use super::*;

const FORMS: [Form; 5] = [Form::Hermes, Form::Llama3Json, Form::Pythonic, Form::Mistral, Form::MistralArgs];

fn names() -> Arc<[String]> {
    ["f", "g", "get_weather"].map(ToOwned::to_owned).into()
}

/// All that the pieces give, contents and fragments merged.
fn run(form: Form, trust: Trust, pieces: &[&str]) -> Vec<Event> {
    let mut calls = Calls::new(form, names(), trust);
    let mut events = Vec::new();
    for piece in pieces {
        let mut more = Vec::new();
        calls.push(piece, &mut more);
        events.extend(more);
    }
    calls.finish(&mut events);
    let mut merged: Vec<Event> = Vec::new();
    for event in events {
        match (merged.last_mut(), event) {
            (Some(Event::Content(text)), Event::Content(more)) => text.push_str(&more),
            (
                Some(Event::Arguments { index, fragment }),
                Event::Arguments { index: same, fragment: more },
            ) if *index == same => {
                fragment.push_str(&more);
            }
            (_, event) => merged.push(event),
        }
    }
    merged
}

/// Contents in quotes, calls as `name arguments`.
fn shown(events: &[Event]) -> String {
    let texts = events.iter().map(|event| match event {
        Event::Content(content) => format!("{content:?} "),
        Event::Call { index, name } => format!("{index}:{name}"),
        Event::Arguments { fragment, .. } => format!("{fragment} "),
    });
    let text = texts.collect::<Vec<_>>().concat();
    text.trim_end().to_owned()
}

fn check(form: Form, cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        assert_eq!(shown(&run(form, Trust::Free, &[text])), *expected, "{text}");
        let chars: Vec<String> = text.chars().map(String::from).collect();
        let pieces: Vec<&str> = chars.iter().map(String::as_str).collect();
        assert_eq!(shown(&run(form, Trust::Free, &pieces)), *expected, "{text}, in characters");
    }
}

#[test]
fn hermes() {
    check(
        Form::Hermes,
        &[
            (
                r#"<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>"#,
                r#"0:f{"a": [1, "}"]}"#,
            ),
            (
                "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n\
                 {\"arguments\": {\"b\": 1}, \"name\": \"g\"}\n</tool_call>\n",
                r#""Let me see." 0:f{} 1:g{"b": 1}"#,
            ),
            (r#"<tool_call>{"name": "f"}</tool_call> and so on"#, r#"0:f{} " and so on""#),
            (r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#, r#"0:f{"a": 1}"#),
            (r#"<tool_call>{"name": "f", "id": 7, "arguments": null}</tool_call>"#, "0:f{}"),
            // The closing tag is missing, or cut.
            (r#"<tool_call>{"name": "f", "arguments": {}}"#, "0:f{}"),
            (r#"<tool_call>{"name": "f", "arguments": {}}</tool_"#, "0:f{}"),
            (r#"<tool_call>{"name": "f", "arguments": {}}} x"#, r#"0:f{} "} x""#),
            // No calls.
            ("a < b <tool_c <tool_call> x", r#""a < b <tool_c <tool_call> x""#),
            ("", ""),
            (" \n", r#"" \n""#),
            (r#"{"name": "f", "arguments": {}}"#, r#""{\"name\": \"f\", \"arguments\": {}}""#),
            (
                r#"<tool_call>{"name": "x", "arguments": {}}</tool_call>"#,
                r#""<tool_call>{\"name\": \"x\", \"arguments\": {}}</tool_call>""#,
            ),
            (
                r#"<tool_call>{"name": "f", "arguments": {"a"#,
                r#""<tool_call>{\"name\": \"f\", \"arguments\": {\"a""#,
            ),
            (
                r#"<tool_call>{"name": "f", "arguments": [1]}"#,
                r#""<tool_call>{\"name\": \"f\", \"arguments\": [1]}""#,
            ),
            (
                r#"<tool_call>{"name": "f", "arguments": {a: 1}}"#,
                r#""<tool_call>{\"name\": \"f\", \"arguments\": {a: 1}}""#,
            ),
            // A call within what is none.
            (r#"<tool_call><tool_call>{"name": "g"}</tool_call>"#, r#""<tool_call>" 0:g{}"#),
            (r#"<tool_call>{"name": "<tool_call>{"name": "g"}"#, r#""<tool_call>{\"name\": \"" 0:g{}"#),
        ],
    );
}

#[test]
fn llama3() {
    check(
        Form::Llama3Json,
        &[
            (r#"{"name": "f", "parameters": {"a": 1}}"#, r#"0:f{"a": 1}"#),
            (r#"<|python_tag|>{"type": "function", "name": "f", "parameters": {}}"#, "0:f{}"),
            (r#" {"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}"#, "0:f{} 1:g{}"),
            ("{\"name\": \"f\", \"parameters\": {}}\n{\"name\": \"g\", \"parameters\": {}} ", "0:f{} 1:g{}"),
            (r#"{"name": "f", "parameters": {}}; so"#, r#"0:f{} "; so""#),
            (r#"Sure: <|python_tag|>{"name": "f", "parameters": {}}"#, r#""Sure:" 0:f{}"#),
            // An answer in JSON, and code, are no calls.
            (r#"{"name": "Ann", "age": 3}"#, r#""{\"name\": \"Ann\", \"age\": 3}""#),
            (r#"{"name": "f", "age": 3}"#, r#""{\"name\": \"f\", \"age\": 3}""#),
            (r#"So: {"name": "f", "parameters": {}}"#, r#""So: {\"name\": \"f\", \"parameters\": {}}""#),
            ("<|python_tag|>print(1)", r#""<|python_tag|>print(1)""#),
            (r#"{"name": "f", "parameters": {"#, r#""{\"name\": \"f\", \"parameters\": {""#),
        ],
    );
}

#[test]
fn pythonic() {
    check(
        Form::Pythonic,
        &[
            ("[f(a='x', b=1), g()]", r#"0:f{"a": "x", "b": 1} 1:g{}"#),
            ("<|python_start|>[f()]<|python_end|>", "0:f{}"),
            ("<|python_start|>[f()]", "0:f{}"),
            (
                "[f(a=[1, 2.5, -3,], b=(1,), c={'k': {\"l\": None}}, d=True, e=(), f=false,)]",
                r#"0:f{"a": [1, 2.5, -3], "b": [1], "c": {"k": {"l": null}}, "d": true, "e": [], "f": false}"#,
            ),
            (
                r#"[f(a='it\'s "q" \\ \n\x41\u00e9\U0001F99C\101\d', b=r'\d', c='''a'b''', d='', e="\ud83e\udd9c\/")]"#,
                r#"0:f{"a": "it's \"q\" \\ \nAé🦜A\\d", "b": "\\d", "c": "a'b", "d": "", "e": "🦜/"}"#,
            ),
            (r#"[f(**{"a": 1, 'b': 2}, c=3)]"#, r#"0:f{"a": 1, "b": 2, "c": 3}"#),
            // MLC's forms.
            ("f(a='x',b=1)", r#"0:f{"a": "x", "b": 1}"#),
            ("f(a=1)\ng(b=2)", r#"0:f{"a": 1} 1:g{"b": 2}"#),
            (
                r#"["get_weather(location='Pittsburgh,PA',unit='f')", "get_weather(location=\"Tokyo\")"]"#,
                r#"0:get_weather{"location": "Pittsburgh,PA", "unit": "f"} 1:get_weather{"location": "Tokyo"}"#,
            ),
            // The end is missing.
            ("[f(a=1), g()", r#"0:f{"a": 1} 1:g{}"#),
            ("[f()] and", r#"0:f{} " and""#),
            // No calls.
            ("[1, 2]", r#""[1, 2]""#),
            ("[]", r#""[]""#),
            ("[f(1)]", r#""[f(1)]""#),
            ("[f(a=1, a=2)]", r#""[f(a=1, a=2)]""#),
            ("[f(a=x)]", r#""[f(a=x)]""#),
            ("[f(a=(1))]", r#""[f(a=(1))]""#),
            ("[f(a={1: 2})]", r#""[f(a={1: 2})]""#),
            ("[f(a='x)]", r#""[f(a='x)]""#),
            ("[f(a=1), h()]", r#""[f(a=1), h()]""#),
            ("[f(a=1), g(", r#""[f(a=1), g(""#),
            ("f is a function", r#""f is a function""#),
            ("f() is a call", r#""f() is a call""#),
            ("Well: [f()]", r#""Well: [f()]""#),
        ],
    );
}

#[test]
fn mistral() {
    check(
        Form::Mistral,
        &[
            (
                r#"[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "123456789"}]"#,
                r#"0:f{"a": 1} 1:g{}"#,
            ),
            (r#"[TOOL_CALLS] {"name": "f", "arguments": {}}"#, "0:f{}"),
            (r#"Yes. [TOOL_CALLS][{"name": "f", "arguments": {}}"#, r#""Yes." 0:f{}"#),
            (r#"[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}"#, r#"0:f{"a": 1} 1:g{}"#),
            (r#"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{"a": 1}"#, r#"0:get_weather{"a": 1}"#),
            (r#"[TOOL_CALLS]f{"a": 1}"#, r#"0:f{"a": 1}"#),
            // No calls.
            ("[TOOL_CALLS][]", r#""[TOOL_CALLS][]""#),
            ("[TOOL_CALLS]h[ARGS]{}", r#""[TOOL_CALLS]h[ARGS]{}""#),
            ("[TOOL_CALLS]f[ARGS]{\"a", r#""[TOOL_CALLS]f[ARGS]{\"a""#),
            ("[TOOL_CALLS]f[ARG]{}", r#""[TOOL_CALLS]f[ARG]{}""#),
            ("a[0] [TOOL [1, 2]", r#""a[0] [TOOL [1, 2]""#),
        ],
    );
}

#[test]
fn a_forced_call_goes_out_as_it_comes_and_may_be_cut() {
    let mut calls = Calls::new(Form::Hermes, names(), Trust::Forced);
    let mut events = Vec::new();
    calls.push("<tool_call>\n{\"name\": \"f\", ", &mut events);
    assert_eq!(shown(&events), "0:f");
    calls.push("\"arguments\": {\"a\": \"Par", &mut events);
    assert_eq!(shown(&events), r#"0:f{"a": "Par"#);
    calls.finish(&mut events);
    assert_eq!(shown(&events), r#"0:f{"a": "Par"#);
    // What was cut before its name was known is content.
    let text = "<tool_call>\n{\"name\": \"";
    assert_eq!(run(Form::Hermes, Trust::Forced, &[text]), [Event::Content(text.to_owned())]);
    // Between the name and the arguments it is not.
    let text = "<tool_call>\n{\"name\": \"f\", \"arg";
    assert_eq!(shown(&run(Form::Hermes, Trust::Forced, &[text])), "0:f");
    let text = r#"<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>"#;
    assert_eq!(shown(&run(Form::Hermes, Trust::Forced, &[text])), r#"0:g{"a": 1}"#);
}

#[test]
fn memory_is_bounded() {
    let mut calls = Calls::new(Form::Hermes, names(), Trust::Free);
    let mut events = Vec::new();
    let start = r#"<tool_call>{"name": "f", "arguments": {"a": ""#;
    calls.push(start, &mut events);
    let megabyte = "x".repeat(CALL_BYTES_MAX - start.len());
    calls.push(&megabyte, &mut events);
    assert_eq!(events, []);
    calls.push("x", &mut events);
    calls.push("\"}}</tool_call>", &mut events);
    calls.finish(&mut events);
    assert_eq!(events, [Event::Content(format!("{start}{megabyte}x\"}}}}</tool_call>"))]);
    // Nor is white space held without end.
    let mut calls = Calls::new(Form::Hermes, names(), Trust::Free);
    let mut events = Vec::new();
    calls.push(&" ".repeat(SPACE_BYTES_MAX + 1), &mut events);
    assert_eq!(events, [Event::Content(" ".repeat(SPACE_BYTES_MAX + 1))]);
}

#[test]
fn a_template_tells_the_form() {
    for (template, form) in [
        ("{{ messages }}", None),
        ("<tool_call>", None),
        ("{% if tools %}<tool_call>", Some(Form::Hermes)),
        ("{% if tools %}<|python_tag|>", Some(Form::Llama3Json)),
        ("{% if tools %}{\"name\": f, \"parameters\": d}", Some(Form::Llama3Json)),
        ("{% if tools %}[func_name1(params_name1=params_value1)]", Some(Form::Pythonic)),
        ("{% if tools %}<|python_start|>", Some(Form::Pythonic)),
        ("{% if tools %}[TOOL_CALLS]", Some(Form::Mistral)),
        ("{% if tools %}[TOOL_CALLS][ARGS]", Some(Form::MistralArgs)),
        ("{% if tools %}<unheard of>", None),
    ] {
        assert_eq!(Form::of_template(template), form, "{template}");
    }
}

/// Pieces of calls and of what looks like calls, and other text.
fn scraps() -> impl Strategy<Value = String> {
    const WORDS: [&str; 51] = [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "<|python_tag|>",
        "<|python_start|>",
        "<|python_end|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "f",
        "g",
        "get_weather",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        ", ",
        ";",
        ":",
        "=",
        " ",
        "\n",
        "'",
        "\"",
        "\\",
        "'''",
        "**",
        "1",
        "-2.5",
        "1e",
        "True",
        "None",
        "null",
        "a",
        "a=",
        "é🦜",
        "\\u00e9",
        "{\"name\": \"f\", \"arguments\": ",
        "{\"name\": \"g\", \"parameters\": {}}",
        "{\"a\": 1}",
        "\"a\": ",
        "\"name\": ",
        "f(a='x')",
        "[g()]",
        "[f(",
        "r'",
        "<",
        "x y",
    ];
    prop::collection::vec(prop::sample::select(&WORDS[..]), 0..14).prop_map(|words| words.concat())
}

fn form() -> impl Strategy<Value = Form> {
    prop::sample::select(&FORMS[..])
}

fn pieces<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let mut borders: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    borders.push(text.len());
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| borders[cut.index(borders.len())]).collect();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// One call of the form with JSON arguments, as a model writes it.
fn written(form: Form, name: &str, arguments: &str) -> String {
    match form {
        Form::Hermes => {
            format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
        }
        Form::Llama3Json => format!("<|python_tag|>{{\"name\": \"{name}\", \"parameters\": {arguments}}}"),
        Form::Pythonic => format!("[{name}(**{arguments})]"),
        Form::Mistral => format!("[TOOL_CALLS][{{\"name\": \"{name}\", \"arguments\": {arguments}}}]"),
        Form::MistralArgs => format!("[TOOL_CALLS]{name}[ARGS]{arguments}"),
    }
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e300..1e300).prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        "[\"'\\\\\n</\\[\\]{}]{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map("[a-z'\"]{0,4}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_cut_gives_the_same(
        form in form(),
        text in scraps(),
        forced: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let trust = if forced { Trust::Forced } else { Trust::Free };
        prop_assert_eq!(run(form, trust, &pieces(&text, &cuts)), run(form, trust, &[&text]));
    }

    #[test]
    fn calls_are_numbered_and_their_arguments_are_objects_and_other_text_is_content(form in form(), text in scraps()) {
        let events = run(form, Trust::Free, &[&text]);
        let mut calls: Vec<String> = Vec::new();
        let mut content = String::new();
        for event in events {
            match event {
                Event::Content(text) => content.push_str(&text),
                Event::Call { index, name } => {
                    prop_assert_eq!(index, calls.len());
                    prop_assert!(names().contains(&name));
                    calls.push(String::new());
                }
                Event::Arguments { index, fragment } => {
                    prop_assert_eq!(index + 1, calls.len());
                    calls[index].push_str(&fragment);
                }
            }
        }
        for arguments in &calls {
            prop_assert!(serde_json::from_str::<Map<String, Value>>(arguments).is_ok(), "{}", arguments);
        }
        if calls.is_empty() {
            prop_assert_eq!(content, text);
        } else {
            // In order: what is content is what the text has besides its calls.
            let mut rest = text.chars();
            prop_assert!(content.chars().all(|c| rest.any(|other| other == c)));
        }
    }

    #[test]
    fn content_and_calls_come_out_as_they_went_in(
        form in form(),
        before in "[a-z][a-z (.,]{0,10}[a-z]",
        arguments in prop::collection::vec(json(), 0..4),
        forced: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let arguments: Vec<String> = arguments
            .into_iter()
            .map(|value| serde_json::json!({"it": value, "ok": true}).to_string())
            .collect();
        // Only a call with a mark is one after other text.
        let before = if form == Form::Pythonic { String::new() } else { before };
        let mut text = before.clone();
        let written: Vec<String> = arguments.iter().map(|arguments| written(form, "get_weather", arguments)).collect();
        text.push_str(&written.join("\n"));
        let trust = if forced { Trust::Forced } else { Trust::Free };
        let events = run(form, trust, &pieces(&text, &cuts));
        let mut calls: Vec<String> = Vec::new();
        let mut content = String::new();
        for event in events {
            match event {
                Event::Content(text) => content.push_str(&text),
                Event::Call { .. } => calls.push(String::new()),
                Event::Arguments { fragment, .. } => calls.last_mut().unwrap().push_str(&fragment),
            }
        }
        prop_assert_eq!(content, before);
        prop_assert_eq!(calls.len(), arguments.len());
        for (got, sent) in calls.iter().zip(&arguments) {
            let (got, sent): (Value, Value) = (serde_json::from_str(got).unwrap(), serde_json::from_str(sent).unwrap());
            prop_assert_eq!(got, sent);
        }
    }

    #[test]
    fn a_text_cut_anywhere_is_content_or_whole_calls(form in form(), value in json(), cut: prop::sample::Index) {
        let text = written(form, "f", &serde_json::json!({"it": value}).to_string());
        let borders: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        let part = &text[..borders[cut.index(borders.len())]];
        let events = run(form, Trust::Free, &[part]);
        let called = events.iter().any(|event| matches!(event, Event::Call { .. }));
        if !called && !part.is_empty() {
            prop_assert_eq!(events, [Event::Content(part.to_owned())]);
        }
    }
}

fn said(thinking: Thinking, pieces: &[&str]) -> (String, String) {
    let mut reasoning = Reasoning::new(thinking);
    let mut out = Vec::new();
    for piece in pieces {
        reasoning.push(piece, &mut out);
    }
    reasoning.finish(&mut out);
    let (mut thought, mut aloud) = (String::new(), String::new());
    for said in out {
        match said {
            Said::Thought(text) => {
                assert!(aloud.is_empty(), "a thought after what was said");
                thought.push_str(&text);
            }
            Said::Aloud(text) => aloud.push_str(&text),
        }
    }
    (thought, aloud)
}

#[test]
fn thoughts_are_taken_apart() {
    for (thinking, text, thought, aloud) in [
        (Thinking::May, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Hm.\n\nSo.", "Yes."),
        (Thinking::May, "\n<think>a</think>b\n", "a", "b\n"),
        (Thinking::May, "<think>\n\n</think>\n\nYes <think>", "", "Yes <think>"),
        (Thinking::May, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (Thinking::May, " <thin", "", " <thin"),
        (Thinking::May, "", "", ""),
        (Thinking::Begun, "\na < b </thi </think> c", "a < b </thi", "c"),
        (Thinking::Begun, "never ends \n", "never ends \n", ""),
        (Thinking::Begun, "a</think</think>b", "a</think", "b"),
        (Thinking::Begun, "a<</think>b", "a<", "b"),
        (Thinking::Begun, "<think>a</think>b", "<think>a", "b"),
        (Thinking::No, "<think>a</think>b", "", "<think>a</think>b"),
    ] {
        assert_eq!(said(thinking, &[text]), (thought.to_owned(), aloud.to_owned()), "{text}");
    }
}

#[test]
fn the_prompt_tells_whether_thinking_has_begun() {
    for (prompt, thinking) in [
        ("<|im_start|>assistant\n", Thinking::May),
        ("<|im_start|>assistant\n<think>\n", Thinking::Begun),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Thinking::No),
    ] {
        assert_eq!(Thinking::after(prompt), thinking, "{prompt}");
    }
    assert_eq!(Thinking::within("<think>\nHm"), Thinking::Begun);
    assert_eq!(Thinking::within("<think>\nHm</think>\nSo"), Thinking::No);
    assert_eq!(Thinking::within("So"), Thinking::No);
    assert!(
        Thinking::is_marked_by("{% if x %}<think></think>{% endif %}") && !Thinking::is_marked_by("plain")
    );
}

proptest! {
    #[test]
    fn thoughts_do_not_depend_on_the_cut(
        words in prop::collection::vec(prop::sample::select(&["<think>", "</think>", "<", "</th", " ", "\n", "a", "é"][..]), 0..12),
        begun: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let text = words.concat();
        let thinking = if begun { Thinking::Begun } else { Thinking::May };
        let (thought, aloud) = said(thinking, &[&text]);
        prop_assert_eq!(said(thinking, &pieces(&text, &cuts)), (thought.clone(), aloud.clone()));
        let visible = |text: &str| text.replace("<think>", "").replace("</think>", "").replace(char::is_whitespace, "");
        prop_assert_eq!(visible(&(thought + &aloud)), visible(&text));
    }
}
