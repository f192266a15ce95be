//! The router's metrics.

use std::collections::BTreeMap;

use metrics::{Counter, Gauge, counter, describe_counter, describe_gauge, gauge};
use proto::{Error, PlacementKind, Reason, Role};

use crate::dispatch::RequestState;
use crate::follow::Cause;
use crate::index::PrefixIndex;
use crate::pools::WorkerState;

/// Names and explains every metric of the router.
pub(crate) fn describe() {
    describe_gauge!("baton_router_requests", "Requests by state.");
    describe_counter!(
        "baton_router_requests_total",
        "Requests that ended, by outcome, OK or the reason, and whether of a probe."
    );
    describe_counter!(
        "baton_router_retries_total",
        "Attempts that were followed by another, by cause and whether of a probe."
    );
    describe_counter!(
        "baton_router_placements_total",
        "Placements by kind, split or fused, and whether of a probe."
    );
    describe_counter!(
        "baton_router_moves_total",
        "Sequences that a decode worker gave away, by outcome: OK or why they were replayed."
    );
    describe_gauge!("baton_router_workers", "Members by role and state.");
    describe_counter!("baton_router_workers_refused_total", "Workers refused for a mismatch, by reason.");
    describe_counter!(
        "baton_router_prefix_requests_total",
        "Prompts computed, by whether a part was cached."
    );
    describe_counter!(
        "baton_router_prefix_tokens_total",
        "Tokens of prompts: cached where they were placed, or computed."
    );
    describe_gauge!("baton_router_prefix_index_bytes", "Memory that the index of KV blocks takes.");
    describe_gauge!("baton_router_prefix_index_blocks", "KV blocks that the index knows.");
    describe_counter!("baton_router_prefix_index_evictions_total", "KV blocks forgotten for want of memory.");
    describe_counter!(
        "baton_router_resyncs_total",
        "Watches opened anew since something was missing, by cause."
    );
    describe_gauge!(
        "baton_router_workers_spared",
        "Workers that failed again and again, and are chosen where there is no other, or to try them."
    );
    describe_counter!("baton_router_rejections_total", "Requests refused before they were placed, by cause.");
    for cause in ["deadline", "capacity"] {
        counter!("baton_router_rejections_total", "cause" => cause).increment(0);
    }
    for cause in Cause::ALL {
        counter!("baton_router_resyncs_total", "cause" => cause.name()).increment(0);
    }
    // A state that no request is in reads 0, not nothing.
    for state in RequestState::ALL {
        gauge!("baton_router_requests", "state" => state.name()).increment(0.0);
    }
}

/// A request ended.
pub(crate) fn ended(result: &Result<(), Error>, probe: bool) {
    let outcome = match result {
        Ok(()) => "OK",
        Err(error) => error.reason.name(),
    };
    counter!("baton_router_requests_total", "outcome" => outcome, "probe" => label(probe)).increment(1);
}

/// Readiness probes are told apart from what clients ask.
fn label(probe: bool) -> &'static str {
    if probe { "true" } else { "false" }
}

/// An attempt failed and another follows.
pub(crate) fn retried(cause: Reason, probe: bool) {
    counter!("baton_router_retries_total", "cause" => cause.name(), "probe" => label(probe)).increment(1);
}

/// An attempt was placed.
pub(crate) fn placed(kind: PlacementKind, probe: bool) {
    counter!("baton_router_placements_total", "kind" => kind.name(), "probe" => label(probe)).increment(1);
}

/// A sequence that a decode worker gave away goes on at another, or does not.
pub(crate) fn moved(outcome: &Result<(), Error>) {
    let outcome = outcome.as_ref().map_or_else(|error| error.reason.name(), |()| "OK");
    counter!("baton_router_moves_total", "outcome" => outcome).increment(1);
}

/// A prompt of so many tokens was computed, of which a worker had some.
pub(crate) fn prompt_computed(tokens: usize, cached: usize) {
    let outcome = if cached > 0 { "hit" } else { "miss" };
    counter!("baton_router_prefix_requests_total", "outcome" => outcome).increment(1);
    let computed = tokens.saturating_sub(cached);
    for (kind, tokens) in [("cached", cached), ("computed", computed)] {
        counter!("baton_router_prefix_tokens_total", "kind" => kind).increment(tokens as u64);
    }
}

/// A request was refused before it was placed.
pub(crate) fn rejected(cause: &'static str) {
    counter!("baton_router_rejections_total", "cause" => cause).increment(1);
}

/// A circuit was closed or opened; how many are not closed now.
pub(crate) fn spared(workers: usize) {
    gauge!("baton_router_workers_spared").set(workers as f64);
}

/// A watch is opened anew.
pub(crate) fn resynced(cause: Cause) {
    counter!("baton_router_resyncs_total", "cause" => cause.name()).increment(1);
}

/// The index of blocks in numbers; registered once.
pub(crate) struct IndexMeters {
    bytes: Gauge,
    blocks: Gauge,
    evictions: Counter,
}

impl IndexMeters {
    /// Registers them.
    pub(crate) fn new() -> Self {
        Self {
            bytes: gauge!("baton_router_prefix_index_bytes"),
            blocks: gauge!("baton_router_prefix_index_blocks"),
            evictions: counter!("baton_router_prefix_index_evictions_total"),
        }
    }

    /// Shows the index as it is.
    pub(crate) fn show(&self, index: &PrefixIndex) {
        self.bytes.set(index.bytes() as f64);
        self.blocks.set(index.blocks() as f64);
        self.evictions.absolute(index.evictions());
    }
}

/// A worker was refused.
pub(crate) fn refused(reason: Reason) {
    counter!("baton_router_workers_refused_total", "reason" => reason.name()).increment(1);
}

/// The pools changed.
pub(crate) fn workers(counts: &BTreeMap<(Role, WorkerState), usize>) {
    for role in [Role::Prefill, Role::Decode] {
        for state in WorkerState::ALL {
            let count = counts.get(&(role, state)).copied().unwrap_or(0);
            gauge!("baton_router_workers", "role" => role.name(), "state" => state.name()).set(count as f64);
        }
    }
}

/// One request in the gauge of its state, until dropped. What was added is taken away from the same gauge.
pub(crate) struct Counted {
    state: RequestState,
    gauge: Gauge,
}

impl Counted {
    /// A request in that state.
    pub(crate) fn new(state: RequestState) -> Self {
        let gauge = gauge!("baton_router_requests", "state" => state.name());
        gauge.increment(1.0);
        Self { state, gauge }
    }

    /// The request's state now.
    pub(crate) fn set(&mut self, state: RequestState) {
        if state != self.state {
            *self = Self::new(state);
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.gauge.decrement(1.0);
    }
}
