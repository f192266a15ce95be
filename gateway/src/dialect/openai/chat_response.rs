//! The response of `/v1/chat/completions`, and its stream of chunks.

use bytes::Bytes;
use serde::Serialize;
use uuid::Uuid;

use super::error::error_json;
use crate::answer::Started;
use crate::dialect::{Events, Writer, json};
use crate::domain::{Finish, Piece, Whole};
use crate::fault::Fault;
use crate::service::unix_seconds;

/// Writes answers of one call.
#[derive(Debug)]
pub(crate) struct ChatWriter {
    include_usage: bool,
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    prompt_tokens: usize,
    generated: usize,
}

/// Field order follows the API's own examples. Fields that other servers print as null are printed as null.
#[derive(Serialize)]
struct Response<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: [Choice<'a>; 1],
    usage: Usage,
    system_fingerprint: &'a str,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    message: AssistantMessage<'a>,
    logprobs: Option<()>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct AssistantMessage<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<()>,
    tool_calls: Option<()>,
    name: Option<()>,
    tool_call_id: Option<()>,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [ChunkChoice<'a>],
    /// Absent unless asked for; then null in every chunk but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<ChunkUsage>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ChunkUsage {
    /// Printed as null.
    Later(()),
    Now(Usage),
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the API's names")]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Eos | Finish::StopToken | Finish::StopString(_) | Finish::Grammar | Finish::Stopped => "stop",
        Finish::Length => "length",
    }
}

fn event(json: &str) -> Bytes {
    format!("data: {json}\n\n").into()
}

impl ChatWriter {
    pub(super) fn new(include_usage: bool) -> Self {
        Self {
            include_usage,
            id: format!("chatcmpl-{}", Uuid::new_v4().simple()),
            created: unix_seconds(),
            model: String::new(),
            fingerprint: String::new(),
            prompt_tokens: 0,
            generated: 0,
        }
    }

    fn take(&mut self, started: &Started) {
        self.model.clone_from(&started.model.description.name);
        let mut digest = started.model.description.fingerprint.to_string();
        digest.truncate(12);
        self.fingerprint = format!("fp_{digest}");
        self.prompt_tokens = started.prompt_tokens;
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.generated,
            total_tokens: self.prompt_tokens + self.generated,
        }
    }

    fn chunk(&self, choices: &[ChunkChoice<'_>], usage: ChunkUsage) -> Bytes {
        event(&json(&Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            choices,
            usage: self.include_usage.then_some(usage),
        }))
    }

    fn delta(&self, delta: Delta<'_>, finish_reason: Option<&'static str>) -> Bytes {
        self.chunk(&[ChunkChoice { index: 0, delta, logprobs: None, finish_reason }], ChunkUsage::Later(()))
    }
}

impl Writer for ChatWriter {
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";

    fn begin(&mut self, started: &[Started], events: &mut Events) {
        self.take(&started[0]);
        events.push(self.delta(Delta { role: Some("assistant"), content: Some("") }, None));
    }

    /// Pieces without text say nothing.
    fn piece(&mut self, _choice: usize, piece: &Piece, events: &mut Events) {
        self.generated = piece.generated();
        if !piece.text.is_empty() {
            events.push(self.delta(Delta { role: None, content: Some(&piece.text) }, None));
        }
        if let Some(finish) = &piece.finish {
            events.push(self.delta(Delta::default(), Some(finish_reason(finish))));
        }
    }

    fn end(&mut self, events: &mut Events) {
        if self.include_usage {
            events.push(self.chunk(&[], ChunkUsage::Now(self.usage())));
        }
        events.push(event("[DONE]"));
    }

    fn fault(&mut self, fault: &Fault) -> Bytes {
        event(&error_json(fault))
    }

    fn whole(&mut self, started: &[Started], wholes: &[Whole]) -> Bytes {
        let (started, whole) = (&started[0], &wholes[0]);
        self.take(started);
        self.generated = whole.generated();
        let message = AssistantMessage {
            role: "assistant",
            content: &whole.text,
            refusal: None,
            tool_calls: None,
            name: None,
            tool_call_id: None,
        };
        let finish_reason = finish_reason(&whole.finish);
        json(&Response {
            id: &self.id,
            object: "chat.completion",
            created: self.created,
            model: &self.model,
            choices: [Choice { index: 0, message, logprobs: None, finish_reason }],
            usage: self.usage(),
            system_fingerprint: &self.fingerprint,
        })
        .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::{pieces, started, streamed, whole};

    fn writer(include_usage: bool) -> ChatWriter {
        ChatWriter { id: "chatcmpl-1".into(), created: 7, ..ChatWriter::new(include_usage) }
    }

    const HEAD: &str = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":7,\"model\":\"m\",\
                        \"system_fingerprint\":\"fp_abababababab\",\"choices\":[";

    fn chunk(delta: &str, finish_reason: &str, usage: &str) -> String {
        format!(
            "{HEAD}{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish_reason}}}]{usage}}}\n\n"
        )
    }

    #[test]
    fn a_stream_is_role_contents_finish_and_done() {
        let pieces = pieces(&["Hel", "", "lo"], Finish::Eos);
        let events = streamed(&mut writer(false), &started("m", 3, None), &pieces);
        let expected = [
            chunk("{\"role\":\"assistant\",\"content\":\"\"}", "null", ""),
            chunk("{\"content\":\"Hel\"}", "null", ""),
            chunk("{\"content\":\"lo\"}", "null", ""),
            chunk("{}", "\"stop\"", ""),
            "data: [DONE]\n\n".to_owned(),
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn usage_comes_last_when_asked_for() {
        let pieces = pieces(&["Hel", "lo"], Finish::Length);
        let events = streamed(&mut writer(true), &started("m", 3, None), &pieces);
        let usage = ",\"usage\":null";
        let last = ",\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5}";
        let expected = [
            chunk("{\"role\":\"assistant\",\"content\":\"\"}", "null", usage),
            chunk("{\"content\":\"Hel\"}", "null", usage),
            chunk("{\"content\":\"lo\"}", "null", usage),
            chunk("{}", "\"length\"", usage),
            format!("{HEAD}]{last}}}\n\n"),
            "data: [DONE]\n\n".to_owned(),
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn a_whole_answer() {
        let pieces = pieces(&["Hel", "lo"], Finish::StopString("x".into()));
        let body = writer(false).whole(&[started("m", 3, None)], &[whole(&pieces)]);
        assert_eq!(
            body,
            "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":7,\"model\":\"m\",\"choices\":[{\"index\":0,\
             \"message\":{\"role\":\"assistant\",\"content\":\"Hello\",\"refusal\":null,\"tool_calls\":null,\"name\":null,\
             \"tool_call_id\":null},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":3,\
             \"completion_tokens\":2,\"total_tokens\":5},\"system_fingerprint\":\"fp_abababababab\"}"
        );
    }

    #[test]
    fn a_late_fault_is_an_event_that_clients_raise() {
        let event = writer(false).fault(&Fault::NotReady("gone".into()));
        assert_eq!(
            event,
            "data: {\"error\":{\"message\":\"gone\",\"type\":\"server_error\",\"param\":null,\"code\":\"overloaded\"}}\n\n"
        );
    }
}
