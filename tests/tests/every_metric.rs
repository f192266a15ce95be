//! Every metric that a process explains moves, and `docs/metrics.md` lists each with its kind: over real processes, with
//! what makes each of them move, failures included.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_tests::client::{Ask, Client};
use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use baton_tests::collector::Collector;
use tokio::task::JoinSet;

const GATEWAY: Name = (Service::Gateway, 0);
const ROUTER: Name = (Service::Router, 0);
const PREFILL: Name = (Service::Prefill, 0);
const DECODE: Name = (Service::Decode, 0);
/// Dies.
const SPARE: Name = (Service::Decode, 1);
/// Of another shape than its pool.
const STRANGER: Name = (Service::Decode, 2);

const MODEL: &str = "sim:vocab=300,context_len=256,step_us=1000";
/// The same at a pace that leaves time to do something to it.
const SLOW: &str = "sim:vocab=300,context_len=256,step_us=20000";

/// What never changes, by what it means.
const CONSTANT: [&str; 3] =
    ["baton_build_info", "process_start_time_seconds", "baton_worker_kv_blocks_orphaned"];

/// What the processes have shown so far.
#[derive(Debug, Default)]
struct Seen {
    /// The kind of each metric that was explained.
    kinds: BTreeMap<String, String>,
    /// Processes that were looked at.
    ports: BTreeSet<u16>,
    /// The least and the greatest value of each series, by process.
    series: BTreeMap<(u16, String), (f64, f64)>,
}

impl Seen {
    /// Takes in a page of the process with that metrics port.
    fn take(&mut self, port: u16, page: &str) {
        let is_first = self.ports.insert(port);
        let (mut explained, mut kinds) = (BTreeSet::new(), BTreeMap::new());
        for line in page.lines() {
            let mut words = line.split_whitespace();
            match (words.next(), words.next(), words.next()) {
                (Some("#"), Some("HELP"), Some(name)) => {
                    assert!(words.next().is_some(), "{name} is explained");
                    explained.insert(name.to_owned());
                }
                (Some("#"), Some("TYPE"), Some(name)) => {
                    kinds.insert(name.to_owned(), words.next().unwrap_or_default().to_owned());
                }
                (Some(_), ..) if !line.starts_with('#') => {
                    let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("a value: {line}"));
                    let value: f64 = value.parse().unwrap_or_else(|_| panic!("a number: {line}"));
                    // What comes into being later has been nothing before.
                    let before = if is_first { value } else { 0.0 };
                    let (least, most) =
                        self.series.entry((port, series.to_owned())).or_insert((before, before));
                    (*least, *most) = (least.min(value), most.max(value));
                }
                _ => {}
            }
        }
        let unexplained: Vec<_> = kinds.keys().filter(|name| !explained.contains(*name)).collect();
        assert!(unexplained.is_empty(), "{unexplained:?} have no explanation");
        self.kinds.extend(kinds);
    }

    /// The metric that a series is of.
    fn metric<'a>(&'a self, series: &'a str) -> &'a str {
        let name = series.split_once('{').map_or(series, |(name, _)| name);
        let base = ["_bucket", "_sum", "_count"].into_iter().find_map(|end| name.strip_suffix(end));
        base.filter(|base| self.kinds.contains_key(*base)).unwrap_or(name)
    }

    /// The metrics of which no series has had two values.
    fn still(&self) -> BTreeSet<&str> {
        let moved: BTreeSet<&str> = self
            .series
            .iter()
            .filter(|(_, (least, most))| least < most)
            .map(|((_, series), _)| self.metric(series))
            .collect();
        self.kinds.keys().map(String::as_str).filter(|name| !moved.contains(name)).collect()
    }
}

/// Looks at every process, again and again, until dropped.
struct Watch {
    seen: Arc<Mutex<Seen>>,
    _task: JoinSet<()>,
}

impl Watch {
    fn start(ports: Vec<u16>) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (shared, http) = (seen.clone(), reqwest::Client::new());
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                for &port in &ports {
                    let url = format!("http://127.0.0.1:{port}/metrics");
                    // A process that was killed does not answer.
                    let Ok(page) = http.get(url).send().await else { continue };
                    let Ok(page) = page.text().await else { continue };
                    shared.lock().unwrap_or_else(PoisonError::into_inner).take(port, &page);
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { seen, _task: task }
    }

    fn with<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The table of the page: kinds by name.
fn documented() -> BTreeMap<String, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let page = std::fs::read_to_string(path).expect("the page is there");
    let (table, _) = page.split_once("\n## ").expect("sections follow the table");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| {
        let (name, rest) = row.split_once('`').expect("a name between backticks");
        let kind = rest.split('|').nth(1).expect("a kind").trim();
        (name.to_owned(), kind.to_owned())
    })
    .collect()
}

/// A prompt that no cache knows.
fn prompt(round: u32, tokens: u32) -> Vec<u32> {
    let (start, stride) = (round * 7, 3 + round / 290);
    (0..tokens).map(|token| (start + token * stride) % 290).collect()
}

/// Asks until a series of a process is above zero.
async fn until(
    cluster: &Cluster,
    name: Name,
    metric: &str,
    labels: &[&str],
    mut cause: impl AsyncFnMut(u32),
) {
    let end = Instant::now() + PATIENCE;
    for round in 0.. {
        if cluster.metrics(name).await.sum(metric, labels) > 0.0 {
            return;
        }
        assert!(Instant::now() < end, "{metric}{labels:?} of {name:?} moves; logs:\n{}", cluster.logs());
        cause(round).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Kills the spare once a request stands in the middle of what it computes.
async fn kill_one(cluster: &mut Cluster) {
    cluster.arm(SPARE, "decode.decoding=return").await;
    let client = Client::new(cluster.grpc_port());
    let end = Instant::now() + PATIENCE;
    for round in 500.. {
        let running = client.clone().start(Ask::greedy(&prompt(round, 40), 12));
        while !running.is_finished() {
            assert!(Instant::now() < end, "a request stops; logs:\n{}", cluster.logs());
            if cluster.log(SPARE).contains("fail point reached: decode.decoding") {
                cluster.kill(SPARE);
                let answer = running.await.expect("the client does not panic");
                assert_eq!((answer.error, answer.tokens.len()), (None, 12));
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Drains the spare, started anew, while it has streams, until one of them has moved.
async fn move_one(cluster: &mut Cluster, worker: &[&str]) {
    let client = Client::new(cluster.grpc_port());
    let end = Instant::now() + PATIENCE;
    for round in 0.. {
        cluster.spawn_with(SPARE, worker);
        until(cluster, SPARE, "baton_engine_sequences", &["state=\"running\""], async |turn| {
            // One for each decode worker: together they fit into either.
            for ask in 0..2 {
                let prompt = prompt(1000 + round * 100 + turn * 2 + ask, 30);
                drop(client.clone().start(Ask::greedy(&prompt, 150)));
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        })
        .await;
        cluster.signal(SPARE, "TERM");
        cluster.wait_exit(SPARE, PATIENCE);
        if cluster.metrics(ROUTER).await.sum("baton_router_moves_total", &["outcome=\"OK\""]) > 0.0 {
            return;
        }
        assert!(Instant::now() < end, "a sequence moves; logs:\n{}", cluster.logs());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_moves_and_is_documented() {
    let collector = Collector::start();
    let gone = Collector::start().endpoint();
    let mut cluster = Cluster::new(Settings::default());
    let worker = ["--model", MODEL, "--served-name", "m", "--step-tokens", "32"];
    // A drain is heard of while a short answer runs.
    let router = [
        &["--placement", "split", "--describe-every-seconds", "0.05", "--otlp-endpoint", &gone][..],
        // Memory for a hundred blocks, so that some are forgotten.
        &["--policy", "prefix", "--prefix-index-memory", "42KiB"],
    ]
    .concat();
    cluster.spawn_with(PREFILL, &worker);
    // Little room, so that long answers take blocks from each other.
    for name in [DECODE, SPARE] {
        cluster.spawn_with(name, &[&worker[..], &["--kv-blocks", "24"]].concat());
    }
    cluster.spawn_with(ROUTER, &router);
    let gateway = ["--requests-max", "8", "--queue-max", "1", "--otlp-endpoint", &collector.endpoint()];
    cluster.spawn_with(GATEWAY, &gateway);
    let names = [GATEWAY, ROUTER, PREFILL, DECODE, SPARE];
    let watch = Watch::start(names.iter().map(|name| cluster.metrics_port(*name)).collect());
    cluster.wait_ready().await;
    let client = Client::new(cluster.grpc_port());

    // A prompt, and the same again: what is computed, moved and found.
    for _ in 0..3 {
        let answer = client.ask(&Ask::greedy(&prompt(0, 100), 8)).await;
        assert_eq!((answer.error, answer.tokens.len()), (None, 8));
    }
    // More at once than may run and wait: some are refused; and those that run take blocks from each other.
    until(&cluster, DECODE, "baton_engine_preemptions_total", &[], async |round| {
        let asks: Vec<_> = (0..12).map(|ask| Ask::greedy(&prompt(round * 12 + ask, 60), 90)).collect();
        client.ask_all(&asks).await;
    })
    .await;
    until(&cluster, GATEWAY, "baton_gateway_requests_total", &["status=\"429\""], async |round| {
        let asks: Vec<_> = (0..24).map(|ask| Ask::greedy(&prompt(round * 24 + ask, 30), 30)).collect();
        client.ask_all(&asks).await;
    })
    .await;
    // A client that goes away.
    until(&cluster, GATEWAY, "baton_gateway_requests_total", &["status=\"499\""], async |round| {
        let running = client.clone().start(Ask::greedy(&prompt(round, 40), 200));
        tokio::time::sleep(Duration::from_millis(100)).await;
        running.abort();
        let _ = running.await;
    })
    .await;
    // A worker that dies in the middle.
    kill_one(&mut cluster).await;
    // A hand-off that fails: its owner dies while it sends.
    // There are four of them, so it is spared.
    cluster.arm(PREFILL, "prefill.transferring=return").await;
    let start = |round| client.clone().start(Ask::greedy(&prompt(round, 60), 4));
    let running: Vec<_> = (901..905).map(start).collect();
    cluster.wait_log_times(PREFILL, "fail point reached: prefill.transferring", 4).await;
    cluster.kill(PREFILL);
    until(&cluster, ROUTER, "baton_router_workers_spared", &[], async |_| {}).await;
    cluster.spawn_with(PREFILL, &worker);
    for running in running {
        running.await.expect("the client does not panic");
    }
    until(&cluster, DECODE, "baton_worker_kv_transfer_failures_total", &[], async |_| {}).await;
    cluster.wait_ready().await;
    // A deadline that is too near for what waits.
    until(&cluster, ROUTER, "baton_router_rejections_total", &[], async |round| {
        let prompts = (0..6).map(|ask| prompt(2000 + round * 6 + ask, 200));
        let running: Vec<_> = prompts.map(|prompt| client.clone().start(Ask::greedy(&prompt, 2))).collect();
        tokio::time::sleep(Duration::from_millis(5)).await;
        let hurried =
            Ask { timeout: Some(Duration::from_millis(20)), ..Ask::greedy(&prompt(5000 + round, 100), 2) };
        client.ask(&hurried).await;
        for running in running {
            running.await.expect("the client does not panic");
        }
    })
    .await;
    // A router that misses what a worker says.
    cluster.arm(ROUTER, "router.watch.stored=1*return->off").await;
    until(&cluster, ROUTER, "baton_router_resyncs_total", &[], async |round| {
        client.ask(&Ask::greedy(&prompt(6000 + round, 60), 2)).await;
    })
    .await;
    // A worker of another shape.
    cluster.spawn_with(STRANGER, &["--model", "sim:vocab=301,context_len=256", "--served-name", "m"]);
    until(&cluster, ROUTER, "baton_router_workers_refused_total", &[], async |_| {}).await;
    // A router that dies while a stream runs, which another life of it takes up.
    let running = client.clone().start(Ask::greedy(&prompt(950, 40), 200));
    until(&cluster, GATEWAY, "baton_gateway_requests", &["state=\"running\""], async |_| {}).await;
    cluster.kill(ROUTER);
    cluster.spawn_with(ROUTER, &router);
    let answer = running.await.expect("the client does not panic");
    assert_eq!((answer.error, answer.tokens.len()), (None, 200), "logs:\n{}", cluster.logs());

    let slow = ["--model", SLOW, "--served-name", "m", "--step-tokens", "32", "--kv-blocks", "24"];
    move_one(&mut cluster, &slow).await;

    let end = Instant::now() + PATIENCE;
    let expected: BTreeSet<&str> = CONSTANT.into();
    loop {
        let still =
            watch.with(|seen| seen.still().into_iter().map(ToOwned::to_owned).collect::<BTreeSet<_>>());
        let missing: Vec<_> = still.iter().filter(|name| !expected.contains(name.as_str())).collect();
        if missing.is_empty() {
            break;
        }
        assert!(Instant::now() < end, "{missing:?} never moved; logs:\n{}", cluster.logs());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    watch.with(|seen| {
        assert_eq!(seen.kinds, documented(), "docs/metrics.md lists what is served");
        let orphaned = |series: &str| series.starts_with("baton_worker_kv_blocks_orphaned");
        let orphans = seen.series.iter().find(|((_, series), (_, most))| orphaned(series) && *most > 0.0);
        assert!(orphans.is_none(), "{orphans:?}");
        println!("{} metrics moved, {} are constant", seen.kinds.len() - CONSTANT.len(), CONSTANT.len());
    });
}
