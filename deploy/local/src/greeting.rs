//! `baton serve`: starts everything, and says how to use it once it can be used.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use node::Error;

use crate::options::ServeConfig;
use crate::serve::{Front, reachable, start};

/// Serves until a signal has drained the process, and `grace` at most after that.
pub(crate) async fn serve(config: ServeConfig, grace: Duration) -> Result<(), Error> {
    let running = start(config).await?;
    let (front, process) = running.split();
    process.drain_on_signals()?;
    let tasks = front.context.tasks.clone();
    let _greeting = tasks.spawn_call("greeting", greet(front));
    process.finished(grace).await
}

async fn greet(front: Front) {
    if !front.ready().await {
        return;
    }
    match front.model().await {
        Ok(Some(model)) => print!("{}", text(&model, front.http, front.grpc, front.metrics)),
        Ok(None) => tracing::warn!("ready, but no model is served"),
        Err(error) => tracing::warn!(%error, "ready, but the served models are not known"),
    }
}

/// One line for each endpoint, and one call of each API that can be pasted into a shell.
fn text(model: &str, http: SocketAddr, grpc: SocketAddr, metrics: SocketAddr) -> String {
    let url = format!("http://{}", reachable(http));
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
    for (path, body) in calls {
        let _ = writeln!(text, "  curl -N {url}{path} -H 'content-type: application/json' -d '{body}'");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_one_line_with_a_json_body() {
        let address = |port| SocketAddr::from(([0, 0, 0, 0], port));
        let text = text("SmolLM2", address(8000), address(8001), address(8002));
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
