//! Each pool member's own memory, grown to what a step needs and kept.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::attention::AttentionScratch;
use super::isa::{Lane, Line};

/// Vectors on cache-line borders, so that no load touches two lines.
#[derive(Default)]
pub(super) struct Lanes(Vec<Line>);

impl Lanes {
    /// Sets the number of vectors; new ones are zeros, old ones keep what they held.
    pub(super) fn resize(&mut self, len: usize) {
        self.0.resize(len, Line::default());
    }
}

impl Deref for Lanes {
    type Target = [Lane];

    #[inline(always)]
    fn deref(&self) -> &[Lane] {
        bytemuck::cast_slice(&self.0)
    }
}

impl DerefMut for Lanes {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [Lane] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// What one member works in.
#[derive(Default)]
pub(super) struct Scratch {
    /// Decoded weight panels.
    pub(super) panels: Lanes,
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
