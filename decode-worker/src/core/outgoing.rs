//! A sequence on its way out: moved to another decode worker while it runs, by its KV and within the same attempt.
//!
//! A router asks for it, because it alone knows whether there is another place. At the border of a step the sequence then
//! stands still: its KV is sealed to the last token and held under a lease, as a prefill worker holds what it computed,
//! and the stream ends with the reference. What a prefill worker's first token is in a split placement is here the last
//! one that was sent; whoever fetches the KV goes on after it.

use std::collections::BTreeMap;
use std::sync::Arc;

use engine::model::Model;
use engine::{HandedOver, SequenceId};
use proto::{Attempt, Error, Handoff, Reason, RequestId, TokenId};
use worker::core::{Action, CallId, DecodeItem, Moves, Now};
use worker::holds::Issue;
use worker::planted::{self, Bug};
use worker::sending::Source;

use super::{DecodeCore, Phase, deadline_passed};

/// What is held for other decode workers.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pub(super) moved: BTreeMap<SequenceId, Moved>,
    /// Those that are over.
    pub(super) counts: Moves,
}

/// A sequence that stands still.
#[derive(Debug)]
pub(super) struct Moved {
    request: RequestId,
    attempt: Attempt,
    /// The tokens whose KV is held.
    tokens: Arc<[TokenId]>,
    /// The token that follows them.
    next: TokenId,
    arrived: Now,
    deadline: Now,
    /// A fetch got all of it.
    is_sent: bool,
}

impl Outgoing {
    /// When the first of them has to be over, whatever its lease.
    pub(super) fn next_deadline(&self) -> Option<Now> {
        self.moved.values().map(|moved| moved.deadline).min()
    }

    fn that(&self, is_meant: impl Fn(&Moved) -> bool) -> Vec<SequenceId> {
        self.moved.iter().filter(|(_, moved)| is_meant(moved)).map(|(&sequence, _)| sequence).collect()
    }
}

impl<M: Model> DecodeCore<M> {
    /// A router wants the sequence elsewhere. It goes as soon as it can.
    pub(super) fn move_away(
        &mut self,
        request: &RequestId,
        attempt: Attempt,
        now: Now,
        out: &mut Vec<Action>,
    ) {
        for call in self.jobs_that(|job| job.request == *request && job.attempt == attempt) {
            if let Some(job) = self.jobs.get_mut(&call) {
                job.is_leaving = true;
            }
            self.leave(call, now, out);
        }
    }

    /// Those that are to leave and can now do.
    pub(super) fn leave_all(&mut self, now: Now, out: &mut Vec<Action>) {
        for call in self.jobs_that(|job| job.is_leaving) {
            self.leave(call, now, out);
        }
    }

    /// Turns a running sequence into a hold, and ends its call with the reference to it.
    fn leave(&mut self, call: CallId, now: Now, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.get(&call).filter(|job| matches!(job.phase, Phase::Running)) else {
            return;
        };
        let sequence = job.sequence;
        let Some(HandedOver { tokens, next }) = self.engine.hand_over(sequence) else { return };
        let Some(job) = self.jobs.remove(&call) else { return };
        self.sequences.remove(&sequence);
        let handoff = self.owner.issue(Issue {
            sequence,
            request: job.request.clone(),
            attempt: job.attempt,
            tokens: tokens.len(),
        });
        let next = if planted::is(Bug::MovedTokenBefore) { tokens[tokens.len() - 1] } else { next };
        let (tokens, arrived, deadline) = (tokens.into(), job.arrived, job.deadline);
        let (request, attempt, is_sent) = (job.request, job.attempt, false);
        let moved = Moved { request, attempt, tokens, next, arrived, deadline, is_sent };
        self.outgoing.moved.insert(sequence, moved);
        out.push(Action::Decode { call, item: DecodeItem::Moved { handoff } });
        out.push(Action::Close { call, error: None });
        if !planted::is(Bug::MovedWithoutLease) {
            self.owner.stream_closed(sequence, now);
        }
    }

    /// Ends a hold: its fetch is closed, and then its blocks are freed.
    fn end_moved(&mut self, sequence: SequenceId, error: &Error, out: &mut Vec<Action>) {
        let Some(moved) = self.outgoing.moved.remove(&sequence) else { return };
        let counts = &mut self.outgoing.counts;
        if moved.is_sent && error.reason == Reason::UnknownHandoff {
            counts.taken += 1;
        } else {
            counts.lost += 1;
        }
        self.owner.end(sequence, error, out);
        self.engine.cancel(sequence);
    }

    /// Ends the holds of earlier attempts (invariant I1).
    pub(super) fn fence_moved(&mut self, request: &RequestId, attempt: Attempt, out: &mut Vec<Action>) {
        if planted::is(Bug::FenceSparesMoved) {
            return;
        }
        for sequence in self.outgoing.that(|moved| moved.request == *request && moved.attempt < attempt) {
            let message = format!("request {request}: fenced by attempt {}", attempt.0);
            self.end_moved(sequence, &Error::new(Reason::StaleAttempt, message), out);
        }
    }

    /// Ends the holds that have outlived their lease or their deadline.
    pub(super) fn expire_moved(&mut self, now: Now, out: &mut Vec<Action>) {
        for sequence in self.outgoing.that(|moved| moved.deadline <= now) {
            let waited = now.saturating_sub(self.outgoing.moved[&sequence].arrived);
            self.end_moved(sequence, &deadline_passed(waited), out);
        }
        for sequence in self.owner.expired(now) {
            let message = format!("{:?} went by without a renewal", self.config.lease_ttl);
            self.end_moved(sequence, &Error::new(Reason::LeaseExpired, message), out);
        }
    }

    pub(super) fn release_moved(&mut self, handoff: &Handoff, out: &mut Vec<Action>) {
        if let Some(sequence) = self.owner.released(handoff) {
            let error = Error::new(Reason::UnknownHandoff, "the hand-off was released");
            self.end_moved(sequence, &error, out);
        }
    }

    pub(super) fn start_fetch(
        &mut self,
        (call, skip): (CallId, usize),
        handoff: &Handoff,
        now: Now,
        out: &mut Vec<Action>,
    ) -> Result<(), Error> {
        let moved = &self.outgoing.moved;
        let source = |sequence| {
            let of: &Moved = moved.get(&sequence).expect("a hold ends with its sequence");
            Source {
                sequence,
                handoff: handoff.id,
                tokens: Arc::clone(&of.tokens),
                first_token: Some(of.next),
            }
        };
        self.owner.start_fetch((call, skip), handoff, (&self.fences, now), source, out)
    }

    pub(super) fn add_credit(&mut self, fetch: CallId, items: usize, out: &mut Vec<Action>) {
        if let Some(sequence) = self.owner.add_credit(fetch, items, &self.engine, out)
            && let Some(moved) = self.outgoing.moved.get_mut(&sequence)
        {
            moved.is_sent = true;
        }
    }
}
