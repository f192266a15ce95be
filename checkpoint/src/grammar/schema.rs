//! A JSON schema made ready to be compiled.
//!
//! The compiler reads schemas generously in some places, and an output must be valid to the letter wherever it was
//! sampled from. So before it is compiled a schema is
//! - held against the limits (`survey`);
//! - refused where the compiler would let pass what the schema forbids (names that may repeat under `minProperties`);
//! - made exact where a `format` is only nearly so (days of February, leap seconds);
//! - written without white space, unless it says otherwise itself (`x-guidance`): a small model left free to add white
//!   space does so until its tokens are used up.

use serde_json::{Map, Value, json};

use super::survey::{MAPS, PLAIN, Survey};

/// Where a schema holds options for the compiler.
const OPTIONS: &str = "x-guidance";

/// Escapes within strings besides the plain characters. Without `\u` no character has two spellings, so no name can
/// come a second time in another one.
const ESCAPES: &str = "nrbtf\\\"";

/// Makes a schema ready, one of those that `survey` counts.
pub(super) fn prepare(mut schema: Value, survey: &mut Survey) -> Result<Value, String> {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    let Some(root) = schema.as_object_mut() else {
        return Err(format!("an object expected, {} came", kind_of(&schema)));
    };
    let options = options(root.shift_remove(OPTIONS))?;
    survey.check(root)?;
    walk(root)?;
    root.insert(OPTIONS.to_owned(), options);
    Ok(schema)
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The compiler's options: the schema's own, and ours where it says nothing.
fn options(given: Option<Value>) -> Result<Value, String> {
    let mut options = match given {
        None => Map::new(),
        Some(Value::Object(options)) => options,
        Some(other) => return Err(format!("{OPTIONS}: an object expected, {} came", kind_of(&other))),
    };
    if options.get("lenient").is_some_and(|lenient| lenient != &Value::Bool(false)) {
        return Err(format!("{OPTIONS}: lenient is not supported, as it ignores what it does not know"));
    }
    let says_white_space =
        options.contains_key("whitespace_flexible") || options.contains_key("whitespace_pattern");
    if !says_white_space {
        options.insert("whitespace_flexible".to_owned(), Value::Bool(false));
    }
    options.entry("json_allowed_escapes").or_insert_with(|| ESCAPES.into());
    Ok(Value::Object(options))
}

/// Goes through a schema and all within it. The depth is bounded by the JSON reader's own limit.
fn walk(schema: &mut Map<String, Value>) -> Result<(), String> {
    check_escapes(schema)?;
    check_names(schema)?;
    make_format_exact(schema);
    for (keyword, value) in schema.iter_mut().filter(|(keyword, _)| !PLAIN.contains(&keyword.as_str())) {
        match value {
            Value::Object(map) if MAPS.contains(&keyword.as_str()) => {
                map.values_mut().try_for_each(walk_within)?;
            }
            other => walk_within(other)?,
        }
    }
    Ok(())
}

fn walk_within(value: &mut Value) -> Result<(), String> {
    match value {
        Value::Object(schema) => walk(schema),
        Value::Array(items) => items.iter_mut().try_for_each(walk_within),
        _ => Ok(()),
    }
}

/// Refuses texts that must be spelt with `\u`, in constants and in names.
fn check_escapes(schema: &Map<String, Value>) -> Result<(), String> {
    let names = schema.get("properties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    let has = names.map(String::as_str).chain(required.filter_map(Value::as_str)).any(needs_escape)
        || ["const", "enum"].into_iter().filter_map(|keyword| schema.get(keyword)).any(value_needs_escape);
    if has { Err("control characters in constants and names are not supported".to_owned()) } else { Ok(()) }
}

fn needs_escape(text: &str) -> bool {
    text.chars().any(|c| (c < ' ' && !"\n\r\t\u{8}\u{c}".contains(c)) || c == '\u{7f}')
}

fn value_needs_escape(value: &Value) -> bool {
    match value {
        Value::String(text) => needs_escape(text),
        Value::Array(items) => items.iter().any(value_needs_escape),
        Value::Object(map) => map.iter().any(|(name, value)| needs_escape(name) || value_needs_escape(value)),
        _ => false,
    }
}

/// Refuses `minProperties` that only names the schema leaves open can meet: the grammar cannot tell that the second
/// of them is not the first once more.
fn check_names(schema: &Map<String, Value>) -> Result<(), String> {
    let Some(least) = schema.get("minProperties").and_then(Value::as_u64) else { return Ok(()) };
    let required = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false))
        && schema.get("patternProperties").and_then(Value::as_object).is_none_or(Map::is_empty);
    if is_closed || least <= required + 1 {
        return Ok(());
    }
    Err(format!(
        "unimplemented keys: [\"minProperties\"] above {} where names are open: nothing keeps them apart",
        required + 1
    ))
}

/// Days that exist: February has a 29th in years that 4 divides, but 100 only with 400. Source: RFC 3339, appendix C.
const DATE: &str = concat!(
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)",
);

/// Times of RFC 3339 without leap seconds, which exist at one minute of a day only, in UTC.
const TIME: &str = concat!(
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?",
    "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
);

/// Puts an exact pattern in the place of formats that the compiler knows only nearly.
fn make_format_exact(schema: &mut Map<String, Value>) {
    let pattern = match schema.get("format").and_then(Value::as_str) {
        Some("date") => format!("^{DATE}$"),
        Some("time") => format!("^{TIME}$"),
        Some("date-time") => format!("^{DATE}[Tt]{TIME}$"),
        _ => return,
    };
    schema.shift_remove("format");
    if !schema.contains_key("pattern") {
        schema.insert("pattern".to_owned(), pattern.into());
        return;
    }
    let both = schema.entry("allOf").or_insert_with(|| json!([]));
    if let Value::Array(both) = both {
        both.push(json!({ "pattern": pattern }));
    }
}
