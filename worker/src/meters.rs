//! A worker's metrics, under names that dashboards and tests rely on.
//!
//! | name | labels | unit |
//! |---|---|---|
//! | `baton_engine_sequences` | state, worker | sequences |
//! | `baton_engine_kv_blocks` | state, worker | blocks |
//! | `baton_engine_step_seconds` | worker | seconds, a histogram |
//! | `baton_engine_step_tokens` | worker | tokens, a histogram |
//! | `baton_engine_step_sequences` | worker | sequences, a histogram |
//! | `baton_worker_leases` | worker | hand-offs under lease |
//! | `baton_worker_kv_transfer_bytes_total` | direction (in, out), worker | bytes of slabs |
//! | `baton_worker_kv_transfer_failures_total` | cause (a reason), worker | hand-offs |
//! | `baton_worker_kv_blocks_orphaned` | worker | blocks; zero, always |

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use proto::Reason;

use crate::core::{Gauges, StepSize};

/// Which way KV moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    In,
    Out,
}

/// Handles of one worker's metrics, registered once.
pub(crate) struct Meters {
    worker: String,
    shown: bool,
    waiting: Gauge,
    running: Gauge,
    preempted: Gauge,
    reserved: Gauge,
    held: Gauge,
    blocks_free: Gauge,
    blocks_cached: Gauge,
    blocks_used: Gauge,
    blocks_held: Gauge,
    leases: Gauge,
    orphaned: Gauge,
    bytes_in: Counter,
    bytes_out: Counter,
    step_seconds: Histogram,
    step_tokens: Histogram,
    step_sequences: Histogram,
}

impl Meters {
    /// Registers the metrics of the worker of that name.
    pub(crate) fn new(worker: &str) -> Self {
        let name = || worker.to_owned();
        let sequences = |state| gauge!("baton_engine_sequences", "state" => state, "worker" => name());
        let blocks = |state| gauge!("baton_engine_kv_blocks", "state" => state, "worker" => name());
        let moved = |direction| counter!("baton_worker_kv_transfer_bytes_total", "direction" => direction, "worker" => name());
        Self {
            worker: name(),
            shown: false,
            waiting: sequences("waiting"),
            running: sequences("running"),
            preempted: sequences("preempted"),
            reserved: sequences("reserved"),
            held: sequences("held"),
            blocks_free: blocks("free"),
            blocks_cached: blocks("cached"),
            blocks_used: blocks("used"),
            blocks_held: blocks("held"),
            leases: gauge!("baton_worker_leases", "worker" => name()),
            orphaned: gauge!("baton_worker_kv_blocks_orphaned", "worker" => name()),
            bytes_in: moved("in"),
            bytes_out: moved("out"),
            step_seconds: histogram!("baton_engine_step_seconds", "worker" => name()),
            step_tokens: histogram!("baton_engine_step_tokens", "worker" => name()),
            step_sequences: histogram!("baton_engine_step_sequences", "worker" => name()),
        }
    }

    /// True after the first [`Self::show`].
    pub(crate) fn shown(&self) -> bool {
        self.shown
    }

    /// Sets every gauge. The first time, counters appear too, at zero.
    pub(crate) fn show(&mut self, gauges: &Gauges) {
        if !std::mem::replace(&mut self.shown, true) {
            self.bytes_in.increment(0);
            self.bytes_out.increment(0);
        }
        let set = |gauge: &Gauge, value: usize| gauge.set(value as f64);
        set(&self.waiting, gauges.sequences.waiting);
        set(&self.running, gauges.sequences.running);
        set(&self.preempted, gauges.sequences.preempted);
        set(&self.reserved, gauges.sequences.reserved);
        set(&self.held, gauges.sequences.held);
        set(&self.blocks_free, gauges.blocks.free);
        set(&self.blocks_cached, gauges.blocks.cached);
        set(&self.blocks_used, gauges.blocks.used);
        set(&self.blocks_held, gauges.blocks.held);
        set(&self.leases, gauges.leases);
        set(&self.orphaned, gauges.orphaned_blocks);
    }

    /// A step of that size took so long.
    pub(crate) fn stepped(&self, size: StepSize, took: Duration) {
        self.step_seconds.record(took.as_secs_f64());
        self.step_tokens.record(size.tokens as f64);
        self.step_sequences.record(size.sequences as f64);
    }

    /// That many bytes of slabs moved.
    pub(crate) fn moved(&self, direction: Direction, bytes: usize) {
        let counter = match direction {
            Direction::In => &self.bytes_in,
            Direction::Out => &self.bytes_out,
        };
        counter.increment(bytes as u64);
    }

    /// A hand-off failed for that reason.
    pub(crate) fn transfer_failed(&self, cause: Reason) {
        let labels = [("cause", cause.name().to_owned()), ("worker", self.worker.clone())];
        counter!("baton_worker_kv_transfer_failures_total", &labels).increment(1);
    }
}
