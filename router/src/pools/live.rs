//! The workers that take requests, by model and role: what every placement reads, made anew when one of them changes.

use std::collections::HashMap;

use proto::{HashChain, Role};

use super::worker::{Worker, WorkerState};

/// Places in the list of workers, in its order.
#[derive(Debug, Default)]
pub(super) struct Live {
    models: HashMap<String, Roles>,
}

#[derive(Debug, Default)]
struct Roles {
    prefill: Vec<u32>,
    decode: Vec<u32>,
    /// How they name their blocks, each way once.
    chains: Vec<HashChain>,
}

impl Live {
    /// Those among `workers` that take requests.
    pub(super) fn among(workers: &[Worker]) -> Self {
        let mut models: HashMap<String, Roles> = HashMap::new();
        for (place, worker) in workers.iter().enumerate() {
            let Some(description) = &worker.description else { continue };
            if worker.state() != WorkerState::Live {
                continue;
            }
            let roles = match models.get_mut(&description.model.name) {
                Some(roles) => roles,
                None => models.entry(description.model.name.clone()).or_default(),
            };
            let chain = HashChain::new(description.model.fingerprint, description.layout.block_tokens);
            if !roles.chains.contains(&chain) {
                roles.chains.push(chain);
            }
            match worker.role() {
                Role::Prefill => roles.prefill.push(place as u32),
                Role::Decode => roles.decode.push(place as u32),
                Role::Router => {}
            }
        }
        Self { models }
    }

    /// How those that serve the model name their blocks.
    pub(super) fn chains(&self, model: &str) -> &[HashChain] {
        self.models.get(model).map_or(&[], |roles| &roles.chains)
    }

    /// Those of a role that serve the model.
    pub(super) fn of(&self, role: Role, model: &str) -> &[u32] {
        let Some(roles) = self.models.get(model) else { return &[] };
        match role {
            Role::Prefill => &roles.prefill,
            Role::Decode => &roles.decode,
            Role::Router => &[],
        }
    }
}
