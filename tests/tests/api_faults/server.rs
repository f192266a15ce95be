//! `baton serve`, and calls of it.

use std::time::Duration;

use baton_tests::cluster::{Cluster, Name, Service, Settings};
use serde_json::{Value, json};

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETION: &str = "/v1/completions";

const SERVE: Name = (Service::Serve, 0);

/// A server with prefill and decode apart, in one process.
pub(crate) struct Server {
    cluster: Cluster,
    http: reqwest::Client,
}

/// What came of a call.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) text: String,
    pub(crate) finish: String,
    /// Entries of `logprobs`, one for each token.
    pub(crate) entries: Vec<Value>,
    pub(crate) completion_tokens: u64,
}

impl Server {
    /// Starts with further arguments. A later `--model` than the default one counts.
    pub(crate) async fn start(arguments: &str) -> Self {
        let words = format!("--placement split {arguments}");
        let serve = words.split_whitespace().map(str::to_owned).collect();
        let mut cluster = Cluster::new(Settings { serve, ..Settings::default() });
        cluster.spawn(SERVE);
        cluster.wait_ready().await;
        let http = reqwest::Client::builder().timeout(Duration::from_mins(2)).build().expect("a client");
        Self { cluster, http }
    }

    pub(crate) fn port(&self) -> u16 {
        self.cluster.http_port()
    }

    /// Kilobytes of memory that the process has now.
    pub(crate) fn memory_kib(&self) -> u64 {
        self.cluster.resident_kib(SERVE)
    }

    /// A metric, over all label sets that have these labels.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        self.cluster.metrics(SERVE).await.sum(name, labels)
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> (u16, String) {
        let call = self.http.post(format!("http://127.0.0.1:{}{path}", self.port())).json(body);
        let response = call.send().await.expect("the server answers");
        (response.status().as_u16(), response.text().await.expect("a whole body"))
    }

    /// A good answer of `/v1`, greedy unless the body says otherwise, whole or as a stream.
    pub(crate) async fn say(&self, path: &str, body: &Value, stream: bool) -> Said {
        let mut body = body.clone();
        let fields = body.as_object_mut().expect("an object");
        fields.entry("temperature").or_insert(json!(0));
        if stream {
            fields.insert("stream".into(), json!(true));
            fields.insert("stream_options".into(), json!({ "include_usage": true }));
        }
        let (status, answer) = self.post(path, &body).await;
        assert_eq!(status, 200, "{path} {body}: {answer}");
        let objects: Vec<Value> = if stream {
            let events =
                answer.strip_suffix("data: [DONE]\n\n").expect("the last event").split_terminator("\n\n");
            events.map(|event| read(event.strip_prefix("data: ").expect("an event of data"))).collect()
        } else {
            vec![read(&answer)]
        };
        let said = Said::gathered(&objects);
        assert_ne!(said.finish, "", "an answer says why it ended: {answer}");
        said
    }

    /// The same both ways.
    pub(crate) async fn say_both_ways(&self, path: &str, body: &Value) -> Said {
        let (whole, streamed) = (self.say(path, body, false).await, self.say(path, body, true).await);
        assert_eq!((&whole.text, &whole.finish), (&streamed.text, &streamed.finish), "{body}");
        assert_eq!(whole.completion_tokens, streamed.completion_tokens, "{body}");
        assert_eq!(whole.entries, streamed.entries, "{body}");
        whole
    }
}

fn read(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|fault| panic!("{fault}: {text}"))
}

impl Said {
    fn gathered(objects: &[Value]) -> Self {
        let mut said =
            Self { text: String::new(), finish: String::new(), entries: Vec::new(), completion_tokens: 0 };
        for object in objects {
            if let Some(tokens) = object["usage"]["completion_tokens"].as_u64() {
                said.completion_tokens = tokens;
            }
            for choice in object["choices"].as_array().expect("choices") {
                said.take(choice);
            }
        }
        said
    }

    fn take(&mut self, choice: &Value) {
        for place in ["/text", "/message/content", "/delta/content"] {
            self.text.push_str(choice.pointer(place).and_then(Value::as_str).unwrap_or_default());
        }
        if let Some(finish) = choice["finish_reason"].as_str() {
            assert_eq!(self.finish, "", "it ends once");
            finish.clone_into(&mut self.finish);
        }
        // A chat has a list of entries; a completion has lists of their parts.
        let logprobs = &choice["logprobs"];
        self.entries.extend(logprobs["content"].as_array().into_iter().flatten().cloned());
        let list = |name: &str| logprobs[name].as_array().cloned().unwrap_or_default();
        let parts = list("tokens").into_iter().zip(list("token_logprobs")).zip(list("text_offset"));
        self.entries.extend(parts.map(|((token, logprob), offset)| json!([token, logprob, offset])));
    }
}

/// A chat with one question.
pub(crate) fn chat(question: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": question }], "max_tokens": 64 })
}

/// The same, whose answer is a value that a schema allows.
pub(crate) fn chat_in(schema: &Value) -> Value {
    let mut body = chat("Say something.");
    body["response_format"] = json!({ "type": "json_schema", "json_schema": { "name": "answer", "strict": true, "schema": schema } });
    body
}
