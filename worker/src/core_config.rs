//! What a worker's core is told about itself: who it is, what it serves, and how long its promises last.

use std::time::Duration;

use proto::mix::{WEYL, mix};
use proto::{HandoffId, ModelDescription, WorkerEpoch};

/// Configuration of a core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreConfig {
    /// Address of this worker's own `KvTransfer` service, as peers reach it.
    pub address: String,
    /// This life of the worker.
    pub epoch: WorkerEpoch,
    /// The model that the engine computes.
    pub model: ModelDescription,
    /// How long a hold outlives the router's call and each renewal.
    pub lease_ttl: Duration,
    /// How often the lease of a hand-off is renewed while its KV is fetched.
    pub renew_every: Duration,
    /// How long a fence is remembered after its last use; longer than any request's deadline.
    pub fence_ttl: Duration,
    /// Where the unguessable ids of hand-offs come from.
    pub handoff_ids: HandoffIds,
}

impl CoreConfig {
    /// The defaults of the hand-off: a lease of 10 s, renewed every 2 s; fences remembered for 10 minutes; ids from
    /// the operating system's random source.
    pub fn new(address: impl Into<String>, epoch: WorkerEpoch, model: ModelDescription) -> Self {
        Self {
            address: address.into(),
            epoch,
            model,
            lease_ttl: Duration::from_secs(10),
            renew_every: Duration::from_secs(2),
            fence_ttl: Duration::from_mins(10),
            handoff_ids: HandoffIds::Random,
        }
    }
}

/// A source of hand-off ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandoffIds {
    /// The operating system's random source: nobody can guess an id.
    Random,
    /// The same ids in every run, for simulations. Two lives of one worker with the same seed draw the same ids,
    /// so that only the epoch tells their references apart.
    Seeded(u64),
}

impl HandoffIds {
    /// Draws the next id.
    pub fn draw(&mut self) -> HandoffId {
        let Self::Seeded(state) = self else { return HandoffId::random() };
        let mut bytes = [0; 16];
        for half in bytes.chunks_exact_mut(8) {
            *state = state.wrapping_add(WEYL);
            half.copy_from_slice(&mix(*state).to_le_bytes());
        }
        HandoffId(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeded_ids_repeat_between_runs_and_not_within_one() {
        let draw = |seed| {
            let mut ids = HandoffIds::Seeded(seed);
            [ids.draw(), ids.draw(), ids.draw()]
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let [a, b, c] = draw(1);
        assert!(a != b && b != c && a != c);
    }

    #[test]
    fn random_ids_differ() {
        let mut ids = HandoffIds::Random;
        assert_ne!(ids.draw(), ids.draw());
    }
}
