//! The gRPC service that gateways call.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use node::telemetry::Span;
use proto::{Error, Generation, Reason, wire};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};
use wire::route_event::Event;

use crate::Config;
use crate::dispatch::Emission;
use crate::line;
use crate::meters;
use crate::route::{Item, Route, Shared};

/// Serves `Router`.
pub(crate) struct RouterService {
    shared: Arc<Shared>,
    config: Config,
}

impl RouterService {
    pub(crate) fn new(shared: Shared, config: Config) -> Self {
        Self { shared: Arc::new(shared), config }
    }

    /// Lets a request in, or says why not.
    fn admit(&self, generation: Generation, span: Span) -> Result<mpsc::Receiver<Item>, Error> {
        if self.shared.context.shutdown.is_draining() {
            return Err(Error::new(Reason::WorkerLost, "the router is draining: no new requests are taken"));
        }
        let line = &self.shared.line;
        if let Some(full) = line.full() {
            return Err(line::refused(full));
        }
        let (sender, receiver) = mpsc::channel(self.config.items_max);
        let route = Route::new(Arc::clone(&self.shared), generation, sender, span);
        // The receiver owns the request: when the client's stream is dropped, the route sees it and ends.
        drop(self.shared.context.tasks.spawn_contained("request", route.run()));
        Ok(receiver)
    }
}

#[tonic::async_trait]
impl wire::router_server::Router for RouterService {
    type RouteStream = BoxStream<'static, Result<wire::RouteEvent, Status>>;

    async fn route(
        &self,
        request: Request<wire::RouteRequest>,
    ) -> Result<Response<Self::RouteStream>, Status> {
        let span = Span::server("router.request");
        let generation = request.into_inner().generation;
        let generation: Generation =
            generation.ok_or_else(|| Error::invalid("generation", "is required"))?.try_into()?;
        let probe = generation.probe;
        let items = self.admit(generation, span).inspect_err(|error| {
            meters::ended(&Err(error.clone()), probe);
        })?;
        Ok(Response::new(answer(items)))
    }

    async fn list_models(
        &self,
        _: Request<wire::ListModelsRequest>,
    ) -> Result<Response<wire::ListModelsResponse>, Status> {
        let pools = self.shared.cluster.pools();
        let models = pools.served_models(self.config.placement).into_iter().map(Into::into).collect();
        Ok(Response::new(wire::ListModelsResponse { models, workers: pools.live_addresses() }))
    }
}

/// The client's stream: every emission, then the end. A request that vanishes without its end ends in an error.
fn answer(items: mpsc::Receiver<Item>) -> BoxStream<'static, Result<wire::RouteEvent, Status>> {
    let next = |items: Option<mpsc::Receiver<Item>>| async move {
        let mut items = items?;
        match items.recv().await {
            Some(Item::Emission(emission)) => Some((Ok(event(emission)), Some(items))),
            Some(Item::End(Ok(()))) => None,
            Some(Item::End(Err(error))) => Some((Err(error.into()), None)),
            None => {
                let error = Error::new(Reason::WorkerLost, "the router gave the request up");
                Some((Err(error.into()), None))
            }
        }
    };
    stream::unfold(Some(items), next).boxed()
}

fn event(emission: Emission) -> wire::RouteEvent {
    let event = match emission {
        Emission::Placed(placed) => Event::Placed(placed.into()),
        Emission::Token(token) => Event::Token(token.into()),
    };
    wire::RouteEvent { event: Some(event) }
}
