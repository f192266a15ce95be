//! The process's monotonic clock.

use std::time::{Duration, Instant};

/// Time since the clock was made; never goes back. The sans-IO cores know time only in this form.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that reads zero now.
    #[expect(
        clippy::new_without_default,
        reason = "a default that depends on when it was made would surprise"
    )]
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }

    /// Time since the clock was made.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }
}
