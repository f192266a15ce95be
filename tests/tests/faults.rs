//! Real processes killed in every phase of a request. The client gets the right tokens or an honest error, held
//! blocks return to zero within one lease without new traffic, and the next request is served: by a spare where there
//! is one, by the restarted process where there is none.

use std::time::{Duration, Instant};

use baton_tests::client::{Answer, Ask, Client};
use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use baton_tests::golden;
use tokio::task::JoinHandle;

/// Tokens per answer.
const TOKENS: usize = 24;

/// A lease's time to live: held blocks must be gone by then.
const LEASE: Duration = Duration::from_secs(10);

const GATEWAY: Name = (Service::Gateway, 0);
const ROUTER: Name = (Service::Router, 0);
const PREFILL: Name = (Service::Prefill, 0);
const DECODE: Name = (Service::Decode, 0);

/// Where a request stands when the victim dies.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Queued,
    Prefilling,
    Issued,
    Transferring,
    Decoding,
}

const PHASES: [Phase; 5] =
    [Phase::Queued, Phase::Prefilling, Phase::Issued, Phase::Transferring, Phase::Decoding];

/// Which process stops in the phase, and at which fail point. The victim itself stops there for good where it can; a
/// process that lives on stands still only long enough for the victim to be killed.
fn stop_at(victim: Service, phase: Phase) -> (Name, &'static str) {
    match (victim, phase) {
        (Service::Prefill, Phase::Queued) => (PREFILL, "prefill.queued=return"),
        (Service::Prefill, Phase::Prefilling) => (PREFILL, "prefill.computing=return"),
        (Service::Prefill, Phase::Issued) => (PREFILL, "prefill.issued=return"),
        (Service::Prefill, Phase::Transferring) => (PREFILL, "prefill.transferring=return"),
        (Service::Prefill, Phase::Decoding) => (DECODE, "decode.decoding=return(1500)"),
        (Service::Decode, Phase::Queued) => (DECODE, "decode.queued=return"),
        (Service::Decode, Phase::Prefilling) => (PREFILL, "prefill.computing=return(1500)"),
        (Service::Decode, Phase::Issued) => (PREFILL, "prefill.issued=return(1500)"),
        (Service::Decode, Phase::Transferring) => (DECODE, "decode.transferring=return"),
        (Service::Decode, Phase::Decoding) => (DECODE, "decode.decoding=return"),
        (Service::Router, Phase::Queued) => (ROUTER, "router.queued=return"),
        (Service::Router, Phase::Prefilling) => (ROUTER, "router.prefilling=return"),
        (Service::Router, Phase::Issued) => (ROUTER, "router.issued=return"),
        (Service::Router, Phase::Transferring) => (PREFILL, "prefill.transferring=return(1500)"),
        (Service::Router, Phase::Decoding) => (ROUTER, "router.decoding=return"),
        // The client is the victim: every process lives on.
        (_, Phase::Queued) => (PREFILL, "prefill.queued=return(1500)"),
        (_, Phase::Prefilling) => (PREFILL, "prefill.computing=return(1500)"),
        (_, Phase::Issued) => (PREFILL, "prefill.issued=return(1500)"),
        (_, Phase::Transferring) => (DECODE, "decode.transferring=return(1500)"),
        (_, Phase::Decoding) => (DECODE, "decode.decoding=return(1500)"),
    }
}

/// A prompt of several blocks, so that every phase has something to stop in.
fn ask() -> Ask {
    let cases = golden::cases();
    let longest = cases.iter().max_by_key(|case| case.prompt_ids.len()).expect("there are cases");
    Ask::seeded(&longest.prompt_ids, TOKENS, 7)
}

/// Asks another prompt each time, so that no prefix cache spares a phase its work.
fn fresh(round: u32) -> Ask {
    let mut ask = ask();
    ask.prompt.insert(0, 1000 + round);
    ask
}

/// A cluster of one gateway and, of each other service, one or (with a spare) two, ready.
async fn cluster(spare_of: Option<Service>) -> Cluster {
    let router = ["--placement", "split"].map(str::to_owned).to_vec();
    let worker = ["--step-tokens", "32", "--threads", "1"].map(str::to_owned).to_vec();
    let mut cluster = Cluster::new(Settings { router, worker, ..Settings::default() });
    for service in [Service::Prefill, Service::Decode, Service::Router] {
        cluster.spawn((service, 0));
        if spare_of == Some(service) {
            cluster.spawn((service, 1));
        }
    }
    cluster.spawn(GATEWAY);
    cluster.wait_ready().await;
    cluster
}

/// What every prompt of this test must give, from one undisturbed process.
async fn expected(rounds: u32) -> Vec<Answer> {
    let serve = ["--placement", "fused"].map(str::to_owned).to_vec();
    let mut cluster = Cluster::new(Settings { serve, ..Settings::default() });
    cluster.spawn((Service::Serve, 0));
    cluster.wait_ready().await;
    let asks: Vec<_> = (0..rounds).map(fresh).collect();
    let answers = Client::new(cluster.grpc_port()).ask_all(&asks).await;
    assert!(answers.iter().all(|answer| answer.finished && answer.error.is_none()), "{answers:?}");
    answers
}

/// True once the process printed that a task stands at the armed fail point.
fn reached(cluster: &Cluster, (name, point): (Name, &str)) -> bool {
    let point = point.split('=').next().unwrap_or_default();
    cluster.log(name).contains(&format!("fail point reached: {point}"))
}

/// Sends requests until one stops at the fail point: with a spare, every other one passes it by. The stopped
/// request's answer comes from the task that is returned.
async fn stop_one(cluster: &Cluster, ask: &Ask, stop: (Name, &'static str)) -> JoinHandle<Answer> {
    let until = Instant::now() + PATIENCE;
    loop {
        let client = Client::new(cluster.grpc_port());
        let running = client.start(ask.clone());
        while !running.is_finished() {
            if reached(cluster, stop) {
                return running;
            }
            assert!(Instant::now() < until, "a request reaches {stop:?}; logs:\n{}", cluster.logs());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let passed = running.await.expect("the client does not panic");
        assert_eq!(passed.error, None, "a request that passes {stop:?} is served; logs:\n{}", cluster.logs());
    }
}

/// What is zero of a worker that has nothing to do.
const QUIET: [(&str, &str); 5] = [
    ("baton_engine_kv_blocks", "state=\"held\""),
    ("baton_engine_kv_blocks", "state=\"used\""),
    ("baton_worker_leases", ""),
    ("baton_engine_sequences", "state=\"running\""),
    ("baton_engine_sequences", "state=\"waiting\""),
];

/// Waits until each worker reports all of it: one that has just been started loads its model first.
async fn all_report(cluster: &Cluster) {
    let until = Instant::now() + PATIENCE;
    for name in cluster.workers() {
        for (series, label) in QUIET {
            while !cluster.metrics(name).await.has(series, &[label]) {
                assert!(
                    Instant::now() < until,
                    "{name:?} reports {series}{{{label}}}; logs:\n{}",
                    cluster.logs()
                );
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Waits until no worker holds a block, has a lease, or runs a sequence.
async fn all_quiet(cluster: &Cluster, what: &str) -> Duration {
    all_report(cluster).await;
    let start = Instant::now();
    loop {
        let mut busy = Vec::new();
        for name in cluster.workers() {
            let metrics = cluster.metrics(name).await;
            for (series, label) in QUIET {
                if metrics.sum(series, &[label]) != 0.0 {
                    busy.push(format!("{name:?} {series}{{{label}}}"));
                }
            }
            assert_eq!(metrics.sum("baton_worker_kv_blocks_orphaned", &[]), 0.0, "{name:?} has orphans");
        }
        if busy.is_empty() {
            return start.elapsed();
        }
        // Scraping is not exact to the millisecond: two seconds on top of the lease.
        assert!(
            start.elapsed() < LEASE + Duration::from_secs(2),
            "{what}: still busy after a lease: {busy:?}; logs:\n{}",
            cluster.logs()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Kills the victim in every phase, and checks what the client, the survivors and the next request see.
async fn kill_in_every_phase(victim: Service, spare: bool) {
    let rounds = 2 * PHASES.len() as u32;
    let expected = expected(rounds).await;
    let mut cluster = cluster(spare.then_some(victim)).await;
    for (round, phase) in (0..).step_by(2).zip(PHASES) {
        let what = format!("{victim:?} killed while {phase:?}, {}", if spare { "spare" } else { "no spare" });
        let stop = stop_at(victim, phase);
        cluster.arm(stop.0, stop.1).await;
        let running = stop_one(&cluster, &fresh(round), stop).await;
        cluster.kill((victim, 0));
        let killed = Instant::now();
        if !spare {
            cluster.spawn((victim, 0));
        }
        let answer = running.await.expect("the client does not panic");
        let continued = killed.elapsed();
        if answer.error.is_none() {
            assert_eq!(answer.tokens, expected[round as usize].tokens, "{what}: tokens");
            assert_eq!(answer.text, expected[round as usize].text, "{what}: text");
        } else {
            let until_then = &expected[round as usize].tokens[..answer.tokens.len()];
            assert_eq!(answer.tokens, until_then, "{what}: tokens before the error {:?}", answer.error);
        }
        let quiet = all_quiet(&cluster, &what).await;
        let next = Client::new(cluster.grpc_port()).ask(&fresh(round + 1)).await;
        assert_eq!(next.error, None, "{what}: the next request; logs:\n{}", cluster.logs());
        assert_eq!(next.tokens, expected[round as usize + 1].tokens, "{what}: the next request");
        println!(
            "{what}: {:?} after {continued:.1?}, quiet after {quiet:.1?}",
            answer.error.as_deref().unwrap_or("right")
        );
        if spare {
            cluster.spawn((victim, 0));
        }
        if stop.0 != (victim, 0) {
            cluster.arm(stop.0, &off(stop.1)).await;
        }
        cluster.wait_ready().await;
    }
}

/// The line that lets a fail point pass again.
fn off(point: &str) -> String {
    format!("{}=off", point.split('=').next().unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_worker_dies_and_a_spare_goes_on() {
    kill_in_every_phase(Service::Decode, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_worker_dies_and_comes_back() {
    kill_in_every_phase(Service::Decode, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_worker_dies_and_a_spare_goes_on() {
    kill_in_every_phase(Service::Prefill, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_worker_dies_and_comes_back() {
    kill_in_every_phase(Service::Prefill, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn router_dies_and_a_spare_goes_on() {
    kill_in_every_phase(Service::Router, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn router_dies_and_comes_back() {
    kill_in_every_phase(Service::Router, false).await;
}

/// A client process that dies with its socket, as `kill -9` of curl does.
#[tokio::test(flavor = "multi_thread")]
async fn client_dies() {
    let expected = expected(2 * PHASES.len() as u32).await;
    let cluster = cluster(None).await;
    for (round, phase) in (0..).step_by(2).zip(PHASES) {
        let what = format!("client killed while {phase:?}");
        let stop = stop_at(Service::Gateway, phase);
        cluster.arm(stop.0, stop.1).await;
        let url = format!("http://127.0.0.1:{}/generate", cluster.http_port());
        let prompt = fresh(round).prompt;
        let body =
            serde_json::json!({ "prompt": prompt, "max_tokens": 400, "stream": true, "ignore_eos": true });
        let mut curl = std::process::Command::new("python3")
            .args(["-c", CLIENT, &url, &body.to_string()])
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("python3 starts");
        let until = Instant::now() + PATIENCE;
        while !reached(&cluster, stop) {
            assert!(Instant::now() < until, "{what}: reaches {stop:?}; logs:\n{}", cluster.logs());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        curl.kill().expect("the client runs");
        curl.wait().expect("the client ends");
        let quiet = all_quiet(&cluster, &what).await;
        cluster.arm(stop.0, &off(stop.1)).await;
        let next = Client::new(cluster.grpc_port()).ask(&fresh(round + 1)).await;
        assert_eq!(next.error, None, "{what}: the next request; logs:\n{}", cluster.logs());
        assert_eq!(next.tokens, expected[round as usize + 1].tokens, "{what}: the next request");
        println!("{what}: quiet after {quiet:.1?}");
    }
}

/// The decode call of a request that ends at its first token may never arrive, so its drop releases nothing. Holds are
/// gone at once all the same, long before a lease would end them.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_one_token_leaves_nothing_behind() {
    let cluster = cluster(None).await;
    let asks: Vec<_> = (0..12).map(|round| Ask { max_tokens: 1, ..fresh(round) }).collect();
    for answer in Client::new(cluster.grpc_port()).ask_all(&asks).await {
        assert_eq!((answer.error, answer.tokens.len()), (None, 1));
    }
    let quiet = all_quiet(&cluster, "after requests of one token").await;
    assert!(quiet < LEASE / 2, "holds ended by lease: quiet after {quiet:.1?}");
}

/// Posts a body and reads the stream until killed.
const CLIENT: &str = "import sys, urllib.request as u; \
    r = u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode())); \
    [None for _ in iter(lambda: r.read(1), b'')]";
