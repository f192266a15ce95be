//! `[f(a='x'), g(b=1)]`, as some Llama models write calls, and MLC's forms of the same: one call without the list, and
//! a list of strings with a call in each.

use std::sync::Arc;

use super::found::{Found, Progress, literal};
use super::python_call::PythonCall;

const OPEN: &str = "<|python_start|>";
const CLOSE: &str = "<|python_end|>";

/// Takes a list of calls, whose end may be missing, or calls in a row up to the end of the text.
#[derive(Debug)]
pub(super) struct Pythonic {
    names: Arc<[String]>,
    /// The mark before the list came.
    marked: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    Start,
    /// So much of the mark before the list has come.
    Open(usize),
    /// After that.
    Opened,
    /// Within the list, before a call; true after a comma.
    Item(bool),
    Call(PythonCall, Outer),
    Quoted(Quoted),
    /// After a call.
    After(Outer),
    /// After the list: so much of the mark has come.
    Close(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outer {
    List,
    Nothing,
}

/// A call in a string.
#[derive(Debug)]
struct Quoted {
    call: PythonCall,
    quote: char,
    /// After a backslash.
    slash: bool,
    /// The call is complete.
    complete: bool,
}

impl Pythonic {
    pub(super) fn new(names: Arc<[String]>) -> Self {
        Self { names, marked: false, state: State::Start }
    }

    pub(super) fn push(&mut self, c: char, found: &mut Found) -> Progress {
        match &mut self.state {
            State::Call(call, outer) => match call.push(c, found) {
                Progress::Done => {
                    let outer = *outer;
                    self.go(State::After(outer))
                }
                other => other,
            },
            State::Quoted(quoted) => match quoted.push(c, found) {
                Progress::Done => self.go(State::After(Outer::List)),
                other => other,
            },
            State::Open(at) => match literal(OPEN, at, c) {
                Progress::Done => {
                    self.marked = true;
                    self.go(State::Opened)
                }
                other => other,
            },
            State::Close(at) if *at > 0 || !c.is_whitespace() => match literal(CLOSE, at, c) {
                Progress::Fail => Progress::Over,
                other => other,
            },
            _ if c.is_whitespace() => Progress::More,
            State::Start if c == '<' => {
                self.state = State::Open(0);
                self.push(c, found)
            }
            State::Start | State::Opened if c == '[' => self.go(State::Item(false)),
            State::Item(false) if c == ']' => Progress::Fail,
            State::Item(_) | State::After(Outer::List) if c == ']' => {
                if self.marked {
                    self.state = State::Close(0);
                    return Progress::Stands;
                }
                Progress::Done
            }
            State::Item(_) if matches!(c, '\'' | '"') => {
                let call = PythonCall::new(self.names.clone());
                self.go(State::Quoted(Quoted { call, quote: c, slash: false, complete: false }))
            }
            State::Item(_) => self.call(Outer::List, c, found),
            State::After(Outer::List) if c == ',' => self.go(State::Item(true)),
            State::After(Outer::Nothing) if matches!(c, ',' | ';') => Progress::More,
            State::Start | State::After(Outer::Nothing) => self.call(Outer::Nothing, c, found),
            State::Opened | State::After(Outer::List) | State::Close(_) => Progress::Fail,
        }
    }

    fn go(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::More
    }

    fn call(&mut self, outer: Outer, c: char, found: &mut Found) -> Progress {
        self.state = State::Call(PythonCall::new(self.names.clone()), outer);
        self.push(c, found)
    }

    /// Whether the text may end here.
    pub(super) fn may_end(&self) -> bool {
        matches!(self.state, State::After(_) | State::Close(_))
    }
}

impl Quoted {
    /// Takes the next character of the string; done with its closing quote.
    fn push(&mut self, c: char, found: &mut Found) -> Progress {
        if self.slash {
            self.slash = false;
            return match c {
                '\\' | '\'' | '"' => self.inner(c, found),
                'n' => self.inner('\n', found),
                't' => self.inner('\t', found),
                // Within the string, an escape of the string in the string.
                _ => match self.inner('\\', found) {
                    Progress::More => self.inner(c, found),
                    other => other,
                },
            };
        }
        if c == '\\' {
            self.slash = true;
            return Progress::More;
        }
        if c == self.quote {
            return if self.complete { Progress::Done } else { Progress::Fail };
        }
        self.inner(c, found)
    }

    fn inner(&mut self, c: char, found: &mut Found) -> Progress {
        if self.complete {
            return if c.is_whitespace() { Progress::More } else { Progress::Fail };
        }
        match self.call.push(c, found) {
            Progress::Done => {
                self.complete = true;
                Progress::More
            }
            other => other,
        }
    }
}
