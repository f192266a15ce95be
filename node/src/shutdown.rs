//! How a process ends: it drains, then it stops.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Notify, watch};

use crate::Error;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Running,
    Draining,
    Stopped,
}

/// The one signal that ends a process, shared by all its services.
///
/// `drain` means no new work: services refuse new requests and finish those they have. `stop` means the grace period
/// is over: every task ends at once. Between the two, [`Busy`] guards say what is still to be finished; when the last
/// is gone, the process is idle and servers close.
#[derive(Clone)]
pub struct Shutdown {
    shared: Arc<Shared>,
}

struct Shared {
    /// Whose end comes before this one's.
    upstream: Option<Shutdown>,
    /// Those that stop with this one.
    downstream: Mutex<Vec<Weak<Shared>>>,
    phase: watch::Sender<Phase>,
    busy: AtomicUsize,
    quiet: Notify,
    failure: Mutex<Option<Error>>,
}

/// Work that a drain waits for: a call in flight, a lease that a peer may still fetch from. Dropping it is the end of
/// that work.
#[must_use]
pub struct Busy {
    shared: Arc<Shared>,
}

impl Shutdown {
    /// A process that runs.
    #[expect(clippy::new_without_default, reason = "a shutdown that nobody shares is never what was meant")]
    pub fn new() -> Self {
        Self::with_upstream(None)
    }

    fn with_upstream(upstream: Option<Self>) -> Self {
        let shared = Shared {
            upstream,
            downstream: Mutex::new(Vec::new()),
            phase: watch::channel(Phase::Running).0,
            busy: AtomicUsize::new(0),
            quiet: Notify::new(),
            failure: Mutex::new(None),
        };
        Self { shared: Arc::new(shared) }
    }

    /// A shutdown for services that those of this one call, and a future that lets it follow: it drains once this one
    /// is idle, so that work already taken upstream can still come, and stops with this one.
    pub fn downstream(&self) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (upstream, downstream) = (self.clone(), Self::with_upstream(Some(self.clone())));
        let known = Arc::downgrade(&downstream.shared);
        self.shared.downstream.lock().unwrap_or_else(PoisonError::into_inner).push(known);
        if self.is_stopped() {
            downstream.stop();
        }
        let follower = downstream.clone();
        let follow = async move {
            upstream.idle().await;
            follower.drain();
        };
        (downstream, follow)
    }

    /// From now on: no new work.
    pub fn drain(&self) {
        self.advance(Phase::Draining);
    }

    /// From now on: no work at all. Every task of [`crate::Tasks`] is dropped where it stands.
    pub fn stop(&self) {
        self.advance(Phase::Stopped);
        let downstream = self.shared.downstream.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for shared in downstream.iter().filter_map(Weak::upgrade) {
            Self { shared }.stop();
        }
    }

    /// Stops because of a fault, which [`crate::Process::finished`] then returns. The first fault is kept.
    pub fn fail(&self, error: Error) {
        if let Some(upstream) = &self.shared.upstream {
            self.stop();
            return upstream.fail(error);
        }
        self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.stop();
    }

    /// The fault that stopped the process, once.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// True from `drain` or `stop` on.
    pub fn is_draining(&self) -> bool {
        *self.shared.phase.borrow() >= Phase::Draining
    }

    /// True from `stop` on.
    pub fn is_stopped(&self) -> bool {
        *self.shared.phase.borrow() == Phase::Stopped
    }

    /// Returns once `drain` or `stop` was called.
    pub async fn draining(&self) {
        self.reached(Phase::Draining).await;
    }

    /// Returns once `stop` was called.
    pub async fn stopped(&self) {
        self.reached(Phase::Stopped).await;
    }

    /// Returns once a drain began and no [`Busy`] guard is left, or at `stop`.
    pub async fn idle(&self) {
        self.draining().await;
        tokio::select! {
            () = self.stopped() => {}
            () = self.at_most(0) => {}
        }
    }

    /// Returns once a drain began and no other [`Busy`] guard than this one is left, or at `stop`: for what comes last.
    pub async fn idle_but(&self, _own: &Busy) {
        self.draining().await;
        tokio::select! {
            () = self.stopped() => {}
            () = self.at_most(1) => {}
        }
    }

    /// Marks work that a drain is to wait for.
    pub fn busy(&self) -> Busy {
        self.shared.busy.fetch_add(1, Ordering::AcqRel);
        Busy { shared: self.shared.clone() }
    }

    /// Waits until there are no more guards than that: none, or one.
    async fn at_most(&self, guards: usize) {
        loop {
            let quiet = self.shared.quiet.notified();
            tokio::pin!(quiet);
            // Registered before the count is read, so that a guard dropped in between wakes it.
            quiet.as_mut().enable();
            if self.shared.busy.load(Ordering::Acquire) <= guards {
                return;
            }
            quiet.await;
        }
    }

    async fn reached(&self, phase: Phase) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.shared.phase.subscribe().wait_for(|now| *now >= phase).await;
    }

    fn advance(&self, to: Phase) {
        self.shared.phase.send_if_modified(|phase| {
            let later = to > *phase;
            if later {
                *phase = to;
            }
            later
        });
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if self.shared.busy.fetch_sub(1, Ordering::AcqRel) <= 2 {
            self.shared.quiet.notify_waiters();
        }
    }
}

impl fmt::Debug for Shutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let busy = self.shared.busy.load(Ordering::Relaxed);
        f.debug_struct("Shutdown").field("phase", &*self.shared.phase.borrow()).field("busy", &busy).finish()
    }
}

impl fmt::Debug for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Busy")
    }
}
