//! The table at the end.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What came of one fault.
#[derive(Clone, Debug, Default)]
pub(crate) struct Row {
    /// What was done to whom, and when.
    pub(crate) fault: String,
    /// What the client has seen.
    pub(crate) outcome: String,
    /// From the fault until a survivor says that it knows.
    pub(crate) detect: Option<Duration>,
    /// From the fault to the client's next item, or its honest error.
    pub(crate) go_on: Option<Duration>,
    /// From the fault until no block is used or held, the rest of the request included.
    pub(crate) free: Option<Duration>,
}

/// The rows of all scenarios.
pub(crate) struct Report {
    scenarios: Vec<&'static str>,
    rows: Mutex<Vec<(&'static str, Row)>>,
}

impl Report {
    /// An empty one, for scenarios in that order.
    pub(crate) fn new(scenarios: impl Iterator<Item = &'static str>) -> Self {
        Self { scenarios: scenarios.collect(), rows: Mutex::default() }
    }

    /// Adds a row to its scenario.
    pub(crate) fn add(&self, scenario: &'static str, row: Row) {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).push((scenario, row));
    }

    /// Prints all rows.
    pub(crate) fn print(&self) {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        println!("\n| scenario | fault | client | detect, s | go on, s | free, s |");
        println!("|---|---|---|---|---|---|");
        for scenario in &self.scenarios {
            for (_, row) in rows.iter().filter(|(of, _)| of == scenario) {
                let Row { fault, outcome, detect, go_on, free } = row;
                let [detect, go_on, free] = [*detect, *go_on, *free].map(seconds);
                println!("| {scenario} | {fault} | {outcome} | {detect} | {go_on} | {free} |");
            }
        }
    }
}

fn seconds(time: Option<Duration>) -> String {
    time.map(|time| format!("{:.3}", time.as_secs_f64())).unwrap_or_default()
}
