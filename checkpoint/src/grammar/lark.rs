//! A Lark grammar made ready to be compiled: the schemas in it are treated like schemas that come alone.

use serde_json::Value;

use super::limits::{COMBINED_MAX, EXPRESSION_BYTES_MAX};
use super::schema;
use super::survey::Survey;

/// A piece of a grammar's text.
#[derive(Debug, PartialEq, Eq)]
enum Piece<'a> {
    /// A literal, an expression, a comment, the name of a special token: nothing in it is looked at.
    Closed(&'a str),
    /// `%json` or another statement that JSON follows.
    Statement(&'a str),
    /// One character of anything else.
    Open(char),
}

/// Statements that JSON follows.
const WITH_JSON: [&str; 3] = ["%json", "%regex", "%llguidance"];

/// Prepares each schema of the grammar, and holds the rest against the limits.
pub(super) fn prepare(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut combined, mut own_bytes) = (text, 0, 0);
    let mut survey = Survey::default();
    while let Some((piece, len)) = next(rest) {
        let raw = &rest[..len];
        rest = &rest[len..];
        out.push_str(raw);
        own_bytes += len;
        match piece {
            Piece::Statement(statement) => {
                let (json, bytes) = read_json(rest).map_err(|fault| format!("{statement}: {fault}"))?;
                rest = &rest[bytes..];
                out.push(' ');
                if statement == "%json" {
                    let ready = schema::prepare(json, &mut survey)
                        .map_err(|fault| format!("{statement}: {fault}"))?;
                    out.push_str(&ready.to_string());
                } else {
                    own_bytes += bytes;
                    out.push_str(&json.to_string());
                }
            }
            // A range of repetitions (`x~2..4`) has a number after it.
            Piece::Open('~') => {
                combined += usize::from(!rest.trim_start().starts_with(|c: char| c.is_ascii_digit()));
            }
            Piece::Open('&') => combined += 1,
            Piece::Open(_) | Piece::Closed(_) => {}
        }
    }
    if own_bytes > EXPRESSION_BYTES_MAX {
        return Err(format!(
            "at most {EXPRESSION_BYTES_MAX} bytes besides schemas expected, {own_bytes} came"
        ));
    }
    if combined > COMBINED_MAX {
        return Err(format!("at most {COMBINED_MAX} of & and ~ expected, {combined} came"));
    }
    Ok(out)
}

/// The JSON value that the text starts with, and how many bytes it takes.
fn read_json(text: &str) -> Result<(Value, usize), String> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    match values.next() {
        Some(Ok(value)) => Ok((value, values.byte_offset())),
        Some(Err(fault)) => Err(fault.to_string()),
        None => Err("a JSON value expected, none came".to_owned()),
    }
}

/// The next piece and its length in bytes, by the rules of Lark: the longest that fits.
fn next(text: &str) -> Option<(Piece<'_>, usize)> {
    let first = text.chars().next()?;
    let closed = match first {
        '#' => Some(comment(text)),
        '/' if text.starts_with("//") => Some(comment(text)),
        '"' | '/' => delimited(text, first),
        '<' => special(text),
        _ => None,
    };
    if let Some(len) = closed {
        return Some((Piece::Closed(&text[..len]), len));
    }
    if let Some(statement) = WITH_JSON.into_iter().find(|statement| text.starts_with(statement)) {
        return Some((Piece::Statement(statement), statement.len()));
    }
    Some((Piece::Open(first), first.len_utf8()))
}

fn comment(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// From a delimiter to the next one that no backslash precedes.
fn delimited(text: &str, delimiter: char) -> Option<usize> {
    let mut characters = text.char_indices().skip(1);
    while let Some((index, character)) = characters.next() {
        if character == '\\' {
            characters.next();
        } else if character == delimiter {
            return Some(index + delimiter.len_utf8());
        }
    }
    None
}

/// `<name>` without white space in it.
fn special(text: &str) -> Option<usize> {
    let end = text[1..].find(|c: char| c == '<' || c == '>' || c.is_whitespace())? + 1;
    (end > 1 && text[end..].starts_with('>')).then_some(end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_in_a_grammar_are_made_ready() {
        let ready = prepare("start: \"a\" %json {\"type\": \"null\"} \"b\"").expect("a grammar");
        let (before, after) = ready.split_once("%json ").expect("the schema stays");
        assert_eq!(before, "start: \"a\" ");
        let (schema, len) = read_json(after).expect("a schema");
        assert_eq!(schema["x-guidance"]["whitespace_flexible"], Value::Bool(false));
        assert_eq!(&after[len..], " \"b\"");
    }

    #[test]
    fn what_only_looks_like_a_schema_stays() {
        for text in [
            "start: \"%json {\"",
            "start: \"\\\"%json {\"",
            "start: /%json {/ // %json {",
            "start: /[\\/]%json/ # %json {\nx: \"y\"",
            "start: <|%json|> \"a\"~2..3",
        ] {
            assert_eq!(prepare(text).as_deref(), Ok(text));
        }
    }

    #[test]
    fn expressions_that_hold_at_once_are_bounded() {
        let text = format!("start: A\nA: /a/ {}", "& /b/ ".repeat(9));
        assert_eq!(prepare(&text), Err("at most 8 of & and ~ expected, 9 came".to_owned()));
        let fault = prepare("start: %json {\"x-guidance\": {\"lenient\": true}}").expect_err("it is lenient");
        assert!(fault.starts_with("%json: x-guidance: lenient"), "{fault}");
    }
}
