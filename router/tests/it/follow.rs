//! A follower of a worker's blocks on a bad line: messages are lost, come twice and out of order, and the worker is
//! started anew. Whenever the follower says that it is up to date, it has what the worker had at that change.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proto::watch::{News, WatchEvent};
use proto::{BlockHash, WorkerEpoch, WorkerLoad};
use router::follow::{Cause, Effect, Follower};

fn name(block: u8) -> BlockHash {
    BlockHash([block; 16])
}

/// A worker, and all that it has ever been.
struct Worker {
    epoch: u64,
    blocks: BTreeSet<BlockHash>,
    /// What it had before each change of its present life; the first has number 1.
    history: Vec<BTreeSet<BlockHash>>,
    loads: u64,
}

impl Worker {
    fn new(epoch: u64) -> Self {
        Self { epoch, blocks: BTreeSet::new(), history: vec![BTreeSet::new()], loads: 0 }
    }

    fn next(&self) -> u64 {
        self.history.len() as u64
    }

    fn event(&self, sequence: u64, news: News) -> WatchEvent {
        WatchEvent { epoch: WorkerEpoch(self.epoch), sequence, news }
    }

    /// All that is known, in parts of two.
    fn known(&self) -> Vec<WatchEvent> {
        let blocks: Vec<BlockHash> = self.blocks.iter().copied().collect();
        let mut parts: Vec<Vec<BlockHash>> = blocks.chunks(2).map(<[_]>::to_vec).collect();
        if parts.is_empty() {
            parts.push(Vec::new());
        }
        let count = parts.len();
        let part = |(chunk, blocks): (usize, Vec<BlockHash>)| {
            let news = News::Known { chunk: chunk as u32, last: chunk + 1 == count, blocks };
            self.event(self.next(), news)
        };
        parts.into_iter().enumerate().map(part).collect()
    }

    fn change(&mut self, blocks: &[u8], stores: bool) -> Option<WatchEvent> {
        let first = self.next();
        let mut told = Vec::new();
        for block in blocks.iter().copied().map(name) {
            let is_news = if stores { self.blocks.insert(block) } else { self.blocks.remove(&block) };
            if is_news {
                told.push(block);
                self.history.push(self.blocks.clone());
            }
        }
        let news = if stores { News::Stored(told) } else { News::Removed(told) };
        (self.next() > first).then(|| self.event(first, news))
    }
}

/// What a follower has made of what it heard.
#[derive(Default)]
struct Listener {
    follower: Follower,
    blocks: BTreeSet<BlockHash>,
    load: Option<(WorkerEpoch, usize)>,
}

impl Listener {
    /// True when it asks for a resync.
    fn hear(&mut self, event: WatchEvent) -> bool {
        let mut effects = Vec::new();
        self.follower.on(event, &mut effects);
        let mut resync = false;
        for effect in effects {
            match effect {
                Effect::Forget => self.blocks.clear(),
                Effect::Insert(blocks) => self.blocks.extend(blocks),
                Effect::Remove(blocks) => self.blocks.retain(|block| !blocks.contains(block)),
                Effect::Load(epoch, load) => self.load = Some((epoch, load.running)),
                Effect::Resync(_) => resync = true,
            }
        }
        resync
    }
}

/// What happens next.
#[derive(Clone, Debug)]
enum Op {
    Store(Vec<u8>),
    Remove(Vec<u8>),
    Report,
    Restart,
    /// The worker tells all anew of its own accord, as after an overrun.
    Tell,
    /// A message on its way arrives, is lost, or arrives and stays on its way.
    Deliver(prop::sample::Index),
    Lose(prop::sample::Index),
    Repeat(prop::sample::Index),
    /// The oldest arrives.
    Next,
}

fn op() -> impl Strategy<Value = Op> {
    let blocks = || prop::collection::vec(0..12_u8, 1..5);
    prop_oneof![
        4 => blocks().prop_map(Op::Store),
        3 => blocks().prop_map(Op::Remove),
        1 => Just(Op::Report),
        1 => Just(Op::Restart),
        1 => Just(Op::Tell),
        2 => any::<prop::sample::Index>().prop_map(Op::Deliver),
        1 => any::<prop::sample::Index>().prop_map(Op::Lose),
        2 => any::<prop::sample::Index>().prop_map(Op::Repeat),
        12 => Just(Op::Next),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_it_has_is_what_the_worker_had(ops in prop::collection::vec(op(), 1..80)) {
        let (mut worker, mut listener) = (Worker::new(1), Listener::default());
        let mut line: Vec<WatchEvent> = worker.known();
        let mut lives = vec![worker.history.clone()];
        for op in ops {
            let arrives = match op {
                Op::Store(blocks) => {
                    line.extend(worker.change(&blocks, true));
                    None
                }
                Op::Remove(blocks) => {
                    line.extend(worker.change(&blocks, false));
                    None
                }
                Op::Report => {
                    worker.loads += 1;
                    let load = WorkerLoad { running: worker.loads as usize, ..WorkerLoad::default() };
                    line.push(worker.event(worker.loads, News::Load(load)));
                    None
                }
                Op::Restart => {
                    worker = Worker::new(worker.epoch + 1);
                    lives.push(Vec::new());
                    line.extend(worker.known());
                    None
                }
                Op::Tell => {
                    line.extend(worker.known());
                    None
                }
                Op::Next if !line.is_empty() => Some(line.remove(0)),
                Op::Deliver(at) if !line.is_empty() => Some(line.remove(at.index(line.len()))),
                Op::Lose(at) if !line.is_empty() => {
                    line.remove(at.index(line.len()));
                    None
                }
                Op::Repeat(at) if !line.is_empty() => Some(line[at.index(line.len())].clone()),
                Op::Next | Op::Deliver(_) | Op::Lose(_) | Op::Repeat(_) => None,
            };
            *lives.last_mut().expect("a life") = worker.history.clone();
            let Some(event) = arrives else { continue };
            let epoch = event.epoch;
            if listener.hear(event) {
                // A new watch: nothing of the old one arrives any more.
                listener.follower.reopened();
                line = worker.known();
            }
            if let Some(next) = listener.follower.following() {
                let had = &lives[epoch.0 as usize - 1][next as usize - 1];
                prop_assert_eq!(&listener.blocks, had);
            }
        }
        // On a line that has become good all is well after one more change.
        line.extend(worker.change(&[20], true));
        while !line.is_empty() {
            if listener.hear(line.remove(0)) {
                listener.follower.reopened();
                line = worker.known();
            }
        }
        prop_assert_eq!(listener.follower.following(), Some(worker.next()));
        prop_assert_eq!(&listener.blocks, &worker.blocks);
    }
}

#[test]
fn a_gap_asks_once_for_a_resync_and_a_repetition_for_none() {
    let mut worker = Worker::new(1);
    let mut follower = Follower::new();
    let mut tell = |event: WatchEvent| {
        let mut effects = Vec::new();
        follower.on(event, &mut effects);
        effects
    };
    worker.change(&[1, 2, 3], true);
    let known = worker.known();
    assert_eq!(tell(known[0].clone()), [Effect::Forget, Effect::Insert(vec![name(1), name(2)])]);
    assert_eq!(tell(known[0].clone()), []);
    assert_eq!(tell(known[1].clone()), [Effect::Insert(vec![name(3)])]);
    let (first, second, third) =
        (worker.change(&[4], true), worker.change(&[1, 2], false), worker.change(&[5], true));
    assert_eq!(tell(first.clone().unwrap()), [Effect::Insert(vec![name(4)])]);
    assert_eq!(tell(first.unwrap()), []);
    assert_eq!(tell(third.clone().unwrap()), [Effect::Resync(Cause::Gap)]);
    assert_eq!(tell(second.unwrap()), []);
    assert_eq!(tell(third.unwrap()), []);
    let known = worker.known();
    assert_eq!(tell(known[0].clone()), [Effect::Forget, Effect::Insert(vec![name(3), name(4)])]);
    assert_eq!(tell(known[1].clone()), [Effect::Insert(vec![name(5)])]);
    let mut other = Worker::new(2);
    let late = other.change(&[9], true).unwrap();
    assert_eq!(tell(late), [Effect::Forget, Effect::Resync(Cause::Epoch)]);
    let load = |sequence, running| {
        let load = WorkerLoad { running, ..WorkerLoad::default() };
        WatchEvent { epoch: WorkerEpoch(2), sequence, news: News::Load(load) }
    };
    assert_eq!(tell(load(2, 7)).len(), 1);
    assert_eq!(tell(load(1, 9)), [], "the later one holds");
    assert_eq!(tell(load(2, 7)), []);
}
