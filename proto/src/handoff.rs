//! The reference that passes from prefill to decode. It names KV; it never carries it.

use crate::{Digest, HandoffId, KvLayout, RequestId, WorkerEpoch};

/// Which placement of a request this is. Attempt n + 1 fences attempt n wherever it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Attempt(pub u32);

impl Attempt {
    /// How far apart the attempts of two routers start, so that a resumed stream always fences its predecessor.
    pub const PER_ROUTER: u32 = 1 << 16;

    /// The next placement by the same router.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The first placement by the next router.
    #[must_use]
    pub fn next_router(self) -> Self {
        Self((self.0 / Self::PER_ROUTER).saturating_add(1).saturating_mul(Self::PER_ROUTER))
    }
}

/// A fenced reference to KV that a worker holds for one attempt of one request (invariant I1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handoff {
    /// Address of the owner's `KvTransfer` service.
    pub owner: String,
    /// The owner's life in which it was issued.
    pub epoch: WorkerEpoch,
    /// The request.
    pub request: RequestId,
    /// The attempt.
    pub attempt: Attempt,
    /// The secret.
    pub id: HandoffId,
    /// The owner's checkpoint.
    pub fingerprint: Digest,
    /// The owner's KV layout.
    pub layout: KvLayout,
    /// Tokens whose KV is handed over: all of the sequence but the token sampled last.
    pub tokens: usize,
}
