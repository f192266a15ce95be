//! Everything in one process, started from code.

#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::time::Duration;

use baton::{Running, ServeConfig, start};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const GRACE: Duration = Duration::from_secs(5);

fn sim() -> ServeConfig {
    let mut config = ServeConfig::default();
    config.options.port = 0;
    config.options.grpc_port = 0;
    config.options.metrics_port = 0;
    config.options.prefill = 2;
    config.worker.model = "sim:".parse().unwrap();
    config.worker.threads = Some(1);
    config
}

async fn get(address: std::net::SocketAddr, path: &str) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    answer
}

/// Waits until the metrics show every worker by its own name.
async fn wait_workers(running: &Running) {
    let start = std::time::Instant::now();
    loop {
        let page = get(running.metrics, "/metrics").await;
        if ["prefill-0", "prefill-1", "decode-0"]
            .iter()
            .all(|name| page.contains(&format!("worker=\"{name}\"")))
        {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{page}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_serves_at_free_ports_and_drains() {
    let running = start(sim()).await.unwrap();
    let ports = [running.http, running.grpc, running.metrics].map(|address| address.port());
    assert!(ports.iter().all(|port| *port != 0) && ports[0] != ports[1] && ports[1] != ports[2], "{ports:?}");
    assert!(get(running.http, "/v2/health/live").await.starts_with("HTTP/1.1 200"));
    wait_workers(&running).await;
    running.shutdown().drain();
    assert!(!running.ready().await, "a process that ends does not become ready");
    running.finished(GRACE).await.unwrap();
    assert!(TcpStream::connect(("127.0.0.1", ports[0])).await.is_err(), "the port is closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_run_side_by_side_and_a_drop_stops_one() {
    let (first, second) = (start(sim()).await.unwrap(), start(sim()).await.unwrap());
    let stopped = first.shutdown().clone();
    drop(first);
    assert!(stopped.is_stopped());
    assert!(get(second.http, "/v2/health/live").await.starts_with("HTTP/1.1 200"));
    second.shutdown().drain();
    second.finished(GRACE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_cannot_start_ends_the_process_with_its_error() {
    let mut config = sim();
    config.worker.model = "/no/such.gguf".parse().unwrap();
    let error = start(config).await.unwrap().finished(GRACE).await.unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("/no/such.gguf"), "{error}");
}
