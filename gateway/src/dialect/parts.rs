//! Content given as a list of typed parts.

use serde_json::Value;

use super::fields::{Fields, Integers, unexpected};
use crate::fault::Fault;

/// The text of the parts, in a row. A part that is not text is a fault that names it.
pub(crate) fn text_of(list: Vec<Value>, path: &str) -> Result<String, Fault> {
    let mut text = String::new();
    for (index, part) in list.into_iter().enumerate() {
        let path = format!("{path}[{index}]");
        let mut fields = Fields::of(part, &path, Integers::Strict)?;
        let kind = fields.string("type")?.ok_or_else(|| fields.fault("type", "is required"))?;
        if kind != "text" {
            return Err(
                fields.fault("type", format!("this model takes text only, got a part of type {kind:?}"))
            );
        }
        let part = fields.string("text")?.ok_or_else(|| fields.fault("text", "is required"))?;
        text.push_str(&part);
    }
    Ok(text)
}

/// Content that is a string or a list of parts.
pub(crate) fn text_or_parts(value: Value, path: &str) -> Result<String, Fault> {
    match value {
        Value::String(text) => Ok(text),
        Value::Array(list) => text_of(list, path),
        other => Err(unexpected(path, "a string or a list of parts", &other)),
    }
}
