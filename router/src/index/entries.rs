//! The blocks that are known, in the order of their last use. They stand in chunks, so that growing moves nothing.

use proto::BlockHash;

use super::Holders;

/// No entry.
pub(super) const NONE: u32 = u32::MAX;
/// Entries of a chunk.
const CHUNK: usize = 1024;

#[derive(Clone, Debug)]
struct Entry {
    block: BlockHash,
    /// The entry used next after this one, and the one before. Of an entry that is not used, `older` is the next such,
    /// and `newer` is the entry itself.
    newer: u32,
    older: u32,
    holders: Holders,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Entries {
    chunks: Vec<Box<[Entry]>>,
    len: usize,
    newest: u32,
    oldest: u32,
    /// The first of the entries that are not used.
    unused: u32,
}

impl Default for Entries {
    fn default() -> Self {
        Self { chunks: Vec::new(), len: 0, newest: NONE, oldest: NONE, unused: NONE }
    }
}

impl Entries {
    /// Entries that are used.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Entries that there is memory for.
    pub(super) fn capacity(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    pub(super) fn bytes(&self) -> usize {
        self.capacity() * size_of::<Entry>() + self.chunks.capacity() * size_of::<Box<[Entry]>>()
    }

    /// Bytes more that another entry would take. The list of chunks doubles, and is there twice while it does.
    pub(super) fn growth(&self) -> usize {
        if self.unused != NONE {
            return 0;
        }
        let list = if self.chunks.len() < self.chunks.capacity() { 0 } else { self.chunks.len().max(4) * 2 };
        CHUNK * size_of::<Entry>() + list * size_of::<Box<[Entry]>>()
    }

    fn at(&self, place: u32) -> &Entry {
        &self.chunks[place as usize / CHUNK][place as usize % CHUNK]
    }

    fn at_mut(&mut self, place: u32) -> &mut Entry {
        &mut self.chunks[place as usize / CHUNK][place as usize % CHUNK]
    }

    pub(super) fn is_used(&self, place: u32) -> bool {
        self.at(place).newer != place
    }

    pub(super) fn block(&self, place: u32) -> BlockHash {
        self.at(place).block
    }

    pub(super) fn holders(&self, place: u32) -> &Holders {
        &self.at(place).holders
    }

    pub(super) fn holders_mut(&mut self, place: u32) -> &mut Holders {
        &mut self.at_mut(place).holders
    }

    /// The entry that was used longest ago; [`NONE`] without entries.
    pub(super) fn oldest(&self) -> u32 {
        self.oldest
    }

    /// A new entry, the latest used.
    pub(super) fn enter(&mut self, block: BlockHash) -> u32 {
        if self.unused == NONE {
            let start = self.capacity() as u32;
            let entry = |place: u32| Entry {
                block: BlockHash([0; 16]),
                newer: place,
                older: if place as usize % CHUNK == CHUNK - 1 { NONE } else { place + 1 },
                holders: Holders::default(),
            };
            self.chunks.push((start..start + CHUNK as u32).map(entry).collect());
            self.unused = start;
        }
        let place = self.unused;
        self.unused = self.at(place).older;
        self.at_mut(place).block = block;
        self.len += 1;
        self.append(place);
        place
    }

    /// Gives an entry up.
    pub(super) fn leave(&mut self, place: u32) {
        self.unlink(place);
        let unused = self.unused;
        let entry = self.at_mut(place);
        (entry.newer, entry.older, entry.holders) = (place, unused, Holders::default());
        self.unused = place;
        self.len -= 1;
    }

    /// Makes an entry the latest used.
    pub(super) fn use_now(&mut self, place: u32) {
        if self.newest != place {
            self.unlink(place);
            self.append(place);
        }
    }

    fn append(&mut self, place: u32) {
        let before = std::mem::replace(&mut self.newest, place);
        let entry = self.at_mut(place);
        (entry.newer, entry.older) = (NONE, before);
        match before {
            NONE => self.oldest = place,
            before => self.at_mut(before).newer = place,
        }
    }

    fn unlink(&mut self, place: u32) {
        let Entry { newer, older, .. } = *self.at(place);
        match newer {
            NONE => self.newest = older,
            newer => self.at_mut(newer).older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.at_mut(older).newer = newer,
        }
    }

    /// Checks that the lists lead to every entry once.
    pub(super) fn check(&self) -> Result<(), String> {
        let (mut used, mut place, mut before) = (0, self.newest, NONE);
        while place != NONE && used <= self.len {
            if self.at(place).newer != before {
                return Err(format!("entry {place}: newer is {}, not {before}", self.at(place).newer));
            }
            (before, place, used) = (place, self.at(place).older, used + 1);
        }
        let (mut unused, mut place) = (0, self.unused);
        while place != NONE && unused <= self.capacity() {
            if self.is_used(place) {
                return Err(format!("entry {place}: used and unused"));
            }
            (place, unused) = (self.at(place).older, unused + 1);
        }
        if before != self.oldest || used != self.len || used + unused != self.capacity() {
            return Err(format!("{used} used, {unused} unused of {}, {} counted", self.capacity(), self.len));
        }
        Ok(())
    }
}
