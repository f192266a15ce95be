//! Who runs: so many requests at once; the others wait in line, the most urgent first.

use std::time::Duration;

use node::queue::{Full, Place, Queue};
use proto::{Error, Generation, Priority, Reason};

/// Requests that run and wait.
pub(crate) type Line = Queue<Urgency>;

/// The right to run.
pub(crate) type Turn = Place<Urgency>;

/// Where a request stands in line: streams that began elsewhere and go on here come first, then it goes by priority, and
/// within that by deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Urgency {
    is_new: bool,
    priority: Priority,
    deadline: Duration,
}

impl Urgency {
    /// That of a request which arrived at `now`.
    pub(crate) fn of(generation: &Generation, now: Duration) -> Self {
        Self {
            is_new: generation.generated == 0,
            priority: generation.priority,
            deadline: now.saturating_add(generation.time_left),
        }
    }
}

/// What a request hears for which the line is too long.
pub(crate) fn refused(full: Full) -> Error {
    let Full { running, waiting } = full;
    Error::new(Reason::QueueFull, format!("the router has its {running} requests, and {waiting} wait"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_that_go_on_come_first_then_priority_then_deadline() {
        let urgency = |is_new, priority, seconds| Urgency {
            is_new,
            priority: Priority(priority),
            deadline: Duration::from_secs(seconds),
        };
        let ordered = [urgency(false, 5, 9), urgency(true, 1, 8), urgency(true, 2, 1), urgency(true, 2, 3)];
        assert!(ordered.is_sorted(), "{ordered:?}");
    }
}
