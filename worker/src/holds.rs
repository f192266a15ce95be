//! The lease table of an owner: which KV is held for whom, under which reference, and until when.
//!
//! A hold is issued when its prefill starts and lives while the router's call is open. Then its lease runs: it lives
//! until a time to live after the last touch, which is the end of that call, the start of an authorised fetch, or a
//! renewal. Whatever ends a hold (release, expiry, fence, abort) ends it for good: its id is never valid again, and
//! is remembered for a while so that a late peer learns what happened (invariants I1 and I4).
//!
//! The table knows neither the engine nor the bytes. Whoever ends a hold here gets back the transfer that was
//! reading it, has to close that first, and only then frees the blocks (invariant I3).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use engine::SequenceId;
use node::debug::Excerpt;
use proto::{Attempt, Digest, Error, Handoff, HandoffId, KvLayout, Reason, RequestId, WorkerEpoch};

use crate::core::{CallId, Now};
use crate::core_config::{CoreConfig, HandoffIds};
use crate::dump::{HoldDump, seconds};
use crate::fences::Fences;
use crate::planted::{self, Bug};

/// Most ended holds that are remembered.
pub const ENDED_MAX: usize = 4096;

/// The lease table.
#[derive(Debug)]
pub struct Holds {
    address: String,
    epoch: WorkerEpoch,
    fingerprint: Digest,
    layout: KvLayout,
    lease_ttl: Duration,
    ids: HandoffIds,
    /// A look-up by hash of the whole id under a secret key: how long it takes tells nothing about any id.
    by_id: HashMap<HandoffId, SequenceId>,
    by_sequence: BTreeMap<SequenceId, Hold>,
    ended: Ended,
}

#[derive(Debug)]
struct Hold {
    handoff: Handoff,
    /// `None` while the router's call is open.
    lease_ends: Option<Now>,
    /// The fetch that reads the hold's KV.
    transfer: Option<CallId>,
}

/// What a reference is issued for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issue {
    /// The engine's sequence that is held, or computed to be.
    pub sequence: SequenceId,
    /// The request.
    pub request: RequestId,
    /// The attempt.
    pub attempt: Attempt,
    /// Tokens whose KV is handed over.
    pub tokens: usize,
}

impl Holds {
    /// No holds, for a worker with that KV layout.
    pub fn new(config: &CoreConfig, layout: KvLayout) -> Self {
        Self {
            address: config.address.clone(),
            epoch: config.epoch,
            fingerprint: config.model.fingerprint,
            layout,
            lease_ttl: config.lease_ttl,
            ids: config.handoff_ids.clone(),
            by_id: HashMap::new(),
            by_sequence: BTreeMap::new(),
            ended: Ended::default(),
        }
    }

    /// Takes a sequence under lease, while the router's call is open. Returns the reference to it.
    pub fn issue(&mut self, issue: Issue) -> Handoff {
        let handoff = Handoff {
            owner: self.address.clone(),
            epoch: self.epoch,
            request: issue.request,
            attempt: issue.attempt,
            id: self.ids.draw(),
            fingerprint: self.fingerprint,
            layout: self.layout,
            tokens: issue.tokens,
        };
        self.by_id.insert(handoff.id, issue.sequence);
        let hold = Hold { handoff: handoff.clone(), lease_ends: None, transfer: None };
        self.by_sequence.insert(issue.sequence, hold);
        handoff
    }

    /// The sequence that a reference gives access to.
    ///
    /// # Errors
    /// STALE_EPOCH for a reference from another life of this worker; STALE_ATTEMPT below the request's fence;
    /// LEASE_EXPIRED or DEADLINE for a hold that ended so; UNKNOWN_HANDOFF for one that was released, aborted, or
    /// never issued like this; FINGERPRINT_MISMATCH and LAYOUT_MISMATCH when the caller takes the KV for another
    /// model's.
    pub fn authorise(&self, handoff: &Handoff, fences: &Fences) -> Result<SequenceId, Error> {
        self.check_epoch(handoff)?;
        fences.check(&handoff.request, handoff.attempt)?;
        let sequence = self.find(handoff)?;
        if handoff.fingerprint != self.fingerprint {
            let message = format!(
                "checkpoint fingerprint: {} here, {} in the reference",
                self.fingerprint, handoff.fingerprint
            );
            return Err(Error::new(Reason::FingerprintMismatch, message));
        }
        match self.layout.mismatch(&handoff.layout) {
            None => Ok(sequence),
            Some(message) => Err(Error::new(Reason::LayoutMismatch, message)),
        }
    }

    fn check_epoch(&self, handoff: &Handoff) -> Result<(), Error> {
        if handoff.epoch == self.epoch || planted::is(Bug::EpochNotChecked) {
            return Ok(());
        }
        let message = format!("epoch: {} here, {} in the reference", self.epoch, handoff.epoch);
        Err(Error::new(Reason::StaleEpoch, message))
    }

    /// The sequence that was issued under exactly this reference.
    fn find(&self, handoff: &Handoff) -> Result<SequenceId, Error> {
        let names = |hold: &Hold| {
            let issued = &hold.handoff;
            issued.request == handoff.request
                && issued.attempt == handoff.attempt
                && issued.tokens == handoff.tokens
        };
        if planted::is(Bug::ForgedIdAccepted)
            && let Some((&sequence, _)) = self.by_sequence.iter().find(|(_, hold)| names(hold))
        {
            return Ok(sequence);
        }
        let sequence = self.by_id.get(&handoff.id).copied();
        if let Some(sequence) = sequence.filter(|sequence| self.by_sequence.get(sequence).is_some_and(names))
        {
            return Ok(sequence);
        }
        let (request, attempt) = (&handoff.request, handoff.attempt.0);
        let subject = format!("hand-off of request {request}, attempt {attempt}, {} tokens", handoff.tokens);
        Err(match self.ended.get(handoff.id) {
            Some(Reason::LeaseExpired) => {
                let message = format!("{subject}: {:?} went by without a renewal", self.lease_ttl);
                Error::new(Reason::LeaseExpired, message)
            }
            Some(Reason::Deadline) => {
                Error::new(Reason::Deadline, format!("{subject}: the request's deadline passed"))
            }
            Some(_) => Error::new(Reason::UnknownHandoff, format!("{subject}: held no longer")),
            None => Error::new(Reason::UnknownHandoff, format!("{subject}: not issued here")),
        })
    }

    /// Extends the lease; the current attempt alone may. Returns the time to live from now.
    ///
    /// # Errors
    /// As [`authorise`](Self::authorise).
    pub fn renew(&mut self, handoff: &Handoff, fences: &Fences, now: Now) -> Result<Duration, Error> {
        let authorised = self.authorise(handoff, fences);
        if planted::is(Bug::RenewalByStaleAttempt)
            && authorised.as_ref().is_err_and(|error| error.reason == Reason::StaleAttempt)
        {
            return Ok(self.lease_ttl);
        }
        self.touch(authorised?, now);
        Ok(self.lease_ttl)
    }

    /// Lets a running lease start anew.
    fn touch(&mut self, sequence: SequenceId, now: Now) {
        let ends = now.saturating_add(self.lease_ttl);
        if let Some(lease_ends) =
            self.by_sequence.get_mut(&sequence).and_then(|hold| hold.lease_ends.as_mut())
        {
            *lease_ends = ends;
        }
    }

    /// The router's call ended well: from now on the lease runs.
    pub fn stream_closed(&mut self, sequence: SequenceId, now: Now) {
        let ends = now.saturating_add(self.lease_ttl);
        if let Some(hold) = self.by_sequence.get_mut(&sequence) {
            hold.lease_ends.get_or_insert(ends);
        }
    }

    /// A fetch that [`authorise`](Self::authorise) allowed starts to read. Returns the earlier fetch that it
    /// replaces, which must be closed: its peer tries again after a broken connection.
    pub fn attach(&mut self, sequence: SequenceId, fetch: CallId, now: Now) -> Option<CallId> {
        self.touch(sequence, now);
        self.by_sequence.get_mut(&sequence).and_then(|hold| hold.transfer.replace(fetch))
    }

    /// That fetch reads no more.
    pub fn detach(&mut self, sequence: SequenceId, fetch: CallId) {
        if let Some(hold) = self.by_sequence.get_mut(&sequence) {
            hold.transfer.take_if(|transfer| *transfer == fetch);
        }
    }

    /// The fetch that reads the hold's KV.
    pub fn transfer(&self, sequence: SequenceId) -> Option<CallId> {
        self.by_sequence.get(&sequence).and_then(|hold| hold.transfer)
    }

    /// Fetches that read.
    pub fn transfers(&self) -> usize {
        self.by_sequence.values().filter(|hold| hold.transfer.is_some()).count()
    }

    /// The hold that a release ends, if it is there: unknown references are no error, the hold is gone either way.
    /// No fence is asked: nobody but who was given the reference can know it, and that attempt is over.
    pub fn released(&self, handoff: &Handoff) -> Option<SequenceId> {
        self.check_epoch(handoff).and_then(|()| self.find(handoff)).ok()
    }

    /// Ends a hold for good. Returns the fetch that was reading, to be closed before the blocks are freed.
    pub fn end(&mut self, sequence: SequenceId, reason: Reason) -> Option<CallId> {
        let hold = self.by_sequence.remove(&sequence)?;
        self.by_id.remove(&hold.handoff.id);
        self.ended.remember(hold.handoff.id, reason);
        hold.transfer
    }

    /// Holds whose lease ran out.
    pub fn expired(&self, now: Now) -> Vec<SequenceId> {
        let ended = |hold: &Hold| ends_at(hold).is_some_and(|ends| ends <= now);
        self.by_sequence.iter().filter(|(_, hold)| ended(hold)).map(|(&sequence, _)| sequence).collect()
    }

    /// When the next lease runs out.
    pub fn next_expiry(&self) -> Option<Now> {
        self.by_sequence.values().filter_map(ends_at).min()
    }

    /// True when the hold's lease is running and has not run out.
    pub fn lease_runs(&self, sequence: SequenceId, now: Now) -> bool {
        self.by_sequence.get(&sequence).and_then(|hold| hold.lease_ends).is_some_and(|ends| ends > now)
    }

    /// The holds as an operator sees them.
    pub fn dump(&self, now: Now) -> Excerpt<HoldDump> {
        let dump = |(sequence, hold): (&SequenceId, &Hold)| HoldDump {
            request: hold.handoff.request.0.clone(),
            attempt: hold.handoff.attempt.0,
            sequence: sequence.0,
            tokens: hold.handoff.tokens,
            lease_left_seconds: hold.lease_ends.map(|ends| seconds(now, ends)),
            fetched: hold.transfer.is_some(),
        };
        Excerpt::of(self.by_sequence.len(), self.by_sequence.iter().map(dump))
    }

    /// Hand-offs under lease.
    pub fn len(&self) -> usize {
        self.by_sequence.len()
    }

    /// True when nothing is held.
    pub fn is_empty(&self) -> bool {
        self.by_sequence.is_empty()
    }
}

/// When a hold ends by itself.
fn ends_at(hold: &Hold) -> Option<Now> {
    if planted::is(Bug::LeaseNeverExpires) { None } else { hold.lease_ends }
}

/// Why recent holds ended: a ring of bounded size.
#[derive(Debug, Default)]
struct Ended {
    reasons: HashMap<HandoffId, Reason>,
    order: VecDeque<HandoffId>,
}

impl Ended {
    fn remember(&mut self, id: HandoffId, reason: Reason) {
        self.reasons.insert(id, reason);
        self.order.push_back(id);
        if self.order.len() > ENDED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.reasons.remove(&oldest);
        }
    }

    fn get(&self, id: HandoffId) -> Option<Reason> {
        self.reasons.get(&id).copied()
    }
}

#[cfg(test)]
mod tests {
    use proto::{KvDtype, ModelDescription};

    use super::*;

    const LAYOUT: KvLayout =
        KvLayout { layers: 1, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 };

    fn holds() -> Holds {
        let model = ModelDescription {
            name: "m".to_owned(),
            fingerprint: Digest([1; 32]),
            tokenizer: Digest([2; 32]),
            context_len: 64,
            vocab_size: 256,
            numerics: "n".to_owned(),
        };
        Holds::new(&CoreConfig::new("here:1", WorkerEpoch(1), model), LAYOUT)
    }

    fn fences() -> Fences {
        Fences::new(Duration::from_mins(10), 8)
    }

    fn issue(holds: &mut Holds, sequence: u64) -> Handoff {
        let (request, attempt) = ("r".into(), Attempt(0));
        holds.issue(Issue { sequence: SequenceId(sequence), request, attempt, tokens: 3 })
    }

    fn why(holds: &Holds, handoff: &Handoff) -> String {
        holds.authorise(handoff, &fences()).expect_err("a refusal").to_string()
    }

    #[test]
    fn ended_holds_are_remembered_up_to_a_bound() {
        let mut holds = holds();
        let handoffs: Vec<_> = (0..=ENDED_MAX as u64)
            .map(|sequence| {
                let handoff = issue(&mut holds, sequence);
                assert_eq!(holds.end(SequenceId(sequence), Reason::LeaseExpired), None);
                handoff
            })
            .collect();
        assert!(holds.is_empty() && holds.by_id.is_empty());
        assert_eq!((holds.ended.order.len(), holds.ended.reasons.len()), (ENDED_MAX, ENDED_MAX));
        assert!(why(&holds, &handoffs[0]).ends_with("not issued here (UNKNOWN_HANDOFF)"));
        assert!(why(&holds, &handoffs[1]).ends_with("went by without a renewal (LEASE_EXPIRED)"));
    }

    #[test]
    fn an_end_is_the_last_word() {
        let mut holds = holds();
        let handoff = issue(&mut holds, 1);
        holds.end(SequenceId(1), Reason::UnknownHandoff);
        assert_eq!(holds.end(SequenceId(1), Reason::LeaseExpired), None);
        assert!(why(&holds, &handoff).ends_with("held no longer (UNKNOWN_HANDOFF)"));
    }

    #[test]
    fn transfers_are_counted_and_handed_to_whoever_ends_the_hold() {
        let (mut holds, sequence) = (holds(), SequenceId(1));
        let handoff = issue(&mut holds, 1);
        assert_eq!(holds.authorise(&handoff, &fences()), Ok(sequence));
        assert_eq!(holds.attach(sequence, CallId(2), Now::ZERO), None);
        assert_eq!(holds.attach(sequence, CallId(4), Now::ZERO), Some(CallId(2)));
        holds.detach(sequence, CallId(2));
        assert_eq!(
            (holds.transfers(), holds.transfer(sequence)),
            (1, Some(CallId(4))),
            "the later one stays"
        );
        assert_eq!(holds.end(sequence, Reason::LeaseExpired), Some(CallId(4)));
        assert_eq!(holds.transfers(), 0);
    }

    #[test]
    fn no_lease_runs_before_the_stream_is_closed() {
        let (mut holds, sequence, second) = (holds(), SequenceId(1), Duration::from_secs(1));
        let handoff = issue(&mut holds, 1);
        assert_eq!(holds.next_expiry(), None);
        assert_eq!(holds.renew(&handoff, &fences(), second), Ok(10 * second));
        assert_eq!((holds.next_expiry(), holds.lease_runs(sequence, second)), (None, false));
        holds.stream_closed(sequence, 2 * second);
        assert_eq!(holds.next_expiry(), Some(12 * second));
        holds.stream_closed(sequence, 5 * second);
        assert_eq!(holds.next_expiry(), Some(12 * second), "it closes once");
        assert_eq!(holds.renew(&handoff, &fences(), 11 * second), Ok(10 * second));
        assert_eq!(holds.expired(20 * second), []);
        assert_eq!(holds.expired(21 * second), [sequence]);
    }
}
