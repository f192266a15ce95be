//! A process: its services, from start to end.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{Context, Error, Shutdown, TaskHandle};

/// How long tasks may take to notice a stop; they are dropped at their next await.
const STOP_MAX: Duration = Duration::from_secs(2);

/// Ctrl-C and SIGTERM. Once this is there, one that comes is kept for [`Process::drain_on`] instead of ending the process.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Listens from now on: the first thing that a process does, since it may be told to go while it starts.
    ///
    /// # Errors
    /// When the signal handlers cannot be installed.
    pub fn listen() -> Result<Self, Error> {
        let listen = |kind| {
            signal(kind).map_err(|error| {
                proto::Error::new(proto::Reason::Internal, format!("signal handler: {error}"))
            })
        };
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }
}

/// The services that run in this process. Dropping it stops them.
#[derive(Debug)]
pub struct Process {
    context: Context,
    services: Vec<TaskHandle>,
}

impl Process {
    /// A process without a service.
    pub fn new(context: Context) -> Self {
        Self { context, services: Vec::new() }
    }

    /// Runs a service on a task of its own. One that fails, or ends before any drain, stops the process.
    pub fn run(&mut self, name: &str, service: impl Future<Output = Result<(), Error>> + Send + 'static) {
        let (name, shutdown) = (name.to_owned(), self.context.shutdown.clone());
        self.services.push(self.context.tasks.spawn("service", async move {
            match service.await {
                Ok(()) if shutdown.is_draining() => tracing::debug!(service = name, "service ended"),
                Ok(()) => shutdown.fail(Error::Ended(name)),
                Err(error) => {
                    tracing::debug!(service = name, %error, "service failed");
                    shutdown.fail(error);
                }
            }
        }));
    }

    /// From the first Ctrl-C or SIGTERM on the process drains; at the second it stops.
    pub fn drain_on(&self, signals: Signals) {
        let Signals { mut interrupt, mut terminate } = signals;
        let shutdown = self.context.shutdown.clone();
        drop(self.context.tasks.spawn("signals", async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if shutdown.is_draining() {
                    tracing::info!("second signal, stopping at once");
                    return shutdown.stop();
                }
                tracing::info!("draining: running streams finish, a second signal stops at once");
                shutdown.drain();
            }
        }));
    }

    /// Waits until every service has ended after a drain, or until `grace` after the drain began, and stops what is
    /// left.
    ///
    /// # Errors
    /// The first fault of a service or task. An expired grace period is none.
    pub async fn finished(mut self, grace: Duration) -> Result<(), Error> {
        let Context { shutdown, tasks, .. } = self.context.clone();
        let services = std::mem::take(&mut self.services);
        let all = async {
            for service in services {
                service.join().await;
            }
        };
        tokio::select! {
            () = all => {}
            () = grace_over(&shutdown, grace) => {}
        }
        shutdown.stop();
        if tokio::time::timeout(STOP_MAX, tasks.wait()).await.is_err() {
            tracing::warn!("some tasks did not end in time");
        }
        shutdown.take_failure().map_or(Ok(()), Err)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.context.shutdown.stop();
    }
}

async fn grace_over(shutdown: &Shutdown, grace: Duration) {
    shutdown.draining().await;
    tokio::select! {
        () = tokio::time::sleep(grace) => tracing::warn!(grace_seconds = grace.as_secs_f64(), "grace period is over"),
        () = shutdown.stopped() => {}
    }
}
