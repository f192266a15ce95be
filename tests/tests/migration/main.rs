//! Real processes, and a decode worker that is told to stop while it has streams of every kind: they go on at the other
//! one, by their KV, and no client can tell.
//!
//! What one process gives that nobody disturbs is the measure: text, tokens, log-probabilities, ends and usage are the
//! same, whatever the sampling and whatever bounds the output. The metrics tell that KV moved and nothing was computed
//! twice, and the process ends by itself, well, with nothing left behind.

mod streams;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use baton_tests::metrics::Metrics;

use streams::{Answer, Ask, Running};

const ROUTER: Name = (Service::Router, 0);
const PREFILL: Name = (Service::Prefill, 0);
const GATEWAY: Name = (Service::Gateway, 0);
/// The one that is told to stop.
const LEAVES: Name = (Service::Decode, 0);
const STAYS: Name = (Service::Decode, 1);

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// A cluster of that many prefill and decode workers, ready.
async fn cluster(prefills: usize, decodes: usize) -> Cluster {
    let router = words("--placement split --describe-every-seconds 0.2");
    let worker = words("--step-tokens 64 --threads 1");
    let mut cluster = Cluster::new(Settings { router, worker, ..Settings::default() });
    cluster.spawn(ROUTER);
    for (service, count) in [(Service::Prefill, prefills), (Service::Decode, decodes)] {
        (0..count).for_each(|index| cluster.spawn((service, index)));
    }
    cluster.spawn(GATEWAY);
    cluster.wait_ready().await;
    all_live(&cluster, "decode", decodes).await;
    cluster
}

/// Waits until the router counts that many workers of the role among those that take requests.
async fn all_live(cluster: &Cluster, role: &str, count: usize) {
    let until = Instant::now() + PATIENCE;
    let labels = [&*format!("role=\"{role}\""), "state=\"live\""].map(str::to_owned);
    loop {
        let metrics = cluster.metrics(ROUTER).await;
        if metrics.sum("baton_router_workers", &[&labels[0], &labels[1]]) as usize == count {
            return;
        }
        assert!(Instant::now() < until, "{count} {role} workers are live; logs:\n{}", cluster.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What the streams give where nobody disturbs them.
async fn undisturbed(asks: &[Ask]) -> Vec<Answer> {
    let serve = words("--placement fused");
    let mut cluster = Cluster::new(Settings { serve, ..Settings::default() });
    cluster.spawn((Service::Serve, 0));
    cluster.wait_ready().await;
    let running: Vec<_> = asks.iter().map(|ask| Running::start(cluster.http_port(), ask)).collect();
    let mut answers = Vec::new();
    for running in running {
        answers.push(running.answer().await);
    }
    answers
}

/// What is zero of a worker that has nothing to do.
const QUIET: [(&str, &str); 4] = [
    ("baton_engine_kv_blocks", "state=\"held\""),
    ("baton_engine_kv_blocks", "state=\"used\""),
    ("baton_worker_leases", ""),
    ("baton_worker_kv_blocks_orphaned", ""),
];

async fn all_quiet(cluster: &Cluster, names: &[Name]) {
    let until = Instant::now() + PATIENCE;
    for name in names {
        for (series, label) in QUIET {
            while cluster.metrics(*name).await.sum(series, &[label]) != 0.0 {
                assert!(
                    Instant::now() < until,
                    "{name:?} has none of {series}{{{label}}}; logs:\n{}",
                    cluster.logs()
                );
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// The last that a process says of itself before it has ended.
async fn last_metrics(cluster: &mut Cluster, name: Name) -> Metrics {
    let mut last = Metrics::default();
    loop {
        let now = cluster.metrics(name).await;
        if !now.has("baton_engine_kv_blocks", &[]) {
            return last;
        }
        last = now;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn kv_bytes(metrics: &Metrics, direction: &str) -> f64 {
    metrics.sum("baton_worker_kv_transfer_bytes_total", &[&format!("direction=\"{direction}\"")])
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_every_kind_move_and_nobody_can_tell() {
    let asks = streams::every_kind(undisturbed(&[streams::varied()]).await.remove(0));
    let expected = undisturbed(&asks).await;
    let mut cluster = cluster(1, 2).await;
    let running: Vec<_> = asks.iter().map(|ask| Running::start(cluster.http_port(), ask)).collect();
    for running in &running {
        running.wait_for_tokens(2).await;
    }
    let received = kv_bytes(&cluster.metrics(STAYS).await, "in");
    cluster.signal(LEAVES, "TERM");
    let left = last_metrics(&mut cluster, LEAVES).await;
    let status = cluster.wait_exit(LEAVES, PATIENCE);
    let mut answers = Vec::new();
    for running in running {
        answers.push(running.answer().await);
    }

    for ((ask, answer), expected) in asks.iter().zip(&answers).zip(&expected) {
        assert_eq!(answer, expected, "{}; logs:\n{}", ask.name, cluster.logs());
    }
    assert_eq!(status.code(), Some(0), "logs:\n{}", cluster.logs());
    let router = cluster.metrics(ROUTER).await;
    let moved = router.sum("baton_router_moves_total", &["outcome=\"OK\""]);
    let taken = left.sum("baton_worker_migrations_total", &["outcome=\"taken\""]);
    println!("{moved} sequences moved, {:.0} bytes of KV out", kv_bytes(&left, "out"));
    assert!(moved >= 1.0, "{moved} sequences moved; logs:\n{}", cluster.logs());
    assert_eq!((taken, router.sum("baton_router_moves_total", &[])), (moved, moved));
    assert_eq!(left.sum("baton_worker_migrations_total", &["outcome=\"lost\""]), 0.0);
    // KV came from where it was, and nothing was computed again: no attempt failed, and each sequence was placed once.
    let sent = kv_bytes(&left, "out");
    assert!(sent > 0.0 && kv_bytes(&cluster.metrics(STAYS).await, "in") >= received + sent);
    assert_eq!(router.sum("baton_router_retries_total", &[]), 0.0, "logs:\n{}", cluster.logs());
    let sequences: usize = asks.iter().map(|ask| ask.sequences).sum();
    let placed = router.sum("baton_router_placements_total", &["probe=\"false\""]);
    assert_eq!(placed as usize, sequences);
    // Each sequence had its first token once.
    let firsts = cluster.metrics(GATEWAY).await.sum("baton_gateway_ttft_seconds_count", &["probe=\"false\""]);
    assert_eq!(firsts as usize, sequences);
    all_quiet(&cluster, &[PREFILL, STAYS]).await;
}

/// The only decode worker has nowhere to send its sequences: they end where they are, as does the process.
#[tokio::test(flavor = "multi_thread")]
async fn the_only_decode_worker_lets_its_streams_end() {
    let asks = [streams::text()];
    let expected = undisturbed(&asks).await;
    let mut cluster = cluster(1, 1).await;
    let running = Running::start(cluster.http_port(), &asks[0]);
    running.wait_for_tokens(2).await;
    cluster.signal(LEAVES, "TERM");
    assert_eq!(running.answer().await, expected[0], "logs:\n{}", cluster.logs());
    assert_eq!(cluster.wait_exit(LEAVES, PATIENCE).code(), Some(0), "logs:\n{}", cluster.logs());
    let router = cluster.metrics(ROUTER).await;
    assert_eq!(router.sum("baton_router_moves_total", &[]), 0.0);
    assert_eq!(router.sum("baton_router_retries_total", &[]), 0.0);
    all_quiet(&cluster, &[PREFILL]).await;
}

/// A prefill worker that drains goes on serving what it holds: decode stands before the fetch meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_serves_its_holds_to_the_end() {
    let asks = [streams::text()];
    let expected = undisturbed(&asks).await;
    let mut cluster = cluster(2, 1).await;
    let stopped: BTreeSet<Name> = [(Service::Prefill, 0), (Service::Prefill, 1)].into();
    for name in &stopped {
        cluster.arm(*name, "prefill.issued=return(4000)").await;
    }
    let running = Running::start(cluster.http_port(), &asks[0]);
    let until = Instant::now() + PATIENCE;
    let owner = loop {
        let reached = |name: &&Name| cluster.log(**name).contains("fail point reached: prefill.issued");
        if let Some(owner) = stopped.iter().find(reached) {
            break *owner;
        }
        assert!(Instant::now() < until, "a fetch begins; logs:\n{}", cluster.logs());
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    // The drain is announced for two seconds; what is held is fetched two seconds after that.
    cluster.signal(owner, "TERM");
    assert_eq!(running.answer().await, expected[0], "logs:\n{}", cluster.logs());
    assert_eq!(cluster.wait_exit(owner, PATIENCE).code(), Some(0), "logs:\n{}", cluster.logs());
    assert_eq!(cluster.metrics(ROUTER).await.sum("baton_router_retries_total", &[]), 0.0);
}

/// A decode worker dies under a stream: its first token came once, and everything after it is decode time, the gap too.
#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_stream_has_one_first_token() {
    let asks = [streams::timed()];
    let expected = undisturbed(&asks).await;
    let mut cluster = cluster(1, 2).await;
    let running = Running::start(cluster.http_port(), &asks[0]);
    running.wait_for_tokens(3).await;
    let mut victim = LEAVES;
    for name in [LEAVES, STAYS] {
        if cluster.metrics(name).await.sum("baton_engine_sequences", &["state=\"running\""]) > 0.0 {
            victim = name;
        }
    }
    cluster.kill(victim);
    let answer = running.answer().await;
    assert_eq!(answer, expected[0], "logs:\n{}", cluster.logs());
    assert!(cluster.metrics(ROUTER).await.sum("baton_router_retries_total", &[]) >= 1.0);
    let (first, later) = answer.times();
    assert!(first == 1 && later > 100, "{first} first tokens and {later} later ones are told of");
    let gateway = cluster.metrics(GATEWAY).await;
    assert_eq!(gateway.sum("baton_gateway_ttft_seconds_count", &["probe=\"false\""]), 1.0);
    assert_eq!(gateway.sum("baton_gateway_itl_seconds_count", &["probe=\"false\""]) as usize, later);
}
