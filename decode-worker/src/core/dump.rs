//! A decode worker's jobs as an operator sees them.

use engine::model::Model;
use node::debug::Excerpt;
use worker::core::Now;
use worker::dump::{CoreDump, SequenceDump, seconds};

use super::{DecodeCore, Job, Phase};

impl<M: Model> DecodeCore<M> {
    /// The state at `now`.
    pub(super) fn dump_now(&self, now: Now) -> CoreDump {
        let sequences = self.jobs.values().map(|job| SequenceDump {
            request: job.request.0.clone(),
            attempt: job.attempt.0,
            sequence: job.sequence.0,
            state: state(job),
            age_seconds: seconds(job.arrived, now),
            left_seconds: seconds(now, job.deadline),
            generated: job.next_index,
            fetch: match &job.phase {
                Phase::Fetching(incoming) => Some(incoming.dump()),
                Phase::Running | Phase::Ended => None,
            },
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
    match job.phase {
        Phase::Fetching(_) => "fetching",
        Phase::Running if job.is_prefilled => "decoding",
        Phase::Running => "prefilling",
        Phase::Ended => "ended",
    }
}
