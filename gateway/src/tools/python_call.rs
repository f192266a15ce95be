//! A call written in Python: `f(a='x', b=[1, None])`.

use std::collections::HashSet;
use std::sync::Arc;

use super::found::{Found, Progress};
use super::python_string::PythonString;

/// Nesting that is taken.
const DEPTH_MAX: usize = 100;
/// Longest word or number, in characters.
const SCALAR_CHARS_MAX: usize = 128;
/// Longest name of an argument, in characters.
const KEYWORD_CHARS_MAX: usize = 512;
/// Most arguments.
const KEYWORDS_MAX: usize = 1024;

/// Takes one call character by character and gives its arguments as JSON. Arguments are named, since nothing tells
/// what a first or second one is; `**{…}` names several. Values are literals: strings, numbers, `True`, `None`,
/// lists, tuples and dictionaries, and JSON's words for the same.
#[derive(Debug)]
pub(super) struct PythonCall {
    names: Arc<[String]>,
    state: State,
    open: Vec<Container>,
    /// Names of arguments so far.
    keywords: HashSet<String>,
    /// Arguments so far, counting those of `**{…}`.
    arguments: usize,
}

#[derive(Debug)]
enum State {
    Name(String),
    /// An argument comes, or the end.
    Argument,
    /// After one star, after two.
    Stars(bool),
    Keyword(String),
    /// After an argument's name.
    Equals(String),
    Value,
    /// A value or the end of the list or tuple.
    ItemOrEnd,
    /// A key or the end of the dictionary.
    KeyOrEnd,
    Colon,
    /// A string; true for a key.
    Text(PythonString, bool),
    Number(String),
    Word(String),
    /// After a value.
    After,
}

/// An open container, with what it has so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    List {
        items: usize,
    },
    Tuple {
        items: usize,
        comma: bool,
    },
    Dict {
        items: usize,
    },
    /// The dictionary after two stars: its items are arguments.
    Arguments,
}

impl PythonCall {
    /// Expects the call of one of these functions.
    pub(super) fn new(names: Arc<[String]>) -> Self {
        Self {
            names,
            state: State::Name(String::new()),
            open: Vec::new(),
            keywords: HashSet::new(),
            arguments: 0,
        }
    }

    /// Takes the next character; the call is done with its closing parenthesis.
    pub(super) fn push(&mut self, c: char, found: &mut Found) -> Progress {
        match &mut self.state {
            State::Text(text, key) => {
                let key = *key;
                match text.push(c, found) {
                    Progress::Done => self.text_ended(key),
                    Progress::Over => {
                        self.text_ended(key);
                        self.push(c, found)
                    }
                    other => other,
                }
            }
            State::Name(name) if c == '(' => {
                if !self.names.contains(name) {
                    return Progress::Fail;
                }
                found.call(name);
                found.argument('{');
                self.go(State::Argument)
            }
            State::Name(name) => {
                name.push(c);
                fits(self.names.iter().any(|known| known.starts_with(name.as_str())))
            }
            State::Keyword(name) if c.is_alphanumeric() || c == '_' => {
                name.push(c);
                fits(name.len() <= KEYWORD_CHARS_MAX)
            }
            State::Keyword(name) => {
                let name = std::mem::take(name);
                self.state = State::Equals(name);
                self.push(c, found)
            }
            State::Number(text) if c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '+' | '-') => {
                text.push(c);
                fits(text.len() <= SCALAR_CHARS_MAX)
            }
            State::Number(text) => {
                let text = std::mem::take(text);
                self.scalar_ended(number(&text), c, found)
            }
            State::Word(text) if c.is_ascii_alphanumeric() || c == '_' => {
                text.push(c);
                fits(text.len() <= SCALAR_CHARS_MAX)
            }
            State::Word(prefix) if matches!(c, '\'' | '"') => match prefix.as_str() {
                "r" | "R" => self.go(State::Text(PythonString::open(c, true, found), false)),
                "u" | "U" => self.go(State::Text(PythonString::open(c, false, found), false)),
                _ => Progress::Fail,
            },
            State::Word(text) => {
                let json = match text.as_str() {
                    "True" | "true" => Some("true"),
                    "False" | "false" => Some("false"),
                    "None" | "null" => Some("null"),
                    _ => None,
                };
                self.scalar_ended(json.map(ToOwned::to_owned), c, found)
            }
            _ if c.is_whitespace() => Progress::More,
            State::Argument => self.argument(c, found),
            State::Stars(false) if c == '*' => self.go(State::Stars(true)),
            State::Stars(true) if c == '{' => {
                self.open.push(Container::Arguments);
                self.go(State::KeyOrEnd)
            }
            State::Stars(_) => Progress::Fail,
            State::Equals(name) if c == '=' => {
                let name = std::mem::take(name);
                self.keyword(name, found)
            }
            State::Equals(_) => Progress::Fail,
            State::Colon => {
                found.arguments(": ");
                self.state = State::Value;
                fits(c == ':')
            }
            State::ItemOrEnd | State::KeyOrEnd | State::After if matches!(c, ']' | '}' | ')') => {
                self.close(c, found)
            }
            State::KeyOrEnd => self.key(c, found),
            State::ItemOrEnd | State::Value => self.value(c, found),
            State::After => {
                let next = match self.open.last_mut() {
                    None => State::Argument,
                    Some(Container::Dict { .. } | Container::Arguments) => State::KeyOrEnd,
                    Some(Container::List { .. }) => State::ItemOrEnd,
                    Some(Container::Tuple { comma, .. }) => {
                        *comma = true;
                        State::ItemOrEnd
                    }
                };
                self.state = next;
                fits(c == ',')
            }
        }
    }

    fn go(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::More
    }

    fn argument(&mut self, c: char, found: &mut Found) -> Progress {
        match c {
            ')' => self.close(c, found),
            '*' => self.go(State::Stars(false)),
            _ if c.is_alphabetic() || c == '_' => self.go(State::Keyword(c.to_string())),
            _ => Progress::Fail,
        }
    }

    fn keyword(&mut self, name: String, found: &mut Found) -> Progress {
        self.separate_argument(found);
        // A name is letters, digits and underscores: none of them is escaped in JSON.
        found.arguments(&format!("\"{name}\": "));
        self.state = State::Value;
        fits(self.keywords.insert(name) && self.keywords.len() <= KEYWORDS_MAX)
    }

    fn separate_argument(&mut self, found: &mut Found) {
        if self.arguments > 0 {
            found.arguments(", ");
        }
        self.arguments += 1;
    }

    fn key(&mut self, c: char, found: &mut Found) -> Progress {
        if !matches!(c, '\'' | '"') {
            return Progress::Fail;
        }
        match self.open.last_mut() {
            Some(Container::Dict { items }) => {
                if *items > 0 {
                    found.arguments(", ");
                }
                *items += 1;
            }
            _ => self.separate_argument(found),
        }
        self.go(State::Text(PythonString::open(c, false, found), true))
    }

    fn value(&mut self, c: char, found: &mut Found) -> Progress {
        if let Some(Container::List { items } | Container::Tuple { items, .. }) = self.open.last_mut() {
            if *items > 0 {
                found.arguments(", ");
            }
            *items += 1;
        }
        match c {
            '\'' | '"' => self.go(State::Text(PythonString::open(c, false, found), false)),
            '[' => self.container(Container::List { items: 0 }, State::ItemOrEnd, found),
            '(' => self.container(Container::Tuple { items: 0, comma: false }, State::ItemOrEnd, found),
            '{' => self.container(Container::Dict { items: 0 }, State::KeyOrEnd, found),
            '-' | '+' | '.' | '0'..='9' => self.go(State::Number(c.to_string())),
            _ if c.is_ascii_alphabetic() => self.go(State::Word(c.to_string())),
            _ => Progress::Fail,
        }
    }

    fn container(&mut self, container: Container, state: State, found: &mut Found) -> Progress {
        found.argument(if matches!(container, Container::Dict { .. }) { '{' } else { '[' });
        self.open.push(container);
        self.state = state;
        fits(self.open.len() <= DEPTH_MAX)
    }

    fn close(&mut self, c: char, found: &mut Found) -> Progress {
        let json = match (self.open.pop(), c) {
            (None, ')') => {
                found.argument('}');
                return Progress::Done;
            }
            (Some(Container::List { .. }), ']') => "]",
            // One value in parentheses without a comma is no tuple.
            (Some(Container::Tuple { items, comma }), ')') if items != 1 || comma => "]",
            (Some(Container::Dict { .. }), '}') => "}",
            (Some(Container::Arguments), '}') => "",
            _ => return Progress::Fail,
        };
        found.arguments(json);
        self.go(State::After)
    }

    fn text_ended(&mut self, key: bool) -> Progress {
        self.go(if key { State::Colon } else { State::After })
    }

    fn scalar_ended(&mut self, json: Option<String>, c: char, found: &mut Found) -> Progress {
        let Some(json) = json else { return Progress::Fail };
        found.arguments(&json);
        self.state = State::After;
        self.push(c, found)
    }
}

fn fits(fits: bool) -> Progress {
    if fits { Progress::More } else { Progress::Fail }
}

/// The JSON of a Python number.
fn number(text: &str) -> Option<String> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    if digits.split('_').any(str::is_empty) || digits.starts_with(['-', '+']) {
        return None;
    }
    let digits = digits.replace('_', "");
    for (prefix, radix) in [("0x", 16), ("0X", 16), ("0o", 8), ("0O", 8), ("0b", 2), ("0B", 2)] {
        if let Some(digits) = digits.strip_prefix(prefix) {
            let unsigned = digits.chars().all(|c| c.is_digit(radix));
            let value = u64::from_str_radix(digits, radix).ok().filter(|_| unsigned)?;
            return Some(format!("{sign}{value}"));
        }
    }
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        // An integer has no leading zero, unless it is all zeros.
        let zeros = digits.trim_start_matches('0').is_empty();
        let value = if zeros { "0" } else { digits.as_str() };
        return (zeros || !digits.starts_with('0')).then(|| format!("{sign}{value}"));
    }
    // What a number has not: the words that a reader of numbers takes for infinity.
    if !digits.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'E' | b'+' | b'-')) {
        return None;
    }
    let value: f64 = digits.parse().ok()?;
    let value = if sign.is_empty() { value } else { -value };
    serde_json::Number::from_f64(value).map(|number| number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_pythons() {
        for (python, json) in [
            ("0", "0"),
            ("007", ""),
            ("00", "0"),
            ("-1", "-1"),
            ("+1", "1"),
            ("1_000", "1000"),
            ("1__0", ""),
            ("_1", ""),
            ("1_", ""),
            ("0x1F", "31"),
            ("-0b101", "-5"),
            ("0x", ""),
            ("0x+1", ""),
            ("1.", "1.0"),
            (".5", "0.5"),
            ("-2.50", "-2.5"),
            ("1e3", "1000.0"),
            ("1E-3", "0.001"),
            ("1e999", ""),
            ("1j", ""),
            ("1+2", ""),
            ("--1", ""),
            (".", ""),
            ("-", ""),
            ("inf", ""),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
        ] {
            assert_eq!(number(python).unwrap_or_default(), json, "{python}");
        }
    }
}
