//! Knows of each character of a text whether it goes on as JSON.

/// Nesting that is taken: somewhat less than what readers of JSON commonly take.
const DEPTH_MAX: usize = 100;

/// Longest word or number, in characters.
const SCALAR_CHARS_MAX: usize = 128;

/// Takes the text of one JSON value (RFC 8259) character by character, and refuses the first that cannot be part of
/// one. Besides the grammar it refuses half a surrogate pair, since no reader makes a string of that.
#[derive(Debug)]
pub(super) struct JsonText {
    /// The open containers: true for an object.
    open: Vec<bool>,
    phase: Phase,
}

/// Where a text stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// A value comes, or white space before it.
    Value,
    /// After `[`: a value or `]`.
    ItemOrEnd,
    /// After `{`: a key or `}`.
    KeyOrEnd,
    /// After a comma of an object.
    Key,
    /// After a key.
    Colon,
    /// Within a string; true for a key.
    Text(bool, Escape),
    /// Within a number, a word.
    Scalar(String),
    /// After a value within a container.
    After,
    /// The value is complete.
    Done,
}

/// Where an escape sequence stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Escape {
    None,
    /// After a backslash.
    Slash,
    /// Within `\u`: digits that are left, their value so far; true for the second of a surrogate pair.
    Digits(u8, u16, bool),
    /// After the first of a surrogate pair: the other must follow.
    Pair,
    /// After that one's backslash.
    PairSlash,
}

impl JsonText {
    /// Expects a value.
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), phase: Phase::Value }
    }

    /// Containers that are open.
    pub(super) fn depth(&self) -> usize {
        self.open.len()
    }

    pub(super) fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Takes the next character. False when it cannot come here; nothing may be pushed after that, nor after
    /// [`Phase::Done`]. A number or word that is no part of a container never comes to its end.
    pub(super) fn push(&mut self, c: char) -> bool {
        match &mut self.phase {
            Phase::Text(key, escape) => {
                let key = *key;
                if *escape == Escape::None && c == '"' {
                    if key {
                        self.phase = Phase::Colon;
                    } else {
                        self.value_ended();
                    }
                    return true;
                }
                escape.push(c)
            }
            Phase::Scalar(text) => {
                if matches!(c, '0'..='9' | 'a'..='z' | 'A'..='Z' | '+' | '-' | '.') {
                    text.push(c);
                    return text.len() <= SCALAR_CHARS_MAX && may_be_scalar(text);
                }
                if !is_scalar(text) {
                    return false;
                }
                self.value_ended();
                self.push(c)
            }
            _ if is_space(c) => self.phase != Phase::Done,
            phase @ (Phase::KeyOrEnd | Phase::Key) if c == '"' => {
                *phase = Phase::Text(true, Escape::None);
                true
            }
            Phase::KeyOrEnd => c == '}' && self.close(c),
            Phase::Key | Phase::Done => false,
            Phase::Colon => {
                self.phase = Phase::Value;
                c == ':'
            }
            Phase::ItemOrEnd if c == ']' => self.close(c),
            Phase::ItemOrEnd | Phase::Value => self.open_value(c),
            Phase::After if c == ',' => {
                self.phase = if self.open.last() == Some(&true) { Phase::Key } else { Phase::Value };
                true
            }
            Phase::After => self.close(c),
        }
    }

    fn open_value(&mut self, c: char) -> bool {
        match c {
            '{' | '[' => {
                self.open.push(c == '{');
                self.phase = if c == '{' { Phase::KeyOrEnd } else { Phase::ItemOrEnd };
                self.open.len() <= DEPTH_MAX
            }
            '"' => {
                self.phase = Phase::Text(false, Escape::None);
                true
            }
            _ => {
                self.phase = Phase::Scalar(c.to_string());
                matches!(c, '-' | '0'..='9' | 't' | 'f' | 'n')
            }
        }
    }

    fn close(&mut self, c: char) -> bool {
        let fits = match self.open.pop() {
            Some(true) => c == '}',
            Some(false) => c == ']',
            None => false,
        };
        self.value_ended();
        fits
    }

    fn value_ended(&mut self) {
        self.phase = if self.open.is_empty() { Phase::Done } else { Phase::After };
    }
}

impl Escape {
    /// Takes a character of a string that is not its end.
    fn push(&mut self, c: char) -> bool {
        let (next, fits) = match *self {
            Self::None if c == '\\' => (Self::Slash, true),
            Self::None => (Self::None, c >= ' '),
            Self::Slash if c == 'u' => (Self::Digits(4, 0, false), true),
            Self::Slash => (Self::None, matches!(c, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't')),
            Self::Pair => (Self::PairSlash, c == '\\'),
            Self::PairSlash => (Self::Digits(4, 0, true), c == 'u'),
            Self::Digits(left, value, second) => match c.to_digit(16) {
                None => (Self::None, false),
                Some(digit) => {
                    let value = value << 4 | digit as u16;
                    if left > 1 { (Self::Digits(left - 1, value, second), true) } else { unit(value, second) }
                }
            },
        };
        *self = next;
        fits
    }
}

/// What follows a unit of UTF-16, and whether it may stand there.
fn unit(value: u16, second: bool) -> (Escape, bool) {
    match value {
        0xdc00..=0xdfff => (Escape::None, second),
        0xd800..=0xdbff => (Escape::Pair, !second),
        _ => (Escape::None, !second),
    }
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

fn is_scalar(text: &str) -> bool {
    // A number that is too large for double precision is no number to its reader.
    matches!(text, "true" | "false" | "null") || serde_json::from_str::<f64>(text).is_ok_and(f64::is_finite)
}

/// Whether more characters can make a scalar of it.
fn may_be_scalar(text: &str) -> bool {
    if text.starts_with(['t', 'f', 'n']) {
        return ["true", "false", "null"].iter().any(|word| word.starts_with(text));
    }
    !text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().skip(1).all(|c| !is_letter(c))
}

/// A letter that is in no number.
fn is_letter(c: char) -> bool {
    c.is_ascii_alphabetic() && !matches!(c, 'e' | 'E')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// Whether the text is one whole value with nothing after it.
    fn accepts(text: &str) -> bool {
        let mut json = JsonText::new();
        let mut chars = text.chars();
        chars.all(|c| *json.phase() != Phase::Done && json.push(c)) && *json.phase() == Phase::Done
    }

    #[test]
    fn what_a_reader_takes_is_taken_and_nothing_else() {
        for text in [
            "{}",
            "[]",
            "\"\"",
            "[1]",
            "[-0.5e+3]",
            "[0]",
            "[true,false,null]",
            " \n{\t\"a\" : [ 1 , {\"b\":2} ] }",
            r#"["\ud83e\udd9c\u00e9\n\\\/\""]"#,
            "{\"\":\"é🦜\"}",
            "[\"\u{7f}\"]",
            // and not
            "{",
            "{,}",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "[1,]",
            "[,]",
            "[01]",
            "[1.]",
            "[.5]",
            "[+1]",
            "[1e]",
            "[--1]",
            "[tru]",
            "[truee]",
            "[nul]",
            "[a]",
            "{a:1}",
            "{'a':1}",
            "[1}",
            "{\"a\":1]",
            "]",
            "}",
            "[\"\\x\"]",
            "[\"\\ud83e\"]",
            "[\"\\udd9c\"]",
            "[\"\\ud83e\\u0041\"]",
            "[\"\\ud83e\\ud83e\"]",
            "[\"\n\"]",
            "[1 2]",
            "[\"a\" \"b\"]",
            "[1e999]",
            "[-]",
            "[1-2]",
            "[\u{a0}1]",
            "{}x",
            "",
        ] {
            assert_eq!(accepts(text), serde_json::from_str::<Value>(text).is_ok(), "{text:?}");
        }
        assert!(accepts(&format!("{}{}", "[".repeat(100), "]".repeat(100))));
        assert!(!accepts(&format!("{}{}", "[".repeat(101), "]".repeat(101))));
    }

    proptest! {
        #[test]
        fn what_a_reader_takes_is_taken(text in r#"[\[{]([\[\]{}:, "]|\\?["nu0\\]|[0-9]|-|\.|e|true|null|"[a\\"]{0,3}"){0,12}[\]}]"#) {
            prop_assert_eq!(accepts(&text), serde_json::from_str::<Value>(&text).is_ok());
        }
    }
}
