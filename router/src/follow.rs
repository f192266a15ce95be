//! Following what a worker says of its blocks, without IO: what is missing is noticed, and asked for anew.
//!
//! A worker tells all blocks that it knows, in parts, then every change with its number ([`proto::watch`]). A follower
//! takes what comes next and nothing else: what came before is left out, and where something is missing (a gap in the
//! numbers, a part of what is known out of turn, another life of the worker) it asks for a resync, which is a new watch,
//! and takes nothing until that tells what is known from its first part on. So what an index has of a worker is always
//! what the worker had at some moment of its present life, or a part of that while a resync is under way.

use proto::watch::{News, WatchEvent};
use proto::{BlockHash, WorkerEpoch, WorkerLoad};

/// What an event of a watch means for who follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing that was said of the worker's blocks holds.
    Forget,
    /// The worker has these.
    Insert(Vec<BlockHash>),
    /// It has these no more.
    Remove(Vec<BlockHash>),
    /// This is what it has to do.
    Load(WorkerEpoch, WorkerLoad),
    /// Watch anew. Once for each time that the thread is lost.
    Resync(Cause),
}

/// Why a follower lost the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// Changes, or parts of what is known, are missing or out of order.
    Gap,
    /// The worker speaks from another life than before.
    Epoch,
}

impl Cause {
    /// Every cause.
    pub const ALL: [Self; 2] = [Self::Gap, Self::Epoch];

    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Epoch => "epoch",
        }
    }
}

/// Where a follower is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits for the first part of what is known. `asked` once a resync was asked for.
    Waiting { asked: bool },
    /// Has the parts before `chunk` of what was known before change `next`.
    Learning { next: u64, chunk: u32 },
    /// Has taken every change before `next`.
    Following { next: u64 },
}

/// One worker's follower.
#[derive(Debug)]
pub struct Follower {
    epoch: Option<WorkerEpoch>,
    state: State,
    /// The number of the last report of its load.
    load: u64,
}

impl Default for Follower {
    fn default() -> Self {
        Self::new()
    }
}

impl Follower {
    /// One that has heard nothing.
    pub fn new() -> Self {
        Self { epoch: None, state: State::Waiting { asked: false }, load: 0 }
    }

    /// A new watch was opened: it tells everything from its beginning.
    pub fn reopened(&mut self) {
        (self.state, self.load) = (State::Waiting { asked: false }, 0);
    }

    /// The number of the change that it waits for, when it has taken all before it.
    pub fn following(&self) -> Option<u64> {
        match self.state {
            State::Following { next } => Some(next),
            State::Waiting { .. } | State::Learning { .. } => None,
        }
    }

    /// Takes an event in; appends what it means.
    pub fn on(&mut self, event: WatchEvent, out: &mut Vec<Effect>) {
        let WatchEvent { epoch, sequence, news } = event;
        if self.epoch != Some(epoch) {
            let is_known = self.epoch.replace(epoch).is_some();
            let asked = is_known && !matches!(news, News::Known { chunk: 0, .. });
            (self.state, self.load) = (State::Waiting { asked }, 0);
            if is_known {
                out.push(Effect::Forget);
            }
            if asked {
                out.push(Effect::Resync(Cause::Epoch));
            }
        }
        match news {
            News::Load(load) => {
                if sequence > self.load {
                    self.load = sequence;
                    out.push(Effect::Load(epoch, load));
                }
            }
            News::Known { chunk, last, blocks } => self.known(sequence, (chunk, last), blocks, out),
            News::Stored(blocks) => self.changed(sequence, blocks, Effect::Insert, out),
            News::Removed(blocks) => self.changed(sequence, blocks, Effect::Remove, out),
        }
    }

    fn known(
        &mut self,
        next: u64,
        (chunk, last): (u32, bool),
        blocks: Vec<BlockHash>,
        out: &mut Vec<Effect>,
    ) {
        match self.state {
            // Everything of that time was taken already.
            State::Following { next: taken } if next <= taken => return,
            State::Learning { next: learning, chunk: expected } if next == learning && chunk < expected => {
                return;
            }
            _ if chunk == 0 => out.push(Effect::Forget),
            State::Learning { next: learning, chunk: expected } if (next, chunk) == (learning, expected) => {}
            _ => return self.lose(out),
        }
        if !blocks.is_empty() {
            out.push(Effect::Insert(blocks));
        }
        self.state =
            if last { State::Following { next } } else { State::Learning { next, chunk: chunk + 1 } };
    }

    fn changed(
        &mut self,
        first: u64,
        mut blocks: Vec<BlockHash>,
        effect: fn(Vec<BlockHash>) -> Effect,
        out: &mut Vec<Effect>,
    ) {
        let end = first.saturating_add(blocks.len() as u64);
        match &mut self.state {
            State::Following { next } if first <= *next => {
                if end > *next {
                    blocks.drain(..(*next - first) as usize);
                    *next = end;
                    out.push(effect(blocks));
                }
            }
            // Of the time before what is being learnt.
            State::Learning { next, .. } if end <= *next => {}
            _ => self.lose(out),
        }
    }

    fn lose(&mut self, out: &mut Vec<Effect>) {
        if self.state != (State::Waiting { asked: true }) {
            self.state = State::Waiting { asked: true };
            out.push(Effect::Resync(Cause::Gap));
        }
    }
}
