//! The set of workers that have one block.

/// No worker, in a set of few.
const NOBODY: u16 = u16::MAX;
/// Most workers of a small set: as many as fit beside the tag of a pointer's size.
const FEW: usize = 6;

/// Slots of workers. Most blocks are one worker's; those of a common beginning are everybody's.
#[derive(Clone, Debug)]
pub(super) enum Holders {
    /// In no order.
    Few([u16; FEW]),
    /// A bit for each slot.
    #[expect(
        clippy::box_collection,
        reason = "a thin pointer: the enum is two words, and there are millions of it"
    )]
    Many(Box<Vec<u64>>),
}

impl Default for Holders {
    fn default() -> Self {
        Self::Few([NOBODY; FEW])
    }
}

impl Holders {
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Few(slots) => slots.iter().all(|&slot| slot == NOBODY),
            Self::Many(words) => words.iter().all(|&word| word == 0),
        }
    }

    /// Bytes beyond those of the enum itself.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Few(_) => 0,
            Self::Many(words) => size_of::<Vec<u64>>() + words.capacity() * size_of::<u64>(),
        }
    }

    /// Bytes more that inserting the slot would take.
    pub(super) fn growth(&self, slot: u16) -> usize {
        let words_for = |slot: u16| usize::from(slot) / 64 + 1;
        match self {
            Self::Few(slots) if slots.contains(&slot) || slots.contains(&NOBODY) => 0,
            Self::Few(slots) => {
                let words = slots.iter().copied().chain([slot]).map(words_for).max().unwrap_or(1);
                size_of::<Vec<u64>>() + words * size_of::<u64>()
            }
            Self::Many(words) => words_for(slot).saturating_sub(words.capacity()) * size_of::<u64>(),
        }
    }

    pub(super) fn insert(&mut self, slot: u16) {
        match self {
            Self::Few(slots) => {
                if slots.contains(&slot) {
                    return;
                }
                if let Some(free) = slots.iter_mut().find(|held| **held == NOBODY) {
                    *free = slot;
                    return;
                }
                let all = slots.map(Some);
                let last = all.into_iter().flatten().chain([slot]).max().unwrap_or(slot);
                let mut words = Vec::new();
                words.reserve_exact(usize::from(last) / 64 + 1);
                words.resize(usize::from(last) / 64 + 1, 0);
                all.into_iter().flatten().chain([slot]).for_each(|slot| set(&mut words, slot));
                *self = Self::Many(Box::new(words));
            }
            Self::Many(words) => {
                let needed = usize::from(slot) / 64 + 1;
                if words.len() < needed {
                    words.reserve_exact(needed - words.len());
                    words.resize(needed, 0);
                }
                set(words, slot);
            }
        }
    }

    pub(super) fn remove(&mut self, slot: u16) {
        match self {
            Self::Few(slots) => {
                slots.iter_mut().filter(|held| **held == slot).for_each(|held| *held = NOBODY);
            }
            Self::Many(words) => {
                if let Some(word) = words.get_mut(usize::from(slot) / 64) {
                    *word &= !(1 << (slot % 64));
                }
            }
        }
    }

    /// Leaves out whoever is not in `live`. False when nobody is left.
    pub(super) fn keep(&mut self, live: &[u64]) -> bool {
        match self {
            Self::Few(slots) => {
                let gone = |slot: u16| slot != NOBODY && !has(live, slot);
                slots.iter_mut().filter(|slot| gone(**slot)).for_each(|slot| *slot = NOBODY);
            }
            Self::Many(words) => {
                let live = live.iter().copied().chain(std::iter::repeat(0));
                words.iter_mut().zip(live).for_each(|(word, live)| *word &= live);
            }
        }
        !self.is_empty()
    }

    /// Sets `row` to those of `among` that are in the set.
    pub(super) fn within(&self, among: &[u64], row: &mut [u64]) {
        match self {
            Self::Few(slots) => {
                row.fill(0);
                for &slot in slots.iter().filter(|&&slot| slot != NOBODY && has(among, slot)) {
                    row[usize::from(slot) / 64] |= 1 << (slot % 64);
                }
            }
            Self::Many(words) => {
                let words = words.iter().copied().chain(std::iter::repeat(0));
                for ((row, among), word) in row.iter_mut().zip(among).zip(words) {
                    *row = among & word;
                }
            }
        }
    }
}

fn set(words: &mut [u64], slot: u16) {
    words[usize::from(slot) / 64] |= 1 << (slot % 64);
}

fn has(words: &[u64], slot: u16) -> bool {
    words.get(usize::from(slot) / 64).is_some_and(|word| word & (1 << (slot % 64)) != 0)
}
