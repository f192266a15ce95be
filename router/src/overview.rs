//! The cluster as this router sees it, for its dashboard and its gateways': members, load, requests, the last minutes.
//!
//! Every two seconds this reads what workers report ([`node::figures`]) and what this process counts, and keeps an overview
//! that whoever asks gets at once. Nothing that serves a request waits for it. Of many workers it asks some each time while
//! nobody looks, so that what it costs does not grow with them.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::{StreamExt, stream};
use node::Context;
use node::figures::Figures;
use node::history::History;
use proto::wire;
use serde::Serialize;
use tonic::{Request, Response, Status};

use crate::cluster::Cluster;
use crate::pools::MemberDump;

/// Pause between two looks.
const EVERY: Duration = Duration::from_secs(2);
/// Longest wait for a worker's figures.
const FIGURES_TIME_MAX: Duration = Duration::from_secs(1);
/// Most workers that are asked at once.
const AT_ONCE_MAX: usize = 32;
/// Most workers that are asked in one look while nobody reads what comes of it.
const ASKED_MAX: usize = 100;
/// How long after one read another is to be expected.
const READ_AGAIN: Duration = Duration::from_secs(10);
/// Share of KV blocks that are neither free nor reclaimable from which on a worker is short of them.
const KV_SHORT: f64 = 0.95;

/// The state of a member that does not answer.
const LOST: &str = "lost";

/// Requests of clients, not of probes.
const CLIENTS: &[(&str, &str)] = &[("probe", "false")];

/// The latest overview.
pub(crate) struct Overview {
    latest: Mutex<Arc<[u8]>>,
    /// When somebody read it last.
    read: Mutex<Option<Instant>>,
}

/// An overview as it is shown.
#[derive(Debug, Serialize)]
struct Page {
    /// When it was made, milliseconds of Unix time.
    at_ms: u64,
    /// Pause between two.
    every_ms: u64,
    workers: Vec<WorkerRow>,
    /// Requests of this router by state.
    requests: BTreeMap<String, f64>,
    /// Requests that ended since it started, by outcome; attempts that were replayed, by cause; placements by kind.
    ended: BTreeMap<String, f64>,
    retries: BTreeMap<String, f64>,
    placements: BTreeMap<String, f64>,
    /// Transfers that failed since their workers started, by cause.
    transfer_failures: BTreeMap<String, f64>,
    alerts: Vec<Alert>,
    history: History,
}

/// A worker.
#[derive(Debug, Serialize)]
struct WorkerRow {
    #[serde(flatten)]
    member: MemberDump,
    /// What it reports; none before it did first.
    report: Option<Report>,
    /// Since it reported, milliseconds.
    report_age_ms: Option<u64>,
    /// Why it did not report last time.
    report_error: Option<String>,
}

/// What a worker reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Report {
    /// KV blocks by state. Held ones are used ones, too.
    blocks: BTreeMap<String, f64>,
    /// Sequences by state.
    sequences: BTreeMap<String, f64>,
    leases: f64,
    orphaned_blocks: f64,
    tokens_per_second: Option<f64>,
    bytes_in_per_second: Option<f64>,
    bytes_out_per_second: Option<f64>,
    /// Share of the time that the engine computed.
    busy: Option<f64>,
}

/// Something that somebody should look at.
#[derive(Debug, PartialEq, Serialize)]
struct Alert {
    severity: Severity,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    /// Something is lost or wrong.
    Fault,
    /// Something may become so.
    Warning,
}

impl Overview {
    /// Nothing seen yet.
    pub(crate) fn new() -> Self {
        Self { latest: Mutex::new(b"null".as_slice().into()), read: Mutex::new(None) }
    }

    /// The latest overview: JSON, `null` before the first.
    pub(crate) fn json(&self) -> Arc<[u8]> {
        *lock(&self.read) = Some(Instant::now());
        Arc::clone(&lock(&self.latest))
    }

    /// Looks again and again. Runs until dropped.
    pub(crate) async fn keep(self: Arc<Self>, cluster: Arc<Cluster>, context: Context) {
        let mut watch = Watch::default();
        let mut every = tokio::time::interval(EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let members = cluster.pools().members();
            let is_read = lock(&self.read).is_some_and(|read| read.elapsed() < READ_AGAIN);
            let page = watch.look(members, if is_read { usize::MAX } else { ASKED_MAX }, &context).await;
            match serde_json::to_vec(&page) {
                Ok(json) => *lock(&self.latest) = json.into(),
                Err(error) => tracing::error!(%error, "the overview cannot be written"),
            }
        }
    }
}

/// Serves an overview to gateways.
pub(crate) struct OverviewService(pub(crate) Arc<Overview>);

#[tonic::async_trait]
impl wire::overview_server::Overview for OverviewService {
    async fn look(
        &self,
        _request: Request<wire::LookRequest>,
    ) -> Result<Response<wire::OverviewPage>, Status> {
        Ok(Response::new(wire::OverviewPage { json: self.0.json().to_vec() }))
    }
}

/// What was seen before, to which the next look is compared.
#[derive(Default)]
struct Watch {
    workers: BTreeMap<String, Watched>,
    own: Option<Figures>,
    history: History,
    /// Looks so far.
    looks: u64,
}

/// A worker that was seen.
#[derive(Default)]
struct Watched {
    /// The look in which it was asked last.
    asked: u64,
    /// The life that `figures` are of, and when they were read.
    epoch: Option<String>,
    figures: Option<(Duration, Figures)>,
    report: Option<Report>,
    error: Option<String>,
    change: Change,
}

/// What changed at a worker from one read to the next: bytes that moved and prompt tokens that came, each second, and
/// transfers that failed.
#[derive(Clone, Copy, Default)]
struct Change {
    bytes: f64,
    cached: f64,
    computed: f64,
    /// Nothing once it was told.
    failures: f64,
}

impl Watch {
    /// Asks `asked_max` of the members, those first that were asked longest ago.
    async fn look(&mut self, members: Vec<MemberDump>, asked_max: usize, context: &Context) -> Page {
        let asked = self.whom_to_ask(&members, asked_max);
        let answers = stream::iter(asked).map(|address| {
            let network = context.network.clone();
            async move {
                let figures = Figures::of_worker(&network, &address, FIGURES_TIME_MAX).await;
                (address, figures)
            }
        });
        let mut answers: BTreeMap<_, _> = answers.buffer_unordered(AT_ONCE_MAX).collect().await;
        let now = context.clock.now();
        for member in &members {
            let watched = self.workers.entry(member.address.clone()).or_default();
            match answers.remove(&member.address) {
                Some(Ok(figures)) => watched.take(figures, member.epoch.as_ref(), now),
                Some(Err(status)) => watched.fail(status.message().to_owned()),
                None if member.state == LOST => watched.fail("it is lost".to_owned()),
                None => {}
            }
        }
        self.page(members, now)
    }

    fn whom_to_ask(&mut self, members: &[MemberDump], asked_max: usize) -> Vec<String> {
        self.looks += 1;
        let named: HashSet<&str> = members.iter().map(|member| member.address.as_str()).collect();
        self.workers.retain(|address, _| named.contains(address.as_str()));
        // A worker that is lost would only be waited for.
        let able = members.iter().filter(|member| member.state != LOST);
        let asked = |address: &String| self.workers.get(address).map_or(0, |watched| watched.asked);
        let mut able: Vec<_> = able.map(|member| (asked(&member.address), member.address.clone())).collect();
        able.sort();
        able.truncate(asked_max);
        for (_, address) in &able {
            self.workers.entry(address.clone()).or_default().asked = self.looks;
        }
        able.into_iter().map(|(_, address)| address).collect()
    }

    fn page(&mut self, members: Vec<MemberDump>, now: Duration) -> Page {
        let own = Figures::own().unwrap_or_default();
        let at_ms = unix_milliseconds();
        let row = self.row(&own);
        self.history.push(at_ms, &row);
        self.workers.values_mut().for_each(|watched| watched.change.failures = 0.0);
        let mut transfer_failures = BTreeMap::new();
        for (_, figures) in self.workers.values().filter_map(|watched| watched.figures.as_ref()) {
            for (cause, count) in figures.by("baton_worker_kv_transfer_failures_total", &[], "cause") {
                *transfer_failures.entry(cause).or_default() += count;
            }
        }
        let workers: Vec<WorkerRow> = members
            .into_iter()
            .map(|member| {
                let watched = &self.workers[&member.address];
                let age = watched.figures.as_ref().map(|(at, _)| now.saturating_sub(*at).as_millis() as u64);
                WorkerRow {
                    report: watched.report.clone(),
                    report_age_ms: age,
                    report_error: watched.error.clone(),
                    member,
                }
            })
            .collect();
        let page = Page {
            at_ms,
            every_ms: EVERY.as_millis() as u64,
            alerts: workers.iter().flat_map(alerts).collect(),
            workers,
            requests: own.by("baton_router_requests", &[], "state"),
            ended: own.by("baton_router_requests_total", CLIENTS, "outcome"),
            retries: own.by("baton_router_retries_total", CLIENTS, "cause"),
            placements: own.by("baton_router_placements_total", CLIENTS, "kind"),
            transfer_failures,
            history: self.history.clone(),
        };
        self.own = Some(own);
        page
    }

    /// The moment's numbers.
    fn row(&self, own: &Figures) -> Vec<(&'static str, Option<f64>)> {
        let before = self.own.as_ref();
        let counted = |name| {
            Some((own.sum(name, CLIENTS).unwrap_or(0.0) - before?.sum(name, CLIENTS).unwrap_or(0.0)).max(0.0))
        };
        let sum = |part: fn(&Change) -> f64| {
            self.workers.values().map(|watched| part(&watched.change)).sum::<f64>()
        };
        let reports = || self.workers.values().filter_map(|watched| watched.report.as_ref());
        let blocks = |state: &str| reports().filter_map(|report| report.blocks.get(state)).sum::<f64>();
        let (cached, computed) = (sum(|change| change.cached), sum(|change| change.computed));
        let total = blocks("free") + blocks("cached") + blocks("used");
        let in_flight = own.sum("baton_router_requests", &[]);
        vec![
            ("requests", in_flight),
            ("retries", counted("baton_router_retries_total")),
            ("ended", counted("baton_router_requests_total")),
            ("transfer_bytes_per_second", before.map(|_| sum(|change| change.bytes))),
            ("transfer_failures", before.map(|_| sum(|change| change.failures))),
            ("prefix_hits", (cached + computed > 0.0).then(|| cached / (cached + computed))),
            ("kv_used", (total > 0.0).then(|| blocks("used") / total)),
            (
                "worker_tokens_per_second",
                before.map(|_| reports().filter_map(|report| report.tokens_per_second).sum()),
            ),
        ]
    }
}

impl Watched {
    fn fail(&mut self, error: String) {
        self.error = Some(error);
        self.change = Change::default();
        if let Some(report) = &mut self.report {
            (report.tokens_per_second, report.busy) = (None, None);
            (report.bytes_in_per_second, report.bytes_out_per_second) = (None, None);
        }
    }

    fn take(&mut self, figures: Figures, epoch: Option<&String>, now: Duration) {
        // Counters of another life began anew.
        let before = self.figures.take().filter(|_| self.epoch.as_ref() == epoch);
        let since = |name: &str, labels: &[(&str, &str)]| {
            let (_, before) = before.as_ref()?;
            Some(
                (figures.sum(name, labels).unwrap_or(0.0) - before.sum(name, labels).unwrap_or(0.0)).max(0.0),
            )
        };
        let seconds = before.as_ref().map(|(at, _)| now.saturating_sub(*at).as_secs_f64());
        let rate = |name: &str, labels: &[(&str, &str)]| Some(since(name, labels)? / seconds?);
        let moved = |direction| rate("baton_worker_kv_transfer_bytes_total", &[("direction", direction)]);
        let prompts = |source| {
            let labels = [("source", source), ("probe", "false")];
            rate("baton_engine_prompt_tokens_total", &labels).unwrap_or(0.0)
        };
        self.change = Change {
            // What one sends another receives.
            bytes: moved("in").unwrap_or(0.0),
            failures: since("baton_worker_kv_transfer_failures_total", &[]).unwrap_or(0.0),
            cached: prompts("cached"),
            computed: prompts("computed"),
        };
        self.report = Some(Report {
            blocks: figures.by("baton_engine_kv_blocks", &[], "state"),
            sequences: figures.by("baton_engine_sequences", &[], "state"),
            leases: figures.sum("baton_worker_leases", &[]).unwrap_or(0.0),
            orphaned_blocks: figures.sum("baton_worker_kv_blocks_orphaned", &[]).unwrap_or(0.0),
            tokens_per_second: rate("baton_engine_step_tokens_sum", &[]),
            bytes_in_per_second: moved("in"),
            bytes_out_per_second: moved("out"),
            busy: rate("baton_engine_step_seconds_sum", &[]).map(|share| share.min(1.0)),
        });
        self.error = None;
        self.epoch = epoch.cloned();
        self.figures = Some((now, figures));
    }
}

/// What is to be looked at in a worker.
fn alerts(row: &WorkerRow) -> Vec<Alert> {
    let WorkerRow { member, report, report_error, .. } = row;
    let name = format!("{} worker {}", member.role, member.address);
    let mut alerts = Vec::new();
    let mut add = |severity, text: String| alerts.push(Alert { severity, text: format!("{name} {text}") });
    let reason = member.reason.as_deref().unwrap_or("it has not said why");
    match member.state {
        LOST => add(Severity::Fault, format!("is lost: {reason}")),
        "refused" => add(Severity::Fault, format!("is refused: {reason}")),
        _ => {
            if let Some(error) = report_error {
                add(Severity::Warning, format!("does not report its figures: {error}"));
            }
        }
    }
    let Some(report) = report else { return alerts };
    if report.orphaned_blocks > 0.0 {
        add(Severity::Fault, format!("holds {} KV blocks that nobody owns", report.orphaned_blocks));
    }
    let blocks = |state: &str| report.blocks.get(state).copied().unwrap_or(0.0);
    let (used, total) = (blocks("used"), blocks("free") + blocks("cached") + blocks("used"));
    if total > 0.0 && used / total >= KV_SHORT {
        add(Severity::Warning, format!("is short of KV: {used} of {total} blocks are in use"));
    }
    alerts
}

fn unix_milliseconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(state: &'static str, reason: Option<&str>) -> MemberDump {
        MemberDump {
            address: "h:1".into(),
            role: "decode",
            state,
            reason: reason.map(ToOwned::to_owned),
            epoch: Some("7".into()),
            model: Some("m".into()),
            placed: 0,
            sequences: 0,
            blocks_total: 100,
            blocks_free: 1,
        }
    }

    fn texts(row: &WorkerRow) -> Vec<String> {
        alerts(row).into_iter().map(|alert| format!("{:?}: {}", alert.severity, alert.text)).collect()
    }

    #[test]
    fn what_is_wrong_with_a_worker_is_said() {
        let row = |member, report, report_error: Option<&str>| WorkerRow {
            member,
            report,
            report_age_ms: None,
            report_error: report_error.map(ToOwned::to_owned),
        };
        assert_eq!(texts(&row(member("live", None), None, None)), [""; 0]);
        assert_eq!(
            texts(&row(member("lost", Some("no answer")), None, Some("it is lost"))),
            ["Fault: decode worker h:1 is lost: no answer"]
        );
        let blocks = [("free", 1.0), ("cached", 2.0), ("used", 97.0)];
        let blocks = blocks.map(|(state, count)| (state.to_owned(), count)).into();
        let report = Report { blocks, orphaned_blocks: 3.0, ..Report::default() };
        assert_eq!(
            texts(&row(member("live", None), Some(report), Some("late"))),
            [
                "Warning: decode worker h:1 does not report its figures: late",
                "Fault: decode worker h:1 holds 3 KV blocks that nobody owns",
                "Warning: decode worker h:1 is short of KV: 97 of 100 blocks are in use",
            ]
        );
    }

    #[test]
    fn of_many_workers_those_are_asked_first_that_were_asked_longest_ago() {
        let named = |state, name: &str| MemberDump { address: name.into(), ..member(state, None) };
        let mut members =
            vec![named("live", "a"), named("lost", "b"), named("live", "c"), named("live", "d")];
        let mut watch = Watch::default();
        assert_eq!(watch.whom_to_ask(&members, 2), ["a", "c"]);
        assert_eq!(watch.whom_to_ask(&members, 2), ["d", "a"]);
        members[1] = named("live", "b");
        members.pop();
        assert_eq!(watch.whom_to_ask(&members, 2), ["b", "c"]);
        assert_eq!(watch.whom_to_ask(&members, usize::MAX), ["a", "b", "c"]);
        assert!(!watch.workers.contains_key("d"));
    }

    #[test]
    fn rates_are_those_of_one_life() {
        let figures = |tokens: u32, bytes: u32| {
            Figures::parse(&format!(
                "baton_engine_step_tokens_sum{{worker=\"d\"}} {tokens}\n\
                 baton_worker_kv_transfer_bytes_total{{direction=\"in\",worker=\"d\"}} {bytes}\n"
            ))
        };
        let at = Duration::from_secs;
        let (one, other) = ("1".to_owned(), "2".to_owned());
        let mut watched = Watched::default();
        let rates = |watched: &Watched| {
            let report = watched.report.clone().unwrap();
            (report.tokens_per_second, report.bytes_in_per_second)
        };
        watched.take(figures(10, 100), Some(&one), at(1));
        assert_eq!(rates(&watched), (None, None));
        watched.take(figures(30, 500), Some(&one), at(3));
        assert_eq!(rates(&watched), (Some(10.0), Some(200.0)));
        assert_eq!(watched.change.bytes, 200.0);
        watched.take(figures(5, 5), Some(&other), at(5));
        assert_eq!(rates(&watched), (None, None));
        watched.take(figures(9, 5), Some(&other), at(7));
        assert_eq!(rates(&watched), (Some(2.0), Some(0.0)));
        watched.fail("gone".into());
        assert_eq!((rates(&watched), watched.change.bytes), ((None, None), 0.0));
    }
}
