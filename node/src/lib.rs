//! What every Baton process is.
//!
//! A service crate holds what makes it that service; everything that any process must have stands here, written
//! once: configuration ([`config`]), addresses ([`Listener`]), the network that calls go over ([`Network`], in
//! process or TCP, with deadlines and contained panics), who else is there ([`discovery`]), serving
//! ([`serve_grpc`], [`serve_http`]), the tasks of a process and their end ([`Tasks`], [`Shutdown`], [`Process`]),
//! [`telemetry`], [`metrics`], what operators see ([`operators`], [`Readiness`], [`debug`], [`figures`]), who waits for whom ([`queue`]) and fail points.
//!
//! A service is a function `run(Config, Context)`. It serves until [`Shutdown`] says otherwise, and returns.

mod address;
mod call;
mod clock;
mod cluster_tls;
pub mod config;
mod context;
mod dashboard;
mod deadline;
pub mod debug;
pub mod discovery;
mod error;
mod fail_point;
pub mod figures;
mod health;
pub mod history;
mod inbound;
mod linger;
mod listen;
pub mod metrics;
mod network;
pub mod operators;
mod process;
pub mod queue;
mod readiness;
mod serve;
mod shutdown;
mod tasks;
pub mod telemetry;
mod tls;

pub use address::Listener;
pub use clock::Clock;
pub use cluster_tls::{ClusterTls, ClusterTlsConfig};
pub use context::Context;
pub use deadline::set_time_left;
pub use discovery::{Discovery, DiscoverySource, Entry, EtcdConfig, Member, Membership, Registry};
pub use error::Error;
pub use fail_point::{arm_fail_points, fail_point, fail_point_blocking, goes_wrong};
pub use inbound::Stalled;
pub use listen::Public;
pub use network::{Channel, Network, NetworkConfig, Registration};
pub use process::{Process, Signals};
pub use readiness::{Readiness, Standing};
pub use serve::{Services, Serving, serve_grpc, serve_http, serve_public_grpc, serve_public_http};
pub use shutdown::{Busy, Shutdown};
pub use tasks::{TaskGuard, TaskHandle, Tasks};
pub use tls::{Tls, TlsFiles};

/// Most bytes of one gRPC message, in either direction. A KV block of a large model is a few MiB, and tonic's own
/// default of 4 MiB would refuse it; every generated client and server is wrapped in [`limits!`].
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Sets the message limits of a generated client or server to [`MESSAGE_BYTES_MAX`]:
/// `node::limits!(PrefillClient::new(network.connect(address)))`, `node::limits!(PrefillServer::new(service))`.
#[macro_export]
macro_rules! limits {
    ($endpoint:expr) => {
        $endpoint
            .max_decoding_message_size($crate::MESSAGE_BYTES_MAX)
            .max_encoding_message_size($crate::MESSAGE_BYTES_MAX)
    };
}
