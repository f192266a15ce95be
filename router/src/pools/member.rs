//! The members as an operator sees them.

use std::sync::atomic::Ordering;

use serde::Serialize;

use super::{Pools, Worker, WorkerState};

/// A member, and what its router knows of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemberDump {
    /// Where it is.
    pub address: String,
    /// Prefill or decode.
    pub role: &'static str,
    /// What it is to its pool.
    pub state: &'static str,
    /// What is wrong with it, if anything is.
    pub reason: Option<String>,
    /// Its life, as it said last.
    pub epoch: Option<String>,
    /// The model that it serves.
    pub model: Option<String>,
    /// Requests that this router has placed on it and that have not ended.
    pub placed: usize,
    /// Sequences that it has, as it said last.
    pub sequences: usize,
    /// KV blocks in all.
    pub blocks_total: usize,
    /// KV blocks that are free or reclaimable.
    pub blocks_free: usize,
}

impl Pools {
    /// Every member, in the order of joining.
    pub fn members(&self) -> Vec<MemberDump> {
        self.workers.iter().map(Worker::dump).collect()
    }
}

impl Worker {
    fn dump(&self) -> MemberDump {
        let state = self.state();
        let error = match state {
            WorkerState::Lost => self.lost.as_ref(),
            WorkerState::Refused => self.refused.as_ref(),
            WorkerState::Unknown | WorkerState::Live | WorkerState::Draining => None,
        };
        let described = self.description.as_deref();
        MemberDump {
            address: self.address.clone(),
            role: self.role().name(),
            state: state.name(),
            reason: error.map(ToString::to_string),
            epoch: described.map(|described| described.epoch.to_string()),
            model: described.map(|described| described.model.name.clone()),
            placed: self.load.load(Ordering::Relaxed),
            sequences: described.map_or(0, |described| described.sequences),
            blocks_total: described.map_or(0, |described| described.blocks_total),
            blocks_free: described.map_or(0, |described| described.blocks_free),
        }
    }
}
