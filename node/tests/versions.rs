//! Either version of HTTP on one port, told apart by the first bytes however they come, over real sockets.

#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::time::Duration;

use axum::routing::get;
use node::{Context, Serving, serve_http};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Between two bytes; longer than the server waits for the third.
const LONG: Duration = Duration::from_millis(600);
const SHORT: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_secs(10);

async fn server() -> (Context, Serving) {
    let context = Context::new("versions", Vec::new());
    let router = axum::Router::new().fallback(get(async || "here"));
    let serving = serve_http("127.0.0.1:0", router, &context).await.unwrap();
    (context, serving)
}

/// Sends the first bytes one by one with pauses, then the rest, and reads until `enough` has come.
async fn dripped(serving: &Serving, sent: &[u8], pause: Duration, enough: usize) -> Vec<u8> {
    let mut stream = TcpStream::connect(&serving.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let (drips, rest) = sent.split_at(4);
    for byte in drips {
        stream.write_all(&[*byte]).await.unwrap();
        tokio::time::sleep(pause).await;
    }
    stream.write_all(rest).await.unwrap();
    let mut came = Vec::new();
    let reading = async { while came.len() < enough && stream.read_buf(&mut came).await.unwrap() > 0 {} };
    tokio::time::timeout(PATIENCE, reading).await.unwrap();
    came
}

/// The status of an answer over HTTP/1.
async fn status(serving: &Serving, method: &str, pause: Duration) -> String {
    let request = format!("{method} / HTTP/1.1\r\nhost: x\r\n\r\n");
    let came = dripped(serving, request.as_bytes(), pause, 12).await;
    String::from_utf8_lossy(&came[..12]).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn both_versions_are_told_apart_however_slowly_they_begin() {
    let (_context, serving) = server().await;
    // An empty frame of settings follows; the server answers with its own, of type 4 and on stream 0.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    for pause in [SHORT, LONG] {
        // A method that begins as the preface does is one that nobody knows.
        let (known, unknown, settings) = tokio::join!(
            status(&serving, "GET", pause),
            status(&serving, "PR", pause),
            dripped(&serving, preface, pause, 9)
        );
        assert_eq!((known.as_str(), unknown.as_str()), ("HTTP/1.1 200", "HTTP/1.1 405"));
        assert_eq!((settings[3], &settings[5..9]), (4, &[0; 4][..]), "{settings:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_says_nothing_holds_no_drain_open() {
    let (context, serving) = server().await;
    let mut silent = TcpStream::connect(&serving.address).await.unwrap();
    let mut halting = TcpStream::connect(&serving.address).await.unwrap();
    halting.write_all(b"P").await.unwrap();
    tokio::time::sleep(LONG).await;
    context.shutdown.drain();
    for stream in [&mut silent, &mut halting] {
        let closed = tokio::time::timeout(PATIENCE, stream.read(&mut [0])).await.unwrap();
        assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    }
}
