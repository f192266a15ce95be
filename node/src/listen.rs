//! Accepts TCP connections and serves HTTP on them until the shutdown ends them.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;
use tower::{Service, service_fn};

use crate::linger::{Lingering, Unread};
use crate::network::{CONNECTION_WINDOW_BYTES, FRAME_BYTES_MAX, STREAM_WINDOW_BYTES};
use crate::{Error, Shutdown, Tasks, Tls};

/// Most calls of another service on one connection at a time. hyper's default of 200 would silently queue a busy
/// router's calls.
const STREAMS_MAX: u32 = 8192;
/// HTTP/2 flow control window of a client's stream: what it can make the process hold unread.
const CLIENT_STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// HTTP/2 flow control window of a client's connection.
const CLIENT_CONNECTION_WINDOW_BYTES: u32 = 8 << 20;
/// Most bytes of a request's line and headers. More is answered with 431.
const HEADER_BYTES_MAX: u32 = 64 << 10;
/// Pause after a failed accept (out of file descriptors, mostly).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that the last bytes of finished calls get to reach their peers.
const LINGER: Duration = Duration::from_secs(1);

/// How a listener meets clients: strangers, who may be far away, slow or hostile.
#[derive(Clone, Debug)]
pub struct Public {
    /// What connections are secured by; plain text when absent.
    pub tls: Option<Tls>,
    /// Longest that the handshake of a connection may take.
    pub tls_handshake: Duration,
    /// Most calls on one HTTP/2 connection at a time.
    pub streams_max: u32,
}

impl Default for Public {
    fn default() -> Self {
        Self { tls: None, tls_handshake: Duration::from_secs(10), streams_max: 1024 }
    }
}

/// What is spoken on a connection, and when a drain closes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// HTTP/2 alone. A drain leaves it open until the process is idle: peers may still have to fetch.
    Grpc,
    /// HTTP/1 and HTTP/2. A drain takes no new request.
    Http,
}

impl Protocol {
    /// Its names in a TLS handshake, the best first.
    fn alpn(self) -> &'static [&'static [u8]] {
        match self {
            Self::Grpc => &[b"h2"],
            Self::Http => &[b"h2", b"http/1.1"],
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

/// How the connections of a listener are served.
#[derive(Clone)]
pub(crate) struct Manner {
    protocol: Protocol,
    /// Quiet time before a keep-alive ping, and time to answer it.
    keep_alive: Duration,
    streams_max: u32,
    /// HTTP/2 flow control windows of a stream and of a connection.
    windows: (u32, u32),
    /// Does the handshakes, each within this time.
    tls: Option<(TlsAcceptor, Duration)>,
}

impl Manner {
    /// gRPC with other services of the cluster.
    pub(crate) fn services() -> Self {
        Self {
            protocol: Protocol::Grpc,
            keep_alive: Duration::from_secs(1),
            streams_max: STREAMS_MAX,
            windows: (STREAM_WINDOW_BYTES, CONNECTION_WINDOW_BYTES),
            tls: None,
        }
    }

    /// Either protocol with clients.
    pub(crate) fn clients(protocol: Protocol, public: &Public) -> Self {
        let tls = public.tls.as_ref().map(|tls| (tls.acceptor(protocol.alpn()), public.tls_handshake));
        Self {
            protocol,
            keep_alive: Duration::from_secs(20),
            streams_max: public.streams_max,
            windows: (CLIENT_STREAM_WINDOW_BYTES, CLIENT_CONNECTION_WINDOW_BYTES),
            tls,
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
    manner: Manner,
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
    let protocol = manner.protocol;
    let connection =
        Connection { builder: builder(&manner, &tasks), manner, service, shutdown: shutdown.clone() };
    let connections = TaskTracker::new();
    let mut closing = pin!(protocol.closing(&shutdown));
    loop {
        let accepted = tokio::select! {
            () = &mut closing => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let serve = connection.clone().open(stream);
                drop(tasks.spawn_contained("connection", connections.track_future(serve)));
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

fn builder(manner: &Manner, tasks: &Tasks) -> auto::Builder<Executor> {
    let mut builder = auto::Builder::new(Executor(tasks.clone()));
    // Bodies pass through the same buffer a piece at a time, so this bounds the headers alone.
    builder.http1().timer(TokioTimer::new()).max_buf_size(HEADER_BYTES_MAX as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(manner.keep_alive)
        .keep_alive_timeout(manner.keep_alive)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(HEADER_BYTES_MAX)
        .initial_stream_window_size(manner.windows.0)
        .initial_connection_window_size(manner.windows.1)
        .max_concurrent_streams(manner.streams_max);
    match manner.protocol {
        Protocol::Grpc => builder.http2_only(),
        Protocol::Http => builder,
    }
}

/// A connection to be served.
#[derive(Clone)]
struct Connection<S> {
    manner: Manner,
    builder: auto::Builder<Executor>,
    service: S,
    shutdown: Shutdown,
}

impl<S, B> Connection<S>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
    B: http_body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// Secures it, if that is asked for, and serves it.
    async fn open(self, stream: TcpStream) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY");
        }
        let Some((tls, longest)) = self.manner.tls.clone() else { return self.serve(stream).await };
        let secured = tokio::select! {
            secured = tokio::time::timeout(longest, tls.accept(stream)) => secured,
            () = self.manner.protocol.closing(&self.shutdown) => return,
        };
        match secured {
            Ok(Ok(stream)) => self.serve(stream).await,
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
            Err(_) => tracing::debug!(seconds = longest.as_secs_f64(), "TLS handshake did not end in time"),
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let Self { manner, builder, mut service, shutdown } = self;
        let unread = Unread::default();
        let stream = TokioIo::new(Lingering::new(stream, unread.clone()));
        // Each request bears the mark of its connection, for its body to set.
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(unread.clone());
            service.call(request)
        });
        let mut connection = pin!(builder.serve_connection(stream, TowerToHyperService::new(service)));
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = manner.protocol.closing(&shutdown) => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    ended = connection.as_mut() => ended,
                    () = shutdown.stopped() => Ok(()),
                    () = manner.protocol.lingered() => Ok(()),
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "connection ended");
        }
    }
}
