//! The response of TGI's routes, and their stream of events.

use std::sync::Arc;

use bytes::Bytes;
use checkpoint::Text;
use proto::{Token, TokenId};
use serde::Serialize;

use crate::answer::Started;
use crate::dialect::mindie::{self, finish_reason};
use crate::dialect::{Events, Writer, finite, json};
use crate::domain::{Piece, Stop, Whole};
use crate::fault::Fault;
use crate::models::Model;
use crate::text::Transcript;

/// What the request says of the response.
#[derive(Debug)]
pub(super) struct Shape {
    pub(super) details: bool,
    /// Tell of the prompt's tokens too.
    pub(super) prefill: bool,
    /// How many of the likeliest tokens to tell of beside each.
    pub(super) top: usize,
    /// Tokens are drawn, so that a seed means something.
    pub(super) sampled: bool,
    /// What ends the text, by which it is cut into tokens' texts again.
    pub(super) stop: Stop,
    /// An answer in one piece stands in a list.
    pub(super) listed: bool,
}

/// Writes answers of one call.
#[derive(Debug)]
pub(crate) struct TgiWriter {
    shape: Shape,
    model: Option<Arc<Model>>,
    /// What was started, of a stream.
    prompt_tokens: usize,
    seed: u64,
    /// The whole text of a stream so far, behind the prompt where that is wanted.
    text: String,
    /// Events so far.
    index: usize,
}

/// Field order is part of the format, here and below.
#[derive(Serialize)]
struct Answer<'a> {
    generated_text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details<'a>>,
}

#[derive(Serialize)]
struct Details<'a> {
    /// Of a further sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    generated_text: Option<String>,
    finish_reason: &'static str,
    generated_tokens: usize,
    /// Null where nothing is drawn.
    seed: Option<u64>,
    prefill: &'a [PrefillToken],
    tokens: Vec<TokenEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    best_of_sequences: Option<Vec<Details<'a>>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top_tokens: Vec<Vec<TokenEntry>>,
}

/// A token of the prompt.
#[derive(Serialize)]
struct PrefillToken {
    id: TokenId,
    text: String,
    /// Null for the first, of which nothing is known.
    logprob: Option<f32>,
}

#[derive(Serialize)]
struct TokenEntry {
    id: TokenId,
    text: String,
    logprob: f32,
    /// It is no part of the text.
    special: bool,
}

#[derive(Serialize)]
struct Event<'a> {
    /// From 1.
    index: usize,
    token: TokenEntry,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top_tokens: Vec<TokenEntry>,
    /// With the last event.
    generated_text: Option<&'a str>,
    /// With the last event, if asked for.
    details: Option<StreamDetails>,
}

#[derive(Serialize)]
struct StreamDetails {
    finish_reason: &'static str,
    generated_tokens: usize,
    seed: Option<u64>,
    input_length: usize,
}

/// What a token's bytes are as text by themselves.
fn literal(text: &Text, id: TokenId) -> String {
    String::from_utf8_lossy(text.token_bytes(id).unwrap_or_default()).into_owned()
}

/// A token of the answer with what it adds to the text. One that adds nothing since it is no text shows its name, and
/// says so: who leaves those out has the text.
fn entry(text: &Text, token: &Token, added: &str) -> TokenEntry {
    let special = added.is_empty() && text.is_special(token.id);
    let shown = if special { literal(text, token.id) } else { added.to_owned() };
    TokenEntry { id: token.id, text: shown, logprob: finite(token.logprob), special }
}

impl TgiWriter {
    pub(super) fn new(shape: Shape) -> Self {
        Self { shape, model: None, prompt_tokens: 0, seed: 0, text: String::new(), index: 0 }
    }

    fn take(&mut self, started: &Started) {
        self.model = Some(started.model.clone());
        self.prompt_tokens = started.prompt_tokens;
        self.seed = started.seed;
        self.text = started.prompt_text.clone().unwrap_or_default();
    }

    fn model(&self) -> &Text {
        &self.model.as_ref().expect("a writer takes what was started first").text
    }

    fn seed(&self) -> Option<u64> {
        self.shape.sampled.then_some(self.seed)
    }

    /// The likeliest tokens in a token's place.
    fn top(&self, token: &Token) -> Vec<TokenEntry> {
        let text = self.model();
        let entries = token.top.iter().take(self.shape.top).map(|one| TokenEntry {
            id: one.id,
            text: literal(text, one.id),
            logprob: finite(one.logprob),
            special: text.is_special(one.id),
        });
        entries.collect()
    }

    /// The tokens of a whole answer, cut as the stream cuts them.
    fn tokens(&self, tokens: &[Token]) -> Vec<TokenEntry> {
        let text = self.model();
        let mut transcript = Transcript::new(text, &self.shape.stop, true);
        let mut ended = false;
        let entries = tokens.iter().map(|token| {
            let (added, finish) = if ended { (String::new(), None) } else { transcript.push(token) };
            ended |= finish.is_some();
            entry(text, token, &added)
        });
        entries.collect()
    }

    /// What is known of the prompt's tokens, if that is wanted.
    fn prefill(&self, started: &Started, whole: &Whole) -> Vec<PrefillToken> {
        if !self.shape.prefill {
            return Vec::new();
        }
        let text = self.model();
        let known = whole.prompt.iter().flat_map(|report| &report.logprobs);
        let logprobs = std::iter::once(None)
            .chain(known.map(|position| Some(finite(position.token.logprob))))
            .chain(std::iter::repeat(None));
        let tokens = started.prompt.iter().zip(logprobs);
        tokens.map(|(&id, logprob)| PrefillToken { id, text: literal(text, id), logprob }).collect()
    }

    fn details<'a>(&self, whole: &Whole, prefill: &'a [PrefillToken]) -> Details<'a> {
        let top_tokens = match self.shape.top {
            0 => Vec::new(),
            _ => whole.tokens.iter().map(|token| self.top(token)).collect(),
        };
        Details {
            generated_text: None,
            finish_reason: finish_reason(&whole.finish),
            generated_tokens: whole.generated(),
            seed: self.seed(),
            prefill,
            tokens: self.tokens(&whole.tokens),
            best_of_sequences: None,
            top_tokens,
        }
    }
}

impl Writer for TgiWriter {
    const STREAM_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, started: &[Started], _events: &mut Events) {
        self.take(&started[0]);
    }

    fn piece(&mut self, _choice: usize, piece: &Piece, events: &mut Events) {
        self.text.push_str(&piece.text);
        self.index += 1;
        let details = piece.finish.as_ref().filter(|_| self.shape.details).map(|finish| StreamDetails {
            finish_reason: finish_reason(finish),
            generated_tokens: piece.generated(),
            seed: self.seed(),
            input_length: self.prompt_tokens,
        });
        let event = Event {
            index: self.index,
            token: entry(self.model(), &piece.token, &piece.text),
            top_tokens: self.top(&piece.token),
            generated_text: piece.finish.is_some().then_some(self.text.as_str()),
            details,
        };
        events.push(mindie::event(&event));
    }

    fn end(&mut self, _events: &mut Events) {}

    fn fault(&mut self, fault: &Fault) -> Bytes {
        mindie::fault_event(fault)
    }

    /// The likeliest sequence, and the others among its details.
    fn whole(&mut self, started: &[Started], wholes: &[Whole]) -> Bytes {
        let started = &started[0];
        self.take(started);
        let (best, others) = wholes.split_first().expect("an answer has a sequence at least");
        let text = |whole: &Whole| format!("{}{}", self.text, whole.text);
        let prefill = self.prefill(started, best);
        let details = self.shape.details.then(|| {
            let others: Vec<Details> = others
                .iter()
                .map(|whole| Details { generated_text: Some(text(whole)), ..self.details(whole, &prefill) })
                .collect();
            let best_of_sequences = (!others.is_empty()).then_some(others);
            Details { best_of_sequences, ..self.details(best, &prefill) }
        });
        let answer = Answer { generated_text: text(best), details };
        if self.shape.listed { json(&[answer]).into() } else { json(&answer).into() }
    }
}

#[cfg(test)]
mod tests {
    use proto::{FinishReason, PromptLogprobs, PromptReport, TokenLogprob};
    use serde_json::Value;

    use super::*;
    use crate::bundle::END;
    use crate::dialect::tests::{pieces, started, streamed, whole};
    use crate::domain::Finish;

    fn shape() -> Shape {
        let stop = Stop { include: true, ..Stop::default() };
        Shape { details: true, prefill: false, top: 0, sampled: true, stop, listed: false }
    }

    /// Bytes as tokens, and the token that ends them.
    fn spelt(text: &str) -> Vec<Piece> {
        let texts: Vec<String> = text.chars().map(String::from).chain([String::new()]).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mut pieces = pieces(&texts, Finish::Eos);
        for (piece, id) in pieces.iter_mut().zip(text.bytes().map(u32::from).chain([END])) {
            piece.token.id = id;
            piece.token.logprob = -0.1;
            piece.token.top = vec![TokenLogprob { id: 0x7a, logprob: -0.3 }];
        }
        pieces
    }

    #[test]
    fn a_stream_has_the_documented_bytes() {
        let events = streamed(&mut TgiWriter::new(shape()), &started("m", 9, None), &spelt("I a"));
        assert_eq!(
            events,
            [
                "data:{\"index\":1,\"token\":{\"id\":73,\"text\":\"I\",\"logprob\":-0.1,\"special\":false},\
                 \"generated_text\":null,\"details\":null}\n\n",
                "data:{\"index\":2,\"token\":{\"id\":32,\"text\":\" \",\"logprob\":-0.1,\"special\":false},\
                 \"generated_text\":null,\"details\":null}\n\n",
                "data:{\"index\":3,\"token\":{\"id\":97,\"text\":\"a\",\"logprob\":-0.1,\"special\":false},\
                 \"generated_text\":null,\"details\":null}\n\n",
                "data:{\"index\":4,\"token\":{\"id\":257,\"text\":\"<|im_end|>\",\"logprob\":-0.1,\"special\":true},\
                 \"generated_text\":\"I a\",\"details\":{\"finish_reason\":\"eos_token\",\"generated_tokens\":4,\
                 \"seed\":42,\"input_length\":9}}\n\n",
            ]
        );
        let plain = Shape { details: false, top: 1, ..shape() };
        let events = streamed(&mut TgiWriter::new(plain), &started("m", 9, Some("Hi. ")), &spelt("I"));
        assert_eq!(
            events[1],
            "data:{\"index\":2,\"token\":{\"id\":257,\"text\":\"<|im_end|>\",\"logprob\":-0.1,\"special\":true},\
             \"top_tokens\":[{\"id\":122,\"text\":\"z\",\"logprob\":-0.3,\"special\":false}],\
             \"generated_text\":\"Hi. I\",\"details\":null}\n\n"
        );
    }

    #[test]
    fn a_whole_answer_has_the_documented_bytes() {
        let started = started("m", 1, None);
        let answer = |shape: Shape, wholes: &[Whole]| {
            let body = TgiWriter::new(shape).whole(std::slice::from_ref(&started), wholes);
            String::from_utf8(body.to_vec()).unwrap()
        };
        let one = whole(&spelt("a"));
        let plain = Shape { details: false, ..shape() };
        assert_eq!(answer(plain, std::slice::from_ref(&one)), "{\"generated_text\":\"a\"}");
        let listed = Shape { details: false, listed: true, ..shape() };
        assert_eq!(answer(listed, std::slice::from_ref(&one)), "[{\"generated_text\":\"a\"}]");
        let greedy = Shape { sampled: false, ..shape() };
        assert_eq!(
            answer(greedy, std::slice::from_ref(&one)),
            "{\"generated_text\":\"a\",\"details\":{\"finish_reason\":\"eos_token\",\"generated_tokens\":2,\
             \"seed\":null,\"prefill\":[],\"tokens\":[\
             {\"id\":97,\"text\":\"a\",\"logprob\":-0.1,\"special\":false},\
             {\"id\":257,\"text\":\"<|im_end|>\",\"logprob\":-0.1,\"special\":true}]}}"
        );
    }

    #[test]
    fn further_sequences_are_details_of_the_likeliest() {
        let best = Shape { top: 1, ..shape() };
        let wholes = [whole(&spelt("a")), whole(&spelt("b"))];
        let body = TgiWriter::new(best).whole(&[started("m", 1, Some("P"))], &wholes);
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["generated_text"], "Pa");
        let others = body["details"]["best_of_sequences"].as_array().unwrap();
        assert_eq!((others.len(), &others[0]["generated_text"]), (1, &Value::from("Pb")));
        assert_eq!(others[0]["tokens"][0]["text"], "b");
        assert_eq!(others[0]["top_tokens"][1][0]["id"], 0x7a);
        assert_eq!(body["details"]["top_tokens"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn the_prompt_is_told_of_where_asked() {
        let scored = PromptLogprobs { token: TokenLogprob { id: 7, logprob: -2.1 }, top: vec![] };
        let report = PromptReport { cached_tokens: 0, logprobs: vec![scored] };
        let answered = Whole { prompt: Some(Arc::new(report)), ..whole(&spelt("a")) };
        let body =
            TgiWriter::new(Shape { prefill: true, ..shape() }).whole(&[started("m", 2, None)], &[answered]);
        let body = String::from_utf8(body.to_vec()).unwrap();
        let told = "\"prefill\":[{\"id\":7,\"text\":\"\\u0007\",\"logprob\":null},\
                    {\"id\":7,\"text\":\"\\u0007\",\"logprob\":-2.1}]";
        assert!(body.contains(told), "{body}");
    }

    #[test]
    fn tokens_are_the_text_to_the_last_letter_in_both_forms() {
        let stop = Stop { strings: vec!["CDE".into()], include: true, ..Stop::default() };
        let shape = || Shape { stop: stop.clone(), ..shape() };
        let started = started("m", 1, None);
        // A letter, the three bytes of a character, what holds a stop string, and what follows it in the same token.
        let ids = [0x41, 0xe6, 0xbc, 0xa2, 258, 259];
        let mut transcript = Transcript::new(&started.model.text, &stop, true);
        let mut pieces = pieces(&[""; 6], Finish::StopString("CDE".into()));
        for (index, (piece, id)) in pieces.iter_mut().zip(ids).enumerate() {
            piece.token = Token { index, id, ..Token::default() };
            (piece.text, piece.finish) = transcript.push(&piece.token);
        }
        let text = "A漢ABCDE";
        let spoken = |tokens: &mut dyn Iterator<Item = Value>| -> Vec<String> {
            tokens.map(|token| token["text"].as_str().unwrap().to_owned()).collect()
        };
        let events = streamed(&mut TgiWriter::new(shape()), &started, &pieces);
        let events: Vec<Value> = events
            .iter()
            .map(|event| serde_json::from_str(event.strip_prefix("data:").unwrap()).unwrap())
            .collect();
        let in_stream = spoken(&mut events.iter().map(|event| event["token"].clone()));
        assert_eq!(in_stream.concat(), text);
        assert_eq!(events[5]["generated_text"], text);
        let body = TgiWriter::new(shape()).whole(&[started], &[whole(&pieces)]);
        let body: Value = serde_json::from_slice(&body).unwrap();
        let tokens = body["details"]["tokens"].as_array().unwrap();
        assert_eq!(spoken(&mut tokens.iter().cloned()), in_stream);
        assert_eq!(body["details"]["finish_reason"], "stop_sequence");
    }

    #[test]
    fn an_end_has_one_of_three_names_and_a_late_fault_is_an_event() {
        for (finish, name) in [
            (Finish::Eos, "eos_token"),
            (Finish::Grammar, "eos_token"),
            (Finish::from(FinishReason::Length), "length"),
            (Finish::StopString("x".into()), "stop_sequence"),
        ] {
            assert_eq!(finish_reason(&finish), name);
        }
        let event = TgiWriter::new(shape()).fault(&Fault::NotReady("gone".into()));
        assert_eq!(event, "data:{\"error\":\"gone\",\"error_type\":\"Service Unavailable\"}\n\n");
    }
}
