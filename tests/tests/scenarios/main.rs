//! The twelve scenarios: what real processes, each in a network of its own, do when something dies, falls silent, lies or
//! is cut off. Passed when every client has the right tokens or an honest error, every block is back within a lease, and
//! the next request is served. Prints one table: time to detect, to go on, and to free.
//!
//! It runs itself rather than in the test harness, so that the table is there without `--nocapture`. Words on the command
//! line choose the scenarios whose names have one of them.

mod clock;
mod deadline;
mod kill;
mod leave;
mod mismatch;
mod peer;
mod registry;
mod report;
mod restart;
mod scene;
mod silence;
mod transfer;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use baton_tests::harness::is_asked_for;
use report::Report;

/// Scenarios that run at a time: most of their time is waiting.
const AT_A_TIME: usize = 2;

/// A name, and what happens.
type Scenario = (&'static str, fn(&Arc<Report>));

/// All of them, the longest first.
const SCENARIOS: &[Scenario] = &[
    ("etcd down", registry::away),
    ("kill -9 prefill", kill::prefill),
    ("kill -9 decode", kill::decode),
    ("kill -9 router", kill::router),
    ("kill -9 gateway", kill::gateway),
    ("SIGSTOP", silence::stopped),
    ("half-open TCP", silence::cut),
    ("deadline", deadline::deadlines),
    ("orphans exhaust the pool", leave::orphans),
    ("disconnect in each window", leave::in_each_window),
    ("restart at the same address", restart::same_address),
    ("mismatch, listed", mismatch::mismatch),
    ("mismatch, registering", mismatch::registration),
    ("clock jump", clock::jumps),
    ("borders of blocks", restart::borders),
    ("others go on", restart::others_go_on),
    ("lease expiry during read", transfer::lease),
    ("one transfer of several fails", transfer::one_fails),
    ("many transfers fail", transfer::many_fail),
    ("stale, replayed, forged", transfer::references),
    ("a pause that is none", silence::paused),
];

fn main() -> ExitCode {
    let chosen: Vec<_> = SCENARIOS.iter().filter(|(name, _)| is_asked_for(name)).collect();
    if chosen.is_empty() {
        return ExitCode::SUCCESS;
    }
    let report = Arc::new(Report::new(chosen.iter().map(|(name, _)| *name)));
    let left = Mutex::new(VecDeque::from(chosen));
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some((name, run)) = next(&left) {
                    if catch_unwind(AssertUnwindSafe(|| run(&report))).is_err() {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push(*name);
                    }
                }
            });
        }
    });
    report.print();
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("\nfailed: {}", failed.join(", "));
    ExitCode::FAILURE
}

fn next<T>(left: &Mutex<VecDeque<T>>) -> Option<T> {
    left.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
}
