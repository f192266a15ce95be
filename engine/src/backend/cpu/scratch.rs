//! Each pool member's own memory, grown to what a step needs and kept.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::attention::AttentionScratch;
use super::isa::Lane;

/// What one member works in.
#[derive(Default)]
pub(super) struct Scratch {
    /// Decoded weight panels.
    pub(super) panels: Vec<Lane>,
    pub(super) attention: AttentionScratch,
}

/// The scratch of all members.
pub(super) struct MemberScratch(Vec<Mutex<Scratch>>);

impl MemberScratch {
    pub(super) fn new(members: usize) -> Self {
        Self((0..members).map(|_| Mutex::default()).collect())
    }

    /// A member's scratch. Only the member itself locks it, so nobody waits.
    pub(super) fn lock(&self, member: usize) -> MutexGuard<'_, Scratch> {
        // A kernel that panicked leaves nothing in scratch that the next one reads.
        self.0[member].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
