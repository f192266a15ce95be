//! What every front of the gateway (HTTP, gRPC) works with: admission, models, readiness.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use node::{Busy, Clock, Shutdown, Tasks};
use proto::{Reason, RequestId};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use uuid::Uuid;

use crate::Config;
use crate::admit::admit;
use crate::answer::Answer;
use crate::domain::Request;
use crate::fault::Fault;
use crate::metrics::{self, CLIENT_GONE, State};
use crate::models::{Model, Served};
use crate::route::Routers;

/// Shared by all requests.
pub(crate) struct Service {
    pub(crate) config: Config,
    pub(crate) clock: Clock,
    pub(crate) shutdown: Shutdown,
    pub(crate) tasks: Tasks,
    pub(crate) routers: Arc<Routers>,
    pub(crate) served: watch::Receiver<Served>,
    pub(crate) ready: watch::Receiver<bool>,
    /// Told when a failure makes readiness doubtful.
    pub(crate) doubt: Arc<Notify>,
    pub(crate) permits: Arc<Semaphore>,
    /// When the gateway started, seconds of Unix time.
    pub(crate) started_at: u64,
}

impl Service {
    /// True when a request can be placed and answered.
    pub(crate) fn is_ready(&self) -> bool {
        *self.ready.borrow() && !self.shutdown.is_draining()
    }

    /// Lets a request in, if one more may run.
    pub(crate) fn ticket(&self, dialect: &'static str) -> Result<Ticket, Fault> {
        if self.shutdown.is_draining() {
            return Err(Fault::NotReady("the server is shutting down".to_owned()));
        }
        let Ok(permit) = self.permits.clone().try_acquire_owned() else {
            return Err(Fault::Busy { limit: self.config.requests_max });
        };
        State::Waiting.enter();
        Ok(Ticket {
            dialect,
            arrived: self.clock.now(),
            state: State::Waiting,
            status: CLIENT_GONE,
            _permit: permit,
            _busy: self.shutdown.busy(),
        })
    }

    /// The model that a request names, or the only one.
    pub(crate) fn model(&self, name: Option<&str>, field: &str) -> Result<Arc<Model>, Fault> {
        let served = self.served.borrow();
        if served.models.is_empty() {
            return Err(Fault::NotReady("no model is served yet".to_owned()));
        }
        let any = self.config.accepts_any_model();
        match name {
            Some(name) => match served.find(name).or_else(|| served.only().filter(|_| any)) {
                Some(model) => Ok(model.clone()),
                None => Err(Fault::Model(name.to_owned())),
            },
            None => served.only().cloned().ok_or_else(|| {
                let names: Vec<&str> =
                    served.models.iter().map(|model| model.description.name.as_str()).collect();
                Fault::field(field, format!("is required; expected one of {}", names.join(", ")))
            }),
        }
    }

    /// Admits the request, asks for its tokens and waits for the first.
    pub(crate) async fn start(
        self: &Arc<Self>,
        request: Request,
        ticket: &mut Ticket,
    ) -> Result<Answer, Fault> {
        let model = self.model(request.model.as_deref(), request.names.model)?;
        let id = RequestId(Uuid::new_v4().simple().to_string());
        let seed = draw_seed();
        tracing::debug!(request = %id, model = model.description.name, "request admitted");
        let (request, admitted) = {
            let model = model.clone();
            let admission = move || {
                let admitted = admit(&request, &model, id, seed);
                (request, admitted)
            };
            self.tasks.spawn_blocking("admit", admission).await?
        };
        let answer = Answer::start(self.clone(), &request, model, admitted?, ticket.arrived).await?;
        ticket.running();
        Ok(answer)
    }

    /// A failure that says something about the cluster puts readiness in doubt.
    pub(crate) fn note(&self, fault: &Fault) {
        if matches!(fault.reason(), Reason::WorkerLost | Reason::Internal) {
            self.doubt.notify_one();
        }
    }
}

/// Now, in seconds of Unix time.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn draw_seed() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the operating system's random source");
    u64::from_le_bytes(bytes)
}

/// One request in the house: its place among those that may run, and its line in the metrics.
pub(crate) struct Ticket {
    dialect: &'static str,
    arrived: Duration,
    state: State,
    /// What the request is counted as when this is dropped.
    status: u16,
    _permit: OwnedSemaphorePermit,
    _busy: Busy,
}

impl Ticket {
    /// How the request ended; without a word it is a client that went away.
    pub(crate) fn ended(&mut self, status: u16) {
        self.status = status;
    }

    fn running(&mut self) {
        self.state.leave();
        self.state = State::Running;
        self.state.enter();
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.state.leave();
        metrics::answered(self.dialect, self.status);
    }
}
