//! The process's metrics, in Prometheus's text format.
//!
//! Services record through the `metrics` crate; one recorder serves the whole process.

mod process;

use std::sync::Mutex;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use proto::Reason;

use crate::{Context, Error};

/// Upper bounds of the buckets of every histogram named `*_seconds`: from an engine step to a long stream.
const BUCKETS_SECONDS: [f64; 18] = [
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.35, 0.5, 1.0, 2.0, 5.0, 15.0,
    60.0,
];
/// Spans on their way to a collector.
const SPANS: &str = "baton_process_spans_total";
/// How often histograms are folded.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

static HANDLE: Mutex<Option<PrometheusHandle>> = Mutex::new(None);

/// Installs the recorder, once per process; later calls change nothing. Metrics recorded before are lost.
///
/// # Errors
/// `INTERNAL` when another library has installed a recorder.
pub fn install() -> Result<(), Error> {
    handle().map(drop)
}

/// All metrics as text: what services record, then what the system tells of the process.
///
/// # Errors
/// Those of [`install`].
pub fn render() -> Result<String, Error> {
    Ok(handle()?.render() + &process::render())
}

/// Installs the recorder, and folds histograms now and then until the process stops, so that unread ones do not grow.
///
/// # Errors
/// Those of [`install`].
pub fn start(context: &Context) -> Result<(), Error> {
    install()?;
    let shutdown = context.shutdown.clone();
    drop(context.tasks.spawn("metrics upkeep", async move {
        let mut every = tokio::time::interval(UPKEEP_EVERY);
        loop {
            tokio::select! {
                _ = every.tick() => {}
                () = shutdown.stopped() => return,
            }
            // What cannot be rendered either needs no upkeep.
            if let Ok(handle) = handle() {
                handle.run_upkeep();
            }
        }
    }));
    Ok(())
}

/// That many spans were exported, or failed to be.
pub(crate) fn spans(outcome: &'static str, count: u64) {
    metrics::counter!(SPANS, "outcome" => outcome).increment(count);
}

/// Names and explains what every process counts.
fn describe() {
    metrics::describe_counter!(SPANS, "Spans of traces by outcome: exported, or failed and dropped.");
    for outcome in ["exported", "failed"] {
        metrics::counter!(SPANS, "outcome" => outcome).increment(0);
    }
}

fn handle() -> Result<PrometheusHandle, Error> {
    let mut handle = HANDLE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(handle) = &*handle {
        return Ok(handle.clone());
    }
    let installed = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &BUCKETS_SECONDS)
        .and_then(PrometheusBuilder::install_recorder)
        .map_err(|error| proto::Error::new(Reason::Internal, format!("metrics recorder: {error}")))?;
    process::begin();
    describe();
    Ok(handle.insert(installed).clone())
}
