//! A worker's metrics. Dashboards and tests rely on their names; `docs/metrics.md` says what each is.

use std::time::Duration;

use metrics::{
    Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    histogram,
};
use proto::Reason;

use crate::core::{Gauges, Moves, StepSize};

/// Names and explains every metric of a worker.
fn describe() {
    describe_gauge!("baton_engine_sequences", "Sequences by state.");
    describe_gauge!("baton_engine_kv_blocks", "KV blocks by state; held ones are used ones, too.");
    describe_counter!(
        "baton_engine_preemptions_total",
        "Times that a sequence lost its blocks to an older one."
    );
    describe_counter!(
        "baton_engine_prompt_tokens_total",
        "Tokens of prompts by source, computed or cached, and whether of a probe."
    );
    describe_histogram!("baton_engine_step_seconds", Unit::Seconds, "Steps of the engine.");
    describe_histogram!("baton_engine_step_tokens", "Tokens of a step.");
    describe_histogram!("baton_engine_step_sequences", "Sequences of a step.");
    describe_histogram!(
        "baton_worker_prefill_queue_seconds",
        Unit::Seconds,
        "From a prompt's arrival to its first step, by whether of a probe."
    );
    describe_histogram!(
        "baton_worker_prefill_seconds",
        Unit::Seconds,
        "From a prompt's first step to its token, by whether of a probe."
    );
    describe_gauge!("baton_worker_leases", "Hand-offs under lease.");
    describe_counter!("baton_worker_kv_transfer_bytes_total", "Bytes of KV that moved, by direction.");
    describe_histogram!(
        "baton_worker_kv_transfer_seconds",
        Unit::Seconds,
        "From the start of a fetch to its last item; it waits for a prefill that still computes."
    );
    describe_counter!("baton_worker_kv_transfer_failures_total", "Hand-offs that failed, by cause.");
    describe_counter!(
        "baton_worker_migrations_total",
        "Sequences handed over while they ran, by what came of it: taken or lost."
    );
    describe_gauge!("baton_worker_kv_blocks_orphaned", "Held blocks without an owner: zero, always.");
}

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
    /// As it was shown last.
    preemptions_shown: u64,
    preemptions: Counter,
    transfer_seconds: Histogram,
    prompts: Prompts,
    probes: Prompts,
    moves: Moves,
    moves_taken: Counter,
    moves_lost: Counter,
    step_seconds: Histogram,
    step_tokens: Histogram,
    step_sequences: Histogram,
}

/// What is counted of prompts, of probes and of others.
struct Prompts {
    queue_seconds: Histogram,
    seconds: Histogram,
    computed: Counter,
    cached: Counter,
}

impl Prompts {
    fn new(worker: &str, probe: &'static str) -> Self {
        let name = || worker.to_owned();
        let tokens = |source| counter!("baton_engine_prompt_tokens_total", "source" => source, "probe" => probe, "worker" => name());
        Self {
            queue_seconds: histogram!("baton_worker_prefill_queue_seconds", "probe" => probe, "worker" => name()),
            seconds: histogram!("baton_worker_prefill_seconds", "probe" => probe, "worker" => name()),
            computed: tokens("computed"),
            cached: tokens("cached"),
        }
    }
}

/// What a prompt took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    /// Wait for its first step.
    pub(crate) queue: Duration,
    /// From there to its token.
    pub(crate) compute: Duration,
    /// Its tokens.
    pub(crate) tokens: usize,
    /// Those that were there already.
    pub(crate) cached: usize,
}

impl Meters {
    /// Registers the metrics of the worker of that name.
    pub(crate) fn new(worker: &str) -> Self {
        describe();
        let name = || worker.to_owned();
        let sequences = |state| gauge!("baton_engine_sequences", "state" => state, "worker" => name());
        let blocks = |state| gauge!("baton_engine_kv_blocks", "state" => state, "worker" => name());
        let moved = |direction| counter!("baton_worker_kv_transfer_bytes_total", "direction" => direction, "worker" => name());
        let migrated =
            |outcome| counter!("baton_worker_migrations_total", "outcome" => outcome, "worker" => name());
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
            preemptions_shown: 0,
            preemptions: counter!("baton_engine_preemptions_total", "worker" => name()),
            transfer_seconds: histogram!("baton_worker_kv_transfer_seconds", "worker" => name()),
            prompts: Prompts::new(worker, "false"),
            probes: Prompts::new(worker, "true"),
            moves: Moves::default(),
            moves_taken: migrated("taken"),
            moves_lost: migrated("lost"),
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
        let preempted = std::mem::replace(&mut self.preemptions_shown, gauges.preemptions);
        self.preemptions.increment(gauges.preemptions - preempted);
        set(&self.leases, gauges.leases);
        set(&self.orphaned, gauges.orphaned_blocks);
        let Moves { taken, lost } = std::mem::replace(&mut self.moves, gauges.moves);
        self.moves_taken.increment(gauges.moves.taken - taken);
        self.moves_lost.increment(gauges.moves.lost - lost);
    }

    /// Sets every gauge to zero: the engine is gone.
    pub(crate) fn clear(&self) {
        let gauges = [
            &self.waiting,
            &self.running,
            &self.preempted,
            &self.reserved,
            &self.held,
            &self.blocks_free,
            &self.blocks_cached,
            &self.blocks_used,
            &self.blocks_held,
            &self.leases,
            &self.orphaned,
        ];
        gauges.into_iter().for_each(|gauge| gauge.set(0.0));
    }

    /// A step of that size took so long.
    pub(crate) fn stepped(&self, size: StepSize, took: Duration) {
        self.step_seconds.record(took.as_secs_f64());
        self.step_tokens.record(size.tokens as f64);
        self.step_sequences.record(size.sequences as f64);
    }

    /// A prompt was computed.
    pub(crate) fn prompt(&self, prompt: Prompt, probe: bool) {
        let meters = if probe { &self.probes } else { &self.prompts };
        meters.queue_seconds.record(prompt.queue.as_secs_f64());
        meters.seconds.record(prompt.compute.as_secs_f64());
        meters.cached.increment(prompt.cached as u64);
        meters.computed.increment(prompt.tokens.saturating_sub(prompt.cached) as u64);
    }

    /// A fetch took so long.
    pub(crate) fn fetched(&self, took: Duration) {
        self.transfer_seconds.record(took.as_secs_f64());
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
