//! A service whose calls do what its test asks for, and ways to reach it.

#![allow(dead_code, reason = "each test file uses its part")]

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context as TaskContext, Poll};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, stream};
use node::{Channel, Context, Listener, Services, Serving};
use proto::wire;
use proto::wire::worker_client::WorkerClient;
use proto::wire::worker_server::{Worker, WorkerServer};
use tonic::{Request, Response, Status};

pub(crate) type Chunks = Pin<Box<dyn Stream<Item = Result<wire::TokenizerChunk, Status>> + Send>>;

/// Counts calls that are inside the service.
#[derive(Clone, Default)]
pub(crate) struct Inside(Arc<AtomicUsize>);

impl Inside {
    fn enter(&self) -> Guard {
        self.0.fetch_add(1, Ordering::SeqCst);
        Guard(self.clone())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Waits until no call is left, and gives the time that took.
    pub(crate) async fn empty(&self, patience: Duration) -> Duration {
        let start = Instant::now();
        while self.count() > 0 {
            assert!(start.elapsed() < patience, "a call is still inside after {patience:?}");
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        start.elapsed()
    }
}

struct Guard(Inside);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What the digest of a `GetTokenizer` call asks for; see [`Probe`].
pub(crate) mod ask {
    /// Endless chunks, one every 10 ms.
    pub(crate) const TICKS: &[u8] = b"ticks";
    /// One chunk, then nothing for ever.
    pub(crate) const SILENCE: &[u8] = b"silence";
    /// One chunk, then a panic.
    pub(crate) const PANIC: &[u8] = b"panic";
    /// One chunk of 8 MiB.
    pub(crate) const LARGE: &[u8] = b"large";
    /// Three chunks 100 ms apart.
    pub(crate) const SHORT: &[u8] = b"short";
}

/// `GetTokenizer` streams as asked, `Fence` hangs or panics by its request's name, `Describe` is not there.
pub(crate) struct Probe(Inside);

#[tonic::async_trait]
impl Worker for Probe {
    type GetTokenizerStream = Chunks;
    type WatchStream = stream::BoxStream<'static, Result<wire::WatchEvent, Status>>;

    async fn watch(&self, _: Request<wire::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("nothing to watch here"))
    }

    async fn describe(
        &self,
        _: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::DescribeResponse>, Status> {
        Err(proto::Error::new(proto::Reason::ModelNotFound, "no model here").into())
    }

    async fn get_tokenizer(
        &self,
        request: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Chunks>, Status> {
        let guard = self.0.enter();
        let every = Duration::from_millis(if request.get_ref().digest == ask::SHORT { 100 } else { 10 });
        let ticks = stream::unfold(guard, move |guard| async move {
            tokio::time::sleep(every).await;
            Some((Ok(chunk(1)), guard))
        });
        let guard = self.0.enter();
        let first = stream::iter([Ok(chunk(1))]);
        let chunks: Chunks = match &*request.into_inner().digest {
            ask::TICKS => ticks.boxed(),
            ask::SHORT => ticks.take(3).boxed(),
            ask::SILENCE => first.chain(stream::pending()).boxed(),
            ask::PANIC => first.chain(stream::once(panic_later())).boxed(),
            ask::LARGE => stream::iter([Ok(chunk(8 << 20))]).boxed(),
            other => return Err(Status::invalid_argument(format!("digest {other:?}"))),
        };
        Ok(Response::new(Guarded { chunks, _guard: guard }.boxed()))
    }

    async fn change_role(
        &self,
        _: Request<wire::ChangeRoleRequest>,
    ) -> Result<Response<wire::ChangeRoleResponse>, Status> {
        Err(Status::unimplemented("it has one role"))
    }

    async fn fence(
        &self,
        request: Request<wire::FenceRequest>,
    ) -> Result<Response<wire::FenceResponse>, Status> {
        let _guard = self.0.enter();
        match request.into_inner().request.as_str() {
            "hang" => std::future::pending().await,
            "panic" => panic!("as asked"),
            _ => Ok(Response::new(wire::FenceResponse {})),
        }
    }
}

/// Panics, but not before the encoder has passed on what it had.
async fn panic_later() -> Result<wire::TokenizerChunk, Status> {
    tokio::time::sleep(Duration::from_millis(10)).await;
    panic!("as asked")
}

struct Guarded {
    chunks: Chunks,
    _guard: Guard,
}

impl Stream for Guarded {
    type Item = Result<wire::TokenizerChunk, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Option<Self::Item>> {
        self.chunks.poll_next_unpin(cx)
    }
}

fn chunk(len: usize) -> wire::TokenizerChunk {
    wire::TokenizerChunk { bytes: vec![7; len].into() }
}

/// A served probe.
pub(crate) struct Rig {
    pub(crate) context: Context,
    pub(crate) serving: Serving,
    pub(crate) inside: Inside,
}

impl Rig {
    /// Serves a probe at `listen`, `host:port` or `local:NAME`.
    pub(crate) async fn at(listen: &str) -> Self {
        Self::of(Context::new("probe", Vec::new()), listen).await
    }

    /// The same in a context that a test has made.
    pub(crate) async fn of(context: Context, listen: &str) -> Self {
        let inside = Inside::default();
        let services = Services::new().add(node::limits!(WorkerServer::new(Probe(inside.clone()))));
        let listener = Listener::parse("--listen", listen).unwrap();
        let serving = node::serve_grpc(&listener, services, &context).await.unwrap();
        Self { context, serving, inside }
    }

    /// A probe in this process, and one on loopback.
    pub(crate) async fn both() -> [Self; 2] {
        [Self::at("local:probe").await, Self::at("127.0.0.1:0").await]
    }

    pub(crate) fn client(&self) -> WorkerClient<Channel> {
        client(&self.context, &self.serving.address)
    }
}

pub(crate) fn client(context: &Context, address: &str) -> WorkerClient<Channel> {
    node::limits!(WorkerClient::new(context.network.connect(address)))
}

pub(crate) fn tokenizer(digest: &[u8]) -> wire::GetTokenizerRequest {
    wire::GetTokenizerRequest { digest: digest.to_vec() }
}

pub(crate) fn fence(request: &str) -> wire::FenceRequest {
    wire::FenceRequest { request: request.to_owned(), attempt: 1 }
}

/// A call with this deadline.
pub(crate) fn within<T>(timeout: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}
