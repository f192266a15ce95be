//! The response of `/generate`, and its stream of objects.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::Serialize;

use crate::Config;
use crate::answer::Started;
use crate::config::Delimiter;
use crate::dialect::{Events, Writer, json, mindie};
use crate::domain::{Piece, Whole};
use crate::fault::Fault;

/// Writes answers of one call.
#[derive(Debug)]
pub(crate) struct VllmWriter {
    /// What ends each object of a stream.
    delimiter: char,
    /// What stands between prompt and output, when it is no stream.
    separator: String,
    /// Each object of a stream has the whole text so far.
    full_text: bool,
    /// In the order of their numbers.
    sequences: Vec<Sequence>,
    /// Something was sent.
    begun: bool,
}

/// A sequence of a stream.
#[derive(Debug, Default)]
struct Sequence {
    /// The texts of tokens that no object has carried yet.
    waiting: VecDeque<String>,
    /// No more will come.
    ended: bool,
    /// What the objects so far have carried, if each has the whole text.
    sent: String,
}

#[derive(Serialize)]
struct Texts<'a> {
    /// One per sequence.
    text: &'a [String],
}

impl VllmWriter {
    pub(super) fn new(config: &Config, sequences: usize) -> Self {
        Self {
            delimiter: match config.vllm_delimiter {
                Delimiter::Nul => '\0',
                Delimiter::Newline => '\n',
            },
            separator: config.vllm_separator.clone(),
            full_text: config.full_text_enabled,
            sequences: (0..sequences).map(|_| Sequence::default()).collect(),
            begun: false,
        }
    }

    fn event(&self, mut json: String) -> Bytes {
        json.push(self.delimiter);
        json.into()
    }

    /// True when every sequence has something to say, or has said everything.
    fn row_is_complete(&self) -> bool {
        let mut sequences = self.sequences.iter();
        sequences.all(|sequence| sequence.ended || !sequence.waiting.is_empty())
            && self.sequences.iter().any(|sequence| !sequence.waiting.is_empty())
    }

    /// The next text of each sequence: one token each, as far as they have any.
    fn row(&mut self) -> Vec<String> {
        let full_text = self.full_text;
        let texts = self.sequences.iter_mut().map(|sequence| {
            let text = sequence.waiting.pop_front().unwrap_or_default();
            if !full_text {
                return text;
            }
            sequence.sent.push_str(&text);
            sequence.sent.clone()
        });
        texts.collect()
    }

    fn is_over(&self) -> bool {
        self.sequences.iter().all(|sequence| sequence.ended && sequence.waiting.is_empty())
    }
}

impl Writer for VllmWriter {
    const STREAM_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, _started: &[Started], _events: &mut Events) {}

    /// An object for each token that every sequence still running has. One without any new text says nothing, but
    /// an answer without any text is still one object.
    fn piece(&mut self, choice: usize, piece: &Piece, events: &mut Events) {
        let sequence = &mut self.sequences[choice];
        sequence.waiting.push_back(piece.text.clone());
        sequence.ended = piece.finish.is_some();
        while self.row_is_complete() {
            let says_something = self
                .sequences
                .iter()
                .any(|sequence| sequence.waiting.front().is_some_and(|text| !text.is_empty()));
            let row = self.row();
            let only = self.is_over() && !self.begun;
            if says_something || only {
                self.begun = true;
                events.push(self.event(json(&Texts { text: &row })));
            }
        }
    }

    fn end(&mut self, _events: &mut Events) {}

    fn fault(&mut self, fault: &Fault) -> Bytes {
        self.event(mindie::error_json(fault))
    }

    /// Each with the prompt before it.
    fn whole(&mut self, started: &[Started], wholes: &[Whole]) -> Bytes {
        let prompt = started[0].prompt_text.as_deref().unwrap_or_default();
        let text: Vec<String> =
            wholes.iter().map(|whole| format!("{prompt}{}{}", self.separator, whole.text)).collect();
        json(&Texts { text: &text }).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::{pieces, started, streamed, whole};
    use crate::domain::Finish;

    fn writer(sequences: usize) -> VllmWriter {
        VllmWriter::new(&Config::default(), sequences)
    }

    /// What is streamed when the sequences' pieces come in this order of choices.
    fn interleaved(writer: &mut VllmWriter, sequences: &[Vec<Piece>], order: &[usize]) -> Vec<String> {
        let mut events = Events::new();
        let mut next = vec![0; sequences.len()];
        for &choice in order {
            writer.piece(choice, &sequences[choice][next[choice]], &mut events);
            next[choice] += 1;
        }
        writer.end(&mut events);
        events.iter().map(|event| String::from_utf8(event.to_vec()).unwrap()).collect()
    }

    #[test]
    fn a_stream_is_objects_ended_by_nul() {
        let pieces = pieces(&["'m", "", " the", ""], Finish::Eos);
        let events = streamed(&mut writer(1), &started("m", 1, None), &pieces);
        assert_eq!(events, ["{\"text\":[\"'m\"]}\0", "{\"text\":[\" the\"]}\0"]);
    }

    #[test]
    fn sequences_go_in_step_however_their_tokens_come() {
        let sequences =
            [pieces(&["'m", " the", " founder"], Finish::Length), pieces(&["'m", ""], Finish::Eos)];
        let expected = [
            "{\"text\":[\"'m\",\"'m\"]}\0",
            "{\"text\":[\" the\",\"\"]}\0",
            "{\"text\":[\" founder\",\"\"]}\0",
        ];
        for order in [[0, 1, 0, 1, 0], [0, 0, 0, 1, 1], [1, 1, 0, 0, 0]] {
            assert_eq!(interleaved(&mut writer(2), &sequences, &order), expected);
        }
    }

    #[test]
    fn the_full_text_may_come_with_every_object() {
        let config =
            Config { full_text_enabled: true, vllm_delimiter: Delimiter::Newline, ..Config::default() };
        let sequences = [pieces(&["'m", " the"], Finish::Length), pieces(&["'m"], Finish::Eos)];
        let events = interleaved(&mut VllmWriter::new(&config, 2), &sequences, &[0, 1, 0]);
        assert_eq!(events, ["{\"text\":[\"'m\",\"'m\"]}\n", "{\"text\":[\"'m the\",\"'m\"]}\n"]);
    }

    #[test]
    fn an_answer_without_text_is_one_event() {
        let pieces = pieces(&["", ""], Finish::Eos);
        let events = streamed(&mut writer(1), &started("m", 1, None), &pieces);
        assert_eq!(events, ["{\"text\":[\"\"]}\0"]);
    }

    #[test]
    fn a_whole_answer_repeats_the_prompt() {
        let (first, second) = (pieces(&[" am", " a"], Finish::Length), pieces(&[" was"], Finish::Eos));
        let started = started("m", 1, Some("My name is Olivier and I"));
        let wholes = [whole(&first), whole(&second)];
        let body = writer(2).whole(std::slice::from_ref(&started), &wholes);
        assert_eq!(body, "{\"text\":[\"My name is Olivier and I  am a\",\"My name is Olivier and I  was\"]}");
        let config = Config { vllm_separator: String::new(), ..Config::default() };
        let body = VllmWriter::new(&config, 1).whole(&[started], &wholes[..1]);
        assert_eq!(body, "{\"text\":[\"My name is Olivier and I am a\"]}");
    }

    #[test]
    fn a_late_fault_is_an_object_too() {
        let event = writer(1).fault(&Fault::NotReady("gone".into()));
        assert_eq!(event, "{\"error\":\"gone\",\"error_type\":\"Service Unavailable\"}\0");
    }
}
