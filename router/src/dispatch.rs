//! One request, from its arrival to its last token, as a state machine without IO.
//!
//! A dispatch takes events in and gives actions out; the shell carries them out and adds nothing. The simulation
//! drives the very same code. The way of a request that is placed split:
//!
//! ```text
//!   Start ── place ──► StartPrefill
//!   PrefillIssued ───► StartDecode(hand-off)          decode fetches while prefill still computes
//!   PrefillDone ─────► Emit(first token)              and whatever decode had sent before it
//!   DecodeToken … ───► Emit(token) …
//!   the token with a finish reason ──► Finish(Ok)     with DropDecode when it was the first token
//! ```
//!
//! Placed fused, there is no prefill call, and decode gives every token.
//!
//! **Tokens** go out with contiguous indexes or not at all. A worker that leaves a gap, repeats a token or goes back
//! has broken the protocol, and its attempt has failed.
//!
//! **A failed attempt** is given up as a whole, whichever side failed and whatever the other was doing: both calls
//! are dropped, the workers that were called are fenced against it, and after a pause prompt and tokens so far are
//! replayed as the next attempt, through a new placement. A decode that fails while prefill still runs could, in
//! principle, keep the prefill and move only the decode; but then two decoders would hold one reference, and the
//! fence that tells them apart is the attempt. One rule for every order of failures is worth the recomputed prompt,
//! most of which the prefix cache has. Late events of an earlier attempt carry its number and are ignored.
//!
//! **A decode worker that drains** is asked to hand its sequence over ([`Action::Move`]) when another one could go on
//! with it. Its stream then ends with a hand-off ([`Event::DecodeMoved`]), and within the same attempt decode starts
//! anew elsewhere, as it did after prefill: with the tokens so far but the last, which follows the KV. A move that fails
//! in any way fails the attempt, and where there is no other worker nothing is asked: the sequence ends where it is.
//!
//! **Refusals** for want of room (OUT_OF_BLOCKS, QUEUE_FULL) are no failures of anybody: they do not count towards
//! `attempts_max`, but the request gives up with that reason when nothing but refusals came for `retry_window`.
//!
//! **Nothing to place on**: the request waits for the pools to change, for at most `retry_window`, and not at all
//! when waiting cannot help.
//!
//! **The end** comes exactly once, as [`Action::Finish`], and nothing follows it.

mod attempt;

use std::time::Duration;

use proto::{Attempt, Error, FinishReason, Generation, Handoff, Placed, Reason, RequestId, Role, Token};

use crate::planted::{self, Bug};
use crate::pools::{NamedBlocks, Placement, PlacementMode, Pools, Wish};
use attempt::{Failure, Progress, Running};

/// Time on the router's monotonic clock, since some fixed start.
pub type Now = Duration;

/// The knobs of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DispatchConfig {
    /// How to place.
    pub placement: PlacementMode,
    /// How long a request waits for a worker that can take it, and how long it puts up with refusals.
    pub retry_window: Duration,
    /// Failed attempts after which the request fails; refusals are not counted.
    pub attempts_max: u32,
    /// Pause before the first replay; doubles with every further one until decode makes a token.
    pub backoff_min: Duration,
    /// Longest pause.
    pub backoff_max: Duration,
    /// Tokens from decode that may wait for the first token.
    pub early_tokens_max: usize,
}

impl Default for DispatchConfig {
    fn default() -> Self {
        Self {
            placement: PlacementMode::Auto,
            retry_window: Duration::from_secs(20),
            attempts_max: 8,
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_secs(1),
            early_tokens_max: 256,
        }
    }
}

/// What happens to a request. Events of a call carry the attempt that the call was started for.
#[expect(missing_docs, reason = "the line of a variant says what its fields are")]
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request has arrived. Once, first.
    Start,
    /// Prefill has scheduled the first chunk.
    PrefillIssued { attempt: Attempt, handoff: Handoff },
    /// Prefill has sealed all KV and sampled a token.
    PrefillDone { attempt: Attempt, token: Token },
    /// The prefill call ended: with an error, or cleanly. May follow `PrefillDone`, and is then without effect.
    PrefillEnded { attempt: Attempt, error: Option<Error> },
    /// Decode has reserved blocks or queued the sequence: its first item.
    DecodeAdmitted { attempt: Attempt },
    /// Decode has made a token.
    DecodeToken { attempt: Attempt, token: Token },
    /// Decode stands still and holds the KV for another worker: the call's last item.
    DecodeMoved { attempt: Attempt, handoff: Handoff },
    /// The decode call ended: with an error, or cleanly. May follow the last token, and is then without effect.
    DecodeEnded { attempt: Attempt, error: Option<Error> },
    /// A worker joined, left, or changed its state.
    PoolsChanged,
    /// The client went away or cancelled.
    ClientGone,
    /// Time passed; see [`Action::WakeAt`].
    Tick,
}

impl Event {
    /// The attempt that the event belongs to; `None` when it is not about a call.
    fn attempt(&self) -> Option<Attempt> {
        match self {
            Self::PrefillIssued { attempt, .. }
            | Self::PrefillDone { attempt, .. }
            | Self::PrefillEnded { attempt, .. }
            | Self::DecodeAdmitted { attempt }
            | Self::DecodeToken { attempt, .. }
            | Self::DecodeMoved { attempt, .. }
            | Self::DecodeEnded { attempt, .. } => Some(*attempt),
            Self::Start | Self::PoolsChanged | Self::ClientGone | Self::Tick => None,
        }
    }
}

/// What a dispatch wants done. Actions are carried out in order.
#[expect(missing_docs, reason = "the line of a variant says what its fields are")]
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Open a prefill call at the worker. At most one is open at a time.
    StartPrefill { worker: String, generation: Generation },
    /// Open a decode call at the worker. At most one is open at a time; what an earlier one may still say is nobody's
    /// business.
    StartDecode { worker: String, generation: Generation, handoff: Option<Handoff> },
    /// Give up the open prefill call.
    DropPrefill,
    /// Give up the open decode call.
    DropDecode,
    /// Tell the worker to refuse attempts of the request below this one.
    Fence { worker: String, request: RequestId, attempt: Attempt },
    /// Ask the worker to hand over the sequence of the open decode call.
    Move { worker: String, request: RequestId, attempt: Attempt },
    /// A move is over: the first token has come from the new worker, or the attempt has failed first, perhaps without a
    /// new worker. Nothing to carry out: it is for logs and metrics.
    Moved { from: String, to: Option<String>, outcome: Result<(), Error> },
    /// An attempt has failed and another will be made. Nothing to carry out: it is for logs and metrics.
    Retry { failed: Attempt, cause: Error },
    /// Send to the client.
    Emit(Emission),
    /// The end of the client's stream. Exactly one, and the last action of all: whatever was open has been
    /// dropped before it.
    Finish(Result<(), Error>),
    /// Send a [`Event::Tick`] at this time; replaces every earlier wish.
    WakeAt(Now),
}

/// An item of the client's stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Emission {
    /// Where the request was placed, before anything of that attempt.
    Placed(Placed),
    /// A token.
    Token(Token),
}

/// Where a request is, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestState {
    /// Not placed: new, between two attempts, or waiting for workers.
    Queued,
    /// Placed, and neither a hand-off (split) nor a token (fused) has come.
    Prefilling,
    /// Decode was asked to take the hand-off and gives no tokens yet.
    Transferring,
    /// Decode gives tokens.
    Decoding,
    /// Over.
    Finished,
}

impl RequestState {
    /// Every state.
    pub const ALL: [Self; 5] =
        [Self::Queued, Self::Prefilling, Self::Transferring, Self::Decoding, Self::Finished];

    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Prefilling => "prefilling",
            Self::Transferring => "transferring",
            Self::Decoding => "decoding",
            Self::Finished => "finished",
        }
    }
}

/// What the dispatch is doing.
#[derive(Debug)]
enum Phase {
    /// Not started.
    New,
    /// No worker can take the request.
    Unplaceable { since: Now },
    /// Between two attempts.
    BackingOff { until: Now },
    /// An attempt runs.
    Running(Running),
    /// The end was said.
    Finished,
}

/// One request.
#[derive(Debug)]
pub struct Dispatch {
    config: DispatchConfig,
    /// What is left to do: prompt and tokens so far, under the number of the present attempt.
    generation: Generation,
    /// The names of the prompt's full blocks, where they are known.
    blocks: Vec<NamedBlocks>,
    /// Tokens that had been generated before this router took over.
    given: usize,
    /// The first attempt of this router.
    first: Attempt,
    /// Time for the whole request, from `Start`.
    total: Duration,
    /// When the request's total deadline passes.
    deadline: Now,
    phase: Phase,
    /// Failed attempts, without refusals.
    failures: u32,
    /// Replays since decode last made a token.
    streak: u32,
    /// The first of the refusals since decode last made a token.
    refused_since: Option<Now>,
    /// Workers that failed this request, the latest last, each once.
    failed: Vec<String>,
    /// What ended the last attempt.
    last_failure: Option<Error>,
    /// The last wake that was asked for.
    wake: Option<Now>,
}

impl Dispatch {
    /// A request that has not started; its first attempt is the one the generation names.
    pub fn new(generation: Generation, config: DispatchConfig) -> Self {
        Self {
            config,
            blocks: Vec::new(),
            given: generation.generated,
            first: generation.attempt,
            total: generation.time_left,
            generation,
            deadline: Now::MAX,
            phase: Phase::New,
            failures: 0,
            streak: 0,
            refused_since: None,
            failed: Vec::new(),
            last_failure: None,
            wake: None,
        }
    }

    /// So much of its time went by before its start.
    pub fn has_waited(&mut self, waited: Duration) {
        self.total = self.total.saturating_sub(waited);
        self.generation.time_left = self.total;
    }

    /// Names the full blocks of its tokens, so that it can be placed where their KV is.
    pub fn set_blocks(&mut self, blocks: Vec<NamedBlocks>) {
        self.blocks = blocks;
    }

    /// The names that it was given.
    pub fn blocks(&self) -> &[NamedBlocks] {
        &self.blocks
    }

    /// Takes an event in; appends what is to be done.
    pub fn on(&mut self, event: Event, pools: &Pools, now: Now, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Finished) {
            return;
        }
        if self.deadline != Now::MAX {
            self.generation.time_left = self.deadline.saturating_sub(now);
        }
        match event {
            Event::ClientGone => {
                let error = Error::new(Reason::Cancelled, "the client went away");
                self.end(Err(error), out);
            }
            Event::Start => self.begin(pools, now, out),
            // A deadline that has passed wins over whatever comes.
            _ if now >= self.deadline => {
                let message = format!("the deadline passed after {} tokens", self.generation.generated);
                self.end(Err(Error::new(Reason::Deadline, message)), out);
            }
            Event::PoolsChanged | Event::Tick => self.look_again(pools, now, out),
            event => self.on_call(event, pools, now, out),
        }
        self.ask_for_wake(out);
    }

    /// Where the request is.
    pub fn state(&self) -> RequestState {
        match &self.phase {
            Phase::New | Phase::Unplaceable { .. } | Phase::BackingOff { .. } => RequestState::Queued,
            Phase::Running(running) => running.state(),
            Phase::Finished => RequestState::Finished,
        }
    }

    /// When the request's total deadline passes; far away before `Start`.
    pub fn deadline(&self) -> Now {
        self.deadline
    }

    /// The sequence as it stands: prompt and tokens so far, under the number of the present attempt.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// Starts the clock and the first attempt.
    fn begin(&mut self, pools: &Pools, now: Now, out: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::New) {
            return;
        }
        self.deadline = now.saturating_add(self.total);
        self.generation.time_left = self.total;
        if self.generation.stop.max_tokens == 0 {
            return self.end(Err(Error::invalid("stop.max_tokens", "must be at least 1")), out);
        }
        if self.total.is_zero() {
            return self.end(Err(Error::new(Reason::Deadline, "the deadline passed before the start")), out);
        }
        self.place(pools, now, out);
    }

    /// Time passed or the pools changed: whoever waits for that goes on.
    fn look_again(&mut self, pools: &Pools, now: Now, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Unplaceable { .. } => self.place(pools, now, out),
            Phase::BackingOff { until } if now >= until => self.place(pools, now, out),
            Phase::Running(_) => self.consider_move(pools, out),
            _ => {}
        }
    }

    /// Starts an attempt where there is room for one, or waits.
    fn place(&mut self, pools: &Pools, now: Now, out: &mut Vec<Action>) {
        if finish_reason(&self.generation).is_some() {
            // Another router has given every token already, and died before it could say the end.
            return self.end(Ok(()), out);
        }
        match pools.place(&self.wish(now)) {
            Ok(placement) => self.start(placement, out),
            Err(unplaceable) => {
                let since = match self.phase {
                    Phase::Unplaceable { since } => since,
                    _ => now,
                };
                if unplaceable.settled || now >= since.saturating_add(self.config.retry_window) {
                    let error = self.with_last_failure(unplaceable.error);
                    return self.end(Err(error), out);
                }
                self.phase = Phase::Unplaceable { since };
            }
        }
    }

    /// What it wants of a place, now.
    fn wish(&self, now: Now) -> Wish<'_> {
        let wish = Wish::of(&self.generation, self.config.placement);
        Wish { failed: &self.failed, blocks: &self.blocks, now, ..wish }
    }

    fn start(&mut self, placement: Placement, out: &mut Vec<Action>) {
        out.push(Action::Emit(Emission::Placed(Placed {
            attempt: self.generation.attempt,
            prefill: placement.prefill.as_ref().map(|worker| worker.address.clone()),
            decode: placement.decode.address.clone(),
        })));
        self.phase = Phase::Running(Running::start(placement, &self.generation, out));
    }

    /// Asks for the sequence where it is on a worker that drains, if another could go on with it.
    fn consider_move(&mut self, pools: &Pools, out: &mut Vec<Action>) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Some(worker) = running.may_move().filter(|worker| pools.is_draining(worker)) else { return };
        if pools.has_other(Role::Decode, &self.generation.model, worker) {
            let Generation { request, attempt, .. } = &self.generation;
            out.push(Action::Move { worker: worker.to_owned(), request: request.clone(), attempt: *attempt });
            running.asked_to_move();
        }
    }

    /// Goes on elsewhere with a sequence that its decode worker has given away.
    fn move_on(&mut self, pools: &Pools, now: Now, out: &mut Vec<Action>) {
        let Phase::Running(running) = &self.phase else { return };
        let source = running.source().unwrap_or_default().to_owned();
        let placed = pools.place_other(&self.wish(now), &source);
        let Phase::Running(running) = &mut self.phase else { return };
        match placed {
            Some(worker) => running.go_on(worker, &self.generation, out),
            None => {
                let message = format!("no decode worker but {source} can go on");
                let failure = Failure::of_decode(Error::new(Reason::WorkerLost, message));
                self.attempt_failed(failure, now, out);
            }
        }
    }

    /// Takes in what a call of the present attempt says.
    fn on_call(&mut self, event: Event, pools: &Pools, now: Now, out: &mut Vec<Action>) {
        let Phase::Running(running) = &mut self.phase else { return };
        if event.attempt() != Some(self.generation.attempt) {
            return;
        }
        let is_admission = matches!(event, Event::DecodeAdmitted { .. });
        match running.on(event, &mut self.generation, self.config.early_tokens_max, out) {
            Ok(Progress::None) if is_admission => self.consider_move(pools, out),
            Ok(Progress::None) => {}
            Ok(Progress::Moved) => self.move_on(pools, now, out),
            Ok(Progress::Decoded) => {
                self.streak = 0;
                self.refused_since = None;
            }
            Ok(Progress::Finished) => self.end(Ok(()), out),
            Err(failure) => self.attempt_failed(failure, now, out),
        }
    }

    /// Gives the attempt up, and the request too if there is no point in another.
    fn attempt_failed(&mut self, failure: Failure, now: Now, out: &mut Vec<Action>) {
        // Nobody cancelled here, so a worker that says so has its own reasons, and another may not.
        if !failure.error.reason.is_retryable() && failure.error.reason != Reason::Cancelled {
            return self.end(Err(failure.error), out);
        }
        let next = self.generation.attempt.next();
        self.abandon(&failure, next, out);
        // The attempt is over whatever follows; its workers are relieved of it.
        self.phase = Phase::BackingOff { until: now.saturating_add(self.pause()) };
        self.streak += 1;
        if self.has_had_enough(&failure.error, now) {
            return self.end(Err(self.gave_up(failure.error)), out);
        }
        out.push(Action::Retry { failed: self.generation.attempt, cause: failure.error.clone() });
        self.last_failure = Some(failure.error);
        if planted::is(Bug::RetryLosesTokens) {
            self.forget_tokens();
        }
        if !planted::is(Bug::AttemptNotRaised) {
            self.generation.attempt = next;
        }
    }

    /// Drops the calls of the running attempt, fences its workers against it, and remembers who failed.
    fn abandon(&mut self, failure: &Failure, next: Attempt, out: &mut Vec<Action>) {
        let Phase::Running(running) = &mut self.phase else { return };
        out.extend(running.end_of_move(Err(failure.error.clone())));
        if !planted::is(Bug::CallsOutliveAttempt) {
            running.drop_calls(out);
        }
        for worker in running.called().filter(|_| !planted::is(Bug::NoFence)) {
            let request = self.generation.request.clone();
            out.push(Action::Fence { worker: worker.to_owned(), request, attempt: next });
        }
        for worker in running.blamed(failure) {
            self.failed.retain(|other| *other != worker);
            self.failed.push(worker);
        }
    }

    /// Counts a failure. True when it was one too many, or a refusal after too long.
    fn has_had_enough(&mut self, error: &Error, now: Now) -> bool {
        if matches!(error.reason, Reason::OutOfBlocks | Reason::QueueFull) {
            let since = *self.refused_since.get_or_insert(now);
            return now >= since.saturating_add(self.config.retry_window);
        }
        self.failures += 1;
        self.failures >= self.config.attempts_max
    }

    /// How long to wait before the next replay.
    fn pause(&self) -> Duration {
        let doubled = 2_u32.saturating_pow(self.streak);
        self.config.backoff_min.saturating_mul(doubled).min(self.config.backoff_max)
    }

    /// Only for the planted bug.
    fn forget_tokens(&mut self) {
        let lost = self.generation.generated - self.given;
        self.generation.tokens.truncate(self.generation.tokens.len() - lost);
        self.generation.generated = self.given;
    }

    fn gave_up(&self, error: Error) -> Error {
        let attempts = self.generation.attempt.0.saturating_sub(self.first.0).saturating_add(1);
        Error::new(error.reason, format!("{}; gave up at attempt {attempts}", error.message))
    }

    fn with_last_failure(&self, error: Error) -> Error {
        match &self.last_failure {
            Some(last) => {
                Error::new(error.reason, format!("{}; the last attempt failed: {last}", error.message))
            }
            None => error,
        }
    }

    /// The only place that says the end.
    fn end(&mut self, result: Result<(), Error>, out: &mut Vec<Action>) {
        if let Phase::Running(running) = &mut self.phase {
            let owner = running.owner_of_untaken().map(str::to_owned);
            running.drop_calls(out);
            // A decode call that was dropped on its way never arrives, and a prefill call that is dropped while its
            // last item is on the way is no news to its worker. Then nobody but us can end the hold.
            if let Some(worker) = owner.filter(|_| !planted::is(Bug::EndLeavesHandoff)) {
                let (request, attempt) = (self.generation.request.clone(), self.generation.attempt.next());
                out.push(Action::Fence { worker, request, attempt });
            }
        }
        self.phase = Phase::Finished;
        out.push(Action::Finish(result.clone()));
        if planted::is(Bug::FinishTwice) {
            out.push(Action::Finish(result));
        }
    }

    /// Asks for a tick when the present phase needs one, unless that was asked for already.
    fn ask_for_wake(&mut self, out: &mut Vec<Action>) {
        let wanted = match &self.phase {
            Phase::New | Phase::Finished => return,
            Phase::Running(_) => self.deadline,
            Phase::BackingOff { until } => self.deadline.min(*until),
            Phase::Unplaceable { since } => self.deadline.min(since.saturating_add(self.config.retry_window)),
        };
        if self.wake != Some(wanted) {
            self.wake = Some(wanted);
            out.push(Action::WakeAt(wanted));
        }
    }
}

/// Why there is nothing left to generate, when the tokens so far satisfy the stop conditions.
fn finish_reason(generation: &Generation) -> Option<FinishReason> {
    let Generation { tokens, generated, stop, .. } = generation;
    let last = tokens.last().filter(|_| *generated > 0);
    if last.is_some_and(|last| stop.eos_ids.contains(last)) {
        Some(FinishReason::Eos)
    } else if last.is_some_and(|last| stop.stop_token_ids.contains(last)) {
        Some(FinishReason::StopToken)
    } else if *generated >= stop.max_tokens {
        Some(FinishReason::Length)
    } else {
        None
    }
}
