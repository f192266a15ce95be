//! A hand-off on its way in: the fetch, the renewals that keep it alive, and the rules of what may arrive when.

use std::time::Duration;

use engine::model::Model;
use engine::{Engine, SequenceId};
use proto::{Error, Handoff, Reason};
use worker::core::{CallId, FetchItem, Now};
use worker::dump::FetchDump;

/// A fetch under way.
#[derive(Debug)]
pub(super) struct Incoming {
    /// The call that this worker opened at the owner.
    pub(super) fetch: CallId,
    pub(super) handoff: Handoff,
    /// When the next renewal is due.
    pub(super) renew_at: Now,
    /// Tokens at the front whose KV is here already.
    skip: usize,
    /// After the header: the KV of tokens `..n` is here.
    arrived: Option<usize>,
}

/// What an item made of the hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// More must come.
    Part,
    /// Everything came, and the proof holds: the sequence decodes.
    Activated,
    /// Everything came, and the token that prefill sampled ends the request: there is nothing to decode.
    Ended,
}

impl Incoming {
    pub(super) fn new(fetch: CallId, handoff: Handoff, skip: usize, renew_at: Now) -> Self {
        Self { fetch, handoff, renew_at, skip, arrived: None }
    }

    /// True once at `now` a renewal is due; the next one is due `every` later.
    pub(super) fn is_renewal_due(&mut self, now: Now, every: Duration) -> bool {
        let is_due = self.renew_at <= now;
        if is_due {
            self.renew_at = now.saturating_add(every);
        }
        is_due
    }

    /// The fetch as an operator sees it.
    pub(super) fn dump(&self) -> FetchDump {
        FetchDump {
            owner: self.handoff.owner.clone(),
            epoch: self.handoff.epoch.to_string(),
            tokens_here: self.arrived.unwrap_or(self.skip),
            tokens: self.handoff.tokens,
        }
    }

    /// Takes the next item of the fetch.
    ///
    /// # Errors
    /// TRUNCATED when a block was left out; LAYOUT_MISMATCH for KV of another shape; INTERNAL for items in an order
    /// that the protocol does not know; and what the engine's `import` and `activate` answer.
    pub(super) fn take<M: Model>(
        &mut self,
        item: FetchItem,
        engine: &mut Engine<M>,
        sequence: SequenceId,
    ) -> Result<Arrival, Error> {
        match (item, self.arrived) {
            (FetchItem::Header { skip, tokens, layout }, None) => {
                self.check_header(skip, tokens)?;
                if let Some(message) = engine.layout().mismatch(&layout) {
                    return Err(Error::new(Reason::LayoutMismatch, message));
                }
                self.arrived = Some(skip);
                Ok(Arrival::Part)
            }
            (FetchItem::Header { .. }, Some(_)) => Err(broken("one header expected, a second came")),
            (_, None) => Err(broken("a header expected first, another item came")),
            (FetchItem::Block(block), Some(arrived)) => {
                if block.first > arrived {
                    let message = format!("kv from token {arrived} on expected, from {} came", block.first);
                    return Err(Error::new(Reason::Truncated, message));
                }
                if block.first < arrived {
                    return Err(broken(format_args!(
                        "kv from token {arrived} on expected, from {} came",
                        block.first
                    )));
                }
                engine.import(sequence, &block).map_err(not_the_requests)?;
                self.arrived = Some(arrived + block.tokens);
                Ok(Arrival::Part)
            }
            (FetchItem::End { first_token, digest }, Some(arrived)) => {
                if arrived != self.handoff.tokens {
                    let message = format!("kv of {} tokens expected, of {arrived} came", self.handoff.tokens);
                    return Err(Error::new(Reason::Truncated, message));
                }
                let finish = engine.activate(sequence, self.handoff.id, first_token, digest);
                let finish = finish.map_err(not_the_requests)?;
                Ok(if finish.is_some() { Arrival::Ended } else { Arrival::Activated })
            }
        }
    }

    fn check_header(&self, skip: usize, tokens: usize) -> Result<(), Error> {
        if tokens != self.handoff.tokens {
            return Err(broken(format_args!("{} tokens expected, {tokens} announced", self.handoff.tokens)));
        }
        if skip > self.skip {
            let message = format!("kv from token {} on expected, from {skip} announced", self.skip);
            return Err(Error::new(Reason::Truncated, message));
        }
        Ok(())
    }
}

/// A stream that its sender got wrong.
fn broken(message: impl std::fmt::Display) -> Error {
    Error::new(Reason::Internal, format!("fetch: {message}"))
}

/// The request was found valid when it came, so what is invalid now is the owner's doing.
fn not_the_requests(error: Error) -> Error {
    if error.reason == Reason::InvalidArgument { broken(error.message) } else { error }
}
