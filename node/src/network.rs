//! How one service calls another.
//!
//! An address is `host:port` or `local:NAME`. A local call puts the generated client straight on the generated server:
//! no socket, no serialised connection, and a dropped stream is gone in the same instant. A TCP channel connects at its
//! first call, shares one HTTP/2 connection among all calls to that address, notices by keep-alive that its peer is
//! gone, and connects anew at the next call.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::Endpoint;
use tower::util::BoxCloneSyncService;
use tower::{ServiceExt, service_fn};

use crate::address::{LOCAL, check_host_port};
use crate::deadline::bounded;
use crate::{ClusterTls, Shutdown, call, telemetry};

/// What a generated client is put on. Its errors are transport failures: [`proto::convert::is_transport`] holds.
pub type Channel = BoxCloneSyncService<Request<Body>, Response<Body>, Status>;

/// Largest HTTP/2 frame. The receiver sets it; at the default of 16 KiB a bulk transfer loses half its throughput.
pub(crate) const FRAME_BYTES_MAX: u32 = 1 << 20;
/// HTTP/2 flow control window of one stream.
pub(crate) const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// HTTP/2 flow control window of one connection.
pub(crate) const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;

/// Quiet time on a connection between services after which the peer is asked whether it lives, and time that it has to
/// answer. Together they are how long a dead peer goes unnoticed, which has to stay well within two seconds; each alone is
/// how long a live one may be kept from its core.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_millis(750);

/// How TCP channels behave.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Quiet time on a connection, used or idle, after which the peer is asked whether it lives.
    pub keep_alive_interval: Duration,
    /// Time that the peer has to answer before the connection is given up.
    pub keep_alive_timeout: Duration,
    /// Most TCP channels kept for reuse.
    pub channels_max: usize,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(1),
            keep_alive_interval: KEEP_ALIVE,
            keep_alive_timeout: KEEP_ALIVE,
            channels_max: 1024,
        }
    }
}

/// The calls that a process can make, and the services that it offers to itself.
#[derive(Clone)]
pub struct Network {
    shared: Arc<Shared>,
}

struct Shared {
    config: NetworkConfig,
    tls: Option<ClusterTls>,
    local: RwLock<HashMap<String, (Routes, Shutdown)>>,
    tcp: Mutex<HashMap<String, Channel>>,
}

impl Network {
    /// A network that nothing is registered in.
    pub fn new(config: NetworkConfig) -> Self {
        Self::secured(config, None)
    }

    /// A network whose TCP connections, if there is a `tls`, are secured by it.
    pub fn secured(config: NetworkConfig, tls: Option<ClusterTls>) -> Self {
        let shared = Shared { config, tls, local: RwLock::default(), tcp: Mutex::default() };
        Self { shared: Arc::new(shared) }
    }

    /// What secures its connections.
    pub(crate) fn tls(&self) -> Option<&ClusterTls> {
        self.shared.tls.as_ref()
    }

    /// Offers services at `local:NAME` until the returned guard is dropped; a later registration of the same name
    /// takes its place. Calls are counted as work of `shutdown`.
    pub fn register(&self, name: impl Into<String>, routes: Routes, shutdown: Shutdown) -> Registration {
        let name = name.into();
        let mut local = self.shared.local.write().unwrap_or_else(PoisonError::into_inner);
        local.insert(name.clone(), (routes.prepare(), shutdown));
        Registration { network: self.clone(), name }
    }

    /// A channel to `address`. Nothing happens until its first call, and a fault of the address is that call's answer.
    /// Must be in a tokio runtime.
    pub fn connect(&self, address: &str) -> Channel {
        match address.strip_prefix(LOCAL) {
            Some(name) => self.connect_local(name),
            None => self.connect_tcp(address),
        }
    }

    fn connect_local(&self, name: &str) -> Channel {
        let (network, name) = (self.clone(), Arc::<str>::from(name));
        BoxCloneSyncService::new(service_fn(move |mut request: Request<Body>| {
            telemetry::outgoing(request.headers_mut());
            let found = network.local(&name);
            let name = name.clone();
            async move {
                match found {
                    Some((routes, shutdown)) => call::serve(routes, shutdown, request).await,
                    None => Err(Status::unavailable(format!("{LOCAL}{name} is not in this process"))),
                }
            }
        }))
    }

    fn local(&self, name: &str) -> Option<(Routes, Shutdown)> {
        self.shared.local.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    fn connect_tcp(&self, address: &str) -> Channel {
        let mut channels = self.shared.tcp.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(address) {
            return channel.clone();
        }
        let channel = match self.endpoint(address) {
            Ok(endpoint) => self.tcp_channel(&endpoint),
            Err(status) => {
                return BoxCloneSyncService::new(service_fn(move |_| {
                    std::future::ready(Err(status.clone()))
                }));
            }
        };
        if channels.len() >= self.shared.config.channels_max {
            // Whoever uses these keeps them; only their reuse ends.
            channels.clear();
        }
        channels.insert(address.to_owned(), channel.clone());
        channel
    }

    fn endpoint(&self, address: &str) -> Result<Endpoint, Status> {
        check_host_port(address)
            .map_err(|wrong| Status::unavailable(format!("expected host:port; {wrong}, got {address:?}")))?;
        let NetworkConfig { connect_timeout, keep_alive_interval, keep_alive_timeout, .. } =
            self.shared.config;
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| Status::unavailable(format!("address {address:?}: {error}")))?
            .connect_timeout(connect_timeout)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(keep_alive_interval)
            .keep_alive_timeout(keep_alive_timeout)
            .keep_alive_while_idle(true)
            .max_frame_size(FRAME_BYTES_MAX)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
        Ok(endpoint)
    }

    fn tcp_channel(&self, endpoint: &Endpoint) -> Channel {
        let transport = match &self.shared.tls {
            None => endpoint.connect_lazy(),
            Some(tls) => {
                endpoint.connect_with_connector_lazy(tls.connector(self.shared.config.connect_timeout))
            }
        };
        BoxCloneSyncService::new(service_fn(move |mut request: Request<Body>| {
            telemetry::outgoing(request.headers_mut());
            let transport = transport.clone();
            bounded(request, |request| async move {
                transport.oneshot(request).await.map_err(|error| unreachable(&error))
            })
        }))
    }
}

/// What a connection's failure is to the caller, whatever hyper calls it: a request that was still queued when the
/// connection closed, for one, would come out as CANCELLED.
fn unreachable(error: &tonic::transport::Error) -> Status {
    let mut message = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    Status::unavailable(message)
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

/// Services offered within this process; dropping it takes them away.
#[must_use]
pub struct Registration {
    network: Network,
    name: String,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.network.shared.local.write().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}
