//! Known-wrong behaviours, each switched on by name, that the simulation must catch.
//!
//! A checker that has never failed proves nothing. Every bug here is one line at the place where a correct engine
//! does the right thing. Without the cargo feature `planted` the question is the constant `false`, and the line
//! compiles to nothing.

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// `export` takes the checksums of whatever the blocks hold at that moment, not those taken at seal: an
    /// overwritten block passes.
    ChecksumAtSend,
    /// `release` and `cancel` free the blocks of a held sequence while `export` still reads them.
    FreeBeforeQuiescence,
    /// `activate` starts decoding whether or not everything arrived and the digest holds.
    ActivateWithoutProof,
    /// `import` believes the checksums that came with the bytes.
    ImportWithoutChecksum,
    /// Imported blocks enter the prefix cache as they arrive, before `activate` has proven them.
    CacheBeforeProof,
    /// A token's random number depends on how many tokens this attempt generated, not on its position.
    RandomByAttempt,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Self; 6] = [
        Self::ChecksumAtSend,
        Self::FreeBeforeQuiescence,
        Self::ActivateWithoutProof,
        Self::ImportWithoutChecksum,
        Self::CacheBeforeProof,
        Self::RandomByAttempt,
    ];
}

#[cfg(feature = "planted")]
mod switch {
    use std::cell::Cell;

    use super::Bug;

    thread_local! {
        static BUGS: Cell<u32> = const { Cell::new(0) };
    }

    /// True when the bug is switched on in this thread.
    pub fn is(bug: Bug) -> bool {
        BUGS.get() & (1 << bug as u32) != 0
    }

    /// Runs `body` with the bug switched on in this thread, also off again when `body` panics.
    pub fn with<R>(bug: Bug, body: impl FnOnce() -> R) -> R {
        struct Restore(u32);
        impl Drop for Restore {
            fn drop(&mut self) {
                BUGS.set(self.0);
            }
        }
        let _restore = Restore(BUGS.get());
        BUGS.set(BUGS.get() | 1 << bug as u32);
        body()
    }
}

#[cfg(feature = "planted")]
pub use switch::{is, with};

/// Always false: the feature `planted` is off.
#[cfg(not(feature = "planted"))]
#[inline(always)]
pub const fn is(_bug: Bug) -> bool {
    false
}
