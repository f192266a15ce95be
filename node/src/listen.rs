//! Accepts TCP connections and serves HTTP on them until the shutdown ends them.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::task::TaskTracker;
use tower::{Service, ServiceExt};

use crate::linger::{Lingering, Unread};
use crate::network::{CONNECTION_WINDOW_BYTES, FRAME_BYTES_MAX, KEEP_ALIVE, STREAM_WINDOW_BYTES};
use crate::{ClusterTls, Error, Shutdown, Tasks, Tls};

/// Most calls of another service on one connection at a time. hyper's default of 200 would silently queue a busy
/// router's calls.
const STREAMS_MAX: u32 = 8192;
/// Longest that the handshake of a connection of another service may take.
const SERVICE_HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// HTTP/2 flow control window of a client's stream: what it can make the process hold unread.
const CLIENT_STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// HTTP/2 flow control window of a client's connection.
const CLIENT_CONNECTION_WINDOW_BYTES: u32 = 8 << 20;
/// Most bytes of a request's line and headers. More is answered with 431.
const HEADER_BYTES_MAX: u32 = 64 << 10;
/// What every HTTP/2 connection begins with, as far as it differs from every method of HTTP/1.
const PREFACE: &[u8] = b"PRI";
/// Pauses for a peer that has sent a part of that, each twice as long as the last, and how many there are.
const PREFACE_PAUSE: Duration = Duration::from_millis(1);
const PREFACE_PAUSES: u32 = 10;
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
    /// The same, open until the process stops: operators look at a drain, too.
    Operators,
}

impl Protocol {
    /// Its names in a TLS handshake, the best first.
    fn alpn(self) -> &'static [&'static [u8]] {
        match self {
            Self::Grpc => &[b"h2"],
            Self::Http | Self::Operators => &[b"h2", b"http/1.1"],
        }
    }

    async fn closing(self, shutdown: &Shutdown) {
        match self {
            Self::Grpc => Box::pin(shutdown.idle()).await,
            Self::Http => shutdown.draining().await,
            Self::Operators => shutdown.stopped().await,
        }
    }

    /// Returns when a closing connection is to be given up. An idle process has only bytes left to send and health
    /// watches, which never end; a client's streams may take the whole grace period.
    async fn lingered(self) {
        match self {
            Self::Grpc => tokio::time::sleep(LINGER).await,
            Self::Http | Self::Operators => std::future::pending().await,
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
    tls: Option<(Handshakes, Duration)>,
}

/// What does the handshakes of a listener.
#[derive(Clone)]
enum Handshakes {
    /// With clients, the same way from start to end.
    Clients(TlsAcceptor),
    /// With services of the cluster, by certificates that change.
    Services(ClusterTls),
}

impl Handshakes {
    /// What does the next one.
    fn acceptor(&self) -> TlsAcceptor {
        match self {
            Self::Clients(acceptor) => acceptor.clone(),
            Self::Services(tls) => tls.acceptor(),
        }
    }
}

impl Manner {
    /// gRPC with other services of the cluster.
    pub(crate) fn services(tls: Option<&ClusterTls>) -> Self {
        Self {
            protocol: Protocol::Grpc,
            keep_alive: KEEP_ALIVE,
            streams_max: STREAMS_MAX,
            windows: (STREAM_WINDOW_BYTES, CONNECTION_WINDOW_BYTES),
            tls: tls.map(|tls| (Handshakes::Services(tls.clone()), SERVICE_HANDSHAKE_MAX)),
        }
    }

    /// Either protocol with clients.
    pub(crate) fn clients(protocol: Protocol, public: &Public) -> Self {
        let handshakes = |tls: &Tls| Handshakes::Clients(tls.acceptor(protocol.alpn()));
        let tls = public.tls.as_ref().map(|tls| (handshakes(tls), public.tls_handshake));
        Self {
            protocol,
            keep_alive: Duration::from_secs(20),
            streams_max: public.streams_max,
            windows: (CLIENT_STREAM_WINDOW_BYTES, CLIENT_CONNECTION_WINDOW_BYTES),
            tls,
        }
    }

    /// True when a drain waits for requests to be answered.
    pub(crate) fn holds_drain(&self) -> bool {
        self.protocol != Protocol::Operators
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
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    B: http_body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let Manner { protocol, .. } = manner;
    let builders = Builders::new(&manner, &tasks);
    let server =
        Arc::new(Server { protocol, tls: manner.tls, builders, service, shutdown: shutdown.clone() });
    let connections = TaskTracker::new();
    let mut closing = pin!(protocol.closing(&shutdown));
    loop {
        let accepted = tokio::select! {
            () = &mut closing => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let serve = server.clone().open(stream);
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

/// The version of HTTP that a client speaks.
#[derive(Clone, Copy)]
enum Version {
    One,
    Two,
    /// To be found out while it is served.
    Any,
}

/// What the first bytes of a connection speak, without taking them. hyper can find out as well, and holds a buffer of
/// twice the size from then on.
async fn spoken(stream: &TcpStream) -> std::io::Result<Version> {
    let mut first = [0; PREFACE.len()];
    for pauses in 0..PREFACE_PAUSES {
        let came = stream.peek(&mut first).await?;
        let first = &first[..came];
        if first.is_empty() {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if first == PREFACE {
            return Ok(Version::Two);
        }
        if !PREFACE.starts_with(first) {
            return Ok(Version::One);
        }
        tokio::time::sleep(PREFACE_PAUSE * 2_u32.pow(pauses)).await;
    }
    Ok(Version::Any)
}

/// What serves each version.
struct Builders {
    one: auto::Builder<Executor>,
    two: auto::Builder<Executor>,
    any: auto::Builder<Executor>,
}

impl Builders {
    fn new(manner: &Manner, tasks: &Tasks) -> Self {
        let mut any = auto::Builder::new(Executor(tasks.clone()));
        // Bodies pass through the same buffer a piece at a time, so this bounds the headers alone.
        any.http1().timer(TokioTimer::new()).max_buf_size(HEADER_BYTES_MAX as usize);
        any.http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(manner.keep_alive)
            .keep_alive_timeout(manner.keep_alive)
            .max_frame_size(FRAME_BYTES_MAX)
            .max_header_list_size(HEADER_BYTES_MAX)
            .initial_stream_window_size(manner.windows.0)
            .initial_connection_window_size(manner.windows.1)
            .max_concurrent_streams(manner.streams_max);
        Self { one: any.clone().http1_only(), two: any.clone().http2_only(), any }
    }

    fn of(&self, version: Version) -> &auto::Builder<Executor> {
        match version {
            Version::One => &self.one,
            Version::Two => &self.two,
            Version::Any => &self.any,
        }
    }
}

/// What the connections of a listener share.
struct Server<S> {
    protocol: Protocol,
    /// Does the handshakes, each within this time.
    tls: Option<(Handshakes, Duration)>,
    builders: Builders,
    service: S,
    shutdown: Shutdown,
}

/// A connection that is ready for its first request.
enum Met {
    Plain(TcpStream, Version),
    Secured(Box<TlsStream<TcpStream>>, Version),
}

impl<S, B> Server<S>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    B: http_body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// A connection from its first byte to its last.
    async fn open(self: Arc<Self>, stream: TcpStream) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY");
        }
        // There are many of these: each step is boxed, so that what one takes is not kept through the next.
        match Box::pin(self.meet(stream)).await {
            Some(Met::Plain(stream, version)) => Box::pin(self.serve(stream, version)).await,
            Some(Met::Secured(stream, version)) => Box::pin(self.serve(*stream, version)).await,
            None => {}
        }
    }

    /// Secures a connection, if that is asked for, and finds out what it speaks. `None` when it came to nothing.
    async fn meet(&self, stream: TcpStream) -> Option<Met> {
        let Some((tls, longest)) = &self.tls else {
            let version = match self.protocol {
                Protocol::Grpc => Version::Two,
                Protocol::Http | Protocol::Operators => tokio::select! {
                    spoken = spoken(&stream) => spoken.ok()?,
                    () = self.protocol.closing(&self.shutdown) => return None,
                },
            };
            return Some(Met::Plain(stream, version));
        };
        let secured = tokio::select! {
            secured = tokio::time::timeout(*longest, tls.acceptor().accept(stream)) => secured,
            () = self.protocol.closing(&self.shutdown) => return None,
        };
        match secured {
            Ok(Ok(stream)) => {
                let version = match (self.protocol, stream.get_ref().1.alpn_protocol()) {
                    (Protocol::Grpc, _) | (_, Some(b"h2")) => Version::Two,
                    (_, Some(_)) => Version::One,
                    (_, None) => Version::Any,
                };
                return Some(Met::Secured(Box::new(stream), version));
            }
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
            Err(_) => tracing::debug!(seconds = longest.as_secs_f64(), "TLS handshake did not end in time"),
        }
        None
    }

    async fn serve(&self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, version: Version) {
        let unread = Unread::default();
        let stream = TokioIo::new(Lingering::new(stream, unread.clone()));
        // Each request bears the mark of its connection, for its body to set.
        let service = self.service.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(unread.clone());
            // Boxed: hyper has room for what answers a request as long as the connection is open.
            service.clone().oneshot(request).boxed()
        });
        let mut connection = Box::pin(self.builders.of(version).serve_connection(stream, service));
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => ended,
            () = self.protocol.closing(&self.shutdown) => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    ended = connection.as_mut() => ended,
                    () = self.shutdown.stopped() => Ok(()),
                    () = self.protocol.lingered() => Ok(()),
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "connection ended");
        }
    }
}
