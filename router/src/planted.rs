//! Known-wrong behaviours, each switched on by name, that the tests and the simulation must catch.
//!
//! A checker that has never failed proves nothing. Every bug here is one line at the place where a correct router
//! does the right thing. Without the cargo feature `planted` the question is the constant `false`, and the line
//! compiles to nothing.

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A replay uses the number of the attempt that failed, so it cannot be told from it.
    AttemptNotRaised,
    /// Tokens go to the client in whatever order and number they come.
    EmitUnorderedTokens,
    /// Tokens from decode do not wait for the first token, which prefill samples.
    FirstTokenNotAwaited,
    /// A request that ended ends again.
    FinishTwice,
    /// A replay starts from what the client asked, without the tokens that it already has.
    RetryLosesTokens,
    /// The workers of a failed attempt are not fenced.
    NoFence,
    /// A retry leaves the calls of the failed attempt open.
    CallsOutliveAttempt,
    /// The end of a request leaves a hand-off that nobody took to its lease.
    EndLeavesHandoff,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Self; 8] = [
        Self::AttemptNotRaised,
        Self::EmitUnorderedTokens,
        Self::FirstTokenNotAwaited,
        Self::FinishTwice,
        Self::RetryLosesTokens,
        Self::NoFence,
        Self::CallsOutliveAttempt,
        Self::EndLeavesHandoff,
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
