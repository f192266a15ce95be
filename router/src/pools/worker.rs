//! One member of the cluster, as its pool sees it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use proto::worker::PROTOCOL_VERSION;
use proto::{Error, Reason, Role, WorkerDescription, WorkerEpoch, WorkerLoad};

use crate::circuit::Circuit;
use crate::index::Slot;
use crate::policy::name_hash;

/// What a worker is to its pool, for logs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerState {
    /// A member that has not described itself yet.
    Unknown,
    /// Takes requests.
    Live,
    /// Finishes what it has.
    Draining,
    /// Did not answer last time.
    Lost,
    /// Does not match its pool.
    Refused,
}

impl WorkerState {
    /// Every state.
    pub const ALL: [Self; 5] = [Self::Unknown, Self::Live, Self::Draining, Self::Lost, Self::Refused];

    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Live => "live",
            Self::Draining => "draining",
            Self::Lost => "lost",
            Self::Refused => "refused",
        }
    }
}

/// Something about a worker that matters to placement has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which worker.
    pub address: String,
    /// What it is for.
    pub role: Role,
    /// What happened.
    pub kind: ChangeKind,
}

/// What happened to a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// Discovery names it now.
    Joined,
    /// Discovery names it no more.
    Left,
    /// It answers, again or for the first time, and takes requests.
    Live(WorkerEpoch),
    /// It answers from another life than before.
    Restarted(WorkerEpoch),
    /// It was for something else before.
    Turned {
        /// What that was.
        from: Role,
    },
    /// It finishes what it has: it shuts down, or takes another role.
    Draining,
    /// It has not answered so far: it may still be loading.
    Absent(Error),
    /// It does not answer any more.
    Lost(Error),
    /// It does not match its pool.
    Refused(Error),
}

/// What each placement reads of each worker: it is together, in one line of the processor's cache.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Hot {
    /// [`name_hash`] of its address.
    pub(super) name: u64,
    /// When it was placed last, as a count of placements.
    pub(super) turn: AtomicU64,
    /// Requests placed on it by this router since it last said what its load is.
    pub(super) placed_since: AtomicU32,
    /// Tokens of theirs that it has to compute.
    pub(super) tokens_since: AtomicU32,
    /// What it said, in the order of [`WorkerLoad`]; nothing if it has not.
    reported: Option<[u32; 6]>,
    /// Tokens of its KV blocks; 1 before it has described itself.
    pub(super) block_tokens: u32,
    /// Its place in the index, once it has said which blocks it has.
    pub(super) slot: Option<Slot>,
    /// It said that it drains.
    draining: bool,
    /// Its circuit is not closed.
    is_spared: bool,
}

/// A member and what is known of it.
#[derive(Debug)]
pub(super) struct Worker {
    /// What discovery says that it is; the worker knows better.
    pub(super) listed: Role,
    pub(super) address: String,
    /// What it said last, kept while it is lost.
    pub(super) description: Option<Box<WorkerDescription>>,
    /// Orders the first sight of what it serves: smaller is earlier. Anew when it serves something else.
    pub(super) seen: u64,
    /// Why it did not answer last time.
    pub(super) lost: Option<Error>,
    /// Why it may not work with its pool.
    pub(super) refused: Option<Error>,
    /// Requests placed on it by this router.
    pub(super) load: Arc<AtomicUsize>,
    /// Whether it fails again and again.
    circuit: Circuit,
    /// See there.
    pub(super) hot: Hot,
}

impl Worker {
    pub(super) fn state(&self) -> WorkerState {
        match &self.description {
            _ if self.lost.is_some() => WorkerState::Lost,
            None => WorkerState::Unknown,
            Some(_) if self.refused.is_some() => WorkerState::Refused,
            Some(description) if description.draining => WorkerState::Draining,
            Some(_) => WorkerState::Live,
        }
    }

    pub(super) fn state_with_refusal(&self) -> (WorkerState, Option<Error>) {
        let state = self.state();
        (state, self.refused.clone().filter(|_| state == WorkerState::Refused))
    }

    /// False only when it has described itself as a worker of another model.
    pub(super) fn may_serve(&self, model: &str) -> bool {
        self.description.as_deref().is_none_or(|description| description.model.name == model)
    }

    pub(super) fn serves(&self, model: &str) -> bool {
        self.description.as_deref().is_some_and(|description| description.model.name == model)
    }

    /// What is wrong with it, in words.
    pub(super) fn complaint(&self) -> String {
        let address = &self.address;
        match (self.state(), &self.refused, &self.lost) {
            (WorkerState::Refused, Some(error), _) => {
                format!("{address} is refused because it does not match its pool: {}", error.message)
            }
            (WorkerState::Lost, _, Some(error)) => format!("{address} is not reachable: {}", error.message),
            (WorkerState::Draining, ..) => format!("{address} is draining"),
            _ => format!("{address} has not described itself yet"),
        }
    }

    pub(super) fn new(role: Role, address: &str) -> Self {
        Self {
            listed: role,
            address: address.to_owned(),
            description: None,
            seen: 0,
            lost: None,
            refused: None,
            load: Arc::default(),
            circuit: Circuit::default(),
            hot: Hot { name: name_hash(address), block_tokens: 1, ..Hot::default() },
        }
    }

    /// Takes over what it says about itself; gives what it said before.
    pub(super) fn describe(&mut self, description: WorkerDescription) -> Option<Box<WorkerDescription>> {
        self.lost = None;
        self.hot.block_tokens = bounded(description.layout.block_tokens);
        self.description.replace(Box::new(description))
    }

    /// Takes over what it says of its load; `None` when nothing is known any more.
    pub(super) fn set_reported(&mut self, load: Option<WorkerLoad>) {
        self.hot.draining = load.is_some_and(|load| load.draining);
        self.hot.reported = load.map(|load| {
            let WorkerLoad {
                waiting,
                running,
                waiting_tokens,
                running_tokens,
                blocks_free,
                blocks_total,
                ..
            } = load;
            [waiting, running, waiting_tokens, running_tokens, blocks_free, blocks_total].map(bounded)
        });
        *self.hot.placed_since.get_mut() = 0;
        *self.hot.tokens_since.get_mut() = 0;
    }

    /// It has said what its load is.
    pub(super) fn is_reported(&self) -> bool {
        self.hot.reported.is_some()
    }

    /// Whether it may be chosen while there are others.
    #[inline]
    pub(super) fn is_admitted(&self, now: Duration) -> bool {
        !self.hot.is_spared || self.circuit.admits(now)
    }

    /// It is spared: its circuit is not closed.
    pub(super) fn is_spared(&self) -> bool {
        self.hot.is_spared
    }

    /// It was placed, with so many tokens to compute.
    pub(super) fn placed(&self, turn: u64, tokens: usize, now: Duration) {
        self.hot.turn.store(turn, Ordering::Relaxed);
        self.hot.placed_since.fetch_add(1, Ordering::Relaxed);
        self.hot.tokens_since.fetch_add(bounded(tokens), Ordering::Relaxed);
        self.circuit.placed(now);
    }

    /// Changes its circuit. True when it lets other things through than before.
    pub(super) fn judge(&mut self, now: Duration, change: impl FnOnce(&mut Circuit)) -> bool {
        let before = self.circuit.state(now);
        change(&mut self.circuit);
        self.hot.is_spared = !self.circuit.is_closed();
        self.circuit.state(now) != before
    }

    /// What it has to do: as it said last, with what was placed since. A worker that has said nothing has what this
    /// router placed on it.
    #[inline]
    pub(super) fn load_now(&self) -> WorkerLoad {
        if let Some(reported) = self.hot.reported {
            let [waiting, running, waiting_tokens, running_tokens, blocks_free, blocks_total] =
                reported.map(|number| number as usize);
            let since = |count: &AtomicU32| count.load(Ordering::Relaxed) as usize;
            return WorkerLoad {
                waiting: waiting + since(&self.hot.placed_since),
                running,
                waiting_tokens: waiting_tokens + since(&self.hot.tokens_since),
                running_tokens,
                blocks_free,
                blocks_total,
                draining: self.hot.draining,
            };
        }
        let described = self.description.as_deref();
        WorkerLoad {
            running: self.load.load(Ordering::Relaxed),
            blocks_free: described.map_or(0, |described| described.blocks_free),
            blocks_total: described.map_or(0, |described| described.blocks_total),
            draining: described.is_some_and(|described| described.draining),
            ..WorkerLoad::default()
        }
    }

    /// What it is for: its own word, and until it has spoken that of discovery. A list that is fixed, or a name that stands
    /// for many, cannot follow a worker that takes another role.
    pub(super) fn role(&self) -> Role {
        self.description.as_deref().map_or(self.listed, |description| description.role)
    }

    /// Why it may work with no pool at all, whatever the others say.
    pub(super) fn stranger(&self) -> Option<Error> {
        let own = self.description.as_deref()?;
        if own.protocol != PROTOCOL_VERSION {
            let message = format!("protocol version: {PROTOCOL_VERSION} here, {} there", own.protocol);
            return Some(Error::new(Reason::LayoutMismatch, message));
        }
        None
    }

    /// Why it is to be refused, if it is.
    pub(super) fn verdict(&self, references: &BTreeMap<String, WorkerDescription>) -> Option<Error> {
        let own = self.description.as_deref()?;
        self.stranger().or_else(|| references.get(&own.model.name)?.mismatch(own))
    }

    /// What happened when it has come into its present state.
    pub(super) fn arrival(&self) -> Option<ChangeKind> {
        match self.state() {
            WorkerState::Unknown => None,
            WorkerState::Live => Some(ChangeKind::Live(self.description.as_deref()?.epoch)),
            WorkerState::Draining => Some(ChangeKind::Draining),
            WorkerState::Lost if self.description.is_none() => self.lost.clone().map(ChangeKind::Absent),
            WorkerState::Lost => self.lost.clone().map(ChangeKind::Lost),
            WorkerState::Refused => self.refused.clone().map(ChangeKind::Refused),
        }
    }

    pub(super) fn change(&self, kind: ChangeKind) -> Change {
        Change { address: self.address.clone(), role: self.role(), kind }
    }
}

/// Numbers beyond 32 bits say no more than the greatest of these.
fn bounded(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
