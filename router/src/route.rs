//! One request's shell: waits for what can happen next, tells the dispatch, and carries out what it says.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use node::Context;
use node::telemetry::Span;
use proto::{Error, Generation, Placed, Reason, RequestId};
use tokio::sync::{Semaphore, mpsc, watch};
use tracing::{debug, info, warn};

use crate::calls::{self, Call, Heard, Shown};
use crate::cluster::Cluster;
use crate::cost::Stopwatch;
use crate::dispatch::{Action, Dispatch, DispatchConfig, Emission, Event, RequestState};
use crate::in_flight::{Entry, InFlight};
use crate::line::{self, Line, Turn, Urgency};
use crate::meters;
use crate::policy::Policy;
use crate::pools::{NamedBlocks, PlacementMode, Wish};

/// What a client's stream is made of.
pub(crate) enum Item {
    /// Goes to the client.
    Emission(Emission),
    /// The end. Always the last item.
    End(Result<(), Error>),
}

/// Longest wait for a client to read the end of its stream when no time is left.
const END_WAIT: Duration = Duration::from_secs(1);

/// What the requests of a router share.
pub(crate) struct Shared {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) context: Context,
    pub(crate) dispatch: DispatchConfig,
    /// Fences that may still be sent.
    pub(crate) fences: Arc<Semaphore>,
    /// The requests that run.
    pub(crate) in_flight: Arc<InFlight>,
    /// Who of them runs.
    pub(crate) line: Arc<Line>,
}

/// A request that runs.
pub(crate) struct Route {
    shared: Arc<Shared>,
    dispatch: Dispatch,
    request: RequestId,
    probe: bool,
    changes: watch::Receiver<u64>,
    /// The calls that are open, each with the worker's address.
    prefill: Option<(String, Call)>,
    decode: Option<(String, Call)>,
    /// Takes the times of the present placement.
    stopwatch: Option<Stopwatch>,
    /// Who computes the prompt of the present attempt, until decode has made a token of it.
    untaken: Option<String>,
    /// When to tick.
    wake: Option<Duration>,
    /// What the client has not taken yet. No call is listened to before this is empty, so it holds what one event
    /// brings: at most the early tokens and one more.
    outbox: VecDeque<Emission>,
    end: Option<Result<(), Error>>,
    items: mpsc::Sender<Item>,
    counted: meters::Counted,
    /// Of the request.
    span: Span,
    /// Of the present attempt.
    attempt: Span,
    entry: Entry,
    /// Once its turn has come.
    turn: Option<Turn>,
}

impl Route {
    /// A request that has not started; `span` ends with it.
    pub(crate) fn new(
        shared: Arc<Shared>,
        generation: Generation,
        items: mpsc::Sender<Item>,
        span: Span,
    ) -> Self {
        if span.context().is_recording() {
            span.set("baton.request", generation.request.0.clone());
        }
        let (id, now) = (generation.request.clone(), shared.context.clock.now());
        let entry = shared.in_flight.add(id, generation.probe, now);
        Self {
            request: generation.request.clone(),
            probe: generation.probe,
            dispatch: Dispatch::new(generation, shared.dispatch),
            changes: shared.cluster.changes(),
            shared,
            prefill: None,
            decode: None,
            stopwatch: None,
            untaken: None,
            wake: None,
            outbox: VecDeque::new(),
            end: None,
            items,
            counted: meters::Counted::new(RequestState::Queued),
            span,
            attempt: Span::default(),
            entry,
            turn: None,
        }
    }

    /// Runs the request to its end.
    pub(crate) async fn run(mut self) {
        // Probes come at any time; what is to stop is a client's request.
        if !self.probe {
            tokio::select! {
                () = node::fail_point("router.queued") => {}
                () = self.items.closed() => {}
            }
        }
        match self.begin().await {
            Err(error) => self.end = Some(Err(error)),
            Ok(()) => self.tell(Event::Start),
        }
        while self.end.is_none() {
            if let Some(event) = self.next().await {
                self.tell(event);
            }
        }
        self.finish().await;
    }

    /// Waits for its turn; refuses it when that is the better answer.
    async fn begin(&mut self) -> Result<(), Error> {
        self.stand_in_line().await?;
        self.name_blocks();
        self.refusal().map_or(Ok(()), Err)
    }

    /// Waits for a place among those that run. What that takes is part of the request's time.
    async fn stand_in_line(&mut self) -> Result<(), Error> {
        let Context { clock, shutdown, .. } = &self.shared.context;
        let (generation, arrived) = (self.dispatch.generation(), clock.now());
        let (turn, time_left) = (Urgency::of(generation, arrived), generation.time_left);
        let turn = tokio::select! {
            biased;
            turn = tokio::time::timeout(time_left, self.shared.line.place(turn)) => match turn {
                Ok(turn) => turn.map_err(line::refused)?,
                Err(_) => {
                    let message = "the deadline passed before the request's turn had come";
                    return Err(Error::new(Reason::Deadline, message));
                }
            },
            () = self.items.closed() => return Err(Error::new(Reason::Cancelled, "the client went away")),
            () = shutdown.draining() => {
                let message = "the router is draining: requests that wait find their turn elsewhere";
                return Err(Error::new(Reason::WorkerLost, message));
            }
        };
        self.turn = Some(turn);
        self.dispatch.has_waited(clock.now().saturating_sub(arrived));
        Ok(())
    }

    /// Names the blocks of the prompt, where the policy goes by them; not while the pools are held.
    fn name_blocks(&mut self) {
        let tokens = &self.dispatch.generation().tokens;
        let chains = {
            let pools = self.shared.cluster.pools();
            if pools.policy() != Policy::Prefix {
                return;
            }
            pools.chains(&self.dispatch.generation().model)
        };
        let blocks = chains.into_iter().map(|chain| NamedBlocks::of(chain, tokens)).collect();
        self.dispatch.set_blocks(blocks);
    }

    /// Refuses a request that nobody could begin before its deadline, by what waits at every worker that could compute its
    /// prompt, and by the room at every one that could decode it. One that has tokens already goes on.
    fn refusal(&self) -> Option<Error> {
        let generation = self.dispatch.generation();
        if generation.generated > 0 || generation.probe {
            return None;
        }
        let now = self.shared.context.clock.now();
        let wish = Wish::of(generation, self.shared.dispatch.placement);
        let wish = Wish { blocks: self.dispatch.blocks(), now, ..wish };
        let (first_token, room) = {
            let pools = self.shared.cluster.pools();
            (pools.first_token_in(&wish), pools.room_in(&wish))
        };
        let (what, cause, expected) = if first_token >= room {
            ("the first token", "deadline", first_token?)
        } else {
            ("room for its KV", "capacity", room?)
        };
        let late = expected.checked_sub(generation.time_left)?;
        meters::rejected(cause);
        let message = format!(
            "{what} is expected in {:.1} s and the deadline is in {:.1} s: try again in {:.1} s",
            expected.as_secs_f64(),
            generation.time_left.as_secs_f64(),
            late.as_secs_f64().max(1.0)
        );
        Some(Error::new(Reason::QueueFull, message))
    }

    /// Waits for what happens next. `None` when that was only a client that took an item.
    async fn next(&mut self) -> Option<Event> {
        let listening = self.outbox.is_empty();
        let Self { shared, dispatch, outbox, items, changes, prefill, decode, wake, .. } = self;
        let model = &dispatch.generation().model;
        let mut listener =
            Listener { shared, model, stopwatch: &mut self.stopwatch, untaken: &mut self.untaken };
        let now = shared.context.clock.now();
        let tick = async {
            match wake {
                Some(at) => tokio::time::sleep(at.saturating_sub(now)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = items.closed() => Some(Event::ClientGone),
            () = tick => Some(Event::Tick),
            // The sender lives as long as the process's router.
            Ok(()) = changes.changed() => Some(Event::PoolsChanged),
            Ok(place) = items.reserve(), if !listening => {
                let item = outbox.pop_front()?;
                place.send(Item::Emission(item));
                None
            }
            heard = hear(prefill), if listening && prefill.is_some() => Some(listener.take_in(heard?)),
            heard = hear(decode), if listening && decode.is_some() => Some(listener.take_in(heard?)),
        }
    }

    /// Tells the dispatch, and does what it says.
    fn tell(&mut self, event: Event) {
        let mut actions = Vec::new();
        let now = self.shared.context.clock.now();
        self.dispatch.on(event, &self.shared.cluster.pools(), now, &mut actions);
        for action in actions {
            self.carry_out(action);
        }
        self.counted.set(self.dispatch.state());
        self.entry.follow(&self.dispatch);
    }

    fn carry_out(&mut self, action: Action) {
        let network = &self.shared.context.network;
        match action {
            Action::StartPrefill { worker, generation } => {
                let call = calls::prefill(network, &worker, generation, self.attempt.context());
                self.prefill = Some((worker, call));
            }
            Action::StartDecode { worker, generation, handoff } => {
                let call = calls::decode(network, &worker, (generation, handoff), self.attempt.context());
                self.decode = Some((worker, call));
            }
            Action::DropPrefill => self.prefill = None,
            Action::DropDecode => self.decode = None,
            Action::Fence { worker, request, attempt } => {
                let Ok(permit) = Arc::clone(&self.shared.fences).try_acquire_owned() else {
                    debug!(request = %self.request, worker, "too many fences on their way, the next attempt fences");
                    return;
                };
                let fence = calls::fence(network.clone(), worker, request, attempt);
                let tasks = &self.shared.context.tasks;
                // The fence outlives the request: its end is bounded by its tries, its number by the permits.
                drop(tasks.spawn_contained("fence", async move {
                    fence.await;
                    drop(permit);
                }));
            }
            Action::Move { worker, request, attempt } => {
                debug!(request = %self.request, worker, "asking for the sequence");
                let asks = calls::ask_to_move(network.clone(), worker, request, attempt);
                // Ends within its time; there are no more of them than requests.
                drop(self.shared.context.tasks.spawn_contained("move", asks));
            }
            Action::Moved { from, to, outcome } => {
                meters::moved(&outcome);
                match outcome {
                    Ok(()) => info!(request = %self.request, from, to, "sequence moved"),
                    Err(error) => info!(request = %self.request, from, to, %error, "sequence could not move"),
                }
            }
            Action::Retry { failed, cause } => {
                meters::retried(cause.reason, self.probe);
                self.entry.failed();
                self.attempt.fail(&cause);
                self.attempt = Span::default();
                let trace_id = self.trace_id();
                warn!(request = %self.request, trace_id, attempt = failed.0, %cause, "attempt failed, replaying");
            }
            Action::Emit(emission) => {
                if let Emission::Token(token) = &emission
                    && let Some(prompt) = &token.prompt
                {
                    let sequence = self.dispatch.generation();
                    meters::prompt_computed(sequence.prompt_len() + token.index, prompt.cached_tokens);
                }
                if let Emission::Placed(placed) = &emission {
                    let policy = {
                        let mut pools = self.shared.cluster.pools();
                        pools.touch(self.dispatch.blocks());
                        pools.policy()
                    };
                    meters::placed(placed.kind(), self.probe);
                    self.entry.placed(placed);
                    self.attempt = attempt(&self.span, placed, (self.shared.dispatch.placement, policy));
                    let tokens = self.dispatch.generation().tokens.len();
                    let now = self.shared.context.clock.now();
                    self.untaken.clone_from(&placed.prefill);
                    self.stopwatch = Some(Stopwatch::start(placed.prefill.is_some(), tokens, now));
                    debug!(request = %self.request, attempt = placed.attempt.0, prefill = placed.prefill,
                        decode = placed.decode, "placed");
                }
                self.outbox.push_back(emission);
            }
            Action::Finish(result) => {
                let now = self.shared.context.clock.now();
                if let Some(seen) = self.stopwatch.as_ref().and_then(|watch| watch.ended(now)) {
                    let model = &self.dispatch.generation().model;
                    self.shared.cluster.pools().observe(model, seen);
                }
                self.end = Some(result);
            }
            Action::WakeAt(at) => self.wake = Some(at),
        }
    }

    /// For logs.
    fn trace_id(&self) -> Option<String> {
        self.span.context().trace_id()
    }

    /// Hands out what is left, and the end; not for longer than the request may take.
    async fn finish(mut self) {
        self.prefill = None;
        self.decode = None;
        let result = self.end.take().unwrap_or(Ok(()));
        meters::ended(&result, self.probe);
        let trace_id = self.trace_id();
        if let Err(error) = &result {
            self.attempt.fail(error);
            self.span.fail(error);
        }
        drop((std::mem::take(&mut self.attempt), std::mem::take(&mut self.span)));
        match &result {
            Ok(()) => debug!(request = %self.request, trace_id, "request finished"),
            Err(error) => info!(request = %self.request, trace_id, %error, "request failed"),
        }
        let left = self.dispatch.deadline().saturating_sub(self.shared.context.clock.now()).max(END_WAIT);
        let hand_out = async {
            for emission in self.outbox.drain(..) {
                self.items.send(Item::Emission(emission)).await.ok()?;
            }
            self.items.send(Item::End(result)).await.ok()
        };
        // A client that is gone, or does not read, has no use for the end.
        let _ = tokio::time::timeout(left, hand_out).await;
    }
}

/// The span of an attempt that was placed.
fn attempt(request: &Span, placed: &Placed, (mode, policy): (PlacementMode, Policy)) -> Span {
    let span = request.child("router.attempt");
    if span.context().is_recording() {
        span.set("baton.attempt", i64::from(placed.attempt.0));
        span.set("baton.placement", placed.kind().name());
        span.set("baton.placement.mode", mode.to_string());
        span.set("baton.policy", policy.name());
        if let Some(prefill) = &placed.prefill {
            span.set("baton.prefill", prefill.clone());
        }
        span.set("baton.decode", placed.decode.clone());
    }
    span
}

/// Notes what events of calls show besides.
struct Listener<'a> {
    shared: &'a Shared,
    model: &'a str,
    stopwatch: &'a mut Option<Stopwatch>,
    untaken: &'a mut Option<String>,
}

impl Listener<'_> {
    /// Notes whether workers did what they were asked. What prefill has made is good when decode has made a token of it; until
    /// then either of the two may be at fault for what fails.
    fn judge(&mut self, worker: &str, event: &Event) {
        let counts = |error: &Error| {
            error.reason.is_retryable() && !matches!(error.reason, Reason::OutOfBlocks | Reason::QueueFull)
        };
        let (is_good, other) = match event {
            Event::DecodeToken { token, .. } => match self.untaken.take() {
                None if token.finish.is_none() => return,
                prefill => (true, prefill),
            },
            Event::PrefillDone { token, .. } if token.finish.is_some() => (true, None),
            Event::PrefillEnded { error: Some(error), .. } if counts(error) => (false, None),
            Event::DecodeEnded { error: Some(error), .. } if counts(error) => (false, self.untaken.take()),
            _ => return,
        };
        let now = self.shared.context.clock.now();
        let mut pools = self.shared.cluster.pools();
        for worker in [Some(worker), other.as_deref()].into_iter().flatten() {
            let changed = if is_good { pools.succeeded(worker, now) } else { pools.failed(worker, now) };
            if changed {
                meters::spared(pools.spared());
                info!(worker, closed = is_good, "a worker's circuit has changed");
            }
        }
    }

    /// Notes a worker that was lost, and what the item shows of costs; gives the event on.
    fn take_in(&mut self, (worker, heard): (String, Heard)) -> Event {
        if let Some(error) = heard.lost {
            self.shared.cluster.suspect(&worker, error);
        }
        let now = self.shared.context.clock.now();
        if let Some(watch) = self.stopwatch {
            let observation = match (heard.shown, &heard.event) {
                (Some(Shown::Cached(tokens)), _) => {
                    watch.cached(tokens);
                    None
                }
                (Some(Shown::Skipped(tokens)), _) => {
                    watch.skipped(tokens);
                    None
                }
                (Some(Shown::Prefill(took)), _) => watch.prefilled(took, now),
                (None, Event::DecodeToken { token, .. }) => {
                    let prompt = token.prompt.as_ref();
                    watch.token(prompt.map(|prompt| (prompt.cached_tokens, token.queue_wait)), now)
                }
                (None, _) => None,
            };
            if let Some(observation) = observation {
                self.shared.cluster.pools().observe(self.model, observation);
            }
        }
        self.judge(&worker, &heard.event);
        heard.event
    }
}

/// The next event of a call, with the worker that it came from; the call is closed after its last.
async fn hear(call: &mut Option<(String, Call)>) -> Option<(String, Heard)> {
    let (worker, stream) = call.as_mut()?;
    let heard = stream.next().await;
    let worker = worker.clone();
    if heard.as_ref().is_none_or(|heard| heard.last) {
        *call = None;
    }
    heard.map(|heard| (worker, heard))
}
