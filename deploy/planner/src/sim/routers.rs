//! The routers' cores as the simulation drives them: each has its own view of the workers, from what they said last.

use proto::worker::PROTOCOL_VERSION;
use proto::{Digest, HashChain, KvDtype, KvLayout, ModelDescription, WorkerDescription, WorkerLoad};
use router::PlacementMode;
use router::follow::Effect;
use router::policy::Policy;
use router::pools::Pools;

use super::Cluster;
use super::blocks::Change;
use super::worker::Worker;
use crate::machine::Machine;
use crate::random::mix;

/// The model that everybody serves.
pub(crate) const MODEL: &str = "simulated";

/// How requests are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Split, fused, or as the router finds best.
    pub placement: PlacementMode,
    /// How workers are chosen.
    pub policy: Policy,
}

impl Routing {
    /// Whether it goes by what workers say of their load and their blocks.
    pub(crate) fn is_informed(self) -> bool {
        self.policy != Policy::RoundRobin || self.placement == PlacementMode::Auto
    }
}

/// See the module.
pub(crate) struct Routers {
    pools: Vec<Pools>,
    /// Changes of each worker's blocks that a router has not heard of, by router and worker.
    unheard: Vec<Vec<Vec<Change>>>,
    machine: Machine,
}

impl Routers {
    /// Routers that know all workers.
    pub(crate) fn new(cluster: &Cluster, workers: &[Worker], seed: u64) -> Self {
        let addresses: Vec<String> = (0..workers.len()).map(address).collect();
        let mut routers = Self {
            pools: Vec::new(),
            unheard: vec![vec![Vec::new(); workers.len()]; cluster.routers],
            machine: cluster.machine,
        };
        for router in 0..cluster.routers {
            let mut pools = Pools::with_policy(cluster.routing.policy, mix(seed, router as u64));
            let members = workers.iter().zip(&addresses);
            pools.set_members(members.map(|(worker, address)| (worker.role, address.as_str())));
            routers.pools.push(pools);
            for (index, worker) in workers.iter().enumerate() {
                routers.describe(router, index, worker);
            }
        }
        routers
    }

    pub(crate) fn pools(&self, router: usize) -> &Pools {
        &self.pools[router]
    }

    pub(crate) fn pools_mut(&mut self, router: usize) -> &mut Pools {
        &mut self.pools[router]
    }

    /// The worker tells the router what it has to do, and what has changed in its cache.
    pub(crate) fn report(&mut self, router: usize, index: usize, worker: &mut Worker) {
        let changes = worker.take_changes();
        for unheard in &mut self.unheard {
            unheard[index].extend_from_slice(&changes);
        }
        let address = address(index);
        let pools = &mut self.pools[router];
        // Runs of one kind, as they happened.
        let changes = std::mem::take(&mut self.unheard[router][index]);
        for run in changes.chunk_by(|a, b| std::mem::discriminant(a) == std::mem::discriminant(b)) {
            let names = run.iter().map(|change| match *change {
                Change::Stored(name) | Change::Removed(name) => name,
            });
            pools.heard(
                &address,
                &match run[0] {
                    Change::Stored(_) => Effect::Insert(names.collect()),
                    Change::Removed(_) => Effect::Remove(names.collect()),
                },
            );
        }
        let gauges = worker.gauges();
        let load = WorkerLoad {
            waiting: gauges.waiting,
            running: gauges.running,
            waiting_tokens: gauges.waiting_tokens,
            running_tokens: gauges.running_tokens,
            blocks_free: gauges.blocks_free,
            blocks_total: self.machine.sizes.kv_blocks,
            draining: false,
        };
        pools.heard(&address, &Effect::Load(worker.epoch, load));
    }

    /// The worker tells the router how it is.
    pub(crate) fn describe(&mut self, router: usize, index: usize, worker: &Worker) {
        let gauges = worker.gauges();
        let description = WorkerDescription {
            protocol: PROTOCOL_VERSION,
            epoch: worker.epoch,
            role: worker.role,
            model: ModelDescription {
                name: MODEL.to_owned(),
                fingerprint: Digest::default(),
                tokenizer: Digest::default(),
                context_len: self.machine.sizes.context_len,
                vocab_size: 1 << 17,
                numerics: "sim".to_owned(),
            },
            layout: layout(&self.machine),
            draining: false,
            blocks_total: self.machine.sizes.kv_blocks,
            blocks_free: gauges.blocks_free,
            sequences: gauges.running + gauges.waiting,
        };
        self.pools[router].described(&address(index), description);
    }
}

/// A layout whose tokens have the machine's bytes, to four.
pub(crate) fn layout(machine: &Machine) -> KvLayout {
    KvLayout {
        layers: 1,
        kv_heads: 1,
        head_dim: (machine.sizes.kv_token_bytes / 4).max(1),
        dtype: KvDtype::F16,
        block_tokens: machine.sizes.block_tokens,
    }
}

/// How everybody names blocks.
pub(crate) fn chain(machine: &Machine) -> HashChain {
    HashChain::new(Digest::default(), machine.sizes.block_tokens)
}

/// Where a worker is.
pub(crate) fn address(index: usize) -> String {
    format!("w{index}")
}

/// Which worker is there.
pub(crate) fn index(address: &str) -> u32 {
    address
        .strip_prefix('w')
        .and_then(|index| index.parse().ok())
        .expect("an address of this module's making")
}
