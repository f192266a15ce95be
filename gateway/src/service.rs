//! What every front of the gateway (HTTP, gRPC) works with: admission, models, readiness.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use node::queue::{Full, Place, Queue};
use node::telemetry::{REQUESTS, Span};
use node::{Busy, Clock, Shutdown, Tasks};
use proto::{Reason, RequestId};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::Config;
use crate::admit::admit;
use crate::answers::{Answers, Origin};
use crate::domain::{Priority, Request};
use crate::fault::Fault;
use crate::in_house::{Entry, InHouse};
use crate::metrics::{self, CLIENT_GONE, State};
use crate::models::{Model, Served};
use crate::resume::past_deadline;
use crate::route::Routers;
use crate::statistics::{Spent, Statistics};
use crate::timing::{Part, Parts, Timing};

/// Most sequences of one call: prompts times sequences of each.
const SEQUENCES_MAX: usize = 2048;

/// Most bytes of all prompts that are tokenised between other requests' turns: under a millisecond. A thread that may
/// block takes two switches there and back, and memory of its own.
const SHORT_BYTES_MAX: usize = 8 << 10;

/// True when admission costs too little to leave the thread for. A grammar may take long to read.
fn takes_little(requests: &[Request]) -> bool {
    let bytes = requests.iter().map(|request| request.prompt.bytes()).fold(0, usize::saturating_add);
    bytes <= SHORT_BYTES_MAX && requests.iter().all(|request| request.sampling.grammar.is_none())
}

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
    /// Bounds the requests in the house, those whose body still arrives included.
    pub(crate) house: Arc<Semaphore>,
    /// Bounds those that run.
    pub(crate) queue: Arc<Queue<Priority>>,
    /// What each model has served.
    pub(crate) statistics: Statistics,
    /// The calls that may be stopped by name.
    pub(crate) stoppable: Mutex<HashMap<String, Vec<CancellationToken>>>,
    /// When the gateway started, seconds of Unix time.
    pub(crate) started_at: u64,
    /// The requests in the house.
    pub(crate) in_house: Arc<InHouse>,
}

impl Service {
    /// True when a request can be placed and answered.
    pub(crate) fn is_ready(&self) -> bool {
        *self.ready.borrow() && !self.shutdown.is_draining()
    }

    /// Lets a request into the house, if as many as may run and wait are not there already.
    pub(crate) fn ticket(&self, dialect: &'static str) -> Result<Ticket, Fault> {
        let span = Span::entry("gateway.request");
        if let Some(trace_id) = span.context().trace_id() {
            tracing::Span::current().record("trace_id", trace_id);
        }
        span.set("baton.dialect", dialect);
        self.let_in(dialect, span)
    }

    fn let_in(&self, dialect: &'static str, span: Span) -> Result<Ticket, Fault> {
        let refused = |fault: Fault| {
            span.fail(&fault.clone().into());
            fault
        };
        if self.shutdown.is_draining() {
            return Err(refused(Fault::NotReady("the server is shutting down".to_owned())));
        }
        let Ok(permit) = self.house.clone().try_acquire_owned() else {
            let (running, waiting) = (self.config.requests_max, self.config.queue_max());
            return Err(refused(Fault::Busy { running, waiting }));
        };
        State::Waiting.enter();
        let id = Uuid::new_v4().simple().to_string();
        if span.context().is_recording() {
            span.set("baton.request", id.clone());
        }
        tracing::info!(target: REQUESTS, request = id, dialect, "request arrived");
        let arrived = self.clock.now();
        Ok(Ticket {
            entry: self.in_house.add(id.clone(), dialect, arrived),
            id,
            dialect,
            arrived,
            timing: Arc::new(Timing::new(arrived)),
            clock: self.clock,
            state: State::Waiting,
            status: CLIENT_GONE,
            place: None,
            measured: None,
            span,
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

    /// Admits the requests of one call, waits for its turn, asks for their tokens and waits for the first.
    pub(crate) async fn start(
        self: &Arc<Self>,
        requests: Vec<Request>,
        ticket: &mut Ticket,
    ) -> Result<Answers, Fault> {
        let (Some(first), sequences) =
            (requests.first(), requests.iter().map(|request| request.best_of).sum())
        else {
            return Err(Fault::Body("expected at least one prompt".to_owned()));
        };
        check_sequences(sequences, first.names.prompt)?;
        ticket.mark(Part::Read);
        let model = self.model(first.model.as_deref(), first.names.model)?;
        ticket.entry.read(&model.description.name);
        ticket.measured = Some(Measured::new(self.clone(), model.clone()));
        let priority = first.priority;
        let deadline = ticket.arrived.saturating_add(first.deadline(self.config.timeout));
        let id = ticket.id.clone();
        tracing::info!(target: REQUESTS, request = id, model = model.description.name, sequences, "request read");
        if ticket.span.context().is_recording() {
            ticket.span.set("gen_ai.request.model", model.description.name.clone());
            ticket.span.count("baton.sequences", sequences);
        }
        let tokenising = ticket.span.child("gateway.tokenise");
        let is_short = takes_little(&requests);
        let (service, began) = (self.clone(), self.clock.now());
        let admission = move || {
            let several = requests.len() > 1;
            let prepared = requests.into_iter().enumerate().map(|(index, request)| {
                let id = if several { format!("{id}-p{index}") } else { id.clone() };
                admit(request, &model, &service.config, RequestId(id))
            });
            prepared.collect::<Result<Vec<_>, _>>()
        };
        let prepared =
            if is_short { admission() } else { self.tasks.spawn_blocking("admit", admission).await? }?;
        drop(tokenising);
        let prompt_tokens = prepared.iter().map(|prepared| prepared.generation.prompt_len()).sum();
        metrics::prompt(prompt_tokens);
        ticket.span.count("gen_ai.usage.input_tokens", prompt_tokens);
        let admitted = self.clock.now();
        ticket.timing.mark(Part::Tokenise, admitted);
        tracing::info!(target: REQUESTS, request = ticket.id, "request admitted");
        let queueing = ticket.span.child("gateway.queue");
        ticket.place = Some(self.place(priority, deadline).await?);
        drop(queueing);
        ticket.entry.placed();
        let placed = self.clock.now();
        ticket.timing.mark(Part::Queue, placed);
        let waited_seconds = placed.saturating_sub(admitted).as_secs_f64();
        tracing::info!(target: REQUESTS, request = ticket.id, waited_seconds, "request runs");
        let answers = Answers::start(self.clone(), prepared, ticket.origin()).await?;
        if let Some(measured) = &mut ticket.measured {
            measured.spent.input = admitted.saturating_sub(began);
            measured.spent.queue = placed.saturating_sub(admitted) + answers.first_queue_wait();
        }
        ticket.running();
        let ttft_seconds = self.clock.now().saturating_sub(ticket.arrived).as_secs_f64();
        tracing::info!(target: REQUESTS, request = ticket.id, ttft_seconds, "request has its first token");
        Ok(answers)
    }

    /// A place among those that run, before the deadline.
    async fn place(&self, priority: Priority, deadline: Duration) -> Result<Place<Priority>, Fault> {
        let left = deadline.saturating_sub(self.clock.now());
        tokio::select! {
            placed = tokio::time::timeout(left, self.queue.place(priority)) => match placed {
                Ok(Ok(place)) => Ok(place),
                Ok(Err(Full { running, waiting })) => Err(Fault::Busy { running, waiting }),
                Err(_) => Err(past_deadline().into()),
            },
            () = self.shutdown.stopped() => Err(Fault::NotReady("the server stopped".to_owned())),
        }
    }

    /// Lets [`stop`](Self::stop) end a call by this name, as long as the guard lives.
    pub(crate) fn stoppable(self: &Arc<Self>, name: String, stopped: CancellationToken) -> Stoppable {
        let mut calls = self.stoppable.lock().unwrap_or_else(PoisonError::into_inner);
        calls.entry(name.clone()).or_default().push(stopped.clone());
        Stoppable { service: self.clone(), name, stopped }
    }

    /// Ends the running calls of that name. False when there is none.
    pub(crate) fn stop(&self, name: &str) -> bool {
        let calls = self.stoppable.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(calls) = calls.get(name) else { return false };
        calls.iter().for_each(CancellationToken::cancel);
        true
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

fn unix_milliseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Refuses a call of more sequences than one may have.
fn check_sequences(count: usize, field: &str) -> Result<(), Fault> {
    if count <= SEQUENCES_MAX {
        return Ok(());
    }
    Err(Fault::field(field, format!("expected at most {SEQUENCES_MAX} sequences in all, got {count}")))
}

/// A seed that nobody chose.
pub(crate) fn draw_seed() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the operating system's random source");
    u64::from_le_bytes(bytes)
}

/// One request in the house: its place among those that may run, and its line in the metrics.
pub(crate) struct Ticket {
    /// The request's name between services, and in the log.
    id: String,
    dialect: &'static str,
    arrived: Duration,
    /// Where its time goes.
    timing: Arc<Timing>,
    clock: Clock,
    state: State,
    /// What the request is counted as when this is dropped.
    status: u16,
    /// Its place among those that run.
    place: Option<Place<Priority>>,
    /// Once its model is known.
    measured: Option<Measured>,
    /// Ends with the request.
    span: Span,
    entry: Entry,
    _permit: OwnedSemaphorePermit,
    _busy: Busy,
}

/// What is known of a request for the statistics of its model.
struct Measured {
    service: Arc<Service>,
    model: Arc<Model>,
    /// Milliseconds of Unix time.
    arrived_ms: u64,
    spent: Spent,
}

impl Measured {
    fn new(service: Arc<Service>, model: Arc<Model>) -> Self {
        Self { service, model, arrived_ms: unix_milliseconds(), spent: Spent::default() }
    }
}

/// A call that can be stopped by name.
pub(crate) struct Stoppable {
    service: Arc<Service>,
    name: String,
    stopped: CancellationToken,
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        // Calls of one name differ by their tokens, of which a cancelled one is nobody's but this call's.
        self.stopped.cancel();
        let mut calls = self.service.stoppable.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(same) = calls.get_mut(&self.name) {
            same.retain(|stopped| !stopped.is_cancelled());
            if same.is_empty() {
                calls.remove(&self.name);
            }
        }
    }
}

impl Ticket {
    /// The API that the request turned out to be of.
    pub(crate) fn is_of(&mut self, dialect: &'static str) {
        self.dialect = dialect;
        self.span.set("baton.dialect", dialect);
    }

    /// The request's span.
    pub(crate) fn span(&self) -> &Span {
        &self.span
    }

    /// How the request ended; without a word it is a client that went away.
    pub(crate) fn ended(&mut self, status: u16) {
        self.status = status;
    }

    /// What the time since the last mark was, and where all of it went.
    pub(crate) fn mark(&self, part: Part) -> Parts {
        let mut parts = self.timing.parts();
        parts.mark(part, self.clock.now());
        *parts
    }

    fn origin(&self) -> Origin {
        Origin { arrived: self.arrived, trace: self.span.context().clone(), timing: self.timing.clone() }
    }

    fn running(&mut self) {
        self.state.leave();
        self.state = State::Running;
        self.entry.running();
        self.state.enter();
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.state.leave();
        metrics::answered(self.dialect, self.status);
        self.span.set("http.response.status_code", i64::from(self.status));
        if self.status == CLIENT_GONE {
            self.span.fail(&proto::Error::new(Reason::Cancelled, "the client went away"));
        }
        let answered = (200..300).contains(&self.status);
        let parts = self.mark(if answered { Part::Write } else { Part::Other });
        if answered {
            metrics::parts(&parts);
        }
        log_end(&self.id, self.status, &parts);
        if let Some(Measured { service, model, arrived_ms, spent }) = self.measured.take() {
            let total = service.clock.now().saturating_sub(self.arrived);
            service.statistics.ended(&model.description.name, arrived_ms, answered, Spent { total, ..spent });
        }
    }
}

/// The line of the log for a request that is over, with its time in milliseconds.
fn log_end(request: &str, status: u16, parts: &Parts) {
    let ms = |part| parts.of(part).as_secs_f64() * 1e3;
    tracing::info!(
        target: REQUESTS,
        request,
        status,
        total_ms = parts.total().as_secs_f64() * 1e3,
        read_ms = ms(Part::Read),
        tokenise_ms = ms(Part::Tokenise),
        queue_ms = ms(Part::Queue),
        placement_ms = ms(Part::Placement),
        prefill_queue_ms = ms(Part::PrefillQueue),
        prefill_ms = ms(Part::Prefill),
        transfer_ms = ms(Part::Transfer),
        decode_ms = ms(Part::Decode),
        replay_ms = ms(Part::Replay),
        write_ms = ms(Part::Write),
        other_ms = ms(Part::Other),
        "request ended"
    );
}
