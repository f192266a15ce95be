//! How a crate plants known-wrong behaviours that its tests and the simulation must catch.
//!
//! A checker that has never failed proves nothing. A crate lists its bugs as the enum `Bug` and calls
//! [`planted_switch!`](crate::planted_switch) beside it; each bug is then one line at the place where a correct program
//! does the right thing. Without the crate's cargo feature `planted` the question is the constant `false`, and the line
//! compiles to nothing.

/// Defines `is(bug)`, and with the calling crate's feature `planted` also `with(bug, body)`, for the enum `Bug` in scope.
///
/// Bugs are switched on per thread, so that tests that run side by side do not see each other's.
#[macro_export]
macro_rules! planted_switch {
    () => {
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
    };
}
