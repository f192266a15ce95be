//! Discovery by a real etcd: leases, changes, compaction, outages, and what is not let in.

#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_tests::etcd::Etcd;
use etcd_client::{Client, GetOptions, PutOptions};
use node::{Context, Discovery, Entry, Error, EtcdConfig, Member, Membership, Process, discovery};
use proto::worker::PROTOCOL_VERSION;
use proto::{Capabilities, Digest, KvDtype, KvLayout, ModelDescription, Role, WorkerEpoch};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// Where the members of every test are.
const PREFIX: &str = "test/baton";
/// Longest wait for what is to happen. Much longer than any lease of a second needs.
const PATIENCE: Duration = Duration::from_secs(30);
/// What leases last here, unless a test needs none to end.
const LEASE: Duration = Duration::from_secs(1);

fn capabilities() -> Capabilities {
    let model = ModelDescription {
        name: "m".to_owned(),
        fingerprint: Digest([1; 32]),
        tokenizer: Digest([2; 32]),
        context_len: 100,
        vocab_size: 10,
        numerics: "cpu".to_owned(),
    };
    let layout = KvLayout { layers: 2, kv_heads: 3, head_dim: 4, dtype: KvDtype::F32, block_tokens: 16 };
    Capabilities { protocol: PROTOCOL_VERSION, model, layout }
}

/// What makes a worker one of another kind.
type Change = fn(&mut Capabilities);

fn member(role: Role, port: u16) -> Member {
    Member { role, address: format!("127.0.0.1:{port}") }
}

/// What a worker registers with, in a life of its own.
fn entry(role: Role, port: u16, capabilities: Capabilities) -> Entry {
    let address = format!("127.0.0.1:{port}");
    Entry { role, address, epoch: WorkerEpoch::random(), capabilities: Some(capabilities) }
}

/// One process of a cluster, as far as discovery goes.
struct Node {
    context: Context,
    /// How many members there were, at each change.
    counts: Arc<Mutex<Vec<usize>>>,
}

impl Node {
    async fn at(url: &str, lease: Duration) -> Self {
        Self::with(url, EtcdConfig { lease, ..EtcdConfig::default() }).await
    }

    async fn with(url: &str, config: EtcdConfig) -> Self {
        let mut context = Context::new("node", Vec::new());
        let source = format!("etcd:{url}/{PREFIX}").parse().unwrap();
        let (tasks, shutdown) = (&context.tasks, &context.shutdown);
        let Discovery { members, registry } =
            discovery::start(source, &config, tasks, shutdown).await.unwrap();
        (context.members, context.registry) = (members, registry);
        let (counts, mut members) = (Arc::<Mutex<Vec<usize>>>::default(), context.members.clone());
        let counted = counts.clone();
        drop(context.tasks.spawn("counts", async move {
            while members.changed().await.is_ok() {
                counted.lock().unwrap().push(members.borrow_and_update().len());
            }
        }));
        Self { context, counts }
    }

    /// Becomes a worker.
    fn join(&self, role: Role, port: u16, capabilities: Capabilities) -> Membership {
        self.context.registry.join(entry(role, port, capabilities), &self.context).unwrap()
    }

    /// Whether etcd has said by now who the members are.
    async fn has_heard(&self) -> bool {
        let answered = self.context.registry.answered();
        tokio::time::timeout(Duration::from_millis(50), answered).await.is_ok()
    }

    /// Waits until these are the members, in the order of roles and addresses.
    async fn knows(&self, expected: &[Member]) {
        let mut members = self.context.members.clone();
        let known = tokio::time::timeout(PATIENCE, members.wait_for(|now| **now == *expected)).await;
        let now = self.context.members.borrow().clone();
        known.unwrap_or_else(|_| panic!("expected {expected:?}, known are {now:?}")).unwrap();
    }

    /// The fewest members that there were since this was asked last.
    fn fewest(&self) -> usize {
        let now = self.context.members.borrow().len();
        std::mem::take(&mut *self.counts.lock().unwrap()).into_iter().fold(now, usize::min)
    }

    /// Ends without a word, as one that is killed does.
    fn crash(&self) {
        self.context.shutdown.stop();
    }

    /// Waits for the fault that stops the process.
    async fn failure(self) -> Error {
        let mut process = Process::new(self.context.clone());
        let shutdown = self.context.shutdown.clone();
        process.run("service", async move {
            shutdown.draining().await;
            Ok(())
        });
        tokio::time::timeout(PATIENCE, process.finished(PATIENCE)).await.expect("it stops").unwrap_err()
    }
}

/// Two nodes that know each other and a third one that watches.
async fn three(url: &str, lease: Duration) -> ([Node; 3], [Member; 2]) {
    let nodes = [Node::at(url, lease).await, Node::at(url, lease).await, Node::at(url, lease).await];
    nodes[0].join(Role::Prefill, 9101, capabilities());
    nodes[1].join(Role::Decode, 9201, capabilities());
    let both = [member(Role::Decode, 9201), member(Role::Prefill, 9101)];
    for node in &nodes {
        node.knows(&both).await;
        node.fewest();
    }
    (nodes, both)
}

async fn client(etcd: &Etcd) -> Client {
    Client::connect([etcd.url()], None).await.unwrap()
}

/// The lease under which a member is registered now, if it is.
async fn lease_of(etcd: &Etcd, role: &str, port: u16) -> Option<i64> {
    let key = format!("{PREFIX}/{role}/127.0.0.1:{port}");
    let answer = client(etcd).await.get(key, None).await.ok()?;
    answer.kvs().first().map(etcd_client::KeyValue::lease)
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_come_stay_and_leave() {
    let etcd = Etcd::start();
    // No lease ends within this test by itself.
    let ([prefill, decode, watcher], both) = three(&etcd.url(), Duration::from_mins(10)).await;
    let busy = prefill.context.shutdown.busy();
    prefill.context.shutdown.drain();
    // It is a member as long as it has something that others may come for.
    tokio::time::sleep(LEASE).await;
    watcher.knows(&both).await;
    drop(busy);
    watcher.knows(&both[..1]).await;
    decode.knows(&both[..1]).await;
    tokio::time::timeout(PATIENCE, prefill.context.shutdown.idle()).await.expect("nothing is left to do");
    assert_eq!(lease_of(&etcd, "prefill", 9101).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_kept_alive_and_ends_with_its_member() {
    let etcd = Etcd::start();
    let ([prefill, _decode, watcher], both) = three(&etcd.url(), LEASE).await;
    let lease = lease_of(&etcd, "prefill", 9101).await;
    tokio::time::sleep(LEASE * 4).await;
    assert_eq!((lease_of(&etcd, "prefill", 9101).await, watcher.fewest()), (lease, 2));
    prefill.crash();
    watcher.knows(&both[..1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_registered_says_what_must_fit() {
    let etcd = Etcd::start();
    let (_nodes, _) = three(&etcd.url(), LEASE).await;
    let mut client = client(&etcd).await;
    let answer = client.get(format!("{PREFIX}/"), Some(GetOptions::new().with_prefix())).await.unwrap();
    let text = answer.kvs()[0].value_str().unwrap().to_owned();
    let digest = |digit: u8| format!("{digit:02x}").repeat(32);
    let (fingerprint, tokenizer) = (digest(1), digest(2));
    for part in [
        r#""role":"decode","address":"127.0.0.1:9201","epoch":"#,
        r#""capabilities":{"protocol":1,"model":{"name":"m","#,
        &format!(r#""fingerprint":"{fingerprint}","tokenizer":"{tokenizer}","#),
        r#""numerics":"cpu"},"layout":{"layers":2,"kv_heads":3,"head_dim":4,"dtype":"f32","block_tokens":16}}"#,
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    // What nobody can read is nobody.
    client.put(format!("{PREFIX}/decode/x"), "{", None).await.unwrap();
    let late = Node::at(&etcd.url(), LEASE).await;
    late.knows(&[member(Role::Decode, 9201), member(Role::Prefill, 9101)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_etcd_changes_nothing() {
    let mut etcd = Etcd::start();
    let ([_prefill, _decode, watcher], both) = three(&etcd.url(), LEASE).await;
    etcd.kill();
    etcd.run();
    // Changes are told again on a new stream, and nobody was missed meanwhile.
    let late = Node::at(&etcd.url(), LEASE).await;
    late.join(Role::Prefill, 9102, capabilities());
    let [decode, prefill] = both;
    watcher.knows(&[decode, prefill, member(Role::Prefill, 9102)]).await;
    tokio::time::sleep(LEASE * 5).await;
    assert_eq!(watcher.fewest(), 3, "nobody was ever missed, and the new one stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_without_its_data_drops_only_those_that_do_not_come_back() {
    let mut etcd = Etcd::start();
    let ([prefill, decode, watcher], both) = three(&etcd.url(), LEASE).await;
    etcd.kill();
    tokio::time::sleep(LEASE * 2).await;
    decode.crash();
    tokio::time::sleep(LEASE * 2).await;
    assert_eq!((watcher.fewest(), prefill.fewest()), (2, 2), "an outage ends no member");
    etcd.forget();
    etcd.run();
    watcher.knows(&both[1..]).await;
    assert_eq!(watcher.fewest(), 1, "the one that lives was there all the time");
    assert!(lease_of(&etcd, "prefill", 9101).await.is_some());
    assert!(!prefill.context.shutdown.is_draining(), "nothing of it stops a process");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_lease_and_a_deleted_key_are_replaced() {
    let etcd = Etcd::start();
    let ([prefill, ..], _) = three(&etcd.url(), Duration::from_secs(3)).await;
    let first = lease_of(&etcd, "prefill", 9101).await.unwrap();
    let mut client = client(&etcd).await;
    client.lease_revoke(first).await.unwrap();
    until("another lease takes its place", async || {
        lease_of(&etcd, "prefill", 9101).await.is_some_and(|lease| lease != first)
    })
    .await;
    client.delete(format!("{PREFIX}/prefill/127.0.0.1:9101"), None).await.unwrap();
    until("the key is put again", async || lease_of(&etcd, "prefill", 9101).await.is_some()).await;
    assert!(!prefill.context.shutdown.is_draining());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_takes_another_role_under_its_lease_and_is_never_missed() {
    let mut etcd = Etcd::start();
    let node = Node::at(&etcd.url(), LEASE).await;
    let watcher = Node::at(&etcd.url(), LEASE).await;
    let membership = node.join(Role::Prefill, 9101, capabilities());
    watcher.knows(&[member(Role::Prefill, 9101)]).await;
    let lease = lease_of(&etcd, "prefill", 9101).await.unwrap();
    watcher.fewest();

    membership.change(entry(Role::Decode, 9101, capabilities()));
    watcher.knows(&[member(Role::Decode, 9101)]).await;
    assert_eq!(lease_of(&etcd, "decode", 9101).await, Some(lease));
    assert_eq!(lease_of(&etcd, "prefill", 9101).await, None);
    assert_eq!(watcher.fewest(), 1, "there was one all the time");

    // There and back while nobody answers: only where it ends counts.
    etcd.kill();
    tokio::time::sleep(LEASE / 2).await;
    membership.change(entry(Role::Prefill, 9101, capabilities()));
    tokio::time::sleep(LEASE / 2).await;
    membership.change(entry(Role::Decode, 9101, capabilities()));
    let last = entry(Role::Prefill, 9101, capabilities());
    membership.change(last.clone());
    etcd.run();
    watcher.knows(&[member(Role::Prefill, 9101)]).await;
    assert_eq!(watcher.fewest(), 1, "it was never missed");
    let key = format!("{PREFIX}/prefill/127.0.0.1:9101");
    let answer = client(&etcd).await.get(key, None).await.unwrap();
    let value = answer.kvs()[0].value_str().unwrap().to_owned();
    assert!(value.contains(&format!("\"epoch\":{}", last.epoch.0)), "{value}");
    assert_eq!(lease_of(&etcd, "decode", 9101).await, None);

    // What follows a change follows its drain, too.
    node.context.shutdown.drain();
    watcher.knows(&[]).await;
    assert_eq!(lease_of(&etcd, "prefill", 9101).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_etcd_ends_no_member() {
    let etcd = Etcd::start();
    let ([prefill, _decode, watcher], both) = three(&etcd.url(), LEASE).await;
    etcd.signal("STOP");
    tokio::time::sleep(LEASE * 6).await;
    // It finds all leases past their ends at once.
    etcd.signal("CONT");
    until("the member is registered again", async || lease_of(&etcd, "prefill", 9101).await.is_some()).await;
    tokio::time::sleep(LEASE * 5).await;
    watcher.knows(&both).await;
    assert_eq!((watcher.fewest(), prefill.fewest()), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_starts_without_etcd_and_registers_when_it_comes() {
    let mut etcd = Etcd::stopped();
    let node = Node::at(&etcd.url(), LEASE).await;
    node.join(Role::Decode, 9201, capabilities());
    tokio::time::sleep(LEASE * 2).await;
    assert!(node.context.members.borrow().is_empty() && !node.context.shutdown.is_draining());
    assert!(!node.has_heard().await);
    etcd.run();
    node.knows(&[member(Role::Decode, 9201)]).await;
    assert!(node.has_heard().await);
    // One that leaves while etcd is away is not held up by it.
    etcd.kill();
    node.context.shutdown.drain();
    tokio::time::timeout(PATIENCE, node.context.shutdown.idle()).await.expect("it leaves");
}

/// A way to etcd that can be cut.
struct Link {
    address: String,
    target: String,
    accepting: Option<JoinHandle<()>>,
}

impl Link {
    async fn to(target: String) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = free.local_addr().unwrap().to_string();
        drop(free);
        let mut link = Self { address, target, accepting: None };
        link.mend().await;
        link
    }

    #[expect(clippy::disallowed_methods, reason = "aborted by `cut`")]
    async fn mend(&mut self) {
        let listener = TcpListener::bind(&self.address).await.unwrap();
        let target = self.target.clone();
        self.accepting = Some(tokio::spawn(async move {
            // Dropped with this task, and all its connections with it.
            let mut connections = JoinSet::new();
            while let Ok((mut near, _)) = listener.accept().await {
                let target = target.clone();
                connections.spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(target).await {
                        let _ = copy_bidirectional(&mut near, &mut far).await;
                    }
                });
            }
        }));
    }

    async fn cut(&mut self) {
        let accepting = self.accepting.take().unwrap();
        accepting.abort();
        let _ = accepting.await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_changed_behind_a_cut_is_learnt_even_when_it_was_compacted() {
    let etcd = Etcd::start();
    let mut link = Link::to(etcd.address()).await;
    let watcher = Node::at(&format!("http://{}", link.address), LEASE).await;
    let mut client = client(&etcd).await;
    let put = async |client: &mut Client, port: u16| {
        let address = format!("127.0.0.1:{port}");
        let entry = Entry { role: Role::Router, address, epoch: WorkerEpoch(1), capabilities: None };
        let value = serde_json::to_string(&entry).unwrap();
        let key = format!("{PREFIX}/router/127.0.0.1:{port}");
        client.put(key, value, None::<PutOptions>).await.unwrap()
    };
    put(&mut client, 9001).await;
    watcher.knows(&[member(Role::Router, 9001)]).await;
    for (is_compacted, port) in [(false, 9002), (true, 9003)] {
        link.cut().await;
        let known = watcher.context.members.borrow().to_vec();
        client.delete(format!("{PREFIX}/router/127.0.0.1:{}", port - 1), None).await.unwrap();
        let revision = put(&mut client, port).await.header().unwrap().revision();
        if is_compacted {
            client.compact(revision, None).await.unwrap();
        }
        assert_eq!(watcher.context.members.borrow().to_vec(), known, "nothing is heard across the cut");
        link.mend().await;
        watcher.knows(&[member(Role::Router, port)]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_fit_is_not_let_in_and_told_by_the_field() {
    let etcd = Etcd::start();
    let ([prefill, _decode, watcher], both) = three(&etcd.url(), LEASE).await;
    let cases: [(&str, Change); 7] = [
        ("protocol version: 2 here, 1 there", |with| with.protocol = 2),
        ("checkpoint fingerprint: 0303", |with| with.model.fingerprint = Digest([3; 32])),
        ("tokenizer digest: 0303", |with| with.model.tokenizer = Digest([3; 32])),
        ("layers: 5 here, 2 there", |with| with.layout.layers = 5),
        ("kv_heads: 5 here, 3 there", |with| with.layout.kv_heads = 5),
        ("head_dim: 5 here, 4 there", |with| with.layout.head_dim = 5),
        ("kv_dtype: F16 here, F32 there", |with| with.layout.dtype = KvDtype::F16),
    ];
    for (field, change) in cases {
        let stranger = Node::at(&etcd.url(), LEASE).await;
        let mut with = capabilities();
        change(&mut with);
        stranger.join(Role::Decode, 9202, with);
        let error = stranger.failure().await.to_string();
        assert!(error.starts_with(field), "{error}");
        let named =
            ", where decode 127.0.0.1:9201 serves model m; expected the same, or another --served-name";
        assert!(error.contains(named), "{error}");
    }
    watcher.knows(&both).await;
    assert!(!prefill.context.shutdown.is_draining());
    // Another name is another model, and a member that starts again may have become another.
    let other = Node::at(&etcd.url(), LEASE).await;
    let mut with = capabilities();
    (with.model.name, with.model.fingerprint) = ("n".to_owned(), Digest([3; 32]));
    other.join(Role::Decode, 9202, with.clone());
    watcher.knows(&[member(Role::Decode, 9201), member(Role::Decode, 9202), both[1].clone()]).await;
    other.crash();
    let again = Node::at(&etcd.url(), LEASE).await;
    with.model.fingerprint = Digest([4; 32]);
    again.join(Role::Decode, 9202, with);
    tokio::time::sleep(LEASE * 3).await;
    again.knows(&[member(Role::Decode, 9201), member(Role::Decode, 9202), both[1].clone()]).await;
    assert!(!again.context.shutdown.is_draining());
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_that_do_not_fit_and_come_at_once_one_is_let_in() {
    let etcd = Etcd::start();
    for round in 0..5 {
        let nodes = [Node::at(&etcd.url(), LEASE).await, Node::at(&etcd.url(), LEASE).await];
        for (index, node) in nodes.iter().enumerate() {
            let mut with = capabilities();
            with.model.name = format!("m-{round}");
            with.layout.layers += index;
            node.join(Role::Decode, 9300 + index as u16, with);
        }
        let stopped = async || {
            let stopped = nodes.iter().filter(|node| node.context.shutdown.is_stopped());
            stopped.count()
        };
        until("one of them stops", async || stopped().await == 1).await;
        tokio::time::sleep(LEASE).await;
        assert_eq!(stopped().await, 1, "and the other one goes on");
        nodes.iter().for_each(|node| node.context.shutdown.drain());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_may_speak_tls_and_ask_for_a_certificate() {
    let etcd = Etcd::start_secured();
    let file = |name: &str| Some(etcd.certificates().path(name));
    let config = EtcdConfig {
        lease: LEASE,
        ca: file("ca.pem"),
        cert: file("client.pem"),
        key: file("client.key.pem"),
    };
    let node = Node::with(&etcd.url(), config.clone()).await;
    node.join(Role::Decode, 9201, capabilities());
    node.knows(&[member(Role::Decode, 9201)]).await;
    let stranger = EtcdConfig { cert: file("stranger.pem"), key: file("stranger.key.pem"), ..config.clone() };
    let stranger = Node::with(&etcd.url(), stranger).await;
    tokio::time::sleep(LEASE * 2).await;
    assert!(stranger.context.members.borrow().is_empty());
    let context = Context::new("node", Vec::new());
    let config = EtcdConfig { key: file("stranger.key.pem"), ..config };
    let source = format!("etcd:{}/{PREFIX}", etcd.url()).parse().unwrap();
    let error = discovery::start(source, &config, &context.tasks, &context.shutdown).await.unwrap_err();
    assert!(error.to_string().starts_with("--etcd-tls-key: "), "{error}");
}
