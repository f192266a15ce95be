//! Calls that a core starts at the owner of a hand-off, against an owner that does as it likes.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use engine::model::Interrupt;
use futures::stream::{self, Stream, StreamExt};
use node::{Context, Member, Services, limits};
use proto::wire::kv_transfer_server::{KvTransfer, KvTransferServer};
use proto::wire::{self, fetch_event};
use proto::{
    Attempt, Digest, Error, Handoff, HandoffId, KvDtype, KvLayout, Reason, RequestId, Role, WorkerEpoch,
};
use tonic::{Request, Response, Status};
use worker::core::{Action, CallId, Core, Event, Gauges, Now, StepSize};
use worker::shell::{self, Handle, ShellConfig};

/// A core that turns fences into what a test wants to start, and keeps what comes back.
struct Starter {
    actions: Vec<Action>,
    told: Arc<Mutex<Vec<Event>>>,
    /// While set, each event of a fetch holds the thread up.
    stalled: Arc<AtomicBool>,
}

impl Core for Starter {
    fn on(&mut self, event: Event, _now: Now, out: &mut Vec<Action>) {
        match event {
            Event::Fence { .. } => out.append(&mut self.actions),
            event => {
                while self.stalled.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                self.told.lock().expect("no test panicked").push(event);
            }
        }
    }

    fn step(&mut self, _clock: &dyn Fn() -> Now, _out: &mut Vec<Action>) -> Option<StepSize> {
        None
    }

    fn has_work(&self) -> bool {
        false
    }

    fn next_wake(&self) -> Option<Now> {
        None
    }

    fn gauges(&self) -> Gauges {
        Gauges::default()
    }

    fn interrupt(&self) -> Interrupt {
        Interrupt::default()
    }

    fn sole_prefill(&self) -> Option<CallId> {
        None
    }
}

type Items = Pin<Box<dyn Stream<Item = Result<wire::FetchEvent, Status>> + Send>>;

/// An owner whose answers a test writes.
struct Owner {
    fetch: Box<dyn Fn() -> Result<Items, Status> + Send + Sync>,
    releases: Arc<AtomicUsize>,
    /// Releases that fail before one succeeds.
    deaf: AtomicUsize,
}

#[tonic::async_trait]
impl KvTransfer for Owner {
    type FetchStream = Items;

    async fn fetch(&self, _request: Request<wire::FetchRequest>) -> Result<Response<Items>, Status> {
        Ok(Response::new((self.fetch)()?))
    }

    async fn renew(
        &self,
        _request: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewResponse>, Status> {
        Ok(Response::new(wire::RenewResponse { ttl_us: 5_000_000 }))
    }

    async fn release(
        &self,
        _request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseResponse>, Status> {
        self.releases.fetch_add(1, Ordering::SeqCst);
        match self.deaf.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) {
            Ok(_) => Err(Status::unavailable("try again")),
            Err(_) => Ok(Response::new(wire::ReleaseResponse {})),
        }
    }
}

struct Fixture {
    handle: Handle,
    told: Arc<Mutex<Vec<Event>>>,
    stalled: Arc<AtomicBool>,
    releases: Arc<AtomicUsize>,
}

const FETCH: CallId = CallId(1);
const WINDOW: usize = 4;
/// Large enough that the encoder puts no two blocks into one frame.
const BLOCK_BYTES: usize = 64 << 10;

async fn start(
    actions: Vec<Action>,
    fetch: impl Fn() -> Result<Items, Status> + Send + Sync + 'static,
) -> Fixture {
    start_among(Vec::new(), actions, fetch).await
}

/// The same in a cluster of these members.
async fn start_among(
    members: Vec<Member>,
    actions: Vec<Action>,
    fetch: impl Fn() -> Result<Items, Status> + Send + Sync + 'static,
) -> Fixture {
    let context = Context::new("starter", members);
    let releases = Arc::new(AtomicUsize::new(0));
    let owner = Owner { fetch: Box::new(fetch), releases: Arc::clone(&releases), deaf: AtomicUsize::new(1) };
    let services = Services::new().add(limits!(KvTransferServer::new(owner)));
    let listener = node::Listener::Local("owner".into());
    let _ = node::serve_grpc(&listener, services, &context.named("owner")).await.expect("a name");
    let (told, stalled) = (Arc::default(), Arc::default());
    let core = Starter { actions, told: Arc::clone(&told), stalled: Arc::clone(&stalled) };
    let config = ShellConfig {
        calls_max: 4,
        events_max: 64,
        changes_max: 8,
        fetch_window: WINDOW,
        nice: 0,
        context_len: 64,
        vocabulary: None,
    };
    let handle = shell::spawn(Box::new(core), config, &context).expect("a thread");
    handle.fence(RequestId("r".into()), Attempt(1)).await.expect("a core");
    Fixture { handle, told, stalled, releases }
}

fn handoff(owner: &str) -> Handoff {
    Handoff {
        owner: owner.into(),
        epoch: WorkerEpoch(1),
        request: RequestId("r".into()),
        attempt: Attempt(1),
        id: HandoffId([1; 16]),
        fingerprint: Digest::default(),
        layout: KvLayout { layers: 1, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 },
        tokens: 3,
    }
}

fn start_fetch(owner: &str) -> Vec<Action> {
    let time_left = Duration::from_secs(20);
    vec![Action::StartFetch { call: FETCH, handoff: handoff(owner), skip: 0, time_left }]
}

fn block(first: u64) -> wire::FetchEvent {
    let block = wire::KvBlock { first, tokens: 1, slabs: vec![0; BLOCK_BYTES].into(), checksums: vec![0] };
    wire::FetchEvent { event: Some(fetch_event::Event::Block(block)) }
}

impl Fixture {
    async fn wait<T>(&self, what: &str, find: impl Fn(&[Event]) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = find(&self.told.lock().expect("no test panicked")) {
                return found;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "core never told: {what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn failure(&self) -> Error {
        self.wait("the fetch failed", |events| {
            events.iter().find_map(|event| match event {
                Event::FetchFailed { call, error } if *call == FETCH => Some(error.clone()),
                _ => None,
            })
        })
        .await
    }
}

#[tokio::test]
async fn a_fetch_that_ends_without_its_last_item_is_truncated() {
    let fixture =
        start(start_fetch("local:owner"), || Ok(stream::iter([Ok(block(0)), Ok(block(1))]).boxed())).await;
    assert_eq!(fixture.failure().await.reason, Reason::Truncated);
    let blocks = fixture.told.lock().unwrap().iter().filter(|e| matches!(e, Event::Fetched { .. })).count();
    assert_eq!(blocks, 2, "what came before is passed on first");
}

#[tokio::test]
async fn an_owner_that_is_not_there_is_lost() {
    let fixture = start(start_fetch("local:nobody"), || Ok(stream::empty().boxed())).await;
    assert_eq!(fixture.failure().await.reason, Reason::WorkerLost);
}

#[tokio::test]
async fn an_owner_that_is_no_member_is_not_called() {
    let called = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&called);
    let fetch = move || {
        noted.store(true, Ordering::SeqCst);
        Ok(stream::empty().boxed())
    };
    let other = Member { role: Role::Prefill, address: "local:other".to_owned() };
    let mut actions = start_fetch("local:owner");
    actions.push(Action::Release { handoff: handoff("local:owner") });
    let fixture = start_among(vec![other], actions, fetch).await;
    let error = fixture.failure().await;
    let expected = "handoff.owner: expected a worker that is a member of the cluster, got \"local:owner\"";
    assert_eq!((error.reason, error.message.as_str()), (Reason::WorkerLost, expected));
    assert!(!called.load(Ordering::SeqCst));
    assert_eq!(fixture.releases.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_transport_that_breaks_is_a_lost_owner() {
    let broken = || Ok(stream::iter([Ok(block(0)), Err(Status::unknown("h2 connection reset"))]).boxed());
    let fixture = start(start_fetch("local:owner"), broken).await;
    assert_eq!(fixture.failure().await.reason, Reason::WorkerLost);
}

#[tokio::test]
async fn the_owners_reason_is_passed_on() {
    let refused = || Err(Error::new(Reason::StaleEpoch, "another life").into());
    let fixture = start(start_fetch("local:owner"), refused).await;
    assert_eq!(fixture.failure().await.reason, Reason::StaleEpoch);
}

#[tokio::test]
async fn a_malformed_item_names_its_field() {
    let malformed = || Ok(stream::iter([Ok(wire::FetchEvent { event: None })]).boxed());
    let fixture = start(start_fetch("local:owner"), malformed).await;
    let error = fixture.failure().await;
    assert_eq!((error.reason, error.message.as_str()), (Reason::InvalidArgument, "fetch.event: is required"));
}

#[tokio::test]
async fn blocks_do_not_pile_up_in_front_of_a_busy_engine() {
    let read = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&read);
    let (open, opened) = tokio::sync::watch::channel(false);
    let blocks = move || {
        let (counted, mut opened) = (Arc::clone(&counted), opened.clone());
        let gate = stream::once(async move {
            opened.wait_for(|open| *open).await.expect("the test holds the sender");
            Ok(block(0))
        });
        let rest = stream::iter(1..100).map(move |first| {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(block(first))
        });
        Ok(gate.chain(rest).boxed())
    };
    let fixture = start(start_fetch("local:owner"), blocks).await;
    fixture.stalled.store(true, Ordering::SeqCst);
    open.send_replace(true);
    tokio::time::sleep(Duration::from_millis(100)).await;
    // The first holds the engine up; the window has the next ones, and the transport at most two more.
    assert!(read.load(Ordering::SeqCst) <= WINDOW + 2, "{read:?} blocks were read");
    fixture.stalled.store(false, Ordering::SeqCst);
    assert_eq!(fixture.failure().await.reason, Reason::Truncated);
    assert_eq!(read.load(Ordering::SeqCst), 99);
}

#[tokio::test]
async fn a_fetch_that_is_given_up_ends_at_the_owner() {
    struct Gone(Arc<AtomicUsize>);
    impl Drop for Gone {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let gone = Arc::new(AtomicUsize::new(0));
    let guard = Arc::clone(&gone);
    let mut actions = start_fetch("local:owner");
    actions.push(Action::Renew { call: FETCH, handoff: handoff("local:owner") });
    let fixture = start(actions, move || {
        let guard = Gone(Arc::clone(&guard));
        let never = stream::once(async move {
            let _guard = guard;
            std::future::pending().await
        });
        Ok(stream::iter([Ok(block(0))]).chain(never).boxed())
    })
    .await;
    fixture
        .wait("the first block", |events| {
            events.iter().find(|event| matches!(event, Event::Fetched { .. })).map(|_| ())
        })
        .await;
    let ttl = fixture
        .wait("the renewal's answer", |events| {
            events.iter().find_map(|event| match event {
                Event::RenewAnswered { call: FETCH, result } => Some(result.clone()),
                _ => None,
            })
        })
        .await;
    assert_eq!(ttl, Ok(Duration::from_secs(5)));
    assert_eq!(gone.load(Ordering::SeqCst), 0);
    // Stopping drops the table of calls, as giving one up does.
    fixture.handle.stop().await.unwrap();
    let start = Instant::now();
    while gone.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < Duration::from_secs(10), "the owner's stream was never dropped");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_release_is_tried_again() {
    let release = vec![Action::Release { handoff: handoff("local:owner") }];
    let fixture = start(release, || Ok(stream::empty().boxed())).await;
    let start = Instant::now();
    while fixture.releases.load(Ordering::SeqCst) < 2 {
        assert!(start.elapsed() < Duration::from_secs(10), "released only once");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
