//! The response of `/generate`, and its stream of objects each ended by NUL.

use bytes::Bytes;
use serde::Serialize;

use crate::answer::Started;
use crate::dialect::{Events, Writer, json, mindie};
use crate::domain::{Piece, Whole};
use crate::fault::Fault;

/// Writes answers of one call.
#[derive(Debug, Default)]
pub(crate) struct VllmWriter {
    /// Something was sent.
    begun: bool,
}

#[derive(Serialize)]
struct Texts<'a> {
    /// One per sequence.
    text: [&'a str; 1],
}

fn event(mut json: String) -> Bytes {
    json.push('\0');
    json.into()
}

impl Writer for VllmWriter {
    const STREAM_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, _started: &[Started], _events: &mut Events) {}

    /// Pieces without text say nothing here, but an answer without any text is still one event.
    fn piece(&mut self, _choice: usize, piece: &Piece, events: &mut Events) {
        let only = piece.finish.is_some() && !self.begun;
        if !piece.text.is_empty() || only {
            self.begun = true;
            events.push(event(json(&Texts { text: [&piece.text] })));
        }
    }

    fn end(&mut self, _events: &mut Events) {}

    fn fault(&mut self, fault: &Fault) -> Bytes {
        event(mindie::error_json(fault))
    }

    /// Prompt, one blank, output.
    fn whole(&mut self, started: &[Started], wholes: &[Whole]) -> Bytes {
        let (started, whole) = (&started[0], &wholes[0]);
        let prompt = started.prompt_text.as_deref().unwrap_or_default();
        json(&Texts { text: [&format!("{prompt} {}", whole.text)] }).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::{pieces, started, streamed, whole};
    use crate::domain::Finish;

    #[test]
    fn a_stream_is_objects_ended_by_nul() {
        let pieces = pieces(&["'m", "", " the", ""], Finish::Eos);
        let events = streamed(&mut VllmWriter::default(), &started("m", 1, None), &pieces);
        assert_eq!(events, ["{\"text\":[\"'m\"]}\0", "{\"text\":[\" the\"]}\0"]);
    }

    #[test]
    fn an_answer_without_text_is_one_event() {
        let pieces = pieces(&["", ""], Finish::Eos);
        let events = streamed(&mut VllmWriter::default(), &started("m", 1, None), &pieces);
        assert_eq!(events, ["{\"text\":[\"\"]}\0"]);
    }

    #[test]
    fn a_whole_answer_repeats_the_prompt() {
        let pieces = pieces(&[" am", " a"], Finish::Length);
        let started = started("m", 1, Some("My name is Olivier and I"));
        let body = VllmWriter::default().whole(&[started], &[whole(&pieces)]);
        assert_eq!(body, "{\"text\":[\"My name is Olivier and I  am a\"]}");
    }

    #[test]
    fn a_late_fault_is_an_object_too() {
        let event = VllmWriter::default().fault(&Fault::NotReady("gone".into()));
        assert_eq!(event, "{\"error\":\"gone\",\"error_type\":\"Service Unavailable\"}\0");
    }
}
