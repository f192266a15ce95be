//! Simulations side by side: the same requests through many clusters, on all cores.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use proto::Error;

use crate::report::{Report, Slo};
use crate::sim::{Cluster, simulate};
use crate::workload::Arrival;

/// A simulation to run.
#[derive(Clone, Debug)]
pub struct Trial<'a> {
    /// The cluster.
    pub cluster: Cluster,
    /// What comes.
    pub requests: &'a [Arrival],
    /// What makes a request a good one.
    pub slo: Slo,
    /// Decides all that is left to chance.
    pub seed: u64,
}

/// Reports in the order of the trials, and how long all of them took.
///
/// # Errors
/// The first fault in the order of the trials.
pub fn run(trials: &[Trial<'_>]) -> Result<(Vec<Report>, Duration), Error> {
    let start = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(trials.len());
    let next = AtomicUsize::new(0);
    let reports = Mutex::new(vec![None; trials.len()]);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(trial) = trials.get(index) else { break };
                    let report = simulate(&trial.cluster, trial.requests, trial.slo, trial.seed);
                    reports.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(report);
                }
            });
        }
    });
    let reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    let reports: Result<Vec<Report>, Error> = reports.into_iter().flatten().collect();
    Ok((reports?, start.elapsed()))
}
