//! The watch over an owner of holds: a prefill worker, or a decode worker that sequences move away from.

use std::collections::BTreeMap;
use std::time::Duration;

use engine::KvBlock;
use proto::{Attempt, Handoff, HandoffId, RequestId, WorkerEpoch};
use worker::core::{Action, CallId, DecodeItem, Event, FetchItem, Gauges, PrefillItem};

use super::{Check, Truth, Violation, ensure};
use crate::oracle::checksums;

/// One life of a worker, as its messages tell it.
pub(crate) struct OwnerWatch {
    /// It decodes: only what moves away is held.
    decodes: bool,
    epoch: WorkerEpoch,
    lease_ttl: Duration,
    fences: BTreeMap<RequestId, Attempt>,
    holds: BTreeMap<HandoffId, Hold>,
    prefills: BTreeMap<CallId, Prefill>,
    /// Of open decode calls, the deadline.
    deadlines: BTreeMap<CallId, Duration>,
    /// Decode calls that have said where their sequence is held, until their end.
    moved: BTreeMap<CallId, HandoffId>,
    fetches: BTreeMap<CallId, Handoff>,
    /// Blocks were overwritten: what is sent of them must show it.
    pub(crate) is_stray: bool,
}

struct Prefill {
    request: RequestId,
    attempt: Attempt,
    deadline: Duration,
    issued: Option<HandoffId>,
}

struct Hold {
    handoff: Handoff,
    deadline: Duration,
    /// `None` while the router's call is open.
    lease_ends: Option<Duration>,
    /// Why it is over.
    ended: Option<&'static str>,
}

impl OwnerWatch {
    pub(crate) fn new(epoch: WorkerEpoch, lease_ttl: Duration, decodes: bool) -> Self {
        Self {
            decodes,
            epoch,
            lease_ttl,
            fences: BTreeMap::new(),
            holds: BTreeMap::new(),
            prefills: BTreeMap::new(),
            deadlines: BTreeMap::new(),
            moved: BTreeMap::new(),
            fetches: BTreeMap::new(),
            is_stray: false,
        }
    }

    /// Time passes: leases and deadlines end what they end.
    pub(crate) fn pass(&mut self, now: Duration) {
        for hold in self.holds.values_mut().filter(|hold| hold.ended.is_none()) {
            if hold.lease_ends.is_some_and(|ends| ends <= now) {
                hold.ended = Some("lease expired");
            } else if hold.deadline <= now {
                hold.ended = Some("deadline passed");
            }
        }
    }

    /// An event is about to be given to the core.
    pub(crate) fn take(&mut self, event: &Event, now: Duration) {
        match event {
            Event::Prefill { call, generation } => {
                let deadline = now + generation.time_left;
                let request = generation.request.clone();
                let attempt = generation.attempt;
                let prefill = Prefill { request: request.clone(), attempt, deadline, issued: None };
                self.prefills.insert(*call, prefill);
                self.fence(&request, attempt);
            }
            Event::Decode { call, generation, .. } => {
                self.deadlines.insert(*call, now + generation.time_left);
                self.fence(&generation.request, generation.attempt);
            }
            Event::Fence { request, attempt } => self.fence(request, *attempt),
            Event::Release { handoff } => self.end_exactly(handoff, "released"),
            Event::Dropped { call } => {
                self.fetches.remove(call);
                self.deadlines.remove(call);
                if let Some(id) = self.prefills.remove(call).and_then(|prefill| prefill.issued) {
                    self.end(id, "router gone");
                }
            }
            Event::Fetch { call, handoff, .. } => {
                if self.refusal(handoff).is_none() {
                    self.touch(handoff.id, now);
                    // The later fetch of a hold replaces the earlier.
                    self.fetches.retain(|_, other| other.id != handoff.id);
                }
                self.fetches.insert(*call, handoff.clone());
            }
            _ => {}
        }
    }

    fn fence(&mut self, request: &RequestId, attempt: Attempt) {
        let fence = self.fences.entry(request.clone()).or_default();
        *fence = attempt.max(*fence);
        let fence = *fence;
        for hold in self.holds.values_mut().filter(|hold| hold.handoff.request == *request) {
            if hold.handoff.attempt < fence {
                hold.ended.get_or_insert("fenced");
            }
        }
    }

    fn end(&mut self, id: HandoffId, why: &'static str) {
        if let Some(hold) = self.holds.get_mut(&id) {
            hold.ended.get_or_insert(why);
        }
    }

    fn end_exactly(&mut self, handoff: &Handoff, why: &'static str) {
        let is_own = handoff.epoch == self.epoch;
        if is_own && self.holds.get(&handoff.id).is_some_and(|hold| names(&hold.handoff, handoff)) {
            self.end(handoff.id, why);
        }
    }

    fn touch(&mut self, id: HandoffId, now: Duration) {
        let ends = now + self.lease_ttl;
        if let Some(lease) = self.holds.get_mut(&id).and_then(|hold| hold.lease_ends.as_mut()) {
            *lease = ends;
        }
    }

    /// Why a reference gives no right to anything, if it gives none (I1).
    pub(crate) fn refusal(&self, handoff: &Handoff) -> Option<&'static str> {
        if handoff.epoch != self.epoch {
            return Some("another epoch");
        }
        if self.fences.get(&handoff.request).is_some_and(|fence| handoff.attempt < *fence) {
            return Some("a fenced attempt");
        }
        match self.holds.get(&handoff.id) {
            Some(hold) if names(&hold.handoff, handoff) => hold.ended,
            _ => Some("never issued"),
        }
    }

    /// True while that request's KV is kept here.
    pub(crate) fn holds(&self, request: &RequestId) -> bool {
        self.holds.values().any(|hold| hold.ended.is_none() && hold.handoff.request == *request)
    }

    /// What is here of that request up to that attempt, if anything is.
    pub(crate) fn remains(&self, request: &RequestId, attempt: Attempt) -> Option<String> {
        let mut holds = self.holds.values().filter(|hold| hold.ended.is_none()).map(|hold| &hold.handoff);
        let hold = holds.find(|it| it.request == *request && it.attempt <= attempt);
        let mut prefills = self.prefills.values();
        let prefill = prefills.find(|it| it.request == *request && it.attempt <= attempt);
        hold.map(|handoff| format!("a hold of attempt {}", handoff.attempt.0))
            .or_else(|| prefill.map(|prefill| format!("a prefill of attempt {}", prefill.attempt.0)))
    }

    /// The core has answered an event or a step.
    pub(crate) fn check(&mut self, actions: &[Action], truth: Truth<'_>, by: &str) -> Check {
        actions.iter().try_for_each(|action| self.act(action, truth, by))?;
        for (call, handoff) in &self.fetches {
            if let Some(why) = self.refusal(handoff) {
                // Of a hold that was: its blocks may be another's by the next item.
                let had_a_right = self.holds.get(&handoff.id).is_some_and(|hold| hold.handoff == *handoff);
                let invariant = if had_a_right { "I3" } else { "I1" };
                let message = format!("{by}: fetch {} goes on without a right: {why}", call.0);
                return Err(Violation { invariant, message });
            }
        }
        let late = self.prefills.values().find(|prefill| prefill.deadline < truth.now);
        ensure(late.is_none(), "I6", || format!("{by}: a prefill call is open past its deadline"))
    }

    fn act(&mut self, action: &Action, truth: Truth<'_>, by: &str) -> Check {
        match action {
            Action::Prefill { call, item } => {
                let Some(prefill) = self.prefills.get_mut(call) else {
                    return ensure(false, "contract", || format!("{by}: an item after the end of a call"));
                };
                match item {
                    PrefillItem::Issued { handoff, .. } => {
                        prefill.issued = Some(handoff.id);
                        let hold = Hold {
                            handoff: handoff.clone(),
                            deadline: prefill.deadline,
                            lease_ends: None,
                            ended: None,
                        };
                        let earlier = self.holds.insert(handoff.id, hold);
                        ensure(earlier.is_none(), "I1", || format!("{by}: the same id was issued twice"))
                    }
                    PrefillItem::Done { token, .. } => truth.check_token(&prefill.request, token, by),
                }
            }
            Action::Decode { call, item: DecodeItem::Moved { handoff } } => {
                let deadline = self.deadlines.get(call).copied().unwrap_or(truth.now);
                self.moved.insert(*call, handoff.id);
                let hold = Hold { handoff: handoff.clone(), deadline, lease_ends: None, ended: None };
                let earlier = self.holds.insert(handoff.id, hold);
                ensure(earlier.is_none(), "I1", || format!("{by}: the same id was issued twice"))
            }
            Action::Close { call, error } => {
                self.fetches.remove(call);
                self.deadlines.remove(call);
                if let Some(hold) = self.moved.remove(call).and_then(|id| self.holds.get_mut(&id)) {
                    hold.lease_ends = Some(truth.now + self.lease_ttl);
                }
                let Some(id) = self.prefills.remove(call).and_then(|prefill| prefill.issued) else {
                    return Ok(());
                };
                if error.is_some() {
                    self.end(id, "prefill failed");
                } else if let Some(hold) = self.holds.get_mut(&id) {
                    hold.lease_ends = Some(truth.now + self.lease_ttl);
                }
                Ok(())
            }
            Action::Fetch { call, item } => self.check_fetch(*call, item, truth, by),
            Action::Renewed { .. } => Ok(()),
            _ if self.decodes => Ok(()),
            _ => Err(Violation { invariant: "contract", message: format!("{by}: {action:?}") }),
        }
    }

    fn check_fetch(&self, call: CallId, item: &FetchItem, truth: Truth<'_>, by: &str) -> Check {
        let Some(handoff) = self.fetches.get(&call) else {
            return ensure(false, "I3", || format!("{by}: an item for a fetch that is over"));
        };
        if let Some(why) = self.refusal(handoff) {
            return Err(Violation {
                invariant: "I1",
                message: format!("{by}: bytes for {why}: {handoff:?}"),
            });
        }
        match item {
            FetchItem::Block(block) => self.check_block(handoff, block, truth, by),
            FetchItem::End { first_token, .. } => {
                let Some(request) = truth.request(&handoff.request) else { return Ok(()) };
                let index = handoff.tokens - request.prompt.len();
                let right = request.oracle.reference[index];
                ensure(*first_token == right, "I2", || {
                    format!("{by}: first token {first_token} sent, {right} is right")
                })
            }
            FetchItem::Header { .. } => Ok(()),
        }
    }

    /// Bytes sent are the bytes sealed, or the checksums show that they are not.
    fn check_block(&self, handoff: &Handoff, block: &KvBlock, truth: Truth<'_>, by: &str) -> Check {
        let Some(request) = truth.request(&handoff.request) else { return Ok(()) };
        let right = request.oracle.slabs(block.first, block.tokens);
        let sealed = checksums(&right);
        if block.slabs == right && block.checksums == sealed {
            return Ok(());
        }
        let is_detectable = checksums(&block.slabs) != block.checksums;
        let (first, request) = (block.first, &handoff.request);
        ensure(self.is_stray, "I3", || {
            format!("{by}: request {request}: not the KV of tokens from {first}")
        })?;
        ensure(is_detectable, "I2", || {
            format!("{by}: request {request}: overwritten KV from token {first} under checksums of its own")
        })
    }

    /// The answer to a renewal.
    pub(crate) fn check_renewal(
        &mut self,
        handoff: &Handoff,
        granted: bool,
        now: Duration,
        by: &str,
    ) -> Check {
        let refusal = self.refusal(handoff);
        ensure(!granted || refusal.is_none(), "I1", || {
            format!("{by}: a renewal was granted to {}: {handoff:?}", refusal.unwrap_or_default())
        })?;
        if granted {
            self.touch(handoff.id, now);
        }
        Ok(())
    }

    /// The core holds exactly what it has to, whatever came.
    pub(crate) fn check_gauges(&self, gauges: &Gauges, by: &str) -> Check {
        let live = self.holds.values().filter(|hold| hold.ended.is_none()).count();
        ensure(gauges.leases >= live, "I1", || {
            format!("{by}: {live} hand-offs have a right to be held, {} are", gauges.leases)
        })?;
        ensure(gauges.leases <= live, "I4", || {
            let ended: Vec<_> = self.holds.values().filter_map(|hold| hold.ended).collect();
            format!("{by}: {live} hand-offs have a right to be held, {} are; over: {ended:?}", gauges.leases)
        })?;
        if self.decodes {
            let held = gauges.sequences.held;
            return ensure(held == live, "I5", || {
                format!("{by}: {live} sequences moved away, but {held} are held in the engine")
            });
        }
        let queued = self.prefills.values().filter(|prefill| prefill.issued.is_none()).count();
        let counts = gauges.sequences;
        let in_engine = counts.waiting + counts.running + counts.preempted + counts.held;
        ensure(in_engine == live + queued, "I5", || {
            format!("{by}: {live} held and {queued} queued, but {in_engine} sequences in the engine")
        })
    }
}

fn names(issued: &Handoff, came: &Handoff) -> bool {
    issued.request == came.request && issued.attempt == came.attempt && issued.tokens == came.tokens
}
