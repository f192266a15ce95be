//! Tools in the words of a chat whose template has none for them.
//!
//! The tools go into the system message, calls and their results into the messages around them, so that every model
//! can be told of tools.

use serde_json::{Map, Value, json};

use super::{Form, Tool, hermes, mistral};

/// The messages with the tools told in the form, and with no roles and fields but those that any template knows.
pub fn told(form: Form, tools: &[Tool], messages: &[Value]) -> Vec<Value> {
    let mut told: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    for message in messages {
        let text = content(message);
        match message["role"].as_str() {
            Some("tool") => {
                let text = format!("<tool_response>\n{text}\n</tool_response>");
                // Results in a row are one message: many templates want the roles to alternate.
                match told.last_mut() {
                    Some(last) if last["tool_response"] == true => add(last, &text),
                    _ => told.push(json!({"role": "user", "content": text, "tool_response": true})),
                }
            }
            Some("assistant") if message["tool_calls"].is_array() => {
                let calls = written(form, message["tool_calls"].as_array().map_or(&[], Vec::as_slice));
                let text = if text.is_empty() { calls } else { format!("{text}\n{calls}") };
                told.push(json!({"role": "assistant", "content": text}));
            }
            _ => told.push(message.clone()),
        }
    }
    for message in &mut told {
        if let Some(fields) = message.as_object_mut() {
            fields.shift_remove("tool_response");
        }
    }
    if tools.is_empty() {
        return told;
    }
    let instruction = instruction(form, tools);
    match told.first_mut() {
        Some(first) if first["role"] == "system" => add(first, &format!("\n{instruction}")),
        _ => told.insert(0, json!({"role": "system", "content": instruction})),
    }
    told
}

/// The messages with the system message at the head of the first user's: for templates that refuse one.
pub fn without_system(messages: &[Value]) -> Vec<Value> {
    let (system, mut others): (Vec<Value>, Vec<Value>) =
        messages.iter().cloned().partition(|message| message["role"] == "system");
    let text: Vec<&str> = system.iter().map(content).collect();
    let text = text.join("\n\n");
    match others.iter_mut().find(|message| message["role"] == "user") {
        Some(user) => {
            let said = content(user).to_owned();
            user["content"] = json!(format!("{text}\n\n{said}"));
        }
        None => others.insert(0, json!({"role": "user", "content": text})),
    }
    others
}

fn content(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

fn add(message: &mut Value, text: &str) {
    let before = content(message).to_owned();
    message["content"] = json!(format!("{before}\n{text}"));
}

/// What a model is told of its tools.
fn instruction(form: Form, tools: &[Tool]) -> String {
    let list: Vec<String> = tools.iter().map(|tool| tool.described().to_string()).collect();
    let list = list.join("\n");
    let how = match form {
        Form::Hermes => {
            "To call a function, answer with a JSON object with its name and arguments within <tool_call></tool_call> \
             tags, once for each call:\n<tool_call>\n{\"name\": <function name>, \"arguments\": <arguments as a JSON \
             object>}\n</tool_call>"
        }
        Form::Llama3Json => {
            "To call a function, answer with nothing but a JSON object with its name and parameters, and a semicolon \
             between calls:\n{\"name\": <function name>, \"parameters\": <arguments as a JSON object>}"
        }
        Form::Pythonic => {
            "To call functions, answer with nothing but a list of calls in Python:\n\
             [function_name(argument=value, other_argument=value), other_function(argument=value)]"
        }
        Form::Mistral | Form::MistralArgs => {
            "To call functions, answer with [TOOL_CALLS] and a JSON list of their names and arguments:\n\
             [TOOL_CALLS][{\"name\": <function name>, \"arguments\": <arguments as a JSON object>}]"
        }
    };
    format!(
        "You may call functions to help with the user's request. They are:\n<tools>\n{list}\n</tools>\n\n{how}"
    )
}

/// Calls of an earlier message, as the model would have written them.
fn written(form: Form, calls: &[Value]) -> String {
    let calls: Vec<(&str, &Value)> = calls
        .iter()
        .map(|call| (call["function"]["name"].as_str().unwrap_or_default(), &call["function"]["arguments"]))
        .collect();
    let object =
        |(name, arguments): &(&str, &Value), key: &str| json!({"name": name, key: arguments}).to_string();
    match form {
        Form::Hermes => {
            let tagged = calls
                .iter()
                .map(|call| format!("{}\n{}\n{}", hermes::OPEN, object(call, "arguments"), hermes::CLOSE));
            tagged.collect::<Vec<_>>().join("\n")
        }
        Form::Llama3Json => {
            calls.iter().map(|call| object(call, "parameters")).collect::<Vec<_>>().join("; ")
        }
        Form::Pythonic => {
            let nothing = Map::new();
            let calls = calls.iter().map(|(name, arguments)| {
                let arguments = arguments.as_object().unwrap_or(&nothing);
                let arguments = arguments.iter().map(|(name, value)| format!("{name}={value}"));
                format!("{name}({})", arguments.collect::<Vec<_>>().join(", "))
            });
            format!("[{}]", calls.collect::<Vec<_>>().join(", "))
        }
        Form::Mistral => {
            let list = calls.iter().map(|call| object(call, "arguments")).collect::<Vec<_>>().join(", ");
            format!("{}[{list}]", mistral::OPEN)
        }
        Form::MistralArgs => {
            let marked = calls.iter().map(|(name, arguments)| {
                [mistral::OPEN, name, mistral::ARGS, &arguments.to_string()].concat()
            });
            marked.collect::<Vec<_>>().concat()
        }
    }
}
