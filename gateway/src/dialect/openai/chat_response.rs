//! The response of `/v1/chat/completions`, and its stream of chunks.

use std::sync::Arc;

use bytes::Bytes;
use proto::{PromptReport, Token};
use serde_json::Value;
use uuid::Uuid;

use super::chat_plan::Plan;
use super::chat_reader::{Message, Part, Reader, call_id};
use super::chat_shapes::{
    Arguments, AssistantMessage, Call, CallDelta, Choice, Chunk, ChunkChoice, ChunkUsage, Delta, Function,
    FunctionDelta, Logprobs, MlcDelta, OpenAiDelta, PromptDetails, Response, StopReason, Usage,
};
use super::events::{DONE, event, fault_event};
use super::logprobs::{self, Entry, Spelling};
use super::parameters::StreamUsage;
use crate::answer::Started;
use crate::config::Dialect;
use crate::dialect::{Events, Writer, json};
use crate::domain::{Finish, Piece, Whole};
use crate::fault::Fault;
use crate::models::Model;
use crate::service::unix_seconds;
use crate::timing::Parts;
use crate::tools::Event;

/// Entries of log-probabilities that wait for a chunk to go with.
const ENTRIES_WAITING_MAX: usize = 64;

const ROLE: &str = "assistant";

/// What a call wants of its answer.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) dialect: Dialect,
    /// Choices.
    pub(super) count: usize,
    pub(super) usage: StreamUsage,
    /// Log-probabilities, with so many alternatives.
    pub(super) logprobs: Option<usize>,
    pub(super) spelling: Spelling,
    pub(super) prompt_logprobs: bool,
    /// Token ids of prompt and answer.
    pub(super) token_ids: bool,
    pub(super) reasoning: bool,
    /// The one call as `function_call`.
    pub(super) legacy: bool,
    /// What comes before each choice's own text.
    pub(super) prefix: String,
    /// The model's name in the answer, if it is not the model's own.
    pub(super) model: Option<String>,
    pub(super) plan: Plan,
}

/// Writes answers of one call.
#[derive(Debug)]
pub(crate) struct ChatWriter {
    wanted: Wanted,
    id: String,
    created: u64,
    model_name: String,
    fingerprint: String,
    model: Option<Arc<Model>>,
    prompt_tokens: usize,
    cached_tokens: Option<usize>,
    choices: Vec<Writing>,
    /// For who asked, once the answer is complete.
    timings: Option<Parts>,
}

/// A choice on its way.
#[derive(Debug)]
struct Writing {
    reader: Reader,
    generated: usize,
    /// Calls so far.
    calls: usize,
    entries: Vec<Entry>,
    token_ids: Vec<u32>,
}

impl ChatWriter {
    pub(super) fn new(wanted: Wanted) -> Self {
        Self {
            wanted,
            id: format!("chatcmpl-{}", Uuid::new_v4().simple()),
            created: unix_seconds(),
            model_name: String::new(),
            fingerprint: String::new(),
            model: None,
            prompt_tokens: 0,
            cached_tokens: None,
            choices: Vec::new(),
            timings: None,
        }
    }

    fn is_mlc(&self) -> bool {
        self.wanted.dialect == Dialect::Mlc
    }

    fn take(&mut self, started: &Started) {
        let description = &started.model.description;
        self.model_name = self.wanted.model.clone().unwrap_or_else(|| description.name.clone());
        let mut digest = description.fingerprint.to_string();
        digest.truncate(12);
        self.fingerprint = format!("fp_{digest}");
        self.model = Some(started.model.clone());
        self.prompt_tokens = started.prompt_tokens;
    }

    fn take_prompt(&mut self, report: Option<&PromptReport>) {
        if let Some(report) = report {
            self.cached_tokens.get_or_insert(report.cached_tokens);
        }
    }

    fn usage(&self, generated: usize) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: generated,
            total_tokens: self.prompt_tokens + generated,
            prompt_tokens_details: PromptDetails { cached_tokens: self.cached_tokens.unwrap_or(0) },
            extra: self.is_mlc().then_some(Value::Null),
            timings: self.timings.map(Box::new),
        }
    }

    fn generated(&self) -> usize {
        self.choices.iter().map(|choice| choice.generated).sum()
    }

    fn entry(&self, token: &Token) -> Option<Entry> {
        let top = self.wanted.logprobs?;
        let model = self.model.as_ref()?;
        Some(logprobs::entry(&model.text, token, top, self.wanted.spelling))
    }

    fn finish_reason(&self, finish: &Finish, calls: usize) -> &'static str {
        let tools = self.wanted.plan.form.is_some();
        match finish {
            // With tools, MLC's answers are calls.
            _ if self.is_mlc() && tools => "tool_calls",
            Finish::Length => "length",
            _ if calls > 0 && self.wanted.legacy => "function_call",
            _ if calls > 0 => "tool_calls",
            Finish::Eos | Finish::StopToken | Finish::StopString(_) | Finish::Grammar | Finish::Stopped => {
                "stop"
            }
        }
    }

    // Streams.

    fn chunk(&self, choices: &[ChunkChoice<'_>], usage: Option<ChunkUsage>) -> Bytes {
        event(&Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model_name,
            system_fingerprint: &self.fingerprint,
            choices,
            usage,
        })
    }

    /// A chunk of a choice, with the log-probabilities that wait for one.
    fn choice(
        &mut self,
        index: usize,
        delta: OpenAiDelta<'_>,
        ending: Option<(&'static str, Option<StopReason>)>,
    ) -> Bytes {
        let writing = &mut self.choices[index];
        let (entries, ids) = (std::mem::take(&mut writing.entries), std::mem::take(&mut writing.token_ids));
        let (finish_reason, stop_reason) = ending.map_or((None, None), |(finish, stop)| (Some(finish), stop));
        let delta = if self.is_mlc() {
            Delta::Mlc(MlcDelta {
                content: delta.content.unwrap_or_default(),
                role: ROLE,
                name: (),
                tool_calls: (),
                tool_call_id: (),
                reasoning_content: delta.reasoning_content,
            })
        } else {
            Delta::OpenAi(delta)
        };
        let choice = ChunkChoice {
            index,
            delta,
            logprobs: (!entries.is_empty()).then_some(Logprobs { content: entries, refusal: () }),
            finish_reason,
            stop_reason,
            token_ids: (!ids.is_empty()).then_some(ids),
        };
        let usage = match self.wanted.usage {
            StreamUsage { always: true, .. } => Some(ChunkUsage::Now(self.usage(self.generated()))),
            StreamUsage { at_end, .. } => (at_end || self.is_mlc()).then_some(ChunkUsage::Later(())),
        };
        self.chunk(&[choice], usage)
    }

    fn part(&mut self, index: usize, part: &Part, events: &mut Events) {
        let legacy = self.wanted.legacy;
        let delta = match part {
            Part::Thought(_) if !self.wanted.reasoning => return,
            Part::Thought(text) => OpenAiDelta { reasoning_content: Some(text), ..OpenAiDelta::default() },
            Part::Said(Event::Content(text)) => OpenAiDelta { content: Some(text), ..OpenAiDelta::default() },
            Part::Said(Event::Call { index: call, name }) => {
                self.choices[index].calls += 1;
                let function = FunctionDelta { name: Some(name), arguments: "" };
                if legacy {
                    // The old form has room for one call.
                    if *call > 0 {
                        return;
                    }
                    let delta = OpenAiDelta { function_call: Some(function), ..OpenAiDelta::default() };
                    events.push(self.choice(index, delta, None));
                    return;
                }
                let id = call_id(self.wanted.plan.form);
                let call = CallDelta { index: *call, id: Some(&id), kind: Some("function"), function };
                let delta = OpenAiDelta { tool_calls: Some([call]), ..OpenAiDelta::default() };
                events.push(self.choice(index, delta, None));
                return;
            }
            Part::Said(Event::Arguments { index: call, fragment }) => {
                let function = FunctionDelta { name: None, arguments: fragment };
                if legacy {
                    if *call > 0 {
                        return;
                    }
                    OpenAiDelta { function_call: Some(function), ..OpenAiDelta::default() }
                } else {
                    let call = CallDelta { index: *call, id: None, kind: None, function };
                    OpenAiDelta { tool_calls: Some([call]), ..OpenAiDelta::default() }
                }
            }
        };
        events.push(self.choice(index, delta, None));
    }

    // Answers in one piece.

    fn whole_choice(&self, index: usize, whole: &Whole) -> Choice {
        let plan = &self.wanted.plan;
        let Message { thought, content, calls } = Message::of(&whole.text, plan, false);
        let mut finish_reason = self.finish_reason(&whole.finish, calls.len());
        if self.is_mlc() && finish_reason == "tool_calls" && calls.is_empty() {
            finish_reason = "error";
        }
        let content = format!("{}{content}", self.wanted.prefix);
        let content = if calls.is_empty() || !content.is_empty() { Some(content) } else { None };
        let thinks = self.wanted.reasoning && !thought.is_empty();
        let mut functions = calls
            .into_iter()
            .map(|(name, arguments)| Function { name, arguments: self.arguments(arguments) });
        let (mut tool_calls, mut function_call) = (None, None);
        if self.wanted.legacy {
            function_call = functions.next();
        } else {
            let calls: Vec<Call> = functions
                .map(|function| Call { id: call_id(plan.form), kind: "function", function })
                .collect();
            tool_calls = (!calls.is_empty()).then_some(calls);
        }
        let entries: Vec<Entry> = whole.tokens.iter().filter_map(|token| self.entry(token)).collect();
        Choice {
            index,
            message: AssistantMessage {
                role: ROLE,
                content,
                reasoning_content: thinks.then_some(thought),
                refusal: (),
                tool_calls,
                function_call,
                name: (),
                tool_call_id: (),
            },
            logprobs: self.wanted.logprobs.map(|_| Logprobs { content: entries, refusal: () }),
            finish_reason,
            stop_reason: stop_reason(&whole.finish, whole.tokens.last()),
            token_ids: self.wanted.token_ids.then(|| whole.tokens.iter().map(|token| token.id).collect()),
        }
    }

    fn arguments(&self, text: String) -> Arguments {
        match serde_json::from_str(&text) {
            Ok(object) if self.is_mlc() => Arguments::Object(object),
            _ => Arguments::Text(text),
        }
    }
}

fn stop_reason(finish: &Finish, last: Option<&Token>) -> Option<StopReason> {
    match finish {
        Finish::StopString(text) => Some(StopReason::Text(text.clone())),
        Finish::StopToken => last.map(|token| StopReason::Token(token.id)),
        _ => None,
    }
}

impl Writer for ChatWriter {
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";

    fn begin(&mut self, started: &[Started], events: &mut Events) {
        for started in started {
            self.take(started);
        }
        let raw = self.is_mlc();
        let writing = |_| Writing {
            reader: Reader::new(&self.wanted.plan, raw),
            generated: 0,
            calls: 0,
            entries: Vec::new(),
            token_ids: Vec::new(),
        };
        self.choices = (0..self.wanted.count).map(writing).collect();
        let prefix = self.wanted.prefix.clone();
        for index in 0..self.wanted.count {
            // MLC names the role in every chunk, and so in none of its own.
            if !raw {
                let role = OpenAiDelta { role: Some(ROLE), content: Some(""), ..OpenAiDelta::default() };
                events.push(self.choice(index, role, None));
            }
            if !prefix.is_empty() {
                let echo = OpenAiDelta { content: Some(&prefix), ..OpenAiDelta::default() };
                events.push(self.choice(index, echo, None));
            }
        }
    }

    /// Pieces that say nothing have no chunk.
    fn piece(&mut self, index: usize, piece: &Piece, events: &mut Events) {
        self.take_prompt(piece.token.prompt.as_deref());
        let entry = self.entry(&piece.token);
        let writing = &mut self.choices[index];
        writing.generated = piece.generated();
        writing.entries.extend(entry);
        if self.wanted.token_ids {
            writing.token_ids.push(piece.token.id);
        }
        let mut parts = writing.reader.push(&piece.text);
        if piece.finish.is_some() {
            parts.append(&mut writing.reader.finish());
        }
        for part in &parts {
            self.part(index, part, events);
        }
        if let Some(finish) = &piece.finish {
            let reason = self.finish_reason(finish, self.choices[index].calls);
            let ending = (reason, stop_reason(finish, Some(&piece.token)));
            events.push(self.choice(index, OpenAiDelta::default(), Some(ending)));
        } else if self.choices[index].entries.len() >= ENTRIES_WAITING_MAX {
            events.push(self.choice(index, OpenAiDelta::default(), None));
        }
    }

    fn take_timings(&mut self, parts: &Parts) {
        self.timings = self.wanted.usage.timings.then_some(*parts);
    }

    fn end(&mut self, events: &mut Events) {
        if self.wanted.usage.at_end {
            let usage = ChunkUsage::Now(self.usage(self.generated()));
            events.push(self.chunk(&[], Some(usage)));
        }
        events.push(DONE);
    }

    fn fault(&mut self, fault: &Fault) -> Bytes {
        fault_event(fault)
    }

    fn whole(&mut self, started: &[Started], wholes: &[Whole]) -> Bytes {
        for started in started {
            self.take(started);
        }
        for whole in wholes {
            self.take_prompt(whole.prompt.as_deref());
        }
        let generated = wholes.iter().map(Whole::generated).sum();
        let choices =
            wholes.iter().enumerate().map(|(index, whole)| self.whole_choice(index, whole)).collect();
        let report = wholes.first().and_then(|whole| whole.prompt.as_deref());
        let model = self.model.as_ref().filter(|_| self.wanted.prompt_logprobs);
        let prompt_ids = started.first().filter(|_| self.wanted.token_ids).map(|started| &*started.prompt);
        json(&Response {
            id: &self.id,
            object: "chat.completion",
            created: self.created,
            model: &self.model_name,
            choices,
            usage: self.usage(generated),
            system_fingerprint: &self.fingerprint,
            prompt_logprobs: model.map(|model| logprobs::prompt(&model.text, report)),
            prompt_token_ids: prompt_ids,
        })
        .into()
    }
}
