//! The messages of a chat, in the form that templates read.

use serde_json::{Map, Value, json};

use super::chat_tools::check_name;
use crate::Config;
use crate::config::Dialect;
use crate::dialect::fields::{Fields, Integers, unexpected};
use crate::dialect::parts;
use crate::fault::Fault;

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Longest id of a call that is read, in characters.
const ID_CHARS_MAX: usize = 512;

/// Reads a list of messages.
pub(super) fn read(value: Value, config: &Config) -> Result<Vec<Value>, Fault> {
    let Value::Array(list) = value else {
        return Err(unexpected("messages", "a list of messages", &value));
    };
    if list.is_empty() {
        return Err(Fault::field("messages", "expected at least 1 message, got none"));
    }
    let messages = list.into_iter().enumerate().map(|(index, value)| {
        let path = format!("messages[{index}]");
        let read = message(value, &path)?;
        if config.dialect == Dialect::Mlc && index > 0 && read["role"] == "system" {
            let fault = format!("expected a system message at the beginning alone, got one at {index}");
            return Err(Fault::field(format!("{path}.role"), fault));
        }
        Ok(read)
    });
    messages.collect()
}

fn message(value: Value, path: &str) -> Result<Value, Fault> {
    let mut fields = Fields::of(value, path, Integers::Whole)?;
    let role = fields.string("role")?.ok_or_else(|| fields.fault("role", "is required"))?;
    if !ROLES.contains(&role.as_str()) {
        return Err(fields.fault("role", format!("expected one of {}, got {role:?}", ROLES.join(", "))));
    }
    let calls = calls(&mut fields, &role)?;
    let content = content(&mut fields, &role)?;
    let name = fields.string("name")?;
    let id = fields.string("tool_call_id")?;
    if let Some(id) = &id {
        if !matches!(role.as_str(), "tool" | "function") {
            return Err(
                fields.fault("tool_call_id", format!("is allowed in tool messages alone, got {role:?}"))
            );
        }
        check_id(id, &fields.path("tool_call_id"))?;
    }
    // What a model thought, in either of the names that it is given back by.
    let thought = fields.string("reasoning_content")?;
    let thought = fields.string("reasoning")?.or(thought);
    fields.finish("a message");
    // Templates know the older word, and the newer.
    let role = match role.as_str() {
        "developer" => "system",
        "function" => "tool",
        other => other,
    };
    let mut message = Map::new();
    message.insert("role".to_owned(), json!(role));
    message.insert("content".to_owned(), json!(content));
    for (key, text) in [("name", name), ("tool_call_id", id), ("reasoning_content", thought)] {
        if let Some(text) = text {
            message.insert(key.to_owned(), json!(text));
        }
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Ok(Value::Object(message))
}

fn content(fields: &mut Fields, role: &str) -> Result<String, Fault> {
    if role == "assistant" && fields.has("audio") {
        return Err(fields.fault("audio", "this model takes text only"));
    }
    let refusal = fields.string("refusal")?;
    match fields.take("content") {
        // An assistant's part may be a refusal, which it said as well.
        Some(Value::Array(list)) if role == "assistant" => {
            let parts = list.into_iter().map(|mut part| {
                if part["type"] == "refusal"
                    && let Some(text) = part.get("refusal").cloned()
                {
                    part = json!({"type": "text", "text": text});
                }
                part
            });
            parts::text_of(parts.collect(), &fields.path("content"))
        }
        Some(content) => parts::text_or_parts(content, &fields.path("content")),
        // An assistant that only called tools said nothing.
        None if role == "assistant" => Ok(refusal.unwrap_or_default()),
        None => Err(fields.fault("content", "is required")),
    }
}

/// The calls of an assistant's message, in `tool_calls` or the older `function_call`.
fn calls(fields: &mut Fields, role: &str) -> Result<Vec<Value>, Fault> {
    let mut calls = Vec::new();
    let list = fields.list("tool_calls")?.unwrap_or_default();
    for (index, value) in list.into_iter().enumerate() {
        let path = fields.path(&format!("tool_calls[{index}]"));
        calls.push(call(value, &path)?);
    }
    if let Some(mut function) = fields.object("function_call")? {
        calls.push(json!({"type": "function", "function": function_of(&mut function)?}));
        function.finish("a message");
    }
    if !calls.is_empty() && role != "assistant" {
        return Err(
            fields.fault("tool_calls", format!("is allowed in assistant messages alone, got {role:?}"))
        );
    }
    Ok(calls)
}

fn call(value: Value, path: &str) -> Result<Value, Fault> {
    let mut fields = Fields::of(value, path, Integers::Whole)?;
    let kind = fields.string("type")?;
    if let Some(kind) = kind.filter(|kind| kind != "function") {
        return Err(fields.fault("type", format!("expected \"function\", got {kind:?}")));
    }
    let id = fields.string("id")?;
    let mut function = fields.object("function")?.ok_or_else(|| fields.fault("function", "is required"))?;
    fields.take("index");
    let mut call = json!({"type": "function", "function": function_of(&mut function)?});
    if let Some(id) = id {
        check_id(&id, &fields.path("id"))?;
        call["id"] = json!(id);
    }
    function.finish("a message");
    fields.finish("a message");
    Ok(call)
}

/// Name and arguments of a call. Templates read arguments as an object; a text that is none stays a text.
fn function_of(fields: &mut Fields) -> Result<Value, Fault> {
    let name = fields.string("name")?.ok_or_else(|| fields.fault("name", "is required"))?;
    check_name(&name, &fields.path("name"))?;
    let arguments = match fields.take("arguments") {
        None => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => {
            serde_json::from_str(&text).ok().filter(Value::is_object).unwrap_or(Value::String(text))
        }
        Some(object @ Value::Object(_)) => object,
        Some(other) => return Err(unexpected(&fields.path("arguments"), "a string", &other)),
    };
    Ok(json!({"name": name, "arguments": arguments}))
}

fn check_id(id: &str, path: &str) -> Result<(), Fault> {
    let count = id.chars().count();
    if (1..=ID_CHARS_MAX).contains(&count) {
        return Ok(());
    }
    Err(Fault::field(path, format!("expected 1 to {ID_CHARS_MAX} characters, got {count}")))
}
