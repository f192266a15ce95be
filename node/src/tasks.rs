//! The tasks of a process. Every task has an owner, and this file is the only one that spawns.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use proto::Reason;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

use crate::{Error, Shutdown};

/// Spawns tasks and knows which still run. All of them end at [`Shutdown::stop`].
#[derive(Clone, Debug)]
pub struct Tasks {
    tracker: TaskTracker,
    shutdown: Shutdown,
}

impl Tasks {
    /// Tasks that end with `shutdown`.
    pub fn new(shutdown: Shutdown) -> Self {
        Self { tracker: TaskTracker::new(), shutdown }
    }

    /// Spawns a task that the service cannot do without. If it panics, the process stops: peers recover from a process
    /// that is gone, not from half of one. Dropping the handle leaves the task running.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) -> TaskHandle {
        let shutdown = self.shutdown.clone();
        let task = contained(task);
        TaskHandle(self.start(async move {
            if let Err(panic) = task.await {
                let message = panic_message(&*panic);
                tracing::error!(task = name, message, "task panicked, stopping");
                shutdown.fail(Error::Panic { task: name, message });
            }
        }))
    }

    /// Spawns a task of one call or one connection. If it panics, that is logged and the process goes on. Dropping the
    /// guard aborts the task.
    pub fn spawn_call(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> TaskGuard {
        self.spawn_contained(name, task).guard()
    }

    /// Like [`Self::spawn_call`], with a handle whose drop leaves the task running.
    pub fn spawn_contained(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> TaskHandle {
        let task = contained(task);
        TaskHandle(self.start(async move {
            if let Err(panic) = task.await {
                tracing::error!(task = name, message = panic_message(&*panic), "task panicked");
            }
        }))
    }

    /// Runs a computation on a thread where blocking is allowed.
    ///
    /// # Errors
    /// `INTERNAL` when it panics.
    pub fn spawn_blocking<T: Send + 'static>(
        &self,
        name: &'static str,
        computation: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T, proto::Error>> + Send + 'static {
        let handle = self.tracker.spawn_blocking(computation);
        async move {
            handle.await.map_err(|error| {
                proto::Error::new(Reason::Internal, format!("{name} did not finish: {error}"))
            })
        }
    }

    /// Tasks that run.
    pub fn count(&self) -> usize {
        self.tracker.len()
    }

    /// Returns when no task is left.
    pub async fn wait(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that spawns: tracked, and ended by the shutdown"
    )]
    fn start(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let shutdown = self.shutdown.clone();
        tokio::spawn(self.tracker.track_future(async move {
            tokio::select! {
                biased;
                () = task => {}
                () = shutdown.stopped() => {}
            }
        }))
    }
}

/// A task whose panic is a value. Boxed: each block of code around a future that it is given holds room for it twice.
fn contained(
    task: impl Future<Output = ()> + Send + 'static,
) -> impl Future<Output = Result<(), Box<dyn Any + Send>>> + Send + 'static {
    AssertUnwindSafe(Box::pin(task)).catch_unwind()
}

/// A spawned task.
#[derive(Debug)]
pub struct TaskHandle(JoinHandle<()>);

impl TaskHandle {
    /// Returns when the task has ended, however it did.
    pub async fn join(self) {
        // The only errors are an abort and a panic; the one was asked for, the other logged.
        let _ = self.0.await;
    }

    /// True when the task has ended.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// Ties the task to a guard.
    pub fn guard(self) -> TaskGuard {
        TaskGuard(self.0)
    }
}

/// A task that is aborted when this is dropped.
#[derive(Debug)]
#[must_use]
pub struct TaskGuard(JoinHandle<()>);

impl TaskGuard {
    /// True when the task has ended.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}
