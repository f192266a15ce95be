//! Where a request's time went, over real processes: the parts add up to the time that the client waited.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use futures::StreamExt;
use http_body_util::BodyExt;
use proto::wire::generate_request::Prompt;
use proto::wire::generation_service_client::GenerationServiceClient;
use proto::wire::{GenerateRequest, Timings, TokenIds};
use serde_json::{Value, json};
use tonic::transport::Channel;

const GATEWAY: Name = (Service::Gateway, 0);
const ROUTER: Name = (Service::Router, 0);
const PREFILL: Name = (Service::Prefill, 0);

/// A step takes 2 ms.
const MODEL: &str = "sim:vocab=300,context_len=512,step_us=2000";
const STEP: f64 = 2.0;

/// Tokens of an answer.
const TOKENS: u64 = 8;

/// How far the parts may be from the time that the client waited, milliseconds.
const TOLERANCE: f64 = 1.0;

/// Requests of which one must be undisturbed by whatever else the machine does.
const TRIES: u32 = 40;

/// What a request took: in all, and each part, milliseconds.
#[derive(Clone, Debug)]
struct Took {
    total: f64,
    parts: BTreeMap<&'static str, f64>,
    /// By the client's clock.
    wall: f64,
}

impl Took {
    fn of(&self, part: &str) -> f64 {
        self.parts[part]
    }

    /// The time in which tokens were computed: those that arrive together were computed before, while nothing came.
    fn computing(&self) -> f64 {
        assert!(self.of("decode") > 0.0, "{self:?}");
        self.of("decode") + self.of("transfer") + self.of("other")
    }

    /// The parts are the whole, and none of it is outside the client's time.
    fn check(&self, what: &str) {
        let sum: f64 = self.parts.values().sum();
        assert!((sum - self.total).abs() < TOLERANCE, "{what}: parts add up to {sum} of {self:?}");
        assert!(self.parts.values().all(|part| *part >= 0.0), "{what}: {self:?}");
        assert!(self.total <= self.wall + 0.001, "{what}: {self:?}");
    }
}

const NAMES: [&str; 11] = [
    "read",
    "tokenise",
    "queue",
    "placement",
    "prefill_queue",
    "prefill",
    "transfer",
    "decode",
    "replay",
    "write",
    "other",
];

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn took(timings: &Timings, wall: Duration) -> Took {
    let t = timings;
    let micros = [
        t.read_us,
        t.tokenise_us,
        t.queue_us,
        t.placement_us,
        t.prefill_queue_us,
        t.prefill_us,
        t.transfer_us,
        t.decode_us,
        t.replay_us,
        t.write_us,
        t.other_us,
    ];
    let parts = NAMES.into_iter().zip(micros.map(|micros| micros as f64 / 1e3)).collect();
    Took { total: t.total_us as f64 / 1e3, parts, wall: milliseconds(wall) }
}

async fn client(cluster: &Cluster) -> GenerationServiceClient<Channel> {
    let address = format!("http://127.0.0.1:{}", cluster.grpc_port());
    GenerationServiceClient::connect(address).await.expect("the gateway listens")
}

/// Asks for the continuation of a prompt that no cache knows.
async fn ask(mut client: GenerationServiceClient<Channel>, round: u32, n: u32, max_tokens: u64) -> Took {
    let request = GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: (0..64).map(|id| (id + round * 7) % 290).collect() })),
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        n: Some(n),
        ..GenerateRequest::default()
    };
    let start = Instant::now();
    let mut stream = client.generate(request).await.expect("the request is taken").into_inner();
    let (mut timings, mut tokens) = (None, 0);
    while let Some(item) = stream.next().await {
        let item = item.expect("the stream is whole");
        assert!(timings.is_none(), "timings come last");
        tokens += item.tokens.len() as u64;
        timings = item.timings;
    }
    assert_eq!(tokens, u64::from(n) * max_tokens);
    took(&timings.expect("the last item has timings"), start.elapsed())
}

/// Of several requests the one for which the client's time is nearest to the server's: each adds up, and at least one
/// was undisturbed on its way.
async fn nearest(cluster: &Cluster, what: &str) -> Took {
    let client = client(cluster).await;
    let mut nearest: Option<Took> = None;
    for round in 0..TRIES {
        let took = ask(client.clone(), round, 1, TOKENS).await;
        took.check(what);
        if nearest.as_ref().is_none_or(|nearest| took.wall - took.total < nearest.wall - nearest.total) {
            nearest = Some(took);
        }
        if nearest.as_ref().is_some_and(|nearest| nearest.wall - nearest.total < TOLERANCE) {
            break;
        }
    }
    let nearest = nearest.expect("there were requests");
    let sum: f64 = nearest.parts.values().sum();
    assert!((nearest.wall - sum).abs() < TOLERANCE, "{what}: {nearest:?}");
    println!("{what}: {nearest:?}");
    nearest
}

/// The value of a `server-timing` header or trailer.
fn server_timing(value: &str) -> (f64, f64) {
    let entries = value.split(", ").map(|entry| {
        let (name, duration) = entry.split_once(";dur=").unwrap_or_else(|| panic!("{entry} in {value}"));
        (name, duration.parse::<f64>().unwrap_or_else(|_| panic!("a number: {entry}")))
    });
    let entries: Vec<_> = entries.collect();
    assert_eq!(entries[0].0, "total", "{value}");
    (entries[0].1, entries[1..].iter().map(|(_, duration)| duration).sum())
}

/// The parts in `usage`.
fn check_usage(usage: &Value, wall: f64) {
    let of = |name: &str| usage["timings"][name].as_f64().unwrap_or_else(|| panic!("{name} of {usage}"));
    let parts = NAMES.into_iter().map(|name| (name, of(&format!("{name}_ms")))).collect();
    Took { total: of("total_ms"), parts, wall }.check("usage");
}

/// The same over HTTP: in `usage` of both forms, the header of an answer in one piece, and the trailer of a stream.
async fn over_http(cluster: &Cluster) {
    let url = format!("http://127.0.0.1:{}/v1/completions", cluster.http_port());
    let http = reqwest::Client::new();
    let mut body = json!({ "model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 8, "ignore_eos": true });
    body["include_timings"] = true.into();
    let start = Instant::now();
    let answer = http.post(&url).json(&body).send().await.expect("the gateway answers");
    let header = answer.headers()["server-timing"].to_str().expect("text").to_owned();
    let whole: Value = answer.json().await.expect("JSON");
    let wall = milliseconds(start.elapsed());
    check_usage(&whole["usage"], wall);
    let (total, sum) = server_timing(&header);
    assert!((total - sum).abs() < TOLERANCE && total <= wall, "{header} of {wall} ms");

    body["stream"] = true.into();
    for trailers in [true, false] {
        let start = Instant::now();
        let mut request = http.post(&url).json(&body);
        if trailers {
            request = request.header("te", "trailers");
        }
        let answer = request.send().await.expect("the gateway answers");
        assert_eq!(answer.headers().contains_key("trailer"), trailers);
        let read = reqwest::Body::from(answer).collect().await.expect("the stream is whole");
        let wall = milliseconds(start.elapsed());
        let trailer = read.trailers().and_then(|trailers| trailers.get("server-timing")).cloned();
        let text = String::from_utf8(read.to_bytes().to_vec()).expect("UTF-8");
        let last =
            text.split("\n\n").filter(|event| event.contains("\"timings\"")).last().expect("a last chunk");
        let last: Value = serde_json::from_str(last.trim_start_matches("data: ")).expect("JSON");
        check_usage(&last["usage"], wall);
        assert_eq!(trailer.is_some(), trailers);
        if let Some(trailer) = trailer {
            let (total, sum) = server_timing(trailer.to_str().expect("text"));
            assert!((total - sum).abs() < TOLERANCE && total <= wall, "{trailer:?} of {wall} ms");
        }
    }
}

/// Lets a decode worker stop in the middle of a request, and kills it.
async fn replayed(cluster: &mut Cluster) -> Took {
    let victim = (Service::Decode, 0);
    cluster.arm(victim, "decode.decoding=return").await;
    let until = Instant::now() + PATIENCE;
    let client = client(cluster).await;
    for round in 100.. {
        let request = ask(client.clone(), round, 1, TOKENS);
        tokio::pin!(request);
        loop {
            tokio::select! {
                _ = &mut request => break,
                () = tokio::time::sleep(Duration::from_millis(10)) => {}
            }
            assert!(Instant::now() < until, "a request stops; logs:\n{}", cluster.logs());
            if cluster.log(victim).contains("fail point reached: decode.decoding") {
                cluster.kill(victim);
                return request.await;
            }
        }
    }
    unreachable!("the rounds have no end")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_each_request_took_adds_up() {
    let mut cluster = Cluster::new(Settings::default());
    for name in [PREFILL, (Service::Decode, 0), (Service::Decode, 1)] {
        cluster.spawn_with(name, &["--model", MODEL, "--served-name", "m"]);
    }
    cluster.spawn_with(ROUTER, &["--placement", "split"]);
    cluster.spawn(GATEWAY);
    cluster.wait_ready().await;

    let split = nearest(&cluster, "split").await;
    assert!(
        split.of("prefill") >= STEP && split.of("transfer") > 0.0 && split.of("replay") == 0.0,
        "{split:?}"
    );
    assert!(split.computing() >= STEP * (TOKENS - 2) as f64, "{split:?}");

    let several = ask(client(&cluster).await, 60, 2, TOKENS).await;
    several.check("n = 2");
    assert!(
        several.of("prefill") >= STEP && several.computing() >= STEP * (TOKENS - 2) as f64,
        "{several:?}"
    );

    over_http(&cluster).await;

    let replayed = replayed(&mut cluster).await;
    replayed.check("replayed");
    // What was computed is computed again, and a token follows.
    assert!(replayed.of("replay") >= STEP, "{replayed:?}");
    println!("replayed: {replayed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_fused_request_took_adds_up() {
    let mut cluster = Cluster::new(Settings::default());
    let serve = (Service::Serve, 0);
    cluster.spawn_with(serve, &["--model", MODEL, "--served-name", "m", "--placement", "fused"]);
    cluster.wait_ready().await;
    let fused = nearest(&cluster, "fused").await;
    assert!(
        fused.of("prefill") >= STEP && fused.of("transfer") == 0.0 && fused.of("replay") == 0.0,
        "{fused:?}"
    );
    assert!(fused.computing() >= STEP * (TOKENS - 1) as f64, "{fused:?}");
}
