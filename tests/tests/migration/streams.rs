//! Streams of every kind, and what a client has of one when it is over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_tests::cluster::{MODEL, PATIENCE};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// Most tokens of a stream: long enough to be under way when a drain has been heard of.
const TOKENS: usize = 160;

/// A stream to ask for.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) name: &'static str,
    path: String,
    body: Value,
    /// Sequences that answer it.
    pub(crate) sequences: usize,
}

fn ask(name: &'static str, path: &str, mut body: Value) -> Ask {
    body["model"] = json!(MODEL);
    body["max_tokens"] = json!(TOKENS);
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    let sequences = body["n"].as_u64().unwrap_or(1) as usize;
    Ask { name, path: path.to_owned(), body, sequences }
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// A greedy text.
pub(crate) fn text() -> Ask {
    let prompt = "Once upon a time there was a lighthouse keeper who";
    ask("greedy", COMPLETIONS, json!({ "prompt": prompt, "temperature": 0, "ignore_eos": true }))
}

/// A text that does not repeat itself.
pub(crate) fn varied() -> Ask {
    let body = json!({ "prompt": "The history of the mountain is", "temperature": 0.8, "seed": 21, "ignore_eos": true });
    ask("varied", COMPLETIONS, body)
}

/// The same as [`text`], with the times of its tokens.
pub(crate) fn timed() -> Ask {
    let body = json!({
        "text_input": "Once upon a time there was a lighthouse keeper who",
        "parameters": { "details": true, "do_sample": false, "max_new_tokens": TOKENS, "ignore_eos": true }
    });
    let path = format!("/v2/models/{MODEL}/generate_stream");
    Ask { name: "timed", path, body, sequences: 1 }
}

/// One of each kind. `plain` is what [`varied`] gives: a piece of it is what a stream is to stop at.
pub(crate) fn every_kind(plain: Answer) -> Vec<Ask> {
    let text = &plain.texts[&0];
    let words: Vec<&str> = text.split(' ').collect();
    let stop = (words.len() * 2 / 3..words.len() - 3)
        .map(|at| words[at..at + 3].join(" "))
        .find(|stop| text.find(stop.as_str()).is_some_and(|at| at > text.len() / 2))
        .expect("a piece of text that does not come earlier");
    let schema = json!({
        "type": "object",
        "properties": { "story": { "type": "string", "minLength": 300, "maxLength": 400 } },
        "required": ["story"],
        "additionalProperties": false
    });
    let tool = json!({
        "type": "function",
        "function": { "name": "tell", "description": "Tells a story.", "parameters": schema }
    });
    let chat = |content: &str| json!([{ "role": "user", "content": content }]);
    let prompt = "The history of the sea is";
    let mut asks = vec![
        self::text(),
        ask(
            "seeded",
            COMPLETIONS,
            json!({ "prompt": prompt, "temperature": 0.8, "seed": 11, "ignore_eos": true }),
        ),
        ask(
            "two of one prompt",
            COMPLETIONS,
            json!({ "prompt": prompt, "temperature": 0.8, "seed": 5, "n": 2, "ignore_eos": true }),
        ),
        ask(
            "schema",
            CHAT,
            json!({
                "messages": chat("Tell a story about a whale. Answer in JSON."), "temperature": 0.8, "seed": 3,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": { "name": "answer", "strict": true, "schema": schema }
                }
            }),
        ),
        ask(
            "log-probabilities",
            CHAT,
            json!({
                "messages": chat("Tell a long story about a ship."), "temperature": 0.8, "seed": 9,
                "logprobs": true, "top_logprobs": 3, "ignore_eos": true
            }),
        ),
        ask(
            "tool",
            CHAT,
            json!({
                "messages": chat("Tell a story about a mountain."), "temperature": 0.8, "seed": 4,
                "tools": [tool], "tool_choice": { "type": "function", "function": { "name": "tell" } }
            }),
        ),
    ];
    let mut stopping = varied();
    (stopping.name, stopping.body["stop"]) = ("stop", json!([stop]));
    asks.push(stopping);
    asks
}

/// What a client has of a stream at its end, whatever events it came in.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answer {
    /// By the sequence's index: text, arguments of tools, why it ended.
    pub(crate) texts: BTreeMap<u64, String>,
    calls: BTreeMap<(u64, u64), String>,
    ends: BTreeMap<u64, String>,
    /// By the sequence's index: what is told of each token.
    logprobs: BTreeMap<u64, Vec<Value>>,
    pub(crate) usage: Value,
    /// Times of a first token, and of later ones.
    times: (usize, usize),
    error: Option<String>,
}

impl Answer {
    fn take(&mut self, event: &Value) {
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            self.error = Some(error.to_string());
        }
        if event["usage"].is_object() {
            // What of the prompt was there already is no business of this test's.
            let count = |name: &str| (name.to_owned(), event["usage"][name].clone());
            self.usage = Value::Object(
                ["prompt_tokens", "completion_tokens", "total_tokens"].map(count).into_iter().collect(),
            );
        }
        if let Some(text) = event["text_output"].as_str() {
            self.texts.entry(0).or_default().push_str(text);
            self.times.0 += usize::from(event["prefill_time"].is_number());
            self.times.1 += usize::from(event["decode_time"].is_number());
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().expect("an index");
            let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
            self.texts.entry(index).or_default().push_str(text.unwrap_or_default());
            for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                let place = (index, call["index"].as_u64().unwrap_or_default());
                let call = &call["function"];
                let said = self.calls.entry(place).or_default();
                said.push_str(call["name"].as_str().unwrap_or_default());
                said.push_str(call["arguments"].as_str().unwrap_or_default());
            }
            let told = choice["logprobs"]["content"].as_array().into_iter().flatten();
            self.logprobs.entry(index).or_default().extend(told.cloned());
            if let Some(end) = choice["finish_reason"].as_str() {
                let earlier = self.ends.insert(index, end.to_owned());
                assert_eq!(earlier, None, "a sequence ends once");
            }
        }
    }

    /// How many times a first token's time was told, and how many times a later one's.
    pub(crate) fn times(&self) -> (usize, usize) {
        self.times
    }
}

/// A stream under way.
pub(crate) struct Running {
    events: Arc<AtomicUsize>,
    task: JoinHandle<Answer>,
}

impl Running {
    #[expect(clippy::disallowed_methods, reason = "what is returned owns the task")]
    pub(crate) fn start(port: u16, ask: &Ask) -> Self {
        let (url, body) = (format!("http://127.0.0.1:{port}{}", ask.path), ask.body.clone());
        let events = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&events);
        Self { events, task: tokio::spawn(async move { read(&url, &body, &seen).await }) }
    }

    /// Waits until that many events have come.
    pub(crate) async fn wait_for_tokens(&self, count: usize) {
        let until = Instant::now() + PATIENCE;
        while self.events.load(Ordering::Relaxed) < count {
            assert!(!self.task.is_finished(), "the stream goes on");
            assert!(Instant::now() < until, "{count} events within {PATIENCE:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) async fn answer(self) -> Answer {
        let answer = self.task.await.expect("the client does not panic");
        assert_eq!(answer.error, None);
        answer
    }
}

async fn read(url: &str, body: &Value, seen: &AtomicUsize) -> Answer {
    let response = reqwest::Client::new().post(url).json(body).send().await;
    let mut response = response.expect("the gateway answers");
    let mut answer = Answer::default();
    if !response.status().is_success() {
        let (status, text) = (response.status(), response.text().await.unwrap_or_default());
        answer.error = Some(format!("{status}: {text}"));
        return answer;
    }
    let mut pending = Vec::new();
    while let Some(bytes) = response.chunk().await.expect("the stream is not cut") {
        pending.extend_from_slice(&bytes);
        while let Some(end) = pending.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = pending.drain(..end + 2).collect();
            let event = String::from_utf8(event).expect("text");
            let data = event.trim().strip_prefix("data:").unwrap_or_default().trim().to_owned();
            if data.is_empty() || data == "[DONE]" {
                continue;
            }
            answer.take(&serde_json::from_str(&data).expect("an event of JSON"));
            seen.fetch_add(1, Ordering::Relaxed);
        }
    }
    answer
}
