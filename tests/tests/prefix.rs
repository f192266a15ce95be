//! Routing by what workers have cached, beside round robin: the same requests, whose prompts share beginnings, through two
//! routers that share nothing, to two prefill and two decode workers with a real model. The tokens are the same; what
//! differs is printed (`cargo xtask bench prefix`).

use std::time::Duration;

use baton_tests::client::{Ask, Client};
use baton_tests::cluster::{Cluster, Service, Settings};
use baton_tests::metrics::Metrics;

/// Beginnings that prompts share. An odd number, so that taking turns sends none of them to one worker alone.
const FAMILIES: u32 = 5;
/// Tokens of a beginning, and of what follows it.
const SHARED_TOKENS: u32 = 192;
const OWN_TOKENS: u32 = 16;
/// How often each beginning is asked for.
const ROUNDS: u32 = 4;
/// Tokens that are generated.
const MAX_TOKENS: usize = 8;

const ROUTERS: [(Service, usize); 2] = [(Service::Router, 0), (Service::Router, 1)];

fn asks(round: u32) -> Vec<Ask> {
    let ask = |family: u32| {
        let shared = (0..SHARED_TOKENS).map(|at| 1000 + (family * 7919 + at * 31) % 20_000);
        let own = (0..OWN_TOKENS).map(|at| 30_000 + (round * 101 + family * 17 + at) % 10_000);
        Ask::greedy(&shared.chain(own).collect::<Vec<_>>(), MAX_TOKENS)
    };
    (0..FAMILIES).map(ask).collect()
}

/// What a policy made of the requests.
struct Run {
    tokens: Vec<Vec<u32>>,
    /// Tokens of prompts that were cached, and that were computed.
    cached: f64,
    computed: f64,
    /// Mean time to the first token of the requests after the first round.
    ttft: Duration,
    resyncs: f64,
}

async fn routers(cluster: &Cluster, name: &str, labels: &[&str]) -> f64 {
    let mut sum = 0.0;
    for router in ROUTERS {
        sum += cluster.metrics(router).await.sum(name, labels);
    }
    sum
}

fn ttft(metrics: &Metrics) -> (f64, f64) {
    let labels = ["probe=\"false\""];
    let labels: &[&str] = if metrics.has("baton_gateway_ttft_seconds_sum", &labels) { &labels } else { &[] };
    let of = |part: &str| metrics.sum(&format!("baton_gateway_ttft_seconds_{part}"), labels);
    (of("sum"), of("count"))
}

async fn run(policy: &str) -> Run {
    let router = ["--policy", policy, "--placement", "split"].map(str::to_owned).to_vec();
    let worker = ["--threads", "1"].map(str::to_owned).to_vec();
    let mut cluster = Cluster::new(Settings { router, worker, ..Settings::default() });
    for number in 0..2 {
        for service in [Service::Prefill, Service::Decode, Service::Router] {
            cluster.spawn((service, number));
        }
    }
    cluster.spawn((Service::Gateway, 0));
    cluster.wait_ready().await;
    let client = Client::new(cluster.grpc_port());
    let cached = ["kind=\"cached\""];
    let computed = ["kind=\"computed\""];
    let name = "baton_router_prefix_tokens_total";
    let before = (routers(&cluster, name, &cached).await, routers(&cluster, name, &computed).await);
    let mut tokens = Vec::new();
    let mut first = (0.0, 0.0);
    for round in 0..ROUNDS {
        if round == 1 {
            first = ttft(&cluster.metrics((Service::Gateway, 0)).await);
        }
        for ask in asks(round) {
            let answer = client.ask(&ask).await;
            assert_eq!(answer.error, None, "{}", cluster.logs());
            assert_eq!(answer.tokens.len(), MAX_TOKENS);
            tokens.push(answer.tokens);
        }
    }
    let last = ttft(&cluster.metrics((Service::Gateway, 0)).await);
    assert!(last.1 > first.1, "first tokens are timed");
    Run {
        tokens,
        cached: routers(&cluster, name, &cached).await - before.0,
        computed: routers(&cluster, name, &computed).await - before.1,
        ttft: Duration::from_secs_f64((last.0 - first.0) / (last.1 - first.1)),
        resyncs: routers(&cluster, "baton_router_resyncs_total", &[]).await,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_cached_is_found_and_changes_no_token() {
    let (turns, prefix) = (run("round-robin").await, run("prefix").await);
    println!(
        "{FAMILIES} beginnings of {SHARED_TOKENS} tokens, each asked for {ROUNDS} times, one request at a time:"
    );
    println!(
        "| policy | tokens of prompts | cached | hit rate | mean time to the first token after the first round, ms |"
    );
    println!("|---|---|---|---|---|");
    for (name, run) in [("round-robin", &turns), ("prefix", &prefix)] {
        let all = run.cached + run.computed;
        let rate = 100.0 * run.cached / all;
        println!("| {name} | {all} | {} | {rate:.0} % | {:.0} |", run.cached, run.ttft.as_secs_f64() * 1e3);
    }
    assert_eq!(prefix.tokens, turns.tokens, "where a prompt is computed decides no token");
    assert!(prefix.cached > turns.cached, "beginnings are found, and by taking turns fewer of them");
    assert_eq!(prefix.resyncs, 0.0, "no event is lost on a good line");
}
