//! The watch over a decode worker.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proto::{Attempt, Handoff, RequestId};
use worker::core::{Action, CallId, DecodeItem, Event, FetchItem, Gauges};

use super::{Check, Truth, ensure};

/// One life of a decode worker, as its messages tell it.
#[derive(Default)]
pub(crate) struct DecodeWatch {
    calls: BTreeMap<CallId, Call>,
    /// Of the fetches that are open, the calls they are for.
    fetches: BTreeMap<CallId, CallId>,
    /// Calls that the event at hand must end, with the invariant and the reason.
    doomed: Vec<(CallId, &'static str, &'static str)>,
    /// Hand-offs whose calls the event at hand ended: to be released now.
    unreleased: Vec<Handoff>,
    fences: BTreeMap<RequestId, Attempt>,
    /// What routers have wanted elsewhere.
    asked: BTreeSet<(RequestId, Attempt)>,
}

struct Call {
    request: RequestId,
    attempt: Attempt,
    handoff: Option<Handoff>,
    deadline: Duration,
    admitted: bool,
    /// The index of the next token.
    next: usize,
    incoming: Incoming,
    /// It has said where its sequence is held.
    moved: bool,
    /// Tokens known: those that came with the call, prefill's, and those given.
    known: usize,
}

/// What has come of a hand-off.
#[derive(Default)]
struct Incoming {
    fetch: Option<CallId>,
    /// The KV of tokens `..n` has come.
    arrived: Option<usize>,
    /// Something came that the owner did not send like that.
    is_bad: bool,
    /// Everything came.
    has_ended: bool,
    /// The first token is the request's last.
    is_all: bool,
}

impl Call {
    /// Decoding is right: nothing was to come, or everything came as it was sent.
    fn is_proven(&self) -> bool {
        match &self.handoff {
            None => true,
            Some(handoff) => {
                let incoming = &self.incoming;
                incoming.has_ended && !incoming.is_bad && incoming.arrived == Some(handoff.tokens)
            }
        }
    }
}

impl DecodeWatch {
    /// An event is about to be given to the core. `is_bad` when the message is not what its sender sent.
    pub(crate) fn take(&mut self, event: &Event, is_bad: bool, truth: Truth<'_>) {
        self.doomed.clear();
        self.unreleased.clear();
        match event {
            Event::Decode { call, generation, handoff } => {
                let watched = Call {
                    request: generation.request.clone(),
                    attempt: generation.attempt,
                    handoff: handoff.clone(),
                    deadline: truth.now + generation.time_left,
                    admitted: false,
                    // With a hand-off the token of index `generated` is prefill's.
                    next: generation.generated + usize::from(handoff.is_some()),
                    incoming: Incoming::default(),
                    moved: false,
                    known: generation.tokens.len() + usize::from(handoff.is_some()),
                };
                self.fence(&generation.request, generation.attempt);
                self.calls.insert(*call, watched);
            }
            Event::Fence { request, attempt } => self.fence(request, *attempt),
            Event::Move { request, attempt } => drop(self.asked.insert((request.clone(), *attempt))),
            Event::Dropped { call } => self.end(*call),
            Event::Fetched { call, item } => self.fetched(*call, item, is_bad, truth),
            Event::FetchFailed { call, .. } => {
                if let Some(call) = self.fetches.remove(call) {
                    self.doomed.push((call, "I7", "its fetch failed"));
                }
            }
            _ => {}
        }
    }

    fn fence(&mut self, request: &RequestId, attempt: Attempt) {
        let fence = self.fences.entry(request.clone()).or_default();
        *fence = attempt.max(*fence);
        let stale = |call: &Call| call.request == *request && call.attempt < *fence;
        let stale =
            self.calls.iter().filter(|(_, call)| stale(call)).map(|(&id, _)| (id, "I1", "it is fenced"));
        self.doomed.extend(stale);
    }

    /// The call is over; what it had not taken over is to be released.
    fn end(&mut self, id: CallId) {
        let Some(call) = self.calls.remove(&id) else { return };
        if let Some(fetch) = call.incoming.fetch {
            self.fetches.remove(&fetch);
        }
        if let Some(handoff) = call.handoff.filter(|_| !call.incoming.has_ended) {
            self.unreleased.push(handoff);
        }
    }

    fn fetched(&mut self, fetch: CallId, item: &FetchItem, is_bad: bool, truth: Truth<'_>) {
        let Some(&id) = self.fetches.get(&fetch) else { return };
        let Some(call) = self.calls.get_mut(&id) else { return };
        let incoming = &mut call.incoming;
        incoming.is_bad |= is_bad;
        match item {
            FetchItem::Header { skip, .. } => {
                incoming.is_bad |= incoming.arrived.is_some();
                incoming.arrived = Some(*skip);
            }
            FetchItem::Block(block) => {
                let right = truth.request(&call.request).map(|it| it.oracle.slabs(block.first, block.tokens));
                let in_order = incoming.arrived == Some(block.first);
                incoming.is_bad |= !in_order || right.is_some_and(|right| right != block.slabs);
                incoming.arrived = Some(block.first + block.tokens);
            }
            FetchItem::End { first_token, .. } => {
                incoming.has_ended = true;
                if let Some(request) = truth.request(&call.request) {
                    let index = call.next - 1;
                    incoming.is_bad |= request.oracle.reference[index] != *first_token;
                    incoming.is_all = index + 1 == request.oracle.reference.len();
                }
                if call.is_proven() {
                    // What comes after the end is not looked at.
                    self.fetches.remove(&fetch);
                } else {
                    call.incoming.has_ended = false;
                    self.doomed.push((id, "I2", "what came is not what was sent"));
                }
            }
        }
    }

    /// What is here of that request up to that attempt, if anything is.
    pub(crate) fn remains(&self, request: &RequestId, attempt: Attempt) -> Option<String> {
        let call = self.calls.values().find(|it| it.request == *request && it.attempt <= attempt);
        call.map(|call| format!("a decode call of attempt {}", call.attempt.0))
    }

    /// The core has answered an event or a step.
    pub(crate) fn check(&mut self, actions: &[Action], truth: Truth<'_>, by: &str) -> Check {
        let mut released: Vec<&Handoff> = Vec::new();
        for action in actions {
            match action {
                Action::Decode { call, item } => self.item(*call, item, truth, by)?,
                Action::Close { call, .. } => self.end(*call),
                Action::StartFetch { call, handoff, .. } => {
                    let meant = self
                        .calls
                        .iter_mut()
                        .find(|(_, it)| it.handoff.as_ref() == Some(handoff) && it.incoming.fetch.is_none());
                    if let Some((&id, meant)) = meant {
                        meant.incoming.fetch = Some(*call);
                        self.fetches.insert(*call, id);
                    }
                }
                Action::Release { handoff } => released.push(handoff),
                _ => {}
            }
        }
        let open = self.calls.values().find(|call| call.moved);
        ensure(open.is_none(), "contract", || {
            format!("{by}: the call of a sequence that has moved away is still open")
        })?;
        for (call, invariant, why) in self.doomed.drain(..) {
            ensure(!self.calls.contains_key(&call), invariant, || {
                format!("{by}: decode call {} goes on though {why}", call.0)
            })?;
        }
        for handoff in self.unreleased.drain(..) {
            ensure(released.contains(&&handoff), "I4", || {
                format!("{by}: a call ended and left its hand-off to the lease: {handoff:?}")
            })?;
        }
        let late = self.calls.values().find(|call| call.deadline < truth.now);
        ensure(late.is_none(), "I6", || format!("{by}: a decode call is open past its deadline"))
    }

    fn item(&mut self, id: CallId, item: &DecodeItem, truth: Truth<'_>, by: &str) -> Check {
        let Some(call) = self.calls.get_mut(&id) else {
            return ensure(false, "contract", || format!("{by}: an item after the end of a call"));
        };
        ensure(!call.moved, "contract", || format!("{by}: an item after the sequence has moved away"))?;
        let token = match item {
            DecodeItem::Admitted { .. } => {
                call.admitted = true;
                return Ok(());
            }
            DecodeItem::Moved { handoff } => {
                call.moved = true;
                let is_asked = self.asked.contains(&(call.request.clone(), call.attempt));
                let is_own = handoff.request == call.request && handoff.attempt == call.attempt;
                let is_whole = call.is_proven() && handoff.tokens + 1 == call.known;
                return ensure(is_asked && is_own && is_whole, "contract", || {
                    format!("{by}: {} tokens known, asked: {is_asked}, given away: {handoff:?}", call.known)
                });
            }
            DecodeItem::Token(token) => token,
        };
        ensure(call.admitted, "contract", || format!("{by}: a token before admission"))?;
        ensure(call.is_proven(), "I2", || {
            format!("{by}: request {}: token {} before the proof", call.request, token.index)
        })?;
        ensure(token.index == call.next, "I2", || {
            format!("{by}: request {}: token {} expected, {} came", call.request, call.next, token.index)
        })?;
        call.next += 1;
        call.known += 1;
        truth.check_token(&call.request, token, by)
    }

    /// The engine works for open calls only.
    pub(crate) fn check_gauges(&self, gauges: &Gauges, by: &str) -> Check {
        let counts = gauges.sequences;
        // What is held of sequences that moved away is the owner's watch's.
        let in_engine = counts.waiting + counts.running + counts.preempted + counts.reserved;
        let open = self.calls.values().filter(|call| call.admitted && !call.incoming.is_all).count();
        let most = self.calls.values().filter(|call| call.admitted).count();
        ensure((open..=most).contains(&in_engine), "I5", || {
            format!("{by}: {open} to {most} open calls, but {in_engine} sequences in the engine")
        })
    }
}
