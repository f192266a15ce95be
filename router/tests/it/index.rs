//! The index of blocks against a plain model of it: sets of names.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proto::{BlockHash, Digest, HashChain};
use router::index::{Matches, PrefixIndex, Slot};

const WORKERS: usize = 12;
const ROOM: usize = 16 << 20;

/// The names of a prompt that begins with `shared` blocks of a family and goes on by itself.
fn prompt(family: u32, shared: usize, own: u32, blocks: usize) -> Vec<BlockHash> {
    let block = |index: usize| if index < shared { family } else { 1000 + own };
    HashChain::new(Digest([7; 32]), 1).of(&(0..blocks).map(block).collect::<Vec<_>>())
}

fn depths(index: &PrefixIndex, slots: &[Option<Slot>], prompt: &[BlockHash]) -> Vec<usize> {
    let mut matches = Matches::default();
    index.find(prompt, &mut matches);
    slots.iter().map(|slot| slot.map_or(0, |slot| matches.blocks(slot))).collect()
}

#[test]
fn the_longest_match_of_each_worker_is_found() {
    let mut index = PrefixIndex::new(ROOM);
    let slots: Vec<_> = (0..4).map(|_| index.join()).collect();
    let asked = prompt(1, 40, 0, 64);
    for (worker, blocks) in [(0, 64), (1, 40), (2, 1)] {
        index.insert(slots[worker].unwrap(), &asked[..blocks]);
    }
    assert_eq!(depths(&index, &slots, &asked), [64, 40, 1, 0]);
    assert_eq!(depths(&index, &slots, &asked[..10]), [10, 10, 1, 0]);
    assert_eq!(depths(&index, &slots, &prompt(1, 40, 5, 64)), [40, 40, 1, 0]);
    assert_eq!(depths(&index, &slots, &prompt(2, 40, 0, 64)), [0; 4]);
    assert_eq!(depths(&index, &slots, &[]), [0; 4]);
    index.remove(slots[0].unwrap(), &asked[50..]);
    assert_eq!(depths(&index, &slots, &asked), [50, 40, 1, 0]);
    index.check().unwrap();
}

#[test]
fn a_worker_that_is_gone_leaves_nothing_and_its_slot_is_used_again() {
    let mut index = PrefixIndex::new(ROOM);
    let slots: Vec<_> = (0..100).map(|_| index.join().unwrap()).collect();
    let asked = prompt(1, 8, 0, 8);
    slots.iter().for_each(|&slot| index.insert(slot, &asked));
    index.retire(slots[3]);
    index.insert(slots[3], &asked);
    assert_eq!(depths(&index, &[Some(slots[3]), Some(slots[4])], &asked), [0, 8]);
    let other = index.join().unwrap();
    assert_ne!(other, slots[3], "its bits are still there");
    assert_eq!(depths(&index, &[Some(other)], &asked), [0]);
    index.sweep(10_000);
    assert!(!index.needs_sweep());
    assert_eq!(index.join(), Some(slots[3]));
    assert_eq!(depths(&index, &[Some(slots[3])], &asked), [0]);
    slots.iter().for_each(|&slot| index.retire(slot));
    index.sweep(10_000);
    assert_eq!(index.blocks(), 0);
    index.check().unwrap();
}

#[test]
fn memory_is_bounded_and_the_least_recently_used_goes_first() {
    let bytes_max = 400 << 10;
    let mut index = PrefixIndex::new(bytes_max);
    let slot = index.join().unwrap();
    let kept = prompt(1, 16, 0, 16);
    index.insert(slot, &kept);
    for own in 0..2000 {
        index.insert(slot, &prompt(2 + own, 16, own, 16));
        index.touch(&kept);
        assert!(index.bytes() <= bytes_max, "{} bytes", index.bytes());
    }
    assert!(index.evictions() > 0);
    assert_eq!(depths(&index, &[Some(slot)], &kept), [16]);
    assert_eq!(depths(&index, &[Some(slot)], &prompt(2, 16, 0, 16)), [0]);
    assert_eq!(depths(&index, &[Some(slot)], &prompt(2001, 16, 1999, 16)), [16]);
    index.check().unwrap();
    let per_block = index.bytes() / index.blocks();
    assert!(per_block <= 80, "{per_block} bytes for a block");
}

#[test]
fn sets_of_many_workers_count_as_memory_too() {
    let bytes_max = 600 << 10;
    let mut index = PrefixIndex::new(bytes_max);
    let slots: Vec<_> = (0..1000).map(|_| index.join().unwrap()).collect();
    for family in 0..40 {
        for &slot in &slots {
            index.insert(slot, &prompt(family, 100, 0, 100));
            assert!(index.bytes() <= bytes_max, "{} bytes", index.bytes());
        }
    }
    assert!(index.evictions() > 0);
    index.check().unwrap();
}

#[test]
fn an_index_without_memory_knows_nothing() {
    let mut index = PrefixIndex::new(100);
    let slot = index.join().unwrap();
    index.insert(slot, &prompt(1, 4, 0, 4));
    assert_eq!((index.blocks(), index.bytes()), (0, 0));
    index.check().unwrap();
}

/// What can be done to an index.
#[derive(Clone, Debug)]
enum Op {
    Insert {
        worker: usize,
        family: u32,
        own: u32,
        blocks: usize,
    },
    /// Of the blocks of a prompt those from there on, as workers evict.
    Remove {
        worker: usize,
        family: u32,
        own: u32,
        from: usize,
    },
    Restart {
        worker: usize,
    },
    Sweep {
        entries: usize,
    },
    Touch {
        family: u32,
        own: u32,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let (worker, family, own) = (0..WORKERS, 0..3_u32, 0..4_u32);
    prop_oneof![
        6 => (worker.clone(), family.clone(), own.clone(), 0..24_usize)
            .prop_map(|(worker, family, own, blocks)| Op::Insert { worker, family, own, blocks }),
        3 => (worker.clone(), family.clone(), own.clone(), 0..24_usize)
            .prop_map(|(worker, family, own, from)| Op::Remove { worker, family, own, from }),
        1 => worker.prop_map(|worker| Op::Restart { worker }),
        1 => (0..600_usize).prop_map(|entries| Op::Sweep { entries }),
        1 => (family, own).prop_map(|(family, own)| Op::Touch { family, own }),
    ]
}

const LEN: usize = 24;
const SHARED: usize = 10;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_done_it_agrees_with_sets(ops in prop::collection::vec(op(), 1..120)) {
        let mut index = PrefixIndex::new(ROOM);
        let mut slots: Vec<Option<Slot>> = (0..WORKERS).map(|_| index.join()).collect();
        let mut model: BTreeMap<usize, BTreeSet<BlockHash>> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Insert { worker, family, own, blocks } => {
                    let blocks = &prompt(family, SHARED, own, LEN)[..blocks];
                    index.insert(slots[worker].unwrap(), blocks);
                    model.entry(worker).or_default().extend(blocks);
                }
                Op::Remove { worker, family, own, from } => {
                    // What others have built upon stays, so that no chain has a gap.
                    let from = from.max(SHARED);
                    let blocks = &prompt(family, SHARED, own, LEN)[from..];
                    index.remove(slots[worker].unwrap(), blocks);
                    let known = model.entry(worker).or_default();
                    for block in blocks {
                        known.remove(block);
                    }
                }
                Op::Restart { worker } => {
                    index.retire(slots[worker].unwrap());
                    slots[worker] = index.join();
                    model.remove(&worker);
                }
                Op::Sweep { entries } => index.sweep(entries),
                Op::Touch { family, own } => index.touch(&prompt(family, SHARED, own, LEN)),
            }
            prop_assert_eq!(index.check(), Ok(()));
        }
        for (family, own) in (0..3).flat_map(|family| (0..4).map(move |own| (family, own))) {
            let asked = prompt(family, SHARED, own, LEN);
            let has = |worker: usize| {
                let known = model.get(&worker);
                asked.iter().take_while(|block| known.is_some_and(|known| known.contains(block))).count()
            };
            prop_assert_eq!(depths(&index, &slots, &asked), (0..WORKERS).map(has).collect::<Vec<_>>());
        }
    }
}
