//! What a worker is at present. Its role may change while the process goes on: each time that is a life of its own, with an
//! epoch, an engine and a shell, and the services at the worker's address look the present life up for each call.

use std::sync::Arc;

use proto::{Error, Reason, Role, WorkerEpoch};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use crate::shell::Handle;
use crate::worker_service::Identity;

/// One life of a worker.
#[derive(Clone)]
pub struct Life {
    /// Its name within the process: the label `worker` of its metrics, and that of its dump.
    pub name: String,
    /// Who it is.
    pub identity: Arc<Identity>,
    /// Reaches its core.
    pub shell: Handle,
    /// The role that was asked for, once one was: what runs is finished or moved, and nothing new is wanted.
    pub leaves_for: Option<Role>,
}

impl Life {
    /// A life that begins.
    pub fn new(name: impl Into<String>, identity: Identity, shell: Handle) -> Self {
        Self { name: name.into(), identity: Arc::new(identity), shell, leaves_for: None }
    }

    /// True once another role was asked for.
    pub fn is_leaving(&self) -> bool {
        self.leaves_for.is_some()
    }
}

/// The present life, as services see it. Cheap to clone.
#[derive(Clone)]
pub struct Lives {
    present: watch::Receiver<Arc<Life>>,
    asks: mpsc::Sender<Asked>,
    /// One change at a time.
    turn: Arc<Semaphore>,
}

/// A role that was asked for, and where to say what came of it.
pub(crate) struct Asked {
    pub(crate) role: Role,
    pub(crate) answer: oneshot::Sender<Result<Changed, Error>>,
    /// Lets the next one ask when this is dropped.
    pub(crate) _turn: OwnedSemaphorePermit,
}

/// What came of asking for a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The life that has the role.
    pub epoch: WorkerEpoch,
    /// False when it was the present one already.
    pub is_new: bool,
}

impl Lives {
    /// The present life as it is told by the sender, and the roles that will be asked for, one at a time.
    pub(crate) fn channel(first: Life) -> (watch::Sender<Arc<Life>>, Self, mpsc::Receiver<Asked>) {
        let (sender, present) = watch::channel(Arc::new(first));
        let (asks, asked) = mpsc::channel(1);
        (sender, Self { present, asks, turn: Arc::new(Semaphore::new(1)) }, asked)
    }

    /// A worker whose role nothing changes.
    pub fn only(life: Life) -> Self {
        // Without its sender a life stays the present one.
        Self::channel(life).1
    }

    /// The present life.
    pub fn present(&self) -> Arc<Life> {
        Arc::clone(&self.present.borrow())
    }

    /// The present life, for a call that only that role serves.
    ///
    /// # Errors
    /// WORKER_LOST when the worker has another role now: the caller's knowledge of it is old.
    pub fn of(&self, role: Role) -> Result<Arc<Life>, Error> {
        let life = self.present();
        let now = life.identity.role;
        if now == role {
            return Ok(life);
        }
        let message = format!("expected a {} worker, this is a {} worker now", role.name(), now.name());
        Err(Error::new(Reason::WorkerLost, message))
    }

    /// Tells of every change from now on: of a life that is to end, and of the next.
    pub(crate) fn follow(&self) -> watch::Receiver<Arc<Life>> {
        let mut present = self.present.clone();
        present.mark_unchanged();
        present
    }

    /// Asks for a role, and waits until the worker serves it. Who stops waiting does not stop the change.
    ///
    /// # Errors
    /// QUEUE_FULL while another change is under way; INVALID_ARGUMENT when the worker cannot have the role; WORKER_LOST
    /// when the worker ends first; and why the new life could not begin.
    pub async fn change(&self, role: Role) -> Result<Changed, Error> {
        let Ok(turn) = Arc::clone(&self.turn).try_acquire_owned() else {
            let towards = self.present().leaves_for.map_or("a role", Role::name);
            let message = format!("a change to {towards} is under way, ask again when it is over");
            return Err(Error::new(Reason::QueueFull, message));
        };
        let (answer, answered) = oneshot::channel();
        if self.asks.try_send(Asked { role, answer, _turn: turn }).is_err() {
            return Err(ending());
        }
        answered.await.unwrap_or_else(|_| Err(ending()))
    }
}

/// What is said to those who ask a worker for a role that it will not live to have.
pub(crate) fn ending() -> Error {
    Error::new(Reason::WorkerLost, "the worker shuts down, its role does not change any more")
}
