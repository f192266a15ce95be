//! JSON bodies: as the fuzzer gives them, or made of an API's own field names.

use arbitrary::{Result, Unstructured};
use serde_json::{Map, Value, json};

/// Deepest nesting that is made.
const DEPTH_MAX: usize = 4;

/// A body from the fuzzer's bytes. Bytes that look like JSON are taken as they are, so that a corpus can be read;
/// of others `required` and some of `names`, one a line, become an object. A name with dots is a field within objects.
pub(crate) fn body(data: &[u8], required: &Value, names: &str) -> Vec<u8> {
    match data.first() {
        Some(b'{' | b'[' | b'"' | b' ' | b'\n') => data.to_vec(),
        _ => made(&mut Unstructured::new(data), required, &names.lines().collect::<Vec<_>>())
            .unwrap_or_else(|_| required.clone())
            .to_string()
            .into(),
    }
}

fn made(source: &mut Unstructured<'_>, required: &Value, names: &[&str]) -> Result<Value> {
    let mut object = required.clone();
    for _ in 0..source.int_in_range(0..=6)? {
        let name = source.choose(names)?;
        let value = value(source, names, 0)?;
        put(&mut object, name, value);
    }
    Ok(object)
}

/// Sets a field; what is in its way and no object stays.
fn put(object: &mut Value, name: &str, value: Value) {
    let Value::Object(fields) = object else { return };
    match name.split_once('.') {
        None => drop(fields.insert(name.to_owned(), value)),
        Some((outer, inner)) => put(fields.entry(outer).or_insert_with(|| json!({})), inner, value),
    }
}

fn value(source: &mut Unstructured<'_>, names: &[&str], depth: usize) -> Result<Value> {
    let kinds = if depth < DEPTH_MAX { 10 } else { 7 };
    Ok(match source.int_in_range(0..=kinds)? {
        0 => Value::Null,
        1 => Value::Bool(source.arbitrary()?),
        2 => json!(*source.choose(&[
            0_i64,
            1,
            2,
            5,
            16,
            128,
            3600,
            -1,
            -2,
            i64::MAX,
            i64::MIN,
            1 << 31,
            (1 << 31) - 1
        ])?),
        3 => json!(source.arbitrary::<u64>()?),
        4 => json!(*source.choose(&[
            0.0,
            -0.0,
            0.5,
            1.0,
            2.0,
            5.0,
            1e-7,
            1e-40,
            1e-320,
            3e38,
            1e39,
            1e300,
            -2.0,
            0.999_999_99
        ])?),
        5 => json!(*source.choose(&[
            "",
            "a",
            "text",
            "user",
            "assistant",
            "system",
            "tool",
            "json_object",
            "json_schema",
            "auto",
            "none",
            "required",
            "function",
            "image_url",
            "None",
            "m",
            "2,1,2,3",
            "é\u{2028}\u{85}🦜\0",
        ])?),
        6 => json!(source.arbitrary::<String>()?),
        7 => json!(source.arbitrary::<f64>()?),
        8 => {
            let count = source.int_in_range(0..=5)?;
            (0..count).map(|_| value(source, names, depth + 1)).collect::<Result<Value>>()?
        }
        9 => json!({"type": "text", "text": source.arbitrary::<String>()?}),
        _ => {
            let mut fields = Map::new();
            for _ in 0..source.int_in_range(0..=3)? {
                let name = source.choose(names)?.rsplit('.').next().unwrap_or_default();
                fields.insert(name.to_owned(), value(source, names, depth + 1)?);
            }
            Value::Object(fields)
        }
    })
}
