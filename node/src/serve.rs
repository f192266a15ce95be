//! Serving: gRPC to other services, HTTP to clients.

use std::convert::Infallible;

use http::Request;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tower::{Service, ServiceExt, service_fn};

use crate::health::Health;
use crate::inbound::{Inbound, Stalled};
use crate::listen::{Manner, Protocol, Public, accept, bind};
use crate::{Context, Error, Listener, Shutdown, TaskHandle, call};

/// gRPC services that are served together.
#[derive(Clone, Debug, Default)]
pub struct Services {
    routes: Routes,
    names: Vec<&'static str>,
}

impl Services {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a generated server, which [`crate::limits!`] should have been applied to.
    #[must_use]
    #[expect(clippy::should_implement_trait, reason = "adding a server to a list is no arithmetic")]
    pub fn add<S>(mut self, server: S) -> Self
    where
        S: Service<Request<Body>, Error = Infallible> + NamedService + Clone + Send + Sync + 'static,
        S::Response: axum::response::IntoResponse,
        S::Future: Send + 'static,
    {
        self.names.push(S::NAME);
        self.routes = self.routes.add_service(server);
        self
    }
}

/// A running server. It ends with the shutdown alone; dropping this leaves it running.
#[derive(Debug)]
pub struct Serving {
    /// Where others reach it: `host:port` with the real port, or `local:NAME`.
    pub address: String,
    health: Option<Health>,
    task: TaskHandle,
}

impl Serving {
    /// Reports the services to health checks as serving while this says so, and until the process drains.
    pub fn follow(&self, mut serving: watch::Receiver<bool>, context: &Context) {
        let Some(health) = self.health.clone() else { return };
        let shutdown = context.shutdown.clone();
        drop(context.tasks.spawn("health", async move {
            loop {
                let now = *serving.borrow_and_update() && !shutdown.is_draining();
                health.set(now).await;
                tokio::select! {
                    // Draining comes after a last report of serving, or is seen in the next round.
                    () = shutdown.draining() => return health.set(false).await,
                    changed = serving.changed() => if changed.is_err() { return health.set(false).await },
                }
            }
        }));
    }

    /// Returns when the server has closed: the process drained and no call is left, or it stopped.
    pub async fn finished(self) {
        self.task.join().await;
    }
}

/// Serves gRPC to other services of the cluster, with health and reflection beside the given services: to nobody but those
/// that show a certificate of the cluster's authority, where the network is secured.
///
/// A drain reports NOT_SERVING and lets calls go on, new ones too: which of them to refuse is the services' decision.
/// The server closes when the process is idle ([`crate::Shutdown::idle`]) or stops.
///
/// # Errors
/// [`Error::Bind`] when the address cannot be listened on.
pub async fn serve_grpc(
    listener: &Listener,
    services: Services,
    context: &Context,
) -> Result<Serving, Error> {
    let manner = Manner::services(context.network.tls());
    serve_calls(listener, services, manner, |router| router, context).await
}

/// The same for clients. `front` puts its layers around every call, health and reflection included.
///
/// # Errors
/// [`Error::Bind`] when the address cannot be listened on.
pub async fn serve_public_grpc(
    listener: &Listener,
    services: Services,
    public: &Public,
    front: impl FnOnce(axum::Router) -> axum::Router,
    context: &Context,
) -> Result<Serving, Error> {
    serve_calls(listener, services, Manner::clients(Protocol::Grpc, public), front, context).await
}

async fn serve_calls(
    listener: &Listener,
    services: Services,
    manner: Manner,
    front: impl FnOnce(axum::Router) -> axum::Router,
    context: &Context,
) -> Result<Serving, Error> {
    let (health, routes) = Health::install(services.routes, services.names).await?;
    let (tasks, shutdown) = (context.tasks.clone(), context.shutdown.clone());
    let (address, task) = match listener {
        Listener::Local(name) => {
            let routes = Routes::from(front(routes.into_axum_router()));
            let registration = context.network.register(name, routes, shutdown.clone());
            let serve = async move {
                shutdown.idle().await;
                drop(registration);
            };
            (listener.to_string(), tasks.spawn("local server", serve))
        }
        Listener::Tcp(address) => {
            let socket = bind(address).await?;
            let address = local_address(&socket, address)?;
            let calls = front(calls(routes.prepare(), shutdown.clone()));
            let arriving = shutdown.clone();
            let service = service_fn(move |request| {
                let (request, unanswered) = arrived(request, &arriving);
                let answer = calls.clone().oneshot(request);
                async move {
                    let answer = answer.await;
                    drop(unanswered);
                    answer
                }
            });
            let serve = accept(socket, manner, service, tasks.clone(), shutdown);
            (address, tasks.spawn("grpc server", serve))
        }
    };
    drop(tasks.spawn("health", health.clone().follow(context.shutdown.clone())));
    tracing::info!(service = context.name, address, "serving grpc");
    Ok(Serving { address, health: Some(health), task })
}

/// gRPC calls as one route that takes every path, so that layers around it see a call's end by deadline or panic too.
fn calls(routes: Routes, shutdown: Shutdown) -> axum::Router {
    axum::Router::new().fallback_service(service_fn(move |request: Request<axum::body::Body>| {
        let request = request.map(|body| Body::new(body.map_err(stalled_call)));
        let answer = call::serve(routes.clone(), shutdown.clone(), request);
        async move { Ok::<_, Infallible>(answer.await.unwrap_or_else(Status::into_http)) }
    }))
}

/// What a call reads where its request's body fails.
fn stalled_call(error: axum::Error) -> Status {
    let error = error.into_inner();
    match error.downcast_ref::<Stalled>() {
        Some(stalled) => Status::unavailable(stalled.to_string()),
        None => Status::from_error(error),
    }
}

fn arrived(
    request: Request<Incoming>,
    shutdown: &Shutdown,
) -> (Request<axum::body::Body>, crate::inbound::Unanswered) {
    let (mut parts, body) = request.into_parts();
    let (body, unanswered) = Inbound::new(body, parts.extensions.remove(), shutdown);
    (Request::from_parts(parts, axum::body::Body::new(body)), unanswered)
}

/// Serves HTTP/1 and HTTP/2 (prior knowledge) in plain text at `host:port`. A drain closes the listener, and each
/// connection after its running requests.
///
/// # Errors
/// [`Error::Bind`] when the address cannot be listened on.
pub async fn serve_http(address: &str, router: axum::Router, context: &Context) -> Result<Serving, Error> {
    serve_public_http(address, router, &Public::default(), context).await
}

/// The same for clients, with what they need: over TLS, HTTP/2 is chosen in the handshake.
///
/// # Errors
/// [`Error::Bind`] when the address cannot be listened on.
pub async fn serve_public_http(
    address: &str,
    router: axum::Router,
    public: &Public,
    context: &Context,
) -> Result<Serving, Error> {
    let manner = Manner::clients(Protocol::Http, public);
    let serving = serve_requests(address, router, manner, context).await?;
    tracing::info!(
        service = context.name,
        address = serving.address,
        tls = public.tls.is_some(),
        "serving http"
    );
    Ok(serving)
}

/// The same for operators: in plain text, until the process stops. No request of theirs holds a drain open.
pub(crate) async fn serve_operators(
    address: &str,
    router: axum::Router,
    context: &Context,
) -> Result<Serving, Error> {
    let manner = Manner::clients(Protocol::Operators, &Public::default());
    let serving = serve_requests(address, router, manner, context).await?;
    tracing::info!(service = context.name, address = serving.address, "serving operators");
    Ok(serving)
}

async fn serve_requests(
    address: &str,
    router: axum::Router,
    manner: Manner,
    context: &Context,
) -> Result<Serving, Error> {
    let socket = bind(address).await?;
    let address = local_address(&socket, address)?;
    let (tasks, shutdown) = (context.tasks.clone(), context.shutdown.clone());
    let (calls, holds_drain) = (shutdown.clone(), manner.holds_drain());
    let service = service_fn(move |request| {
        let (request, unanswered) = arrived(request, &calls);
        let answer = call::serve_http(router.clone(), holds_drain.then(|| calls.busy()), request);
        async move {
            let answer = answer.await;
            drop(unanswered);
            Ok::<_, Infallible>(answer)
        }
    });
    let task = tasks.spawn("http server", accept(socket, manner, service, tasks.clone(), shutdown));
    Ok(Serving { address, health: None, task })
}

fn local_address(socket: &tokio::net::TcpListener, asked: &str) -> Result<String, Error> {
    let address = socket.local_addr().map_err(|source| Error::Bind { address: asked.to_owned(), source })?;
    Ok(address.to_string())
}
