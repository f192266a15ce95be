//! One member of the cluster, as its pool sees it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use proto::worker::PROTOCOL_VERSION;
use proto::{Error, Reason, Role, WorkerDescription, WorkerEpoch};

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
    /// What it is a member for.
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
    /// It has begun to shut down.
    Draining,
    /// It has not answered so far: it may still be loading.
    Absent(Error),
    /// It does not answer any more.
    Lost(Error),
    /// It does not match its pool.
    Refused(Error),
}

/// A member and what is known of it.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) role: Role,
    pub(super) address: String,
    /// What it said last, kept while it is lost.
    pub(super) description: Option<WorkerDescription>,
    /// Orders the first sight of what it serves: smaller is earlier. Anew when it serves something else.
    pub(super) seen: u64,
    /// Why it did not answer last time.
    pub(super) lost: Option<Error>,
    /// Why it may not work with its pool.
    pub(super) refused: Option<Error>,
    /// When it was placed last, as a count of placements.
    pub(super) turn: AtomicU64,
    /// Requests placed on it by this router.
    pub(super) load: Arc<AtomicUsize>,
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
        self.description.as_ref().is_none_or(|description| description.model.name == model)
    }

    pub(super) fn serves(&self, model: &str) -> bool {
        self.description.as_ref().is_some_and(|description| description.model.name == model)
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
            role,
            address: address.to_owned(),
            description: None,
            seen: 0,
            lost: None,
            refused: None,
            turn: AtomicU64::new(0),
            load: Arc::default(),
        }
    }

    /// Why it may work with no pool at all, whatever the others say.
    pub(super) fn stranger(&self) -> Option<Error> {
        let own = self.description.as_ref()?;
        if own.role != self.role {
            let (discovery, worker) = (self.role.name(), own.role.name());
            let message = format!("role: discovery says {discovery}, the worker says {worker}");
            return Some(Error::new(Reason::LayoutMismatch, message));
        }
        if own.protocol != PROTOCOL_VERSION {
            let message = format!("protocol version: {PROTOCOL_VERSION} here, {} there", own.protocol);
            return Some(Error::new(Reason::LayoutMismatch, message));
        }
        None
    }

    /// Why it is to be refused, if it is.
    pub(super) fn verdict(&self, references: &BTreeMap<String, WorkerDescription>) -> Option<Error> {
        let own = self.description.as_ref()?;
        self.stranger().or_else(|| references.get(&own.model.name)?.mismatch(own))
    }

    /// What happened when it has come into its present state.
    pub(super) fn arrival(&self) -> Option<ChangeKind> {
        match self.state() {
            WorkerState::Unknown => None,
            WorkerState::Live => Some(ChangeKind::Live(self.description.as_ref()?.epoch)),
            WorkerState::Draining => Some(ChangeKind::Draining),
            WorkerState::Lost if self.description.is_none() => self.lost.clone().map(ChangeKind::Absent),
            WorkerState::Lost => self.lost.clone().map(ChangeKind::Lost),
            WorkerState::Refused => self.refused.clone().map(ChangeKind::Refused),
        }
    }

    pub(super) fn change(&self, kind: ChangeKind) -> Change {
        Change { address: self.address.clone(), role: self.role, kind }
    }
}
