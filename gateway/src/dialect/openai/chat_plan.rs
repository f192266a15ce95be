//! How a model is told of a chat's tools, what it may write, and how its text is read: by its chat template and the
//! configuration.

use std::sync::Arc;

use checkpoint::{Encode, Text};
use proto::{Grammar, TokenId};
use serde_json::{Value, json};

use super::chat_format::Format;
use super::chat_tools::Tools;
use crate::Config;
use crate::admit::render;
use crate::config::{Dialect, ReasoningParser, ToolParser};
use crate::domain::{Chat, Tail};
use crate::tools::{Content, Form, Outline, Thinking, Tool, Trust, told, without_system};

/// How an answer is read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    /// How the model writes calls; `None` where there are none to find.
    pub(super) form: Option<Form>,
    /// The functions that it may call.
    pub(super) names: Arc<[String]>,
    pub(super) trust: Trust,
    pub(super) thinking: Thinking,
    /// What the answer must look like, and the field that says so.
    pub(super) grammar: Format,
    /// Marks of calls and thoughts are special tokens, whose text must be seen.
    pub(super) shows_special: bool,
}

/// Makes the chat ready for the model's template, and says how to read the answer.
pub(super) fn plan(chat: &mut Chat, tools: &Tools, format: Format, model: &Text, config: &Config) -> Plan {
    let template = chat.template.clone();
    let template = template.as_deref().or(model.chat_template()).unwrap_or_default();
    let (form, by_template) = form(template, config);
    let called_before =
        chat.messages.iter().any(|message| message["role"] == "tool" || message["tool_calls"].is_array());
    let answers_tool = chat.messages.last().is_some_and(|message| message["role"] == "tool");
    if by_template {
        let list: Vec<Value> = tools.callable.iter().map(Tool::described).collect();
        chat.tools = (!list.is_empty()).then_some(Value::Array(list));
        if matches!(form, Form::Mistral | Form::MistralArgs) {
            shorten_ids(&mut chat.messages);
        }
    } else if called_before || !tools.callable.is_empty() {
        let had_system = chat.messages.first().is_some_and(|message| message["role"] == "system");
        chat.messages = told(form, &tools.callable, &chat.messages);
        let has_system = chat.messages.first().is_some_and(|message| message["role"] == "system");
        if has_system && !had_system && refuses_system(chat, model) {
            chat.messages = without_system(&chat.messages);
        }
    }
    let thinking = thinking(chat, template, model, config);
    // MLC answers tools with calls, until it is told what they gave.
    let must = tools.must || (config.dialect == Dialect::Mlc && !tools.callable.is_empty() && !answers_tool);
    let special = |mark: &str| special(model, mark);
    let grammar = grammar(Wishes { tools, must, format, form, thinking }, &special);
    let calls = !tools.callable.is_empty();
    let shows_special = (calls && form.mark().and_then(special).is_some())
        || (thinking != Thinking::No && special("</think>").is_some());
    Plan {
        form: calls.then_some(form),
        names: tools.callable.iter().map(|tool| tool.name.clone()).collect(),
        trust: if must { Trust::Forced } else { Trust::Free },
        thinking,
        grammar,
        shows_special,
    }
}

/// How the model writes calls, and whether its template tells it of tools.
fn form(template: &str, config: &Config) -> (Form, bool) {
    let own = Form::of_template(template);
    let chosen = match config.tool_parser {
        ToolParser::Auto => {
            // A form that nothing here reads is no better than none: the model is told of another.
            let fallback = if config.dialect == Dialect::Mlc { Form::Pythonic } else { Form::Hermes };
            return (own.unwrap_or(fallback), own.is_some());
        }
        ToolParser::Hermes => Form::Hermes,
        ToolParser::Llama3Json => Form::Llama3Json,
        ToolParser::Pythonic => Form::Pythonic,
        ToolParser::Mistral if own == Some(Form::MistralArgs) => Form::MistralArgs,
        ToolParser::Mistral => Form::Mistral,
    };
    (chosen, template.contains("tools"))
}

/// Whether the template cannot take a system message before a user's.
fn refuses_system(chat: &Chat, model: &Text) -> bool {
    let user = json!({"role": "user", "content": "x"});
    let system = json!({"role": "system", "content": "x"});
    let renders = |messages: Vec<Value>| {
        render(&Chat { messages, tail: Tail::Assistant, ..chat.clone() }, model).is_ok()
    };
    !renders(vec![system, user.clone()]) && renders(vec![user])
}

/// Where the model's text begins. What a template writes before an answer does not depend on what was said before.
fn thinking(chat: &Chat, template: &str, model: &Text, config: &Config) -> Thinking {
    match config.reasoning_parser {
        ReasoningParser::None => return Thinking::No,
        ReasoningParser::Auto if !Thinking::is_marked_by(template) => return Thinking::No,
        ReasoningParser::Auto | ReasoningParser::Think => {}
    }
    match chat.tail {
        Tail::Assistant => {
            let messages = vec![json!({"role": "user", "content": "x"})];
            let one = Chat { messages, tools: None, ..chat.clone() };
            render(&one, model).map_or(Thinking::May, |prompt| Thinking::after(&prompt))
        }
        Tail::Nothing => Thinking::May,
        Tail::Continue => {
            let last =
                chat.messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default();
            Thinking::within(last)
        }
    }
}

struct Wishes<'a> {
    tools: &'a Tools,
    must: bool,
    format: Format,
    form: Form,
    thinking: Thinking,
}

/// The grammar of the whole answer, where anything is asked of it.
fn grammar(wishes: Wishes<'_>, special: &dyn Fn(&str) -> Option<TokenId>) -> Format {
    let Wishes { tools, must, format, form, thinking } = wishes;
    let callable = &tools.callable;
    let content = match &format {
        _ if must => Content::Nothing,
        None => Content::Anything,
        Some((Grammar::JsonSchema(schema), _)) => Content::Json(schema),
        Some((Grammar::Regex(regex), _)) => Content::Regex(regex),
        Some((Grammar::Lark(grammar), _)) => Content::Lark(grammar),
    };
    let free = content == Content::Anything && tools.parallel && callable.iter().all(|tool| !tool.strict);
    let plain = callable.is_empty() && thinking == Thinking::No;
    if plain || free || (callable.is_empty() && format.is_none()) {
        return format;
    }
    let outline = Outline { form, tools: callable, content, parallel: tools.parallel, thinking };
    let field = format.as_ref().filter(|_| !must).map_or("tools", |(_, field)| *field);
    Some((Grammar::Lark(outline.lark(special).into()), field))
}

/// The token that a mark is, if it is a special one.
fn special(model: &Text, mark: &str) -> Option<TokenId> {
    let ids = model.encode(mark, Encode { add_bos: false, parse_special: true }).ok()?;
    match ids[..] {
        [id] if model.is_special(id) => Some(id),
        _ => None,
    }
}

/// Letters and digits of an id that Mistral's templates take.
const SHORT_ID_CHARS: usize = 9;

/// Gives calls, and what answers them, ids of the length that Mistral's templates insist on.
fn shorten_ids(messages: &mut [Value]) {
    for message in messages {
        shorten(message.get_mut("tool_call_id"));
        if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            for call in calls {
                shorten(call.get_mut("id"));
            }
        }
    }
}

fn shorten(id: Option<&mut Value>) {
    let Some(Value::String(id)) = id else { return };
    if id.len() == SHORT_ID_CHARS && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return;
    }
    // FNV-1a: equal ids stay equal, and different ones differ.
    let mut hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    *id = (0..SHORT_ID_CHARS)
        .map(|_| {
            let digit = (hash % 36) as u32;
            hash /= 36;
            char::from_digit(digit, 36).expect("a digit below the radix")
        })
        .collect();
}
