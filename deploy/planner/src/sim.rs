//! A cluster in virtual time: real router cores, and workers that cost time and compute nothing.
//!
//! Every request has a [`Dispatch`] of its own and is placed by the [`Pools`] of one of several routers, the very code
//! that serves. Workers ([`worker`]) keep the engine's rules with a price in place of arithmetic. Between the processes
//! every message takes a hop, and KV takes its share of two links, one hand-off after another. The order of events is a
//! function of the seed alone.
//!
//! What is left out: tokens between the first and the last are not told to the dispatch, which does nothing with them;
//! nobody dies; and a router has no bound on the requests that run.

mod blocks;
mod queue;
mod record;
mod routers;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use proto::{
    Attempt, BlockHash, Digest, Error, Generation, Handoff, HandoffId, Priority, Reason, RequestId, Role,
    SamplingParams, StopConditions, Token, TokenId,
};
use router::cost::Stopwatch;
use router::dispatch::{Action, Dispatch, DispatchConfig, Emission, Event as RouterEvent};
use router::policy::Policy;
use router::pools::NamedBlocks;

use crate::machine::Machine;
use crate::random::mix;
use crate::report::{Report, Slo};
use crate::workload::Arrival;
use blocks::BlockName;
use queue::{Queue, Time};
use record::Record;
use routers::Routers;
use worker::{Job, News, Spec, Until, Worker};

pub use routers::Routing;

/// A cluster to simulate.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// What each worker is.
    pub machine: Machine,
    /// Prefill workers.
    pub prefill: usize,
    /// Decode workers; at least 1.
    pub decode: usize,
    /// How requests are placed.
    pub routing: Routing,
    /// Routers, among which requests are spread by chance; at least 1.
    pub routers: usize,
    /// How often a worker tells each router how it is, seconds.
    pub describe_seconds: f64,
    /// How often it tells each router what it has to do and has cached, seconds.
    pub report_seconds: f64,
    /// Total deadline of a request, seconds.
    pub deadline_seconds: f64,
}

impl Cluster {
    /// A cluster of that many workers with two routers and the services' own defaults.
    pub fn new(machine: Machine, prefill: usize, decode: usize, routing: Routing) -> Self {
        Self {
            machine,
            prefill,
            decode,
            routing,
            routers: 2,
            describe_seconds: 1.0,
            report_seconds: 0.1,
            deadline_seconds: 600.0,
        }
    }

    /// Refuses what no cluster can be.
    ///
    /// # Errors
    /// INVALID_ARGUMENT that names the field.
    pub fn validate(&self) -> Result<(), Error> {
        self.machine.validate()?;
        let positive = [("decode", self.decode), ("routers", self.routers)];
        if let Some((field, _)) = positive.into_iter().find(|&(_, value)| value == 0) {
            return Err(Error::invalid(field, "at least 1 expected, 0 came"));
        }
        let times = [
            ("describe_seconds", self.describe_seconds),
            ("report_seconds", self.report_seconds),
            ("deadline_seconds", self.deadline_seconds),
        ];
        match times.into_iter().find(|&(_, value)| !value.is_finite() || value <= 0.0) {
            Some((field, value)) => {
                Err(Error::invalid(field, format_args!("more than 0 expected, {value} came")))
            }
            None => Ok(()),
        }
    }
}

/// Runs the requests through the cluster. Those of the first tenth of the time warm it up and do not count.
///
/// # Errors
/// INVALID_ARGUMENT when the cluster cannot be, by the field.
pub fn simulate(cluster: &Cluster, requests: &[Arrival], slo: Slo, seed: u64) -> Result<Report, Error> {
    cluster.validate()?;
    let mut simulation = Simulation::new(cluster, requests, slo, seed);
    simulation.run();
    Ok(simulation.record.report())
}

/// Something that happens.
#[derive(Debug)]
enum Event {
    /// A request comes to its router.
    Arrive(u32),
    /// A router hears from a worker.
    Heard { request: u32, news: Heard },
    /// A dispatch wanted to be told that time has passed.
    Tick(u32),
    /// A prefill call comes to its worker.
    Prefill { worker: u32, job: Job, len: usize },
    /// A decode call comes to its worker.
    Decode { worker: u32, job: Job, len: usize, fetches: bool },
    /// A worker is told to drop a request.
    Cancel { worker: u32, job: Job, owner: Option<u32> },
    /// A fetch comes to the worker that holds the KV.
    Fetch { job: Job },
    /// The last KV has come.
    Fetched { worker: u32, job: Job, owner: u32 },
    /// The step of a worker ends.
    StepEnds(u32),
    /// A worker tells a router how it is.
    Describe { router: u32, worker: u32 },
    /// A worker tells a router what it has to do.
    Report { router: u32, worker: u32 },
}

/// What a worker says to a router.
#[derive(Debug)]
enum Heard {
    Issued { attempt: u32, cached: usize },
    Started { cached: usize },
    First { attempt: u32, from: Role, is_last: bool, cached: usize, waited: f64, took: f64 },
    Next,
    Last { attempt: u32 },
    Admitted { attempt: u32, skipped: usize },
    Refused { attempt: u32, from: Role, reason: Reason },
}

/// KV on its way from prefill to decode.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    job: Job,
    from: u32,
    to: u32,
    /// Tokens in all.
    total: usize,
    /// Tokens that are computed.
    computed: usize,
    /// Tokens that have been sent, or are there already.
    sent: usize,
    /// When the last of them has gone, seconds.
    gone: f64,
    is_asked_for: bool,
    is_prefilled: bool,
}

/// A request that runs.
struct Live {
    dispatch: Dispatch,
    router: usize,
    names: Arc<[BlockName]>,
    transfer: Option<Transfer>,
    /// Of the present placement.
    stopwatch: Option<Stopwatch>,
    /// Workers of the open calls.
    prefill: Option<u32>,
    decode: Option<u32>,
    wake: Option<Time>,
}

struct Simulation<'a> {
    cluster: &'a Cluster,
    requests: &'a [Arrival],
    seed: u64,
    queue: Queue<Event>,
    routers: Routers,
    workers: Vec<Worker>,
    live: Vec<Option<Box<Live>>>,
    /// Requests that have not ended.
    open: usize,
    record: Record,
    hop: Time,
    /// Empty, between uses.
    news: Vec<News>,
    tokens: Vec<TokenId>,
}

impl<'a> Simulation<'a> {
    fn new(cluster: &'a Cluster, requests: &'a [Arrival], slo: Slo, seed: u64) -> Self {
        let roles = std::iter::repeat_n(Role::Prefill, cluster.prefill)
            .chain(std::iter::repeat_n(Role::Decode, cluster.decode));
        let mut workers: Vec<Worker> =
            roles.zip(0..).map(|(role, index)| Worker::new(role, index, cluster.machine)).collect();
        let mut queue = Queue::default();
        for (index, request) in requests.iter().enumerate() {
            queue.push(time(request.at), Event::Arrive(index as u32));
        }
        if cluster.routing.policy == Policy::Prefix {
            workers.iter_mut().for_each(Worker::note_changes);
        }
        let routers = Routers::new(cluster, &workers, seed);
        let pairs = cluster.routers as u64 * workers.len() as u64;
        for pair in 0..pairs {
            // Spread over the interval: workers do not speak in chorus.
            let at = time(cluster.describe_seconds * (pair + 1) as f64 / pairs as f64);
            let (router, worker) =
                ((pair % cluster.routers as u64) as u32, (pair / cluster.routers as u64) as u32);
            queue.push(at, Event::Describe { router, worker });
            if cluster.routing.is_informed() {
                let at = time(cluster.report_seconds * (pair + 1) as f64 / pairs as f64);
                queue.push(at, Event::Report { router, worker });
            }
        }
        Self {
            record: Record::new(cluster, requests, slo),
            hop: time(cluster.machine.prices.hop_seconds),
            live: requests.iter().map(|_| None).collect(),
            open: requests.len(),
            news: Vec::new(),
            tokens: Vec::new(),
            cluster,
            requests,
            seed,
            queue,
            routers,
            workers,
        }
    }

    fn run(&mut self) {
        while self.open > 0 {
            let Some(event) = self.queue.pop() else { break };
            self.record.events += 1;
            self.on(event);
        }
        self.record.preemptions = self.workers.iter().map(|worker| worker.preemptions).sum();
    }

    fn on(&mut self, event: Event) {
        match event {
            Event::Arrive(request) => self.arrive(request),
            Event::Heard { request, news } => self.heard(request, news),
            Event::Tick(request) => self.tick(request),
            Event::Prefill { worker, job, len } => self.prefill(worker, job, len),
            Event::Decode { worker, job, len, fetches } => self.decode(worker, job, len, fetches),
            Event::Cancel { worker, job, owner } => {
                self.workers[worker as usize].cancel(job);
                if let Some(worker) = owner {
                    self.queue.after(self.hop, Event::Cancel { worker, job, owner: None });
                }
                self.step(worker);
            }
            Event::Fetch { job } => {
                if let Some(transfer) = self.transfer(job) {
                    transfer.is_asked_for = true;
                    self.send(job);
                }
            }
            Event::Fetched { worker, job, owner } => {
                self.workers[worker as usize].activate(job);
                self.queue.after(self.hop, Event::Cancel { worker: owner, job, owner: None });
                self.step(worker);
            }
            Event::StepEnds(worker) => self.step_ends(worker),
            Event::Describe { router, worker } => {
                self.routers.describe(router as usize, worker as usize, &self.workers[worker as usize]);
                self.queue.after(time(self.cluster.describe_seconds), Event::Describe { router, worker });
            }
            Event::Report { router, worker } => {
                let place = &mut self.workers[worker as usize];
                self.routers.report(router as usize, worker as usize, place);
                self.queue.after(time(self.cluster.report_seconds), Event::Report { router, worker });
            }
        }
    }

    fn arrive(&mut self, request: u32) {
        let arrival = &self.requests[request as usize];
        self.tokens.clear();
        arrival.tokens(&mut self.tokens);
        let chain = routers::chain(&self.cluster.machine);
        let names: Arc<[BlockHash]> = chain.of(&self.tokens).into();
        let generation = Generation {
            request: RequestId(request.to_string()),
            attempt: Attempt(0),
            model: routers::MODEL.to_owned(),
            tokens: self.tokens[..arrival.prompt].to_vec(),
            generated: 0,
            sampling: SamplingParams::default(),
            stop: StopConditions { max_tokens: arrival.output, ..StopConditions::default() },
            time_left: Duration::from_secs_f64(self.cluster.deadline_seconds),
            probe: false,
            beside: None,
            session: arrival.parts.last().map(|part| format!("{:x}", part.stream)),
            priority: Priority::default(),
        };
        let config =
            DispatchConfig { placement: self.cluster.routing.placement, ..DispatchConfig::default() };
        let mut dispatch = Dispatch::new(generation, config);
        if self.cluster.routing.policy == Policy::Prefix {
            let blocks = names[..arrival.prompt / chain.block_tokens()].to_vec();
            dispatch.set_blocks(vec![NamedBlocks { chain, blocks }]);
        }
        self.live[request as usize] = Some(Box::new(Live {
            dispatch,
            router: (mix(mix(self.seed, 0x70), u64::from(request)) % self.cluster.routers as u64) as usize,
            names,
            transfer: None,
            stopwatch: None,
            prefill: None,
            decode: None,
            wake: None,
        }));
        self.tell(request, RouterEvent::Start);
    }

    fn tick(&mut self, request: u32) {
        let now = self.queue.now();
        if self.live[request as usize].as_ref().is_some_and(|live| live.wake == Some(now)) {
            self.tell(request, RouterEvent::Tick);
        }
    }

    /// A worker's word has come to the request's router.
    fn heard(&mut self, request: u32, heard: Heard) {
        self.measure(request, &heard);
        let Some(live) = &self.live[request as usize] else { return };
        let generation = live.dispatch.generation();
        let token = |is_last: bool| Token {
            index: generation.generated,
            finish: is_last.then_some(proto::FinishReason::Length),
            ..Token::default()
        };
        let event = match heard {
            Heard::Issued { attempt, cached } => {
                self.record.computed(request, cached);
                let attempt = Attempt(attempt);
                let owner = live.prefill.unwrap_or_default();
                let handoff = Handoff {
                    owner: routers::address(owner as usize),
                    epoch: self.workers[owner as usize].epoch,
                    request: generation.request.clone(),
                    attempt,
                    id: HandoffId([0; 16]),
                    fingerprint: Digest::default(),
                    layout: routers::layout(&self.cluster.machine),
                    tokens: generation.tokens.len(),
                };
                RouterEvent::PrefillIssued { attempt, handoff }
            }
            Heard::Started { cached } => return self.record.computed(request, cached),
            Heard::Next => return,
            Heard::First { attempt, from, is_last, .. } => {
                let (attempt, token) = (Attempt(attempt), token(is_last));
                match from {
                    Role::Prefill => RouterEvent::PrefillDone { attempt, token },
                    _ => RouterEvent::DecodeToken { attempt, token },
                }
            }
            Heard::Last { attempt } => {
                RouterEvent::DecodeToken { attempt: Attempt(attempt), token: token(true) }
            }
            Heard::Admitted { attempt, .. } => RouterEvent::DecodeAdmitted { attempt: Attempt(attempt) },
            Heard::Refused { attempt, from, reason } => {
                let (attempt, error) = (Attempt(attempt), Some(Error::new(reason, "refused")));
                match from {
                    Role::Prefill => RouterEvent::PrefillEnded { attempt, error },
                    _ => RouterEvent::DecodeEnded { attempt, error },
                }
            }
        };
        self.tell(request, event);
    }

    /// Takes in what a worker's word shows of costs, as the router's shell does.
    fn measure(&mut self, request: u32, heard: &Heard) {
        let now = Duration::from_nanos(self.queue.now());
        let Some(live) = self.live[request as usize].as_mut() else { return };
        let Some(watch) = &mut live.stopwatch else { return };
        let observation = match *heard {
            Heard::Issued { cached, .. } => {
                watch.cached(cached);
                None
            }
            Heard::Admitted { skipped, .. } => {
                watch.skipped(skipped);
                None
            }
            Heard::First { from: Role::Prefill, took, .. } => {
                watch.prefilled(Duration::from_secs_f64(took), now)
            }
            Heard::First { cached, waited, .. } => {
                watch.token(Some((cached, Duration::from_secs_f64(waited))), now)
            }
            Heard::Next | Heard::Last { .. } => watch.token(None, now),
            Heard::Started { .. } | Heard::Refused { .. } => None,
        };
        if let Some(observation) = observation {
            self.routers.pools_mut(live.router).observe(routers::MODEL, observation);
        }
    }

    /// Tells a request's dispatch, and does what it says.
    fn tell(&mut self, request: u32, event: RouterEvent) {
        let Some(mut live) = self.live[request as usize].take() else { return };
        let now = self.queue.now();
        let mut actions = Vec::new();
        let pools = self.routers.pools(live.router);
        live.dispatch.on(event, pools, Duration::from_nanos(now), &mut actions);
        let mut ended = false;
        for action in actions {
            ended |= self.carry_out(request, &mut live, action);
        }
        if ended {
            self.open -= 1;
        } else {
            self.live[request as usize] = Some(live);
        }
    }

    /// True when that was the end.
    fn carry_out(&mut self, request: u32, live: &mut Live, action: Action) -> bool {
        let now = self.queue.now();
        let attempt = live.dispatch.generation().attempt.0;
        match action {
            Action::StartPrefill { worker, generation } => {
                let worker = routers::index(&worker);
                live.prefill = Some(worker);
                let job = Job { request, attempt: generation.attempt.0 };
                let len = generation.tokens.len();
                self.queue.after(self.hop, Event::Prefill { worker, job, len });
            }
            Action::StartDecode { worker, generation, handoff } => {
                let worker = routers::index(&worker);
                live.decode = Some(worker);
                let job = Job { request, attempt: generation.attempt.0 };
                let len = generation.tokens.len();
                self.queue.after(self.hop, Event::Decode { worker, job, len, fetches: handoff.is_some() });
            }
            Action::DropPrefill => {
                if let Some(worker) = live.prefill.take() {
                    let job = Job { request, attempt };
                    self.queue.after(self.hop, Event::Cancel { worker, job, owner: None });
                }
            }
            Action::DropDecode => {
                if let Some(worker) = live.decode.take() {
                    // A decode worker that gives up a fetch releases the hold.
                    let owner = live.transfer.map(|transfer| transfer.from);
                    let job = Job { request, attempt };
                    self.queue.after(self.hop, Event::Cancel { worker, job, owner });
                }
            }
            Action::Fence { worker, attempt, .. } => {
                let worker = routers::index(&worker);
                let job = Job { request, attempt: attempt.0.saturating_sub(1) };
                self.queue.after(self.hop, Event::Cancel { worker, job, owner: None });
            }
            // Nothing drains here, so nothing moves.
            Action::Move { .. } | Action::Moved { .. } => {}
            Action::Retry { .. } => self.record.retries += 1,
            Action::Emit(Emission::Placed(placed)) => {
                let pools = self.routers.pools_mut(live.router);
                pools.touch(live.dispatch.blocks());
                let tokens = live.dispatch.generation().tokens.len();
                let is_split = placed.prefill.is_some();
                live.stopwatch = Some(Stopwatch::start(is_split, tokens, Duration::from_nanos(now)));
                self.record.placed(request, live.router, placed.kind());
            }
            Action::Emit(Emission::Token(_)) => self.record.token(request, now + self.hop),
            Action::Finish(result) => {
                self.record.ended(request, &result);
                return true;
            }
            Action::WakeAt(at) => {
                let at = Time::try_from(at.as_nanos()).unwrap_or(Time::MAX);
                live.wake = Some(at);
                self.queue.push(at, Event::Tick(request));
            }
        }
        false
    }

    fn prefill(&mut self, worker: u32, job: Job, len: usize) {
        let Some(live) = self.live[job.request as usize].as_mut() else { return };
        let names = Arc::clone(&live.names);
        live.transfer = Some(Transfer {
            job,
            from: worker,
            to: worker,
            total: len,
            computed: 0,
            sent: 0,
            gone: 0.0,
            is_asked_for: false,
            is_prefilled: false,
        });
        let end = self.end(job.request);
        let spec = Spec { job, until: Until::Held, len, end, names };
        match self.worker(worker).submit(spec) {
            Ok(()) => self.step(worker),
            Err(reason) => {
                self.say(job.request, Heard::Refused { attempt: job.attempt, from: Role::Prefill, reason });
            }
        }
    }

    fn decode(&mut self, worker: u32, job: Job, len: usize, fetches: bool) {
        let end = self.end(job.request);
        let Some(live) = self.live[job.request as usize].as_mut() else { return };
        let names = Arc::clone(&live.names);
        let until = if fetches { Until::TakenOver } else { Until::Finished };
        let spec = Spec { job, until, len, end, names };
        let place = self.worker(worker);
        let taken = if fetches { place.reserve(spec) } else { place.submit(spec).map(|()| 0) };
        let attempt = job.attempt;
        match taken {
            Ok(skipped) => {
                self.say(job.request, Heard::Admitted { attempt, skipped });
                if let Some(transfer) = self.transfer(job).filter(|_| fetches) {
                    (transfer.to, transfer.sent) = (worker, skipped);
                    self.queue.after(self.hop, Event::Fetch { job });
                }
                self.step(worker);
            }
            Err(reason) => self.say(job.request, Heard::Refused { attempt, from: Role::Decode, reason }),
        }
    }

    /// The worker, told the time.
    fn worker(&mut self, worker: u32) -> &mut Worker {
        let place = &mut self.workers[worker as usize];
        place.now = seconds(self.queue.now());
        place
    }

    /// Tokens of a request at its end.
    fn end(&self, request: u32) -> usize {
        let arrival = &self.requests[request as usize];
        arrival.prompt + arrival.output
    }

    fn transfer(&mut self, job: Job) -> Option<&mut Transfer> {
        let live = self.live[job.request as usize].as_mut()?;
        live.transfer.as_mut().filter(|transfer| transfer.job == job)
    }

    /// Sends what is computed and asked for. Each end's link takes one run of blocks after the other.
    fn send(&mut self, job: Job) {
        let now = seconds(self.queue.now());
        let Machine { prices, sizes } = self.cluster.machine;
        let Some(live) = self.live[job.request as usize].as_mut() else { return };
        let Some(transfer) = live.transfer.as_mut().filter(|transfer| transfer.job == job) else { return };
        if !transfer.is_asked_for {
            return;
        }
        let (from, to) = (transfer.from as usize, transfer.to as usize);
        let tokens = transfer.computed.saturating_sub(transfer.sent);
        if tokens > 0 {
            let start = now.max(self.workers[from].sends_until).max(self.workers[to].receives_until);
            let bytes = (tokens * sizes.kv_token_bytes) as f64;
            transfer.gone = start + bytes / prices.link_bytes_per_second;
            transfer.sent = transfer.computed;
            self.workers[from].sends_until = transfer.gone;
            self.workers[to].receives_until = transfer.gone;
            self.record.transferred_bytes += bytes;
        }
        if transfer.is_prefilled && transfer.sent >= transfer.total {
            let (worker, owner, gone) = (transfer.to, transfer.from, now.max(transfer.gone));
            self.queue.push(time(gone) + self.hop, Event::Fetched { worker, job, owner });
        }
    }

    /// A worker's word goes to the request's router.
    fn say(&mut self, request: u32, news: Heard) {
        self.queue.after(self.hop, Event::Heard { request, news });
    }

    /// Starts a step if the worker has work and none runs.
    fn step(&mut self, worker: u32) {
        let now = self.queue.now();
        let place = self.worker(worker);
        if let Some(seconds) = place.start_step() {
            let role = place.role;
            self.record.busy(role, now, seconds);
            self.queue.after(time(seconds), Event::StepEnds(worker));
        }
    }

    fn step_ends(&mut self, worker: u32) {
        let mut news = std::mem::take(&mut self.news);
        let place = self.worker(worker);
        let role = place.role;
        place.end_step(&mut news);
        for item in news.drain(..) {
            self.bring(role, item);
        }
        self.news = news;
        self.step(worker);
    }

    /// Passes on what a step has brought.
    fn bring(&mut self, from: Role, news: News) {
        match news {
            News::Issued { job, cached } => {
                self.say(job.request, Heard::Issued { attempt: job.attempt, cached });
            }
            News::Started { job, cached } => self.say(job.request, Heard::Started { cached }),
            News::Computed { job, tokens } => {
                if let Some(transfer) = self.transfer(job) {
                    transfer.computed = tokens;
                    if tokens < transfer.total {
                        self.send(job);
                    }
                }
            }
            News::First { job, is_last, cached, waited, took } => {
                let attempt = job.attempt;
                self.say(job.request, Heard::First { attempt, from, is_last, cached, waited, took });
                if let Some(transfer) = self.transfer(job).filter(|_| from == Role::Prefill) {
                    transfer.is_prefilled = true;
                    self.send(job);
                }
            }
            News::Next { job } => self.say(job.request, Heard::Next),
            News::Last { job } => self.say(job.request, Heard::Last { attempt: job.attempt }),
            News::TooLong { job } => {
                let reason = Reason::InvalidArgument;
                self.say(job.request, Heard::Refused { attempt: job.attempt, from, reason });
            }
        }
    }
}

/// Virtual time of that many seconds.
fn time(seconds: f64) -> Time {
    (seconds * 1e9).round() as Time
}

fn seconds(time: Time) -> f64 {
    time as f64 / 1e9
}

#[cfg(test)]
mod tests;
