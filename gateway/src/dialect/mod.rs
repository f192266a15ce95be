//! The APIs that clients speak. Each is a folder of its own: JSON in, one domain request out; pieces in, its own
//! framing out. What two of them share stands here and knows neither.

pub(crate) mod fields;
pub(crate) mod generate;
pub(crate) mod kserve;
pub(crate) mod mindie;
pub(crate) mod mindie_tokens;
pub(crate) mod openai;
pub(crate) mod parts;
pub(crate) mod sampling;
pub(crate) mod tgi;
pub(crate) mod triton;
pub(crate) mod vllm;

use bytes::Bytes;
use http::StatusCode;
use serde::Serialize;

use crate::answer::Started;
use crate::domain::{Piece, Request, Whole};
use crate::fault::Fault;
use crate::timing::Parts;

/// A parsed call: what is asked for, and who writes the answer. Its choices are numbered prompt by prompt, as many for
/// each as its request's `n` (`best_of` in a stream).
#[derive(Debug)]
pub(crate) struct Call<W> {
    /// One for each prompt, at least one; they differ in their prompts alone.
    pub(crate) requests: Vec<Request>,
    pub(crate) writer: W,
    pub(crate) stream: bool,
}

/// Events of a stream, each of which is sent on its own.
pub(crate) type Events = Vec<Bytes>;

/// How an API writes an answer.
pub(crate) trait Writer: Send + 'static {
    /// The content type of a stream.
    const STREAM_TYPE: &'static str;

    /// The API's label in metrics, where a route is that of several.
    fn dialect(&self) -> Option<&'static str> {
        None
    }
    /// The answer begins; its first piece comes next. `started` has an entry for each prompt.
    fn begin(&mut self, started: &[Started], events: &mut Events);
    /// A piece of a choice; each choice's last one has its finish set. After the last of all [`Self::end`] follows.
    fn piece(&mut self, choice: usize, piece: &Piece, events: &mut Events);
    /// Where the request's time went so far: before [`Self::end`] or [`Self::whole`], for who shows it.
    fn take_timings(&mut self, _parts: &Parts) {}
    /// The answer was complete.
    fn end(&mut self, events: &mut Events);
    /// The answer failed after it began: the last event.
    fn fault(&mut self, fault: &Fault) -> Bytes;
    /// The body of an answer in one piece; `wholes` has an entry for each choice.
    fn whole(&mut self, started: &[Started], wholes: &[Whole]) -> Bytes;
}

/// A family of APIs that refuse in the same way.
pub(crate) trait Family {
    /// Status and body of a refusal.
    fn refusal(fault: &Fault) -> (StatusCode, Bytes);
}

/// JSON on one line. The three line separators beyond ASCII are escaped: clients that split a stream into lines the
/// Unicode way would cut there.
pub(crate) fn json(value: &impl Serialize) -> String {
    let mut bytes = Vec::new();
    write_json(value, &mut bytes);
    String::from_utf8(bytes).expect("JSON is UTF-8")
}

/// An event of a stream: such JSON behind what begins an event.
pub(crate) fn event(head: &str, value: &impl Serialize) -> Bytes {
    let mut bytes = Vec::with_capacity(EVENT_BYTES);
    bytes.extend_from_slice(head.as_bytes());
    write_json(value, &mut bytes);
    bytes.extend_from_slice(b"\n\n");
    bytes.into()
}

/// What most events fit into.
const EVENT_BYTES: usize = 320;

fn write_json(value: &impl Serialize, out: &mut Vec<u8>) {
    let start = out.len();
    serde_json::to_writer(&mut *out, value).expect("a tree of strings, numbers and lists is always JSON");
    if may_separate_lines(&out[start..]) {
        let text = String::from_utf8(out.split_off(start)).expect("JSON is UTF-8");
        let text =
            text.replace('\u{85}', "\\u0085").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029");
        out.extend_from_slice(text.as_bytes());
    }
}

/// True when there is a byte that begins one of the separators, and others besides.
fn may_separate_lines(json: &[u8]) -> bool {
    json.contains(&0xc2) || json.contains(&0xe2)
}

/// Lowest log-probability that is written: less is no number in JSON, or of no use to anybody.
const LOGPROB_MIN: f32 = -9999.0;

/// A log-probability that JSON can write.
pub(crate) fn finite(logprob: f32) -> f32 {
    if logprob.is_nan() { LOGPROB_MIN } else { logprob.max(LOGPROB_MIN) }
}

/// Milliseconds, to the microsecond.
pub(crate) fn milliseconds(duration: std::time::Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use checkpoint::TokenizerBundle;
    use proto::{Digest, FinishReason, ModelDescription, Token};

    use super::*;
    use crate::domain::Finish;
    use crate::models::Model;

    /// A started answer of a model whose text no writer looks at.
    pub(crate) fn started(name: &str, prompt_tokens: usize, prompt_text: Option<&str>) -> Started {
        let model = model(name, &crate::bundle::byte_bundle());
        let prompt = vec![7; prompt_tokens].into();
        Started { model, prompt_tokens, prompt, prompt_text: prompt_text.map(ToOwned::to_owned), seed: 42 }
    }

    /// A model with this text.
    pub(crate) fn model(name: &str, bundle: &TokenizerBundle) -> Arc<Model> {
        let description = ModelDescription {
            name: name.to_owned(),
            fingerprint: Digest([0xab; 32]),
            tokenizer: bundle.digest(),
            context_len: 64,
            vocab_size: bundle.vocab_size(),
            numerics: "test".to_owned(),
        };
        let text = Arc::new(bundle.open().unwrap());
        let token_bytes_max = crate::models::token_bytes_max(&text);
        let grammars = checkpoint::grammar::GrammarEnv::of_bundle(bundle).ok().map(Arc::new);
        Arc::new(Model { description, text, token_bytes_max, grammars })
    }

    /// Pieces with these texts, 5 ms apart, the last with this finish.
    pub(crate) fn pieces(texts: &[&str], finish: Finish) -> Vec<Piece> {
        let count = texts.len();
        let piece = |(index, text): (usize, &&str)| {
            let finish = (index + 1 == count).then(|| finish.clone());
            let token = Token {
                index,
                id: index as u32,
                logprob: -1.0,
                batch_size: 2,
                queue_wait: Duration::from_micros(30 + index as u64),
                finish: finish.as_ref().map(FinishReason::from),
                ..Token::default()
            };
            Piece {
                token,
                text: (*text).to_owned(),
                latency: Duration::from_micros(5250),
                finish,
                discarded: false,
            }
        };
        texts.iter().enumerate().map(piece).collect()
    }

    /// The same as a whole answer.
    pub(crate) fn whole(pieces: &[Piece]) -> Whole {
        Whole {
            text: pieces.iter().map(|piece| piece.text.as_str()).collect(),
            tokens: pieces.iter().map(|piece| piece.token.clone()).collect(),
            latencies: pieces.iter().map(|piece| piece.latency).collect(),
            prompt: None,
            finish: pieces.last().and_then(|piece| piece.finish.clone()).expect("a last piece"),
            unreturned: 0,
        }
    }

    /// All that a writer streams, event by event.
    pub(crate) fn streamed(writer: &mut impl Writer, started: &Started, pieces: &[Piece]) -> Vec<String> {
        let mut events = Events::new();
        writer.begin(std::slice::from_ref(started), &mut events);
        for piece in pieces {
            writer.piece(0, piece, &mut events);
        }
        writer.end(&mut events);
        events.iter().map(|event| String::from_utf8(event.to_vec()).unwrap()).collect()
    }

    #[test]
    fn json_has_no_line_separator() {
        assert_eq!(json(&"a\u{2028}b\u{2029}c\u{85}d\r\n"), r#""a\u2028b\u2029c\u0085d\r\n""#);
        assert_eq!(json(&"\u{a0}€"), "\"\u{a0}€\"");
        let long = "x".repeat(200) + "\u{2028}";
        assert_eq!(event("data: ", &long), format!("data: \"{}\\u2028\"\n\n", "x".repeat(200)));
    }
}
