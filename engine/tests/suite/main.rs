//! Tests of the engine through its public face, on the simulated model.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, and says where")]

mod conformance;
mod drive;
mod failures;
mod faulty;
mod forks;
mod grammar;
mod handoff;
mod invariance;
mod operations;
#[cfg(feature = "planted")]
mod planted;
mod prompt_report;
mod scenarios;
mod watermark;
