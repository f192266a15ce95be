//! What the gateway counts. A readiness probe has the label `probe="true"` in each.

use std::sync::LazyLock;
use std::time::Duration;

use metrics::Histogram;

use crate::timing::{Part, Parts};

/// Requests by dialect and HTTP status; 499 for a client that went away.
const REQUESTS_TOTAL: &str = "baton_gateway_requests_total";
/// Requests that wait for their first token, and those that have one.
const REQUESTS: &str = "baton_gateway_requests";
/// Seconds from arrival to first token.
const TTFT: &str = "baton_gateway_ttft_seconds";
/// Seconds from one token to the next.
const ITL: &str = "baton_gateway_itl_seconds";
/// Seconds of answered requests by part: where their time went.
const PART: &str = "baton_gateway_part_seconds";
/// Calls to routers that broke, after each of which the request went on elsewhere or failed.
const LOST_TOTAL: &str = "baton_gateway_router_calls_lost_total";

/// Label of a client that went away before its answer was complete.
pub(crate) const CLIENT_GONE: u16 = 499;

/// What a request is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It has no token yet.
    Waiting,
    /// It has one.
    Running,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
        }
    }

    pub(crate) fn enter(self) {
        metrics::gauge!(REQUESTS, "state" => self.name()).increment(1.0);
    }

    pub(crate) fn leave(self) {
        metrics::gauge!(REQUESTS, "state" => self.name()).decrement(1.0);
    }
}

fn probe_label(probe: bool) -> &'static str {
    if probe { "true" } else { "false" }
}

pub(crate) fn answered(dialect: &'static str, status: u16) {
    let probe = probe_label(dialect == "probe");
    metrics::counter!(REQUESTS_TOTAL, "dialect" => dialect, "status" => status.to_string(), "probe" => probe)
        .increment(1);
}

/// Times of tokens, of probes and of others. Looked up once: a token is too frequent for a search by name and labels.
struct Times {
    probes: Histogram,
    others: Histogram,
}

impl Times {
    fn new(name: &'static str) -> Self {
        let histogram = |probe| metrics::histogram!(name, "probe" => probe_label(probe));
        Self { probes: histogram(true), others: histogram(false) }
    }

    fn record(&self, time: Duration, probe: bool) {
        if probe { &self.probes } else { &self.others }.record(time.as_secs_f64());
    }
}

pub(crate) fn first_token(after: Duration, probe: bool) {
    static TIMES: LazyLock<Times> = LazyLock::new(|| Times::new(TTFT));
    TIMES.record(after, probe);
}

pub(crate) fn next_token(after: Duration, probe: bool) {
    static TIMES: LazyLock<Times> = LazyLock::new(|| Times::new(ITL));
    TIMES.record(after, probe);
}

/// Where an answered request's time went.
pub(crate) fn parts(parts: &Parts) {
    static PARTS: LazyLock<[Histogram; Part::ALL.len()]> =
        LazyLock::new(|| Part::ALL.map(|part| metrics::histogram!(PART, "part" => part.name())));
    for (part, histogram) in Part::ALL.into_iter().zip(&*PARTS) {
        let time = parts.of(part);
        if !time.is_zero() {
            histogram.record(time.as_secs_f64());
        }
    }
}

pub(crate) fn router_lost() {
    metrics::counter!(LOST_TOTAL).increment(1);
}
