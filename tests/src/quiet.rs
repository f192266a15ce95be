//! What a cluster has left to do: nothing, once every request is over.

use std::time::{Duration, Instant};

use crate::cluster::{Cluster, Name, PATIENCE};
use crate::metrics::Metrics;

/// What is zero of a worker that has nothing to do: series and label.
pub const QUIET: [(&str, &str); 8] = [
    ("baton_engine_kv_blocks", "state=\"held\""),
    ("baton_engine_kv_blocks", "state=\"used\""),
    ("baton_worker_leases", ""),
    ("baton_engine_sequences", "state=\"running\""),
    ("baton_engine_sequences", "state=\"waiting\""),
    ("baton_engine_sequences", "state=\"preempted\""),
    ("baton_engine_sequences", "state=\"reserved\""),
    ("baton_engine_sequences", "state=\"held\""),
];

/// What a worker's scrape shows of work, if any; a scrape without these series is a worker that does not answer yet.
///
/// # Panics
/// When blocks have no owner.
pub fn work(name: Name, metrics: &Metrics) -> Vec<String> {
    let orphaned = metrics.sum("baton_worker_kv_blocks_orphaned", &[]);
    assert_eq!(orphaned, 0.0, "{name:?} has blocks without an owner");
    let mut work = Vec::new();
    for (series, label) in QUIET {
        let there = metrics.has(series, &[label]);
        let number = metrics.sum(series, &[label]);
        if !there || number != 0.0 {
            work.push(if there {
                format!("{name:?} {series}{{{label}}} {number}")
            } else {
                format!("{name:?} does not answer")
            });
        }
    }
    work
}

/// What the workers have to do now.
pub async fn busy(cluster: &Cluster) -> Vec<String> {
    let mut busy = Vec::new();
    for name in cluster.workers() {
        busy.extend(work(name, &cluster.metrics(name).await));
    }
    busy
}

/// Waits until every worker answers and has nothing to do, and returns when that was.
///
/// # Panics
/// When it takes longer than `limit` from `since`, or from when the last worker answered; the message says what is left.
pub async fn quiet(cluster: &Cluster, since: Instant, limit: Duration, what: &str) -> Instant {
    let mut answered = since;
    loop {
        let busy = busy(cluster).await;
        let now = Instant::now();
        if busy.is_empty() {
            return now;
        }
        if busy.iter().any(|busy| busy.ends_with("answer")) {
            answered = now;
            assert!(now < since + PATIENCE, "{what}: {busy:?}; logs:\n{}", cluster.logs());
        }
        assert!(
            now < answered + limit,
            "{what}: still busy after {limit:?}: {busy:?}; logs:\n{}",
            cluster.logs()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
