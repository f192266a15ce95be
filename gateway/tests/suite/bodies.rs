//! How bodies come in: in thousands of pieces, after a word of the server, too large, too long under way.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::Cluster;

async fn connect(cluster: &Cluster) -> TcpStream {
    TcpStream::connect(cluster.gateway.http_address()).await.unwrap()
}

/// What comes until it ends like this, or the connection does.
async fn read_until(socket: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    let mut byte = [0];
    while !read.ends_with(end.as_bytes()) && socket.read(&mut byte).await.unwrap() > 0 {
        read.push(byte[0]);
    }
    String::from_utf8(read).unwrap()
}

async fn rest(mut socket: TcpStream) -> String {
    let mut read = Vec::new();
    let _ = socket.read_to_end(&mut read).await;
    String::from_utf8(read).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_in_seventy_thousand_chunks_is_one_body() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let prompt = "{\"prompt\":\"x\"";
    let blanks = 70_000 - prompt.len() - 1;
    let body = format!("{prompt}{}}}", " ".repeat(blanks));
    let chunks: String = body.chars().map(|byte| format!("1\r\n{byte}\r\n")).collect();
    let head =
        "POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut socket = connect(&cluster).await;
    socket.write_all(format!("{head}{chunks}0\r\n\r\n").as_bytes()).await.unwrap();
    let answer = rest(socket).await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("\"text\":"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_beyond_the_limit_are_refused() {
    let cluster = Cluster::start(&["r0"], |config| config.body_bytes_max = 1000).await;
    let chunks = "1\r\nx\r\n".repeat(1001);
    let head =
        "POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut socket = connect(&cluster).await;
    socket.write_all(format!("{head}{chunks}").as_bytes()).await.unwrap();
    let answer = rest(socket).await;
    assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("more than 1000 bytes"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_word_gets_it_or_a_refusal() {
    let cluster = Cluster::start(&["r0"], |config| {
        config.body_bytes_max = 1000;
        config.api_key = ["sk-1"].into_iter().collect();
    })
    .await;
    cluster.script.says("ok");
    let head = |key: &str, length: usize| {
        format!(
            "POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\
             content-length: {length}\r\nexpect: 100-continue\r\n\r\n"
        )
    };
    let body = json!({"prompt": "x"}).to_string();
    let mut socket = connect(&cluster).await;
    socket.write_all(head("sk-1", body.len()).as_bytes()).await.unwrap();
    assert_eq!(read_until(&mut socket, "\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    socket.write_all(body.as_bytes()).await.unwrap();
    let answer = rest(socket).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    // Nobody is asked for what would be refused.
    for (key, length, status) in [("sk-1", 1001, "413"), ("sk-2", 10, "401")] {
        let mut socket = connect(&cluster).await;
        socket.write_all(head(key, length).as_bytes()).await.unwrap();
        let answer = rest(socket).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_body_gets_its_refusal() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let prompt = |bytes: usize| json!({"prompt": "x".repeat(bytes)});
    // As large as bodies may be, and refused for what it says.
    assert_eq!(cluster.post("/generate", &prompt((32 << 20) - 13)).await.status(), 422);
    // Refused unread, and told so every time: the server takes what the client has still to say.
    for _ in 0..10 {
        let (status, body) = cluster.answer("/generate", &prompt((32 << 20) - 12)).await;
        assert_eq!((status, body.contains("more than 33554432 bytes")), (413, true), "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_cut_short_does_not_hold_a_drain() {
    let cluster = Cluster::start(&["r0"], |config| config.body_timeout = Duration::from_mins(10)).await;
    let mut socket = connect(&cluster).await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{";
    socket.write_all(head.as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    cluster.context.shutdown.drain();
    let Cluster { gateway, .. } = cluster;
    tokio::time::timeout(Duration::from_secs(5), gateway.finished()).await.expect("the drain ends");
    let answer = rest(socket).await;
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("shutting down"), "{answer}");
}
