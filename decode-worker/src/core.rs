//! The decode worker without its shell: held KV in, tokens out.
//!
//! A job is one decode call. With a hand-off it first fetches the KV that a prefill worker holds; without one it
//! computes everything here (the fused placement):
//!
//! ```text
//! fetching ── end, proof holds ──► running ── last token ──► gone
//!     │                               └────── asked to move ──► held ── release, expiry ──► gone
//!     └────── end, its token is the request's last ──► ended ── dropped ──► gone
//! ```
//!
//! Each way out of each phase is [`DecodeCore::end`]; out of *fetching* it gives up the fetch and releases the hold
//! at its owner. A sequence that moves away is no job any more: what is held of it is in `outgoing`.

mod dump;
mod incoming;
mod outgoing;

use std::collections::BTreeMap;
use std::time::Duration;

use engine::model::{Interrupt, Model};
use engine::{Engine, EngineEvent, SequenceId, SequenceSpec, StepReport, Until};
use proto::watch::BlockChange;
use proto::{
    Attempt, BlockHash, Error, FinishReason, Generation, Handoff, PromptReport, Reason, RequestId, Token,
    TokenId, TokenLogprob,
};
use worker::core::{Action, CallId, Core, DecodeItem, Event, FetchItem, Gauges, Now, StepSize};
use worker::core_config::CoreConfig;
use worker::dump::CoreDump;
use worker::fences::{FENCES_MAX, Fences};
use worker::owner::Owner;
use worker::planted::{self, Bug};

use incoming::{Arrival, Incoming};
use outgoing::Outgoing;

/// See the module.
pub struct DecodeCore<M: Model> {
    engine: Engine<M>,
    config: CoreConfig,
    fences: Fences,
    /// What other decode workers may fetch here.
    owner: Owner,
    outgoing: Outgoing,
    jobs: BTreeMap<CallId, Job>,
    /// Every sequence of the engine but those that moved away, and nothing else.
    sequences: BTreeMap<SequenceId, CallId>,
    /// The fetches that are open, to the calls that they are for.
    fetches: BTreeMap<CallId, CallId>,
    next_call: u64,
    draining: bool,
}

/// An engine step, as its events are told of it.
#[derive(Clone, Copy)]
struct Step {
    start: Now,
    end: Now,
    /// Sequences in the batch.
    batch_size: u32,
}

#[derive(Debug)]
struct Job {
    request: RequestId,
    attempt: Attempt,
    sequence: SequenceId,
    arrived: Now,
    deadline: Now,
    /// Position of the next token to be generated here.
    next_index: usize,
    /// Its KV is complete: from now on its steps are short.
    is_prefilled: bool,
    /// Since when the sequence waits to be scheduled.
    ready: Now,
    /// How long it waited, once scheduled for its first token.
    waited: Option<Duration>,
    /// A router wants it moved to another decode worker.
    is_leaving: bool,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// The KV is on its way; no token may be emitted (invariant I2).
    Fetching(Box<Incoming>),
    /// The engine computes the sequence.
    Running,
    /// The token that prefill sampled is the last one. The router has it, or is about to, and will drop the call.
    Ended,
}

/// A token as the engine reports it.
struct Sampled {
    index: usize,
    token: TokenId,
    logprob: f32,
    top: Vec<TokenLogprob>,
    prompt: Option<Box<PromptReport>>,
    finish: Option<FinishReason>,
}

impl<M: Model> DecodeCore<M> {
    /// A core that owns that engine.
    pub fn new(engine: Engine<M>, config: CoreConfig) -> Self {
        Self {
            fences: Fences::new(config.fence_ttl, FENCES_MAX),
            owner: Owner::new(&config, engine.layout()),
            outgoing: Outgoing::default(),
            engine,
            config,
            jobs: BTreeMap::new(),
            sequences: BTreeMap::new(),
            fetches: BTreeMap::new(),
            next_call: 1,
            draining: false,
        }
    }

    /// The engine, to look at.
    pub fn engine(&self) -> &Engine<M> {
        &self.engine
    }

    fn admit(
        &mut self,
        call: CallId,
        generation: Generation,
        handoff: Option<Handoff>,
        now: Now,
        out: &mut Vec<Action>,
    ) -> Result<(), Error> {
        self.fences.check(&generation.request, generation.attempt)?;
        self.fence(&generation.request, generation.attempt, now, out);
        self.check(&generation)?;
        match &handoff {
            Some(handoff) => self.check_handoff(&generation, handoff)?,
            // A hand-off is the second half of work that was placed before the drain was known.
            None if self.draining => {
                return Err(Error::new(
                    Reason::WorkerLost,
                    "draining: decodes are taken with a hand-off only",
                ));
            }
            None => {}
        }
        let Generation { request, attempt, tokens, generated, sampling, stop, time_left, .. } = generation;
        let spec = SequenceSpec { tokens, generated, sampling, stop, until: Until::Finished };
        let (sequence, skip, phase) = match handoff {
            None => (self.engine.submit(spec)?, 0, Phase::Running),
            Some(handoff) => {
                let reservation = self.engine.reserve(spec)?;
                let renew_at = now.saturating_add(self.config.renew_every);
                let incoming = Incoming::new(self.draw_call(), handoff, reservation.skip, renew_at);
                (reservation.id, reservation.skip, Phase::Fetching(Box::new(incoming)))
            }
        };
        out.push(Action::Decode { call, item: DecodeItem::Admitted { skipped_tokens: skip } });
        let mut next_index = generated;
        if let Phase::Fetching(incoming) = &phase {
            // The token of index `generated` is the one that prefill samples and its router passes on.
            next_index += 1;
            let (fetch, handoff) = (incoming.fetch, incoming.handoff.clone());
            self.fetches.insert(fetch, call);
            out.push(Action::StartFetch { call: fetch, handoff, skip, time_left });
        }
        self.sequences.insert(sequence, call);
        self.jobs.insert(
            call,
            Job {
                request,
                attempt,
                sequence,
                arrived: now,
                deadline: now.saturating_add(time_left),
                next_index,
                is_prefilled: false,
                ready: now,
                waited: None,
                is_leaving: false,
                phase,
            },
        );
        Ok(())
    }

    /// Refuses what this worker does not take, hand-off or not.
    fn check(&self, generation: &Generation) -> Result<(), Error> {
        if generation.model != self.config.model.name {
            let message = format!("model {:?} expected, {:?} came", self.config.model.name, generation.model);
            return Err(Error::new(Reason::ModelNotFound, message));
        }
        if generation.time_left.is_zero() {
            return Err(deadline_passed(Duration::ZERO));
        }
        Ok(())
    }

    /// Refuses a reference to KV that is not this request's, or that this engine cannot take.
    fn check_handoff(&self, generation: &Generation, handoff: &Handoff) -> Result<(), Error> {
        if handoff.request != generation.request {
            let message = format!("request {} expected, {} came", generation.request, handoff.request);
            return Err(Error::invalid("handoff.request", message));
        }
        if handoff.attempt != generation.attempt {
            let message = format!(
                "hand-off of attempt {} expected, of {} came",
                generation.attempt.0, handoff.attempt.0
            );
            return Err(Error::new(Reason::StaleAttempt, message));
        }
        if handoff.tokens != generation.tokens.len() {
            let message = format!("{} expected, {} came", generation.tokens.len(), handoff.tokens);
            return Err(Error::invalid("handoff.tokens", message));
        }
        if handoff.fingerprint != self.config.model.fingerprint {
            let message = format!(
                "checkpoint fingerprint: {} here, {} of the hand-off",
                self.config.model.fingerprint, handoff.fingerprint
            );
            return Err(Error::new(Reason::FingerprintMismatch, message));
        }
        match self.engine.layout().mismatch(&handoff.layout) {
            None => Ok(()),
            Some(message) => Err(Error::new(Reason::LayoutMismatch, message)),
        }
    }

    fn draw_call(&mut self) -> CallId {
        let call = CallId(self.next_call);
        self.next_call += 2;
        call
    }

    /// Ends all work of earlier attempts (invariant I1).
    fn fence(&mut self, request: &RequestId, attempt: Attempt, now: Now, out: &mut Vec<Action>) {
        if !self.fences.raise(request, attempt, now) {
            return;
        }
        for call in self.jobs_that(|job| job.request == *request && job.attempt < attempt) {
            let message = format!("request {request}: fenced by attempt {}", attempt.0);
            self.end(call, Some(Error::new(Reason::StaleAttempt, message)), out);
        }
        self.fence_moved(request, attempt, out);
    }

    fn jobs_that(&self, is_meant: impl Fn(&Job) -> bool) -> Vec<CallId> {
        self.jobs.iter().filter(|(_, job)| is_meant(job)).map(|(&call, _)| call).collect()
    }

    /// Takes a job out of every table, with what it holds here and elsewhere.
    fn forget(&mut self, call: CallId, out: &mut Vec<Action>) -> Option<Job> {
        let job = self.jobs.remove(&call)?;
        self.sequences.remove(&job.sequence);
        self.engine.cancel(job.sequence);
        if let Phase::Fetching(incoming) = &job.phase {
            if self.fetches.remove(&incoming.fetch).is_some() {
                out.push(Action::DropFetch { call: incoming.fetch });
            }
            out.push(Action::Release { handoff: incoming.handoff.clone() });
        }
        Some(job)
    }

    /// Ends a job in any phase, and its call.
    fn end(&mut self, call: CallId, error: Option<Error>, out: &mut Vec<Action>) {
        if self.forget(call, out).is_some() {
            out.push(Action::Close { call, error });
        }
    }

    /// Ends what has outlived its deadline. Runs before anything else happens at a time.
    fn expire(&mut self, now: Now, out: &mut Vec<Action>) {
        for call in self.jobs_that(|job| deadline(job).is_some_and(|deadline| deadline <= now)) {
            let waited = now.saturating_sub(self.jobs[&call].arrived);
            self.end(call, Some(deadline_passed(waited)), out);
        }
        self.expire_moved(now, out);
    }

    /// Extends the leases that are due.
    fn renew(&mut self, now: Now, out: &mut Vec<Action>) {
        let every = self.config.renew_every;
        for job in self.jobs.values_mut() {
            if let Phase::Fetching(incoming) = &mut job.phase
                && incoming.is_renewal_due(now, every)
            {
                out.push(Action::Renew { call: incoming.fetch, handoff: incoming.handoff.clone() });
            }
        }
    }

    /// An item of a fetch. Those of fetches that are over come too late to matter.
    fn fetched(&mut self, fetch: CallId, item: FetchItem, now: Now, out: &mut Vec<Action>) {
        let Some(&call) = self.fetches.get(&fetch) else { return };
        let job = self.jobs.get_mut(&call).expect("a fetch is open for as long as its job fetches");
        let Phase::Fetching(incoming) = &mut job.phase else { return };
        if planted::is(Bug::TokenBeforeProof)
            && let FetchItem::End { first_token, .. } = item
        {
            out.push(unproven(call, job.next_index - 1, first_token));
        }
        let arrival = match incoming.take(item, &mut self.engine, job.sequence) {
            Ok(Arrival::Part) => return,
            Ok(arrival) => arrival,
            Err(error) => return self.end(call, Some(error), out),
        };
        out.push(Action::Release { handoff: incoming.handoff.clone() });
        self.fetches.remove(&fetch);
        job.ready = now;
        job.is_prefilled = true;
        job.phase = Phase::Running;
        if arrival == Arrival::Ended {
            job.phase = Phase::Ended;
            self.sequences.remove(&job.sequence);
            self.engine.cancel(job.sequence);
        } else if job.is_leaving {
            self.leave_all(now, out);
        }
    }

    /// The owner's answer to a renewal. An owner that refuses has ended the hold; one that could not be reached is
    /// the fetch's to notice, and the next renewal's.
    fn renewed(&mut self, fetch: CallId, result: Result<Duration, Error>, out: &mut Vec<Action>) {
        let Some(&call) = self.fetches.get(&fetch) else { return };
        if let Err(error) = result
            && is_refusal(error.reason)
        {
            self.end(call, Some(error), out);
        }
    }

    fn take(&mut self, event: EngineEvent, step: Step, out: &mut Vec<Action>) {
        let Some(&call) = self.sequences.get(&event.id()) else { return };
        let job = self.jobs.get_mut(&call).expect("a sequence has a job");
        match event {
            EngineEvent::Scheduled { .. } => job.waited = Some(step.start.saturating_sub(job.ready)),
            // Only of sequences that are computed to be held.
            EngineEvent::Sealed { .. } => {}
            EngineEvent::Token { index, token, logprob, top, prompt, finish, .. } => {
                let sampled = Sampled { index, token, logprob, top, prompt, finish };
                out.push(Action::Decode { call, item: job.token(sampled, step) });
                if finish.is_some() {
                    self.end(call, None, out);
                }
            }
            EngineEvent::Failed { error, .. } => self.end(call, Some(error), out),
        }
    }
}

impl Job {
    fn token(&mut self, sampled: Sampled, step: Step) -> DecodeItem {
        debug_assert_eq!(sampled.index, self.next_index, "tokens come one by one");
        self.next_index = sampled.index + 1;
        self.is_prefilled = true;
        let queue_wait = self.waited.take().unwrap_or_else(|| step.start.saturating_sub(self.ready));
        let compute = step.end.saturating_sub(self.ready).saturating_sub(queue_wait);
        // From here on it waits for the next step.
        self.ready = step.end;
        DecodeItem::Token(Token {
            index: sampled.index,
            id: sampled.token,
            logprob: sampled.logprob,
            batch_size: step.batch_size,
            queue_wait,
            compute,
            finish: sampled.finish,
            top: sampled.top,
            prompt: sampled.prompt,
        })
    }
}

/// True for an owner's own word that a reference is worth nothing.
fn is_refusal(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::StaleEpoch
            | Reason::StaleAttempt
            | Reason::UnknownHandoff
            | Reason::LeaseExpired
            | Reason::FingerprintMismatch
            | Reason::LayoutMismatch
    )
}

/// When a job must be over.
fn deadline(job: &Job) -> Option<Now> {
    if planted::is(Bug::DeadlineNotCheckedInTransfer) && matches!(job.phase, Phase::Fetching(..)) {
        return None;
    }
    Some(job.deadline)
}

/// A token that nothing vouches for; see [`Bug::TokenBeforeProof`].
fn unproven(call: CallId, index: usize, id: TokenId) -> Action {
    let (logprob, batch_size, queue_wait, finish) = (0.0, 1, Duration::ZERO, None);
    Action::Decode {
        call,
        item: DecodeItem::Token(Token {
            index,
            id,
            logprob,
            batch_size,
            queue_wait,
            finish,
            ..Token::default()
        }),
    }
}

fn deadline_passed(after: Duration) -> Error {
    Error::new(Reason::Deadline, format!("the request's deadline passed {after:?} after it came here"))
}

impl<M: Model> Core for DecodeCore<M> {
    fn on(&mut self, event: Event, now: Now, out: &mut Vec<Action>) {
        // First: nothing more is said on a call whose peer is gone, not even that its time is over.
        if let Event::Dropped { call } = event {
            self.owner.dropped(call);
            drop(self.forget(call, out));
        }
        self.expire(now, out);
        match event {
            Event::Decode { call, generation, handoff } => {
                let reference = handoff.clone();
                if let Err(error) = self.admit(call, generation, handoff, now, out) {
                    out.push(Action::Close { call, error: Some(error) });
                    // Nobody else knows that the hold has lost its purpose.
                    if let Some(handoff) = reference.filter(|_| !planted::is(Bug::ReleaseIgnoredOnReject)) {
                        out.push(Action::Release { handoff });
                    }
                }
            }
            Event::Prefill { call, .. } => {
                let error = Error::invalid("role", "this is a decode worker, it takes no prefill calls");
                out.push(Action::Close { call, error: Some(error) });
            }
            Event::Fetch { call, handoff, skip } => {
                if let Err(error) = self.start_fetch((call, skip), &handoff, now, out) {
                    out.push(Action::Close { call, error: Some(error) });
                }
            }
            Event::FetchCredit { call, items } => self.add_credit(call, items, out),
            Event::Renew { call, handoff } => {
                let result = self.owner.renew(&handoff, &self.fences, now);
                out.push(Action::Renewed { call, result });
            }
            Event::Release { handoff } => self.release_moved(&handoff, out),
            Event::Move { request, attempt } => self.move_away(&request, attempt, now, out),
            Event::Fence { request, attempt } => self.fence(&request, attempt, now, out),
            Event::Fetched { call, item } => self.fetched(call, item, now, out),
            Event::FetchFailed { call, error } => {
                if let Some(call) = self.fetches.remove(&call) {
                    self.end(call, Some(error), out);
                }
            }
            Event::RenewAnswered { call, result } => self.renewed(call, result, out),
            Event::Dropped { .. } | Event::Tick => {}
            Event::Drain => self.draining = true,
        }
        self.renew(now, out);
    }

    fn step(&mut self, clock: &dyn Fn() -> Now, out: &mut Vec<Action>) -> Option<StepSize> {
        let start = clock();
        self.expire(start, out);
        self.renew(start, out);
        if !self.engine.has_work() {
            return None;
        }
        let StepReport { batch_tokens, batch_sequences, events, interrupted } = self.engine.step();
        if interrupted {
            // Whoever raised it had queued the reason before, so the shell sees that before the next step.
            self.engine.interrupt().clear();
        }
        let step = Step { start, end: clock(), batch_size: batch_sequences as u32 };
        for event in events {
            self.take(event, step, out);
        }
        self.leave_all(step.end, out);
        Some(StepSize { tokens: batch_tokens, sequences: batch_sequences })
    }

    fn has_work(&self) -> bool {
        self.engine.has_work()
    }

    fn next_wake(&self) -> Option<Now> {
        let renewal = |job: &Job| match &job.phase {
            Phase::Fetching(incoming) => Some(incoming.renew_at),
            Phase::Running | Phase::Ended => None,
        };
        let jobs = self.jobs.values().flat_map(|job| deadline(job).into_iter().chain(renewal(job)));
        jobs.chain(self.outgoing.next_deadline()).chain(self.owner.next_expiry()).min()
    }

    fn gauges(&self) -> Gauges {
        let counts = self.engine.sequence_counts();
        let in_engine = counts.waiting + counts.running + counts.preempted + counts.reserved + counts.held;
        Gauges {
            blocks: self.engine.kv_counts(),
            sequences: counts,
            preemptions: self.engine.preemptions(),
            tokens: self.engine.token_counts(),
            leases: self.owner.leases(),
            // Each sequence has at least one block, or will.
            orphaned_blocks: in_engine.saturating_sub(self.sequences.len() + self.outgoing.moved.len()),
            draining: self.draining,
            moves: self.outgoing.counts,
        }
    }

    fn dump(&self, now: Now) -> CoreDump {
        self.dump_now(now)
    }

    fn interrupt(&self) -> Interrupt {
        self.engine.interrupt()
    }

    fn follow_blocks(&mut self, bound: Option<usize>) {
        self.engine.follow_blocks(bound);
    }

    fn take_block_changes(&mut self, out: &mut Vec<BlockChange>) -> bool {
        self.engine.take_block_changes(out)
    }

    fn known_blocks(&self) -> Vec<BlockHash> {
        self.engine.known_blocks()
    }

    fn sole_prefill(&self) -> Option<CallId> {
        let mut running = self.jobs.iter().filter(|(_, job)| matches!(job.phase, Phase::Running));
        let (&call, job) = running.next()?;
        (running.next().is_none() && !job.is_prefilled).then_some(call)
    }

    fn is_idle(&self) -> bool {
        let is_held = !planted::is(Bug::IdleWhileHolding) && !self.outgoing.moved.is_empty();
        self.jobs.is_empty() && !is_held && !self.owner.is_sending()
    }
}
