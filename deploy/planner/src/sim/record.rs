//! What a simulation saw, request by request.

use std::collections::HashMap;

use proto::{Error, PlacementKind, Role};

use super::queue::Time;
use super::{Cluster, seconds};
use crate::report::{Outcome, Report, Slo, Totals};
use crate::workload::Arrival;

/// The part of the time that warms up.
const WARM_UP: f64 = 0.1;

/// See the module.
pub(super) struct Record {
    slo: Slo,
    outcomes: Vec<Outcome>,
    /// The time that counts, seconds.
    from: f64,
    until: f64,
    workers: [usize; 2],
    busy: [f64; 2],
    split: usize,
    placed: usize,
    /// The last kind of placement, by router and size of the prompt as a power of two.
    kinds: HashMap<(usize, u32), PlacementKind>,
    switches: usize,
    pub(super) events: u64,
    pub(super) retries: u64,
    pub(super) preemptions: u64,
    pub(super) transferred_bytes: f64,
}

impl Record {
    pub(super) fn new(cluster: &Cluster, requests: &[Arrival], slo: Slo) -> Self {
        let until = requests.last().map_or(0.0, |request| request.at);
        let outcome = |request: &Arrival| Outcome {
            at: request.at,
            prompt: request.prompt,
            output: request.output,
            cached: None,
            first: None,
            last: None,
            is_finished: false,
        };
        Self {
            slo,
            outcomes: requests.iter().map(outcome).collect(),
            from: until * WARM_UP,
            until,
            workers: [cluster.prefill, cluster.decode],
            busy: [0.0; 2],
            split: 0,
            placed: 0,
            kinds: HashMap::new(),
            switches: 0,
            events: 0,
            retries: 0,
            preemptions: 0,
            transferred_bytes: 0.0,
        }
    }

    /// A worker steps for that long, seconds.
    pub(super) fn busy(&mut self, role: Role, now: Time, length: f64) {
        let now = seconds(now);
        if now >= self.from && now < self.until {
            self.busy[usize::from(role != Role::Prefill)] += length.min(self.until - now);
        }
    }

    /// The request's prompt is being computed; so much of it was cached. The first computation counts.
    pub(super) fn computed(&mut self, request: u32, cached: usize) {
        self.outcomes[request as usize].cached.get_or_insert(cached);
    }

    pub(super) fn placed(&mut self, request: u32, router: usize, kind: PlacementKind) {
        let outcome = &self.outcomes[request as usize];
        if outcome.at < self.from {
            return;
        }
        self.placed += 1;
        self.split += usize::from(kind == PlacementKind::Split);
        let size = outcome.prompt.ilog2();
        let before = self.kinds.insert((router, size), kind);
        self.switches += usize::from(before.is_some_and(|before| before != kind));
    }

    /// A token has come to the client: the first one, or the latest.
    pub(super) fn token(&mut self, request: u32, now: Time) {
        let outcome = &mut self.outcomes[request as usize];
        outcome.first.get_or_insert(seconds(now));
        outcome.last = Some(seconds(now));
    }

    pub(super) fn ended(&mut self, request: u32, result: &Result<(), Error>) {
        self.outcomes[request as usize].is_finished = result.is_ok();
    }

    pub(super) fn report(self) -> Report {
        let window = self.until - self.from;
        let used = |at: usize| self.busy[at] / (window * self.workers[at].max(1) as f64).max(1e-9);
        let totals = Totals {
            seconds: window,
            workers: self.workers[0] + self.workers[1],
            prefill_used: used(0),
            decode_used: used(1),
            split: self.split as f64 / self.placed.max(1) as f64,
            switches: self.switches,
            retries: self.retries,
            preemptions: self.preemptions,
            transferred_bytes: self.transferred_bytes,
            events: self.events,
            tokens: self.outcomes.iter().filter(|o| o.is_finished).map(|o| o.output as u64).sum(),
        };
        let counted = self.outcomes.into_iter().filter(|outcome| outcome.at >= self.from);
        Report::new(&counted.collect::<Vec<_>>(), totals, self.slo)
    }
}
