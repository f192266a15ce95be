//! Where a request executes, and what comes next.
//!
//! The router owns a request from arrival to last token. It sees token ids and references, never text and never KV
//! bytes. Read [`dispatch`] first: it is the whole of a request's life, without IO. [`pools`] knows which workers
//! there are and which may work together, [`policy`] which of them takes a request. It goes by what [`index`] knows of their
//! blocks, which comes from their streams through [`follow`], and by what [`cost`] has learnt; [`circuit`] spares those that
//! fail again and again. The rest is the shell: it keeps the pools (`cluster`), watches workers (`watch`), serves gateways
//! (`service`), and runs each request's dispatch (`route`) over calls to workers (`calls`).

mod calls;
pub mod circuit;
mod cluster;
mod config;
pub mod cost;
pub mod dispatch;
pub mod follow;
mod in_flight;
pub mod index;
mod line;
mod meters;
mod overview;
pub mod planted;
pub mod policy;
pub mod pools;
mod route;
mod service;
mod watch;

use std::sync::Arc;

use node::debug::{Dump, Excerpt};
use node::queue::Queue;
use node::{Context, Entry, Listener, Services};
use proto::wire::overview_server::OverviewServer;
use proto::wire::router_server::RouterServer;
use proto::{Role, WorkerEpoch};
use tokio::sync::Semaphore;

pub use config::Config;
pub use policy::Policy;
pub use pools::PlacementMode;

use cluster::{Cluster, DescribeConfig};
use in_flight::{InFlight, RequestDump};
use overview::{Overview, OverviewService};
use pools::MemberDump;
use route::Shared;
use service::RouterService;

/// Serves as a router until the process has drained or stops.
///
/// # Errors
/// When an option has no valid value, or the address cannot be listened on, or nobody reaches it there.
pub async fn run(config: Config, context: Context) -> Result<(), node::Error> {
    let standing = context.readiness.join(&context.name, "not listening yet");
    config.validate()?;
    let listener = Listener::parse("listen", &config.listen)?;
    context.registry.check(config.advertise.as_deref().unwrap_or(&config.listen))?;
    meters::describe();
    let cluster = Arc::new(Cluster::new(&config));
    let describe = DescribeConfig {
        every: config.describe_every,
        timeout: config.describe_timeout,
        with_blocks: config.policy == Policy::Prefix,
    };
    let follow = cluster::follow_members(Arc::clone(&cluster), context.clone(), describe);
    let _follow = context.tasks.spawn("members", follow).guard();
    let advertise = config.advertise.clone();
    let fences = Arc::new(Semaphore::new(config.fences_max));
    let overview = Arc::new(Overview::new());
    let keep = Arc::clone(&overview).keep(Arc::clone(&cluster), context.clone());
    let _overview = context.tasks.spawn("overview", keep).guard();
    let in_flight = Arc::new(InFlight::default());
    let line = Arc::new(Queue::new(config.requests_max, config.queue_max()));
    let _dumps = dumps(&context, &cluster, &in_flight, &overview);
    let (context_of_all, dispatch) = (context.clone(), config.dispatch());
    let shared = Shared { cluster, context: context_of_all, dispatch, fences, in_flight, line };
    let service = RouterService::new(shared, config);
    let services = Services::new()
        .add(node::limits!(RouterServer::new(service)))
        .add(node::limits!(OverviewServer::new(OverviewService(overview))));
    standing.not_ready("discovery has not answered yet");
    tokio::select! {
        // Gateways that know other routers should not wait for one that knows no workers.
        () = context.registry.answered() => {}
        () = context.shutdown.draining() => return Ok(()),
    }
    let serving = node::serve_grpc(&listener, services, &context).await?;
    let address = advertise.unwrap_or_else(|| serving.address.clone());
    let entry = Entry { role: Role::Router, address, epoch: WorkerEpoch::random(), capabilities: None };
    context.registry.join(entry, &context)?;
    standing.ready();
    serving.finished().await;
    Ok(())
}

/// What this router tells operators.
fn dumps(
    context: &Context,
    cluster: &Arc<Cluster>,
    in_flight: &Arc<InFlight>,
    overview: &Arc<Overview>,
) -> [Dump; 2] {
    let (clock, cluster, in_flight) = (context.clock, Arc::clone(cluster), Arc::clone(in_flight));
    let state = move || {
        let members = cluster.pools().members();
        let dump = RouterDump {
            members: Excerpt::of(members.len(), members),
            requests: in_flight.dump(clock.now()),
        };
        async move { dump }
    };
    let overview = Arc::clone(overview);
    let latest = move || {
        let json = overview.json();
        async move { serde_json::from_slice::<serde_json::Value>(&json).unwrap_or_default() }
    };
    [context.debug.add(&context.name, state), context.debug.add("overview.router", latest)]
}

/// A router's state.
#[derive(serde::Serialize)]
struct RouterDump {
    members: Excerpt<MemberDump>,
    requests: Excerpt<RequestDump>,
}
