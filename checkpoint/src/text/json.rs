//! The `tojson` filter: JSON spelt as Python's `json.dumps` spells it, which models have seen in training.

use std::fmt::Write as _;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

/// The arguments of `json.dumps` that templates use.
struct Style {
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// The filter. Unlike Jinja's own it escapes nothing for HTML.
pub(super) fn tojson(value: Value, arguments: Kwargs) -> Result<Value, Error> {
    let style = Style::of(&arguments)?;
    let json = serde_json::to_value(&value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let mut out = String::new();
    style.write(&json, 0, &mut out);
    Ok(Value::from_safe_string(out))
}

impl Style {
    fn of(arguments: &Kwargs) -> Result<Self, Error> {
        let indent: Option<usize> = arguments.get("indent")?;
        let separators: Option<Vec<String>> = arguments.get("separators")?;
        let ensure_ascii: Option<bool> = arguments.get("ensure_ascii")?;
        let sort_keys: Option<bool> = arguments.get("sort_keys")?;
        arguments.assert_all_used()?;
        let [item_separator, key_separator] = match separators {
            Some(pair) => pair
                .try_into()
                .map_err(|_| Error::new(ErrorKind::InvalidOperation, "separators: expected two strings"))?,
            None => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
        };
        Ok(Self {
            // Deeper than any template asks for, and a bound on what one line can cost.
            indent: indent.map(|columns| columns.min(16)),
            item_separator,
            key_separator,
            ensure_ascii: ensure_ascii.unwrap_or(false),
            sort_keys: sort_keys.unwrap_or(false),
        })
    }

    fn write(&self, json: &Json, depth: usize, out: &mut String) {
        match json {
            Json::Null => out.push_str("null"),
            Json::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Json::Number(number) => out.push_str(&number.to_string()),
            Json::String(text) => self.write_string(text, out),
            Json::Array(items) if items.is_empty() => out.push_str("[]"),
            Json::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.start_item(index, depth, out);
                    self.write(item, depth + 1, out);
                }
                self.new_line(depth, out);
                out.push(']');
            }
            Json::Object(members) if members.is_empty() => out.push_str("{}"),
            Json::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                if self.sort_keys {
                    members.sort_by_key(|(key, _)| *key);
                }
                out.push('{');
                for (index, (key, value)) in members.into_iter().enumerate() {
                    self.start_item(index, depth, out);
                    self.write_string(key, out);
                    out.push_str(&self.key_separator);
                    self.write(value, depth + 1, out);
                }
                self.new_line(depth, out);
                out.push('}');
            }
        }
    }

    fn start_item(&self, index: usize, depth: usize, out: &mut String) {
        if index > 0 {
            out.push_str(&self.item_separator);
        }
        self.new_line(depth + 1, out);
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(columns) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', columns * depth));
        }
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => push_escape(character, out),
                '\u{7f}'.. if self.ensure_ascii => push_escape(character, out),
                plain => out.push(plain),
            }
        }
        out.push('"');
    }
}

/// `\u` and four hexadecimal digits, twice for a character beyond the first plane.
fn push_escape(character: char, out: &mut String) {
    for unit in character.encode_utf16(&mut [0; 2]) {
        write!(out, "\\u{unit:04x}").expect("writing to a string");
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{Environment, context};

    use super::*;

    fn check(arguments: &str, expected: &str) {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        let source = format!("{{{{ v | tojson{arguments} }}}}");
        let json: Json = serde_json::from_str(
            r#"{"b": [1, 2.5, true, null], "a": {"k": "é\"\n\u0001<😀"}, "e": [], "o": {}}"#,
        )
        .unwrap();
        let rendered =
            environment.render_str(&source, context!(v => minijinja::value::Serde(&json))).unwrap();
        assert_eq!(rendered, expected);
    }

    // The expected texts are what Python 3 prints for json.dumps(v, ...).
    #[test]
    fn spelt_as_python_does() {
        check("", r#"{"b": [1, 2.5, true, null], "a": {"k": "é\"\n\u0001<😀"}, "e": [], "o": {}}"#);
        check(
            "(ensure_ascii=true, sort_keys=true, separators=(',', ':'))",
            r#"{"a":{"k":"\u00e9\"\n\u0001<\ud83d\ude00"},"b":[1,2.5,true,null],"e":[],"o":{}}"#,
        );
        check(
            "(indent=2)",
            "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"a\": {\n    \"k\": \"é\\\"\\n\\u0001<😀\"\n  },\n  \"e\": [],\n  \"o\": {}\n}",
        );
    }
}
