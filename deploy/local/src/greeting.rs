//! `baton serve`: starts everything, and says how to use it once it can be used.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use node::{Error, Signals};

use crate::options::ServeConfig;
use crate::serve::{Front, reachable, start};

/// Serves until a signal has drained the process, and `grace` at most after that.
pub(crate) async fn serve(config: ServeConfig, grace: Duration) -> Result<(), Error> {
    let signals = Signals::listen()?;
    let door = Door::of(&config.gateway);
    let running = start(config).await?;
    let (front, process) = running.split();
    process.drain_on(signals);
    let tasks = front.context.tasks.clone();
    let _greeting = tasks.spawn_call("greeting", greet(front, door));
    process.finished(grace).await
}

/// What stands between a client and the server.
#[derive(Clone, Copy, Default)]
struct Door {
    tls: bool,
    client_certificate: bool,
    key: bool,
}

impl Door {
    fn of(config: &gateway::Config) -> Self {
        Self {
            tls: config.tls_cert.is_some(),
            client_certificate: config.tls_client_ca.is_some(),
            key: config.api_key.iter().next().is_some() || config.api_key_file.is_some(),
        }
    }

    /// What a call needs to come through; the files and the key are the reader's to fill in.
    fn options(self) -> String {
        let options = [
            (self.tls, " --cacert ca.pem"),
            (self.client_certificate, " --cert client.pem --key client.key.pem"),
            (self.key, " -H \"authorization: Bearer $KEY\""),
        ];
        options.into_iter().filter(|(needed, _)| *needed).map(|(_, option)| option).collect()
    }
}

async fn greet(front: Front, door: Door) {
    if !front.ready().await {
        return;
    }
    match front.model() {
        Some(model) => print!("{}", text(&model, [front.http, front.grpc, front.metrics], door)),
        None => tracing::warn!("ready, but no model is served"),
    }
}

/// One line for each endpoint, and one call of each API that can be pasted into a shell.
fn text(model: &str, [http, grpc, metrics]: [SocketAddr; 3], door: Door) -> String {
    let url = format!("{}://{}", if door.tls { "https" } else { "http" }, reachable(http));
    let calls = [
        (
            format!("/v2/models/{model}/generate_stream"),
            r#"{"text_input": "The capital of France is", "parameters": {"max_new_tokens": 24, "do_sample": false}}"#.to_owned(),
        ),
        (
            "/generate".to_owned(),
            r#"{"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "stream": true}"#.to_owned(),
        ),
        (
            "/v1/chat/completions".to_owned(),
            format!(
                r#"{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of Japan?"}}], "max_tokens": 48, "temperature": 0, "stream": true}}"#
            ),
        ),
    ];
    let mut text = format!("baton serves {model}\n");
    for (name, address) in
        [("http", url.clone()), ("grpc", grpc.to_string()), ("metrics", format!("http://{metrics}/metrics"))]
    {
        let _ = writeln!(text, "  {name:<8} {address}");
    }
    text.push_str("try:\n");
    let options = door.options();
    for (path, body) in calls {
        let _ =
            writeln!(text, "  curl -N{options} {url}{path} -H 'content-type: application/json' -d '{body}'");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses() -> [SocketAddr; 3] {
        [8000, 8001, 8002].map(|port| SocketAddr::from(([0, 0, 0, 0], port)))
    }

    #[test]
    fn calls_say_what_a_door_asks_for() {
        let config = gateway::Config {
            tls_cert: Some("cert.pem".into()),
            tls_client_ca: Some("ca.pem".into()),
            api_key_file: Some("keys".into()),
            ..gateway::Config::default()
        };
        let text = text("SmolLM2", addresses(), Door::of(&config));
        let start = "curl -N --cacert ca.pem --cert client.pem --key client.key.pem -H \"authorization: Bearer \
                     $KEY\" https://127.0.0.1:8000/";
        assert_eq!(text.matches(start).count(), 3, "{text}");
    }

    #[test]
    fn every_call_is_one_line_with_a_json_body() {
        let text = text("SmolLM2", addresses(), Door::default());
        let calls: Vec<_> = text.lines().filter_map(|line| line.trim().strip_prefix("curl -N ")).collect();
        assert_eq!(calls.len(), 3);
        for (call, path) in
            calls.iter().zip(["/v2/models/SmolLM2/generate_stream", "/generate", "/v1/chat/completions"])
        {
            let (target, rest) = call.split_once(" -H ").unwrap();
            assert_eq!(target, format!("http://127.0.0.1:8000{path}"));
            let body = rest.split_once("-d '").and_then(|(_, body)| body.strip_suffix('\'')).unwrap();
            serde_json::from_str::<serde_json::Value>(body).unwrap();
        }
    }
}
