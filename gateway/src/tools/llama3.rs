//! `{"name": "f", "parameters": {…}}; {…}`, as Llama 3 models write calls, sometimes after `<|python_tag|>`.

use std::sync::Arc;

use super::call_object::CallObject;
use super::found::{Found, Progress, literal};

pub(super) const TAG: &str = "<|python_tag|>";

/// Takes calls with semicolons or white space between them.
#[derive(Debug)]
pub(super) struct Llama3 {
    names: Arc<[String]>,
    state: State,
}

#[derive(Debug)]
enum State {
    Start,
    /// So much of the tag has come.
    Tag(usize),
    Object(CallObject),
    /// After a call; true after its semicolon.
    After(bool),
}

impl Llama3 {
    pub(super) fn new(names: Arc<[String]>) -> Self {
        Self { names, state: State::Start }
    }

    pub(super) fn push(&mut self, c: char, found: &mut Found) -> Progress {
        match &mut self.state {
            State::Start if c != '{' => {
                self.state = State::Tag(0);
                self.push(c, found)
            }
            State::Tag(at) => match literal(TAG, at, c) {
                Progress::Done => {
                    self.state = State::Object(CallObject::new(self.names.clone()));
                    Progress::More
                }
                other => other,
            },
            State::Object(object) => match object.push(c, found) {
                Progress::Done => {
                    self.state = State::After(false);
                    Progress::Stands
                }
                other => other,
            },
            State::After(_) if c.is_whitespace() => Progress::More,
            State::After(semicolon @ false) if c == ';' => {
                *semicolon = true;
                Progress::More
            }
            State::Start | State::After(_) if c == '{' => {
                self.state = State::Object(CallObject::new(self.names.clone()));
                self.push(c, found)
            }
            State::Start | State::After(_) => Progress::Over,
        }
    }

    /// Whether the text may end here.
    pub(super) fn may_end(&self) -> bool {
        matches!(self.state, State::After(_))
    }
}
