//! What will happen, in the order of time; of what happens at the same time, what was entered first.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Virtual time, nanoseconds.
pub(crate) type Time = u64;

struct Entry<E> {
    at: Time,
    order: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    /// The earliest is the greatest: the heap gives the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// See the module.
pub(crate) struct Queue<E> {
    heap: BinaryHeap<Entry<E>>,
    order: u64,
    now: Time,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), order: 0, now: 0 }
    }
}

impl<E> Queue<E> {
    /// The time of the event that came last.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Enters an event; one whose time has passed happens now.
    pub(crate) fn push(&mut self, at: Time, event: E) {
        self.order += 1;
        self.heap.push(Entry { at: at.max(self.now), order: self.order, event });
    }

    /// Enters an event that happens in a while.
    pub(crate) fn after(&mut self, wait: Time, event: E) {
        self.push(self.now.saturating_add(wait), event);
    }

    /// The next event; its time is now.
    pub(crate) fn pop(&mut self) -> Option<E> {
        let entry = self.heap.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_the_order_of_time_and_then_of_entry() {
        let mut queue = Queue::default();
        for (at, event) in [(5, "d"), (1, "a"), (5, "e"), (2, "b")] {
            queue.push(at, event);
        }
        assert_eq!((queue.pop(), queue.now()), (Some("a"), 1));
        assert_eq!(queue.pop(), Some("b"));
        queue.after(1, "c");
        queue.push(0, "now");
        let rest: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(rest, ["now", "c", "d", "e"]);
    }
}
