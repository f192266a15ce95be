//! `[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]`, as Mistral models write calls, and the form of the newer ones:
//! `[TOOL_CALLS]f[ARGS]{…}`.

use std::sync::Arc;

use super::call_object::CallObject;
use super::found::{Found, Progress, literal};
use super::json_text::{JsonText, Phase};

pub(super) const OPEN: &str = "[TOOL_CALLS]";
pub(super) const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

/// Most characters of a call's id.
const ID_CHARS_MAX: usize = 256;

/// Takes a list of calls, or one call of the newer form. The list's end may be missing.
#[derive(Debug)]
pub(super) struct Mistral {
    names: Arc<[String]>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// So much of the opening mark has come.
    Open(usize),
    /// After it.
    Opened,
    /// Within the list, before a call.
    Item,
    Object(CallObject, Within),
    /// Within the list, after a call.
    After,
    Name(String),
    /// Within a mark after the name.
    Mark(String, String),
    /// Within the call's id, after so many characters.
    Id(String, usize),
    /// After the mark of arguments, with the name.
    Args(String),
    Json(JsonText),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Within {
    List,
    Nothing,
}

impl Mistral {
    pub(super) fn new(names: Arc<[String]>) -> Self {
        Self { names, state: State::Open(0) }
    }

    pub(super) fn push(&mut self, c: char, found: &mut Found) -> Progress {
        match &mut self.state {
            State::Open(at) => match literal(OPEN, at, c) {
                Progress::Done => self.go(State::Opened),
                other => other,
            },
            State::Opened | State::Item | State::After | State::Args(_) if c.is_whitespace() => {
                Progress::More
            }
            State::Opened if c == '[' => self.go(State::Item),
            State::Opened if c == '{' => self.object(Within::Nothing, c, found),
            State::Opened => {
                self.state = State::Name(String::new());
                self.push(c, found)
            }
            State::Item => self.object(Within::List, c, found),
            State::Object(object, within) => match (object.push(c, found), *within) {
                (Progress::Done, Within::List) => {
                    self.state = State::After;
                    Progress::Stands
                }
                (other, _) => other,
            },
            State::After if c == ',' => self.go(State::Item),
            State::After if c == ']' => Progress::Done,
            State::After => Progress::Over,
            State::Name(name) => {
                let known = self.names.contains(name);
                match c {
                    '[' if known => {
                        let name = std::mem::take(name);
                        self.go(State::Mark(name, c.to_string()))
                    }
                    '{' if known => {
                        let name = std::mem::take(name);
                        self.arguments(&name, c, found)
                    }
                    _ => {
                        name.push(c);
                        fits(self.names.iter().any(|known| known.starts_with(name.as_str())))
                    }
                }
            }
            State::Mark(name, mark) => {
                mark.push(c);
                match mark.as_str() {
                    ARGS => {
                        let name = std::mem::take(name);
                        self.go(State::Args(name))
                    }
                    CALL_ID => {
                        let name = std::mem::take(name);
                        self.go(State::Id(name, 0))
                    }
                    part => fits([ARGS, CALL_ID].iter().any(|mark| mark.starts_with(part))),
                }
            }
            State::Id(name, _) if c == '[' => {
                let name = std::mem::take(name);
                self.go(State::Mark(name, c.to_string()))
            }
            State::Id(_, count) => {
                *count += 1;
                fits(*count <= ID_CHARS_MAX)
            }
            State::Args(name) => {
                let name = std::mem::take(name);
                self.arguments(&name, c, found)
            }
            State::Json(json) => {
                found.argument(c);
                match (json.push(c), json.phase()) {
                    (false, _) => Progress::Fail,
                    (true, Phase::Done) => Progress::Done,
                    (true, _) => Progress::More,
                }
            }
        }
    }

    fn go(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::More
    }

    fn object(&mut self, within: Within, c: char, found: &mut Found) -> Progress {
        self.state = State::Object(CallObject::new(self.names.clone()), within);
        self.push(c, found)
    }

    /// The arguments of the newer form begin.
    fn arguments(&mut self, name: &str, c: char, found: &mut Found) -> Progress {
        if c != '{' {
            return Progress::Fail;
        }
        found.call(name);
        self.state = State::Json(JsonText::new());
        self.push(c, found)
    }

    /// Whether the text may end here.
    pub(super) fn may_end(&self) -> bool {
        matches!(self.state, State::After)
    }
}

fn fits(fits: bool) -> Progress {
    if fits { Progress::More } else { Progress::Fail }
}
