//! What the scenarios share: a cluster with a spare of everything that finds itself through etcd, requests whose tokens are
//! known, and a stopwatch that starts with the fault.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use baton_tests::client::{Answer, Ask, Client, Watched};
use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use baton_tests::etcd::Etcd;
use baton_tests::net::BRIDGE;
use baton_tests::quiet;
use engine::sim::{SimConfig, SimModel};
use proto::{SamplingParams, StopConditions};

use crate::report::{Report, Row};

/// Blocks are back a lease of two seconds after the request at the latest; the rest is for scrapes on a busy machine.
pub(crate) const FREE_MAX: Duration = Duration::from_secs(4);

/// Tokens of a prompt, some blocks and a part of one, and of an answer.
pub(crate) const PROMPT: usize = 100;
pub(crate) const TOKENS: usize = 24;

/// Vocabulary and context of the simulated model.
pub(crate) const SHAPE: SimConfig =
    SimConfig { layers: 2, kv_heads: 1, head_dim: 4, vocab: 4096, context_len: 2048 };

/// The simulated model at that shape, with time enough for a fault in every phase.
pub(crate) const MODEL: &str = "sim:vocab=4096,context_len=2048,step_us=2000,prefill_token_us=100";

/// What a survivor says of a fault.
const KNOWS: [&str; 5] =
    ["attempt failed, replaying", "worker is lost", "router lost", "request failed", "release not delivered"];

/// Words of a command line.
pub(crate) fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// The port of etcd, which lives beside the clients.
const ETCD_PORT: u16 = 2379;

/// How these clusters are started. Registrations outlive a silence that is not for good, so nobody is a member less by it.
pub(crate) fn settings() -> Settings {
    Settings { discovery: format!("etcd:http://{BRIDGE}:{ETCD_PORT}/scenarios"), ..listed() }
}

/// The same with a list of members in a file.
pub(crate) fn listed() -> Settings {
    Settings {
        model: MODEL.to_owned(),
        router: words("--placement split --log info,router=debug"),
        worker: words("--step-tokens 32 --kv-blocks 256 --lease-ttl-seconds 2 --renew-every-seconds 0.5"),
        ..Settings::default()
    }
}

/// A cluster without a spare.
pub(crate) const ONE_OF_EACH: [(Service, usize); 4] =
    [(Service::Prefill, 1), (Service::Decode, 1), (Service::Router, 1), (Service::Gateway, 1)];

/// A cluster with a spare of all but the gateway.
pub(crate) const WITH_SPARES: [(Service, usize); 4] =
    [(Service::Prefill, 2), (Service::Decode, 2), (Service::Router, 2), (Service::Gateway, 1)];

/// When the fault was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) at: Instant,
    wall: SystemTime,
}

impl Fault {
    /// Now.
    pub(crate) fn now() -> Self {
        Self { at: Instant::now(), wall: SystemTime::now() }
    }
}

/// One cluster on which one scenario plays, fault after fault.
pub(crate) struct Scene {
    pub(crate) cluster: Cluster,
    /// Where the members register, unless they are listed.
    etcd: Option<Etcd>,
    /// Shape of the simulated model.
    pub(crate) shape: SimConfig,
    scenario: &'static str,
    report: Arc<Report>,
    round: u32,
}

impl Scene {
    /// Starts the processes, and waits until all are in place.
    pub(crate) async fn start(
        mut cluster: Cluster,
        processes: &[(Service, usize)],
        scenario: &'static str,
        report: Arc<Report>,
    ) -> Self {
        let etcd =
            if cluster.is_listed() { None } else { Some(Etcd::start_at(&BRIDGE.to_string(), ETCD_PORT)) };
        for &(service, count) in processes {
            (0..count).for_each(|index| cluster.spawn((service, index)));
        }
        let scene = Self { cluster, etcd, shape: SHAPE, scenario, report, round: 0 };
        scene.settled().await;
        scene
    }

    /// Where the members register.
    pub(crate) fn etcd(&mut self) -> &mut Etcd {
        self.etcd.as_mut().expect("the members register")
    }

    /// Waits until the gateway is ready and every router counts every worker.
    pub(crate) async fn settled(&self) {
        for worker in self.cluster.workers() {
            // A router may still count the life before.
            self.cluster.wait_log(worker, "serving grpc").await;
        }
        let until = Instant::now() + PATIENCE;
        for router in self.cluster.running(Service::Router) {
            for (service, role) in [(Service::Prefill, "prefill"), (Service::Decode, "decode")] {
                let wanted = self.cluster.running(service).len() as f64;
                let labels = [&*format!("role=\"{role}\""), "state=\"live\""];
                while self.cluster.metrics(router).await.sum("baton_router_workers", &labels) != wanted {
                    let logs = self.cluster.logs();
                    assert!(Instant::now() < until, "{router:?} sees {wanted} {role} workers; logs:\n{logs}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
        self.cluster.wait_ready().await;
    }

    /// A request that no cache knows.
    pub(crate) fn ask(&mut self) -> Ask {
        self.round += 1;
        let round = self.round;
        let prompt: Vec<u32> =
            (0..PROMPT as u32).map(|index| (round * 131 + index * 17) % SHAPE.vocab as u32).collect();
        let sampling =
            SamplingParams { temperature: 0.8, seed: u64::from(round), ..SamplingParams::default() };
        let named = format!("{}-{round}", self.scenario.replace(|c: char| !c.is_ascii_alphanumeric(), "-"));
        Ask { sampling, ..Ask::greedy(&prompt, TOKENS) }.named(&named)
    }

    /// The tokens that an undisturbed cluster gives.
    pub(crate) fn expected(&self, ask: &Ask) -> Vec<u32> {
        let stop = StopConditions { max_tokens: ask.max_tokens, ..StopConditions::default() };
        SimModel::reference(self.shape, &ask.prompt, &ask.sampling, &stop)
    }

    /// A client of the gateway with a connection of its own.
    pub(crate) fn client(&self) -> Client {
        Client::at(&self.cluster.gateway().1)
    }

    /// Sends a request and waits until it stands at a fail point of some process of the service. Whoever comes there later
    /// passes.
    pub(crate) async fn stop_one(
        &self,
        ask: &Ask,
        service: Service,
        point: &str,
        action: &str,
    ) -> (Watched, Name) {
        let client = self.client();
        self.stop_any(service, point, action, || async { client.watch(ask.clone()) }).await
    }

    /// The same for anything that sends a request.
    pub(crate) async fn stop_any<F: Future>(
        &self,
        service: Service,
        point: &str,
        action: &str,
        send: impl FnOnce() -> F,
    ) -> (F::Output, Name) {
        let names = self.cluster.running(service);
        let reached = format!("fail point reached: {point}");
        let before: Vec<usize> = names.iter().map(|&name| self.cluster.count_log(name, &reached)).collect();
        for &name in &names {
            self.cluster.arm(name, &format!("{point}={action}")).await;
        }
        let placed_before = self.placements().len();
        let running = send().await;
        let until = Instant::now() + PATIENCE;
        let stopped = loop {
            // A probe may be there before it: at a worker it is the one that was placed there.
            let is_its = |name: Name| match service {
                Service::Prefill | Service::Decode => {
                    self.placements().len() > placed_before && self.placed(service) == name
                }
                _ => true,
            };
            let mut counted = names.iter().zip(&before);
            let reached = counted
                .find(|&(&name, &before)| self.cluster.count_log(name, &reached) > before && is_its(name));
            if let Some((&name, _)) = reached {
                break name;
            }
            assert!(Instant::now() < until, "a request reaches {point}; logs:\n{}", self.cluster.logs());
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        for name in names {
            self.cluster.arm(name, &format!("{point}=off")).await;
        }
        (running, stopped)
    }

    /// What the routers have written of placing requests other than probes, in the order of time, each with its router.
    fn placements(&self) -> Vec<(String, Name)> {
        let mut placements = Vec::new();
        for router in self.cluster.running(Service::Router) {
            let log = self.cluster.log(router);
            let is_placed =
                |line: &&str| line.contains(": placed request=") && !line.contains("request=probe-");
            placements.extend(log.lines().filter(is_placed).map(|line| (line.to_owned(), router)));
        }
        placements.sort();
        placements
    }

    /// The process of the service on which a router has placed a request last: that of the client which runs alone here.
    pub(crate) fn placed(&self, service: Service) -> Name {
        let last = self.placements().pop().and_then(|(line, router)| {
            let is_at = |name: &Name| line.contains(&self.cluster.address(*name));
            match service {
                Service::Router => Some(router),
                service => self.cluster.running(service).into_iter().find(is_at),
            }
        });
        last.unwrap_or_else(|| panic!("a request was placed; logs:\n{}", self.cluster.logs()))
    }

    /// When a survivor first said that it knows.
    pub(crate) fn detected(&self, fault: Fault) -> Option<Duration> {
        let logs = self.cluster.logs();
        let knowing = logs.lines().filter(|line| KNOWS.iter().any(|word| line.contains(word)));
        let since = day_micros(fault.wall);
        let after = knowing.filter_map(line_micros).map(|at| (at + DAY_MICROS - since) % DAY_MICROS);
        after.filter(|after| *after < DAY_MICROS / 2).min().map(Duration::from_micros)
    }

    /// Whether some process wrote a line in another year than this one.
    pub(crate) fn saw_another_year(&self) -> bool {
        let logs = self.cluster.logs();
        let year = |line: &str| {
            let (year, rest) = line.split_at_checked(4)?;
            if rest.starts_with('-') { year.parse::<u32>().ok() } else { None }
        };
        let years: std::collections::BTreeSet<u32> = logs.lines().filter_map(year).collect();
        years.len() > 1
    }

    /// Waits for the end of a request, which must be right; or, if that `may_fail`, right up to an honest error.
    pub(crate) async fn end(&self, running: Watched, ask: &Ask, fault: Fault, may_fail: bool) -> Row {
        let what = format!("{}: {}", self.scenario, ask.id.as_deref().unwrap_or_default());
        let until = Instant::now() + PATIENCE;
        while !running.is_over() {
            assert!(Instant::now() < until, "{what}: the request ends; logs:\n{}", self.cluster.logs());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let over = Instant::now();
        let next = running.arrivals().into_iter().find(|at| *at > fault.at).unwrap_or(over);
        let answer = running.answer().await;
        let outcome = self.judge(&answer, ask, may_fail, &what);
        Row {
            outcome,
            detect: self.detected(fault),
            go_on: Some(next.saturating_duration_since(fault.at)),
            ..Row::default()
        }
    }

    fn judge(&self, answer: &Answer, ask: &Ask, may_fail: bool, what: &str) -> String {
        let expected = self.expected(ask);
        match &answer.error {
            None => {
                assert_eq!(answer.tokens, expected, "{what}: tokens; logs:\n{}", self.cluster.logs());
                assert!(answer.finished, "{what}: the end was said");
                "right".to_owned()
            }
            Some(error) => {
                assert!(may_fail, "{what}: {error}; logs:\n{}", self.cluster.logs());
                assert!(!answer.finished, "{what}: an end, and the error {error}");
                let until_then = &expected[..answer.tokens.len()];
                assert_eq!(answer.tokens, until_then, "{what}: tokens before the error {error}");
                "honest error".to_owned()
            }
        }
    }

    /// Blocks are back within a lease of now, and the next request is served.
    pub(crate) async fn recovered(&mut self, fault: Fault, row: Row) {
        let what = format!("{}: {}", self.scenario, row.fault);
        let free = quiet::quiet(&self.cluster, Instant::now(), FREE_MAX, &what).await;
        self.recovered_at(fault, free, row).await;
    }

    /// Blocks were back at that time; the next request is served.
    pub(crate) async fn recovered_at(&mut self, fault: Fault, free: Instant, row: Row) {
        self.next_is_served(&row.fault).await;
        self.add(Row { free: Some(free - fault.at), ..row });
    }

    /// Adds to the table.
    pub(crate) fn add(&self, row: Row) {
        self.report.add(self.scenario, row);
    }

    /// The next request is served.
    pub(crate) async fn next_is_served(&mut self, what: &str) {
        let next = self.ask();
        let answer = self.client().ask(&next).await;
        self.judge(&answer, &next, false, &format!("{}: {what}: the next request", self.scenario));
    }
}

const DAY_MICROS: u64 = 24 * 3600 * 1_000_000;

/// Microseconds since midnight, UTC.
fn day_micros(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).expect("it is later than 1970");
    since.as_micros() as u64 % DAY_MICROS
}

/// The same of a line of a log, which begins with `2026-11-30T12:34:56.789012Z`.
fn line_micros(line: &str) -> Option<u64> {
    let time = line.split_whitespace().next()?.strip_suffix('Z')?.split_once('T')?.1;
    let mut parts = time.split(':');
    let (hours, minutes) = (parts.next()?.parse::<u64>().ok()?, parts.next()?.parse::<u64>().ok()?);
    let seconds: f64 = parts.next()?.parse().ok()?;
    Some((hours * 60 + minutes) * 60_000_000 + (seconds * 1e6) as u64)
}
