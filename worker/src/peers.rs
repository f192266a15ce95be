//! Calls that the core starts at the owner of a hand-off: fetch, renew, release.
//!
//! Each is a task that ends when this table lets go of it. What comes back goes through the event queue like
//! everything else. A fetch reads its next message only when there is a place for it in its window, so received
//! blocks cannot pile up in front of a busy engine.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use node::telemetry::{Span, TraceContext};
use node::{Context, Network, TaskGuard, Tasks};
use proto::wire::kv_transfer_client::KvTransferClient;
use proto::{Error, Handoff, HandoffId, Reason, wire};
use tokio::sync::Semaphore;
use tonic::Request;

use crate::core::{CallId, Event, FetchItem};
use crate::fail_points;
use crate::inbox::{Message, Outbox};
use crate::items::{self, peer_error};
use crate::owners::Owners;

/// Longest wait for the answer to a renewal: less than the time between two.
const RENEWAL_MAX: Duration = Duration::from_secs(1);

/// Longest wait for the answer to a release, and tries. The lease's end is what catches the rest.
const RELEASE_MAX: Duration = Duration::from_secs(1);
const RELEASE_TRIES: usize = 2;

/// Most releases on their way. One more is left to the lease's end.
const RELEASES_MAX: usize = 1024;

/// The engine thread's table of outgoing calls. Dropping it ends them, but for the releases.
pub(crate) struct Peers {
    peer: Peer,
    tasks: Tasks,
    fetches: HashMap<CallId, TaskGuard>,
    renewals: HashMap<CallId, TaskGuard>,
    releases: Arc<Semaphore>,
    /// What the fetch of a hand-off belongs to, until what its decode call has led to is carried out.
    traces: HashMap<HandoffId, TraceContext>,
}

/// What a task needs to call and to report.
#[derive(Clone)]
struct Peer {
    network: Network,
    owners: Owners,
    outbox: Outbox,
    /// Items of one fetch that may wait for the engine.
    window: usize,
}

impl Peers {
    pub(crate) fn new(context: &Context, outbox: Outbox, window: usize) -> Self {
        let (network, owners) = (context.network.clone(), Owners::new(context.members.clone()));
        Self {
            peer: Peer { network, owners, outbox, window },
            tasks: context.tasks.clone(),
            fetches: HashMap::new(),
            renewals: HashMap::new(),
            releases: Arc::new(Semaphore::new(RELEASES_MAX)),
            traces: HashMap::new(),
        }
    }

    /// A decode call with that hand-off has come, as part of that trace.
    pub(crate) fn trace(&mut self, handoff: HandoffId, trace: TraceContext) {
        if trace.is_recording() {
            self.traces.insert(handoff, trace);
        }
    }

    /// No fetch will be started any more for the calls that have come.
    pub(crate) fn forget_traces(&mut self) {
        self.traces.clear();
    }

    /// Fetches and renewals that are open.
    pub(crate) fn open(&self) -> (usize, usize) {
        (self.fetches.len(), self.renewals.len())
    }

    /// Opens a fetch at the hand-off's owner.
    pub(crate) fn start_fetch(&mut self, call: CallId, handoff: Handoff, skip: usize, time_left: Duration) {
        let peer = self.peer.clone();
        let trace = self.traces.remove(&handoff.id).unwrap_or_default();
        let task = async move {
            let span = trace.client("decode.kv_fetch");
            let fetched = peer.fetch(call, (handoff, skip), time_left, &span).await;
            if let Err(error) = &fetched {
                span.fail(error);
            }
            // Before the report: what follows from it may be seen before this task goes on.
            drop(span);
            if let Err(error) = fetched {
                peer.report(Event::FetchFailed { call, error }).await;
            }
        };
        self.fetches.insert(call, self.tasks.spawn_call("fetch", task));
    }

    /// Gives up a fetch, and a renewal that belongs to it.
    pub(crate) fn drop_fetch(&mut self, call: CallId) {
        self.fetches.remove(&call);
        self.renewals.remove(&call);
    }

    /// The fetch has reported its end.
    pub(crate) fn fetch_ended(&mut self, call: CallId) {
        self.fetches.remove(&call);
    }

    /// Extends the lease of the hand-off that the fetch belongs to.
    pub(crate) fn renew(&mut self, call: CallId, handoff: Handoff) {
        let peer = self.peer.clone();
        let task = async move {
            let result = peer.renew(handoff).await;
            peer.report(Event::RenewAnswered { call, result }).await;
        };
        self.renewals.insert(call, self.tasks.spawn_call("renew", task));
    }

    /// The renewal has reported its answer.
    pub(crate) fn renewal_ended(&mut self, call: CallId) {
        self.renewals.remove(&call);
    }

    /// Tells the owner that the hold is over, as well as it goes.
    pub(crate) fn release(&self, handoff: Handoff) {
        let Ok(share) = Arc::clone(&self.releases).try_acquire_owned() else {
            tracing::warn!(owner = handoff.owner, "too many releases on their way, one left to its lease");
            return;
        };
        let peer = self.peer.clone();
        let task = async move {
            peer.release(handoff).await;
            drop(share);
        };
        // A dropped handle leaves the task running: it outlives its call, and its time is bounded.
        drop(self.tasks.spawn_contained("release", task));
    }
}

/// What of KV has moved in a fetch.
#[derive(Default)]
pub(crate) struct Counted {
    blocks: usize,
    bytes: usize,
}

impl Counted {
    pub(crate) fn add(&mut self, item: &FetchItem) {
        if let FetchItem::Block(block) = item {
            self.blocks += 1;
            self.bytes += block.slabs.len();
        }
    }

    pub(crate) fn tell(&self, span: &Span) {
        span.count("baton.kv.blocks", self.blocks);
        span.count("baton.kv.bytes", self.bytes);
    }
}

impl Peer {
    /// A client of an owner that is a member of the cluster.
    async fn client(&self, owner: &str) -> Result<KvTransferClient<node::Channel>, Error> {
        self.owners.check(owner).await?;
        Ok(node::limits!(KvTransferClient::new(self.network.connect(owner))))
    }

    /// Tells the core; a core that has ended needs no news.
    async fn report(&self, event: Event) {
        let _ = self.outbox.send(Message::Event(event)).await;
    }

    /// Receives until the last item.
    async fn fetch(
        &self,
        call: CallId,
        (handoff, skip): (Handoff, usize),
        time_left: Duration,
        span: &Span,
    ) -> Result<(), Error> {
        let owner = handoff.owner.clone();
        let lost = |status| peer_error(&owner, status);
        let mut client = self.client(&owner).await?;
        let mut request = Request::new(items::fetch_request(handoff, skip, time_left));
        node::set_time_left(&mut request, time_left);
        span.set("server.address", owner.clone());
        let mut stream = span.scope(client.fetch(request)).await.map_err(lost)?.into_inner();
        let mut counted = Counted::default();
        let window = Arc::new(Semaphore::new(self.window));
        let mut first_block = true;
        loop {
            let place = Arc::clone(&window).acquire_owned().await.expect("the window is never closed");
            let Some(message) = stream.message().await.map_err(lost)? else {
                let message = format!("{owner}: the fetch ended before its last item");
                return Err(Error::new(Reason::Truncated, message));
            };
            let item = items::fetch_item(message)?;
            counted.add(&item);
            let (is_block, is_end) =
                (matches!(item, FetchItem::Block(_)), matches!(item, FetchItem::End { .. }));
            if is_end {
                counted.tell(span);
            }
            self.outbox.send(Message::Fetched { call, item, place }).await?;
            if is_end {
                return Ok(());
            }
            if is_block && std::mem::take(&mut first_block) {
                node::fail_point(fail_points::DECODE_TRANSFERRING).await;
            }
        }
    }

    async fn renew(&self, handoff: Handoff) -> Result<Duration, Error> {
        let owner = handoff.owner.clone();
        let mut request = Request::new(wire::RenewRequest { handoff: Some(handoff.into()) });
        request.set_timeout(RENEWAL_MAX);
        let response = self.client(&owner).await?.renew(request).await;
        let response = response.map_err(|status| match peer_error(&owner, status) {
            // It is this call's own short limit, not the request's deadline.
            Error { reason: Reason::Deadline, message } => Error::new(Reason::WorkerLost, message),
            error => error,
        })?;
        Ok(Duration::from_micros(response.into_inner().ttl_us))
    }

    async fn release(&self, handoff: Handoff) {
        let owner = handoff.owner.clone();
        let mut client = match self.client(&owner).await {
            Ok(client) => client,
            Err(error) => return tracing::warn!(%error, "release not sent"),
        };
        for _ in 0..RELEASE_TRIES {
            let mut request = Request::new(wire::ReleaseRequest { handoff: Some(handoff.clone().into()) });
            request.set_timeout(RELEASE_MAX);
            match client.release(request).await {
                Ok(_) => return,
                Err(status) => {
                    let error = peer_error(&owner, status);
                    tracing::debug!(%error, "release not delivered");
                }
            }
        }
        tracing::warn!(owner, request = %handoff.request, "release not delivered, left to the lease's end");
    }
}
