//! The watch over one request at a router.

use proto::{Attempt, Generation};
use router::dispatch::{Action, Emission};

use super::{Check, Truth, ensure};

/// A dispatch, as its actions tell it.
pub(crate) struct DispatchWatch {
    next_index: usize,
    attempt: Option<Attempt>,
    /// Workers that were called in the present attempt.
    called: Vec<String>,
    prefill_open: bool,
    decode_open: bool,
    pub(crate) finished: bool,
}

impl DispatchWatch {
    pub(crate) fn new(generation: &Generation) -> Self {
        Self {
            next_index: generation.generated,
            attempt: None,
            called: Vec::new(),
            prefill_open: false,
            decode_open: false,
            finished: false,
        }
    }

    /// A call has ended by itself.
    pub(crate) fn prefill_ended(&mut self) {
        self.prefill_open = false;
    }

    /// A call has ended by itself.
    pub(crate) fn decode_ended(&mut self) {
        self.decode_open = false;
    }

    /// The dispatch has answered an event.
    pub(crate) fn check(&mut self, actions: &[Action], truth: Truth<'_>) -> Check {
        let mut unfenced: Vec<(String, Attempt)> = Vec::new();
        for action in actions {
            ensure(!self.finished, "I8", || format!("{action:?} after the end"))?;
            match action {
                Action::StartPrefill { worker, generation } => {
                    ensure(!self.prefill_open, "I5", || "a second prefill call while one is open".into())?;
                    self.prefill_open = true;
                    self.called.push(worker.clone());
                    truth.check_generation(generation)?;
                }
                Action::StartDecode { worker, generation, handoff } => {
                    let fits = handoff.as_ref().is_none_or(|it| it.tokens == generation.tokens.len());
                    ensure(fits, "contract", || {
                        format!("{} tokens asked for, with {handoff:?}", generation.tokens.len())
                    })?;
                    ensure(!self.decode_open, "I5", || "a second decode call while one is open".into())?;
                    self.decode_open = true;
                    self.called.push(worker.clone());
                    truth.check_generation(generation)?;
                }
                Action::DropPrefill => self.prefill_open = false,
                Action::DropDecode => self.decode_open = false,
                Action::Fence { worker, attempt, .. } => unfenced.push((worker.clone(), *attempt)),
                Action::Retry { failed, .. } => {
                    for worker in self.called.drain(..) {
                        let is_fenced = unfenced.iter().any(|(other, at)| *other == worker && at > failed);
                        ensure(is_fenced, "I1", || {
                            format!("{worker} is not fenced against attempt {failed:?}")
                        })?;
                    }
                }
                Action::Emit(Emission::Placed(placed)) => {
                    let is_later = self.attempt.is_none_or(|earlier| earlier < placed.attempt);
                    ensure(is_later, "I1", || {
                        format!("{:?} placed after {:?}", placed.attempt, self.attempt)
                    })?;
                    self.attempt = Some(placed.attempt);
                }
                Action::Emit(Emission::Token(token)) => {
                    ensure(token.index == self.next_index, "I8", || {
                        format!("token {} to the client, {} expected", token.index, self.next_index)
                    })?;
                    self.next_index += 1;
                }
                Action::Finish(_) => self.finished = true,
                Action::Move { worker, attempt, .. } => {
                    let is_there = self.decode_open && self.called.last() == Some(worker);
                    ensure(is_there && Some(*attempt) == self.attempt, "contract", || {
                        format!("{worker} is asked for a sequence that it does not have")
                    })?;
                }
                Action::Moved { .. } | Action::WakeAt(_) => {}
            }
        }
        let is_clean = !self.finished || (!self.prefill_open && !self.decode_open);
        ensure(is_clean, "I5", || "the end leaves a call open".into())
    }
}
