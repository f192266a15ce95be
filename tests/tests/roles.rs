//! Real processes, and workers that take the other role while streams come and go: no stream fails or has another token than
//! in an undisturbed run, both roles are really used, and nothing is left behind. By a list of members that never changes,
//! and by etcd.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_tests::certificates::{Certificates, MEMBER_NAME};
use baton_tests::client::{Answer, Ask, Client};
use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use baton_tests::etcd::Etcd;
use serde_json::Value;
use tokio::task::JoinSet;

const ROUTER: Name = (Service::Router, 0);
const GATEWAY: Name = (Service::Gateway, 0);
/// The workers, in the order of their start. The last of each role changes.
const WORKERS: [Name; 4] =
    [(Service::Prefill, 0), (Service::Prefill, 1), (Service::Decode, 0), (Service::Decode, 1)];
const PREFILL: Name = WORKERS[1];
const DECODE: Name = WORKERS[3];

/// Streams that run at a time.
const STREAMS: usize = 6;
/// Streams that differ.
const KINDS: usize = 9;
/// Tokens of each, at 5 ms or more.
const TOKENS: usize = 160;

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn settings() -> Settings {
    Settings {
        model: "sim:vocab=4096,context_len=4096,step_us=5000".to_owned(),
        router: words("--placement split --describe-every-seconds 0.2"),
        worker: words("--threads 1 --drain-notice-seconds 0.5 --lease-ttl-seconds 4 --renew-every-seconds 1"),
        ..Settings::default()
    }
}

/// Two workers of each role behind a router and a gateway.
async fn cluster(settings: Settings) -> Cluster {
    let mut cluster = Cluster::new(settings);
    [ROUTER, GATEWAY].into_iter().chain(WORKERS).for_each(|name| cluster.spawn(name));
    cluster.wait_ready().await;
    sees(&cluster, 2, 2).await;
    cluster
}

async fn until(cluster: &Cluster, what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < end, "{what}; logs:\n{}", cluster.logs());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until the router has so many live workers of each role, and no other.
async fn sees(cluster: &Cluster, prefill: usize, decode: usize) {
    let what = format!("{prefill} prefill and {decode} decode workers");
    until(cluster, &what, async || {
        let metrics = cluster.metrics(ROUTER).await;
        let of = |labels: &[&str]| metrics.sum("baton_router_workers", labels) as usize;
        [("prefill", prefill), ("decode", decode)].into_iter().all(|(role, count)| {
            let role = format!("role=\"{role}\"");
            of(&[&role, "state=\"live\""]) == count && of(&[&role]) == count
        })
    })
    .await;
}

fn asks() -> Vec<Ask> {
    let ask = |index: usize| {
        let prompt: Vec<u32> =
            (0..20 + 37 * index as u32).map(|at| (at * 31 + index as u32) % 4000).collect();
        Ask::seeded(&prompt, TOKENS, index as u64)
    };
    (0..KINDS).map(ask).collect()
}

/// Streams that begin as soon as others end, until they are stopped.
struct Load {
    stop: Arc<AtomicBool>,
    ended: Arc<AtomicUsize>,
    /// What differed from what was expected.
    clients: JoinSet<Vec<(usize, Answer)>>,
}

impl Load {
    fn start(port: u16, expected: &[Answer]) -> Self {
        let (stop, ended, mut clients) =
            (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default(), JoinSet::new());
        for stream in 0..STREAMS {
            let (stop, ended, expected) = (Arc::clone(&stop), Arc::clone(&ended), expected.to_vec());
            let (client, asks) = (Client::new(port), asks());
            clients.spawn(async move {
                let mut wrong = Vec::new();
                let mut kind = stream;
                while !stop.load(Ordering::Relaxed) {
                    kind = (kind + 1) % KINDS;
                    let answer = client.ask(&asks[kind]).await;
                    if answer != expected[kind] {
                        wrong.push((kind, answer));
                    }
                    ended.fetch_add(1, Ordering::Relaxed);
                }
                wrong
            });
        }
        Self { stop, ended, clients }
    }

    /// Waits until as many streams as run have ended twice: all that run now began meanwhile.
    async fn goes_round(&self, cluster: &Cluster) {
        let from = self.ended.load(Ordering::Relaxed);
        until(cluster, "streams end", async || self.ended.load(Ordering::Relaxed) >= from + 2 * STREAMS)
            .await;
    }

    /// Lets what runs end, and gives how many there were in all.
    async fn finish(mut self, cluster: &Cluster) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(wrong) = self.clients.join_next().await {
            let wrong = wrong.expect("the client does not panic");
            assert!(wrong.is_empty(), "{wrong:?}; logs:\n{}", cluster.logs());
        }
        self.ended.load(Ordering::Relaxed)
    }
}

/// Runs `baton role`: the code that it ends with, and what it prints.
async fn role(cluster: &Cluster, worker: Name, role: &str, further: &[&str]) -> (Option<i32>, String) {
    let output = cluster.role(worker, role, further).await;
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// Gives a worker the role, and waits until the router has so many of each.
async fn change(cluster: &Cluster, worker: Name, to: &str, (prefill, decode): (usize, usize)) {
    let began = Instant::now();
    let (code, printed) = role(cluster, worker, to, &[]).await;
    let said = format!("{} is a {to} worker, epoch ", cluster.address(worker));
    assert!(code == Some(0) && printed.contains(&said), "{printed}; logs:\n{}", cluster.logs());
    println!("{worker:?} is a {to} worker after {:.1} s", began.elapsed().as_secs_f64());
    sees(cluster, prefill, decode).await;
}

/// Bytes of KV that a worker has sent as a prefill worker, or received as a decode worker.
async fn moved(cluster: &Cluster, worker: Name, role: &str) -> f64 {
    let direction = if role == "prefill" { "direction=\"out\"" } else { "direction=\"in\"" };
    let labels = [direction, &format!("worker=\"{role}\"")];
    cluster.metrics(worker).await.sum("baton_worker_kv_transfer_bytes_total", &labels)
}

/// Waits until a worker works in a role beyond what it did before.
async fn is_used(cluster: &Cluster, worker: Name, role: &str, before: f64) {
    let what = format!("{worker:?} works as a {role} worker");
    until(cluster, &what, async || moved(cluster, worker, role).await > before).await;
}

/// What operators are told of a worker is of the present role.
async fn is_shown(cluster: &Cluster, worker: Name, role: &str, other: &str) {
    let dump = cluster.wait_operators(worker, &format!("/debug/{role}"), 200).await;
    let dump: Value = serde_json::from_str(&dump).expect("JSON");
    assert_eq!(dump["role"], role, "{dump}");
    assert_eq!(cluster.operators(worker, &format!("/debug/{other}")).await.expect("an answer").0, 404);
    cluster.wait_operators(worker, "/health/ready", 200).await;
    let metrics = cluster.metrics(worker).await;
    let blocks = |role: &str| metrics.sum("baton_engine_kv_blocks", &[&format!("worker=\"{role}\"")]);
    assert!(blocks(role) > 0.0 && blocks(other) == 0.0, "{} and {}", blocks(role), blocks(other));
}

/// KV blocks that could be had, of all workers.
async fn blocks_free(cluster: &Cluster) -> Vec<f64> {
    let mut free = Vec::new();
    for worker in WORKERS {
        let metrics = cluster.metrics(worker).await;
        let of = |state: &str| metrics.sum("baton_engine_kv_blocks", &[&format!("state=\"{state}\"")]);
        free.push(of("free") + of("cached"));
    }
    free
}

async fn all_quiet(cluster: &Cluster, free: &[f64]) {
    for worker in WORKERS {
        let what = format!("nothing is left at {worker:?}");
        until(cluster, &what, async || {
            let metrics = cluster.metrics(worker).await;
            let of = |name: &str, labels: &[&str]| metrics.sum(name, labels);
            of("baton_engine_kv_blocks", &["state=\"used\""]) == 0.0
                && of("baton_engine_kv_blocks", &["state=\"held\""]) == 0.0
                && of("baton_worker_leases", &[]) == 0.0
                && of("baton_worker_kv_blocks_orphaned", &[]) == 0.0
        })
        .await;
    }
    assert_eq!(blocks_free(cluster).await, free);
}

async fn roles_change_under_load(settings: Settings) {
    let cluster = cluster(settings).await;
    let free = blocks_free(&cluster).await;
    let mut expected = Vec::new();
    for ask in asks() {
        let answer = Client::new(cluster.grpc_port()).ask(&ask).await;
        assert!(answer.error.is_none() && answer.tokens.len() == TOKENS, "{answer:?}");
        expected.push(answer);
    }
    let load = Load::start(cluster.grpc_port(), &expected);
    load.goes_round(&cluster).await;

    // A prefill worker decodes, and prefills again.
    change(&cluster, PREFILL, "decode", (1, 3)).await;
    is_shown(&cluster, PREFILL, "decode", "prefill").await;
    is_used(&cluster, PREFILL, "decode", 0.0).await;
    load.goes_round(&cluster).await;
    let before = moved(&cluster, PREFILL, "prefill").await;
    change(&cluster, PREFILL, "prefill", (2, 2)).await;
    is_shown(&cluster, PREFILL, "prefill", "decode").await;
    is_used(&cluster, PREFILL, "prefill", before).await;

    // A decode worker prefills, and decodes again.
    let before = moved(&cluster, DECODE, "decode").await;
    change(&cluster, DECODE, "prefill", (3, 1)).await;
    is_shown(&cluster, DECODE, "prefill", "decode").await;
    is_used(&cluster, DECODE, "prefill", 0.0).await;
    load.goes_round(&cluster).await;
    change(&cluster, DECODE, "decode", (2, 2)).await;
    is_used(&cluster, DECODE, "decode", before).await;
    load.goes_round(&cluster).await;

    let streams = load.finish(&cluster).await;
    let router = cluster.metrics(ROUTER).await;
    let moves = router.sum("baton_router_moves_total", &["outcome=\"OK\""]);
    let retries = router.sum("baton_router_retries_total", &[]) as usize;
    println!("{streams} streams, {moves:.0} moved by their KV, {retries} attempts replayed");
    assert!(moves >= 1.0, "what ran where a decode worker left has moved; logs:\n{}", cluster.logs());
    // Each decode worker that left and each prefill worker that did had streams; none of the four was lost sight of.
    assert_eq!(cluster.count_log(ROUTER, "worker left"), 0, "{}", cluster.log(ROUTER));
    assert_eq!(cluster.count_log(ROUTER, "worker has another role"), 4, "{}", cluster.log(ROUTER));
    all_quiet(&cluster, &free).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn roles_change_under_load_by_a_fixed_list() {
    roles_change_under_load(settings()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn roles_change_under_load_by_etcd() {
    let etcd = Etcd::start();
    let discovery = format!("etcd:{}/baton", etcd.url());
    let service = words("--etcd-lease-seconds 2");
    roles_change_under_load(Settings { discovery, service, ..settings() }).await;
}

/// A router that starts when roles have changed already goes by what the workers say, whatever the list says.
#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_comes_later_asks_the_workers_what_they_are() {
    let mut cluster = cluster(settings()).await;
    change(&cluster, PREFILL, "decode", (1, 3)).await;
    let (code, printed) = role(&cluster, PREFILL, "decode", &[]).await;
    let again = format!("{} is a decode worker already, epoch ", cluster.address(PREFILL));
    assert!(code == Some(0) && printed.contains(&again), "{printed}");
    cluster.kill(ROUTER);
    cluster.spawn(ROUTER);
    sees(&cluster, 1, 3).await;
    cluster.wait_ready().await;
    let answers = Client::new(cluster.grpc_port()).ask_all(&asks()).await;
    assert!(answers.iter().all(|answer| answer.error.is_none() && answer.finished), "{answers:?}");
    is_used(&cluster, PREFILL, "decode", 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_told_to_end_while_its_role_changes_ends_well() {
    let mut cluster = cluster(settings()).await;
    // While it drains: its prefill stands before the fetch.
    cluster.arm(PREFILL, "prefill.issued=return(3000)").await;
    cluster.arm(WORKERS[0], "prefill.issued=return(3000)").await;
    let client = Client::new(cluster.grpc_port());
    let running = client.clone().start(asks()[1].clone());
    let more = client.clone().start(asks()[2].clone());
    cluster.wait_log(PREFILL, "fail point reached: prefill.issued").await;
    let changes = role(&cluster, PREFILL, "decode", &[]);
    let told = async {
        cluster.wait_log(PREFILL, "the role is to change, draining").await;
        let (code, printed) = role(&cluster, PREFILL, "decode", &[]).await;
        assert!(code == Some(1) && printed.contains("a change to decode is under way"), "{printed}");
        cluster.wait_operators(PREFILL, "/health/ready", 503).await;
        cluster.signal(PREFILL, "TERM");
    };
    let ((code, printed), ()) = tokio::join!(changes, told);
    assert!(code == Some(1) && printed.contains("the worker shuts down"), "{printed}");
    let status = cluster.wait_exit(PREFILL, PATIENCE);
    assert_eq!(status.code(), Some(0), "logs:\n{}", cluster.logs());
    for answer in [running.await, more.await] {
        let answer = answer.expect("the client does not panic");
        assert!(answer.error.is_none() && answer.finished, "{answer:?}; logs:\n{}", cluster.logs());
    }

    // While it loads the model for its next role.
    cluster.arm(DECODE, "worker.loading=return(60000)").await;
    let changes = role(&cluster, DECODE, "prefill", &[]);
    let told = async {
        cluster.wait_log(DECODE, "fail point reached: worker.loading").await;
        cluster.signal(DECODE, "TERM");
    };
    let ((code, printed), ()) = tokio::join!(changes, told);
    assert!(code == Some(1) && printed.contains("the worker shuts down"), "{printed}");
    let status = cluster.wait_exit(DECODE, Duration::from_secs(20));
    assert_eq!(status.code(), Some(0), "logs:\n{}", cluster.logs());
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_asks_shows_a_certificate_of_the_cluster() {
    let certificates = Certificates::generate();
    let [ca, cert, key] = ["ca.pem", "member.pem", "member.key.pem"]
        .map(|file| certificates.path(file).to_str().expect("a path of text").to_owned());
    let shown = ["--cluster-tls-ca", &ca, "--cluster-tls-cert", &cert, "--cluster-tls-key", &key];
    let shown = [&shown[..], &["--cluster-tls-name", MEMBER_NAME]].concat();
    let service = shown.iter().map(|word| (*word).to_owned()).collect();
    let cluster = cluster(Settings { service, ..settings() }).await;
    let (code, printed) = role(&cluster, DECODE, "prefill", &[]).await;
    assert_eq!(code, Some(1), "{printed}");
    sees(&cluster, 2, 2).await;
    let (code, printed) = role(&cluster, DECODE, "prefill", &shown).await;
    assert!(code == Some(0) && printed.contains("is a prefill worker, epoch "), "{printed}");
    sees(&cluster, 3, 1).await;
    // A router is no worker.
    let (code, printed) = role(&cluster, ROUTER, "prefill", &shown).await;
    assert!(
        code == Some(2) && printed.contains("--worker: expected a worker whose role can be"),
        "{printed}"
    );
}
