//! What a worker says of itself.

use bytes::Bytes;
use engine::model::Interrupt;
use engine::{KvCounts, SequenceCounts};
use node::{Channel, Context, Listener, Services, limits};
use proto::wire::worker_client::WorkerClient;
use proto::wire::worker_server::WorkerServer;
use proto::{
    Digest, Error, KvDtype, KvLayout, ModelDescription, Reason, Role, WorkerDescription, WorkerEpoch, wire,
};
use worker::core::{Action, CallId, Core, Event, Gauges, Now, StepSize};
use worker::shell::{self, ShellConfig};
use worker::worker_service::{Identity, WorkerService};

/// A core that only has numbers; a fence counts as a lease.
struct Numbers(usize);

impl Core for Numbers {
    fn on(&mut self, event: Event, _now: Now, _out: &mut Vec<Action>) {
        self.0 += usize::from(matches!(event, Event::Fence { .. }));
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
            leases: self.0,
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
        fetch_window: 4,
        nice: 0,
        context_len: 64,
        vocabulary: None,
    };
    let handle = shell::spawn(Box::new(Numbers(0)), config, &context).expect("a thread");
    let service = WorkerService::new(identity, handle.clone(), context.shutdown.clone());
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
