//! What a worker says of itself.

#![expect(clippy::unwrap_used, reason = "these are tests")]

use bytes::Bytes;
use engine::model::Interrupt;
use engine::{KvCounts, SequenceCounts, TokenCounts};
use node::{Channel, Context, Listener, Services, limits};
use proto::watch::{BlockChange, News, WatchEvent};
use proto::wire::worker_client::WorkerClient;
use proto::wire::worker_server::WorkerServer;
use proto::{
    Attempt, BlockHash, Digest, Error, KvDtype, KvLayout, ModelDescription, Reason, RequestId, Role,
    WorkerDescription, WorkerEpoch, WorkerLoad, wire,
};
use worker::core::{Action, CallId, Core, Event, Gauges, Now, StepSize};
use worker::lives::{Life, Lives};
use worker::shell::{self, ShellConfig};
use worker::worker_service::{Identity, WorkerService};

/// A core that only has numbers; a fence counts as a lease, and as a block of that attempt's name.
#[derive(Default)]
struct Numbers {
    fences: usize,
    blocks: Vec<BlockHash>,
    /// What changed, and how much of it is noted, while somebody asks.
    noted: Option<(Vec<BlockChange>, usize)>,
}

fn name(attempt: u32) -> BlockHash {
    BlockHash([attempt as u8; 16])
}

impl Core for Numbers {
    fn on(&mut self, event: Event, _now: Now, _out: &mut Vec<Action>) {
        if let Event::Fence { attempt, .. } = event {
            self.fences += 1;
            self.blocks.push(name(attempt.0));
            if let Some((noted, _)) = &mut self.noted {
                noted.push(BlockChange::Stored(name(attempt.0)));
            }
        }
    }

    fn follow_blocks(&mut self, bound: Option<usize>) {
        self.noted = bound.map(|bound| (Vec::new(), bound));
    }

    fn take_block_changes(&mut self, out: &mut Vec<BlockChange>) -> bool {
        let Some((noted, bound)) = &mut self.noted else { return true };
        let complete = noted.len() <= *bound;
        out.extend(noted.drain(..).take(*bound));
        complete
    }

    fn known_blocks(&self) -> Vec<BlockHash> {
        self.blocks.clone()
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
        Gauges {
            blocks: KvCounts { total: 10, free: 3, cached: 2, used: 5, held: 4 },
            sequences: SequenceCounts { waiting: 1, running: 2, preempted: 3, reserved: 4, held: 5 },
            tokens: TokenCounts { waiting: 60, running: 70 },
            leases: self.fences,
            ..Gauges::default()
        }
    }

    fn interrupt(&self) -> Interrupt {
        Interrupt::default()
    }

    fn sole_prefill(&self) -> Option<CallId> {
        None
    }
}

fn identity(tokenizer: Bytes) -> Identity {
    Identity {
        epoch: WorkerEpoch(77),
        role: Role::Prefill,
        model: ModelDescription {
            name: "m".into(),
            fingerprint: Digest([1; 32]),
            tokenizer: Digest([2; 32]),
            context_len: 64,
            vocab_size: 256,
            numerics: "n-1".into(),
        },
        layout: KvLayout { layers: 2, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 },
        tokenizer,
    }
}

async fn start(identity: Identity) -> (WorkerClient<Channel>, shell::Handle, Context) {
    let context = Context::new("numbers", Vec::new());
    let config = ShellConfig {
        calls_max: 4,
        events_max: 16,
        changes_max: 8,
        fetch_window: 4,
        nice: 0,
        context_len: 64,
        vocabulary: None,
    };
    let handle = shell::spawn(Box::new(Numbers::default()), config, &context).expect("a thread");
    let lives = Lives::only(Life::new("numbers", identity, handle.clone()));
    let service = WorkerService::new(lives, context.shutdown.clone());
    let services = Services::new().add(limits!(WorkerServer::new(service)));
    node::serve_grpc(&Listener::Local("numbers".into()), services, &context).await.expect("a name");
    (limits!(WorkerClient::new(context.network.connect("local:numbers"))), handle, context)
}

#[tokio::test]
async fn describe_tells_who_and_how_full() {
    let identity = identity(Bytes::new());
    let (mut client, _handle, context) = start(identity.clone()).await;
    let ask = async |client: &mut WorkerClient<Channel>| {
        let answer = client.describe(wire::DescribeRequest {}).await.unwrap();
        WorkerDescription::try_from(answer.into_inner()).unwrap()
    };
    let expected = WorkerDescription {
        protocol: proto::worker::PROTOCOL_VERSION,
        epoch: identity.epoch,
        role: identity.role,
        model: identity.model,
        layout: identity.layout,
        draining: false,
        blocks_total: 10,
        blocks_free: 5,
        sequences: 10,
    };
    assert_eq!(ask(&mut client).await, expected);
    let _busy = context.shutdown.busy();
    context.shutdown.drain();
    assert_eq!(ask(&mut client).await, WorkerDescription { draining: true, ..expected });
}

#[tokio::test]
async fn a_tokenizer_travels_in_chunks() {
    let bundle: Vec<u8> = (0..(2 << 20) + 7).map(|i| (i % 251) as u8).collect();
    let (mut client, ..) = start(identity(bundle.clone().into())).await;
    let request = wire::GetTokenizerRequest { digest: vec![2; 32] };
    let mut stream = client.get_tokenizer(request).await.unwrap().into_inner();
    let mut chunks = Vec::new();
    while let Some(chunk) = stream.message().await.unwrap() {
        chunks.push(chunk.bytes);
    }
    assert_eq!(chunks.iter().map(Bytes::len).collect::<Vec<_>>(), [1 << 20, 1 << 20, 7]);
    assert!(chunks.concat() == bundle);
}

#[tokio::test]
async fn a_tokenizer_of_another_digest_is_not_here() {
    let (mut client, ..) = start(identity(Bytes::from_static(b"bundle"))).await;
    let refused = async |client: &mut WorkerClient<Channel>, digest| {
        Error::from(client.get_tokenizer(wire::GetTokenizerRequest { digest }).await.unwrap_err())
    };
    assert_eq!(refused(&mut client, vec![3; 32]).await.reason, Reason::ModelNotFound);
    assert_eq!(refused(&mut client, vec![2; 31]).await.message, "digest: expected 32 bytes, got 31");
}

#[tokio::test]
async fn a_fence_reaches_the_core() {
    let (mut client, handle, _context) = start(identity(Bytes::new())).await;
    let nameless = client.fence(wire::FenceRequest { request: String::new(), attempt: 1 }).await;
    assert_eq!(Error::from(nameless.unwrap_err()).reason, Reason::InvalidArgument);
    client.fence(wire::FenceRequest { request: "r".into(), attempt: 1 }).await.unwrap();
    let mut shown = handle.watch();
    shown.wait_for(|shown| shown.gauges.leases == 1).await.unwrap();
}

/// The next message of a watch that is no load report, and the load reports before it.
async fn news(stream: &mut tonic::Streaming<wire::WatchEvent>) -> (u64, News) {
    loop {
        let event: WatchEvent = stream.message().await.unwrap().expect("a message").try_into().unwrap();
        assert_eq!(event.epoch, WorkerEpoch(77));
        if !matches!(event.news, News::Load(_)) {
            return (event.sequence, event.news);
        }
    }
}

async fn fence(handle: &shell::Handle, attempts: std::ops::Range<u32>) {
    for attempt in attempts {
        handle.fence(RequestId("r".into()), Attempt(attempt)).await.unwrap();
    }
}

#[tokio::test]
async fn a_watch_tells_which_blocks_there_are_and_what_changes() {
    let (mut client, handle, context) = start(identity(Bytes::new())).await;
    fence(&handle, 1..3).await;
    // What comes in before somebody watches has no number.
    handle.watch().wait_for(|shown| shown.gauges.leases == 2).await.unwrap();
    let request = wire::WatchRequest { blocks: true };
    let mut stream = client.watch(request).await.unwrap().into_inner();
    let known = News::Known { chunk: 0, last: true, blocks: vec![name(1), name(2)] };
    assert_eq!(news(&mut stream).await, (1, known));
    fence(&handle, 3..5).await;
    let mut told = Vec::new();
    while told.len() < 2 {
        let (first, News::Stored(blocks)) = news(&mut stream).await else { panic!("something else came") };
        assert_eq!(first as usize, 1 + told.len());
        told.extend(blocks);
    }
    assert_eq!(told, [name(3), name(4)]);
    // More than are kept while nobody reads: what is there is told anew, and goes on from there.
    fence(&handle, 5..40).await;
    while handle.gauges().leases < 39 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let (next, all) = loop {
        match news(&mut stream).await {
            (next, News::Known { blocks, last: true, .. }) => break (next, blocks),
            (_, News::Stored(_)) => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(all.len(), 39);
    fence(&handle, 40..41).await;
    assert_eq!(news(&mut stream).await, (next, News::Stored(vec![name(40)])));
    drop(context);
}

#[tokio::test]
async fn a_watch_tells_the_load_when_it_changes_and_when_a_drain_begins() {
    let (mut client, _handle, context) = start(identity(Bytes::new())).await;
    let _busy = context.shutdown.busy();
    let request = wire::WatchRequest { blocks: false };
    let mut stream = client.watch(request).await.unwrap().into_inner();
    let mut next = async || {
        let event: WatchEvent = stream.message().await.unwrap().expect("a message").try_into().unwrap();
        let News::Load(load) = event.news else { panic!("blocks were not asked for") };
        (event.sequence, load)
    };
    let load = WorkerLoad {
        waiting: 4,
        running: 6,
        waiting_tokens: 60,
        running_tokens: 70,
        blocks_free: 5,
        blocks_total: 10,
        draining: false,
    };
    assert_eq!(next().await, (1, load));
    assert_eq!(next().await, (2, load), "a heartbeat");
    context.shutdown.drain();
    let mut sequence = 2;
    loop {
        let (number, told) = next().await;
        sequence += 1;
        assert_eq!(number, sequence);
        if told.draining {
            break assert_eq!(told, WorkerLoad { draining: true, ..load });
        }
    }
}

#[tokio::test]
async fn a_watch_does_not_hold_up_the_end() {
    let (mut client, _handle, context) = start(identity(Bytes::new())).await;
    let mut stream = client.watch(wire::WatchRequest { blocks: true }).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    context.shutdown.drain();
    context.shutdown.idle().await;
    while stream.message().await.unwrap().is_some() {}
}
