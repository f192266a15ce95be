//! The routers' cores as the simulation drives them: each has its own view of the workers, from what they said last.

use proto::worker::PROTOCOL_VERSION;
use proto::{Digest, KvDtype, KvLayout, ModelDescription, WorkerDescription};
use router::PlacementMode;
use router::pools::Pools;

use super::Cluster;
use super::worker::Worker;
use crate::machine::Machine;

/// The model that everybody serves.
pub(crate) const MODEL: &str = "simulated";

/// How requests are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Split, fused, or as the router finds best.
    pub placement: PlacementMode,
}

/// See the module.
pub(crate) struct Routers {
    pools: Vec<Pools>,
    machine: Machine,
}

impl Routers {
    /// Routers that know all workers.
    pub(crate) fn new(cluster: &Cluster, workers: &[Worker], _seed: u64) -> Self {
        let addresses: Vec<String> = (0..workers.len()).map(address).collect();
        let mut routers = Self { pools: Vec::new(), machine: cluster.machine };
        for router in 0..cluster.routers {
            let mut pools = Pools::new();
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
