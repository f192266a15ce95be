//! Traces as a collector gets them: of real processes, whose spans of one request make one tree.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use baton_tests::cluster::{Cluster, Name, Service, Settings};
use baton_tests::collector::{Collector, Span};
use proto::wire::generate_request::Prompt;
use proto::wire::generation_service_client::GenerationServiceClient;
use proto::wire::{GenerateRequest, TokenIds};
use serde_json::json;

const GATEWAY: Name = (Service::Gateway, 0);
const ROUTER: Name = (Service::Router, 0);
const PREFILL: Name = (Service::Prefill, 0);
const DECODE: Name = (Service::Decode, 0);

/// The client's own span, in three traces: two that it samples, and one that it does not.
const PARENT: &str = "00f067aa0ba902b7";
const OVER_HTTP: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const OVER_GRPC: &str = "5bf92f3577b34da6a3ce929d0e0e4737";
const UNSAMPLED: &str = "6bf92f3577b34da6a3ce929d0e0e4738";

/// Clocks of one machine are read one after the other.
const CLOCK: u64 = Duration::from_millis(1).as_nanos() as u64;

const MODEL: &str = "sim:vocab=300,context_len=512,step_us=2000";

/// A process may take so long to end: what is left of it is to send its last spans.
const END_MAX: Duration = Duration::from_secs(20);

fn traceparent(trace: &str, sampled: bool) -> String {
    format!("00-{trace}-{PARENT}-{:02x}", u8::from(sampled))
}

/// Posts a completion of a prompt of some blocks.
async fn complete(cluster: &Cluster, headers: &[(&str, &str)]) {
    let prompt: Vec<u32> = (0..70).collect();
    let body = json!({ "model": "m", "prompt": prompt, "max_tokens": 6, "ignore_eos": true });
    let url = format!("http://127.0.0.1:{}/v1/completions", cluster.http_port());
    let mut request = reqwest::Client::new().post(url).json(&body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.expect("the gateway answers");
    let (status, text) = (response.status(), response.text().await.unwrap_or_default());
    assert!(status.is_success(), "{status} {text}; logs:\n{}", cluster.logs());
}

/// The same over gRPC.
async fn generate(cluster: &Cluster, traceparent: &str) {
    let address = format!("http://127.0.0.1:{}", cluster.grpc_port());
    let mut client = GenerationServiceClient::connect(address).await.expect("the gateway listens");
    let mut request = tonic::Request::new(GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: (100..170).collect() })),
        max_tokens: Some(4),
        ignore_eos: true,
        ..GenerateRequest::default()
    });
    request.metadata_mut().insert("traceparent", traceparent.parse().expect("ASCII"));
    let mut stream = client.generate(request).await.expect("the request is taken").into_inner();
    while stream.message().await.expect("the stream is whole").is_some() {}
}

/// Ends processes as an operator does, those that call before those that are called, and waits for them.
fn end(cluster: &mut Cluster, names: &[Name]) {
    for name in names {
        cluster.signal(*name, "TERM");
        let status = cluster.wait_exit(*name, END_MAX);
        assert!(status.success(), "{name:?}: {status}; logs:\n{}", cluster.logs());
    }
}

/// The one span of a trace by that name.
fn one<'a>(spans: &'a [Span], trace: &str, name: &str) -> &'a Span {
    let mut named = spans.iter().filter(|span| span.trace == trace && span.name == name);
    let found = named.next().unwrap_or_else(|| panic!("{name} in {}", tree(spans, trace)));
    assert!(named.next().is_none(), "one {name} in {}", tree(spans, trace));
    found
}

/// A trace for a failure's message.
fn tree(spans: &[Span], trace: &str) -> String {
    let of_trace = spans.iter().filter(|span| span.trace == trace);
    of_trace.map(|span| format!("\n{span:?}")).collect()
}

/// Who made each span of a split request, and what it is part of.
const TREE: [(&str, &str, &str); 13] = [
    ("gateway.tokenise", "baton-gateway", "gateway.request"),
    ("gateway.queue", "baton-gateway", "gateway.request"),
    ("gateway.route", "baton-gateway", "gateway.request"),
    ("router.request", "baton-router", "gateway.route"),
    ("router.attempt", "baton-router", "router.request"),
    ("prefill.request", "baton-prefill", "router.attempt"),
    ("prefill.queue", "baton-prefill", "prefill.request"),
    ("prefill.compute", "baton-prefill", "prefill.request"),
    ("decode.request", "baton-decode", "router.attempt"),
    ("decode.kv_fetch", "baton-decode", "decode.request"),
    ("prefill.kv_send", "baton-prefill", "decode.kv_fetch"),
    ("decode.generate", "baton-decode", "decode.request"),
    ("gateway.read", "baton-gateway", "gateway.request"),
];

/// A trace has every span of a split request, each in its place, and all within the time of the root.
fn check(spans: &[Span], trace: &str, tree: &[(&str, &str, &str)]) {
    let root = one(spans, trace, "gateway.request");
    assert_eq!(root.service, "baton-gateway");
    for (name, service, parent) in tree {
        let span = one(spans, trace, name);
        assert_eq!(span.service, *service, "{name}");
        assert_eq!(span.parent, one(spans, trace, parent).id, "{name} is part of {parent}");
    }
    for span in spans.iter().filter(|span| span.trace == trace) {
        let within = root.start <= span.start + CLOCK && span.end <= root.end + CLOCK;
        assert!(within && span.start <= span.end, "{span:?} is within {root:?}");
    }
    let count = spans.iter().filter(|span| span.trace == trace).count();
    assert_eq!(count, tree.len() + 1, "{}", self::tree(spans, trace));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_one_trace_through_four_processes() {
    let collector = Collector::start();
    let endpoint = collector.endpoint();
    let mut cluster = Cluster::new(Settings::default());
    for name in [PREFILL, DECODE] {
        cluster.spawn_with(name, &["--otlp-endpoint", &endpoint, "--model", MODEL, "--served-name", "m"]);
    }
    cluster.spawn_with(ROUTER, &["--otlp-endpoint", &endpoint, "--placement", "split"]);
    cluster.spawn_with(GATEWAY, &["--otlp-endpoint", &endpoint, "--log-json", "--enable-tracing"]);
    cluster.wait_ready().await;

    let headers = [("traceparent", &*traceparent(OVER_HTTP, true)), ("tracestate", "vendor=7")];
    complete(&cluster, &headers).await;
    generate(&cluster, &traceparent(OVER_GRPC, true)).await;
    complete(&cluster, &[("traceparent", &traceparent(UNSAMPLED, false))]).await;
    complete(&cluster, &[]).await;

    // Each line of the log is an object, and those of a request name its trace.
    let log = cluster.log(GATEWAY);
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    let ended: Vec<_> = lines.iter().filter(|line| line["message"] == "request ended").collect();
    let traces: BTreeSet<_> = ended.iter().filter_map(|line| line["span"]["trace_id"].as_str()).collect();
    assert!([OVER_HTTP, OVER_GRPC, UNSAMPLED].iter().all(|trace| traces.contains(trace)), "{ended:?}");
    assert_eq!((ended.len(), traces.len()), (4, 4), "{ended:?}");
    assert!(ended.iter().all(|line| line["status"] == 200 && line["request"].is_string()), "{ended:?}");

    end(&mut cluster, &[GATEWAY, ROUTER, DECODE, PREFILL]);
    let spans = collector.spans();
    for trace in [OVER_HTTP, OVER_GRPC] {
        // Over gRPC a request is read before its handler has it.
        let tree = if trace == OVER_GRPC { &TREE[..TREE.len() - 1] } else { &TREE };
        check(&spans, trace, tree);
        assert_eq!(one(&spans, trace, "gateway.request").parent, PARENT);
    }
    let of_http = |name| one(&spans, OVER_HTTP, name);
    assert!(spans.iter().filter(|span| span.trace == OVER_HTTP).all(|span| span.state == "vendor=7"));
    assert_eq!(of_http("gateway.request").number("gen_ai.usage.input_tokens"), 70);
    assert_eq!(of_http("gateway.request").number("http.response.status_code"), 200);
    let attempt = &of_http("router.attempt").attributes;
    assert_eq!((&*attempt["baton.placement"], &*attempt["baton.placement.mode"]), ("split", "split"));
    assert_eq!(&*attempt["baton.policy"], "round-robin");
    for name in ["decode.kv_fetch", "prefill.kv_send"] {
        assert_eq!(of_http(name).number("baton.kv.blocks"), 5, "{name}");
        assert!(of_http(name).number("baton.kv.bytes") > 0, "{name}");
    }
    assert!(
        of_http("prefill.compute").end - of_http("prefill.compute").start >= 2_000_000,
        "a step takes 2 ms"
    );

    // What the client does not sample is not exported, and probes, descriptions and renewals are part of no trace.
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for span in &spans {
        *counts.entry(&span.trace).or_default() += 1;
    }
    assert!(!counts.contains_key(UNSAMPLED), "{counts:?}");
    assert_eq!(counts.len(), 3, "the third is the server's own: {counts:?}");
    let own = counts.keys().find(|trace| ![OVER_HTTP, OVER_GRPC].contains(trace)).expect("a third trace");
    check(&spans, own, &TREE);
    assert_eq!(one(&spans, own, "gateway.request").parent, "");
}

/// All services in one process, whose name then is `baton`; the trace is the same.
#[tokio::test(flavor = "multi_thread")]
async fn one_process_traces_the_same() {
    let collector = Collector::start();
    let mut cluster = Cluster::new(Settings::default());
    let serve = (Service::Serve, 0);
    let arguments = ["--otlp-endpoint", &collector.endpoint(), "--otlp-sampling", "0", "--model", MODEL];
    cluster.spawn_with(serve, &[&arguments[..], &["--served-name", "m", "--placement", "split"]].concat());
    cluster.wait_ready().await;
    complete(&cluster, &[("traceparent", &traceparent(OVER_HTTP, true))]).await;
    complete(&cluster, &[]).await;
    end(&mut cluster, &[serve]);
    let spans = collector.spans();
    for (name, _, parent) in TREE {
        assert_eq!(one(&spans, OVER_HTTP, name).parent, one(&spans, OVER_HTTP, parent).id, "{name}");
    }
    // None of the server's own traces is sampled.
    assert!(spans.iter().all(|span| span.trace == OVER_HTTP && span.service == "baton"), "{spans:?}");
}

/// A collector that is not there costs spans, and no request; nor does it hold up the end.
#[tokio::test(flavor = "multi_thread")]
async fn requests_do_not_need_a_collector() {
    let gone = Collector::start().endpoint();
    let mut cluster = Cluster::new(Settings::default());
    let serve = (Service::Serve, 0);
    cluster.spawn_with(serve, &["--otlp-endpoint", &gone, "--model", MODEL, "--served-name", "m"]);
    cluster.wait_ready().await;
    for _ in 0..3 {
        complete(&cluster, &[]).await;
    }
    end(&mut cluster, &[serve]);
    assert!(cluster.log(serve).contains("traces cannot be exported"), "{}", cluster.logs());
}
