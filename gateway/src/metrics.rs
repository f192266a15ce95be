//! What the gateway counts. A readiness probe has the label `probe="true"` in each.

use std::sync::LazyLock;
use std::time::Duration;

use metrics::{Counter, Histogram, Unit, describe_counter, describe_gauge, describe_histogram};

use crate::timing::{Part, Parts};

/// Requests by dialect and HTTP status; 499 for a client that went away.
pub(crate) const REQUESTS_TOTAL: &str = "baton_gateway_requests_total";
/// Requests that wait for their first token, and those that have one.
pub(crate) const REQUESTS: &str = "baton_gateway_requests";
/// Seconds from arrival to first token.
pub(crate) const TTFT: &str = "baton_gateway_ttft_seconds";
/// Seconds from one token to the next.
pub(crate) const ITL: &str = "baton_gateway_itl_seconds";
/// Tokens of prompts, of requests that were taken.
const PROMPT_TOKENS: &str = "baton_gateway_prompt_tokens_total";
/// Those of them whose KV was there already.
const CACHED_TOKENS: &str = "baton_gateway_prompt_tokens_cached_total";
/// Tokens that went to clients.
const GENERATED_TOKENS: &str = "baton_gateway_generated_tokens_total";
/// Seconds of answered requests by part: where their time went.
const PART: &str = "baton_gateway_part_seconds";
/// Calls to routers that broke, after each of which the request went on elsewhere or failed.
const LOST_TOTAL: &str = "baton_gateway_router_calls_lost_total";

/// Names and explains every metric of the gateway.
pub(crate) fn describe() {
    describe_counter!(
        REQUESTS_TOTAL,
        "Requests that ended, by dialect, HTTP status and whether a probe; 499 for a client that went away."
    );
    describe_gauge!(REQUESTS, "Requests by state: waiting for their first token, or running.");
    describe_histogram!(
        TTFT,
        Unit::Seconds,
        "From arrival to first token, never of a request that brings tokens, by whether a probe."
    );
    describe_histogram!(ITL, Unit::Seconds, "From one token of a sequence to the next, by whether a probe.");
    describe_histogram!(PART, Unit::Seconds, "Parts of the time of answered requests.");
    describe_counter!(PROMPT_TOKENS, "Tokens of prompts.");
    describe_counter!(CACHED_TOKENS, "Tokens of prompts whose KV was there already.");
    describe_counter!(GENERATED_TOKENS, "Tokens that were generated for clients.");
    describe_counter!(LOST_TOTAL, "Calls to routers that broke.");
    for state in [State::Waiting, State::Running] {
        metrics::gauge!(REQUESTS, "state" => state.name()).increment(0.0);
    }
    for name in [PROMPT_TOKENS, CACHED_TOKENS, GENERATED_TOKENS, LOST_TOTAL] {
        metrics::counter!(name).increment(0);
    }
}

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

/// A prompt of so many tokens was taken.
pub(crate) fn prompt(tokens: usize) {
    metrics::counter!(PROMPT_TOKENS).increment(tokens as u64);
}

/// Of a prompt so many tokens were there already.
pub(crate) fn cached(tokens: usize) {
    metrics::counter!(CACHED_TOKENS).increment(tokens as u64);
}

/// A token was generated.
pub(crate) fn generated() {
    static COUNTER: LazyLock<Counter> = LazyLock::new(|| metrics::counter!(GENERATED_TOKENS));
    COUNTER.increment(1);
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
