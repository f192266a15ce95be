//! Everything in one process: the services that a cluster runs apart, over in-memory channels.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use node::{Context, Error, Member, Process, Shutdown};
use proto::{Reason, Role};

use crate::options::ServeConfig;

/// All services of one process, serving. Dropping it stops them.
#[derive(Debug)]
pub struct Running {
    /// Where HTTP is served.
    pub http: SocketAddr,
    /// Where gRPC is served.
    pub grpc: SocketAddr,
    /// Where metrics are served.
    pub metrics: SocketAddr,
    status: gateway::Status,
    context: Context,
    process: Process,
}

/// Opens the ports and starts every service. Models are loaded meanwhile: see [`Running::ready`].
///
/// # Errors
/// An option without a valid value; a port that cannot be opened.
pub async fn start(config: ServeConfig) -> Result<Running, Error> {
    config.validate()?;
    let context = Context::new("serve", members(&config));
    let mut process = Process::new(context.clone());
    let metrics = config.address(config.options.metrics_port);
    node::metrics::start(&context)?;
    let metrics = node::operators::serve(&metrics, config.process.pages(), &context).await?;
    let front = gateway::Config {
        listen: config.address(config.options.port),
        grpc_listen: config.address(config.options.grpc_port),
        ..config.gateway.clone()
    };
    let gateway = gateway::bind(front, context.named("gateway")).await?;
    let (http, grpc) = (socket(gateway.http_address())?, socket(gateway.grpc_address())?);
    let status = gateway.status();
    process.run("gateway", async move {
        gateway.finished().await;
        Ok(())
    });
    // A drain goes the way of a request: what the gateway has taken still finds a router, and what that has taken
    // still finds workers.
    let routing = context.downstream();
    let router = router::Config { listen: local("router", 0), ..config.router.clone() };
    process.run("router", router::run(router, routing.named("router")));
    run_workers(&config, &routing.downstream(), &mut process);
    Ok(Running { http, grpc, metrics: socket(&metrics.address)?, status, context, process })
}

fn run_workers(config: &ServeConfig, context: &Context, process: &mut Process) {
    // All of them compute on one device.
    let workers = config.options.prefill + config.options.decode;
    let worker = |role, index| {
        let config = worker::Config {
            gpu_memory_utilization: config.worker.gpu_memory_utilization / workers as f64,
            listen: local(role, index),
            advertise: None,
            // The router has finished by then: nobody is left to tell.
            drain_notice_seconds: Duration::ZERO,
            ..config.worker.clone()
        };
        let name = format!("{role}-{index}");
        (config, context.named(&name), name)
    };
    for index in 0..config.options.prefill {
        let (config, context, name) = worker("prefill", index);
        process.run(&name, prefill_worker::run(config, context));
    }
    for index in 0..config.options.decode {
        let (config, context, name) = worker("decode", index);
        process.run(&name, decode_worker::run(config, context));
    }
}

fn members(config: &ServeConfig) -> Vec<Member> {
    let all =
        |role: Role, count| (0..count).map(move |index| Member { role, address: local(role.name(), index) });
    all(Role::Router, 1)
        .chain(all(Role::Prefill, config.options.prefill))
        .chain(all(Role::Decode, config.options.decode))
        .collect()
}

/// The address of a service within the process.
fn local(role: &str, index: usize) -> String {
    format!("local:{role}-{index}")
}

fn socket(address: &str) -> Result<SocketAddr, Error> {
    let fault = || proto::Error::new(Reason::Internal, format!("expected a socket address, got {address}"));
    Ok(address.parse().map_err(|_| fault())?)
}

impl Running {
    /// What ends the process: `drain` lets running streams finish, `stop` does not.
    pub fn shutdown(&self) -> &Shutdown {
        &self.context.shutdown
    }

    /// The process, for waiting without giving up the rest.
    pub(crate) fn split(self) -> (Front, Process) {
        let Self { http, grpc, metrics, status, context, process } = self;
        (Front { http, grpc, metrics, status, context }, process)
    }

    /// Waits until a request would be served. Returns early, with false, when the process is told to end.
    pub async fn ready(&self) -> bool {
        ready(&self.status, &self.context.shutdown).await
    }

    /// Waits until every service has ended after a drain, and stops what is left after `grace`.
    ///
    /// # Errors
    /// The first fault of a service.
    pub async fn finished(self, grace: Duration) -> Result<(), Error> {
        self.process.finished(grace).await
    }
}

/// Where a running process serves.
pub(crate) struct Front {
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    pub(crate) metrics: SocketAddr,
    pub(crate) status: gateway::Status,
    pub(crate) context: Context,
}

impl Front {
    /// See [`Running::ready`].
    pub(crate) async fn ready(&self) -> bool {
        ready(&self.status, &self.context.shutdown).await
    }

    /// The public name of the first served model.
    pub(crate) fn model(&self) -> Option<String> {
        self.status.models().into_iter().next()
    }
}

async fn ready(status: &gateway::Status, shutdown: &Shutdown) -> bool {
    tokio::select! {
        ready = status.ready() => ready,
        () = shutdown.draining() => false,
    }
}

/// The address under which this machine reaches a listener that may listen on all addresses.
pub(crate) fn reachable(address: SocketAddr) -> SocketAddr {
    let loopback = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(loopback, address.port())
}
