//! An owner's half of the hand-off: the references that it gave out, and the fetches that read what they stand for.
//!
//! Both roles own KV: prefill workers from the first chunk on, decode workers once a sequence is moved away. What is
//! computed, and when its time is over, is the cores' business; here is who may read, and that nobody does any more when
//! a hold ends (invariant I3).

use std::collections::BTreeMap;
use std::time::Duration;

use engine::model::Model;
use engine::{Engine, SequenceId};
use node::debug::Excerpt;
use proto::{Error, Handoff, KvLayout, Reason, TokenId};

use crate::core::{Action, CallId, Now};
use crate::core_config::CoreConfig;
use crate::dump::HoldDump;
use crate::fences::Fences;
use crate::holds::{Holds, Issue};
use crate::planted::engine_bugs;
use crate::sending::{Sending, Source};

/// See the module.
#[derive(Debug)]
pub struct Owner {
    holds: Holds,
    /// The fetches that are open.
    sendings: BTreeMap<CallId, Sending>,
    /// Tokens per block of the engine's own layout.
    block_tokens: usize,
}

impl Owner {
    /// Holds nothing, for a worker with that KV layout.
    pub fn new(config: &CoreConfig, layout: KvLayout) -> Self {
        Self {
            holds: Holds::new(config, layout),
            sendings: BTreeMap::new(),
            block_tokens: layout.block_tokens,
        }
    }

    /// See [`Holds::issue`].
    pub fn issue(&mut self, issue: Issue) -> Handoff {
        self.holds.issue(issue)
    }

    /// See [`Holds::stream_closed`].
    pub fn stream_closed(&mut self, sequence: SequenceId, now: Now) {
        self.holds.stream_closed(sequence, now);
    }

    /// See [`Holds::renew`].
    ///
    /// # Errors
    /// As [`Holds::authorise`].
    pub fn renew(&mut self, handoff: &Handoff, fences: &Fences, now: Now) -> Result<Duration, Error> {
        self.holds.renew(handoff, fences, now)
    }

    /// See [`Holds::released`].
    pub fn released(&self, handoff: &Handoff) -> Option<SequenceId> {
        self.holds.released(handoff)
    }

    /// See [`Holds::expired`].
    pub fn expired(&self, now: Now) -> Vec<SequenceId> {
        self.holds.expired(now)
    }

    /// See [`Holds::next_expiry`].
    pub fn next_expiry(&self) -> Option<Now> {
        self.holds.next_expiry()
    }

    /// See [`Holds::lease_runs`].
    pub fn lease_runs(&self, sequence: SequenceId, now: Now) -> bool {
        self.holds.lease_runs(sequence, now)
    }

    /// See [`Holds::dump`].
    pub fn dump(&self, now: Now) -> Excerpt<HoldDump> {
        self.holds.dump(now)
    }

    /// Hand-offs under lease.
    pub fn leases(&self) -> usize {
        self.holds.len()
    }

    /// True while a fetch reads.
    pub fn is_sending(&self) -> bool {
        !self.sendings.is_empty()
    }

    /// A peer fetches what the reference stands for, of which `source` tells. A later fetch replaces an earlier one.
    ///
    /// # Errors
    /// As [`Holds::authorise`].
    pub fn start_fetch(
        &mut self,
        (call, skip): (CallId, usize),
        handoff: &Handoff,
        (fences, now): (&Fences, Now),
        source: impl FnOnce(SequenceId) -> Source,
        out: &mut Vec<Action>,
    ) -> Result<(), Error> {
        let sequence = self.holds.authorise(handoff, fences)?;
        if let Some(earlier) = self.holds.attach(sequence, call, now) {
            self.sendings.remove(&earlier);
            let error = Error::new(Reason::Truncated, "replaced by a later fetch of the same hand-off");
            out.push(Action::Close { call: earlier, error: Some(error) });
        }
        self.sendings.insert(call, Sending::new(call, source(sequence), skip, self.block_tokens));
        Ok(())
    }

    /// The peer of a fetch can take more items: sends what there is. Gives the sequence if that was the rest of it.
    pub fn add_credit<M: Model>(
        &mut self,
        fetch: CallId,
        items: usize,
        engine: &Engine<M>,
        out: &mut Vec<Action>,
    ) -> Option<SequenceId> {
        self.sendings.get_mut(&fetch)?.add_credit(items);
        self.pump(fetch, engine, out)
    }

    /// More of a sequence is sealed: whoever fetches it gets it.
    pub fn sealed<M: Model>(&mut self, sequence: SequenceId, engine: &Engine<M>, out: &mut Vec<Action>) {
        if let Some(fetch) = self.holds.transfer(sequence) {
            self.pump(fetch, engine, out);
        }
    }

    /// All of a sequence is sealed and the token after it known.
    pub fn complete<M: Model>(
        &mut self,
        sequence: SequenceId,
        first_token: TokenId,
        engine: &Engine<M>,
        out: &mut Vec<Action>,
    ) {
        if let Some(fetch) = self.holds.transfer(sequence) {
            if let Some(sending) = self.sendings.get_mut(&fetch) {
                sending.complete(first_token);
            }
            self.pump(fetch, engine, out);
        }
    }

    /// Sends what a fetch can get now, and ends it with its last item: then it gives the sequence.
    fn pump<M: Model>(
        &mut self,
        fetch: CallId,
        engine: &Engine<M>,
        out: &mut Vec<Action>,
    ) -> Option<SequenceId> {
        let sending = self.sendings.get_mut(&fetch)?;
        let sequence = sending.sequence();
        let error = match sending.pump(engine, out) {
            Ok(false) => return None,
            Ok(true) => None,
            Err(error) => Some(error),
        };
        let is_all = error.is_none();
        self.sendings.remove(&fetch);
        self.holds.detach(sequence, fetch);
        out.push(Action::Close { call: fetch, error });
        is_all.then_some(sequence)
    }

    /// The peer of a call went away. A hold stays: the peer may come back, and if it does not, the lease runs out.
    pub fn dropped(&mut self, call: CallId) {
        if let Some(sending) = self.sendings.remove(&call) {
            self.holds.detach(sending.sequence(), call);
        }
    }

    /// Ends the hold of a sequence, if it has one, and the fetch that reads it. After this, and not before, the blocks
    /// may be freed.
    ///
    /// That order proves invariant I3, no reuse before quiescence: blocks leave the engine only in `export`, as a copy
    /// made on this very thread, and only for a fetch in `sendings`. Once the fetch is out of that table nothing reads
    /// the blocks; what the shell still has to write is copies, and the error that follows them tells the peer that
    /// they are worth nothing.
    pub fn end(&mut self, sequence: SequenceId, error: &Error, out: &mut Vec<Action>) {
        if let Some(fetch) = self.holds.end(sequence, error.reason)
            && !engine_bugs::is(engine_bugs::Bug::FreeBeforeQuiescence)
        {
            self.sendings.remove(&fetch);
            out.push(Action::Close { call: fetch, error: Some(error.clone()) });
        }
    }
}
