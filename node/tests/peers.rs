//! Peers that stop answering, die, and come back, over real sockets.

#![expect(clippy::unwrap_used, reason = "these are tests")]

mod probe;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use probe::{Rig, ask, client, fence, tokenizer};
use proto::convert::is_transport;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Keep-alive asks after 1 s and waits 1 s; the rest is for a busy machine.
const NOTICED_WITHIN: Duration = Duration::from_millis(2800);

/// A stretch of wire that can be frozen: what a stopped process looks like, whose kernel still accepts and
/// acknowledges while nobody reads.
struct Wire {
    address: String,
    frozen: Arc<AtomicBool>,
    _tasks: tokio::task::JoinSet<()>,
}

impl Wire {
    async fn to(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let frozen = Arc::new(AtomicBool::new(false));
        let mut tasks = tokio::task::JoinSet::new();
        let (server, gate) = (server.to_owned(), frozen.clone());
        tasks.spawn(async move {
            let mut pipes = tokio::task::JoinSet::new();
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let (near_read, near_write) = near.into_split();
                let (far_read, far_write) = TcpStream::connect(&server).await.unwrap().into_split();
                pipes.spawn(pump(near_read, far_write, gate.clone()));
                pipes.spawn(pump(far_read, near_write, gate.clone()));
            }
        });
        Self { address, frozen, _tasks: tasks }
    }

    fn freeze(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::SeqCst);
    }
}

async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    frozen: Arc<AtomicBool>,
) {
    let mut buffer = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut buffer).await {
        while frozen.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if to.write_all(&buffer[..len]).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_peer_is_noticed_in_a_stream() {
    let rig = Rig::at("127.0.0.1:0").await;
    let wire = Wire::to(&rig.serving.address).await;
    let mut client = client(&rig.context, &wire.address);
    let mut stream = client.get_tokenizer(tokenizer(ask::SILENCE)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    // Longer than it takes to be noticed: a silent stream of a living peer is left alone.
    assert!(tokio::time::timeout(Duration::from_millis(2500), stream.message()).await.is_err());

    wire.freeze(true);
    let start = Instant::now();
    let status = stream.message().await.unwrap_err();
    assert!(start.elapsed() < NOTICED_WITHIN, "{:?}", start.elapsed());
    assert!(is_transport(&status), "{status:?}");
    assert_eq!(proto::Error::from(status).reason, proto::Reason::WorkerLost);
    // The server's side asks too, so that the dropped stream's guard is not left behind.
    rig.inside.empty(NOTICED_WITHIN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_peer_is_noticed_while_idle_and_used_again_when_it_thaws() {
    let rig = Rig::at("127.0.0.1:0").await;
    let wire = Wire::to(&rig.serving.address).await;
    let mut client = client(&rig.context, &wire.address);
    client.fence(fence("good")).await.unwrap();
    wire.freeze(true);
    tokio::time::sleep(NOTICED_WITHIN).await;
    // Noticed while idle: this call opens a connection of its own, which works as soon as the peer does.
    let thaw = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        wire.freeze(false);
    };
    let start = Instant::now();
    let (answer, ()) = tokio::join!(client.fence(fence("good")), thaw);
    answer.unwrap();
    assert!(start.elapsed() < Duration::from_millis(600), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_to_a_frozen_peer_fails_in_time() {
    let rig = Rig::at("127.0.0.1:0").await;
    let wire = Wire::to(&rig.serving.address).await;
    wire.freeze(true);
    let start = Instant::now();
    let status = client(&rig.context, &wire.address).fence(fence("good")).await.unwrap_err();
    assert!(start.elapsed() < NOTICED_WITHIN, "{:?}", start.elapsed());
    assert!(is_transport(&status), "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_restarts_at_its_address_is_found_again() {
    let first = Rig::at("127.0.0.1:0").await;
    let address = first.serving.address.clone();
    let context = node::Context::new("caller", Vec::new());
    let mut client = client(&context, &address);
    let mut stream = client.get_tokenizer(tokenizer(ask::SILENCE)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();

    first.context.shutdown.stop();
    first.serving.finished().await;
    let start = Instant::now();
    let status = stream.message().await.unwrap_err();
    assert!(is_transport(&status) && start.elapsed() < Duration::from_millis(500), "{status:?}");
    let status = client.fence(fence("good")).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status:?}");

    let _second = Rig::at(&address).await;
    client.fence(fence("good")).await.unwrap();
}
