//! `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, as Hermes and Qwen models write calls.

use std::sync::Arc;

use super::call_object::CallObject;
use super::found::{Found, Progress, literal};

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

/// Takes one call. The closing tag may be missing.
#[derive(Debug)]
pub(super) struct Hermes {
    names: Arc<[String]>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// So much of the opening tag has come.
    Open(usize),
    Object(CallObject),
    /// So much of the closing tag.
    Close(usize),
}

impl Hermes {
    pub(super) fn new(names: Arc<[String]>) -> Self {
        Self { names, state: State::Open(0) }
    }

    pub(super) fn push(&mut self, c: char, found: &mut Found) -> Progress {
        match &mut self.state {
            State::Open(at) => match literal(OPEN, at, c) {
                Progress::Done => {
                    self.state = State::Object(CallObject::new(self.names.clone()));
                    Progress::More
                }
                other => other,
            },
            State::Object(object) => match object.push(c, found) {
                Progress::Done => {
                    self.state = State::Close(0);
                    Progress::Stands
                }
                other => other,
            },
            State::Close(0) if c.is_whitespace() => Progress::More,
            State::Close(at) => match literal(CLOSE, at, c) {
                Progress::Fail => Progress::Over,
                other => other,
            },
        }
    }

    /// Whether the text may end here.
    pub(super) fn may_end(&self) -> bool {
        matches!(self.state, State::Close(_))
    }
}
