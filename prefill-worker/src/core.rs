//! The prefill worker without its shell: tokens in, held KV out.
//!
//! A job is one prefill, from the router's call to the end of the hold. It passes through these phases, and each way
//! out of each phase is [`PrefillCore::end`]:
//!
//! ```text
//! queued ── first chunk ──► issued ── token ──► held ── release, expiry ──► gone
//!                           └── fetched, block by block, by decode ──┘
//! ```

mod dump;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use engine::model::{Interrupt, Model};
use engine::{Engine, EngineEvent, SequenceId, SequenceSpec, StepReport, Until};
use proto::watch::BlockChange;
use proto::{
    Attempt, BlockHash, Error, FinishReason, Generation, Handoff, PromptReport, Reason, RequestId, Token,
    TokenId, TokenLogprob,
};
use worker::core::{Action, CallId, Core, Event, Gauges, Moves, Now, PrefillItem, StepSize};
use worker::core_config::CoreConfig;
use worker::dump::CoreDump;
use worker::fences::{FENCES_MAX, Fences};
use worker::holds::Issue;
use worker::owner::Owner;
use worker::planted::{self, Bug};
use worker::sending::Source;

/// See the module.
pub struct PrefillCore<M: Model> {
    engine: Engine<M>,
    config: CoreConfig,
    fences: Fences,
    owner: Owner,
    /// Every sequence of the engine, and nothing else.
    jobs: BTreeMap<SequenceId, Job>,
    /// The routers' calls that are open.
    calls: BTreeMap<CallId, SequenceId>,
    /// Sequences of the last batch.
    last_batch: usize,
    draining: bool,
    /// The latest time heard of.
    now: Now,
}

#[derive(Debug)]
struct Job {
    request: RequestId,
    attempt: Attempt,
    tokens: Arc<[TokenId]>,
    arrived: Now,
    deadline: Now,
    /// The router's call, while it is open.
    call: Option<CallId>,
    /// When the first chunk was scheduled, and with it the hand-off issued.
    scheduled: Option<Now>,
    /// Once all KV is sealed and the token sampled.
    first_token: Option<TokenId>,
}

/// An engine step, as its events are told of it.
#[derive(Clone, Copy)]
struct Step {
    start: Now,
    end: Now,
    /// Sequences in the batch.
    batch_size: u32,
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

impl<M: Model> PrefillCore<M> {
    /// A core that owns that engine.
    pub fn new(engine: Engine<M>, config: CoreConfig) -> Self {
        Self {
            fences: Fences::new(config.fence_ttl, FENCES_MAX),
            owner: Owner::new(&config, engine.layout()),
            engine,
            config,
            jobs: BTreeMap::new(),
            calls: BTreeMap::new(),
            last_batch: 0,
            draining: false,
            now: Now::ZERO,
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
        now: Now,
        out: &mut Vec<Action>,
    ) -> Result<(), Error> {
        let Generation { request, attempt, tokens, generated, sampling, stop, .. } = generation;
        self.fences.check(&request, attempt)?;
        self.fence(&request, attempt, now, out);
        if self.draining {
            return Err(Error::new(Reason::WorkerLost, "draining: no new prefills are taken"));
        }
        if generation.model != self.config.model.name {
            let message = format!("model {:?} expected, {:?} came", self.config.model.name, generation.model);
            return Err(Error::new(Reason::ModelNotFound, message));
        }
        if generation.time_left.is_zero() {
            return Err(deadline_passed(Duration::ZERO));
        }
        let job = Job {
            request,
            attempt,
            tokens: tokens.as_slice().into(),
            arrived: now,
            deadline: now.saturating_add(generation.time_left),
            call: Some(call),
            scheduled: None,
            first_token: None,
        };
        let spec = SequenceSpec { tokens, generated, sampling, stop, until: Until::FirstToken };
        let sequence = self.engine.submit(spec)?;
        self.jobs.insert(sequence, job);
        self.calls.insert(call, sequence);
        Ok(())
    }

    /// Ends all work of earlier attempts (invariant I1).
    fn fence(&mut self, request: &RequestId, attempt: Attempt, now: Now, out: &mut Vec<Action>) {
        if !self.fences.raise(request, attempt, now) {
            return;
        }
        let stale = |job: &Job| job.request == *request && job.attempt < attempt;
        for sequence in self.jobs_that(stale) {
            let message = format!("request {request}: fenced by attempt {}", attempt.0);
            self.end(sequence, &Error::new(Reason::StaleAttempt, message), out);
        }
    }

    fn jobs_that(&self, is_meant: impl Fn(&Job) -> bool) -> Vec<SequenceId> {
        self.jobs.iter().filter(|(_, job)| is_meant(job)).map(|(&sequence, _)| sequence).collect()
    }

    /// Ends a job in any phase: who waits for it is told, its fetch is closed, and after that its blocks are freed
    /// (invariant I3, see [`Owner::end`]).
    fn end(&mut self, sequence: SequenceId, error: &Error, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.remove(&sequence) else { return };
        self.owner.end(sequence, error, out);
        // Of a sequence in any state; blocks that are sealed and full stay as prefix cache.
        self.engine.cancel(sequence);
        if let Some(call) = job.call {
            self.calls.remove(&call);
            out.push(Action::Close { call, error: Some(error.clone()) });
        }
    }

    /// Ends what has outlived its lease or its deadline. Runs before anything else happens at a time, so that no
    /// late word brings back what is over.
    fn expire(&mut self, now: Now, out: &mut Vec<Action>) {
        self.now = now;
        for sequence in self.jobs_that(|job| job.deadline <= now) {
            let waited = now.saturating_sub(self.jobs[&sequence].arrived);
            self.end(sequence, &deadline_passed(waited), out);
        }
        for sequence in self.owner.expired(now) {
            let message = format!("{:?} went by without a renewal", self.config.lease_ttl);
            self.end(sequence, &Error::new(Reason::LeaseExpired, message), out);
        }
    }

    fn start_fetch(
        &mut self,
        call: CallId,
        handoff: &Handoff,
        skip: usize,
        now: Now,
        out: &mut Vec<Action>,
    ) -> Result<(), Error> {
        let jobs = &self.jobs;
        let source = |sequence| {
            let job: &Job = jobs.get(&sequence).expect("a hold ends with its job");
            let (tokens, first_token) = (Arc::clone(&job.tokens), job.first_token);
            Source { sequence, handoff: handoff.id, tokens, first_token }
        };
        self.owner.start_fetch((call, skip), handoff, (&self.fences, now), source, out)
    }

    /// The peer of a call went away.
    fn dropped(&mut self, call: CallId, out: &mut Vec<Action>) {
        self.owner.dropped(call);
        let Some(sequence) = self.calls.remove(&call) else { return };
        let job = self.jobs.get_mut(&sequence).expect("an open call has a job");
        job.call = None;
        if planted::is(Bug::CancelLeaksHold) && job.scheduled.is_some() {
            return;
        }
        self.end(sequence, &Error::new(Reason::Cancelled, "the router went away during prefill"), out);
    }

    fn release(&mut self, handoff: &Handoff, out: &mut Vec<Action>) {
        if let Some(sequence) = self.owner.released(handoff) {
            // UNKNOWN_HANDOFF is what the reference is worth from now on, and unlike CANCELLED it lets a router
            // whose decode worker refused the hand-off try again.
            self.end(sequence, &Error::new(Reason::UnknownHandoff, "the hand-off was released"), out);
        }
    }

    fn take(&mut self, event: EngineEvent, step: Step, out: &mut Vec<Action>) {
        match event {
            EngineEvent::Scheduled { id, cached } => self.issue(id, cached, step.start, out),
            EngineEvent::Sealed { id, .. } => self.owner.sealed(id, &self.engine, out),
            EngineEvent::Token { id, index, token, logprob, top, prompt, finish } => {
                let sampled = Sampled { index, token, logprob, top, prompt, finish };
                self.complete(id, sampled, step, out);
            }
            EngineEvent::Failed { id, error } => self.end(id, &error, out),
        }
    }

    /// The first chunk was scheduled: decode may start to fetch.
    fn issue(&mut self, sequence: SequenceId, cached_tokens: usize, now: Now, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&sequence) else { return };
        let handoff = self.owner.issue(Issue {
            sequence,
            request: job.request.clone(),
            attempt: job.attempt,
            tokens: job.tokens.len(),
        });
        job.scheduled = Some(now);
        if let Some(call) = job.call {
            let queue_wait = now.saturating_sub(job.arrived);
            out.push(Action::Prefill {
                call,
                item: PrefillItem::Issued { handoff, cached_tokens, queue_wait },
            });
        }
    }

    /// All KV is sealed: the router gets the token, its call ends, and from now on the lease runs.
    fn complete(&mut self, sequence: SequenceId, sampled: Sampled, step: Step, out: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&sequence) else { return };
        job.first_token = Some(sampled.token);
        let scheduled = job.scheduled.unwrap_or(step.start);
        if let Some(call) = job.call.take() {
            self.calls.remove(&call);
            let prefill = step.end.saturating_sub(scheduled);
            let token = Token {
                index: sampled.index,
                id: sampled.token,
                logprob: sampled.logprob,
                batch_size: step.batch_size,
                queue_wait: scheduled.saturating_sub(job.arrived),
                compute: prefill,
                finish: sampled.finish,
                top: sampled.top,
                prompt: sampled.prompt,
            };
            out.push(Action::Prefill { call, item: PrefillItem::Done { token, prefill } });
            out.push(Action::Close { call, error: None });
            self.owner.stream_closed(sequence, step.end);
        }
        self.owner.complete(sequence, sampled.token, &self.engine, out);
    }

    /// Held blocks that neither an open call nor an unexpired lease accounts for. Counted from the engine's side,
    /// so that a job lost by the tables above shows.
    fn orphaned_blocks(&self) -> usize {
        let counts = self.engine.sequence_counts();
        let in_engine = counts.waiting + counts.running + counts.preempted + counts.reserved + counts.held;
        let is_alive = |sequence: &SequenceId, job: &Job| {
            job.call.is_some() || self.owner.lease_runs(*sequence, self.now)
        };
        let alive = self.jobs.iter().filter(|(sequence, job)| is_alive(sequence, job));
        let (mut owners, mut owned) = (0, 0);
        for (_, job) in alive {
            owners += 1;
            owned += self.engine.layout().blocks_for(job.tokens.len());
        }
        if in_engine <= owners {
            return 0;
        }
        // Blocks can be shared between the orphan and the others, so this is the least it can be.
        self.engine.kv_counts().held.saturating_sub(owned).max(in_engine - owners)
    }
}

fn deadline_passed(after: Duration) -> Error {
    Error::new(Reason::Deadline, format!("the request's deadline passed {after:?} after it came here"))
}

impl<M: Model> Core for PrefillCore<M> {
    fn on(&mut self, event: Event, now: Now, out: &mut Vec<Action>) {
        // First: nothing more is said on a call whose peer is gone, not even that its time is over.
        if let Event::Dropped { call } = event {
            self.dropped(call, out);
        }
        self.expire(now, out);
        match event {
            Event::Prefill { call, generation } => {
                if let Err(error) = self.admit(call, generation, now, out) {
                    out.push(Action::Close { call, error: Some(error) });
                }
            }
            Event::Decode { call, .. } => {
                let error = Error::invalid("role", "this is a prefill worker, it takes no decode calls");
                out.push(Action::Close { call, error: Some(error) });
            }
            Event::Fetch { call, handoff, skip } => {
                if let Err(error) = self.start_fetch(call, &handoff, skip, now, out) {
                    out.push(Action::Close { call, error: Some(error) });
                }
            }
            Event::FetchCredit { call, items } => {
                self.owner.add_credit(call, items, &self.engine, out);
            }
            Event::Renew { call, handoff } => {
                let result = self.owner.renew(&handoff, &self.fences, now);
                out.push(Action::Renewed { call, result });
            }
            Event::Release { handoff } => self.release(&handoff, out),
            Event::Fence { request, attempt } => self.fence(&request, attempt, now, out),
            // A prefill worker opens no calls and has no tokens to go on with, so nothing of these can be meant for it.
            Event::Move { .. }
            | Event::Fetched { .. }
            | Event::FetchFailed { .. }
            | Event::RenewAnswered { .. } => {}
            Event::Dropped { .. } | Event::Tick => {}
            Event::Drain => self.draining = true,
        }
    }

    fn step(&mut self, clock: &dyn Fn() -> Now, out: &mut Vec<Action>) -> Option<StepSize> {
        let start = clock();
        self.expire(start, out);
        if !self.engine.has_work() {
            self.last_batch = 0;
            return None;
        }
        let StepReport { batch_tokens, batch_sequences, events, interrupted } = self.engine.step();
        if interrupted {
            // Whoever raised it had queued the reason before, so the shell sees that before the next step.
            self.engine.interrupt().clear();
        }
        self.last_batch = batch_sequences;
        let step = Step { start, end: clock(), batch_size: batch_sequences as u32 };
        self.now = step.end;
        for event in events {
            self.take(event, step, out);
        }
        Some(StepSize { tokens: batch_tokens, sequences: batch_sequences })
    }

    fn has_work(&self) -> bool {
        self.engine.has_work()
    }

    fn next_wake(&self) -> Option<Now> {
        let deadline = self.jobs.values().map(|job| job.deadline).min();
        deadline.into_iter().chain(self.owner.next_expiry()).min()
    }

    fn gauges(&self) -> Gauges {
        Gauges {
            blocks: self.engine.kv_counts(),
            sequences: self.engine.sequence_counts(),
            preemptions: self.engine.preemptions(),
            tokens: self.engine.token_counts(),
            leases: self.owner.leases(),
            orphaned_blocks: self.orphaned_blocks(),
            draining: self.draining,
            moves: Moves::default(),
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
        let mut computing = self.jobs.values().filter(|job| job.first_token.is_none());
        let oldest = computing.next()?;
        // Prefills go by age: a batch of one was the oldest's, and while it is incomplete the next one is, too.
        let is_alone = computing.next().is_none() || (self.last_batch == 1 && oldest.scheduled.is_some());
        if is_alone { oldest.call } else { None }
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty() && !self.owner.is_sending()
    }
}
