//! Runs the services of a process from start to end.

use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use tokio::signal::unix::{SignalKind, signal};

use crate::{Context, Error, Shutdown, Tasks};

/// How long tasks may take to notice a stop; they are dropped at their next await.
const STOP_MAX: Duration = Duration::from_secs(2);

/// A service of the process: its name, and its `run`.
type Service = (String, BoxFuture<'static, Result<(), Error>>);

/// Runs services until a drain lets all of them finish, or until `grace` after the drain began. A service that fails,
/// or ends before any drain, ends the process.
///
/// # Errors
/// The first fault of a service or task. An expired grace period is none.
pub async fn supervise(services: Vec<Service>, context: Context, grace: Duration) -> Result<(), Error> {
    let Context { shutdown, tasks, .. } = context;
    let running: FuturesUnordered<_> =
        services.into_iter().map(|(name, service)| async move { (name, service.await) }).collect();
    let outcome = tokio::select! {
        outcome = finish_all(running, &shutdown) => outcome,
        () = grace_over(&shutdown, grace) => Ok(()),
    };
    shutdown.stop();
    if tokio::time::timeout(STOP_MAX, tasks.wait()).await.is_err() {
        tracing::warn!("some tasks did not end in time");
    }
    match shutdown.take_failure() {
        Some(failure) => Err(failure),
        None => outcome,
    }
}

async fn finish_all<F>(mut running: FuturesUnordered<F>, shutdown: &Shutdown) -> Result<(), Error>
where
    F: Future<Output = (String, Result<(), Error>)>,
{
    let mut outcome = Ok(());
    while let Some((name, result)) = running.next().await {
        let fault = match result {
            Err(error) => Some(error),
            Ok(()) if !shutdown.is_draining() => Some(Error::Ended(name)),
            Ok(()) => None,
        };
        if let Some(error) = fault {
            shutdown.drain();
            outcome = outcome.and(Err(error));
        }
    }
    outcome
}

async fn grace_over(shutdown: &Shutdown, grace: Duration) {
    shutdown.draining().await;
    tokio::select! {
        () = tokio::time::sleep(grace) => tracing::warn!(grace_seconds = grace.as_secs(), "grace period is over"),
        () = shutdown.stopped() => {}
    }
}

/// Drains at the first Ctrl-C or SIGTERM, stops at the second.
///
/// # Errors
/// When the signal handlers cannot be installed.
pub fn drain_on_signals(tasks: &Tasks, shutdown: &Shutdown) -> Result<(), Error> {
    let install = |kind| {
        signal(kind).map_err(|error| {
            Error::Service(proto::Error::new(proto::Reason::Internal, format!("signal handler: {error}")))
        })
    };
    let (mut interrupt, mut terminate) =
        (install(SignalKind::interrupt())?, install(SignalKind::terminate())?);
    let shutdown = shutdown.clone();
    tasks.spawn("signals", async move {
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
    });
    Ok(())
}
