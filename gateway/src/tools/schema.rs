//! The schemas of a tool's arguments, made ready for a grammar.

use serde_json::{Map, Value, json};

/// Where a schema holds options for the compiler of grammars.
const OPTIONS: &str = "x-guidance";

/// Keywords that say more about members than `properties` does.
const OPENING: [&str; 8] = [
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
];

/// A function takes the arguments that it names and no others, unless its schema says more about that.
pub(super) fn closed(schema: &Map<String, Value>) -> Map<String, Value> {
    let mut schema = schema.clone();
    if schema.contains_key("properties") && !OPENING.iter().any(|key| schema.contains_key(*key)) {
        schema.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
    schema
}

/// A schema with the compiler's options, unless it has its own: JSON as models have seen it most, without white space
/// that has no end.
pub(super) fn spelt(mut schema: Value) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Value::Object(schema) = &mut schema {
        let options = || json!({"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false});
        schema.entry(OPTIONS).or_insert_with(options);
    }
    schema
}

/// What of a schema a grammar can hold a text to: the rest is left out, as it would be refused. For tools that need not
/// be called to the letter, whose schemas are often more than a grammar can say.
pub(super) fn relaxed(schema: &Value) -> Value {
    match schema {
        Value::Object(schema) => {
            Value::Object(schema.iter().filter_map(|(key, value)| kept(key, value)).collect())
        }
        // `false` allows nothing, which no answer could keep to.
        _ => json!({}),
    }
}

/// Formats that a grammar knows.
const FORMATS: [&str; 9] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"];

/// A keyword and its value, if a grammar can keep to it.
fn kept(key: &str, value: &Value) -> Option<(String, Value)> {
    let schemas = |list: &Value| list.as_array().map(|list| list.iter().map(relaxed).collect::<Vec<_>>());
    let value = match key {
        "properties" | "$defs" | "definitions" => {
            let members = value.as_object()?.iter().map(|(name, schema)| (name.clone(), relaxed(schema)));
            Some(Value::Object(members.collect()))
        }
        "items" => value.is_object().then(|| relaxed(value)),
        "additionalProperties" if value.is_boolean() => Some(value.clone()),
        "additionalProperties" => value.is_object().then(|| relaxed(value)),
        // Alternatives that exclude each other cannot be told from others: any of them will do.
        "anyOf" | "oneOf" => {
            let list = schemas(value).filter(|list| !list.is_empty())?;
            return Some(("anyOf".to_owned(), Value::Array(list)));
        }
        "allOf" => schemas(value).filter(|list| !list.is_empty()).map(Value::Array),
        "prefixItems" => schemas(value).map(Value::Array),
        "$ref" => value.as_str().filter(|reference| reference.starts_with('#')).map(|_| value.clone()),
        "enum" => value.as_array().filter(|list| !list.is_empty()).map(|_| value.clone()),
        "const" => Some(value.clone()),
        "type" => is_type(value).then(|| value.clone()),
        "required" => value.is_array().then(|| value.clone()),
        "minItems" | "maxItems" | "minLength" | "maxLength" => value.is_u64().then(|| value.clone()),
        "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
            value.is_number().then(|| value.clone())
        }
        "format" => value.as_str().filter(|format| FORMATS.contains(format)).map(|_| value.clone()),
        _ => None,
    };
    Some((key.to_owned(), value?))
}

/// Whether the value names types of JSON.
fn is_type(value: &Value) -> bool {
    let known = |value: &Value| {
        let types = ["null", "boolean", "integer", "number", "string", "array", "object"];
        value.as_str().is_some_and(|name| types.contains(&name))
    };
    match value {
        Value::Array(list) => !list.is_empty() && list.iter().all(known),
        other => known(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_grammar_cannot_say_is_left_out() {
        let schema = json!({
            "type": "object", "title": "T", "description": "what it does", "minProperties": 5,
            "properties": {
                "description": {"type": "string", "pattern": "(?=a)", "description": "d", "format": "iri"},
                "when": {"type": "string", "format": "date"},
                "either": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/n"}], "not": {"const": 1}},
                "far": {"$ref": "https://example.org/x"},
                "old": {"exclusiveMinimum": true, "minimum": 1, "items": [{}], "required": true, "type": "any"},
                "never": false,
            },
            "$defs": {"n": {"type": ["integer", "null"], "nullable": true, "multipleOf": 3}},
            "required": ["when"], "if": {}, "then": {}, "uniqueItems": true,
        });
        assert_eq!(
            relaxed(&schema),
            json!({
                "type": "object",
                "properties": {
                    "description": {"type": "string"},
                    "when": {"type": "string", "format": "date"},
                    "either": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
                    "far": {},
                    "old": {"minimum": 1},
                    "never": {},
                },
                "$defs": {"n": {"type": ["integer", "null"]}},
                "required": ["when"],
            })
        );
    }

    #[test]
    fn named_arguments_are_all_there_are_unless_the_schema_says_more() {
        let closes = |schema: Value| closed(schema.as_object().unwrap()).get("additionalProperties").cloned();
        assert_eq!(closes(json!({"properties": {}})), Some(Value::Bool(false)));
        assert_eq!(closes(json!({"type": "object"})), None);
        assert_eq!(closes(json!({"properties": {}, "anyOf": []})), None);
        assert_eq!(closes(json!({"properties": {}, "additionalProperties": true})), Some(Value::Bool(true)));
    }
}
