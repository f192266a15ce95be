//! A prefill worker's jobs as an operator sees them.

use engine::model::Model;
use node::debug::Excerpt;
use worker::core::Now;
use worker::dump::{CoreDump, SequenceDump, seconds};

use super::{Job, PrefillCore};

impl<M: Model> PrefillCore<M> {
    /// The state at `now`.
    pub(super) fn dump_now(&self, now: Now) -> CoreDump {
        let sequences = self.jobs.iter().map(|(sequence, job)| SequenceDump {
            request: job.request.0.clone(),
            attempt: job.attempt.0,
            sequence: sequence.0,
            state: state(job),
            age_seconds: seconds(job.arrived, now),
            left_seconds: seconds(now, job.deadline),
            generated: usize::from(job.first_token.is_some()),
            fetch: None,
        });
        CoreDump {
            draining: self.draining,
            sequences: Excerpt::of(self.jobs.len(), sequences),
            holds: self.owner.dump(now),
            fences: self.fences.dump(),
        }
    }
}

fn state(job: &Job) -> &'static str {
    match (job.scheduled, job.first_token) {
        (None, _) => "queued",
        (Some(_), None) => "computing",
        (Some(_), Some(_)) => "held",
    }
}
