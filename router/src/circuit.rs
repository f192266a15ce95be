//! Sparing a worker that fails again and again, without IO.
//!
//! A circuit is *closed* while its worker does what it is asked. [`FAILURES_MAX`] failures without a success between
//! them *open* it: for a back-off, which doubles each time, the worker is chosen only where there is no other. Then it is
//! *half open*: one request may try it. What becomes of that closes the circuit or opens it again; a try that tells nothing (its
//! client went away, there was no room) is followed by another after as long as the circuit was open.
//!
//! Refusals for want of room are no failures. A worker that comes back from another life begins with a closed circuit.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Failures in a row that open a circuit.
pub const FAILURES_MAX: u32 = 3;
/// The first back-off, and the longest.
pub const BACKOFF_MIN: Duration = Duration::from_secs(1);
/// See [`BACKOFF_MIN`].
pub const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// What a circuit lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CircuitState {
    /// Everything.
    Closed,
    /// Nothing that can go elsewhere.
    Open,
    /// One request.
    HalfOpen,
}

impl CircuitState {
    /// Every state.
    pub const ALL: [Self; 3] = [Self::Closed, Self::Open, Self::HalfOpen];

    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half-open",
        }
    }
}

/// One worker's circuit.
#[derive(Debug, Default)]
pub struct Circuit {
    /// Failures since the last success.
    failures: u32,
    /// Until when it is open, once it was opened.
    open_until: Option<Duration>,
    /// How long it was opened last.
    backoff: Duration,
    /// When a request tried it, half open as it is, microseconds; 0 when none has.
    tried: AtomicU64,
}

impl Circuit {
    /// What it lets through at `now`.
    pub fn state(&self, now: Duration) -> CircuitState {
        match self.open_until {
            None => CircuitState::Closed,
            Some(until) if now < until => CircuitState::Open,
            Some(_) => CircuitState::HalfOpen,
        }
    }

    /// True when nobody is kept from its worker.
    pub fn is_closed(&self) -> bool {
        self.open_until.is_none()
    }

    /// True when a request may be placed there though there are others.
    pub fn admits(&self, now: Duration) -> bool {
        match self.state(now) {
            CircuitState::Closed => true,
            CircuitState::Open => false,
            CircuitState::HalfOpen => {
                let tried = self.tried.load(Ordering::Relaxed);
                tried == 0 || now >= Duration::from_micros(tried).saturating_add(self.backoff)
            }
        }
    }

    /// A request was placed there.
    pub fn placed(&self, now: Duration) {
        if self.state(now) == CircuitState::HalfOpen {
            self.tried.store((now.as_micros() as u64).max(1), Ordering::Relaxed);
        }
    }

    /// The worker did what it was asked.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// The worker failed a request.
    pub fn failed(&mut self, now: Duration) {
        self.failures = self.failures.saturating_add(1);
        let is_open = self.open_until.is_some_and(|until| now < until);
        // What was placed before it opened may still fail, and says nothing new.
        if self.failures < FAILURES_MAX || is_open {
            return;
        }
        self.backoff = (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
        self.open_until = Some(now.saturating_add(self.backoff));
        *self.tried.get_mut() = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::CircuitState::{Closed, HalfOpen, Open};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn it_opens_at_the_third_failure_in_a_row() {
        let mut circuit = Circuit::default();
        for _ in 0..4 {
            circuit.failed(SECOND);
            circuit.failed(SECOND);
            circuit.succeeded();
        }
        assert_eq!((circuit.state(SECOND), circuit.admits(SECOND)), (Closed, true));
        (0..3).for_each(|_| circuit.failed(SECOND));
        assert_eq!((circuit.state(SECOND), circuit.admits(SECOND)), (Open, false));
    }

    #[test]
    fn half_open_lets_one_request_through() {
        let mut circuit = Circuit::default();
        (0..3).for_each(|_| circuit.failed(SECOND));
        let later = 2 * SECOND;
        assert_eq!((circuit.state(later), circuit.admits(later)), (HalfOpen, true));
        circuit.placed(later);
        assert!(!circuit.admits(later));
        assert!(circuit.admits(later + SECOND), "the try has told nothing, and so there is another");
        circuit.failed(later);
        assert_eq!(circuit.state(later + SECOND), Open, "twice as long as before");
        assert_eq!(circuit.state(later + 2 * SECOND), HalfOpen);
        assert!(circuit.admits(later + 2 * SECOND));
        circuit.placed(later + 2 * SECOND);
        circuit.succeeded();
        assert_eq!(circuit.state(later), Closed);
        circuit.failed(later);
        assert_eq!(circuit.state(later), Closed, "it begins anew");
    }

    #[test]
    fn back_offs_double_up_to_a_bound_and_late_failures_add_none() {
        let (mut circuit, mut now) = (Circuit::default(), Duration::ZERO);
        (0..3).for_each(|_| circuit.failed(now));
        for expected in [1, 2, 4, 8, 16, 30, 30] {
            circuit.failed(now);
            let opened = circuit.open_until.expect("open").saturating_sub(now);
            assert_eq!(opened, Duration::from_secs(expected));
            now += opened;
            circuit.failed(now);
        }
    }
}
