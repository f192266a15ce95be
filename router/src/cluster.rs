//! The pools as this process keeps them: fed by discovery and `Describe`, read by every request.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use node::{Context, Network, TaskGuard};
use proto::{Error, Reason, Role, WorkerDescription, wire};
use tokio::sync::{Notify, watch};
use tracing::{error, info, warn};
use wire::worker_client::WorkerClient;

use crate::Config;
use crate::follow::Effect;
use crate::meters::{self, IndexMeters};
use crate::pools::{Change, ChangeKind, Pools};
use crate::watch::{self as watching, Told};

/// The pools, shared.
pub(crate) struct Cluster {
    pools: Mutex<Pools>,
    /// Counts changes; requests that wait for a worker wait for this.
    version: watch::Sender<u64>,
    /// Wakes the task that describes a worker.
    nudges: Mutex<HashMap<String, Arc<Notify>>>,
    meters: IndexMeters,
}

/// Names that are entered into the index, or taken out, at a time: the pools are not held for longer.
const NAMES_MAX: usize = 256;

impl Cluster {
    /// No workers yet.
    pub(crate) fn new(config: &Config) -> Self {
        // Routers that draw by chance should not all draw the same.
        let seed = RandomState::new().hash_one(config.policy.name());
        let bytes_max = usize::try_from(config.prefix_index_memory.bytes).unwrap_or(usize::MAX);
        let pools = Pools::with_policy(config.policy, seed).with_index(bytes_max);
        Self {
            meters: IndexMeters::new(),
            pools: Mutex::new(pools),
            version: watch::channel(0).0,
            nudges: Mutex::default(),
        }
    }

    /// The pools. Held for a moment only, never over an await.
    pub(crate) fn pools(&self) -> MutexGuard<'_, Pools> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells of every change from now on.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Takes over what an event of a worker's watch means.
    pub(crate) fn heard(&self, address: &str, effect: Effect) {
        match effect {
            Effect::Insert(blocks) if blocks.len() > NAMES_MAX => {
                // The end first, as within a part: what comes last is what is used last.
                for part in blocks.rchunks(NAMES_MAX) {
                    self.pools().heard(address, &Effect::Insert(part.to_vec()));
                }
            }
            Effect::Remove(blocks) if blocks.len() > NAMES_MAX => {
                for part in blocks.chunks(NAMES_MAX) {
                    self.pools().heard(address, &Effect::Remove(part.to_vec()));
                }
            }
            effect => {
                self.pools().heard(address, &effect);
                if matches!(effect, Effect::Load(..)) {
                    return;
                }
            }
        }
        self.meters.show(self.pools().index());
    }

    /// A call to the worker failed on its way: no new requests for it until it has described itself again, which it
    /// is asked to at once.
    pub(crate) fn suspect(&self, address: &str, error: Error) {
        self.apply(|pools| pools.lost(address, error));
        if let Some(nudge) = self.nudges().get(address) {
            nudge.notify_one();
        }
    }

    fn nudges(&self) -> MutexGuard<'_, HashMap<String, Arc<Notify>>> {
        self.nudges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the pools, and tells logs, metrics and waiting requests if anything came of it.
    fn apply(&self, change: impl FnOnce(&mut Pools) -> Vec<Change>) {
        let mut pools = self.pools();
        let changes = change(&mut pools);
        if changes.is_empty() {
            return;
        }
        let (counts, spared) = (pools.counts(), pools.spared());
        drop(pools);
        meters::workers(&counts);
        meters::spared(spared);
        changes.iter().for_each(report);
        self.version.send_modify(|version| *version += 1);
    }
}

fn report(change: &Change) {
    let Change { address, role, kind } = change;
    let role = role.name();
    match kind {
        ChangeKind::Joined => info!(role, address, "worker joined"),
        ChangeKind::Left => info!(role, address, "worker left"),
        ChangeKind::Live(epoch) => info!(role, address, %epoch, "worker is live"),
        ChangeKind::Restarted(epoch) => info!(role, address, %epoch, "worker was restarted"),
        ChangeKind::Turned { from } => info!(role, address, from = from.name(), "worker has another role"),
        ChangeKind::Draining => info!(role, address, "worker drains"),
        ChangeKind::Absent(error) => info!(role, address, %error, "worker does not answer yet"),
        ChangeKind::Lost(error) => warn!(role, address, %error, "worker is lost"),
        ChangeKind::Refused(error) => {
            meters::refused(error.reason);
            error!(role, address, %error, "worker is refused, it does not match its pool");
        }
    }
}

/// How often, and for how long, workers are asked who they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DescribeConfig {
    /// Pause between two questions.
    pub(crate) every: Duration,
    /// Time to answer.
    pub(crate) timeout: Duration,
    /// Whether they are asked for their blocks, too.
    pub(crate) with_blocks: bool,
}

/// Follows discovery: one task for each worker that it names, for whatever role, for as long as it does. Runs until
/// dropped.
pub(crate) async fn follow_members(cluster: Arc<Cluster>, context: Context, config: DescribeConfig) {
    let mut members = context.members.clone();
    let mut followed: HashMap<String, TaskGuard> = HashMap::new();
    loop {
        let named = members.borrow_and_update().clone();
        cluster.apply(|pools| {
            pools.set_members(named.iter().map(|member| (member.role, member.address.as_str())))
        });
        let workers = named.iter().filter(|member| member.role != Role::Router);
        let workers: HashSet<String> = workers.map(|member| member.address.clone()).collect();
        followed.retain(|worker, _| workers.contains(worker));
        cluster.nudges().retain(|address, _| workers.contains(address));
        for address in workers {
            followed.entry(address.clone()).or_insert_with(|| {
                let nudge = Arc::clone(cluster.nudges().entry(address.clone()).or_default());
                let asks =
                    follow_worker(Arc::clone(&cluster), context.network.clone(), address, nudge, config);
                context.tasks.spawn("worker description", asks).guard()
            });
        }
        if members.changed().await.is_err() {
            // The list is final. The guards live in this task, so it goes on.
            std::future::pending::<()>().await;
        }
    }
}

/// Asks one worker who it is, and watches what it does from then on. One that cannot be watched, or says nothing more, is
/// asked again. Runs until dropped.
async fn follow_worker(
    cluster: Arc<Cluster>,
    network: Network,
    address: String,
    nudge: Arc<Notify>,
    config: DescribeConfig,
) {
    loop {
        let pause = match describe(&network, &address, config.timeout).await {
            Ok(description) => {
                let told = Told { epoch: description.epoch, draining: description.draining };
                cluster.apply(|pools| pools.described(&address, description));
                if watching::follow(&cluster, &network, (&address, told), &nudge, config).await {
                    continue;
                }
                config.every
            }
            Err(error) => {
                cluster.apply(|pools| pools.lost(&address, error));
                config.every / 4
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = nudge.notified() => {}
        }
    }
}

async fn describe(network: &Network, address: &str, limit: Duration) -> Result<WorkerDescription, Error> {
    let mut client = node::limits!(WorkerClient::new(network.connect(address)));
    let mut request = tonic::Request::new(wire::DescribeRequest {});
    request.set_timeout(limit);
    let lost = |error: Error| Error::new(Reason::WorkerLost, error.message);
    let answer = client.describe(request).await.map_err(|status| lost(status.into()))?;
    answer.into_inner().try_into().map_err(lost)
}
