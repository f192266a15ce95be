//! The limits of a request's head, and that bodies and messages are free of them, over real sockets.

#![expect(clippy::unwrap_used, reason = "these are tests")]

mod probe;

use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::routing::post;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use node::{Context, Serving, serve_http};
use probe::{Rig, fence};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A server that answers with the length of the body.
async fn lengths() -> (Context, Serving) {
    let context = Context::new("lengths", Vec::new());
    let length = post(|body: Bytes| async move { body.len().to_string() });
    let router = axum::Router::new().route("/", length).layer(DefaultBodyLimit::disable());
    let serving = serve_http("127.0.0.1:0", router, &context).await.unwrap();
    (context, serving)
}

/// The answer over HTTP/1 to a request with a header and a body of so many bytes.
async fn answer(address: &str, header: usize, body: usize) -> String {
    let (mut read, mut write) = TcpStream::connect(address).await.unwrap().into_split();
    let head = format!(
        "POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-long: {}\r\ncontent-length: {body}\r\n\r\n",
        "a".repeat(header)
    );
    let send = async move {
        // A server that refuses stops reading, which is a fault of writing here.
        let sent = write.write_all(head.as_bytes()).await;
        if sent.is_ok() {
            let _ = write.write_all(&vec![b'b'; body]).await;
        }
        write
    };
    let receive = async move {
        let mut answer = Vec::new();
        let _ = read.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    };
    tokio::join!(send, receive).1
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_header_is_refused_and_a_long_body_is_not() {
    let (_context, serving) = lengths().await;
    let refused = answer(&serving.address, 300 << 10, 0).await;
    assert!(refused.starts_with("HTTP/1.1 431 "), "{refused:?}");
    for header in [7 << 10, 60 << 10] {
        let answered = answer(&serving.address, header, 2).await;
        assert!(answered.starts_with("HTTP/1.1 200 ") && answered.ends_with("\r\n\r\n2"), "{answered:?}");
    }
    let answered = answer(&serving.address, 100, 32 << 20).await;
    assert!(answered.starts_with("HTTP/1.1 200 ") && answered.ends_with("33554432"), "{answered:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_holds_over_http2() {
    let (_context, serving) = lengths().await;
    let socket = TcpStream::connect(&serving.address).await.unwrap();
    let connecting = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(socket));
    let (mut client, connection) = connecting.await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move { drop(connection.await) });
    let request = |header: usize, body: usize| {
        http::Request::post(format!("http://{}/", serving.address))
            .header("x-long", "a".repeat(header))
            .body(Full::new(Bytes::from(vec![b'b'; body])))
            .unwrap()
    };
    let answered = client.send_request(request(7 << 10, 32 << 20)).await.unwrap();
    assert_eq!(answered.status(), 200);
    assert_eq!(answered.into_body().collect().await.unwrap().to_bytes(), "33554432");
    // The client is told the limit, and may refuse by itself.
    if let Ok(answered) = client.send_request(request(300 << 10, 0)).await {
        assert_eq!(answered.status(), 431);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_not_bound_by_the_limit_of_headers() {
    let rig = Rig::at("127.0.0.1:0").await;
    // Just below the limit of a message, 64 MiB.
    rig.client().fence(fence(&"x".repeat((64 << 20) - 1024))).await.unwrap();
}
