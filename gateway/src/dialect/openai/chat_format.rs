//! What a chat's answer must look like.

use proto::Grammar;
use serde_json::Value;

use crate::dialect::fields::{Fields, shown};
use crate::dialect::sampling;
use crate::fault::Fault;

/// Longest name of a schema, in characters.
const NAME_CHARS_MAX: usize = 64;

/// A grammar, and the field that asked for it.
pub(super) type Format = Option<(Grammar, &'static str)>;

/// Reads `response_format` and vLLM's fields for the same.
pub(super) fn read(fields: &mut Fields) -> Result<Format, Fault> {
    let format = response_format(fields)?;
    match (format, sampling::structured(fields)?) {
        (Some(_), Some(_)) => {
            let message = "expected one kind of structured output, got others beside it";
            Err(Fault::field("response_format", message))
        }
        (Some(format), None) => Ok(Some((format, "response_format"))),
        (None, Some(format)) => Ok(Some((format, "structured_outputs"))),
        (None, None) => Ok(None),
    }
}

fn response_format(fields: &mut Fields) -> Result<Option<Grammar>, Fault> {
    let Some(mut format) = fields.object("response_format")? else { return Ok(None) };
    let kind = format.require("type")?;
    let grammar = match kind.as_str() {
        Some("text") => None,
        Some("json_object") => Some(match format.take("schema") {
            // MLC's: the schema, mostly as text.
            Some(schema) => sampling::json_schema(schema, &format.path("schema"))?,
            None => sampling::json_object(),
        }),
        Some("json_schema") => Some(json_schema(&mut format)?),
        _ => {
            let message =
                format!("expected \"text\", \"json_object\" or \"json_schema\", got {}", shown(&kind));
            return Err(format.fault("type", message));
        }
    };
    format.finish("response_format");
    Ok(grammar)
}

fn json_schema(format: &mut Fields) -> Result<Grammar, Fault> {
    let mut fields =
        format.object("json_schema")?.ok_or_else(|| format.fault("json_schema", "is required"))?;
    let name = fields.string("name")?.ok_or_else(|| fields.fault("name", "is required"))?;
    let well_formed = (1..=NAME_CHARS_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    if !well_formed {
        let came = shown(&Value::from(name));
        let message = format!("expected 1 to {NAME_CHARS_MAX} of A-Z, a-z, 0-9, _ and -, got {came}");
        return Err(fields.fault("name", message));
    }
    fields.string("description")?;
    // Every answer keeps to its schema to the letter, so there is nothing that would not be strict.
    fields.flag("strict")?;
    let grammar = match fields.take("schema") {
        Some(schema) => sampling::json_schema(schema, &fields.path("schema"))?,
        None => sampling::json_object(),
    };
    fields.finish("response_format");
    Ok(grammar)
}
