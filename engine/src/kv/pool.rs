//! The block pool: reference counts, the free list, and the prefix cache with its eviction order.
//!
//! A block is in exactly one of three states. *Free*: nobody owns it and nothing in it is of worth. *Cached*:
//! nobody owns it, but its hash is known, so that a later sequence with the same tokens can own it again without
//! computing. *Used*: it has owners, one per block table it is in; it may be known by hash as well, and then
//! further sequences can share it. A cached block becomes free when room is needed, the least recently used first.

use std::collections::BTreeMap;

use proto::BlockHash;
use proto::watch::BlockChange;

use crate::batch::BlockIndex;

/// What is known of one block.
#[derive(Debug, Default)]
struct Block {
    /// Block tables that it is in.
    owners: u32,
    /// Its name in the prefix cache.
    hash: Option<BlockHash>,
    /// When it became cached, in ticks of the pool; meaningful while cached.
    cached_at: u64,
    /// CRC32C of each slab, taken at seal; empty before. `[layers]`
    checksums: Vec<u32>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    /// Free blocks; the last is given out next.
    free: Vec<BlockIndex>,
    /// Cached blocks by the tick at which they lost their last owner.
    cached: BTreeMap<u64, BlockIndex>,
    by_hash: BTreeMap<BlockHash, BlockIndex>,
    tick: u64,
    /// What became known and unknown; `None` while nobody asks.
    log: Option<Log>,
}

/// Changes of what is known, until somebody takes them.
#[derive(Debug)]
struct Log {
    changes: Vec<BlockChange>,
    bound: usize,
    /// False once there were more changes than the bound.
    is_complete: bool,
}

impl BlockPool {
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            blocks: (0..blocks).map(|_| Block::default()).collect(),
            free: (0..blocks as BlockIndex).rev().collect(),
            cached: BTreeMap::new(),
            by_hash: BTreeMap::new(),
            tick: 0,
            log: None,
        }
    }

    /// Blocks in all.
    pub(crate) fn total(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn cached(&self) -> usize {
        self.cached.len()
    }

    /// Blocks that `allocate` can give out.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// The blocks that hold the longest known prefix of `hashes`.
    pub(crate) fn find(&self, hashes: &[BlockHash]) -> Vec<BlockIndex> {
        hashes.iter().map_while(|hash| self.by_hash.get(hash).copied()).collect()
    }

    /// How many of `blocks` nobody owns.
    pub(crate) fn unowned(&self, blocks: &[BlockIndex]) -> usize {
        blocks.iter().filter(|&&block| self.blocks[block as usize].owners == 0).count()
    }

    /// A block with one owner and nothing in it; evicts the least recently used cached block when none is free.
    pub(crate) fn allocate(&mut self) -> Option<BlockIndex> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.cached.pop_first()?;
                self.forget(block);
                block
            }
        };
        let entry = &mut self.blocks[block as usize];
        entry.owners = 1;
        entry.checksums.clear();
        Some(block)
    }

    /// One more owner for a block that [`find`](Self::find) gave.
    pub(crate) fn share(&mut self, block: BlockIndex) {
        let entry = &mut self.blocks[block as usize];
        if entry.owners == 0 {
            self.cached.remove(&entry.cached_at);
        }
        entry.owners += 1;
    }

    /// One owner less. Without owners a block is cached when its hash is known, free otherwise.
    pub(crate) fn release(&mut self, block: BlockIndex) {
        let entry = &mut self.blocks[block as usize];
        entry.owners -= 1;
        if entry.owners > 0 {
            return;
        }
        if entry.hash.is_some() {
            self.tick += 1;
            entry.cached_at = self.tick;
            self.cached.insert(self.tick, block);
        } else {
            self.free.push(block);
        }
    }

    /// Records the checksums of a block whose last token was written.
    pub(crate) fn seal(&mut self, block: BlockIndex, checksums: impl Iterator<Item = u32>) {
        let entry = &mut self.blocks[block as usize];
        entry.checksums.clear();
        entry.checksums.extend(checksums);
    }

    /// The checksums taken at seal; empty before. `[layers]`
    pub(crate) fn checksums(&self, block: BlockIndex) -> &[u32] {
        &self.blocks[block as usize].checksums
    }

    /// Makes a used block known by its hash, unless another block of the same content is already.
    pub(crate) fn publish(&mut self, block: BlockIndex, hash: BlockHash) {
        let entry = &mut self.blocks[block as usize];
        if entry.hash.is_none() && !self.by_hash.contains_key(&hash) {
            entry.hash = Some(hash);
            self.by_hash.insert(hash, block);
            self.note(BlockChange::Stored(hash));
        }
    }

    /// Makes a block unknown to later sequences.
    pub(crate) fn forget(&mut self, block: BlockIndex) {
        if let Some(hash) = self.blocks[block as usize].hash.take() {
            self.by_hash.remove(&hash);
            self.note(BlockChange::Removed(hash));
        }
    }

    fn note(&mut self, change: BlockChange) {
        let Some(log) = &mut self.log else { return };
        if log.changes.len() < log.bound {
            log.changes.push(change);
        } else {
            log.is_complete = false;
        }
    }

    /// Notes changes of what is known from now on, at most `bound` until they are taken; `None` notes none.
    pub(crate) fn follow(&mut self, bound: Option<usize>) {
        self.log = bound.map(|bound| Log { changes: Vec::new(), bound, is_complete: true });
    }

    /// Moves the changes noted so far to `out`. False when there were more than were noted.
    pub(crate) fn take_changes(&mut self, out: &mut Vec<BlockChange>) -> bool {
        let Some(log) = &mut self.log else { return true };
        out.append(&mut log.changes);
        std::mem::replace(&mut log.is_complete, true)
    }

    /// The names of all blocks that can be found.
    pub(crate) fn known(&self) -> Vec<BlockHash> {
        self.by_hash.keys().copied().collect()
    }

    /// Checks that every block is in exactly one state and has as many owners as block tables it is in.
    /// `owned` gives the blocks of all block tables.
    pub(crate) fn check(&self, owned: impl Iterator<Item = BlockIndex>) -> Result<(), String> {
        let mut owners = vec![0u32; self.total()];
        for block in owned {
            owners[block as usize] += 1;
        }
        let mut listed = vec![0u32; self.total()];
        for &block in self.free.iter().chain(self.cached.values()) {
            listed[block as usize] += 1;
        }
        for (index, block) in self.blocks.iter().enumerate() {
            if block.owners != owners[index] {
                return Err(format!(
                    "block {index}: {} owners counted, {} found",
                    block.owners, owners[index]
                ));
            }
            if listed[index] != u32::from(block.owners == 0) {
                return Err(format!(
                    "block {index}: {} owners, and {} times in the free and cached lists",
                    block.owners, listed[index]
                ));
            }
            let named = block.hash.map(|hash| self.by_hash.get(&hash).copied());
            if named.is_some_and(|named| named != Some(index as BlockIndex)) {
                return Err(format!("block {index}: known by a hash that leads to {named:?}"));
            }
        }
        if let Some(block) = self.free.iter().find(|&&block| self.blocks[block as usize].hash.is_some()) {
            return Err(format!("block {block}: free, but known by hash"));
        }
        if let Some(block) = self.cached.values().find(|&&block| self.blocks[block as usize].hash.is_none()) {
            return Err(format!("block {block}: cached, but known by no hash"));
        }
        let known = self.blocks.iter().filter(|block| block.hash.is_some()).count();
        if known != self.by_hash.len() {
            return Err(format!(
                "{known} blocks know their hash, {} hashes lead to blocks",
                self.by_hash.len()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proto::{Digest, HashChain};

    use super::*;

    fn hashes(tokens: &[u32]) -> Vec<BlockHash> {
        HashChain::new(Digest::default(), 1).of(tokens)
    }

    #[test]
    fn a_block_is_shared_cached_and_evicted() {
        let mut pool = BlockPool::new(2);
        let names = hashes(&[5, 6]);
        let first = pool.allocate().unwrap();
        pool.publish(first, names[0]);
        assert_eq!(pool.find(&names), [first]);
        pool.share(first);
        pool.check([first, first].into_iter()).unwrap();
        pool.release(first);
        pool.check([first].into_iter()).unwrap();
        pool.release(first);
        assert_eq!((pool.free(), pool.cached(), pool.available()), (1, 1, 2));
        let other = pool.allocate().unwrap();
        assert_ne!(other, first, "a free block is taken before a cached one");
        assert_eq!(pool.allocate(), Some(first));
        assert!(pool.find(&names).is_empty());
        assert_eq!(pool.allocate(), None);
        pool.check([first, other].into_iter()).unwrap();
    }

    #[test]
    fn the_least_recently_used_is_evicted_first() {
        let mut pool = BlockPool::new(3);
        let names = hashes(&[1, 2, 3]);
        let blocks: Vec<_> = names
            .iter()
            .map(|&name| {
                let block = pool.allocate().unwrap();
                pool.publish(block, name);
                block
            })
            .collect();
        for &block in &blocks {
            pool.release(block);
        }
        // Using the first again makes the second the oldest.
        pool.share(blocks[0]);
        pool.release(blocks[0]);
        assert_eq!(pool.allocate(), Some(blocks[1]));
        assert_eq!(pool.allocate(), Some(blocks[2]));
        assert_eq!(pool.allocate(), Some(blocks[0]));
    }

    #[test]
    fn equal_content_is_known_once() {
        let mut pool = BlockPool::new(2);
        let name = hashes(&[1])[0];
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        pool.publish(a, name);
        pool.publish(b, name);
        pool.release(b);
        pool.release(a);
        assert_eq!((pool.free(), pool.cached()), (1, 1));
        pool.check(std::iter::empty()).unwrap();
    }

    #[test]
    fn what_becomes_known_and_unknown_is_told_to_who_asks() {
        use BlockChange::{Removed, Stored};
        let mut pool = BlockPool::new(2);
        let names = hashes(&[1, 2, 3]);
        let mut told = Vec::new();
        let publish = |pool: &mut BlockPool, name| {
            let block = pool.allocate().unwrap();
            pool.publish(block, name);
            pool.release(block);
        };
        publish(&mut pool, names[0]);
        assert!(pool.take_changes(&mut told));
        assert_eq!(told, [], "nobody asked");
        pool.follow(Some(3));
        assert_eq!(pool.known(), names[..1]);
        publish(&mut pool, names[1]);
        publish(&mut pool, names[2]);
        assert!(pool.take_changes(&mut told));
        assert_eq!(told, [Stored(names[1]), Removed(names[0]), Stored(names[2])]);
        told.clear();
        publish(&mut pool, names[0]);
        publish(&mut pool, names[1]);
        assert!(!pool.take_changes(&mut told), "four changes, and room for three");
        assert!(pool.take_changes(&mut told));
        pool.follow(None);
        told.clear();
        publish(&mut pool, names[2]);
        assert!(pool.take_changes(&mut told) && told.is_empty());
    }

    #[test]
    fn the_check_sees_a_lost_owner() {
        let mut pool = BlockPool::new(1);
        pool.allocate().unwrap();
        let found = pool.check(std::iter::empty()).unwrap_err();
        assert_eq!(found, "block 0: 1 owners counted, 0 found");
    }
}
