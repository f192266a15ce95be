//! The response of `/v1/completions`, and its stream of chunks.

use std::sync::Arc;

use bytes::Bytes;
use checkpoint::{Incremental, Text};
use proto::{PromptReport, TokenId, TokenLogprob};
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use super::events::{DONE, event, fault_event};
use super::logprobs::{Ordered, PromptLogprobs, Spelling, prompt, shown};
use super::parameters::StreamUsage;
use crate::answer::Started;
use crate::dialect::{Events, Writer, finite, json};
use crate::domain::{Finish, Piece, Whole};
use crate::fault::Fault;
use crate::models::Model;
use crate::service::unix_seconds;
use crate::timing::Parts;

/// What a request says of its response.
#[derive(Debug)]
pub(super) struct CompletionShape {
    /// Choices of each prompt.
    pub(super) n: usize,
    /// Alternatives of each token.
    pub(super) logprobs: Option<u32>,
    /// Alternatives of each token of the prompt, apart from the text.
    pub(super) prompt_logprobs: Option<u32>,
    /// What follows each choice's text.
    pub(super) suffix: String,
    /// The prompt comes before each choice's text.
    pub(super) echo: bool,
    pub(super) tokens_as_ids: bool,
    pub(super) skip_special_tokens: bool,
    /// Usage in a stream.
    pub(super) usage: StreamUsage,
}

/// Writes answers of one call.
pub(crate) struct CompletionWriter {
    shape: CompletionShape,
    id: String,
    created: u64,
    model: Option<Arc<Model>>,
    fingerprint: String,
    prompts: Vec<PromptState>,
    choices: Vec<ChoiceState>,
    /// For who asked, once the answer is complete.
    timings: Option<Parts>,
}

/// A prompt of a stream.
struct PromptState {
    tokens: usize,
    /// The first of them, where logprobs begin with it.
    first: Option<TokenId>,
    text: String,
    report: Option<PromptReport>,
}

/// A choice of a stream.
#[derive(Default)]
struct ChoiceState {
    generated: usize,
    /// Tokens of sequences that were generated and not returned.
    unreturned: usize,
    /// Where the next token's text begins.
    place: Option<Place>,
}

/// Counts the characters before each token, whichever tokens a character is spread over.
struct Place {
    decoder: Incremental,
    chars: usize,
}

impl Place {
    fn new(text: &Text, skip_special_tokens: bool) -> Self {
        Self { decoder: text.decoder(skip_special_tokens), chars: 0 }
    }

    /// Characters before the token.
    fn before(&mut self, token: TokenId) -> usize {
        let before = self.chars;
        self.chars += self.decoder.push(token).chars().count();
        before
    }
}

#[derive(Serialize)]
struct Response<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [Choice],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    system_fingerprint: &'a str,
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    /// The stop string or stop token that ended the text.
    stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Option<PromptLogprobs>>,
}

/// Lists with an entry for each token.
#[derive(Default, Serialize)]
struct Logprobs {
    /// Characters before the token.
    text_offset: Vec<usize>,
    token_logprobs: Vec<Option<f32>>,
    tokens: Vec<String>,
    /// Each token's own first, then the likeliest, falling.
    top_logprobs: Vec<Option<Ordered<f32>>>,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Parts>,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

fn finish_reason(finish: &Finish) -> &'static str {
    if *finish == Finish::Length { "length" } else { "stop" }
}

/// vLLM's: what ended the text, if the request named it.
fn stop_reason(finish: &Finish, last: Option<TokenId>) -> Option<Value> {
    match finish {
        Finish::StopString(text) => Some(Value::from(text.as_str())),
        Finish::StopToken => last.map(Value::from),
        _ => None,
    }
}

impl CompletionWriter {
    pub(super) fn new(shape: CompletionShape) -> Self {
        Self {
            shape,
            id: format!("cmpl-{}", Uuid::new_v4().simple()),
            created: unix_seconds(),
            model: None,
            fingerprint: String::new(),
            prompts: Vec::new(),
            choices: Vec::new(),
            timings: None,
        }
    }

    fn take(&mut self, started: &[Started]) {
        let model = &started[0].model;
        let mut digest = model.description.fingerprint.to_string();
        digest.truncate(12);
        self.fingerprint = format!("fp_{digest}");
        self.model = Some(model.clone());
        self.prompts = started
            .iter()
            .map(|started| PromptState {
                tokens: started.prompt_tokens,
                first: started.prompt.first().copied(),
                text: started.prompt_text.clone().unwrap_or_default(),
                report: None,
            })
            .collect();
        self.choices.resize_with(started.len() * self.shape.n, ChoiceState::default);
    }

    fn model(&self) -> &Arc<Model> {
        self.model.as_ref().expect("a writer takes what was started first")
    }

    fn usage(&self) -> Usage {
        let prompt_tokens = self.prompts.iter().map(|prompt| prompt.tokens).sum();
        let completion_tokens = self.choices.iter().map(|choice| choice.generated + choice.unreturned).sum();
        let reports = self.prompts.iter().filter_map(|prompt| prompt.report.as_ref());
        let cached_tokens = reports.map(|report| report.cached_tokens).sum();
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens },
            timings: self.timings,
        }
    }

    fn response<'a>(&'a self, choices: &'a [Choice], usage: Option<Option<Usage>>) -> Response<'a> {
        Response {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model().description.name,
            choices,
            usage,
            system_fingerprint: &self.fingerprint,
        }
    }

    fn chunk(&self, choice: Choice) -> Bytes {
        let usage = match self.shape.usage {
            StreamUsage { always: true, .. } => Some(Some(self.usage())),
            StreamUsage { at_end: true, .. } => Some(None),
            StreamUsage { .. } => None,
        };
        event(&self.response(&[choice], usage))
    }

    fn spelling(&self) -> Spelling {
        if self.shape.tokens_as_ids { Spelling::Id } else { Spelling::Text }
    }

    /// Adds a token to the lists.
    fn list(&self, logprobs: &mut Logprobs, token: TokenLogprob, top: &[TokenLogprob], offset: usize) {
        let (text, spelling) = (&self.model().text, self.spelling());
        let count = self.shape.logprobs.unwrap_or(0) as usize;
        // The token itself is always among them.
        let entries = std::iter::once(&token).chain(top.iter().take(count));
        let entries = entries.map(|one| (shown(text, one.id, spelling), finite(one.logprob)));
        logprobs.text_offset.push(offset);
        logprobs.token_logprobs.push(Some(finite(token.logprob)));
        logprobs.tokens.push(shown(text, token.id, spelling));
        logprobs.top_logprobs.push(Some(entries.collect()));
    }

    /// The lists of an echoed prompt: of its first token nothing is known.
    fn echoed(&self, prompt: &PromptState, place: &mut Place) -> Logprobs {
        let mut logprobs = Logprobs::default();
        if let Some(first) = prompt.first {
            logprobs.text_offset.push(place.before(first));
            logprobs.token_logprobs.push(None);
            logprobs.tokens.push(shown(&self.model().text, first, self.spelling()));
            logprobs.top_logprobs.push(None);
        }
        let positions = prompt.report.iter().flat_map(|report| &report.logprobs);
        for position in positions {
            let offset = place.before(position.token.id);
            self.list(&mut logprobs, position.token, &position.top, offset);
        }
        logprobs
    }

    fn new_place(&self) -> Place {
        Place::new(&self.model().text, self.shape.skip_special_tokens)
    }

    /// The prompt of a choice as the beginning of its text.
    fn echo(&self, choice: usize) -> (Choice, Place) {
        let prompt = &self.prompts[choice / self.shape.n];
        let mut place = self.new_place();
        let logprobs = self.shape.logprobs.map(|_| self.echoed(prompt, &mut place));
        let choice = Choice {
            index: choice,
            text: prompt.text.clone(),
            logprobs,
            finish_reason: None,
            stop_reason: None,
            prompt_logprobs: None,
        };
        (choice, place)
    }
}

impl Writer for CompletionWriter {
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";

    fn begin(&mut self, started: &[Started], _events: &mut Events) {
        self.take(started);
    }

    fn piece(&mut self, choice: usize, piece: &Piece, events: &mut Events) {
        let prompt = choice / self.shape.n;
        if let Some(report) = &piece.token.prompt
            && choice.is_multiple_of(self.shape.n)
        {
            self.prompts[prompt].report.get_or_insert_with(|| (**report).clone());
        }
        self.choices[choice].generated = piece.generated();
        let mut place = match self.choices[choice].place.take() {
            Some(place) => place,
            None if self.shape.echo => {
                let (echo, place) = self.echo(choice);
                events.push(self.chunk(echo));
                place
            }
            None => self.new_place(),
        };
        let token = &piece.token;
        let logprobs = self.shape.logprobs.filter(|_| !piece.discarded).map(|_| {
            let mut logprobs = Logprobs::default();
            let offset = place.before(token.id);
            let chosen = TokenLogprob { id: token.id, logprob: token.logprob };
            self.list(&mut logprobs, chosen, &token.top, offset);
            logprobs
        });
        self.choices[choice].place = Some(place);
        let mut text = piece.text.clone();
        if piece.finish.is_some() {
            text.push_str(&self.shape.suffix);
        }
        // A token without text says nothing unless its probability was asked for.
        if text.is_empty() && logprobs.is_none() && piece.finish.is_none() {
            return;
        }
        events.push(self.chunk(Choice {
            index: choice,
            text,
            logprobs,
            finish_reason: piece.finish.as_ref().map(finish_reason),
            stop_reason: piece.finish.as_ref().and_then(|finish| stop_reason(finish, Some(token.id))),
            prompt_logprobs: None,
        }));
    }

    fn take_timings(&mut self, parts: &Parts) {
        self.timings = self.shape.usage.timings.then_some(*parts);
    }

    fn end(&mut self, events: &mut Events) {
        if self.shape.usage.at_end {
            events.push(event(&self.response(&[], Some(Some(self.usage())))));
        }
        events.push(DONE);
    }

    fn fault(&mut self, fault: &Fault) -> Bytes {
        fault_event(fault)
    }

    fn whole(&mut self, started: &[Started], wholes: &[Whole]) -> Bytes {
        self.take(started);
        for (index, whole) in wholes.iter().enumerate() {
            self.choices[index].generated = whole.generated();
            self.choices[index].unreturned = whole.unreturned;
            if let Some(report) = &whole.prompt {
                self.prompts[index / self.shape.n].report.get_or_insert_with(|| (**report).clone());
            }
        }
        let choices = wholes.iter().enumerate().map(|(index, whole)| self.choice(index, whole));
        let choices: Vec<Choice> = choices.collect();
        json(&self.response(&choices, Some(Some(self.usage())))).into()
    }
}

impl CompletionWriter {
    /// A choice in one piece.
    fn choice(&self, index: usize, whole: &Whole) -> Choice {
        let (mut choice, mut place) = if self.shape.echo {
            self.echo(index)
        } else {
            let empty = Choice {
                index,
                text: String::new(),
                logprobs: self.shape.logprobs.map(|_| Logprobs::default()),
                finish_reason: None,
                stop_reason: None,
                prompt_logprobs: None,
            };
            (empty, self.new_place())
        };
        choice.text.push_str(&whole.text);
        choice.text.push_str(&self.shape.suffix);
        if let Some(logprobs) = &mut choice.logprobs {
            for token in &whole.tokens {
                let offset = place.before(token.id);
                let chosen = TokenLogprob { id: token.id, logprob: token.logprob };
                self.list(logprobs, chosen, &token.top, offset);
            }
        }
        choice.finish_reason = Some(finish_reason(&whole.finish));
        choice.stop_reason = stop_reason(&whole.finish, whole.tokens.last().map(|token| token.id));
        let report = self.prompts[index / self.shape.n].report.as_ref();
        choice.prompt_logprobs = self.shape.prompt_logprobs.map(|_| prompt(&self.model().text, report));
        choice
    }
}

#[cfg(test)]
mod tests {
    use proto::PromptLogprobs as Scored;
    use serde_json::json;

    use super::*;
    use crate::dialect::tests::{pieces, started, whole};

    fn shape(n: usize) -> CompletionShape {
        CompletionShape {
            n,
            logprobs: None,
            prompt_logprobs: None,
            suffix: String::new(),
            echo: false,
            tokens_as_ids: false,
            skip_special_tokens: true,
            usage: StreamUsage::default(),
        }
    }

    fn writer(shape: CompletionShape) -> CompletionWriter {
        CompletionWriter { id: "cmpl-1".into(), created: 7, ..CompletionWriter::new(shape) }
    }

    /// Events as JSON, of pieces that come in this order of choices.
    fn streamed(writer: &mut CompletionWriter, started: &[Started], pieces: &[(usize, Piece)]) -> Vec<Value> {
        let mut events = Events::new();
        writer.begin(started, &mut events);
        for (choice, piece) in pieces {
            writer.piece(*choice, piece, &mut events);
        }
        writer.end(&mut events);
        assert_eq!(events.pop().as_deref(), Some(&b"data: [DONE]\n\n"[..]));
        let parse = |event: &Bytes| {
            let text = std::str::from_utf8(event).unwrap();
            serde_json::from_str(text.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap()).unwrap()
        };
        events.iter().map(parse).collect()
    }

    /// Bytes as tokens, with a prompt's report on the first.
    fn spelt(text: &str, report: &PromptReport, finish: Finish) -> Vec<Piece> {
        let texts: Vec<String> = text.chars().map(String::from).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mut pieces = pieces(&texts, finish);
        for (piece, byte) in pieces.iter_mut().zip(text.bytes()) {
            piece.token.id = u32::from(byte);
            piece.token.top = vec![TokenLogprob { id: 0x7a, logprob: -0.25 }];
        }
        pieces[0].token.prompt = Some(Box::new(report.clone()));
        pieces
    }

    fn report(prompt: &str) -> PromptReport {
        let logprobs = prompt.bytes().skip(1).map(|byte| Scored {
            token: TokenLogprob { id: u32::from(byte), logprob: -3.0 },
            top: vec![TokenLogprob { id: 0x7a, logprob: -0.5 }],
        });
        PromptReport { cached_tokens: 16, logprobs: logprobs.collect() }
    }

    fn prompted(prompt: &str) -> Started {
        let ids: Vec<TokenId> = prompt.bytes().map(u32::from).collect();
        Started { prompt: ids.into(), ..started("m", prompt.len(), Some(prompt)) }
    }

    #[test]
    fn a_whole_answer_has_every_choice_of_every_prompt() {
        let wholes = [
            ("a", Finish::Length),
            ("b", Finish::Eos),
            ("c", Finish::StopString("!".into())),
            ("d", Finish::Eos),
        ]
        .map(|(text, finish)| whole(&pieces(&[text], finish)));
        let body = writer(shape(2)).whole(&[prompted("A"), prompted("BB")], &wholes);
        let body: Value = serde_json::from_slice(&body).unwrap();
        let choice = |index: usize, text: &str, finish: &str, stop: Value| json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish, "stop_reason": stop});
        assert_eq!(
            body,
            json!({"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m",
                "choices": [choice(0, "a", "length", json!(null)), choice(1, "b", "stop", json!(null)),
                    choice(2, "c", "stop", json!("!")), choice(3, "d", "stop", json!(null))],
                "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 0}},
                "system_fingerprint": "fp_abababababab"})
        );
    }

    #[test]
    fn an_echo_comes_first_with_its_own_probabilities() {
        let shape = || CompletionShape { echo: true, logprobs: Some(1), suffix: "!".into(), ..shape(1) };
        let pieces = spelt("xy", &report("abc"), Finish::Length);
        let of_whole = Whole { prompt: Some(Arc::new(report("abc"))), ..whole(&pieces) };
        let body = writer(shape()).whole(&[prompted("abc")], &[of_whole]);
        let body: Value = serde_json::from_slice(&body).unwrap();
        let choice = &body["choices"][0];
        assert_eq!(choice["text"], "abcxy!");
        assert_eq!(
            choice["logprobs"],
            json!({"text_offset": [0, 1, 2, 3, 4], "token_logprobs": [null, -3.0, -3.0, -1.0, -1.0],
                "tokens": ["a", "b", "c", "x", "y"], "top_logprobs": [null, {"b": -3.0, "z": -0.5},
                {"c": -3.0, "z": -0.5}, {"x": -1.0, "z": -0.25}, {"y": -1.0, "z": -0.25}]})
        );
        assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 16);

        let pieces: Vec<(usize, Piece)> = pieces.into_iter().map(|piece| (0, piece)).collect();
        let chunks = streamed(&mut writer(shape()), &[prompted("abc")], &pieces);
        let texts: Vec<&str> =
            chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(texts, ["abc", "x", "y!"]);
        for list in ["text_offset", "token_logprobs", "tokens", "top_logprobs"] {
            let joined: Vec<&Value> = chunks
                .iter()
                .flat_map(|chunk| chunk["choices"][0]["logprobs"][list].as_array().unwrap())
                .collect();
            assert_eq!(
                joined,
                choice["logprobs"][list].as_array().unwrap().iter().collect::<Vec<_>>(),
                "{list}"
            );
        }
        let finishes: Vec<&Value> =
            chunks.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
        assert_eq!(finishes, [&json!(null), &json!(null), &json!("length")]);
    }

    #[test]
    fn likelihoods_stand_in_their_order_and_in_their_own_digits() {
        let mut pieces = spelt("m", &report("a"), Finish::Length);
        let top = [(0x7a, -0.1), (0x61, -0.3), (0x6d, -1.2)];
        pieces[0].token.logprob = -1.2;
        pieces[0].token.top = top.map(|(id, logprob)| TokenLogprob { id, logprob }).to_vec();
        let shape = CompletionShape { logprobs: Some(3), ..shape(1) };
        let body = writer(shape).whole(&[prompted("a")], &[whole(&pieces)]);
        let body = String::from_utf8(body.to_vec()).unwrap();
        let told = "\"top_logprobs\":[{\"m\":-1.2,\"z\":-0.1,\"a\":-0.3}]";
        assert!(body.contains(told), "{body}");
    }

    #[test]
    fn every_choice_of_a_stream_has_one_finish_and_usage_comes_last() {
        let usage = StreamUsage { at_end: true, ..StreamUsage::default() };
        let (a, b) = (pieces(&["a", ""], Finish::Eos), pieces(&["b", "c"], Finish::Length));
        let order = [(0, a[0].clone()), (1, b[0].clone()), (1, b[1].clone()), (0, a[1].clone())];
        let chunks = streamed(&mut writer(CompletionShape { usage, ..shape(2) }), &[prompted("P")], &order);
        let finishes: Vec<(u64, &str)> = chunks
            .iter()
            .flat_map(|chunk| chunk["choices"].as_array().unwrap())
            .filter_map(|choice| Some((choice["index"].as_u64()?, choice["finish_reason"].as_str()?)))
            .collect();
        assert_eq!(finishes, [(1, "length"), (0, "stop")]);
        let last = chunks.last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["completion_tokens"], 4);
        assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk["usage"].is_null()));
    }

    #[test]
    fn timings_stand_in_the_usage_of_who_asks() {
        let parts = Parts::new(std::time::Duration::ZERO);
        for timings in [false, true] {
            let usage = StreamUsage { at_end: true, timings, ..StreamUsage::default() };
            let asks = || writer(CompletionShape { usage, ..shape(1) });
            let pieces = pieces(&["a"], Finish::Eos);
            let mut whole_writer = asks();
            whole_writer.take_timings(&parts);
            let body = whole_writer.whole(&[prompted("P")], &[whole(&pieces)]);
            let body: Value = serde_json::from_slice(&body).unwrap();
            let mut stream_writer = asks();
            stream_writer.take_timings(&parts);
            let chunks = streamed(&mut stream_writer, &[prompted("P")], &[(0, pieces[0].clone())]);
            for usage in [&body["usage"], &chunks.last().unwrap()["usage"]] {
                assert_eq!(usage["timings"]["total_ms"].is_number(), timings, "{usage}");
            }
        }
    }

    #[test]
    fn a_prompt_may_be_scored_and_nothing_generated() {
        let shape = CompletionShape { echo: true, logprobs: Some(0), ..shape(1) };
        let scored = Whole {
            text: String::new(),
            tokens: Vec::new(),
            latencies: Vec::new(),
            prompt: Some(Arc::new(report("ab"))),
            finish: Finish::Length,
            unreturned: 0,
        };
        let body = writer(shape).whole(&[prompted("ab")], &[scored]);
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["choices"][0]["text"], "ab");
        assert_eq!(body["choices"][0]["logprobs"]["top_logprobs"], json!([null, {"b": -3.0}]));
        assert_eq!(body["usage"]["completion_tokens"], 0);
    }
}
