//! The port for operators: metrics and health, from a process's start to its end.

#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::time::Duration;

use node::{Context, operators};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn get(address: &str, path: &str) -> String {
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut page = String::new();
    socket.read_to_string(&mut page).await.unwrap();
    page
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_served_with_buckets() {
    let context = Context::new("metered", Vec::new());
    node::metrics::install().unwrap();
    node::metrics::install().unwrap();
    metrics::histogram!("test_wait_seconds").record(0.003);
    metrics::counter!("test_calls_total", "worker" => "decode-0").increment(2);
    let serving = operators::serve("127.0.0.1:0", &context).await.unwrap();
    let page = get(&serving.address, "/metrics").await;
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    for line in [
        "test_calls_total{worker=\"decode-0\"} 2",
        "test_wait_seconds_bucket{le=\"0.002\"} 0",
        "test_wait_seconds_bucket{le=\"0.005\"} 1",
        "# TYPE test_wait_seconds histogram",
    ] {
        assert!(page.contains(line), "{line} in {page}");
    }
    assert!(get(&serving.address, "/nothing").await.starts_with("HTTP/1.1 404"));
    context.shutdown.stop();
    serving.finished().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_told_from_start_to_stop_and_holds_no_drain_open() {
    let context = Context::new("process", Vec::new());
    let serving = operators::serve("127.0.0.1:0", &context).await.unwrap();
    let address = serving.address.clone();
    let health = async |path: &str| {
        let page = get(&address, path).await;
        let (head, body) = page.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("cache-control: no-store"), "{head}");
        let status: u16 = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.trim().to_owned())
    };
    assert_eq!(health("/health/live").await, (200, "alive".into()));
    assert_eq!(health("/health/ready").await, (503, "not ready: no service has started yet".into()));

    let standing = context.readiness.join("decode", "the model is being loaded");
    assert_eq!(health("/health/live").await, (200, "alive".into()));
    assert_eq!(health("/health/ready").await, (503, "not ready: decode: the model is being loaded".into()));
    standing.ready();
    assert_eq!(health("/health/ready").await, (200, "ready".into()));
    standing.not_ready("no block is free");
    assert_eq!(health("/health/ready").await, (503, "not ready: decode: no block is free".into()));
    standing.ready();

    // A connection that stays open, and asks again while the process drains.
    let mut kept = tokio::net::TcpStream::connect(&address).await.unwrap();
    let mut ask = async || {
        kept.write_all(b"GET /health/ready HTTP/1.1\r\nhost: here\r\n\r\n").await.unwrap();
        let mut answer = vec![0; 4096];
        let read = kept.read(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer[..read]).into_owned()
    };
    assert!(ask().await.starts_with("HTTP/1.1 200"));
    context.shutdown.drain();
    tokio::time::timeout(Duration::from_secs(10), context.shutdown.idle()).await.unwrap();
    assert!(ask().await.contains("not ready: draining"));
    assert_eq!(health("/health/live").await, (200, "alive".into()));
    assert_eq!(health("/health/ready").await, (503, "not ready: draining".into()));

    context.shutdown.stop();
    serving.finished().await;
    assert!(tokio::net::TcpStream::connect(&address).await.is_err(), "the port is closed");
}
