//! A worker's KV blocks as numbers and names: how many are free, and which beginnings of sequences are still there.
//!
//! A block is *free*, *cached* (known by name, nobody's), or *used*: named and with owners, or nameless and one
//! sequence's own. Two differences from the engine's pool, both small: a block that is named while another has the name
//! already becomes that one, and copies of part of a block are not counted.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use proto::BlockHash;

/// A block's content, with all before it.
pub(crate) type BlockName = BlockHash;

/// Names are random bits already.
#[derive(Default)]
pub(crate) struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = (self.0 << 8) | u64::from(byte));
    }
}

#[derive(Clone, Copy, Debug)]
struct Named {
    owners: u32,
    /// When it lost its last owner.
    tick: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Blocks {
    total: usize,
    free: usize,
    cached: usize,
    named: HashMap<BlockName, Named, BuildHasherDefault<AsItIs>>,
    /// Blocks as they lost their last owner; an entry whose tick is not the block's is old.
    unowned: VecDeque<(u64, BlockName)>,
    tick: u64,
    /// What has got a name and what has lost it since it was asked last; kept only when somebody asks.
    changes: Option<Vec<Change>>,
}

/// A block is known by name now, or no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Stored(BlockName),
    Removed(BlockName),
}

impl Blocks {
    pub(crate) fn new(total: usize) -> Self {
        Self {
            total,
            free: total,
            cached: 0,
            named: HashMap::default(),
            unowned: VecDeque::new(),
            tick: 0,
            changes: None,
        }
    }

    /// Changes are noted from now on.
    pub(crate) fn note_changes(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// The changes since it was asked last.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn note(&mut self, change: Change) {
        if let Some(changes) = &mut self.changes {
            changes.push(change);
        }
    }

    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Blocks that [`allocate`](Self::allocate) can give out.
    pub(crate) fn available(&self) -> usize {
        self.free + self.cached
    }

    /// How many of `names`, from the first on, are there.
    pub(crate) fn find(&self, names: &[BlockName]) -> usize {
        names.iter().take_while(|name| self.named.contains_key(name)).count()
    }

    /// How many of `names`, which are all there, nobody owns.
    pub(crate) fn unowned(&self, names: &[BlockName]) -> usize {
        names.iter().filter(|name| self.named[name].owners == 0).count()
    }

    /// One more owner for each of `names`, which are all there.
    pub(crate) fn share(&mut self, names: &[BlockName]) {
        for name in names {
            self.share_one(*name);
        }
    }

    fn share_one(&mut self, name: BlockName) -> bool {
        let Some(block) = self.named.get_mut(&name) else { return false };
        if block.owners == 0 {
            self.cached -= 1;
        }
        block.owners += 1;
        true
    }

    /// A nameless block; the block that was used least recently makes room. False when all are owned.
    pub(crate) fn allocate(&mut self) -> bool {
        if self.free > 0 {
            self.free -= 1;
            return true;
        }
        while let Some((tick, name)) = self.unowned.pop_front() {
            if self.named.get(&name).is_some_and(|block| block.owners == 0 && block.tick == tick) {
                self.named.remove(&name);
                self.cached -= 1;
                self.note(Change::Removed(name));
                return true;
            }
        }
        false
    }

    /// A nameless block of the caller's gets its name. The caller owns the named block afterwards.
    pub(crate) fn name(&mut self, name: BlockName) {
        if self.share_one(name) {
            self.free += 1;
        } else {
            self.named.insert(name, Named { owners: 1, tick: 0 });
            self.note(Change::Stored(name));
        }
    }

    /// Gives back named blocks, the last one first, so that the end of a beginning goes before its start; and nameless
    /// ones.
    pub(crate) fn release(&mut self, names: &[BlockName], nameless: usize) {
        self.free += nameless;
        for &name in names.iter().rev() {
            let Some(block) = self.named.get_mut(&name) else { continue };
            block.owners -= 1;
            if block.owners == 0 {
                self.tick += 1;
                block.tick = self.tick;
                self.cached += 1;
                self.unowned.push_back((self.tick, name));
            }
        }
        // Entries of blocks that were taken again would pile up.
        if self.unowned.len() > 2 * self.total {
            let named = &self.named;
            self.unowned.retain(|(tick, name)| {
                named.get(name).is_some_and(|block| block.owners == 0 && block.tick == *tick)
            });
        }
    }

    /// Checks the counts against the names; `nameless` blocks are owned besides.
    #[cfg(test)]
    pub(crate) fn check(&self, nameless: usize) {
        let owned = self.named.values().filter(|block| block.owners > 0).count();
        let cached = self.named.values().filter(|block| block.owners == 0).count();
        assert_eq!(self.cached, cached);
        assert_eq!(self.free + self.cached + owned + nameless, self.total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: u8) -> BlockName {
        BlockHash([number; 16])
    }

    fn list<const N: usize>(numbers: [u8; N]) -> [BlockName; N] {
        numbers.map(name)
    }

    #[test]
    fn what_was_used_least_recently_goes_first_and_ends_before_starts() {
        let mut blocks = Blocks::new(4);
        blocks.note_changes();
        for number in [1, 2, 3] {
            assert!(blocks.allocate());
            blocks.name(name(number));
        }
        blocks.release(&list([1, 2]), 0);
        blocks.release(&list([3]), 0);
        blocks.check(0);
        assert_eq!((blocks.available(), blocks.find(&list([1, 2, 9]))), (4, 2));
        // The free one, then 2, the end of what was released first.
        assert!(blocks.allocate() && blocks.allocate());
        let stored = list([1, 2, 3]).map(Change::Stored);
        let changes = blocks.take_changes();
        assert_eq!((&changes[..3], &changes[3..]), (&stored[..], &[Change::Removed(name(2))][..]));
        assert_eq!((blocks.find(&list([1, 2])), blocks.find(&list([3]))), (1, 1));
        blocks.check(2);
        blocks.share(&list([1]));
        assert_eq!(blocks.unowned(&list([1, 3])), 1);
        assert!(blocks.allocate());
        assert!(!blocks.allocate(), "1 is owned");
        blocks.check(3);
        blocks.release(&list([1]), 3);
        blocks.check(0);
        assert_eq!(blocks.find(&list([1])), 1);
    }

    #[test]
    fn a_name_that_is_there_already_frees_the_other_block() {
        let mut blocks = Blocks::new(2);
        assert!(blocks.allocate() && blocks.allocate());
        blocks.name(name(1));
        blocks.name(name(1));
        blocks.check(0);
        assert_eq!(blocks.available(), 1);
        blocks.release(&list([1]), 0);
        blocks.release(&list([1]), 0);
        blocks.check(0);
        assert_eq!(blocks.available(), 2);
    }
}
