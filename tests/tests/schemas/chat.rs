//! Chats with a schema, over HTTP, as a stream of events.

use std::sync::atomic::{AtomicUsize, Ordering};

use baton_tests::cluster::MODEL;
use serde_json::{Value, json};

use crate::corpus::Case;

/// Most tokens of an answer.
pub(crate) const TOKENS_MAX: usize = 512;

/// What a chat brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) text: String,
    /// Why it ended; empty when it did not.
    pub(crate) finish: String,
    /// As the answer's own account has it.
    pub(crate) tokens: u64,
    pub(crate) error: Option<String>,
}

/// A gateway to chat with.
pub(crate) struct Chats {
    http: reqwest::Client,
    url: String,
}

impl Chats {
    pub(crate) fn with(port: u16) -> Self {
        Self { http: reqwest::Client::new(), url: format!("http://127.0.0.1:{port}") }
    }

    /// Asks, and reads the answer to its end. Counts events with text in `seen`.
    pub(crate) async fn ask(&self, case: &Case, seed: u64, seen: &AtomicUsize) -> Answer {
        let mut answer = Answer::default();
        if let Err(fault) = self.stream(case, seed, &mut answer, seen).await {
            answer.error = Some(fault);
        }
        answer
    }

    /// Status and message of the answer to a schema that should be refused before a stream starts.
    pub(crate) async fn refusal(&self, schema: &Value) -> Result<(u16, String), String> {
        let response = self.post("Say something.", schema, 1).await?;
        let status = response.status().as_u16();
        let body: Value = response.json().await.map_err(|fault| fault.to_string())?;
        Ok((status, body["error"]["message"].as_str().unwrap_or_default().to_owned()))
    }

    async fn post(&self, ask: &str, schema: &Value, seed: u64) -> Result<reqwest::Response, String> {
        let request = json!({
            "model": MODEL,
            "messages": [{ "role": "user", "content": format!("{ask} Answer in JSON.") }],
            "temperature": 1,
            "seed": seed,
            "max_tokens": TOKENS_MAX,
            "stream": true,
            "stream_options": { "include_usage": true },
            "response_format": {
                "type": "json_schema",
                "json_schema": { "name": "answer", "strict": true, "schema": schema }
            }
        });
        let send = self.http.post(format!("{}/v1/chat/completions", self.url)).json(&request).send();
        send.await.map_err(|fault| fault.to_string())
    }

    async fn stream(
        &self,
        case: &Case,
        seed: u64,
        answer: &mut Answer,
        seen: &AtomicUsize,
    ) -> Result<(), String> {
        let mut response = self.post(&case.ask, &case.schema, seed).await?;
        if !response.status().is_success() {
            let (status, body) = (response.status(), response.text().await.unwrap_or_default());
            return Err(format!("{status}: {body}"));
        }
        let mut pending = Vec::new();
        while let Some(bytes) = response.chunk().await.map_err(|fault| fault.to_string())? {
            pending.extend_from_slice(&bytes);
            while let Some(end) = pending.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = pending.drain(..end + 2).collect();
                let event = String::from_utf8(event).map_err(|fault| fault.to_string())?;
                let Some(data) = event.trim().strip_prefix("data: ") else { continue };
                if data == "[DONE]" {
                    return Ok(());
                }
                let event: Value = serde_json::from_str(data).map_err(|fault| format!("{fault}: {data}"))?;
                answer.take(&event, seen)?;
            }
        }
        Err("the stream ended without [DONE]".to_owned())
    }
}

impl Answer {
    fn take(&mut self, event: &Value, seen: &AtomicUsize) -> Result<(), String> {
        if let Some(error) = event.get("error") {
            return Err(error.to_string());
        }
        if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
            self.tokens = tokens;
        }
        let choice = &event["choices"][0];
        if let Some(text) = choice["delta"]["content"].as_str().filter(|text| !text.is_empty()) {
            self.text.push_str(text);
            seen.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(finish) = choice["finish_reason"].as_str() {
            finish.clone_into(&mut self.finish);
        }
        Ok(())
    }
}
