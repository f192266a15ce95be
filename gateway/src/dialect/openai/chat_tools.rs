//! The tools of a chat, and which of them are to be called.

use serde_json::Value;

use crate::dialect::fields::{Fields, Integers, shown, unexpected};
use crate::fault::Fault;
use crate::tools::Tool;

/// Most tools.
const TOOLS_MAX: usize = 128;
/// Longest name of a function, in characters.
const NAME_CHARS_MAX: usize = 64;

/// What a chat says of tools.
#[derive(Debug, PartialEq)]
pub(super) struct Tools {
    /// Those that may be called; empty when none may.
    pub(super) callable: Vec<Tool>,
    /// One must be called.
    pub(super) must: bool,
    /// More than one may be called.
    pub(super) parallel: bool,
    /// The chat names its tools in the old way, `functions`, and reads the one call so.
    pub(super) legacy: bool,
}

/// Which tools are to be called.
enum Choice {
    None,
    Auto,
    Required,
    /// One of these; with true it must be.
    Among(Vec<String>, bool),
}

/// Reads `tools`, `tool_choice` and `parallel_tool_calls`, or the older `functions` and `function_call`.
pub(super) fn read(fields: &mut Fields) -> Result<Tools, Fault> {
    let mut tools = Vec::new();
    for (index, value) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
        tools.push(tool(value, &fields.path(&format!("tools[{index}]")))?);
    }
    let functions = fields.list("functions")?.unwrap_or_default();
    let legacy = !functions.is_empty();
    if legacy && !tools.is_empty() {
        return Err(
            fields.fault("functions", "is the older form of tools: expected one of the two, got both")
        );
    }
    for (index, value) in functions.into_iter().enumerate() {
        tools.push(function(value, &fields.path(&format!("functions[{index}]")))?);
    }
    let list = if legacy { "functions" } else { "tools" };
    check_list(&tools, list)?;
    let field = if legacy { "function_call" } else { "tool_choice" };
    let (new, old) = (fields.take("tool_choice"), fields.take("function_call"));
    let choice = match (if legacy { old } else { new }, legacy) {
        (None, _) => Choice::Auto,
        (Some(value), true) => function_call(value)?,
        (Some(value), false) => tool_choice(value)?,
    };
    let parallel = fields.flag("parallel_tool_calls")?.unwrap_or(true) && !legacy;
    let must = matches!(choice, Choice::Required | Choice::Among(_, true));
    if tools.is_empty() && must {
        return Err(Fault::field(field, format!("needs {list}, got none")));
    }
    let (callable, parallel) = match choice {
        Choice::None => (Vec::new(), parallel),
        Choice::Auto | Choice::Required => (tools, parallel),
        Choice::Among(names, must) => {
            // A function that is named is called once.
            let parallel = parallel && !(must && names.len() == 1);
            if let Some(name) = names.iter().find(|name| tools.iter().all(|tool| tool.name != **name)) {
                return Err(Fault::field(field, format!("expected a function of {list}, got {name:?}")));
            }
            tools.retain(|tool| names.contains(&tool.name));
            (tools, parallel)
        }
    };
    Ok(Tools { callable, must, parallel, legacy })
}

fn check_list(tools: &[Tool], list: &str) -> Result<(), Fault> {
    if tools.len() > TOOLS_MAX {
        return Err(Fault::field(
            list,
            format!("expected at most {TOOLS_MAX} functions, got {}", tools.len()),
        ));
    }
    for (index, tool) in tools.iter().enumerate() {
        if tools[..index].iter().any(|other| other.name == tool.name) {
            return Err(Fault::field(list, format!("expected each name once, got {:?} twice", tool.name)));
        }
    }
    Ok(())
}

fn tool(value: Value, path: &str) -> Result<Tool, Fault> {
    let mut fields = Fields::of(value, path, Integers::Whole)?;
    let kind = fields.string("type")?.unwrap_or_else(|| "function".to_owned());
    if kind != "function" {
        return Err(fields.fault("type", format!("expected \"function\", got {kind:?}")));
    }
    let described = fields.require("function")?;
    let tool = function(described, &fields.path("function"))?;
    fields.finish("a tool");
    Ok(tool)
}

fn function(value: Value, path: &str) -> Result<Tool, Fault> {
    let mut fields = Fields::of(value, path, Integers::Whole)?;
    let name = fields.string("name")?.ok_or_else(|| fields.fault("name", "is required"))?;
    check_name(&name, &fields.path("name"))?;
    let description = fields.string("description")?;
    let strict = fields.flag("strict")?.unwrap_or(false);
    let schema = fields.take("parameters");
    let came = schema.as_ref().map(shown).unwrap_or_default();
    let parameters = Tool::parameters(schema)
        .map_err(|expected| fields.fault("parameters", format!("expected {expected}, got {came}")))?;
    fields.finish("a tool");
    Ok(Tool { name, description, parameters, strict })
}

fn tool_choice(value: Value) -> Result<Choice, Fault> {
    const EXPECTED: &str = "\"none\", \"auto\", \"required\" or an object that names functions";
    match value {
        Value::String(word) => match word.as_str() {
            "none" => Ok(Choice::None),
            "auto" => Ok(Choice::Auto),
            "required" => Ok(Choice::Required),
            _ => Err(unexpected("tool_choice", EXPECTED, &Value::String(word))),
        },
        Value::Object(_) => {
            let mut fields = Fields::of(value, "tool_choice", Integers::Whole)?;
            let choice = match fields.string("type")?.as_deref() {
                Some("function") => Choice::Among(vec![named(&mut fields)?], true),
                Some("allowed_tools") => allowed(&mut fields)?,
                kind => {
                    let came = kind.map_or_else(|| "none".to_owned(), |kind| format!("{kind:?}"));
                    let message = format!("expected \"function\" or \"allowed_tools\", got {came}");
                    return Err(fields.fault("type", message));
                }
            };
            fields.finish("tool_choice");
            Ok(choice)
        }
        other => Err(unexpected("tool_choice", EXPECTED, &other)),
    }
}

/// The name in `function`.
fn named(fields: &mut Fields) -> Result<String, Fault> {
    let mut function = fields.object("function")?.ok_or_else(|| fields.fault("function", "is required"))?;
    let name = function.string("name")?.ok_or_else(|| function.fault("name", "is required"))?;
    function.finish("tool_choice");
    Ok(name)
}

fn allowed(fields: &mut Fields) -> Result<Choice, Fault> {
    let mut allowed =
        fields.object("allowed_tools")?.ok_or_else(|| fields.fault("allowed_tools", "is required"))?;
    let must = match allowed.string("mode")?.as_deref() {
        None | Some("auto") => false,
        Some("required") => true,
        Some(other) => {
            let message = format!("expected \"auto\" or \"required\", got {other:?}");
            return Err(allowed.fault("mode", message));
        }
    };
    let list = allowed.list("tools")?.unwrap_or_default();
    if list.is_empty() {
        return Err(allowed.fault("tools", "expected at least 1 function, got none"));
    }
    let names = list.into_iter().enumerate().map(|(index, value)| {
        let mut fields = Fields::of(value, &allowed.path(&format!("tools[{index}]")), Integers::Whole)?;
        fields.string("type")?;
        named(&mut fields)
    });
    let names = names.collect::<Result<Vec<_>, _>>()?;
    allowed.finish("tool_choice");
    Ok(Choice::Among(names, must))
}

fn function_call(value: Value) -> Result<Choice, Fault> {
    match value {
        Value::String(word) if word == "none" => Ok(Choice::None),
        Value::String(word) if word == "auto" => Ok(Choice::Auto),
        Value::Object(_) => {
            let mut fields = Fields::of(value, "function_call", Integers::Whole)?;
            let name = fields.string("name")?.ok_or_else(|| fields.fault("name", "is required"))?;
            Ok(Choice::Among(vec![name], true))
        }
        other => Err(unexpected("function_call", "\"none\", \"auto\" or an object with a name", &other)),
    }
}

/// Checks the name of a function: it is spelt as it is in every form of calls.
pub(super) fn check_name(name: &str, path: &str) -> Result<(), Fault> {
    let well_formed = (1..=NAME_CHARS_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'));
    if well_formed {
        return Ok(());
    }
    let message =
        format!("expected 1 to {NAME_CHARS_MAX} of A-Z, a-z, 0-9, _, - and ., got {}", shown(&name.into()));
    Err(Fault::field(path, message))
}
