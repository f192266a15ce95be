//! The port for operators: metrics and health, from a process's start to its end.

#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::time::Duration;

use node::operators::Pages;
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
    let serving = operators::serve("127.0.0.1:0", Pages::Shown, &context).await.unwrap();
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
    let serving = operators::serve("127.0.0.1:0", Pages::Shown, &context).await.unwrap();
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

#[tokio::test(flavor = "multi_thread")]
async fn dumps_are_offered_and_can_be_hidden() {
    let context = Context::new("process", Vec::new());
    let serving = operators::serve("127.0.0.1:0", Pages::Shown, &context).await.unwrap();
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = asked.clone();
    let dump = context.debug.add("engine", move || {
        let count = counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
        async move { [count] }
    });
    let standing = context.readiness.join("engine", "the model is being loaded");
    let index = get(&serving.address, "/debug").await;
    for name in ["engine", "process"] {
        assert!(index.contains(&format!("<a href=\"/debug/{name}\">")), "{index}");
    }
    assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 0, "a dump is made when it is asked for");
    let page = get(&serving.address, "/debug/engine").await;
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("content-type: application/json"), "{page}");
    assert!(page.ends_with("[\n  1\n]"), "{page}");
    let page = get(&serving.address, "/debug/process").await;
    for part in
        ["\"draining\": false", "\"engine\": \"the model is being loaded\"", "\"members\"", "\"tasks\""]
    {
        assert!(page.contains(part), "{part} in {page}");
    }
    drop((dump, standing));
    assert!(get(&serving.address, "/debug/engine").await.starts_with("HTTP/1.1 404"));
    assert!(
        get(&serving.address, "/dashboard").await.starts_with("HTTP/1.1 404"),
        "nobody offers an overview"
    );

    let overview = context.debug.add("overview.router", || async { "seen" });
    let page = get(&serving.address, "/dashboard").await;
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("default-src 'none'"), "{page}");
    assert!(get(&serving.address, "/dashboard/state").await.ends_with("\"seen\""));
    let better = context.debug.add("overview.gateway", || async { "seen by a gateway" });
    assert!(get(&serving.address, "/dashboard/state").await.ends_with("\"seen by a gateway\""));
    drop((overview, better));

    let hidden = operators::serve("127.0.0.1:0", Pages::Hidden, &context).await.unwrap();
    for path in ["/debug", "/debug/process", "/dashboard", "/dashboard/state", "/dashboard/script.js"] {
        assert!(get(&hidden.address, path).await.starts_with("HTTP/1.1 404"), "{path}");
    }
    assert!(get(&hidden.address, "/health/live").await.starts_with("HTTP/1.1 200"));
    context.shutdown.stop();
}
