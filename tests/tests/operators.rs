//! What operators see of real processes, on the port of their own.

use std::time::{Duration, Instant};

use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};

const GATEWAY: Name = (Service::Gateway, 0);
const ROUTER: Name = (Service::Router, 0);
const PREFILL: Name = (Service::Prefill, 0);
const DECODE: Name = (Service::Decode, 0);
const SERVE: Name = (Service::Serve, 0);

const LIVE: &str = "/health/live";
const READY: &str = "/health/ready";

/// Workers of made-up words, and more time to look at a drain than a slow machine needs.
fn settings() -> Settings {
    let worker = ["--model", "sim:vocab=512", "--drain-notice-seconds", "60"];
    Settings { worker: worker.map(str::to_owned).to_vec(), ..Settings::default() }
}

/// Waits until a process says that it does not take work, and what it waits for: all of `obstacles`.
async fn wait_obstacles(cluster: &Cluster, name: Name, obstacles: &[&str]) {
    let until = Instant::now() + PATIENCE;
    loop {
        let reason = cluster.wait_operators(name, READY, 503).await;
        if obstacles.iter().all(|obstacle| reason.contains(obstacle)) {
            assert!(reason.starts_with("not ready: "), "{reason}");
            return;
        }
        assert!(Instant::now() < until, "{obstacles:?} in {reason}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A process is alive from its start, ready when it takes work, and says what is missing until then and at its end.
#[tokio::test(flavor = "multi_thread")]
async fn every_process_says_whether_it_takes_work() {
    let mut cluster = Cluster::new(settings());
    let alive = (200, "alive\n".to_owned());
    cluster.spawn_armed(DECODE, "worker.loading=return");
    wait_obstacles(&cluster, DECODE, &["decode: the model is being loaded"]).await;
    assert_eq!(cluster.operators(DECODE, LIVE).await, Some(alive.clone()));

    cluster.spawn(ROUTER);
    assert_eq!(cluster.wait_operators(ROUTER, READY, 200).await, "ready\n");
    cluster.spawn(GATEWAY);
    wait_obstacles(&cluster, GATEWAY, &["gateway: no model can be placed"]).await;
    assert_eq!(cluster.operators(GATEWAY, LIVE).await, Some(alive.clone()));

    cluster.kill(DECODE);
    cluster.spawn(DECODE);
    cluster.spawn(PREFILL);
    for name in [DECODE, PREFILL, GATEWAY] {
        assert_eq!(cluster.wait_operators(name, READY, 200).await, "ready\n");
        assert_eq!(cluster.operators(name, LIVE).await, Some(alive.clone()));
    }

    cluster.signal(PREFILL, "TERM");
    wait_obstacles(&cluster, PREFILL, &["draining"]).await;
    assert_eq!(cluster.operators(PREFILL, LIVE).await, Some(alive));
    assert!(cluster.metrics(PREFILL).await.has("baton_worker_leases", &[]), "metrics are served in a drain");
}

/// With everything in one process, all its services have to take work.
#[tokio::test(flavor = "multi_thread")]
async fn one_process_is_ready_when_all_its_services_are() {
    let serve = ["--model", "sim:vocab=512"].map(str::to_owned).to_vec();
    let mut cluster = Cluster::new(Settings { serve, ..Settings::default() });
    cluster.spawn_armed(SERVE, "worker.loading=return");
    let loading = ["decode-0", "prefill-0"].map(|worker| format!("{worker}: the model is being loaded"));
    wait_obstacles(&cluster, SERVE, &[&loading[0], &loading[1], "gateway: no "]).await;
    cluster.kill(SERVE);
    cluster.spawn(SERVE);
    assert_eq!(cluster.wait_operators(SERVE, READY, 200).await, "ready\n");
}
