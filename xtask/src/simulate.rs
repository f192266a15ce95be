//! The simulation of the protocol as a record: more schedules than the tests have time for, and the hand-offs counted.

use anyhow::Result;

use crate::process::{command, run};

/// Runs that many schedules, with every assertion of a debug build, and prints what was done to requests in which phase, and
/// how many hand-offs there were.
pub(crate) fn run_schedules(schedules: u64) -> Result<()> {
    let test = ["test", "--locked", "--package", "baton-tests", "--test", "simulation", "--"];
    let mut test = command("cargo", &test);
    test.args(["--exact", "no_schedule_breaks_an_invariant", "--nocapture"]);
    test.env("BATON_SIM_SCHEDULES", schedules.to_string());
    run(test)
}
