//! What a model's text says: thoughts, content, calls.

use super::chat_plan::Plan;
use crate::tools::{Calls, Event, Form, Reasoning, Said};

/// Takes a choice's text apart as it comes. Whoever reads it in pieces and whoever reads it whole get the same.
#[derive(Debug)]
pub(super) struct Reader {
    reasoning: Reasoning,
    /// `None` where all that is said is content.
    calls: Option<Calls>,
}

/// More of what is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Thought(String),
    Said(Event),
}

impl Reader {
    /// For an answer of this plan; with `raw` calls stay in the text.
    pub(super) fn new(plan: &Plan, raw: bool) -> Self {
        let form = plan.form.filter(|_| !raw);
        Self {
            reasoning: Reasoning::new(plan.thinking),
            calls: form.map(|form| Calls::new(form, plan.names.clone(), plan.trust)),
        }
    }

    /// Takes more text.
    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        let mut said = Vec::new();
        self.reasoning.push(text, &mut said);
        self.read(said)
    }

    /// No more text comes.
    pub(super) fn finish(&mut self) -> Vec<Part> {
        let mut said = Vec::new();
        self.reasoning.finish(&mut said);
        let mut parts = self.read(said);
        if let Some(calls) = &mut self.calls {
            let mut events = Vec::new();
            calls.finish(&mut events);
            parts.extend(events.into_iter().map(Part::Said));
        }
        parts
    }

    fn read(&mut self, said: Vec<Said>) -> Vec<Part> {
        let mut parts = Vec::new();
        for said in said {
            match (said, &mut self.calls) {
                (Said::Thought(text), _) => parts.push(Part::Thought(text)),
                (Said::Aloud(text), None) => parts.push(Part::Said(Event::Content(text))),
                (Said::Aloud(text), Some(calls)) => {
                    let mut events = Vec::new();
                    calls.push(&text, &mut events);
                    parts.extend(events.into_iter().map(Part::Said));
                }
            }
        }
        parts
    }
}

/// All that a text says.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Message {
    pub(super) thought: String,
    pub(super) content: String,
    /// Names, and arguments as JSON text.
    pub(super) calls: Vec<(String, String)>,
}

impl Message {
    /// Reads a whole text.
    pub(super) fn of(text: &str, plan: &Plan, raw: bool) -> Self {
        let mut reader = Reader::new(plan, raw);
        let mut parts = reader.push(text);
        parts.append(&mut reader.finish());
        let mut message = Self::default();
        for part in parts {
            match part {
                Part::Thought(text) => message.thought.push_str(&text),
                Part::Said(Event::Content(text)) => message.content.push_str(&text),
                Part::Said(Event::Call { name, .. }) => message.calls.push((name, String::new())),
                Part::Said(Event::Arguments { index, fragment }) => {
                    message.calls[index].1.push_str(&fragment);
                }
            }
        }
        message
    }
}

/// A name for a call that no other has. Mistral's templates take nine letters and digits.
pub(super) fn call_id(form: Option<Form>) -> String {
    let random = uuid::Uuid::new_v4().simple().to_string();
    match form {
        Some(Form::Mistral | Form::MistralArgs) => random[..9].to_owned(),
        _ => format!("call_{}", &random[..24]),
    }
}
