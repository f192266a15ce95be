//! However a request is executed, its tokens are the same: split over four processes, fused in one, in chunks of any
//! size, on any number of threads, alone or in a batch; greedy and seeded.

use baton_tests::client::{Answer, Ask, Client};
use baton_tests::cluster::{Cluster, Service, Settings};
use baton_tests::golden;
use baton_tests::metrics::Metrics;

/// Tokens per answer: enough to cross block borders, few enough for a small machine.
const TOKENS: usize = 32;

/// Every golden prompt, greedy and seeded.
fn asks() -> Vec<Ask> {
    let cases = golden::cases();
    let greedy = cases.iter().map(|case| Ask::greedy(&case.prompt_ids, TOKENS));
    let seeded = cases.iter().zip(1..).map(|(case, seed)| Ask::seeded(&case.prompt_ids, TOKENS, seed));
    greedy.chain(seeded).collect()
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Asks everything, `at_once` requests at a time.
async fn answers(client: &Client, at_once: usize) -> Vec<Answer> {
    let mut all = Vec::new();
    for group in asks().chunks(at_once) {
        all.extend(client.ask_all(group).await);
    }
    for answer in &all {
        assert_eq!(answer.error, None);
        assert!(answer.finished, "every stream says why it ended");
        assert_eq!(answer.tokens.len(), TOKENS);
    }
    all
}

/// The answers of `baton serve`, and its metrics afterwards.
async fn served(arguments: &str, at_once: usize) -> (Vec<Answer>, Metrics) {
    let mut cluster = Cluster::new(Settings { serve: words(arguments), ..Settings::default() });
    cluster.spawn((Service::Serve, 0));
    cluster.wait_ready().await;
    let answers = answers(&Client::new(cluster.grpc_port()), at_once).await;
    let metrics = cluster.metrics((Service::Serve, 0)).await;
    (answers, metrics)
}

/// The answers of four processes, and the KV bytes that the decode worker received.
async fn split_over_processes(worker: &str, at_once: usize) -> (Vec<Answer>, f64) {
    let router = words("--placement split");
    let mut cluster = Cluster::new(Settings { router, worker: words(worker), ..Settings::default() });
    for service in [Service::Prefill, Service::Decode, Service::Router, Service::Gateway] {
        cluster.spawn((service, 0));
    }
    cluster.wait_ready().await;
    let answers = answers(&Client::new(cluster.grpc_port()), at_once).await;
    let metrics = cluster.metrics((Service::Decode, 0)).await;
    (answers, metrics.sum(BYTES, &["direction=\"in\""]))
}

const BYTES: &str = "baton_worker_kv_transfer_bytes_total";

fn same(what: &str, expected: &[Answer], got: &[Answer]) {
    for (index, (expected, got)) in expected.iter().zip(got).enumerate() {
        assert_eq!(expected.tokens, got.tokens, "{what}: tokens of request {index}");
        assert_eq!(expected.text, got.text, "{what}: text of request {index}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_do_not_depend_on_execution() {
    let (fused, metrics) = served("--placement fused --threads 2", 8).await;
    assert_eq!(metrics.sum(BYTES, &[]), 0.0, "fused execution moves no KV");

    let cases = golden::cases();
    for (case, answer) in cases.iter().zip(&fused) {
        let sure = case.greedy_gap.iter().position(|gap| *gap < 0.02).unwrap_or(TOKENS).min(TOKENS);
        assert_eq!(answer.tokens[..sure], case.greedy_ids[..sure], "greedy tokens of {:?}", case.prompt);
    }

    let (split, bytes) = split_over_processes("--threads 2", 8).await;
    same("split over four processes, eight at once", &fused, &split);
    assert!(bytes > 0.0, "split execution moves KV");

    let (alone, bytes) = split_over_processes("--threads 1 --step-tokens 16", 1).await;
    same("split over four processes, one at a time, one thread, chunks of 16", &fused, &alone);
    assert!(bytes > 0.0, "split execution moves KV");

    let (chunked, metrics) = served("--placement split --threads 1 --step-tokens 512", 8).await;
    same("split in one process, one thread, chunks of 512", &fused, &chunked);
    assert!(metrics.sum(BYTES, &["direction=\"in\""]) > 0.0, "split execution moves KV");

    let (small, _) = served("--placement fused --threads 2 --step-tokens 16", 1).await;
    same("fused, one at a time, chunks of 16", &fused, &small);
}
