//! A cluster under constant faults: streams come, leave and come again while processes are killed, stopped, cut off, parted
//! and drained, by a seed that is printed. Every token is compared with what an undisturbed cluster gives. Passed when no token was
//! wrong, no request hung, every block is back at the end, and no process that lived through all of it has grown. Prints
//! its tables, and so runs itself.
//!
//! `--minutes=N`, `--streams=N` and `--seed=N` on the command line.

mod chaos;
mod load;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use baton_tests::cluster::{Cluster, Name, Service, Settings, apart};
use baton_tests::harness::is_asked_for;
use baton_tests::{golden, quiet};

use chaos::Chaos;
use load::{Load, Outcome};

/// Minutes, in the tests.
const MINUTES: f64 = 2.0;
/// Streams at a time.
const STREAMS: usize = 50;
/// Every so many streams is one of the real engine.
const REAL_EVERY: usize = 25;

/// Blocks are back a lease of two seconds after the last request; the rest is for what was stopped to wake up.
const FREE_MAX: Duration = Duration::from_secs(6);

/// How often memory is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What a process may have grown between the first fifth and the last: a share, and what an allocator keeps anyway, KiB.
const GROWTH_MAX: (f64, f64) = (1.25, 16_384.0);

/// The processes that live through all of it: they are stopped and cut off, but not killed.
pub(crate) const ELDERS: [Name; 6] = [
    (Service::Gateway, 0),
    (Service::Router, 0),
    (Service::Prefill, 0),
    (Service::Decode, 0),
    (Service::Prefill, 9),
    (Service::Decode, 9),
];

/// Gateways, routers, prefill and decode workers with the simulated model.
const PROCESSES: [(Service, usize); 4] =
    [(Service::Gateway, 2), (Service::Router, 2), (Service::Prefill, 3), (Service::Decode, 3)];

fn main() -> ExitCode {
    if !is_asked_for("soak") {
        return ExitCode::SUCCESS;
    }
    let words: Vec<String> = std::env::args().collect();
    let minutes = number(&words, "--minutes").unwrap_or(MINUTES);
    let streams = number(&words, "--streams").map_or(STREAMS, |streams| streams as usize);
    let now = SystemTime::UNIX_EPOCH.elapsed().expect("it is later than 1970");
    let seed = number(&words, "--seed").map_or(now.as_millis() as u64 % 1_000_000, |seed| seed as u64);
    println!("soak: {minutes} minutes, {streams} streams, --seed={seed}");
    let split = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    let settings = Settings {
        model: load::MODEL.to_owned(),
        router: split("--placement auto"),
        worker: split(
            "--step-tokens 64 --kv-blocks 1024 --threads 1 --lease-ttl-seconds 2 --renew-every-seconds 0.5",
        ),
        ..Settings::default()
    };
    let period = Duration::from_secs_f64(minutes * 60.0);
    if apart(settings, move |cluster| soak(cluster, period, streams, seed)) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// The number behind a name and an equals sign on the command line.
fn number(words: &[String], name: &str) -> Option<f64> {
    let number = words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
    Some(number.parse().unwrap_or_else(|_| panic!("{name}: a number expected, {number:?} came")))
}

/// Runs it; true when all is well.
async fn soak(mut cluster: Cluster, period: Duration, streams: usize, seed: u64) -> bool {
    for (service, count) in PROCESSES {
        (0..count).for_each(|index| cluster.spawn((service, index)));
    }
    let model = golden::model().display().to_string();
    for service in [Service::Prefill, Service::Decode] {
        cluster.spawn_with((service, 9), &["--model", &model, "--served-name", load::REAL]);
    }
    cluster.wait_ready().await;
    let gateways = cluster.running(Service::Gateway);
    let gateways = gateways.into_iter().map(|name| cluster.gateway_at(name).1).collect();
    let load = Arc::new(Load::prepare(gateways, seed).await);

    let over = Arc::new(AtomicBool::new(false));
    let mut running = tokio::task::JoinSet::new();
    for stream in 0..streams {
        let (load, over) = (Arc::clone(&load), Arc::clone(&over));
        let is_real = stream % REAL_EVERY == 0;
        running.spawn(async move { load.stream(stream as u64, is_real, &over).await });
    }
    let mut chaos = Chaos::new(seed);
    let mut memory = Memory::default();
    let begun = Instant::now();
    while begun.elapsed() < period {
        memory.look(&cluster, begun.elapsed().as_secs_f64() / period.as_secs_f64());
        chaos.act(&mut cluster);
        tokio::time::sleep(LOOK_EVERY.min(chaos.pause())).await;
    }
    chaos.mend(&mut cluster).await;
    over.store(true, Ordering::Relaxed);
    let mut outcome = Outcome::default();
    while let Some(of_stream) = running.join_next().await {
        outcome.add(of_stream.expect("a stream does not panic"));
    }
    let last = Instant::now();
    let freed = quiet::quiet(&cluster, last, FREE_MAX, "after the soak").await;

    outcome.print();
    chaos.print();
    println!("\nblocks left: 0, {:.1} s after the last request", (freed - last).as_secs_f64());
    let is_flat = memory.print();
    outcome.is_well() && is_flat
}

/// Memory of the elders, KiB, in the first fifth and in the last.
#[derive(Default)]
struct Memory {
    looks: Vec<(Name, bool, u64)>,
}

impl Memory {
    fn look(&mut self, cluster: &Cluster, part: f64) {
        if (0.2..0.8).contains(&part) {
            return;
        }
        for name in ELDERS {
            self.looks.push((name, part >= 0.8, cluster.resident_kib(name)));
        }
    }

    fn mean(&self, of: Name, is_last: bool) -> f64 {
        let looks = self.looks.iter().filter(|&&(name, last, _)| (name, last) == (of, is_last));
        let kib: Vec<f64> = looks.map(|&(_, _, kib)| kib as f64).collect();
        kib.iter().sum::<f64>() / kib.len() as f64
    }

    /// Prints; true when none has grown.
    fn print(&self) -> bool {
        println!("\n| memory, MiB | first fifth | last fifth |\n|---|---|---|");
        let mut is_flat = true;
        for name in ELDERS {
            let (first, last) = (self.mean(name, false), self.mean(name, true));
            let is_more = last > first * GROWTH_MAX.0 + GROWTH_MAX.1;
            let mark = if is_more { ": has grown" } else { "" };
            let (service, index) = name;
            println!("| {service:?} {index}{mark} | {:.1} | {:.1} |", first / 1024.0, last / 1024.0);
            is_flat &= !is_more;
        }
        is_flat
    }
}
