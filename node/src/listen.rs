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
    async fn open(mut self, stream: TcpStream) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY");
        }
        // What a connection is served by is large, and is put where its size does not add to that of the rest.
        let Some((tls, longest)) = self.manner.tls.clone() else {
            if self.manner.protocol == Protocol::Http {
                let spoken = tokio::select! {
                    spoken = spoken(&stream) => spoken,
                    () = self.manner.protocol.closing(&self.shutdown) => return,
                };
                let Ok(version) = spoken else { return };
                self.speak(version);
            }
            return Box::pin(self.serve(stream)).await;
        };
        let secured = tokio::select! {
            secured = tokio::time::timeout(longest, tls.accept(stream)) => secured,
            () = self.manner.protocol.closing(&self.shutdown) => return,
        };
        match secured {
            Ok(Ok(stream)) => {
                self.speak(match stream.get_ref().1.alpn_protocol() {
                    Some(b"h2") => Version::Two,
                    Some(_) => Version::One,
                    None => Version::Any,
                });
                Box::pin(self.serve(stream)).await;
            }
            Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
            Err(_) => tracing::debug!(seconds = longest.as_secs_f64(), "TLS handshake did not end in time"),
        }
    }

    /// Expects that version of HTTP alone, where the protocol leaves a choice.
    fn speak(&mut self, version: Version) {
        let builder = self.builder.clone();
        self.builder = match (self.manner.protocol, version) {
            (Protocol::Grpc, _) | (_, Version::Any) => return,
            (Protocol::Http, Version::One) => builder.http1_only(),
            (Protocol::Http, Version::Two) => builder.http2_only(),
        };
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
        let mut connection = Box::pin(builder.serve_connection(stream, TowerToHyperService::new(service)));
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
