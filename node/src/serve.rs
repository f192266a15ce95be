//! Serving: gRPC to other services, HTTP to clients.

use std::convert::Infallible;

use http::Request;
use hyper::body::Incoming;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tower::{Service, service_fn};

use crate::health::Health;
use crate::listen::{Protocol, accept, bind};
use crate::{Context, Error, Listener, TaskHandle, call};

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
    /// Reports the services to health checks as serving or not. A drain reports NOT_SERVING by itself.
    pub async fn set_serving(&self, serving: bool) {
        if let Some(health) = &self.health {
            health.set(serving).await;
        }
    }

    /// Returns when the server has closed: the process drained and no call is left, or it stopped.
    pub async fn finished(self) {
        self.task.join().await;
    }
}

/// Serves gRPC, with health and reflection beside the given services.
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
    let (health, routes) = Health::install(services.routes, services.names).await?;
    let (tasks, shutdown) = (context.tasks.clone(), context.shutdown.clone());
    let (address, task) = match listener {
        Listener::Local(name) => {
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
            let routes = routes.prepare();
            let calls = shutdown.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let answer = call::serve(routes.clone(), calls.clone(), request.map(Body::new));
                async move { Ok::<_, Infallible>(answer.await.unwrap_or_else(tonic::Status::into_http)) }
            });
            let serve = accept(socket, Protocol::Grpc, service, tasks.clone(), shutdown);
            (address, tasks.spawn("grpc server", serve))
        }
    };
    drop(tasks.spawn("health", health.clone().follow(context.shutdown.clone())));
    tracing::info!(service = context.name, address, "serving grpc");
    Ok(Serving { address, health: Some(health), task })
}

/// Serves HTTP/1 and HTTP/2 (prior knowledge) at `host:port`. A drain closes the listener, and each connection after
/// its running requests.
///
/// # Errors
/// [`Error::Bind`] when the address cannot be listened on.
pub async fn serve_http(address: &str, router: axum::Router, context: &Context) -> Result<Serving, Error> {
    let socket = bind(address).await?;
    let address = local_address(&socket, address)?;
    let (tasks, shutdown) = (context.tasks.clone(), context.shutdown.clone());
    let calls = shutdown.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let answer = call::serve_http(router.clone(), calls.clone(), request.map(axum::body::Body::new));
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let task = tasks.spawn("http server", accept(socket, Protocol::Http, service, tasks.clone(), shutdown));
    tracing::info!(service = context.name, address, "serving http");
    Ok(Serving { address, health: None, task })
}

fn local_address(socket: &tokio::net::TcpListener, asked: &str) -> Result<String, Error> {
    let address = socket.local_addr().map_err(|source| Error::Bind { address: asked.to_owned(), source })?;
    Ok(address.to_string())
}
