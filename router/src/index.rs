//! Which workers have which KV blocks, by name. Without IO.
//!
//! Blocks are named by a hash chain ([`proto::HashChain`]), so equal names mean equal prompts up to there, and the index
//! needs no tree: a table from name to the set of workers that have it. The longest match of a prompt is looked for at
//! the chain's ends first and halved where they differ, so a prompt of which everybody has the same beginning, or nobody
//! has anything, costs a few probes and not one for each of its blocks. It is exact where a worker that has a block has
//! the blocks before it, which is how workers evict; otherwise it may name too many.
//!
//! **Memory** is bounded by what the index was given: table, entries and sets are counted to the byte that they ask of
//! the allocator. When they would go beyond it, the names that were used longest ago are forgotten. What is forgotten
//! costs a prefill that need not have been, never a wrong answer.
//!
//! **A worker that is gone** costs nothing at once: its slot is marked, what the slot's bit says is ignored from then on,
//! and [`PrefixIndex::sweep`] takes the bits out in small steps before the slot is given to another.

mod entries;
mod holders;
mod table;

use proto::BlockHash;

use entries::{Entries, NONE};
use holders::Holders;
use table::Table;

/// Most entries that are forgotten to make room for one worker in a set: beyond that the worker is left out.
const FORGOTTEN_MAX: usize = 64;

/// A worker's place in the sets of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u16);

impl Slot {
    /// The slot as an index into [`Matches`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// See the module.
#[derive(Debug)]
pub struct PrefixIndex {
    table: Table,
    entries: Entries,
    /// Bytes that sets of many workers take.
    sets_bytes: usize,
    bytes_max: usize,
    /// A bit for each slot: it is a worker's, and the worker is there.
    live: Vec<u64>,
    /// Slots given up, and the sweep after whose end each is free again.
    retired: Vec<(Slot, u64)>,
    /// Slots that nobody has, and whose bits are nowhere set.
    vacant: Vec<Slot>,
    /// The next entry to sweep, and sweeps that were begun.
    swept: usize,
    sweeps: u64,
    evictions: u64,
}

/// How many blocks at the front of a prompt each worker has; kept from one look to the next, for its memory.
#[derive(Debug, Default)]
pub struct Matches {
    /// By slot; 0 beyond its end.
    depths: Vec<u32>,
    /// Sets of workers, one for each level of the search.
    rows: Vec<u64>,
}

impl Matches {
    /// Blocks at the front that the worker has.
    #[inline]
    pub fn blocks(&self, slot: Slot) -> usize {
        self.depths.get(slot.index()).map_or(0, |&depth| depth as usize)
    }
}

impl PrefixIndex {
    /// An empty index that never takes more than `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            table: Table::default(),
            entries: Entries::default(),
            sets_bytes: 0,
            bytes_max,
            live: Vec::new(),
            retired: Vec::new(),
            vacant: Vec::new(),
            swept: 0,
            sweeps: 0,
            evictions: 0,
        }
    }

    /// Blocks that are known.
    pub fn blocks(&self) -> usize {
        self.entries.len()
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.entries.bytes() + self.sets_bytes
    }

    /// Blocks forgotten so far for want of memory.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// A slot for a worker of which nothing is known yet; `None` when all 65,535 are taken.
    pub fn join(&mut self) -> Option<Slot> {
        let slot = match self.vacant.pop() {
            Some(slot) => slot,
            None => {
                let known = self.live.iter().map(|word| word.count_ones() as usize).sum::<usize>();
                let next = u16::try_from(known + self.retired.len()).ok().filter(|&next| next < u16::MAX)?;
                Slot(next)
            }
        };
        let word = slot.index() / 64;
        if self.live.len() <= word {
            self.live.resize(word + 1, 0);
        }
        self.live[word] |= 1 << (slot.index() % 64);
        Some(slot)
    }

    /// Forgets a worker. The slot means nothing from now on.
    pub fn retire(&mut self, slot: Slot) {
        if !self.is_live(slot) {
            return;
        }
        self.live[slot.index() / 64] &= !(1 << (slot.index() % 64));
        // The sweep under way may be past some of its entries; the next one begins with the first.
        self.retired.push((slot, self.sweeps + 2));
    }

    fn is_live(&self, slot: Slot) -> bool {
        self.live.get(slot.index() / 64).is_some_and(|word| word & (1 << (slot.index() % 64)) != 0)
    }

    /// True while there are bits of workers that are gone.
    pub fn needs_sweep(&self) -> bool {
        !self.retired.is_empty()
    }

    /// Looks through that many entries for bits of workers that are gone.
    pub fn sweep(&mut self, entries: usize) {
        for _ in 0..entries {
            if self.retired.is_empty() {
                return;
            }
            if self.swept >= self.entries.capacity() {
                self.swept = 0;
                self.sweeps += 1;
                let sweeps = self.sweeps;
                let vacant = &mut self.vacant;
                self.retired.retain(|&(slot, until)| {
                    let stays = until > sweeps;
                    if !stays {
                        vacant.push(slot);
                    }
                    stays
                });
                continue;
            }
            let place = self.swept as u32;
            self.swept += 1;
            if self.entries.is_used(place) && !self.entries.holders_mut(place).keep(&self.live) {
                self.forget(place);
            }
        }
    }

    /// The worker has these blocks, the first of them first.
    pub fn insert(&mut self, slot: Slot, blocks: &[BlockHash]) {
        if !self.is_live(slot) {
            return;
        }
        // The last first: what a chain begins with is needed longest, so it shall be the latest used.
        for &block in blocks.iter().rev() {
            self.insert_one(slot, block);
        }
    }

    fn insert_one(&mut self, slot: Slot, block: BlockHash) {
        let place = match self.table.find(block, &self.entries) {
            Some(place) => place,
            None => match self.enter(block) {
                Some(place) => place,
                None => return,
            },
        };
        self.entries.use_now(place);
        let growth = self.entries.holders(place).growth(slot.0);
        let mut forgotten = 0;
        while growth > 0 && self.bytes() + growth > self.bytes_max {
            let oldest = self.entries.oldest();
            if oldest == place || oldest == NONE || forgotten == FORGOTTEN_MAX {
                // Not even this one set fits, or there is little to be had: most entries take no memory of their own.
                return self.forget_if_empty(place);
            }
            forgotten += 1;
            self.forget(oldest);
            self.evictions += 1;
        }
        let before = self.entries.holders(place).bytes();
        self.entries.holders_mut(place).insert(slot.0);
        self.sets_bytes = self.sets_bytes - before + self.entries.holders(place).bytes();
    }

    /// A new entry without workers; `None` when there is no memory for a single one.
    fn enter(&mut self, block: BlockHash) -> Option<u32> {
        loop {
            let table = self.table.growth(self.entries.len() + 1);
            let needed = table + self.entries.growth();
            // While the table moves, the old one is there as well: `growth` is all of the new one.
            if needed == 0 || self.bytes() + needed <= self.bytes_max {
                break;
            }
            let oldest = self.entries.oldest();
            if oldest == NONE {
                return None;
            }
            self.forget(oldest);
            self.evictions += 1;
        }
        self.table.make_room(self.entries.len() + 1, &self.entries);
        let place = self.entries.enter(block);
        self.table.insert(block, place);
        Some(place)
    }

    /// The worker has these blocks no more.
    pub fn remove(&mut self, slot: Slot, blocks: &[BlockHash]) {
        if !self.is_live(slot) {
            return;
        }
        for &block in blocks {
            if let Some(place) = self.table.find(block, &self.entries) {
                self.entries.holders_mut(place).remove(slot.0);
                self.forget_if_empty(place);
            }
        }
    }

    fn forget_if_empty(&mut self, place: u32) {
        if self.entries.holders(place).is_empty() {
            self.forget(place);
        }
    }

    fn forget(&mut self, place: u32) {
        self.sets_bytes -= self.entries.holders(place).bytes();
        self.table.remove(self.entries.block(place), place, &self.entries);
        self.entries.leave(place);
    }

    /// The blocks were of use: others are forgotten before them.
    pub fn touch(&mut self, blocks: &[BlockHash]) {
        for &block in blocks.iter().rev() {
            if let Some(place) = self.table.find(block, &self.entries) {
                self.entries.use_now(place);
            }
        }
    }

    /// Finds out how many of the blocks, from the first, each worker has.
    pub fn find(&self, blocks: &[BlockHash], matches: &mut Matches) {
        matches.depths.clear();
        matches.depths.resize(self.live.len() * 64, 0);
        let words = self.live.len();
        if words == 0 || blocks.is_empty() {
            return;
        }
        let Matches { depths, rows } = matches;
        let levels = 2 + usize::BITS as usize - blocks.len().leading_zeros() as usize;
        rows.clear();
        rows.resize(words * levels, 0);
        let (first, rest) = rows.split_at_mut(words);
        self.load(blocks[0], &self.live, first);
        if first.iter().all(|&word| word == 0) {
            return;
        }
        let (last, rest) = rest.split_at_mut(words);
        let end = blocks.len() - 1;
        self.load(blocks[end], first, last);
        self.descend(blocks, (0, end), (&*first, &mut *last), rest, depths);
        each_bit(last.iter().copied(), |slot| depths[slot] = blocks.len() as u32);
    }

    /// Those of `among` that have the block.
    fn load(&self, block: BlockHash, among: &[u64], row: &mut [u64]) {
        match self.table.find(block, &self.entries) {
            Some(place) => self.entries.holders(place).within(among, row),
            None => row.fill(0),
        }
    }

    /// Settles the depth of those workers that have block `range.0` (the first row) and not block `range.1`. The second
    /// row is left with those that have every block looked at on the way.
    fn descend(
        &self,
        blocks: &[BlockHash],
        range: (usize, usize),
        (low, high): (&[u64], &mut [u64]),
        rest: &mut [u64],
        depths: &mut [u32],
    ) {
        if *low == *high {
            return;
        }
        let (start, end) = range;
        if end <= start + 1 {
            let lost = low.iter().zip(&*high).map(|(low, high)| low & !high);
            return each_bit(lost, |slot| depths[slot] = start as u32 + 1);
        }
        let (row, rest) = rest.split_at_mut(low.len());
        let middle = start + (end - start) / 2;
        self.load(blocks[middle], low, row);
        self.descend(blocks, (start, middle), (low, &mut *row), rest, depths);
        high.iter_mut().zip(&*row).for_each(|(high, row)| *high &= row);
        self.descend(blocks, (middle, end), (&*row, &mut *high), rest, depths);
    }

    /// Checks that counts, lists and table agree. For tests.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        self.entries.check()?;
        let mut sets = 0;
        for place in (0..self.entries.capacity() as u32).filter(|&place| self.entries.is_used(place)) {
            sets += self.entries.holders(place).bytes();
            let block = self.entries.block(place);
            if self.table.find(block, &self.entries) != Some(place) {
                return Err(format!("the table does not lead to entry {place}"));
            }
        }
        if sets != self.sets_bytes {
            return Err(format!("sets take {sets} bytes, {} are counted", self.sets_bytes));
        }
        if self.table.len() != self.entries.len() {
            return Err(format!("{} in the table, {} entries", self.table.len(), self.entries.len()));
        }
        if self.bytes() > self.bytes_max {
            return Err(format!("{} bytes taken, {} allowed", self.bytes(), self.bytes_max));
        }
        Ok(())
    }
}

/// Calls with the index of each bit that is set.
fn each_bit(words: impl Iterator<Item = u64>, mut call: impl FnMut(usize)) {
    for (index, mut word) in words.enumerate() {
        while word != 0 {
            call(index * 64 + word.trailing_zeros() as usize);
            word &= word - 1;
        }
    }
}
