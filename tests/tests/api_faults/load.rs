//! Too little memory for all at once, clients that leave, clients that do not read.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::server::{CHAT, COMPLETION, Server, chat};

/// Tokens of each of the answers that compete for memory.
const LONG: usize = 200;

fn long_answer(index: usize) -> Value {
    let prompt = format!("Number {index} of a list of stories that I like begins with");
    json!({ "prompt": prompt, "max_tokens": LONG, "ignore_eos": true })
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_make_room_for_others_lose_nothing() {
    // Each needs 14 blocks in the end, and all of them together 112.
    let tight = Server::start("--kv-blocks 40 --context-len 512").await;
    let preempted = async {
        loop {
            if tight.metric("baton_engine_sequences", &["state=\"preempted\""]).await > 0.0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let bodies: Vec<Value> = (0..8).map(long_answer).collect();
    let all = futures::future::join_all(
        bodies.iter().enumerate().map(|(index, body)| tight.say(COMPLETION, body, index % 2 == 0)),
    );
    let (together, seen) = tokio::join!(all, tokio::time::timeout(Duration::from_mins(2), preempted));
    assert!(seen.is_ok(), "some had to make room");
    // Two at a time fit, so that none of them makes room.
    for (pair, bodies) in together.chunks(2).zip(bodies.chunks(2)) {
        let undisturbed = bodies.iter().map(|body| tight.say(COMPLETION, body, false));
        for (said, alone) in pair.iter().zip(futures::future::join_all(undisturbed).await) {
            assert_eq!((said.completion_tokens, said.finish.as_str()), (LONG as u64, "length"));
            assert_eq!(said.text, alone.text);
        }
    }
}

/// Sends a request and gives the connection, on which nothing has been read.
async fn begin(mut socket: TcpStream, path: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    socket.write_all(format!("{head}{body}").as_bytes()).await.expect("the server takes the request");
    socket
}

async fn connect(server: &Server) -> TcpStream {
    TcpStream::connect(("127.0.0.1", server.port())).await.expect("the server listens")
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_without_an_answer_leaves_nothing_behind() {
    let server = Server::start("--sequences-max 6").await;
    let mut endless = chat("Tell me a very long story.");
    endless["max_tokens"] = json!(2000);
    endless["ignore_eos"] = json!(true);
    let mut left = Vec::new();
    for _ in 0..6 {
        left.push(begin(connect(&server).await, CHAT, &endless).await);
    }
    until(async || server.metric("baton_gateway_requests", &["state=\"running\""]).await == 6.0, "six run")
        .await;
    drop(left);
    let started = Instant::now();
    let mut next = chat("Hi");
    next["max_tokens"] = json!(2);
    server.say(CHAT, &next, false).await;
    assert!(started.elapsed() < Duration::from_secs(5), "the next one waited {:?}", started.elapsed());
    for state in ["state=\"running\"", "state=\"waiting\""] {
        until(async || server.metric("baton_gateway_requests", &[state]).await == 0.0, state).await;
        until(async || server.metric("baton_engine_sequences", &[state]).await == 0.0, state).await;
    }
}

async fn until(holds: impl AsyncFn() -> bool, what: &str) {
    let started = Instant::now();
    while !holds().await {
        assert!(started.elapsed() < Duration::from_mins(1), "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_read_costs_no_memory_and_holds_up_nobody() {
    // Its steps cost next to nothing, so that an answer is as fast as it is taken.
    let server = Server::start("--model sim:vocab=4096,context_len=200000 --kv-blocks 65536").await;
    let slow = || async {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(2048).expect("a small window");
        let address = ([127, 0, 0, 1], server.port()).into();
        let body = json!({ "prompt": "x", "max_tokens": 190_000, "ignore_eos": true, "stream": true });
        begin(socket.connect(address).await.expect("the server listens"), COMPLETION, &body).await
    };
    let generated = async || server.metric("baton_gateway_itl_seconds_count", &["probe=\"false\""]).await;
    let mut stalled = Vec::new();
    for _ in 0..4 {
        stalled.push(slow().await);
    }
    // What stands between here and the model fills, and then the model waits.
    until(
        async || {
            let now = generated().await;
            now > 0.0 && {
                tokio::time::sleep(Duration::from_millis(500)).await;
                generated().await == now
            }
        },
        "nobody goes on generating for who does not read",
    )
    .await;
    let before = (generated().await, server.memory_kib());
    for _ in 0..10 {
        let quick = json!({ "prompt": "x", "max_tokens": 50, "ignore_eos": true });
        assert_eq!(server.say(COMPLETION, &quick, true).await.completion_tokens, 50);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let after = (generated().await, server.memory_kib());
    assert!(after.0 - before.0 < 1000.0, "{before:?} {after:?}");
    assert!(after.1 < before.1 + 32 * 1024, "KiB before and after: {before:?} {after:?}");
    drop(stalled);
    until(async || server.metric("baton_gateway_requests", &["state=\"running\""]).await == 0.0, "they left")
        .await;
}

/// Sends a body one byte a chunk, and gives the answer's first line.
async fn in_chunks(server: &Server, path: &str, body: &str) -> String {
    let chunks: String = body.chars().map(|byte| format!("1\r\n{byte}\r\n")).collect();
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n");
    let mut socket = connect(server).await;
    socket.write_all(format!("{head}{chunks}0\r\n\r\n").as_bytes()).await.expect("the server reads");
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.expect("the server answers");
    answer.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_in_many_chunks_fill_no_memory() {
    let server = Server::start("--model sim:").await;
    let body = json!({ "prompt": "x", "max_tokens": 1 }).to_string();
    let body = format!("{}{body}", " ".repeat(70_000 - body.len()));
    let round = async || {
        let sent =
            ["/generate", COMPLETION].repeat(4).into_iter().map(|path| in_chunks(&server, path, &body));
        for line in futures::future::join_all(sent).await {
            assert_eq!(line, "HTTP/1.1 200 OK");
        }
        server.memory_kib()
    };
    let before = round().await;
    let mut after = before;
    for _ in 0..4 {
        after = round().await;
    }
    assert!(after < before + 16 * 1024, "KiB after one round and after five: {before} and {after}");
}
