//! Text in, text out: the only part of Baton that knows either.
//!
//! A request comes in by one of several APIs. Its dialect turns the JSON into the one [`domain::Request`];
//! admission (`admit`) fits that to a model, as tokens; it waits for its turn (`queue`); its `answers`, one `answer` for
//! each sequence, ask a router for tokens, carry
//! the request on through another when that one dies ([`resume`]), and turns tokens into [`domain::Piece`]s of text
//! ([`text`]); the dialect writes those in its own framing. Fronts (`http`, `grpc`) move bytes and nothing else.
//!
//! To add a field, look at the dialect's `request.rs`; to add an API, write a folder beside the others and name its
//! route in `http`.

mod admit;
mod answer;
mod answers;
mod config;
mod dialect;
mod docs;
pub mod domain;
mod fault;
mod front;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod grpc;
mod http;
mod in_house;
mod kserve;
mod manage;
mod metrics;
pub mod models;
mod overview;
mod ready;
pub mod resume;
mod route;
mod service;
mod statistics;
pub mod text;
mod tgi;
pub mod timing;
mod tokens;
pub mod tools;

#[cfg(test)]
#[path = "../tests/suite/support/bundle.rs"]
mod bundle;

use std::sync::{Arc, Mutex};

use node::debug::{Dump, Excerpt};
use node::queue::Queue;
use node::{Context, Error, Listener, Member, Serving, Shutdown, serve_public_grpc, serve_public_http};
use tokio::sync::{Notify, Semaphore, watch};

pub use crate::config::{ApiKeys, Config, Delimiter, Dialect, ReasoningParser, ToolParser};
use crate::front::Front;
use crate::in_house::RequestDump;
use crate::models::{Models, Served};
use crate::overview::Overview;
use crate::ready::Readiness;
use crate::route::Routers;
use crate::service::{Service, unix_seconds};
use crate::statistics::Statistics;
pub use fault::Fault;
pub use route::Rotation;

/// Serves until the shutdown ends it.
///
/// # Errors
/// See [`bind`].
pub async fn run(config: Config, context: Context) -> Result<(), Error> {
    bind(config, context).await?.finished().await;
    Ok(())
}

/// Starts to serve, and says where. It ends with the shutdown alone.
///
/// # Errors
/// An option without a valid value; an address that cannot be listened on.
pub async fn bind(config: Config, context: Context) -> Result<Gateway, Error> {
    let standing = context.readiness.join(&context.name, "no probe has come back yet");
    config.validate()?;
    metrics::describe();
    let grpc_listen = Listener::parse("--grpc-listen", &config.grpc_listen)?;
    let (front, public) = (Front::read(&config)?, front::public(&config)?);
    let routers = Arc::new(Routers::new(context.network.clone(), context.members.clone(), context.clock));
    let models = Models::new(routers.clone(), context.tasks.clone());
    let doubt = Arc::new(Notify::new());
    let (ready, ready_now) = watch::channel(false);
    let readiness = Readiness {
        routers: routers.clone(),
        served: models.served(),
        clock: context.clock,
        doubt: doubt.clone(),
        ready,
        standing,
    };
    let in_house = config.requests_max.saturating_add(config.queue_max()).min(Semaphore::MAX_PERMITS);
    let service = Arc::new(Service {
        clock: context.clock,
        shutdown: context.shutdown.clone(),
        tasks: context.tasks.clone(),
        routers,
        served: models.served(),
        ready: ready_now.clone(),
        doubt,
        house: Arc::new(Semaphore::new(in_house)),
        queue: Arc::new(Queue::new(config.requests_max, config.queue_max())),
        statistics: Statistics::default(),
        stoppable: Mutex::default(),
        started_at: unix_seconds(),
        in_house: Arc::default(),
        config,
    });

    let services = front::services(&service);
    let grpc =
        serve_public_grpc(&grpc_listen, services, &public, |calls| front.grpc(calls), &context).await?;
    grpc.follow(ready_now.clone(), &context);
    let routes = front.http(crate::http::routes(service.clone()));
    let http = serve_public_http(&service.config.listen, routes, &public, &context).await?;
    let models_every = service.config.models_every;
    drop(context.tasks.spawn("models", until_draining(context.shutdown.clone(), models.keep(models_every))));
    drop(context.tasks.spawn("readiness", until_draining(context.shutdown.clone(), readiness.keep())));
    let overview = Arc::<Overview>::default();
    drop(context.tasks.spawn("overview", Arc::clone(&overview).keep()));
    let status = Status { ready: ready_now, served: service.served.clone() };
    Ok(Gateway { http, grpc, status, _dumps: dumps(&context, &service, overview) })
}

/// What this gateway tells operators.
fn dumps(context: &Context, service: &Arc<Service>, overview: Arc<Overview>) -> [Dump; 2] {
    let (service, readiness) = (service.clone(), context.readiness.clone());
    let members = context.members.clone();
    let state = move || {
        let (places_free, places) = service.queue.places();
        let members = members.borrow().clone();
        let routers = members.iter().filter(|member| member.role == proto::Role::Router);
        let dump = GatewayDump {
            obstacle: readiness.obstacle(),
            models: service
                .served
                .borrow()
                .models
                .iter()
                .map(|model| model.description.name.clone())
                .collect(),
            routers: Excerpt::of(routers.clone().count(), routers.cloned()),
            running: places - places_free,
            running_max: places,
            waiting: service.queue.waiting(),
            waiting_max: service.config.queue_max(),
            requests: service.in_house.dump(service.clock.now()),
        };
        async move { dump }
    };
    let looker = context.clone();
    let look = move || Arc::clone(&overview).page(looker.clone());
    [context.debug.add(&context.name, state), context.debug.add("overview.gateway", look)]
}

/// A gateway's state.
#[derive(serde::Serialize)]
struct GatewayDump {
    /// What the process waits for before it takes work.
    obstacle: Option<String>,
    models: Vec<String>,
    routers: Excerpt<Member>,
    running: usize,
    running_max: usize,
    /// In line for a place.
    waiting: usize,
    waiting_max: usize,
    requests: Excerpt<RequestDump>,
}

/// What serves new requests only: it need not go on, nor complain, once none are taken.
async fn until_draining(shutdown: Shutdown, task: impl Future<Output = ()>) {
    tokio::select! {
        () = task => {}
        () = shutdown.draining() => {}
    }
}

/// A gateway that serves.
#[derive(Debug)]
pub struct Gateway {
    http: Serving,
    grpc: Serving,
    status: Status,
    _dumps: [Dump; 2],
}

/// What a gateway knows of itself, for its own process: no key, certificate or port stands between.
#[derive(Clone, Debug)]
pub struct Status {
    ready: watch::Receiver<bool>,
    served: watch::Receiver<Served>,
}

impl Status {
    /// Returns true once a request would be served, and false when that will never be: the gateway has ended.
    pub async fn ready(&self) -> bool {
        self.ready.clone().wait_for(|ready| *ready).await.is_ok()
    }

    /// The public names of what is served.
    pub fn models(&self) -> Vec<String> {
        self.served.borrow().models.iter().map(|model| model.description.name.clone()).collect()
    }
}

impl Gateway {
    /// Where it serves HTTP: `host:port`.
    pub fn http_address(&self) -> &str {
        &self.http.address
    }

    /// Where it serves gRPC: `host:port` or `local:NAME`.
    pub fn grpc_address(&self) -> &str {
        &self.grpc.address
    }

    /// What it knows of itself.
    pub fn status(&self) -> Status {
        self.status.clone()
    }

    /// Returns when the shutdown has ended it.
    pub async fn finished(self) {
        self.http.finished().await;
        self.grpc.finished().await;
    }
}
