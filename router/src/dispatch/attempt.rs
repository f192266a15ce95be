//! One attempt of a request that runs: its two calls, and the order of its tokens.

use std::collections::VecDeque;

use proto::{Error, Generation, Handoff, Reason, Token};

use super::{Action, Emission, Event, RequestState, finish_reason};
use crate::planted::{self, Bug};
use crate::pools::{PlacedWorker, Placement};

/// A call to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    /// Not made, or not yet.
    Unmade,
    /// Items may come.
    Open,
    /// Its last item has come, or it was dropped.
    Over,
}

/// Which of the two calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Prefill,
    Decode,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// What ended an attempt before its time.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) side: Side,
    pub(super) error: Error,
}

impl Failure {
    /// Decode cannot go on.
    pub(super) fn of_decode(error: Error) -> Self {
        Self { side: Side::Decode, error }
    }
}

/// What an event of a call has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Nothing that the client sees, or only the first token.
    None,
    /// A token that decode made went out.
    Decoded,
    /// Decode has given the sequence away, and all tokens that it made are out.
    Moved,
    /// The last token went out.
    Finished,
}

/// An attempt that runs.
#[derive(Debug)]
pub(super) struct Running {
    placement: Placement,
    prefill: Call,
    decode: Call,
    /// Decode has said its first item.
    admitted: bool,
    /// Tokens go out as decode makes them; false until prefill has given the first one.
    first_is_out: bool,
    /// Decode has given a token.
    decoding: bool,
    /// Tokens of decode that wait for the first one, in order.
    early: VecDeque<Token>,
    /// The decode worker was asked to give the sequence away, and may have done so.
    asked_to_move: bool,
    /// The decode workers that gave it away, the latest last.
    left: Vec<String>,
    /// What the latest of them holds, until another was asked to go on.
    moved: Option<Box<Handoff>>,
    /// The other one has not given a token yet.
    is_moving: bool,
}

impl Running {
    /// Makes the first call of the attempt.
    pub(super) fn start(placement: Placement, generation: &Generation, out: &mut Vec<Action>) -> Self {
        let mut running = Self {
            prefill: Call::Unmade,
            decode: Call::Unmade,
            admitted: false,
            first_is_out: placement.prefill.is_none(),
            decoding: false,
            early: VecDeque::new(),
            asked_to_move: false,
            left: Vec::new(),
            moved: None,
            is_moving: false,
            placement,
        };
        match &running.placement.prefill {
            Some(worker) => {
                let worker = worker.address.clone();
                out.push(Action::StartPrefill { worker, generation: generation.clone() });
                running.prefill = Call::Open;
            }
            None => running.start_decode(generation, None, out),
        }
        running
    }

    /// Takes in an event of one of the calls. `so_far` grows by each token that goes out.
    pub(super) fn on(
        &mut self,
        event: Event,
        so_far: &mut Generation,
        early_tokens_max: usize,
        out: &mut Vec<Action>,
    ) -> Result<Progress, Failure> {
        let side = match &event {
            Event::PrefillIssued { .. } | Event::PrefillDone { .. } | Event::PrefillEnded { .. } => {
                Side::Prefill
            }
            _ => Side::Decode,
        };
        let call = match side {
            Side::Prefill => self.prefill,
            Side::Decode => self.decode,
        };
        if call != Call::Open {
            // After a call's last item only its end can come, and that says nothing new.
            return Ok(Progress::None);
        }
        let result = match event {
            Event::PrefillIssued { handoff, .. } => self.issued(handoff, so_far, out),
            Event::PrefillDone { token, .. } => self.first_token(token, so_far, out),
            Event::PrefillEnded { error, .. } => {
                self.prefill = Call::Over;
                Err(error.unwrap_or_else(|| ended_early(side, "its token")))
            }
            Event::DecodeAdmitted { .. } if self.admitted => Err(broken(side, "admitted the sequence twice")),
            Event::DecodeAdmitted { .. } => {
                self.admitted = true;
                Ok(Progress::None)
            }
            Event::DecodeToken { token, .. } => self.token(token, so_far, early_tokens_max, out),
            Event::DecodeMoved { handoff, .. } => self.given_away(handoff, so_far),
            Event::DecodeEnded { error, .. } => {
                self.decode = Call::Over;
                Err(error.unwrap_or_else(|| ended_early(side, "a token with a finish reason")))
            }
            Event::Start | Event::PoolsChanged | Event::ClientGone | Event::Tick => Ok(Progress::None),
        };
        result.map_err(|error| Failure { side, error })
    }

    /// The hand-off exists: decode may fetch from now on.
    fn issued(
        &mut self,
        handoff: Handoff,
        so_far: &Generation,
        out: &mut Vec<Action>,
    ) -> Result<Progress, Error> {
        if self.decode != Call::Unmade {
            return Err(broken(Side::Prefill, "issued a second hand-off"));
        }
        if handoff.request != so_far.request || handoff.attempt != so_far.attempt {
            let message = format!("issued a hand-off of {} attempt {}", handoff.request, handoff.attempt.0);
            return Err(broken(Side::Prefill, &message));
        }
        if handoff.tokens != so_far.tokens.len() {
            let (got, expected) = (handoff.tokens, so_far.tokens.len());
            let message = format!("issued a hand-off of {got} tokens for a sequence of {expected}");
            return Err(broken(Side::Prefill, &message));
        }
        self.start_decode(so_far, Some(handoff), out);
        Ok(Progress::None)
    }

    fn start_decode(&mut self, generation: &Generation, handoff: Option<Handoff>, out: &mut Vec<Action>) {
        let worker = self.placement.decode.address.clone();
        out.push(Action::StartDecode { worker, generation: generation.clone(), handoff });
        self.decode = Call::Open;
    }

    /// Prefill is done: its token goes out, and those of decode that waited for it.
    fn first_token(
        &mut self,
        token: Token,
        so_far: &mut Generation,
        out: &mut Vec<Action>,
    ) -> Result<Progress, Error> {
        if self.decode == Call::Unmade {
            return Err(broken(Side::Prefill, "gave a token before a hand-off"));
        }
        check_index(Side::Prefill, &token, so_far.generated)?;
        self.prefill = Call::Over;
        self.first_is_out = true;
        if emit(token, so_far, out) == Progress::Finished {
            return Ok(Progress::Finished);
        }
        let mut progress = Progress::None;
        while let Some(token) = self.early.pop_front().filter(|_| progress != Progress::Finished) {
            progress = emit(token, so_far, out);
        }
        if progress != Progress::Finished && self.moved.is_some() {
            return Ok(Progress::Moved);
        }
        Ok(progress)
    }

    /// Decode has stopped and holds the KV of all tokens but the last.
    fn given_away(&mut self, handoff: Handoff, so_far: &Generation) -> Result<Progress, Error> {
        self.decode = Call::Over;
        if !self.admitted || handoff.request != so_far.request || handoff.attempt != so_far.attempt {
            let message = format!("gave away {} attempt {}", handoff.request, handoff.attempt.0);
            return Err(broken(Side::Decode, &message));
        }
        let waiting = if self.first_is_out { 0 } else { 1 + self.early.len() };
        let known = so_far.tokens.len() + waiting;
        if so_far.generated + waiting == 0 || handoff.tokens + 1 != known {
            let message = format!("gave away {} tokens of a sequence of {known}", handoff.tokens);
            return Err(broken(Side::Decode, &message));
        }
        self.left.push(self.placement.decode.address.clone());
        self.moved = Some(Box::new(handoff));
        (self.admitted, self.decoding, self.asked_to_move, self.is_moving) = (false, false, false, true);
        Ok(if self.first_is_out { Progress::Moved } else { Progress::None })
    }

    /// Starts decode at another worker, from what the last one holds.
    pub(super) fn go_on(&mut self, worker: PlacedWorker, so_far: &Generation, out: &mut Vec<Action>) {
        let Some(handoff) = self.moved.take() else { return };
        self.placement.decode = worker;
        let mut generation = so_far.clone();
        if !planted::is(Bug::MoveKeepsLastToken) {
            generation.tokens.pop();
            generation.generated -= 1;
        }
        self.start_decode(&generation, Some(*handoff), out);
    }

    /// The decode worker, if it may be asked to give the sequence away: it has it, and was not asked before.
    pub(super) fn may_move(&self) -> Option<&str> {
        let may = self.decode == Call::Open && self.admitted && !self.asked_to_move;
        may.then_some(self.placement.decode.address.as_str())
    }

    pub(super) fn asked_to_move(&mut self) {
        self.asked_to_move = true;
    }

    /// The decode worker that gave the sequence away last.
    pub(super) fn source(&self) -> Option<&str> {
        self.left.last().map(String::as_str)
    }

    /// What is to be said when a move has come to that end; nothing when none is under way.
    pub(super) fn end_of_move(&mut self, outcome: Result<(), Error>) -> Option<Action> {
        if !std::mem::take(&mut self.is_moving) {
            return None;
        }
        let from = self.source()?.to_owned();
        let to = Some(self.placement.decode.address.clone()).filter(|to| *to != from);
        Some(Action::Moved { from, to, outcome })
    }

    fn token(
        &mut self,
        token: Token,
        so_far: &mut Generation,
        early_tokens_max: usize,
        out: &mut Vec<Action>,
    ) -> Result<Progress, Error> {
        if !self.admitted {
            return Err(broken(Side::Decode, "gave a token before it admitted the sequence"));
        }
        let waiting = if self.first_is_out { 0 } else { 1 + self.early.len() };
        check_index(Side::Decode, &token, so_far.generated + waiting)?;
        if !self.first_is_out && self.early.len() == early_tokens_max {
            let message = format!("is more than {early_tokens_max} tokens ahead of prefill");
            return Err(broken(Side::Decode, &message));
        }
        self.decoding = true;
        out.extend(self.end_of_move(Ok(())));
        if token.finish.is_some() {
            self.decode = Call::Over;
        }
        if self.first_is_out || planted::is(Bug::FirstTokenNotAwaited) {
            return Ok(emit(token, so_far, out));
        }
        self.early.push_back(token);
        Ok(Progress::None)
    }

    /// Gives up whatever is open.
    pub(super) fn drop_calls(&mut self, out: &mut Vec<Action>) {
        if self.prefill == Call::Open {
            self.prefill = Call::Over;
            out.push(Action::DropPrefill);
        }
        if self.decode == Call::Open {
            self.decode = Call::Over;
            out.push(Action::DropDecode);
        }
    }

    /// The worker that has or may have issued a hand-off that decode is not known to have taken. Asked before the calls
    /// are dropped: while the call of an owner is open, a hand-off may be on its way here.
    pub(super) fn owner_of_untaken(&self) -> Option<&str> {
        if self.asked_to_move && self.decode == Call::Open && !planted::is(Bug::EndForgetsMove) {
            return Some(&self.placement.decode.address);
        }
        if self.admitted {
            return None;
        }
        let may_be_issued = self.prefill == Call::Open || self.decode != Call::Unmade;
        let prefill = self.placement.prefill.as_ref().filter(|_| may_be_issued);
        self.source().or(prefill.map(|worker| worker.address.as_str()))
    }

    /// The workers that know of this attempt.
    pub(super) fn called(&self) -> impl Iterator<Item = &str> {
        let prefill = self.placement.prefill.as_ref().filter(|_| self.prefill != Call::Unmade);
        let decode = Some(&self.placement.decode).filter(|_| self.decode != Call::Unmade);
        let called = prefill.into_iter().chain(decode).map(|worker| worker.address.as_str());
        // The one that a move began at, while nobody has gone on, is the present one still.
        let current = self.placement.decode.address.as_str();
        let left = self.left.iter().map(String::as_str);
        called.chain(left.filter(move |left| *left != current && !planted::is(Bug::MoveLeavesSource)))
    }

    /// The workers that the next attempt should rather not use: the one that failed; and when decode failed at
    /// more than admission, the prefill worker as well, because a hand-off has two ends.
    pub(super) fn blamed(&self, failure: &Failure) -> Vec<String> {
        let refused = matches!(failure.error.reason, Reason::OutOfBlocks | Reason::QueueFull);
        let prefill = failure.side == Side::Prefill || !refused;
        let decode = failure.side == Side::Decode;
        // Once the sequence has moved, the other end is the decode worker that it came from.
        let other = self.source().or(self.placement.prefill.as_ref().map(|worker| worker.address.as_str()));
        let other = other.filter(|_| prefill);
        let decode = Some(self.placement.decode.address.as_str()).filter(|_| decode);
        other.into_iter().chain(decode).map(str::to_owned).collect()
    }

    pub(super) fn state(&self) -> RequestState {
        let fused = self.placement.prefill.is_none();
        match self.decode {
            _ if self.decoding && self.first_is_out => RequestState::Decoding,
            Call::Unmade => RequestState::Prefilling,
            _ if fused && self.left.is_empty() => RequestState::Prefilling,
            _ => RequestState::Transferring,
        }
    }
}

/// Sends a token to the client and counts it as generated. A last token is marked as one even where the worker has
/// not said so: the client gets no more than it asked for, and every stream its end.
fn emit(mut token: Token, so_far: &mut Generation, out: &mut Vec<Action>) -> Progress {
    so_far.tokens.push(token.id);
    so_far.generated += 1;
    token.finish = token.finish.or_else(|| finish_reason(so_far));
    let finished = token.finish.is_some();
    out.push(Action::Emit(Emission::Token(token)));
    if finished { Progress::Finished } else { Progress::Decoded }
}

/// A token must be the one that follows: no gap, no repetition, no way back.
fn check_index(side: Side, token: &Token, expected: usize) -> Result<(), Error> {
    if token.index == expected || planted::is(Bug::EmitUnorderedTokens) {
        return Ok(());
    }
    Err(broken(side, &format!("gave token {} where token {expected} follows", token.index)))
}

/// A worker that does not keep to the protocol.
fn broken(side: Side, what: &str) -> Error {
    Error::new(Reason::Internal, format!("the {} worker {what}", side.name()))
}

/// A call that ended cleanly without the item that has to be its last.
fn ended_early(side: Side, missing: &str) -> Error {
    Error::new(Reason::Truncated, format!("the {} stream ended without {missing}", side.name()))
}
