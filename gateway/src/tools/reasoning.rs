//! What a model thinks, apart from what it says: `<think>…</think>` before its answer.

use super::found::{Progress, literal};

/// The mark before what a model thinks.
pub(super) const OPEN: &str = "<think>";
/// The mark after it.
pub(super) const CLOSE: &str = "</think>";

/// White space at the borders longer than this, in bytes, is part of the text.
const SPACE_BYTES_MAX: usize = 64;

/// Where a model's text begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// The model does not mark what it thinks, or has done with it.
    No,
    /// The text may begin with the mark.
    May,
    /// The prompt ends with the mark.
    Begun,
}

impl Thinking {
    /// Whether a chat template knows of thoughts.
    pub fn is_marked_by(template: &str) -> bool {
        template.contains(CLOSE)
    }

    /// After a prompt that a template made.
    pub fn after(prompt: &str) -> Self {
        let prompt = prompt.trim_end();
        if prompt.ends_with(OPEN) {
            Self::Begun
        } else if prompt.ends_with(CLOSE) {
            Self::No
        } else {
            Self::May
        }
    }

    /// After the beginning of an answer that is to go on.
    pub fn within(answer: &str) -> Self {
        if answer.trim_start().starts_with(OPEN) && !answer.contains(CLOSE) { Self::Begun } else { Self::No }
    }
}

/// A stretch of a model's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// What it thinks.
    Thought(String),
    /// What it says.
    Aloud(String),
}

/// Takes a text apart that comes in pieces. What it gives does not depend on how the text is cut. White space inside
/// the marks, and after the last, belongs to the marks.
#[derive(Debug)]
pub struct Reasoning {
    state: State,
    /// White space, and what there is of a mark: not yet certain to be part of the text.
    held: String,
}

#[derive(Debug)]
enum State {
    /// Before the first mark, of which so much has come.
    Before(usize),
    /// After the first mark, where white space is not part of the text.
    Begun,
    /// Within, with so much of the second mark.
    Within(usize),
    /// After the second mark, where white space is not part of the text.
    Ended,
    /// What remains is said aloud.
    Aloud,
}

impl Reasoning {
    /// At the beginning of a text.
    pub fn new(thinking: Thinking) -> Self {
        let state = match thinking {
            Thinking::No => State::Aloud,
            Thinking::May => State::Before(0),
            Thinking::Begun => State::Begun,
        };
        Self { state, held: String::new() }
    }

    /// Takes more text, and appends what is now certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Said>) {
        for (at, c) in text.char_indices() {
            if matches!(self.state, State::Aloud) {
                say(out, &text[at..]);
                return;
            }
            self.take(c, out);
        }
    }

    /// No more text comes: appends what was held back.
    pub fn finish(&mut self, out: &mut Vec<Said>) {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Within(_) => think(out, &held),
            State::Before(_) => say(out, &held),
            State::Begun | State::Ended | State::Aloud => {}
        }
    }

    fn take(&mut self, c: char, out: &mut Vec<Said>) {
        match &mut self.state {
            State::Before(at) => {
                self.held.push(c);
                if *at == 0 && c.is_whitespace() && self.held.len() <= SPACE_BYTES_MAX {
                    return;
                }
                match literal(OPEN, at, c) {
                    Progress::More => {}
                    Progress::Done => {
                        self.held.clear();
                        self.state = State::Begun;
                    }
                    _ => {
                        self.state = State::Aloud;
                        say(out, &std::mem::take(&mut self.held));
                    }
                }
            }
            State::Begun if c.is_whitespace() => self.border(c, out),
            State::Begun => {
                self.held.clear();
                self.state = State::Within(0);
                self.take(c, out);
            }
            State::Within(at) => match literal(CLOSE, at, c) {
                Progress::More => self.held.push(c),
                Progress::Done => {
                    self.held.clear();
                    self.state = State::Ended;
                }
                _ => self.thought(c, out),
            },
            State::Ended if c.is_whitespace() => self.border(c, out),
            State::Ended | State::Aloud => {
                self.held.clear();
                self.state = State::Aloud;
                say(out, c.encode_utf8(&mut [0; 4]));
            }
        }
    }

    /// White space after a mark.
    fn border(&mut self, c: char, out: &mut Vec<Said>) {
        self.held.push(c);
        if self.held.len() <= SPACE_BYTES_MAX {
            return;
        }
        let held = std::mem::take(&mut self.held);
        if matches!(self.state, State::Begun) {
            self.state = State::Within(0);
            think(out, &held);
        } else {
            self.state = State::Aloud;
            say(out, &held);
        }
    }

    /// A character that does not go on with the second mark.
    fn thought(&mut self, c: char, out: &mut Vec<Said>) {
        // The mark's first character is nowhere else in it, so only this one can begin it anew.
        let again = CLOSE.starts_with(c);
        self.state = State::Within(usize::from(again));
        if c.is_whitespace()
            && self.held.chars().all(char::is_whitespace)
            && self.held.len() < SPACE_BYTES_MAX
        {
            self.held.push(c);
            return;
        }
        if c.is_whitespace() || again {
            think(out, &std::mem::replace(&mut self.held, c.to_string()));
        } else {
            self.held.push(c);
            think(out, &std::mem::take(&mut self.held));
        }
    }
}

fn think(out: &mut Vec<Said>, text: &str) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(Said::Thought(thought)) => thought.push_str(text),
        _ => out.push(Said::Thought(text.to_owned())),
    }
}

fn say(out: &mut Vec<Said>, text: &str) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(Said::Aloud(aloud)) => aloud.push_str(text),
        _ => out.push(Said::Aloud(text.to_owned())),
    }
}
