//! How soon everything is free again when a client leaves, in each phase and by either protocol; how soon a peer that has
//! fallen silent is known as dead; and that a busy machine alone does not look like one. Prints one table, and so runs itself.
//!
//! `--disconnects=N` on the command line sets how many there are of each.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use baton_tests::client::{Ask, Client, Watched};
use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use baton_tests::harness::is_asked_for;
use baton_tests::quiet;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

/// The 99th percentile of the time to free, at most.
const FREE_MAX: Duration = Duration::from_millis(100);

/// A dead peer is known as such by then.
const DETECT_MAX: Duration = Duration::from_secs(2);

/// Disconnects of each phase and protocol.
const DISCONNECTS: usize = 100;

/// Peers that fall silent.
const SILENCES: usize = 5;

/// How long busy machines are tried.
const BUSY: Duration = Duration::from_secs(15);

const PREFILL: Name = (Service::Prefill, 0);

/// A prompt that takes a part of a second to compute, and one that takes longer than all that waits behind it.
const PROMPT: u32 = 320;
const LONG_PROMPT: u32 = 20_000;

/// A millisecond for each token of a prompt, and three for each step.
const MODEL: &str = "sim:vocab=4096,context_len=32768,step_us=3000,prefill_token_us=1000";

/// Where the request is when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Queued,
    Prefilling,
    Transferring,
    Decoding,
}

/// How the client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Rest,
    Grpc,
}

/// A request that is under way. Dropping it is leaving.
enum Leaving {
    #[expect(dead_code, reason = "a guard: only its drop matters")]
    Rest(TcpStream),
    #[expect(dead_code, reason = "a guard: only its drop matters")]
    Grpc(Watched),
}

/// A cluster, and prompts that no cache knows.
struct Stage {
    cluster: Cluster,
    client: Client,
    round: u32,
}

impl Stage {
    async fn start(worker: &str, processes: &[(Service, usize)]) -> Self {
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
        let settings = Settings {
            model: MODEL.to_owned(),
            router: words("--placement split"),
            worker: words(worker),
            ..Settings::default()
        };
        let mut cluster = Cluster::new(settings);
        for &(service, count) in processes {
            (0..count).for_each(|index| cluster.spawn((service, index)));
        }
        cluster.wait_ready().await;
        let client = Client::at(&cluster.gateway().1);
        Self { cluster, client, round: 0 }
    }

    fn ask(&mut self, len: u32, max_tokens: usize) -> Ask {
        self.round += 1;
        let prompt: Vec<u32> =
            (0..len).map(|index| (self.round * 131 + index * 17 + index / 4096) % 4096).collect();
        Ask::greedy(&prompt, max_tokens)
    }

    async fn send(&self, ask: &Ask, protocol: Protocol) -> Leaving {
        if protocol == Protocol::Grpc {
            return Leaving::Grpc(self.client.clone().watch(ask.clone()));
        }
        let address = self.cluster.gateway().0;
        let body = serde_json::json!({ "prompt": ask.prompt, "max_tokens": ask.max_tokens, "stream": true,
            "ignore_eos": true })
        .to_string();
        let head = format!(
            "POST /generate HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let mut connection = TcpStream::connect(&address).await.expect("the gateway listens");
        connection.write_all((head + &body).as_bytes()).await.expect("the gateway reads");
        Leaving::Rest(connection)
    }

    /// Sequences of a worker in a state.
    async fn sequences(&self, name: Name, state: &str) -> f64 {
        let label = format!("state=\"{state}\"");
        self.cluster.metrics(name).await.sum("baton_engine_sequences", &[&label])
    }

    /// Waits until the request is in the phase.
    async fn reached(&self, phase: Phase, stands: usize) {
        let until = Instant::now() + PATIENCE;
        let decode = (Service::Decode, 0);
        loop {
            let is_there = match phase {
                Phase::Queued => self.sequences(PREFILL, "waiting").await == 1.0,
                Phase::Prefilling => self.sequences(PREFILL, "running").await == 1.0,
                Phase::Transferring => {
                    self.cluster.count_log(decode, "fail point reached: decode.transferring") > stands
                }
                Phase::Decoding => self.sequences(decode, "running").await == 1.0,
            };
            if is_there {
                return;
            }
            assert!(Instant::now() < until, "{phase:?} is reached; logs:\n{}", self.cluster.logs());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Waits until nothing is left of the request, beside what the queue waits behind.
    async fn freed(&self, phase: Phase, left: Instant) -> Duration {
        loop {
            let is_free = match phase {
                Phase::Queued => self.sequences(PREFILL, "waiting").await == 0.0,
                _ => quiet::busy(&self.cluster).await.is_empty(),
            };
            if is_free {
                return left.elapsed();
            }
            let logs = || self.cluster.logs();
            assert!(left.elapsed() < Duration::from_secs(12), "free after {phase:?}; logs:\n{}", logs());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Times, in order.
struct Times(Vec<Duration>);

impl Times {
    fn new(mut times: Vec<Duration>) -> Self {
        times.sort();
        Self(times)
    }

    /// The value that so many of a hundred are not above.
    fn percentile(&self, percent: usize) -> Duration {
        self.0[(self.0.len() * percent).div_ceil(100) - 1]
    }

    fn row(&self, what: &str) {
        let millis = |percent| self.percentile(percent).as_secs_f64() * 1e3;
        println!(
            "| {what} | {} | {:.1} | {:.1} | {:.1} |",
            self.0.len(),
            millis(50),
            millis(99),
            millis(100)
        );
    }
}

/// Clients leave in each phase.
async fn disconnects(count: usize, late: &mut Vec<String>) {
    let mut stage = Stage::start(
        "--step-tokens 8 --kv-blocks 3000 --sequences-max 1",
        &[(Service::Prefill, 1), (Service::Decode, 1), (Service::Router, 1), (Service::Gateway, 1)],
    )
    .await;
    for phase in [Phase::Queued, Phase::Prefilling, Phase::Transferring, Phase::Decoding] {
        for protocol in [Protocol::Rest, Protocol::Grpc] {
            if phase == Phase::Transferring {
                stage.cluster.arm((Service::Decode, 0), "decode.transferring=return").await;
            }
            let mut ahead: Option<Watched> = None;
            let mut times = Vec::new();
            while times.len() < count {
                if phase == Phase::Queued && ahead.as_ref().is_none_or(Watched::is_over) {
                    let long = stage.ask(LONG_PROMPT, 1);
                    ahead = Some(stage.client.clone().watch(long));
                    stage.reached(Phase::Prefilling, 0).await;
                }
                let ask = match phase {
                    Phase::Prefilling => stage.ask(PROMPT, 400),
                    _ => stage.ask(20, 400),
                };
                let stands =
                    stage.cluster.count_log((Service::Decode, 0), "fail point reached: decode.transferring");
                let leaving = stage.send(&ask, protocol).await;
                stage.reached(phase, stands).await;
                if ahead.as_ref().is_some_and(Watched::is_over) {
                    // It was not waiting any more.
                    continue;
                }
                let left = Instant::now();
                drop(leaving);
                times.push(stage.freed(phase, left).await);
            }
            if let Some(ahead) = ahead {
                drop(ahead);
                stage.freed(Phase::Prefilling, Instant::now()).await;
            }
            if phase == Phase::Transferring {
                stage.cluster.arm((Service::Decode, 0), "decode.transferring=off").await;
            }
            let times = Times::new(times);
            let what = format!("free, client leaves while {phase:?}, {protocol:?}").to_lowercase();
            times.row(&what);
            if times.percentile(99) > FREE_MAX {
                late.push(format!("{what}: 99th percentile {:?}", times.percentile(99)));
            }
        }
    }
}

/// A decode worker stands still while it decodes, and its spare goes on.
async fn silences(late: &mut Vec<String>) {
    let mut stage = Stage::start(
        "--step-tokens 64 --kv-blocks 512",
        &[(Service::Prefill, 1), (Service::Decode, 2), (Service::Router, 1), (Service::Gateway, 1)],
    )
    .await;
    let mut times = Vec::new();
    for _ in 0..SILENCES {
        let ask = stage.ask(20, 600);
        let running = stage.client.clone().watch(ask);
        while running.arrivals().len() < 10 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut victim = None;
        for index in 0..2 {
            if stage.sequences((Service::Decode, index), "running").await == 1.0 {
                victim = Some((Service::Decode, index));
            }
        }
        let victim = victim.expect("one of them decodes");
        // From its router: what it replays goes on with the next token.
        let retries = || async {
            stage.cluster.metrics((Service::Router, 0)).await.sum("baton_router_retries_total", &[])
        };
        let before = retries().await;
        stage.cluster.signal(victim, "STOP");
        let stopped = Instant::now();
        while retries().await == before {
            assert!(stopped.elapsed() < PATIENCE, "a dead peer is known; logs:\n{}", stage.cluster.logs());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        times.push(stopped.elapsed());
        stage.cluster.signal(victim, "CONT");
        assert_eq!(running.answer().await.error, None);
        quiet::quiet(&stage.cluster, Instant::now(), Duration::from_secs(12), "after a silence").await;
        stage.cluster.wait_ready().await;
        // The router asks again who is there.
        tokio::time::sleep(Duration::from_millis(1200)).await;
    }
    let times = Times::new(times);
    times.row("known as dead, a decode worker that stands still");
    if times.percentile(100) > DETECT_MAX {
        late.push(format!("a dead peer was known after {:?}", times.percentile(100)));
    }
}

/// Every core has twice as much to do as it can, at the priority of the cluster itself, while streams run.
async fn busy_machine() {
    let mut stage = Stage::start(
        "--step-tokens 64 --kv-blocks 2048",
        &[(Service::Prefill, 2), (Service::Decode, 2), (Service::Router, 2), (Service::Gateway, 1)],
    )
    .await;
    let stop = Arc::new(AtomicBool::new(false));
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let load: Vec<_> = (0..2 * cores)
        .map(|_| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
        })
        .collect();
    let begun = Instant::now();
    let mut requests = 0;
    while begun.elapsed() < BUSY {
        let asks: Vec<_> = (0..16).map(|_| stage.ask(100, 100)).collect();
        for answer in stage.client.ask_all(&asks).await {
            assert_eq!((answer.error, answer.tokens.len()), (None, 100));
            requests += 1;
        }
    }
    stop.store(true, Ordering::Relaxed);
    load.into_iter().for_each(|load| load.join().expect("it counts nothing"));
    let logs = stage.cluster.logs();
    let alarms = ["worker is lost", "router lost", "attempt failed"].map(|word| logs.matches(word).count());
    println!(
        "\nfalse alarms under full load: {} in {BUSY:?} and {requests} requests",
        alarms.iter().sum::<usize>()
    );
    assert_eq!(alarms, [0; 3], "a busy peer is no dead one; logs:\n{logs}");
}

#[tokio::main]
async fn main() -> ExitCode {
    if !is_asked_for("freeing") {
        return ExitCode::SUCCESS;
    }
    let named = std::env::args().find_map(|word| word.strip_prefix("--disconnects=").map(str::to_owned));
    let count = named.map_or(DISCONNECTS, |number| number.parse().expect("--disconnects: a number expected"));
    let mut late = Vec::new();
    println!("\n| time, ms | times | median | 99th percentile | longest |\n|---|---|---|---|---|");
    disconnects(count, &mut late).await;
    silences(&mut late).await;
    busy_machine().await;
    if late.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("\ntoo late: {}", late.join("; "));
    ExitCode::FAILURE
}
