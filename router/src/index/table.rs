//! From a block's name to its entry: open addressing with linear probing, at most three quarters full.
//!
//! A bucket is the entry's place and 32 bits of the name, so that probing passes over others' buckets without looking at
//! their entries. Growth is for the caller to allow, who counts bytes.

use std::hash::{BuildHasher, RandomState};

use proto::BlockHash;

use super::entries::{Entries, NONE};

/// Fewest buckets of a table that is not empty.
const BUCKETS_MIN: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Bucket {
    tag: u32,
    /// [`NONE`] when it is empty.
    place: u32,
}

const EMPTY: Bucket = Bucket { tag: 0, place: NONE };

/// See the module.
#[derive(Debug)]
pub(super) struct Table {
    /// A power of two of them, or none.
    buckets: Vec<Bucket>,
    len: usize,
    /// Odd, and drawn for each table: whoever chooses tokens cannot choose buckets.
    key: u64,
}

impl Default for Table {
    fn default() -> Self {
        Self { buckets: Vec::new(), len: 0, key: RandomState::new().hash_one("buckets") | 1 }
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        self.buckets.len() * size_of::<Bucket>()
    }

    /// Bytes of a new table, beside the old one, that `len` entries need; 0 when they fit.
    pub(super) fn growth(&self, len: usize) -> usize {
        if len * 4 <= self.buckets.len() * 3 { 0 } else { self.next_size() * size_of::<Bucket>() }
    }

    fn next_size(&self) -> usize {
        (self.buckets.len() * 2).max(BUCKETS_MIN)
    }

    /// Grows if `len` entries need it.
    pub(super) fn make_room(&mut self, len: usize, entries: &Entries) {
        if self.growth(len) == 0 {
            return;
        }
        let buckets = vec![EMPTY; self.next_size()];
        let old = std::mem::replace(&mut self.buckets, buckets);
        self.len = 0;
        for bucket in old.into_iter().filter(|bucket| bucket.place != NONE) {
            self.insert(entries.block(bucket.place), bucket.place);
        }
    }

    /// Where a name belongs, and its tag.
    fn home(&self, block: BlockHash) -> (usize, u32) {
        let [a, b, c, d, e, f, g, h, tag @ ..] = block.0;
        let mixed = u64::from_le_bytes([a, b, c, d, e, f, g, h]).wrapping_mul(self.key);
        // The high bits of a product depend on all bits of its factors.
        let home = (mixed >> 32) as usize & (self.buckets.len() - 1);
        let [a, b, c, d, ..] = tag;
        (home, u32::from_le_bytes([a, b, c, d]))
    }

    /// The entry of a name.
    pub(super) fn find(&self, block: BlockHash, entries: &Entries) -> Option<u32> {
        if self.buckets.is_empty() {
            return None;
        }
        let (mut at, tag) = self.home(block);
        loop {
            let bucket = self.buckets[at];
            if bucket.place == NONE {
                return None;
            }
            if bucket.tag == tag && entries.block(bucket.place) == block {
                return Some(bucket.place);
            }
            at = (at + 1) & (self.buckets.len() - 1);
        }
    }

    /// Enters a name that is not there. There must be room for it.
    pub(super) fn insert(&mut self, block: BlockHash, place: u32) {
        let (mut at, tag) = self.home(block);
        while self.buckets[at].place != NONE {
            at = (at + 1) & (self.buckets.len() - 1);
        }
        self.buckets[at] = Bucket { tag, place };
        self.len += 1;
    }

    /// Takes out a name that is there, and moves up what stands behind it, so that no search ends too early.
    pub(super) fn remove(&mut self, block: BlockHash, place: u32, entries: &Entries) {
        let mask = self.buckets.len() - 1;
        let (mut hole, _) = self.home(block);
        while self.buckets[hole].place != place {
            if self.buckets[hole].place == NONE {
                return;
            }
            hole = (hole + 1) & mask;
        }
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let bucket = self.buckets[at];
            if bucket.place == NONE {
                break;
            }
            let (home, _) = self.home(entries.block(bucket.place));
            // It may move when its home is not between the hole and where it stands.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.buckets[hole] = bucket;
                hole = at;
            }
        }
        self.buckets[hole] = EMPTY;
        self.len -= 1;
    }
}
