//! The shell around a core: its thread, and the handle by which gRPC services reach it.
//!
//! [`spawn`] moves the core to a thread of its own, which is member 0 of the engine's pool; everything else is
//! async and talks to it through bounded queues. [`Handle`] opens calls. What becomes of the core's actions is in
//! `engine_loop`; how a call's two ends fit together, in `call`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use checkpoint::grammar::GrammarEnv;
use node::telemetry::TraceContext;
use node::{Context, Tasks};
use proto::{Attempt, BlockHash, Error, Generation, Handoff, Reason, RequestId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, oneshot, watch};

use crate::call::{Call, CallStream, Guard, Item, ItemSender, SolePrefill};
use crate::core::{CallId, Core, DecodeItem, Event, FetchItem, Gauges, PrefillItem};
use crate::dump::EngineDump;
use crate::engine_loop::EngineLoop;
use crate::feed::Feed;
use crate::inbox::{self, Message, Outbox};
use crate::meters::Meters;
use crate::peers::Peers;

/// Bounds of a shell, and what it must know of the engine.
#[derive(Clone, Debug)]
pub struct ShellConfig {
    /// Most calls that peers may have open at once.
    pub calls_max: usize,
    /// Most events that wait for the core besides one for each open call.
    pub events_max: usize,
    /// Changes of the prefix cache that are kept for those who watch; who falls behind further starts anew.
    pub changes_max: usize,
    /// Items of one fetch that may wait in each direction.
    pub fetch_window: usize,
    /// Scheduling priority of the engine's thread, 0 to 19; 0 leaves it alone.
    pub nice: i32,
    /// Most tokens of a sequence: no decode call can carry more.
    pub context_len: usize,
    /// The vocabulary that the engine follows grammars with.
    pub vocabulary: Option<Arc<GrammarEnv>>,
}

/// What a core shows of itself after each step and burst of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Its state in numbers.
    pub gauges: Gauges,
    /// Nothing is left to do or to keep.
    pub is_idle: bool,
}

impl Shown {
    pub(crate) fn of(core: &dyn Core) -> Self {
        Self { gauges: core.gauges(), is_idle: core.is_idle() }
    }
}

/// Reaches the core from async code. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    outbox: Outbox,
    /// The share of each call in the bound on open calls; closed when no more are taken.
    calls: Arc<Semaphore>,
    calls_max: usize,
    /// The last id drawn; ids are even.
    last_call: Arc<AtomicU64>,
    sole_prefill: Arc<SolePrefill>,
    shown: watch::Receiver<Shown>,
    feed: Arc<Feed>,
    end: watch::Receiver<Option<Result<(), Error>>>,
    fetch_window: usize,
    context_len: usize,
    vocabulary: Option<Arc<GrammarEnv>>,
    tasks: Tasks,
}

/// Moves the core to a thread of its own and runs it there until [`Handle::stop`]. `context` names the worker in
/// thread names and metrics, and gives the network for the fetches that the core starts, and the clock.
///
/// # Errors
/// INTERNAL when the system gives no thread. Must be called within a tokio runtime.
pub fn spawn(core: Box<dyn Core>, config: ShellConfig, context: &Context) -> Result<Handle, Error> {
    // Each open call holds one slot for its end, so the others always have `events_max` between them.
    let (outbox, receiver) = inbox::queue(config.calls_max + config.events_max);
    let sole_prefill = Arc::new(SolePrefill::new(core.interrupt()));
    let (shown, shown_receiver) = watch::channel(Shown::of(core.as_ref()));
    let (end, end_receiver) = watch::channel(None);
    let peers = Peers::new(context, outbox.clone(), config.fetch_window);
    let meters = Meters::new(&context.name);
    let feed = Arc::new(Feed::new(config.changes_max));
    let engine_loop = EngineLoop {
        core,
        peers,
        meters,
        calls: std::collections::HashMap::new(),
        prompts: std::collections::HashMap::new(),
        fetches: std::collections::HashMap::new(),
        actions: Vec::new(),
        sole_prefill: Arc::clone(&sole_prefill),
        shown,
        feed: Arc::clone(&feed),
        feeding: false,
        changes: Vec::new(),
        clock: context.clock,
    };
    let runtime = tokio::runtime::Handle::current();
    let nice = config.nice;
    std::thread::Builder::new()
        .name(format!("engine-{}", context.name))
        .spawn(move || {
            // Fetches are started from this thread as tasks of the runtime.
            let _runtime = runtime.enter();
            lower_priority(nice);
            let outcome = engine_loop.run_to_end(receiver);
            end.send_replace(Some(outcome));
        })
        .map_err(|fault| Error::new(Reason::Internal, format!("engine thread: {fault}")))?;
    Ok(Handle {
        outbox,
        calls: Arc::new(Semaphore::new(config.calls_max)),
        calls_max: config.calls_max,
        last_call: Arc::new(AtomicU64::new(0)),
        sole_prefill,
        shown: shown_receiver,
        feed,
        end: end_receiver,
        fetch_window: config.fetch_window,
        context_len: config.context_len,
        vocabulary: config.vocabulary,
        tasks: context.tasks.clone(),
    })
}

/// Sets the calling thread's priority (0 to 19, greater is less urgent). Linux keeps it for each thread.
pub fn lower_priority(nice: i32) {
    if nice == 0 {
        return;
    }
    if let Err(fault) = rustix::process::setpriority_process(None, nice) {
        tracing::warn!(nice, %fault, "thread priority not set");
    }
}

/// What a call needs before it may be opened.
struct Admission {
    guard: Guard,
    open: inbox::Slot,
}

impl Handle {
    /// Compiles the request's grammar, if it has one, so that the engine's thread, and with it all other requests, need
    /// not wait for that: the vocabulary keeps what it compiled last.
    ///
    /// # Errors
    /// INVALID_ARGUMENT when the grammar is not taken; INTERNAL when the compiler panics.
    pub async fn prepare(&self, generation: &Generation) -> Result<(), Error> {
        let (Some(grammar), Some(vocabulary)) = (&generation.sampling.grammar, &self.vocabulary) else {
            return Ok(());
        };
        let (grammar, vocabulary) = (grammar.clone(), Arc::clone(vocabulary));
        let compiled =
            self.tasks.spawn_blocking("grammar", move || vocabulary.compile(&grammar).map(drop)).await?;
        compiled.map_err(|fault| Error::invalid("grammar", fault))
    }

    /// Asks for a prefill.
    ///
    /// # Errors
    /// QUEUE_FULL when a bound is reached, WORKER_LOST when the engine has stopped; the core's refusals come
    /// through the stream.
    pub fn prefill(&self, generation: Generation) -> Result<CallStream<PrefillItem>, Error> {
        let admission = self.admit()?;
        // One item of each kind.
        Ok(open(admission, 2, Call::Prefill, |call| Event::Prefill { call, generation }))
    }

    /// Asks for tokens; see [`Self::prefill`] for errors.
    pub fn decode(
        &self,
        generation: Generation,
        handoff: Option<Handoff>,
    ) -> Result<CallStream<DecodeItem>, Error> {
        let admission = self.admit()?;
        let asked = generation.stop.max_tokens.saturating_sub(generation.generated);
        let fit = self.context_len.saturating_sub(generation.tokens.len());
        let moved = handoff.is_some();
        // The tokens, and the item that says that it was admitted. One that is moved gives that instead of a token.
        let items_max = asked.min(fit) + 1;
        let call = move |sender| Call::Decode(sender, moved);
        Ok(open(admission, items_max, call, |call| Event::Decode { call, generation, handoff }))
    }

    /// Asks for held KV; see [`Self::prefill`] for errors. The stream's reader gives credit as it takes items.
    pub async fn fetch(&self, handoff: Handoff, skip: usize) -> Result<FetchStream, Error> {
        let admission = self.admit()?;
        let window = self.fetch_window;
        let stream = open(admission, window, Call::Fetch, |call| Event::Fetch { call, handoff, skip });
        let mut fetch = FetchStream { stream, outbox: self.outbox.clone(), window, taken: 0 };
        fetch.give_credit(window).await?;
        Ok(fetch)
    }

    /// Extends a lease: its new time to live, or why not.
    pub async fn renew(&self, handoff: Handoff) -> Result<Duration, Error> {
        let (answer, answered) = oneshot::channel();
        let id = self.next_call();
        let event = Event::Renew { call: id, handoff };
        self.outbox
            .send(Message::Open { id, call: Call::Renew(answer), event, trace: TraceContext::default() })
            .await?;
        answered.await.unwrap_or_else(|_| Err(inbox::stopped()))
    }

    /// Ends a hold.
    pub async fn release(&self, handoff: Handoff) -> Result<(), Error> {
        self.outbox.send(Message::Event(Event::Release { handoff })).await
    }

    /// Refuses attempts of the request below this one from now on.
    pub async fn fence(&self, request: RequestId, attempt: Attempt) -> Result<(), Error> {
        self.outbox.send(Message::Event(Event::Fence { request, attempt })).await
    }

    /// Asks for that attempt of the request to be handed over to another decode worker. See [`Event::Move`].
    pub async fn move_away(&self, request: RequestId, attempt: Attempt) -> Result<(), Error> {
        self.outbox.send(Message::Event(Event::Move { request, attempt })).await
    }

    /// Tells the core that a shutdown began.
    pub async fn drain(&self) -> Result<(), Error> {
        self.outbox.send(Message::Event(Event::Drain)).await
    }

    /// Waits until nothing is left to do or to keep, and every call was read to its end; from then on no call is taken.
    /// For a core that was told to drain.
    ///
    /// # Errors
    /// WORKER_LOST when the engine's thread ends first.
    pub async fn finish(&self) -> Result<(), Error> {
        let mut shown = self.shown.clone();
        let all = u32::try_from(self.calls_max).unwrap_or(u32::MAX);
        loop {
            shown.wait_for(|shown| shown.is_idle).await.map_err(|_| inbox::stopped())?;
            // What the core is done with may still be on its way to the peer.
            let every_share = tokio::select! {
                shares = self.calls.acquire_many(all) => shares.map_err(|_| inbox::stopped())?,
                _ = shown.wait_for(|shown| !shown.is_idle) => continue,
            };
            // A call that came and went since may have left something to keep that is not shown yet.
            let (answer, answered) = oneshot::channel();
            self.outbox.send(Message::Idle(answer)).await?;
            if answered.await.map_err(|_| inbox::stopped())? {
                self.calls.close();
                return Ok(());
            }
            drop(every_share);
            tokio::task::yield_now().await;
        }
    }

    /// The core's state in numbers, as of its last step or event.
    pub fn gauges(&self) -> Gauges {
        self.shown.borrow().gauges
    }

    /// What the engine's thread tells when it comes to it: after the step that runs. `None` when it has ended.
    pub async fn dump(&self) -> Option<EngineDump> {
        let (answer, answered) = oneshot::channel();
        self.outbox.send(Message::Dump(answer)).await.ok()?;
        answered.await.ok()
    }

    /// Changes of the prefix cache, for those who watch.
    pub(crate) fn feed(&self) -> Arc<Feed> {
        Arc::clone(&self.feed)
    }

    /// All blocks that the prefix cache has, and the number of the change after. The caller must follow the feed.
    pub(crate) async fn known_blocks(&self) -> Result<(u64, Vec<BlockHash>), Error> {
        let (answer, answered) = oneshot::channel();
        self.outbox.send(Message::Known(answer)).await?;
        answered.await.map_err(|_| inbox::stopped())
    }

    /// What the core shows, to wait on.
    pub fn watch(&self) -> watch::Receiver<Shown> {
        self.shown.clone()
    }

    /// Waits until the engine's thread has ended: well after [`Self::stop`], INTERNAL after a panic.
    pub async fn ended(&self) -> Result<(), Error> {
        let mut end = self.end.clone();
        let outcome = end.wait_for(Option::is_some).await.map(|outcome| outcome.clone());
        match outcome {
            Ok(Some(outcome)) => outcome,
            _ => Err(Error::new(Reason::Internal, "the engine thread vanished")),
        }
    }

    /// Ends the engine's thread, and with it every open call (WORKER_LOST). Returns when it has ended.
    pub async fn stop(&self) -> Result<(), Error> {
        // A thread that has ended already refuses the message; its outcome says how.
        let _ = self.outbox.send(Message::Stop).await;
        self.sole_prefill.stop_step();
        self.ended().await
    }

    fn next_call(&self) -> CallId {
        CallId(self.last_call.fetch_add(2, Ordering::Relaxed) + 2)
    }

    /// Reserves all that a call needs: its share of open calls, a slot to open it, a slot for its end.
    fn admit(&self) -> Result<Admission, Error> {
        let share: Result<OwnedSemaphorePermit, _> = Arc::clone(&self.calls).try_acquire_owned();
        let share = share.map_err(|fault| match fault {
            TryAcquireError::NoPermits => Error::new(Reason::QueueFull, "the most calls are open already"),
            TryAcquireError::Closed => inbox::stopped(),
        })?;
        let (open, end) = (self.outbox.reserve_now()?, self.outbox.reserve_now()?);
        let guard = Guard {
            call: self.next_call(),
            slot: Some(end),
            sole_prefill: Arc::clone(&self.sole_prefill),
            _open: share,
        };
        Ok(Admission { guard, open })
    }
}

/// Tells the core of a new call, and gives the peer's end of it. What the core calls for its sake is part of the trace that
/// this is called in.
fn open<T: Item>(
    admission: Admission,
    items_max: usize,
    call: impl FnOnce(ItemSender<T>) -> Call,
    event: impl FnOnce(CallId) -> Event,
) -> CallStream<T> {
    let id = admission.guard.call;
    let (sender, stream) = CallStream::channel(items_max, admission.guard);
    let trace = TraceContext::current();
    admission.open.send(Message::Open { id, call: call(sender), event: event(id), trace });
    stream
}

/// The peer's end of a fetch. Items flow by credit, so that blocks wait here only up to the window.
pub struct FetchStream {
    stream: CallStream<FetchItem>,
    outbox: Outbox,
    window: usize,
    /// Items taken for which no credit was given yet.
    taken: usize,
}

impl FetchStream {
    /// The next item; see [`CallStream::next`].
    pub async fn next(&mut self) -> Option<Result<FetchItem, Error>> {
        // Half a window at a time: the core never waits, and the queue sees few events.
        if self.taken >= self.window.div_ceil(2) {
            let items = std::mem::take(&mut self.taken);
            if let Err(error) = self.give_credit(items).await {
                return Some(Err(error));
            }
        }
        let item = self.stream.next().await;
        self.taken += usize::from(matches!(item, Some(Ok(_))));
        item
    }

    async fn give_credit(&mut self, items: usize) -> Result<(), Error> {
        match self.stream.call() {
            Some(call) => self.outbox.send(Message::Event(Event::FetchCredit { call, items })).await,
            None => Ok(()),
        }
    }
}
