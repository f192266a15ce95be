//! Changes of the prefix cache on their way from the engine's thread to those who watch.
//!
//! Changes are numbered through the worker's life. The last of them are kept, as many as the bound says, for all who
//! watch together; who falls behind further than that starts anew with all that is known. While nobody watches nothing
//! is kept, and the engine notes nothing.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use proto::watch::BlockChange;
use tokio::sync::watch;

/// See the module.
#[derive(Debug)]
pub(crate) struct Feed {
    kept: Mutex<Kept>,
    /// The number of the next change; its receivers are those who watch.
    next: watch::Sender<u64>,
    bound: usize,
}

#[derive(Debug)]
struct Kept {
    /// The number of the next change.
    next: u64,
    /// The changes before it.
    changes: VecDeque<BlockChange>,
}

impl Feed {
    /// Nothing yet; at most `bound` changes will be kept.
    pub(crate) fn new(bound: usize) -> Self {
        // Number 0 is what an absent field reads as.
        let kept = Kept { next: 1, changes: VecDeque::new() };
        Self { kept: Mutex::new(kept), next: watch::channel(1).0, bound }
    }

    /// Most changes that are kept.
    pub(crate) fn bound(&self) -> usize {
        self.bound
    }

    /// True while somebody watches.
    pub(crate) fn is_followed(&self) -> bool {
        self.next.receiver_count() > 0
    }

    /// Tells of every change from now on.
    pub(crate) fn follow(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the next change.
    pub(crate) fn next(&self) -> u64 {
        self.kept().next
    }

    /// Adds changes, and empties the list. When they are not all (`complete`), everybody who watches starts anew.
    pub(crate) fn add(&self, changes: &mut Vec<BlockChange>, complete: bool) {
        if changes.is_empty() && complete {
            return;
        }
        let mut kept = self.kept();
        kept.next += changes.len() as u64;
        if complete {
            let surplus = (kept.changes.len() + changes.len()).saturating_sub(self.bound);
            let old = surplus.min(kept.changes.len());
            kept.changes.drain(..old);
            let skipped = surplus - old;
            kept.changes.extend(changes.drain(..).skip(skipped));
        } else {
            // A number that no change has.
            kept.next += 1;
            kept.changes.clear();
            changes.clear();
        }
        let next = kept.next;
        drop(kept);
        self.next.send_replace(next);
    }

    /// The changes from that number on, `None` when some are not kept any more.
    pub(crate) fn since(&self, from: u64) -> Option<Vec<BlockChange>> {
        let kept = self.kept();
        let behind = usize::try_from(kept.next.checked_sub(from)?).ok()?;
        let start = kept.changes.len().checked_sub(behind)?;
        Some(kept.changes.range(start..).copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use proto::BlockHash;

    use super::*;

    fn stored(names: std::ops::Range<u8>) -> Vec<BlockChange> {
        names.map(|name| BlockChange::Stored(BlockHash([name; 16]))).collect()
    }

    #[test]
    fn whoever_keeps_up_misses_nothing() {
        let feed = Feed::new(4);
        assert!(!feed.is_followed());
        let mut follower = feed.follow();
        assert!(feed.is_followed());
        feed.add(&mut stored(0..3), true);
        assert!(follower.has_changed().unwrap());
        assert_eq!(*follower.borrow_and_update(), 4);
        assert_eq!(feed.since(1), Some(stored(0..3)));
        feed.add(&mut stored(3..5), true);
        assert_eq!(feed.since(4), Some(stored(3..5)));
        assert_eq!(feed.since(6), Some(vec![]));
        feed.add(&mut Vec::new(), true);
        assert_eq!(feed.next(), 6);
        drop(follower);
        assert!(!feed.is_followed());
    }

    #[test]
    fn whoever_falls_behind_is_told() {
        let feed = Feed::new(4);
        feed.add(&mut stored(0..3), true);
        feed.add(&mut stored(3..6), true);
        assert_eq!(feed.since(1), None);
        assert_eq!(feed.since(3), Some(stored(2..6)));
        // More at once than are kept.
        feed.add(&mut stored(6..16), true);
        assert_eq!(feed.since(7), None);
        assert_eq!(feed.since(13), Some(stored(12..16)));
        // Numbers of another life.
        assert_eq!(feed.since(1000), None);
        // Changes that the engine did not note.
        feed.add(&mut stored(16..17), false);
        assert_eq!(feed.since(17), None);
        assert_eq!(feed.since(feed.next()), Some(vec![]));
    }
}
