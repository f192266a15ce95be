//! What a model may write when it must call tools, or must call them properly: a grammar in the dialect of Lark that
//! llguidance reads.
//!
//! The grammar is that of the form's own calls, so that [`Calls`](super::Calls) finds them in any text of it.

use std::fmt::Write as _;

use proto::TokenId;
use serde_json::{Map, Value, json};

use super::reasoning::{CLOSE as THINK_CLOSE, OPEN as THINK_OPEN};
use super::schema::{closed, relaxed, spelt};
use super::{Form, Thinking, Tool, hermes, mistral};

/// Most calls in one answer.
const CALLS_MAX: usize = 32;

/// What a model may write.
#[derive(Debug)]
pub struct Outline<'a> {
    /// How it writes calls.
    pub form: Form,
    /// The tools that it may call; none for no calls at all.
    pub tools: &'a [Tool],
    /// What it may say in place of calls.
    pub content: Content<'a>,
    /// It may call more than once.
    pub parallel: bool,
    /// Whether it thinks first.
    pub thinking: Thinking,
}

/// What a model may say to the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// Nothing: it must call.
    Nothing,
    /// Anything, with calls in between.
    Anything,
    /// A JSON value of this schema (JSON text).
    Json(&'a str),
    /// What the regular expression matches.
    Regex(&'a str),
    /// A text of the `start` rule of this Lark grammar.
    Lark(&'a str),
}

impl Outline<'_> {
    /// The grammar. `special` tells the token of a mark that is a special token, which no text can spell.
    pub fn lark(&self, special: &dyn Fn(&str) -> Option<TokenId>) -> String {
        let mut rules = Rules { text: String::new(), special };
        let thinks = rules.thinking(self.thinking);
        let body = self.body(&mut rules);
        format!("start: {thinks}{body}\n{}", rules.text)
    }

    /// The rule of all that comes after the thoughts.
    fn body(&self, rules: &mut Rules<'_>) -> &'static str {
        if !self.tools.is_empty() {
            self.calls(rules);
        }
        match self.content {
            Content::Nothing => return "calls",
            Content::Anything => {
                self.calls_within_text(rules);
                return "body";
            }
            Content::Json(schema) => {
                // What is no JSON is left for the compiler to refuse.
                let schema = serde_json::from_str(schema)
                    .map_or_else(|_| schema.to_owned(), |schema| spelt(schema).to_string());
                rules.add("content", &format!("%json {schema}"));
            }
            Content::Regex(regex) => rules.add("content", &format!("/{}/", regex_in_lark(regex))),
            Content::Lark(grammar) => rules.add("content", &format!("%lark {{\n{grammar}\n}}")),
        }
        if self.tools.is_empty() {
            return "content";
        }
        rules.add("body", "content | calls");
        "body"
    }

    /// The rule `calls`: one or more, and nothing else.
    fn calls(&self, rules: &mut Rules<'_>) {
        let most = if self.parallel { CALLS_MAX } else { 1 };
        for (index, tool) in self.tools.iter().enumerate() {
            let arguments = match self.form {
                Form::Pythonic => keywords(index, tool, rules),
                _ => format!("%json {}", self.arguments(tool)),
            };
            let name = &tool.name;
            let (before, after) = match self.form {
                Form::Hermes => (format!("{{\"name\": \"{name}\", \"arguments\": "), "}"),
                Form::Llama3Json => (format!("{{\"name\": \"{name}\", \"parameters\": "), "}"),
                Form::Mistral => (format!("{{\"name\": \"{name}\", \"arguments\": "), "}"),
                Form::MistralArgs => (name.clone(), ""),
                Form::Pythonic => (format!("{name}("), ")"),
            };
            let args = if self.form == Form::MistralArgs { rules.mark(mistral::ARGS) } else { String::new() };
            let after = if after.is_empty() { String::new() } else { quoted(after) };
            rules.add(&format!("f{index}"), &format!("{} {args} {arguments} {after}", quoted(&before)));
        }
        let functions: Vec<String> = (0..self.tools.len()).map(|index| format!("f{index}")).collect();
        rules.add("f", &functions.join(" | "));
        let (call, separator, around) = match self.form {
            Form::Hermes => {
                let (open, close) = (rules.mark(hermes::OPEN), rules.mark(hermes::CLOSE));
                (format!("{open} {} f {} {close}", quoted("\n"), quoted("\n")), "\n", None)
            }
            Form::Llama3Json => ("f".to_owned(), "; ", None),
            Form::Pythonic => ("f".to_owned(), ", ", Some((quoted("["), quoted("]")))),
            Form::Mistral => {
                let open = format!("{} {}", rules.mark(mistral::OPEN), quoted("["));
                ("f".to_owned(), ", ", Some((open, quoted("]"))))
            }
            Form::MistralArgs => (format!("{} f", rules.mark(mistral::OPEN)), "", None),
        };
        rules.add("call", &call);
        let separator = if separator.is_empty() { String::new() } else { quoted(separator) };
        let more = if most > 1 { format!(" ({separator} call){{0,{}}}", most - 1) } else { String::new() };
        let (open, close) = around.unwrap_or_default();
        rules.add("calls", &format!("{open} call{more} {close}"));
    }

    /// The rule `body`: any text, in which all that begins like calls is calls.
    fn calls_within_text(&self, rules: &mut Rules<'_>) {
        rules.text.push_str("ANYTHING: /(?s:.*)/\n");
        let begins_with_mark = match self.form {
            Form::Hermes => Some(hermes::OPEN),
            Form::Mistral | Form::MistralArgs => Some(mistral::OPEN),
            Form::Llama3Json | Form::Pythonic => None,
        };
        let Some(mark) = begins_with_mark else {
            // Calls stand alone, so the first character tells them from other text.
            let first = if self.form == Form::Pythonic { r"\[" } else { r"\{" };
            let _ = writeln!(rules.text, "OTHER: /\\s*[^\\s{first}](?s:.*)/");
            rules.add("body", "OTHER? | calls");
            return;
        };
        if (rules.special)(mark).is_some() {
            // Text never spells a special token.
            rules.add(
                "body",
                if self.parallel { "ANYTHING (calls ANYTHING)*" } else { "ANYTHING (calls ANYTHING)?" },
            );
            return;
        }
        // The first rule ends at the mark, and the call goes on from there.
        let _ = writeln!(rules.text, "lead[lazy]: ANYTHING {}", quoted(mark));
        let rest = match self.form {
            Form::Hermes => format!("{} f {} {}", quoted("\n"), quoted("\n"), rules.mark(hermes::CLOSE)),
            Form::Mistral => {
                let more = if self.parallel { format!(" ({} f)*", quoted(", ")) } else { String::new() };
                format!("{} f{more} {}", quoted("["), quoted("]"))
            }
            _ => "f".to_owned(),
        };
        rules.add("spoken", &format!("lead {rest}"));
        rules.add("tail", "ANYTHING");
        rules.add("body", if self.parallel { "spoken* tail" } else { "spoken? tail" });
    }

    /// The schema of a tool's arguments, as far as it is to be kept.
    fn arguments(&self, tool: &Tool) -> Value {
        if self.content == Content::Anything && !tool.strict {
            return spelt(json!({"type": "object"}));
        }
        spelt(asked(tool))
    }
}

/// Rules in the making.
struct Rules<'a> {
    text: String,
    special: &'a dyn Fn(&str) -> Option<TokenId>,
}

impl Rules<'_> {
    fn add(&mut self, name: &str, rule: &str) {
        let _ = writeln!(self.text, "{name}: {rule}");
    }

    /// A mark: the special token, or else its text.
    fn mark(&self, mark: &str) -> String {
        (self.special)(mark).map_or_else(|| quoted(mark), |id| format!("<[{id}]>"))
    }

    /// Adds the rule of the thoughts that may come first, and says how `start` begins.
    fn thinking(&mut self, thinking: Thinking) -> &'static str {
        if thinking == Thinking::No {
            return "";
        }
        let thoughts = match (self.special)(THINK_CLOSE) {
            Some(id) => {
                // A text that reads like the mark would be taken for it.
                self.text.push_str("THOUGHT: /(?s:.*)/ & ~/(?s:.*<\\/think>.*)/\n");
                format!("THOUGHT <[{id}]>")
            }
            None => {
                let _ = writeln!(self.text, "thought[lazy]: /(?s:.*)/ {}", quoted(THINK_CLOSE));
                "thought".to_owned()
            }
        };
        // Models part what they think from what they say by an empty line.
        let thoughts = format!("{thoughts} /\\n{{0,2}}/");
        if thinking == Thinking::Begun {
            self.add("thoughts", &thoughts);
            return "thoughts ";
        }
        let open = self.mark(THINK_OPEN);
        self.add("thoughts", &format!("{open} {thoughts}"));
        "thoughts? "
    }
}

/// The arguments of a call in Python: named where the schema names them, else as a dictionary after two stars. A value
/// in JSON is one in Python to [`Calls`](super::Calls).
fn keywords(index: usize, tool: &Tool, rules: &mut Rules<'_>) -> String {
    let schema = asked(tool);
    let plain = [
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "description",
        "title",
        "$schema",
    ];
    let properties = schema.get("properties").and_then(Value::as_object);
    let keys = schema.as_object().into_iter().flat_map(Map::keys);
    let named = properties.filter(|properties| {
        keys.clone().all(|key| plain.contains(&key.as_str()))
            && schema.get("additionalProperties") == Some(&Value::Bool(false))
            && properties.keys().all(|name| is_identifier(name))
    });
    let Some(properties) = named else {
        return format!("{} %json {}", quoted("**"), spelt(schema.clone()));
    };
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    // Rule `aI_J` has the arguments from the Jth on where others came before; `bI_J`, where none did.
    for (at, (name, value)) in properties.iter().enumerate() {
        let mut value = value.clone();
        if let Value::Object(value) = &mut value {
            // References are to the whole schema.
            for key in ["$defs", "definitions"] {
                if let Some(definitions) = schema.get(key) {
                    value.entry(key).or_insert_with(|| definitions.clone());
                }
            }
        }
        rules.add(
            &format!("v{index}_{at}"),
            &format!("{} %json {}", quoted(&format!("{name}=")), spelt(value)),
        );
        let (next, value) = (at + 1, format!("v{index}_{at}"));
        let (left_out, left_out_first) = if required.contains(&name.as_str()) {
            (String::new(), String::new())
        } else {
            (format!(" | a{index}_{next}"), format!(" | b{index}_{next}"))
        };
        rules.add(&format!("a{index}_{at}"), &format!("{} {value} a{index}_{next}{left_out}", quoted(", ")));
        rules.add(&format!("b{index}_{at}"), &format!("{value} a{index}_{next}{left_out_first}"));
    }
    let end = properties.len();
    rules.add(&format!("a{index}_{end}"), "\"\"");
    rules.add(&format!("b{index}_{end}"), "\"\"");
    format!("b{index}_0")
}

/// The schema of a tool's arguments, as far as it is to be kept.
fn asked(tool: &Tool) -> Value {
    let schema = Value::Object(closed(&tool.parameters));
    if tool.strict { schema } else { relaxed(&schema) }
}

fn is_identifier(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A text in quotes.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A regular expression that may stand between slashes.
fn regex_in_lark(regex: &str) -> String {
    let mut out = String::with_capacity(regex.len() + 2);
    let mut escaped = false;
    for c in regex.chars() {
        match c {
            '/' if !escaped => out.push_str("\\/"),
            '\n' => out.push_str("\\n"),
            _ => out.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    out
}
