//! Grammars against the compiler, and texts of them against the parsers.

use std::collections::VecDeque;
use std::sync::Arc;

use checkpoint::grammar::{GrammarEnv, Mask, Word};
use proto::{Grammar, TokenId};
use serde_json::{Map, Value, json};

use super::{Calls, Content, Event, Form, Outline, Reasoning, Said, Thinking, Tool, Trust};

/// Special tokens after the bytes; the last ends a text.
const SPECIAL: [&str; 6] = ["[TOOL_CALLS]", "[ARGS]", "<tool_call>", "<think>", "</think>", "<eos>"];
const EOS: TokenId = 256 + SPECIAL.len() as TokenId - 1;

/// Longest walk, in tokens.
const STEPS_MAX: usize = 500;

fn env() -> GrammarEnv {
    let bytes: Vec<u8> = (0..=255).collect();
    let words =
        bytes.chunks(1).map(Word::Text).chain(SPECIAL.iter().map(|word| Word::Special(word.as_bytes())));
    GrammarEnv::new(words, &[EOS]).unwrap()
}

fn text_of(tokens: &[TokenId]) -> String {
    let mut bytes = Vec::new();
    for token in tokens {
        match u8::try_from(*token) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend_from_slice(SPECIAL[*token as usize - 256].as_bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn special(mark: &str) -> Option<TokenId> {
    SPECIAL.iter().position(|word| *word == mark).map(|at| 256 + at as TokenId)
}

fn tool(name: &str, parameters: Value, strict: bool) -> Tool {
    let parameters = Tool::parameters(Some(parameters)).unwrap();
    Tool { name: name.to_owned(), description: None, parameters, strict }
}

fn tools() -> Vec<Tool> {
    let node = json!({"type": "object", "properties": {"k": {"type": "boolean"},
        "sub": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["k"], "additionalProperties": false});
    vec![
        tool(
            "get_weather",
            json!({"type": "object", "properties": {"location": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["celsius", "fahrenheit"]}}, "required": ["location"]}),
            true,
        ),
        tool("f", json!({"type": "object", "properties": {}}), false),
        tool(
            "tree",
            json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
                "n": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}, "required": ["n"]}),
            true,
        ),
        // A name that is none in Python.
        tool(
            "odd",
            json!({"type": "object", "properties": {"a b": {"type": "number", "minimum": 0, "maximum": 9}},
            "required": ["a b"]}),
            true,
        ),
    ]
}

/// What a call of each function must have.
fn needs(name: &str) -> &'static str {
    match name {
        "get_weather" => "location",
        "tree" => "n",
        "odd" => "a b",
        _ => "",
    }
}

struct Rng(u64);

impl Rng {
    /// A number below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// A text of the grammar that begins with `start` as far as it may, if the walk comes to an end.
fn walk(compiled: &checkpoint::grammar::Compiled, start: &str, rng: &mut Rng) -> Option<String> {
    let mut matcher = compiled.matcher();
    let mut mask = Mask::default();
    let mut tokens: Vec<TokenId> = Vec::new();
    let mut script: VecDeque<u8> = start.bytes().collect();
    while tokens.len() < STEPS_MAX {
        if matcher.is_stopped() {
            return Some(text_of(&tokens));
        }
        matcher.allowed(&mut mask).unwrap();
        let scripted = script.pop_front().map(TokenId::from).filter(|byte| mask.contains(*byte));
        if scripted.is_none() {
            script.clear();
        }
        let token = scripted.unwrap_or_else(|| choose(&mask, tokens.len(), rng));
        if token == EOS {
            return Some(text_of(&tokens));
        }
        matcher.accept(token).unwrap();
        tokens.push(token);
    }
    None
}

/// A token that may come: one that ends, rather, the longer the text is.
fn choose(mask: &Mask, length: usize, rng: &mut Rng) -> TokenId {
    let ends = |byte: u8| mask.contains(TokenId::from(byte));
    if mask.contains(EOS) && length > 20 && rng.below(3) > 0 {
        return EOS;
    }
    if length > 80
        && let Some(byte) = b"\"}])>/".iter().find(|byte| ends(**byte))
        && rng.below(3) == 0
    {
        return TokenId::from(*byte);
    }
    let printable: Vec<TokenId> = mask.iter().filter(|id| (32..127).contains(id) || *id >= 256).collect();
    let all: Vec<TokenId> = if printable.is_empty() { mask.iter().collect() } else { printable };
    all[rng.below(all.len())]
}

/// What is left when thoughts are taken out, then the calls and the other text.
fn read(outline: &Outline<'_>, trust: Trust, text: &str) -> (Vec<(String, String)>, String) {
    let mut reasoning = Reasoning::new(outline.thinking);
    let mut said = Vec::new();
    reasoning.push(text, &mut said);
    reasoning.finish(&mut said);
    let aloud: Vec<&str> = said
        .iter()
        .filter_map(|said| match said {
            Said::Aloud(text) => Some(text.as_str()),
            Said::Thought(_) => None,
        })
        .collect();
    let names: Arc<[String]> = outline.tools.iter().map(|tool| tool.name.clone()).collect();
    let mut finder = Calls::new(outline.form, names, trust);
    let mut events = Vec::new();
    finder.push(&aloud.concat(), &mut events);
    finder.finish(&mut events);
    let (mut calls, mut content): (Vec<(String, String)>, String) = (Vec::new(), String::new());
    for event in events {
        match event {
            Event::Content(text) => content.push_str(&text),
            Event::Call { name, .. } => calls.push((name, String::new())),
            Event::Arguments { index, fragment } => calls[index].1.push_str(&fragment),
        }
    }
    (calls, content)
}

/// Holds a text of the grammar against what the outline promises.
fn check(outline: &Outline<'_>, text: &str) {
    for trust in [Trust::Free, Trust::Forced] {
        if trust == Trust::Forced && outline.content == Content::Anything {
            continue;
        }
        let (calls, content) = read(outline, trust, text);
        let shown = format!("{outline:?}\n{text:?}\n{calls:?} {content:?}");
        assert!(outline.parallel || calls.len() <= 1, "{shown}");
        for (name, arguments) in &calls {
            let arguments: Map<String, Value> = serde_json::from_str(arguments).expect(&shown);
            let strict = outline.tools.iter().any(|tool| tool.name == *name && tool.strict);
            let need = needs(name);
            assert!(!strict || need.is_empty() || arguments.contains_key(need), "{shown}");
        }
        match outline.content {
            Content::Nothing => assert!(!calls.is_empty() && content.is_empty(), "{shown}"),
            Content::Anything => {}
            _ => assert!(calls.is_empty() != content.is_empty(), "{shown}"),
        }
    }
}

#[test]
fn every_text_of_a_grammar_is_what_its_outline_promises() {
    let (env, tools) = (env(), tools());
    let schema =
        json!({"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["x"], "additionalProperties": false})
        .to_string();
    let contents = [
        Content::Nothing,
        Content::Anything,
        Content::Json(&schema),
        Content::Regex("a/b[0-9]"),
        Content::Lark("start: \"yes\" | \"no\""),
    ];
    let starts = ["", "Hi <tool_call>", "[TOOL_CALLS]", "{", "[", "hm</think>", "<think>x</think>"];
    let mut rng = Rng(7);
    let mut ended = 0;
    for form in [Form::Hermes, Form::Llama3Json, Form::Pythonic, Form::Mistral, Form::MistralArgs] {
        for content in contents {
            for thinking in [Thinking::No, Thinking::May, Thinking::Begun] {
                for (parallel, marks) in [(true, true), (true, false), (false, true), (false, false)] {
                    let outline = Outline { form, tools: &tools, content, parallel, thinking };
                    let lark = outline.lark(&|mark| special(mark).filter(|_| marks));
                    let compiled = env.compile(&Grammar::Lark(lark.as_str().into()));
                    let compiled = compiled.unwrap_or_else(|error| panic!("{error}\n{lark}"));
                    for start in starts {
                        if let Some(text) = walk(&compiled, start, &mut rng) {
                            check(&outline, &text);
                            ended += 1;
                        }
                    }
                }
            }
        }
    }
    // Of 2,100 walks.
    assert!(ended > 1500, "{ended}");
}

#[test]
fn without_tools_there_is_the_content_alone() {
    let outline = Outline {
        form: Form::Hermes,
        tools: &[],
        content: Content::Regex("[0-9]{2}"),
        parallel: true,
        thinking: Thinking::May,
    };
    let compiled = env().compile(&Grammar::Lark(outline.lark(&|_| None).into())).unwrap();
    let mut rng = Rng(1);
    for start in ["12", "<think>so</think>\n\n34", "<think>"] {
        let Some(text) = walk(&compiled, start, &mut rng) else { continue };
        assert!(text.ends_with(|c: char| c.is_ascii_digit()) && text.starts_with(&start[..1]), "{text}");
    }
}
