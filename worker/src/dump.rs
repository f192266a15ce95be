//! A worker's state for an operator's eyes: what it computes, holds and fetches, and for whom. No tokens.

use std::sync::Arc;
use std::time::Duration;

use engine::{KvCounts, SequenceCounts};
use node::debug::Excerpt;
use proto::Role;
use serde::Serialize;

use crate::core::Gauges;
use crate::lives::Life;

/// What a core tells of itself.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CoreDump {
    /// True once a drain began.
    pub draining: bool,
    /// Every call's sequence, the oldest first.
    pub sequences: Excerpt<SequenceDump>,
    /// Every hand-off under lease, or about to be.
    pub holds: Excerpt<HoldDump>,
    /// The latest fences.
    pub fences: Excerpt<FenceDump>,
}

/// A sequence.
#[derive(Clone, Debug, Serialize)]
pub struct SequenceDump {
    /// The request.
    pub request: String,
    /// Its attempt.
    pub attempt: u32,
    /// Its number in the engine.
    pub sequence: u64,
    /// Where it is in its life.
    pub state: &'static str,
    /// Since it came here, seconds.
    pub age_seconds: f64,
    /// Until its deadline, seconds.
    pub left_seconds: f64,
    /// Tokens of the request that are generated, by earlier attempts too.
    pub generated: usize,
    /// Where its KV comes from, and how much of it is here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetch: Option<FetchDump>,
}

/// A fetch from the owner of a hand-off.
#[derive(Clone, Debug, Serialize)]
pub struct FetchDump {
    /// Who holds the KV.
    pub owner: String,
    /// That owner's life.
    pub epoch: String,
    /// Tokens whose KV is here.
    pub tokens_here: usize,
    /// Tokens of the hand-off.
    pub tokens: usize,
}

/// A hand-off that this worker owns.
#[derive(Clone, Debug, Serialize)]
pub struct HoldDump {
    /// The request.
    pub request: String,
    /// Its attempt.
    pub attempt: u32,
    /// Its sequence in the engine.
    pub sequence: u64,
    /// Tokens whose KV is handed over.
    pub tokens: usize,
    /// What is left of its lease, seconds; none while the router's call is open.
    pub lease_left_seconds: Option<f64>,
    /// Somebody fetches it now.
    pub fetched: bool,
}

/// A fence.
#[derive(Clone, Debug, Serialize)]
pub struct FenceDump {
    /// The request.
    pub request: String,
    /// The lowest attempt that is welcome.
    pub attempt: u32,
}

/// What a worker tells of itself.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerDump {
    /// This life of the worker.
    pub epoch: String,
    /// Prefill or decode.
    pub role: &'static str,
    /// The role that it will have once it has drained, when another was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes_to: Option<&'static str>,
    /// The model.
    pub model: String,
    /// KV blocks by state.
    pub kv_blocks: KvBlocks,
    /// Sequences by state.
    pub sequences_by_state: Sequences,
    /// Hand-offs under lease.
    pub leases: usize,
    /// Held blocks that nobody owns: zero, always.
    pub orphaned_blocks: usize,
    /// What the engine's thread tells; none when it did not in time, and the rest is what it published last.
    pub engine: Option<EngineDump>,
}

/// What the engine's thread tells.
#[derive(Clone, Debug, Serialize)]
pub struct EngineDump {
    /// The core.
    #[serde(flatten)]
    pub core: CoreDump,
    /// Calls that peers have open here.
    pub calls: CallsDump,
    /// Fetches that this worker has open at peers.
    pub fetches: usize,
    /// Renewals that it has open.
    pub renewals: usize,
    /// Events that waited for the engine when it came to this one.
    pub events_waiting: usize,
}

/// Longest wait for the engine's thread: a step may take long, and a dump has no more than two seconds.
const ENGINE_MAX: Duration = Duration::from_millis(1500);

impl WorkerDump {
    /// The worker now. Waits for the running step, but not for long.
    pub(crate) async fn of(life: Arc<Life>) -> Self {
        let Life { identity, shell, .. } = &*life;
        let engine = tokio::time::timeout(ENGINE_MAX, shell.dump()).await.ok().flatten();
        let Gauges { blocks, sequences, leases, orphaned_blocks, .. } = shell.gauges();
        Self {
            epoch: identity.epoch.to_string(),
            role: identity.role.name(),
            changes_to: life.leaves_for.map(Role::name),
            model: identity.model.name.clone(),
            kv_blocks: blocks.into(),
            sequences_by_state: sequences.into(),
            leases,
            orphaned_blocks,
            engine,
        }
    }
}

/// Open calls of peers, by kind.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CallsDump {
    /// Routers that wait for a prefill.
    pub prefill: usize,
    /// Routers that wait for tokens.
    pub decode: usize,
    /// Peers that fetch.
    pub fetch: usize,
    /// Peers that renew.
    pub renew: usize,
}

/// KV blocks by state; see [`KvCounts`].
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "see KvCounts")]
pub struct KvBlocks {
    pub total: usize,
    pub free: usize,
    pub cached: usize,
    pub used: usize,
    pub held: usize,
}

impl From<KvCounts> for KvBlocks {
    fn from(counts: KvCounts) -> Self {
        let KvCounts { total, free, cached, used, held } = counts;
        Self { total, free, cached, used, held }
    }
}

/// Sequences by state; see [`SequenceCounts`].
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "see SequenceCounts")]
pub struct Sequences {
    pub waiting: usize,
    pub running: usize,
    pub preempted: usize,
    pub reserved: usize,
    pub held: usize,
}

impl From<SequenceCounts> for Sequences {
    fn from(counts: SequenceCounts) -> Self {
        let SequenceCounts { waiting, running, preempted, reserved, held } = counts;
        Self { waiting, running, preempted, reserved, held }
    }
}

/// Seconds between two times, none when the second has passed.
pub fn seconds(from: Duration, to: Duration) -> f64 {
    to.saturating_sub(from).as_secs_f64()
}
