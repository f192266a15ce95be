//! A call written as a JSON object: `{"name": "f", "arguments": {…}}`.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::found::{Found, Progress};
use super::json_text::{JsonText, Phase};

/// Most characters of a key or a name.
const NAME_CHARS_MAX: usize = 512;

/// Takes one such object character by character. The arguments may come before the name, be called `parameters`, be a
/// string that holds the object, or be left out. Other keys are passed over.
#[derive(Debug)]
pub(super) struct CallObject {
    names: Arc<[String]>,
    json: JsonText,
    part: Part,
    /// The text of the key or value that is read, where it is needed.
    text: String,
    /// The call was found: its name is known.
    named: bool,
    /// The arguments, while the name is not known.
    waiting: String,
    argued: bool,
    /// A key that no call has.
    strange: bool,
}

/// What the next character is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The opening brace, or white space before it.
    Start,
    /// What stands between two fields.
    Between,
    Key,
    /// What stands between a key and its value.
    Colon(Field),
    Value(Field, Kind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Other,
}

/// What a value is, by its first character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Object,
    List,
    Scalar,
}

impl CallObject {
    /// Expects the call of one of these functions.
    pub(super) fn new(names: Arc<[String]>) -> Self {
        Self {
            names,
            json: JsonText::new(),
            part: Part::Start,
            text: String::new(),
            named: false,
            waiting: String::new(),
            argued: false,
            strange: false,
        }
    }

    /// Takes the next character; the object is done with its closing brace.
    pub(super) fn push(&mut self, c: char, found: &mut Found) -> Progress {
        if !self.json.push(c) {
            return Progress::Fail;
        }
        let fits = match self.part {
            Part::Start => {
                if c == '{' {
                    self.part = Part::Between;
                }
                c == '{' || *self.json.phase() == Phase::Value
            }
            Part::Between => {
                if matches!(self.json.phase(), Phase::Text(true, _)) {
                    self.part = Part::Key;
                    self.text = c.to_string();
                }
                true
            }
            Part::Key => self.key(c),
            Part::Colon(field) => {
                if matches!(self.json.phase(), Phase::Colon | Phase::Value) {
                    true
                } else {
                    self.value_begins(field, c, found)
                }
            }
            Part::Value(field, kind) => self.value(field, kind, c, found),
        };
        match (fits, self.json.phase()) {
            (false, _) => Progress::Fail,
            (true, Phase::Done) => self.done(found),
            (true, _) => Progress::More,
        }
    }

    fn key(&mut self, c: char) -> bool {
        self.text.push(c);
        if *self.json.phase() == Phase::Colon {
            let field = match unquoted(&self.text).as_deref() {
                Some("name") => Field::Name,
                Some("arguments" | "parameters") => Field::Arguments,
                Some("id" | "type") => Field::Other,
                _ => {
                    self.strange = true;
                    Field::Other
                }
            };
            self.part = Part::Colon(field);
        }
        self.text.len() <= NAME_CHARS_MAX
    }

    fn value_begins(&mut self, field: Field, c: char, found: &mut Found) -> bool {
        let kind = match c {
            '"' => Kind::Text,
            '{' => Kind::Object,
            '[' => Kind::List,
            _ => Kind::Scalar,
        };
        let fits = match field {
            Field::Name => kind == Kind::Text && !self.named,
            Field::Arguments => kind != Kind::List && !self.argued,
            Field::Other => true,
        };
        self.part = Part::Value(field, kind);
        self.text.clear();
        self.argued |= field == Field::Arguments;
        fits && self.take(field, kind, c, found)
    }

    fn value(&mut self, field: Field, kind: Kind, c: char, found: &mut Found) -> bool {
        let ended =
            self.json.depth() <= 1 && !matches!(self.json.phase(), Phase::Text(..) | Phase::Scalar(_));
        // What ends a number or a word is no part of it.
        let part_of_it = !(ended && kind == Kind::Scalar);
        if part_of_it && !self.take(field, kind, c, found) {
            return false;
        }
        if !ended {
            return true;
        }
        self.part = Part::Between;
        match (field, kind) {
            (Field::Name, _) => match unquoted(&self.text) {
                Some(name) if self.names.contains(&name) => {
                    self.named = true;
                    found.call(&name);
                    found.arguments(&std::mem::take(&mut self.waiting));
                    true
                }
                _ => false,
            },
            (Field::Arguments, Kind::Text) => match unquoted(&self.text) {
                Some(text) if is_object(&text) => {
                    self.argue(&text, found);
                    true
                }
                _ => false,
            },
            (Field::Arguments, Kind::Scalar) if self.text == "null" => {
                self.argue("{}", found);
                true
            }
            (Field::Arguments, Kind::Scalar) => false,
            _ => true,
        }
    }

    /// Takes a character of a value.
    fn take(&mut self, field: Field, kind: Kind, c: char, found: &mut Found) -> bool {
        match (field, kind) {
            (Field::Other, _) => true,
            (Field::Arguments, Kind::Object) => {
                self.argue(c.encode_utf8(&mut [0; 4]), found);
                true
            }
            (Field::Arguments, _) => {
                self.text.push(c);
                true
            }
            (Field::Name, _) => {
                self.text.push(c);
                self.text.len() <= NAME_CHARS_MAX
            }
        }
    }

    fn argue(&mut self, fragment: &str, found: &mut Found) {
        if self.named { found.arguments(fragment) } else { self.waiting.push_str(fragment) }
    }

    fn done(&mut self, found: &mut Found) -> Progress {
        if !self.named || (!self.argued && self.strange) {
            return Progress::Fail;
        }
        if !self.argued {
            found.arguments("{}");
        }
        Progress::Done
    }
}

/// The string that a JSON text is.
fn unquoted(text: &str) -> Option<String> {
    serde_json::from_str(text).ok()
}

/// Whether the text is that of a JSON object.
fn is_object(text: &str) -> bool {
    serde_json::from_str::<Map<String, Value>>(text).is_ok()
}
