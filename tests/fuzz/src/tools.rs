//! However a model's text is cut into pieces, it says the same: the same words, thoughts and calls; and what a call
//! has for arguments is an object of JSON.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use gateway::tools::{Calls, Event, Form, Reasoning, Said, Thinking, Trust};
use serde_json::Value;

const FORMS: [Form; 5] = [Form::Hermes, Form::Llama3Json, Form::Pythonic, Form::Mistral, Form::MistralArgs];

/// What calls are made of.
const PARTS: [&str; 28] = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<think>",
    "</think>",
    "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
    "{\"name\": \"g\", \"parameters\": {}}",
    "{\"name\": \"f\", \"arguments\": \"{}\"}",
    "{\"arguments\": {\"a\": [1, null]}, \"name\": \"g\"}",
    "[f(a='x', b=[1, {'c': None}])]",
    "g()",
    "f{\"a\": \"\\u00e9\"}",
    "{",
    "}",
    "[",
    "]",
    "; ",
    ", ",
    "\"",
    "\\",
    "'",
    "\n",
    " ",
    "é🦜",
    "name",
    "x",
];

/// Any text, in any pieces, in every form.
pub fn tools(data: &[u8]) {
    let _ = any_text(&mut Unstructured::new(data));
}

fn any_text(source: &mut Unstructured<'_>) -> Result<()> {
    let form = *source.choose(&FORMS)?;
    let trust = if source.arbitrary()? { Trust::Free } else { Trust::Forced };
    let thinking = *source.choose(&[Thinking::No, Thinking::May, Thinking::Begun])?;
    let mut pieces = Vec::new();
    for _ in 0..source.int_in_range(0..=16)? {
        pieces.push(if source.ratio(1, 6)? { source.arbitrary()? } else { *source.choose(&PARTS)? });
    }
    let text = pieces.concat();
    let whole = read(form, trust, thinking, &[&text]);
    assert_eq!(read(form, trust, thinking, &pieces), whole, "as it came");
    let chars: Vec<String> = text.chars().map(String::from).collect();
    let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
    assert_eq!(read(form, trust, thinking, &chars), whole, "character by character");
    sound(&whole, (trust, thinking), &text);
    Ok(())
}

/// What a text says, with what follows on itself in one.
#[derive(Debug, Default, PartialEq)]
struct Told {
    thought: String,
    content: String,
    /// Names and arguments.
    calls: Vec<(String, String)>,
}

fn read(form: Form, trust: Trust, thinking: Thinking, pieces: &[&str]) -> Told {
    let names: Arc<[String]> = ["f", "g"].map(ToOwned::to_owned).into();
    let (mut reasoning, mut calls) = (Reasoning::new(thinking), Calls::new(form, names, trust));
    let (mut told, mut said, mut events) = (Told::default(), Vec::new(), Vec::new());
    for piece in pieces {
        reasoning.push(piece, &mut said);
    }
    reasoning.finish(&mut said);
    for said in said {
        match said {
            Said::Thought(text) => told.thought.push_str(&text),
            Said::Aloud(text) => calls.push(&text, &mut events),
        }
    }
    calls.finish(&mut events);
    for event in events {
        match event {
            Event::Content(text) => told.content.push_str(&text),
            Event::Call { index, name } => {
                assert_eq!(index, told.calls.len(), "calls are counted");
                told.calls.push((name, String::new()));
            }
            Event::Arguments { index, fragment } => {
                assert_eq!(index + 1, told.calls.len(), "arguments are the last call's");
                told.calls[index].1.push_str(&fragment);
            }
        }
    }
    told
}

fn sound(told: &Told, (trust, thinking): (Trust, Thinking), text: &str) {
    for (name, arguments) in &told.calls {
        assert!(name == "f" || name == "g", "{name}");
        // A call that a grammar forces goes out as it comes, and may be cut.
        if trust == Trust::Free {
            let arguments: Value = serde_json::from_str(arguments).expect("arguments are JSON");
            assert!(arguments.is_object(), "{arguments}");
        }
    }
    let said = told.thought.len() + told.content.len();
    assert!(said <= text.len(), "nothing is said that did not come");
    if told.calls.is_empty() && !text.contains('<') && trust == Trust::Free {
        let said = told.thought.clone() + &told.content;
        // White space behind the mark that the prompt ends with belongs to that mark.
        let before = text.strip_suffix(&said).filter(|before| {
            before.is_empty() || (thinking == Thinking::Begun && before.trim_start().is_empty())
        });
        assert!(before.is_some(), "a text without calls and marks is what it says: {text:?}, {said:?}");
    }
}
