//! Tools that a model may call, as text: how calls are written, found in a model's text, and asked for.
//!
//! Models write calls in a [`Form`] of their own, which their chat template tells. [`Calls`] finds calls in text that
//! comes in pieces, [`Reasoning`] takes apart what a model thinks and what it says, `grammar` writes down what
//! a model may write when it must call, and `prompt` tells a model of tools whose template does not.
//! All of it is text in and text out, and none of it depends on how the text is cut into pieces.

mod call_object;
mod found;
mod grammar;
mod hermes;
mod json_text;
mod llama3;
mod mistral;
mod prompt;
mod python_call;
mod python_string;
mod pythonic;
mod reasoning;
mod schema;
mod tool;

#[cfg(test)]
mod grammar_tests;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use self::found::{Found, Progress};
pub use self::grammar::{Content, Outline};
pub use self::prompt::{told, without_system};
pub use self::reasoning::{Reasoning, Said, Thinking};
pub use self::tool::Tool;

/// A call longer than this, in bytes, is content.
const CALL_BYTES_MAX: usize = 1 << 20;

/// White space around calls longer than this, in bytes, is content.
const SPACE_BYTES_MAX: usize = 64;

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`.
    Hermes,
    /// `{"name": "f", "parameters": {…}}; {…}`.
    Llama3Json,
    /// `[f(a='x'), g(b=1)]`.
    Pythonic,
    /// `[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]`.
    Mistral,
    /// `[TOOL_CALLS]f[ARGS]{…}`, of newer Mistral models.
    MistralArgs,
}

impl Form {
    /// The form that a chat template tells, if it knows of tools and the form is one of these.
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |word: &str| template.contains(word);
        if !has("tools") {
            return None;
        }
        if has(mistral::OPEN) {
            return Some(if has(mistral::ARGS) { Self::MistralArgs } else { Self::Mistral });
        }
        if has(hermes::OPEN) {
            return Some(Self::Hermes);
        }
        // The templates of Llama 3.2 and 4 spell the form out.
        if has("<|python_start|>") || has("[func_name1(") {
            return Some(Self::Pythonic);
        }
        (has(llama3::TAG) || has("\"parameters\":")).then_some(Self::Llama3Json)
    }

    /// The special token before a call, whose text must not be left out.
    pub fn mark(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some(hermes::OPEN),
            Self::Llama3Json => Some(llama3::TAG),
            Self::Pythonic => None,
            Self::Mistral | Self::MistralArgs => Some(mistral::OPEN),
        }
    }

    /// Where calls of this form may begin.
    fn may_begin(self, c: char, place: Place) -> bool {
        match self {
            Self::Hermes => c == '<',
            Self::Llama3Json => c == '<' || (c == '{' && place == Place::Alone),
            Self::Pythonic => place == Place::Alone && !c.is_whitespace(),
            Self::Mistral | Self::MistralArgs => c == '[',
        }
    }
}

/// Where in a text a character stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nothing but calls and white space come before it.
    Alone,
    /// After other text.
    Within,
}

/// Something that a model's text says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// More of what it says to the user.
    Content(String),
    /// A call.
    Call {
        /// Counts calls from 0.
        index: usize,
        /// The function.
        name: String,
    },
    /// More of a call's arguments. All of a call's fragments in a row are one JSON object, unless the text was cut
    /// within it; then [`Calls`] was told to be [`Trust::Forced`].
    Arguments {
        /// The call.
        index: usize,
        /// JSON text.
        fragment: String,
    },
}

/// Whether a call may come to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// It may: a call is held until it is complete, and what turns out to be none is content.
    Free,
    /// A grammar sees to it that it does not: arguments go out as they come.
    Forced,
}

/// Finds calls in a text that comes in pieces. What it gives does not depend on how the text is cut, but for
/// the borders of contents and fragments, and nothing of a text that is no call is lost or given twice. White space
/// between calls, and between other text and a call, belongs to the calls.
#[derive(Debug)]
pub struct Calls {
    form: Form,
    names: Arc<[String]>,
    trust: Trust,
    place: Place,
    /// A call was given, and no content after it.
    after_call: bool,
    /// White space that belongs to a call if one comes next.
    space: String,
    /// What may be a call.
    recogniser: Option<Recogniser>,
    /// The text that the recogniser has taken and that would be content if it failed.
    held: String,
    /// The recogniser's last call was given before it was complete.
    begun: bool,
    found: Found,
}

#[derive(Debug)]
enum Recogniser {
    Hermes(hermes::Hermes),
    Llama3(llama3::Llama3),
    Pythonic(pythonic::Pythonic),
    Mistral(mistral::Mistral),
}

impl Recogniser {
    fn new(form: Form, names: Arc<[String]>) -> Self {
        match form {
            Form::Hermes => Self::Hermes(hermes::Hermes::new(names)),
            Form::Llama3Json => Self::Llama3(llama3::Llama3::new(names)),
            Form::Pythonic => Self::Pythonic(pythonic::Pythonic::new(names)),
            Form::Mistral | Form::MistralArgs => Self::Mistral(mistral::Mistral::new(names)),
        }
    }

    fn push(&mut self, c: char, found: &mut Found) -> Progress {
        match self {
            Self::Hermes(hermes) => hermes.push(c, found),
            Self::Llama3(llama3) => llama3.push(c, found),
            Self::Pythonic(pythonic) => pythonic.push(c, found),
            Self::Mistral(mistral) => mistral.push(c, found),
        }
    }

    fn may_end(&self) -> bool {
        match self {
            Self::Hermes(hermes) => hermes.may_end(),
            Self::Llama3(llama3) => llama3.may_end(),
            Self::Pythonic(pythonic) => pythonic.may_end(),
            Self::Mistral(mistral) => mistral.may_end(),
        }
    }
}

impl Calls {
    /// For calls of these functions; a call of another one is content.
    pub fn new(form: Form, names: Arc<[String]>, trust: Trust) -> Self {
        Self {
            form,
            names,
            trust,
            place: Place::Alone,
            after_call: false,
            space: String::new(),
            recogniser: None,
            held: String::new(),
            begun: false,
            found: Found::default(),
        }
    }

    /// Takes more text, and appends what is now certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Event>) {
        let mut again = Vec::new();
        for c in text.chars() {
            again.push(c);
            self.drain(&mut again, out);
        }
    }

    /// No more text comes: appends what was held back.
    pub fn finish(&mut self, out: &mut Vec<Event>) {
        let mut again = Vec::new();
        while let Some(recogniser) = self.recogniser.take() {
            if recogniser.may_end() {
                self.stands(out);
            } else if self.begun {
                // A call that was cut: what is left of it is neither arguments nor content.
                self.held.clear();
            } else {
                self.fails(&mut again, out);
                self.drain(&mut again, out);
            }
        }
        if !self.after_call {
            self.give_space(out);
        }
        self.space.clear();
    }

    /// Takes the characters of a stack, the last first; what comes to nothing is put back onto it.
    fn drain(&mut self, again: &mut Vec<char>, out: &mut Vec<Event>) {
        while let Some(c) = again.pop() {
            if self.recogniser.is_none() && !self.form.may_begin(c, self.place) {
                self.content(c, out);
                continue;
            }
            self.held.push(c);
            let recogniser =
                self.recogniser.get_or_insert_with(|| Recogniser::new(self.form, self.names.clone()));
            let mut progress = recogniser.push(c, &mut self.found);
            if self.trust == Trust::Free && self.held.len() > CALL_BYTES_MAX && progress == Progress::More {
                progress = Progress::Fail;
            }
            match progress {
                Progress::More => {
                    if self.trust == Trust::Forced && !self.found.is_empty() {
                        self.stands(out);
                        self.begun = true;
                    }
                }
                Progress::Stands => self.stands(out),
                Progress::Done => {
                    self.stands(out);
                    self.recogniser = None;
                }
                Progress::Over => {
                    self.recogniser = None;
                    again.extend(std::mem::take(&mut self.held).chars().rev());
                }
                Progress::Fail => {
                    self.recogniser = None;
                    self.fails(again, out);
                }
            }
        }
    }

    /// What was found so far goes out.
    fn stands(&mut self, out: &mut Vec<Event>) {
        if !self.found.is_empty() {
            self.space.clear();
            self.after_call = true;
        }
        self.held.clear();
        self.begun = false;
        self.found.give(out);
    }

    /// What was held is no call: its first character is content, and the others are looked at again.
    fn fails(&mut self, again: &mut Vec<char>, out: &mut Vec<Event>) {
        self.found.forget();
        self.begun = false;
        let held = std::mem::take(&mut self.held);
        let mut chars = held.chars();
        if let Some(first) = chars.next() {
            self.content(first, out);
        }
        again.extend(chars.rev());
    }

    fn content(&mut self, c: char, out: &mut Vec<Event>) {
        if c.is_whitespace() {
            self.space.push(c);
            if self.space.len() <= SPACE_BYTES_MAX {
                return;
            }
            self.give_space(out);
        } else {
            self.give_space(out);
            self.place = Place::Within;
            add_content(out, c.encode_utf8(&mut [0; 4]));
        }
        self.after_call = false;
    }

    fn give_space(&mut self, out: &mut Vec<Event>) {
        add_content(out, &std::mem::take(&mut self.space));
    }
}

/// Appends to the last event, if that is content.
fn add_content(events: &mut Vec<Event>, text: &str) {
    match events.last_mut() {
        _ if text.is_empty() => {}
        Some(Event::Content(content)) => content.push_str(text),
        _ => events.push(Event::Content(text.to_owned())),
    }
}
