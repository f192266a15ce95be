//! The file that `baton plan` reads: see `docs/planning.md`.

use proto::Error;
use serde::{Deserialize, Serialize};

use super::Task;
use crate::machine::MachineFile;
use crate::report::Slo;
use crate::workload::Workload;

/// What is best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// As few workers as keep the limits.
    #[default]
    Fewest,
    /// As many requests within the limits as the workers can serve.
    Goodput,
}

/// The limits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SloFile {
    /// Longest time to the first token, seconds.
    pub ttft_seconds: f64,
    /// Longest time per output token after the first, seconds.
    pub tpot_seconds: f64,
    /// How many of a hundred requests must keep both.
    #[serde(default = "percentile")]
    pub percentile: f64,
}

fn percentile() -> f64 {
    95.0
}

/// The workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkersFile {
    /// How many there may be.
    pub max: usize,
    /// What is best: `fewest` or `goodput`.
    #[serde(default)]
    pub goal: Goal,
}

/// The file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// Seed of all that is left to chance.
    #[serde(default = "seed")]
    pub seed: u64,
    /// What users ask for.
    pub workload: Workload,
    /// The limits.
    pub slo: SloFile,
    /// The workers.
    pub workers: WorkersFile,
    /// What each worker is.
    #[serde(default)]
    pub machine: MachineFile,
}

fn seed() -> u64 {
    1
}

impl PlanFile {
    /// The task.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the field.
    pub fn task(self) -> Result<Task, Error> {
        let SloFile { ttft_seconds, tpot_seconds, percentile } = self.slo;
        if !(percentile > 0.0 && percentile <= 100.0) {
            let message = format_args!("more than 0 and at most 100 expected, {percentile} came");
            return Err(Error::invalid("slo.percentile", message));
        }
        let task = Task {
            workload: self.workload,
            machine: self
                .machine
                .machine()
                .map_err(|fault| Error::new(fault.reason, format!("machine.{}", fault.message)))?,
            slo: Slo { ttft_seconds, tpot_seconds },
            attainment: percentile / 100.0,
            workers_max: self.workers.max,
            goal: self.workers.goal,
            seed: self.seed,
        };
        task.validate()?;
        Ok(task)
    }
}
