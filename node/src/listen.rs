//! Accepts TCP connections and serves HTTP on them until the shutdown ends them.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::TaskTracker;
use tower::Service;

use crate::network::{CONNECTION_WINDOW_BYTES, FRAME_BYTES_MAX, STREAM_WINDOW_BYTES};
use crate::{Error, Shutdown, Tasks};

/// Most calls on one connection at a time. hyper's default of 200 would silently queue a busy router's calls.
const STREAMS_MAX: u32 = 8192;
/// Most bytes of a request's line and headers. More is answered with 431.
const HEADER_BYTES_MAX: u32 = 64 << 10;
/// Pause after a failed accept (out of file descriptors, mostly).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that the last bytes of finished calls get to reach their peers.
const LINGER: Duration = Duration::from_secs(1);

/// What is spoken on a connection, and when a drain closes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// HTTP/2 between services. A drain leaves it open until the process is idle: peers may still have to fetch.
    Grpc,
    /// HTTP/1 and HTTP/2 with clients. A drain takes no new request.
    Http,
}

impl Protocol {
    /// Quiet time before a keep-alive ping, and time to answer it. Clients may be far away and slow; services not.
    fn keep_alive(self) -> Duration {
        match self {
            Self::Grpc => Duration::from_secs(1),
            Self::Http => Duration::from_secs(20),
        }
    }

    async fn closing(self, shutdown: &Shutdown) {
        match self {
            Self::Grpc => shutdown.idle().await,
            Self::Http => shutdown.draining().await,
        }
    }

    /// Returns when a closing connection is to be given up. An idle process has only bytes left to send and health
    /// watches, which never end; a client's streams may take the whole grace period.
    async fn lingered(self) {
        match self {
            Self::Grpc => tokio::time::sleep(LINGER).await,
            Self::Http => std::future::pending().await,
        }
    }
}

/// Binds `address`, `host:port`.
pub(crate) async fn bind(address: &str) -> Result<TcpListener, Error> {
    TcpListener::bind(address).await.map_err(|source| Error::Bind { address: address.to_owned(), source })
}

/// Runs hyper's tasks as tasks of the process.
#[derive(Clone)]
struct Executor(Tasks);

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        // A dropped handle leaves the task running; the connection's end ends it.
        drop(self.0.spawn_contained("call", task));
    }
}

/// Accepts and serves until the protocol's closing time, then until the last connection is closed.
pub(crate) async fn accept<S, B>(
    listener: TcpListener,
    protocol: Protocol,
    service: S,
    tasks: Tasks,
    shutdown: Shutdown,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
    B: http_body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let builder = builder(protocol, &tasks);
    let connections = TaskTracker::new();
    let mut closing = pin!(protocol.closing(&shutdown));
    loop {
        let accepted = tokio::select! {
            () = &mut closing => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection =
                    connection(stream, protocol, builder.clone(), service.clone(), shutdown.clone());
                drop(tasks.spawn_contained("connection", connections.track_future(connection)));
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

fn builder(protocol: Protocol, tasks: &Tasks) -> auto::Builder<Executor> {
    let mut builder = auto::Builder::new(Executor(tasks.clone()));
    // Bodies pass through the same buffer a piece at a time, so this bounds the headers alone.
    builder.http1().timer(TokioTimer::new()).max_buf_size(HEADER_BYTES_MAX as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(protocol.keep_alive())
        .keep_alive_timeout(protocol.keep_alive())
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(HEADER_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX);
    match protocol {
        Protocol::Grpc => builder.http2_only(),
        Protocol::Http => builder,
    }
}

async fn connection<S, B>(
    stream: TcpStream,
    protocol: Protocol,
    builder: auto::Builder<Executor>,
    service: S,
    shutdown: Shutdown,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
    B: http_body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    let mut connection =
        pin!(builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = protocol.closing(&shutdown) => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                ended = connection.as_mut() => ended,
                () = shutdown.stopped() => Ok(()),
                () = protocol.lingered() => Ok(()),
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}
