//! JSON schemas, and a small model at temperature 1 that knows little of JSON: whatever it says to the end is valid.
//!
//! Real processes with prefill and decode apart answer chats whose `response_format` is one of the schemas of
//! `tests/schemas`; a validator that has nothing in common with the grammars judges every answer that ended by itself.
//! Some are asked many times, and again while the decode worker that has them dies: the answers must be the same.
//!
//! This is a tenth of the runs. `cargo xtask schemas` makes all of them.

mod chat;
mod corpus;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use serde_json::json;
use tokio::sync::Semaphore;

use chat::{Answer, Chats};
use corpus::Case;
use table::Table;

/// Chats at once.
const AT_ONCE: usize = 12;

/// Tokens that the chats of a round have brought, on average, when the worker dies.
const KILLED_AFTER: usize = 8;

/// How much is run.
#[derive(Clone, Copy)]
struct Extent {
    /// Every so many schemas, one.
    step: usize,
    /// Runs of each schema that is asked often.
    often: usize,
}

impl Extent {
    #[expect(clippy::disallowed_methods, reason = "the extent of a test, not a setting of Baton's")]
    fn wanted() -> Self {
        match std::env::var("BATON_SCHEMAS").as_deref() {
            Ok("all") => Self { step: 1, often: 100 },
            _ => Self { step: 10, often: 10 },
        }
    }
}

/// One chat to have: a case and a seed.
type Run = (Arc<Case>, u64);

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_end_are_valid() {
    let extent = Extent::wanted();
    let cases = corpus::read();
    assert_eq!(cases.len(), 200);
    let settings =
        Settings { router: ["--placement", "split"].map(str::to_owned).to_vec(), ..Settings::default() };
    let mut cluster = Cluster::new(settings);
    for service in [Service::Prefill, Service::Decode, Service::Router, Service::Gateway] {
        cluster.spawn((service, 0));
    }
    cluster.wait_ready().await;
    let chats = Chats::with(cluster.http_port());
    refused_by_name(&chats).await;
    let mut table = Table::default();

    let once: Vec<Run> = cases.iter().step_by(extent.step).map(|case| (Arc::clone(case), 1)).collect();
    let answers = all(&chats, &once, &AtomicUsize::new(0)).await;
    let ended = table.add("each schema once", &once, &answers);

    let often: Vec<Run> = (1..=extent.often as u64)
        .flat_map(|seed| cases.iter().filter(|case| case.often).map(move |case| (Arc::clone(case), seed)))
        .collect();
    let undisturbed = all(&chats, &often, &AtomicUsize::new(0)).await;
    table.add("ten schemas, many times", &often, &undisturbed);

    // Before any worker dies, and what it has counted with it.
    let moved = cluster.metrics((Service::Decode, 0)).await;
    assert!(
        moved.sum("baton_worker_kv_transfer_bytes_total", &["direction=\"in\""]) > 0.0,
        "prefill and decode were apart"
    );

    let disturbed = with_kills(&mut cluster, &chats, &often).await;
    table.add("the same, and decode killed", &often, &disturbed.answers);
    table.print(disturbed.kills, disturbed.hit);

    for (((case, seed), before), after) in often.iter().zip(&undisturbed).zip(&disturbed.answers) {
        assert_eq!(before, after, "{} with seed {seed}, its worker killed", case.name);
    }
    assert_eq!(table.failures(), Vec::<String>::new(), "logs:\n{}", cluster.logs());
    assert!(disturbed.hit > 0, "the dying workers had chats");
    let (ended, runs) = (ended.ended, ended.runs);
    assert!(ended * 10 >= runs * 9, "{ended} of {runs} came to their end within {} tokens", chat::TOKENS_MAX);
}

/// What no grammar can keep to is refused before the stream starts, however large it is.
async fn refused_by_name(chats: &Chats) {
    let mut overlapping = json!({ "type": "string" });
    for _ in 0..9 {
        overlapping =
            json!({ "oneOf": [overlapping, { "type": "object", "properties": { "a": overlapping } }] });
    }
    let many: Vec<_> = (0..5000).map(|i| json!({ "a": i })).collect();
    for (schema, part) in [
        (json!({ "not": {} }), "unimplemented keys: [\"not\"]"),
        (json!({ "type": "array", "uniqueItems": true }), "unimplemented keys: [\"uniqueItems\"]"),
        (overlapping, "oneOf"),
        (json!({ "enum": many }), "subschemas"),
    ] {
        let (status, message) = chats.refusal(&schema).await.expect("an answer");
        assert_eq!(status, 400, "{message}");
        assert!(message.contains(part), "{message}");
    }
}

/// Has all chats, [`AT_ONCE`] at a time. `tokens` counts what has come.
async fn all(chats: &Chats, runs: &[Run], tokens: &AtomicUsize) -> Vec<Answer> {
    let places = Semaphore::new(AT_ONCE);
    futures::future::join_all(runs.iter().map(|(case, seed)| async {
        let _place = places.acquire().await.expect("nobody closes it");
        chats.ask(case, *seed, tokens).await
    }))
    .await
}

/// What came of chats whose workers died.
struct Disturbed {
    answers: Vec<Answer>,
    kills: usize,
    /// Chats that were under way when a worker died.
    hit: usize,
}

/// Has the chats in rounds. In each, one of two decode workers is killed half way, and started again.
async fn with_kills(cluster: &mut Cluster, chats: &Chats, runs: &[Run]) -> Disturbed {
    let workers: [Name; 2] = [(Service::Decode, 0), (Service::Decode, 1)];
    cluster.spawn(workers[1]);
    wait_for_decode_workers(cluster, workers.len()).await;
    let mut disturbed = Disturbed { answers: Vec::new(), kills: 0, hit: 0 };
    for (round, runs) in runs.chunks(AT_ONCE).enumerate() {
        let (tokens, over) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let answers = futures::future::join_all(runs.iter().map(|(case, seed)| async {
            let answer = chats.ask(case, *seed, &tokens).await;
            over.fetch_add(1, Ordering::Relaxed);
            answer
        }));
        let victim = workers[round % 2];
        let kill = async {
            while tokens.load(Ordering::Relaxed) < KILLED_AFTER * runs.len()
                && over.load(Ordering::Relaxed) < runs.len()
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            disturbed.hit += runs.len() - over.load(Ordering::Relaxed);
            cluster.kill(victim);
            cluster.spawn(victim);
            disturbed.kills += 1;
        };
        let (answers, ()) = tokio::join!(answers, kill);
        disturbed.answers.extend(answers);
        wait_for_decode_workers(cluster, workers.len()).await;
    }
    disturbed
}

/// Waits until the router can place on so many decode workers.
async fn wait_for_decode_workers(cluster: &Cluster, count: usize) {
    let until = Instant::now() + PATIENCE;
    let live = ["role=\"decode\"", "state=\"live\""];
    while cluster.metrics((Service::Router, 0)).await.sum("baton_router_workers", &live) < count as f64 {
        assert!(
            Instant::now() < until,
            "{count} decode workers within {PATIENCE:?}; logs:\n{}",
            cluster.logs()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
