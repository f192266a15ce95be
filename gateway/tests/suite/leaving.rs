//! A client that leaves stops the work that it asked for, at once, on every route and in every phase.

use std::time::{Duration, Instant};

use proto::wire::GenerateRequest;
use proto::wire::generate_request::Prompt;
use proto::wire::generation_service_client::GenerationServiceClient;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::support::{Cluster, MODEL, Trouble};

/// Most time from a client's leaving to the end of its work.
const NOTICE_MAX: Duration = Duration::from_millis(100);

/// A busy machine may be late now and then, though not every time.
const TRIES: usize = 5;

/// Every route that generates, with a body.
fn routes() -> Vec<(String, String)> {
    let triton = |path: &str| format!("/v2/models/{MODEL}/{path}");
    let tritons = json!({"text_input": "x", "parameters": {"max_new_tokens": 9}});
    let vllm = |stream: bool| json!({"prompt": "x", "max_tokens": 9, "stream": stream});
    let chat = |stream: bool| json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": stream});
    let routes = [
        (triton("generate"), tritons.clone()),
        (triton("generate_stream"), tritons),
        ("/generate".to_owned(), vllm(false)),
        ("/generate".to_owned(), vllm(true)),
        ("/v1/chat/completions".to_owned(), chat(false)),
        ("/v1/chat/completions".to_owned(), chat(true)),
        ("/v1/completions".to_owned(), vllm(false)),
        ("/v1/completions".to_owned(), vllm(true)),
    ];
    routes.into_iter().map(|(path, body)| (path, body.to_string())).collect()
}

/// Has a client start a request and leave, some times over. It fails when the work never ends in time.
async fn leave<C>(cluster: &Cluster, what: &str, start: impl AsyncFn() -> C) {
    let mut late = Vec::new();
    for _ in 0..TRIES {
        let client = start().await;
        until(|| cluster.script.open() == 1, what).await;
        let left = Instant::now();
        drop(client);
        until(|| cluster.script.open() == 0, what).await;
        let after = left.elapsed();
        if after <= NOTICE_MAX {
            return;
        }
        late.push(after);
    }
    panic!("{what}: the work went on for {late:?}");
}

async fn until(mut holds: impl FnMut() -> bool, what: &str) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(20), "{what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn work_ends_with_its_client_on_every_route() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    for tokens in [0, 1] {
        cluster.script.trouble("r0", tokens, Trouble::Hang);
        for (path, body) in routes() {
            let what = format!("{path} after {tokens} tokens of {body}");
            leave(&cluster, &what, async || {
                let mut socket = TcpStream::connect(cluster.gateway.http_address()).await.unwrap();
                let length = body.len();
                let request =
                    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}");
                socket.write_all(request.as_bytes()).await.unwrap();
                socket
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn work_ends_with_its_stream_of_http2() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    // One connection stays: what ends is a stream on it.
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    for tokens in [0, 1] {
        cluster.script.trouble("r0", tokens, Trouble::Hang);
        for (path, body) in routes() {
            let what = format!("{path} after {tokens} tokens of {body}");
            leave(&cluster, &what, async || {
                let call = client.post(cluster.url(&path)).body(body.clone()).send();
                let mut calls = tokio::task::JoinSet::new();
                calls.spawn(async move {
                    let answer = call.await;
                    std::future::pending::<()>().await;
                    drop(answer);
                });
                calls
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn work_ends_with_its_grpc_call() {
    let cluster = Cluster::start(&["r0"], |config| config.grpc_listen = "127.0.0.1:0".to_owned()).await;
    let address = format!("http://{}", cluster.gateway.grpc_address());
    let client = GenerationServiceClient::connect(address).await.unwrap();
    for tokens in [0, 1] {
        cluster.script.trouble("r0", tokens, Trouble::Hang);
        leave(&cluster, &format!("gRPC after {tokens} tokens"), async || {
            let mut client = client.clone();
            let mut calls = tokio::task::JoinSet::new();
            calls.spawn(async move {
                let prompt = Some(Prompt::Text("x".into()));
                let answer = client.generate(GenerateRequest { prompt, ..Default::default() }).await;
                std::future::pending::<()>().await;
                drop(answer);
            });
            calls
        })
        .await;
    }
}
