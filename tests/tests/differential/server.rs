//! A gateway and how to reach it.

use std::time::Duration;

use baton_tests::cluster::MODEL;
use serde_json::Value;
use tonic::transport::{Channel, Endpoint};

/// A gateway's two ports.
pub(crate) struct Server {
    http: reqwest::Client,
    url: String,
    pub(crate) channel: Channel,
}

impl Server {
    pub(crate) fn new(http: u16, grpc: u16) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{grpc}")).expect("an address");
        Self {
            http: reqwest::Client::new(),
            url: format!("http://127.0.0.1:{http}"),
            channel: endpoint.connect_timeout(Duration::from_secs(5)).connect_lazy(),
        }
    }

    /// A path of the model.
    pub(crate) fn model_path(operation: &str) -> String {
        format!("/v2/models/{MODEL}/{operation}")
    }

    /// The body of a good answer.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> String {
        let response = self.http.post(format!("{}{path}", self.url)).json(body).send().await;
        let response = response.expect("the gateway answers");
        let status = response.status();
        let answer = response.text().await.expect("a whole body");
        assert!(status.is_success(), "{path} {body}: {status} {answer}");
        answer
    }

    /// The JSON object that answers.
    pub(crate) async fn whole(&self, path: &str, body: &Value) -> Value {
        read(&self.post(path, body).await)
    }

    /// The JSON objects of a stream of events.
    pub(crate) async fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let answer = self.post(path, body).await;
        let events = answer.strip_suffix("\n\n").expect("a blank line at the end").split("\n\n");
        let mut data: Vec<&str> =
            events.map(|event| event.strip_prefix("data:").expect("an event of data").trim_start()).collect();
        if path.starts_with("/v1") {
            assert_eq!(data.pop(), Some("[DONE]"), "{answer}");
        }
        data.into_iter().map(read).collect()
    }
}

/// JSON of one line.
pub(crate) fn read(text: &str) -> Value {
    assert!(!text.contains('\n'), "{text:?}");
    serde_json::from_str(text).unwrap_or_else(|fault| panic!("{fault}: {text}"))
}
