//! What a client cannot make the gateway do: wait for bodies for ever, read or keep too much, count past the end.

use std::time::{Duration, Instant};

use proto::wire::GenerateRequest;
use proto::wire::generate_request::Prompt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Cluster, MODEL};

const CHAT: &str = "/v1/chat/completions";

fn paths() -> [String; 3] {
    ["/generate".to_owned(), format!("/v2/models/{MODEL}/generate"), CHAT.to_owned()]
}

/// A request of which no more than this part of its body is ever sent.
async fn begin(cluster: &Cluster, path: &str, length: u64, sent: &str) -> TcpStream {
    let mut socket = TcpStream::connect(cluster.gateway.http_address()).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{sent}");
    socket.write_all(head.as_bytes()).await.unwrap();
    socket
}

/// The status and the message of the answer, up to the close of the connection.
async fn refusal(mut socket: TcpStream, path: &str) -> (u16, String) {
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, message(path, &serde_json::from_str(body).unwrap()))
}

/// The message of an error object in the shape of the path's family.
fn message(path: &str, error: &Value) -> String {
    let message = if path == CHAT {
        assert_eq!(error["error"]["type"], "invalid_request_error");
        &error["error"]["message"]
    } else {
        assert_eq!(error["error_type"], "Input Validation Error");
        &error["error"]
    };
    message.as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_body_that_never_ends_is_given_up_and_holds_neither_place_nor_drain() {
    let cluster = Cluster::start(&["r0"], |config| {
        config.body_timeout = Duration::from_millis(300);
        config.requests_max = 1;
    })
    .await;
    for path in paths() {
        let socket = begin(&cluster, &path, 100, "{\"prompt\":").await;
        let (status, message) = refusal(socket, &path).await;
        assert_eq!((status, message.as_str()), (408, "body: not complete within 0.3 s"), "{path}");
    }
    cluster.script.says("ok");
    let (status, _) = cluster.answer("/generate", &json!({"prompt": "x"})).await;
    assert_eq!(status, 200, "the place is free again");

    let socket = begin(&cluster, "/generate", 100, "{").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    cluster.context.shutdown.drain();
    let Cluster { gateway, .. } = cluster;
    tokio::time::timeout(Duration::from_secs(5), gateway.finished()).await.expect("the drain ends");
    assert_eq!(refusal(socket, "/generate").await.0, 408);
}

#[tokio::test]
async fn a_body_that_says_it_is_too_long_is_refused_unread() {
    let cluster = Cluster::start(&["r0"], |config| config.body_bytes_max = 1000).await;
    for path in paths() {
        let started = Instant::now();
        let socket = begin(&cluster, &path, 1001, "").await;
        let (status, message) = refusal(socket, &path).await;
        assert_eq!((status, message.as_str()), (413, "body: more than 1000 bytes"), "{path}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}

#[tokio::test]
async fn a_coded_body_is_refused_by_name() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let send = |path: &str, coding: &'static str| {
        let body = json!({"prompt": "x"}).to_string();
        cluster.client().post(cluster.url(path)).header("content-encoding", coding).body(body).send()
    };
    for path in paths() {
        for (coding, named) in [("gzip", "gzip"), ("deflate", "deflate"), ("identity, br", "br")] {
            let response = send(&path, coding).await.unwrap();
            assert_eq!(response.status(), 415, "{path} {coding}");
            let expected = format!("content-encoding: only identity is taken, got {named:?}");
            assert_eq!(message(&path, &response.json().await.unwrap()), expected);
        }
    }
    for coding in ["identity", "Identity", ""] {
        assert_eq!(send("/generate", coding).await.unwrap().status(), 200, "{coding:?}");
    }
}

#[tokio::test]
async fn long_stops_are_refused_on_every_route() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let long = "a".repeat(6_000_000);
    let expected = "stop: expected at most 32768 characters in all, got 6000000";
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "stop": long});
    for (path, body, status) in [(CHAT, chat, 400), ("/generate", json!({"prompt": "x", "stop": long}), 422)]
    {
        let response = cluster.post(path, &body).await;
        assert_eq!(response.status(), status);
        assert_eq!(message(path, &response.json().await.unwrap()), expected);
    }
    let prompt = || Some(Prompt::Text("x".into()));
    let refused = |request| async { cluster.grpc().generate(request).await.unwrap_err() };
    let status = refused(GenerateRequest { prompt: prompt(), stop: vec![long], ..Default::default() }).await;
    assert_eq!((status.code(), status.message()), (tonic::Code::InvalidArgument, expected));
    let many = vec!["ab".to_owned(); 1025];
    let status = refused(GenerateRequest { prompt: prompt(), stop: many, ..Default::default() }).await;
    assert_eq!(status.message(), "stop: expected at most 1024 strings, got 1025");
    let ids = vec![1; 1025];
    let status =
        refused(GenerateRequest { prompt: prompt(), stop_token_ids: ids, ..Default::default() }).await;
    assert_eq!(status.message(), "stop_token_ids: expected at most 1024 token ids, got 1025");
    assert!(cluster.script.take_seen().is_empty(), "nothing of this reached a router");
}

#[tokio::test]
async fn a_deadline_beyond_all_clocks_is_a_month() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let within = |timeout: u64| GenerateRequest {
        prompt: Some(Prompt::Text("x".into())),
        timeout_us: Some(timeout),
        ..Default::default()
    };
    for timeout in [1 << 63, u64::MAX] {
        let mut answer = cluster.grpc().generate(within(timeout)).await.unwrap().into_inner();
        while answer.message().await.unwrap().is_some() {}
        let (_, generation) = cluster.script.take_seen().remove(0);
        let month = Duration::from_hours(30 * 24);
        assert!(generation.time_left <= month && generation.time_left + Duration::from_mins(1) > month);
    }
    let status = cluster.grpc().generate(within(0)).await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (tonic::Code::InvalidArgument, "timeout_us: expected at least 1, got 0")
    );
}

#[tokio::test]
async fn a_prompt_that_cannot_fit_is_refused_in_no_time() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let started = Instant::now();
    let response = cluster.post("/generate", &json!({"prompt": "ab c".repeat(1 << 20)})).await;
    assert_eq!(response.status(), 422);
    let told = message("/generate", &response.json().await.unwrap());
    assert_eq!(
        told,
        "prompt: the prompt has 4194304 bytes, and the model's context of 64 tokens never holds more than 768"
    );
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}
