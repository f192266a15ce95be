//! A cluster of real processes that find each other in a real etcd, and do without it for sixty leases.

use std::time::{Duration, Instant};

use baton_tests::client::{Answer, Ask, Client};
use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use baton_tests::etcd::Etcd;
use tokio::task::JoinSet;

/// What leases in etcd last here, seconds.
const LEASE_SECONDS: u64 = 1;
/// How long etcd is away.
const OUTAGE: Duration = Duration::from_secs(60 * LEASE_SECONDS);
/// Tokens of a stream that outlasts the outage, at 40 ms or more each.
const LONG_TOKENS: usize = 1800;
/// Tokens of a request that arrives during the outage.
const SHORT_TOKENS: usize = 8;

const GATEWAY: Name = (Service::Gateway, 0);

fn prompt(first: u32) -> Vec<u32> {
    (first..first + 40).collect()
}

fn cluster(etcd: &Etcd) -> Cluster {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect();
    Cluster::new(Settings {
        model: "sim:vocab=4096,context_len=8192,step_us=40000".to_owned(),
        discovery: format!("etcd:{}/baton", etcd.url()),
        service: words(&format!("--etcd-lease-seconds {LEASE_SECONDS}")),
        router: words("--placement split"),
        worker: words("--threads 1 --drain-notice-seconds 1"),
        ..Settings::default()
    })
}

/// Waits until each router has so many live workers of a role, and none in another state.
async fn routers_see(cluster: &Cluster, role: &str, live: usize) {
    let until = Instant::now() + PATIENCE;
    for router in [(Service::Router, 0), (Service::Router, 1)] {
        loop {
            let metrics = cluster.metrics(router).await;
            let of = |labels: &[&str]| metrics.sum("baton_router_workers", labels) as usize;
            let role = format!("role=\"{role}\"");
            if of(&[&role, "state=\"live\""]) == live && of(&[&role]) == live {
                break;
            }
            assert!(Instant::now() < until, "{router:?} has {live} with {role}; logs:\n{}", cluster.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[track_caller]
fn assert_whole(answer: &Answer, tokens: usize, cluster: &Cluster) {
    let is_whole = answer.error.is_none() && answer.finished && answer.tokens.len() == tokens;
    assert!(is_whole, "expected {tokens} tokens, got {answer:?}; logs:\n{}", cluster.logs());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_away_for_sixty_leases_harms_nobody() {
    let mut etcd = Etcd::start();
    let mut cluster = cluster(&etcd);
    for index in 0..2 {
        for service in [Service::Router, Service::Prefill, Service::Decode] {
            cluster.spawn((service, index));
        }
    }
    cluster.spawn(GATEWAY);
    cluster.wait_ready().await;
    routers_see(&cluster, "prefill", 2).await;
    routers_see(&cluster, "decode", 2).await;

    let client = Client::new(cluster.grpc_port());
    let expected = client.ask(&Ask::seeded(&prompt(100), SHORT_TOKENS, 7)).await;
    assert_whole(&expected, SHORT_TOKENS, &cluster);
    let mut running = JoinSet::new();
    for index in 0..4 {
        let (client, ask) = (client.clone(), Ask::seeded(&prompt(500 * index), LONG_TOKENS, 7));
        running.spawn(async move { client.ask(&ask).await });
    }
    tokio::time::sleep(Duration::from_secs(1)).await;

    etcd.kill();
    let killed = Instant::now();
    let (mut asked, mut restarted) = (0, false);
    while killed.elapsed() < OUTAGE {
        let answer = client.ask(&Ask::seeded(&prompt(100), SHORT_TOKENS, 7)).await;
        assert_whole(&answer, SHORT_TOKENS, &cluster);
        assert_eq!(answer, expected);
        asked += 1;
        if !restarted && killed.elapsed() > OUTAGE / 3 {
            // At its old address, where the others still know it. What ran on it runs on elsewhere.
            cluster.kill((Service::Decode, 1));
            cluster.spawn((Service::Decode, 1));
            restarted = true;
        }
    }
    let away = cluster.log((Service::Decode, 1));
    assert_eq!(away.matches("no member is known until it does").count(), 1, "said once: {away}");
    routers_see(&cluster, "prefill", 2).await;
    routers_see(&cluster, "decode", 2).await;
    assert_eq!(running.len(), 4);
    assert!(running.try_join_next().is_none(), "the long streams outlast the outage");

    etcd.run();
    // A new one joins, and one that drains leaves, while streams run.
    cluster.spawn((Service::Decode, 2));
    routers_see(&cluster, "decode", 3).await;
    cluster.signal((Service::Prefill, 1), "TERM");
    routers_see(&cluster, "prefill", 1).await;
    let code = cluster.wait_exit((Service::Prefill, 1), PATIENCE);
    assert!(code.success(), "{code}; logs:\n{}", cluster.logs());
    let answer = client.ask(&Ask::seeded(&prompt(100), SHORT_TOKENS, 7)).await;
    assert_eq!(answer, expected);
    while let Some(answer) = running.join_next().await {
        assert_whole(&answer.expect("the client does not panic"), LONG_TOKENS, &cluster);
    }
    println!(
        "{asked} requests arrived and ended within an outage of {} leases",
        OUTAGE.as_secs() / LEASE_SECONDS
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_does_not_fit_ends_with_the_name_of_the_field() {
    let etcd = Etcd::start();
    let mut cluster = cluster(&etcd);
    cluster.spawn((Service::Prefill, 0));
    cluster.wait_log((Service::Prefill, 0), "registered").await;
    let other = ["--model", "sim:layers=3,vocab=4096,context_len=8192"];
    cluster.spawn_with((Service::Decode, 0), &other);
    let code = cluster.wait_exit((Service::Decode, 0), PATIENCE);
    let log = cluster.log((Service::Decode, 0));
    assert_eq!(code.code(), Some(1), "{log}");
    let last = log.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("baton: checkpoint fingerprint: ") || last.starts_with("baton: layers: "),
        "{log}"
    );
    assert!(last.contains("another --served-name or prefix of --discovery"), "{log}");
    // By another name it is another model.
    cluster.spawn_with((Service::Decode, 1), &[&other[..], &["--served-name", "other"]].concat());
    cluster.wait_log((Service::Decode, 1), "registered").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_drains_stays_a_member_until_its_streams_have_moved() {
    const TOKENS: usize = 150;
    let etcd = Etcd::start();
    let mut cluster = cluster(&etcd);
    for index in 0..2 {
        for service in [Service::Router, Service::Prefill, Service::Decode] {
            cluster.spawn((service, index));
        }
    }
    cluster.spawn(GATEWAY);
    cluster.wait_ready().await;
    routers_see(&cluster, "decode", 2).await;

    let client = Client::new(cluster.grpc_port());
    let asks: Vec<Ask> =
        (0..4).map(|at| Ask::seeded(&prompt(300 + at * 50), TOKENS, u64::from(at))).collect();
    let running: Vec<_> = asks.iter().map(|ask| client.clone().start(ask.clone())).collect();
    let leaving = (Service::Decode, 1);
    let until = Instant::now() + PATIENCE;
    let labels = ["state=\"running\""];
    while cluster.metrics(leaving).await.sum("baton_engine_sequences", &labels) == 0.0 {
        assert!(Instant::now() < until, "a stream runs there; logs:\n{}", cluster.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    cluster.signal(leaving, "TERM");
    let code = cluster.wait_exit(leaving, PATIENCE);
    assert!(code.success(), "{code}; logs:\n{}", cluster.logs());
    let (mut moved, mut retried) = (0.0, 0.0);
    for router in [(Service::Router, 0), (Service::Router, 1)] {
        let metrics = cluster.metrics(router).await;
        moved += metrics.sum("baton_router_moves_total", &["outcome=\"OK\""]);
        retried += metrics.sum("baton_router_retries_total", &[]);
    }
    assert!(moved >= 1.0 && retried == 0.0, "{moved} moved, {retried} retries; logs:\n{}", cluster.logs());
    routers_see(&cluster, "decode", 1).await;
    for (running, ask) in running.into_iter().zip(&asks) {
        let answer = running.await.expect("the client does not panic");
        assert_whole(&answer, TOKENS, &cluster);
        assert_eq!(answer.tokens, client.ask(ask).await.tokens, "as by a worker that nobody disturbs");
    }
}
