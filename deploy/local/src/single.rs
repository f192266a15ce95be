//! One service of a cluster, in a process of its own.

use node::{
    ClusterTls, Context, Discovery, DiscoverySource, Error, Network, NetworkConfig, Process, Signals,
};

use crate::effective::Effective;
use crate::options::{ClusterConfig, ProcessConfig};

/// Which service.
pub(crate) enum Service {
    /// See [`gateway::run`].
    Gateway(gateway::Config),
    /// See [`router::run`].
    Router(router::Config),
    /// See [`prefill_worker`]. It may take the other role.
    Prefill(prefill_worker::Config),
    /// See [`decode_worker`]. It may take the other role.
    Decode(decode_worker::Config),
}

impl Service {
    fn name(&self) -> &'static str {
        match self {
            Self::Gateway(_) => "gateway",
            Self::Router(_) => "router",
            Self::Prefill(_) => "prefill",
            Self::Decode(_) => "decode",
        }
    }

    /// Refuses values that the service cannot run with, before anything is opened or loaded.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        match self {
            Self::Gateway(config) => config.validate(),
            Self::Router(config) => config.validate(),
            Self::Prefill(config) | Self::Decode(config) => config.validate(),
        }
    }

    /// Adds all options.
    pub(crate) fn show(&self, shown: &mut Effective) {
        match self {
            Self::Gateway(config) => shown.section("gateway", config),
            Self::Router(config) => shown.section("router", config),
            Self::Prefill(config) | Self::Decode(config) => shown.section("worker", config),
        }
    }
}

/// Runs the service until a signal has drained it, and for the grace period at most after that.
pub(crate) async fn run(
    service: Service,
    cluster: ClusterConfig,
    config: ProcessConfig,
) -> Result<(), Error> {
    if matches!(service, Service::Gateway(_) | Service::Router(_)) {
        without_huge_pages();
    }
    let signals = Signals::listen()?;
    let source: DiscoverySource = cluster
        .discovery
        .as_deref()
        .ok_or_else(|| {
            let expected = node::discovery::EXPECTED;
            Error::option("--discovery", format!("expected {expected}, where the other services are"))
        })?
        .parse()?;
    let name = service.name();
    let mut context = Context::new(name, Vec::new());
    if let Some(tls) = ClusterTls::read(&cluster.tls())? {
        tls.keep_fresh(&context.tasks, &context.shutdown);
        context.network = Network::secured(NetworkConfig::default(), Some(tls));
    }
    let etcd = cluster.etcd();
    let Discovery { members, registry } =
        node::discovery::start(source, &etcd, &context.tasks, &context.shutdown).await?;
    (context.members, context.registry) = (members, registry);
    node::metrics::start(&context)?;
    if let Some(address) = &cluster.metrics_listen {
        node::operators::serve(address, config.pages(), &context).await?;
    }
    let mut process = Process::new(context.clone());
    process.drain_on(signals);
    match service {
        Service::Gateway(config) => process.run(name, gateway::run(config, context)),
        Service::Router(config) => process.run(name, router::run(config, context)),
        Service::Prefill(config) => {
            let roles = [prefill_worker::parts(), decode_worker::parts()];
            process.run(name, async move { worker::run::run(&roles, config, context).await });
        }
        Service::Decode(config) => {
            let roles = [decode_worker::parts(), prefill_worker::parts()];
            process.run(name, async move { worker::run::run(&roles, config, context).await });
        }
    }
    process.finished(config.grace).await
}

/// Takes memory in small pages. What gateways and routers hold is small and comes and goes: in huge pages, which the
/// allocator asks for, a gateway that does nothing holds twice as much.
fn without_huge_pages() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::debug!(%error, "huge pages stay");
    }
}
