//! A schedule while it runs: the virtual clock, the queue of what is to happen, and the nodes it happens to.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use proto::{Attempt, Error, WorkerEpoch};

use crate::checks::{Check, Truth, ensure};
use crate::clients::Client;
use crate::faults::{Armed, Marks};
use crate::network::{Answer, Call, CallKey, KEEP_ALIVE};
use crate::plan::{PATIENT, Plan};
use crate::rng::Rng;
use crate::routers::RouterNode;
use crate::table::{Phase, Table};
use crate::workers::{LEASE_TTL, WorkerNode};

/// A process: 0 is all the gateways, 1 the adversary, then come routers, prefill and decode workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Node(pub(crate) usize);

pub(crate) const GATEWAY: Node = Node(0);
pub(crate) const ADVERSARY: Node = Node(1);
const FIRST_ROUTER: usize = 2;

/// What is known of a process from outside.
#[derive(Debug)]
pub(crate) struct NodeState {
    pub(crate) name: String,
    pub(crate) life: u32,
    pub(crate) up: bool,
    /// It stands still until then; what reaches it waits.
    pub(crate) silent_until: Duration,
    backlog: Vec<What>,
}

impl NodeState {
    pub(crate) fn is_life(&self, life: u32) -> bool {
        self.up && self.life == life
    }
}

/// Something that is to happen.
#[derive(Clone, Debug)]
pub(crate) enum What {
    /// A client makes its request.
    Arrive(usize),
    Open(CallKey),
    /// An item, and whether it is not what was sent.
    Item(CallKey, Box<Answer>, bool),
    End(CallKey, Result<(), Error>),
    CallerLost(CallKey),
    ServerLost(CallKey),
    TimeOut(CallKey),
    Credit(CallKey),
    /// A worker computes, if that life of it is still there.
    Step(Node, u32),
    /// A worker wanted to be woken, or it is time to look at it.
    Wake(Node, u32),
    /// A dispatch wanted to be woken.
    Tick(Node, u32, CallKey),
    /// A dispatch should be over.
    Audit(Node, u32, CallKey),
    /// Nothing of the request up to that attempt should be left anywhere.
    Relieved(usize, Attempt),
    /// A router asks the workers how they are.
    Poll(Node, u32),
    ClientTick(usize),
    ClientDeadline(usize),
    /// A planned fault strikes.
    Fault(usize),
    Restart(Node),
    Awake(Node),
    /// Two nodes have not heard of each other for too long.
    CutNoticed(Node, Node),
    Silence(Node),
    Healed,
}

#[derive(Debug)]
struct Entry {
    at: Duration,
    order: u64,
    what: What,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// A schedule while it runs.
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) rng: Rng,
    pub(crate) now: Duration,
    queue: BinaryHeap<Reverse<Entry>>,
    order: u64,
    pub(crate) nodes: Vec<NodeState>,
    pub(crate) calls: Vec<Call>,
    /// Calls that may still be open at one end.
    pub(crate) open_calls: BTreeSet<CallKey>,
    pub(crate) routers: Vec<RouterNode>,
    pub(crate) workers: Vec<WorkerNode>,
    pub(crate) clients: Vec<Client>,
    pub(crate) cuts: BTreeMap<(Node, Node), Duration>,
    pub(crate) armed: Vec<Armed>,
    /// By request.
    pub(crate) marks: Vec<Marks>,
    /// How many times each request has entered each phase, and where it is.
    pub(crate) entered: Vec<([usize; Phase::ALL.len()], Option<Phase>)>,
    pub(crate) captured: Vec<proto::Handoff>,
    /// Restarts and healings that are still to come.
    pub(crate) healing: usize,
    /// A fault has struck that may keep the news of a request's end from a worker.
    pub(crate) is_disturbed: bool,
    /// Routers look at the workers; no more once everything is to come to rest.
    pub(crate) is_polling: bool,
    pub(crate) table: Table,
    pub(crate) events: u64,
    /// References issued by prefill and decode workers.
    pub(crate) handoffs: u64,
    /// Sequences that went on at another decode worker.
    pub(crate) moves: u64,
    pub(crate) trace: Option<Vec<String>>,
}

/// Longest schedule in virtual time before it counts as one that never ends.
const LONGEST: Duration = Duration::from_mins(10);
/// Most events of a schedule.
const EVENTS_MAX: u64 = 300_000;

impl World {
    /// The schedule of that seed, not started.
    pub(crate) fn new(seed: u64, traced: bool) -> Self {
        let mut rng = Rng::new(seed);
        let plan = Plan::draw(&mut rng);
        let mut names = vec!["gateway".to_owned(), "adversary".to_owned()];
        names.extend((0..plan.routers).map(|index| format!("router-{index}")));
        names.extend((0..plan.prefills).map(|index| format!("prefill-{index}")));
        names.extend((0..plan.decodes).map(|index| format!("decode-{index}")));
        let nodes = names
            .into_iter()
            .map(|name| NodeState {
                name,
                life: 0,
                up: true,
                silent_until: Duration::ZERO,
                backlog: Vec::new(),
            })
            .collect();
        let requests = plan.requests.len();
        let mut world = Self {
            plan,
            rng,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            order: 0,
            nodes,
            calls: Vec::new(),
            open_calls: BTreeSet::new(),
            routers: Vec::new(),
            workers: Vec::new(),
            clients: Vec::new(),
            cuts: BTreeMap::new(),
            armed: Vec::new(),
            marks: vec![Marks::default(); requests],
            entered: vec![Default::default(); requests],
            captured: Vec::new(),
            healing: 0,
            is_disturbed: false,
            is_polling: true,
            table: Table::default(),
            events: 0,
            handoffs: 0,
            moves: 0,
            trace: traced.then(Vec::new),
        };
        let first_worker = FIRST_ROUTER + world.plan.routers;
        for index in first_worker..world.nodes.len() {
            let worker = world.new_worker(Node(index));
            world.workers.push(worker);
        }
        for index in FIRST_ROUTER..first_worker {
            let router = world.new_router(true);
            world.routers.push(router);
            world.push(Duration::ZERO, What::Poll(Node(index), 0));
        }
        for request in 0..requests {
            world.clients.push(Client::default());
            world.push(world.plan.requests[request].at, What::Arrive(request));
        }
        world
    }

    /// Runs the schedule to its end and checks everything on the way.
    pub(crate) fn run(&mut self) -> Check {
        self.run_until(Self::is_settled)?;
        self.check_undisturbed()?;
        self.come_to_rest()?;
        self.probe()
    }

    /// Where nothing was broken, nothing but its own deadline ends a request early.
    fn check_undisturbed(&self) -> Check {
        for (client, planned) in self.clients.iter().zip(&self.plan.requests) {
            let is_undisturbed = self.plan.faults.is_empty() && planned.time_left == PATIENT;
            let outcome = client.outcome();
            ensure(!is_undisturbed || outcome == Some(Ok(())), "liveness", || {
                format!("an undisturbed request ended with {outcome:?}")
            })?;
        }
        Ok(())
    }

    /// Everything stops but what is under way; one lease later nothing may be left (I4).
    fn come_to_rest(&mut self) -> Check {
        self.is_polling = false;
        self.armed.clear();
        self.note(|_| "-- all requests are over and all faults are healed".into());
        let ends = self.now + KEEP_ALIVE + LEASE_TTL + Duration::from_secs(2);
        self.run_until(|world| world.next_at().is_none_or(|at| at > ends))?;
        self.now = ends;
        for index in 0..self.workers.len() {
            self.check_empty(index)?;
        }
        Ok(())
    }

    /// In a whole and idle cluster, a request succeeds.
    fn probe(&mut self) -> Check {
        self.note(|_| "-- one more request, undisturbed".into());
        for index in 0..self.workers.len() {
            if self.workers[index].is_draining {
                let node = self.workers[index].node;
                self.crash(node, Duration::ZERO);
                self.restart(node);
            }
        }
        self.is_polling = true;
        for index in 0..self.routers.len() {
            let node = Node(FIRST_ROUTER + index);
            self.push(Duration::ZERO, What::Poll(node, self.nodes[node.0].life));
        }
        let base = self.plan.requests[0].prompt.clone();
        let mut prompt = base;
        prompt.truncate(8);
        prompt.push(7);
        self.plan.requests.push(Plan::last_request(prompt));
        let request = self.clients.len();
        self.clients.push(Client::default());
        self.entered.push(Default::default());
        self.marks.push(Marks::default());
        // Time for every router to hear of every worker again.
        self.push(Duration::from_secs(3), What::Arrive(request));
        self.run_until(|world| world.clients[request].is_over())?;
        let outcome = self.clients[request].outcome();
        ensure(outcome == Some(Ok(())), "liveness", || {
            format!("a request to a whole and idle cluster ended with {outcome:?}")
        })?;
        self.come_to_rest()
    }

    fn run_until(&mut self, is_done: impl Fn(&Self) -> bool) -> Check {
        while !is_done(self) {
            let Some(Reverse(entry)) = self.queue.pop() else { return Ok(()) };
            self.now = self.now.max(entry.at);
            self.events += 1;
            ensure(self.now < LONGEST && self.events < EVENTS_MAX, "liveness", || {
                format!("no end after {} events and {:?}", self.events, self.now)
            })?;
            self.happen(entry.what)?;
        }
        Ok(())
    }

    fn next_at(&self) -> Option<Duration> {
        self.queue.peek().map(|Reverse(entry)| entry.at)
    }

    /// All clients have their answers, for a while already, and every fault is healed.
    fn is_settled(&self) -> bool {
        let pause = Duration::from_millis(200);
        self.healing == 0 && self.clients.iter().all(|it| it.over_at.is_some_and(|at| at + pause < self.now))
    }

    /// Lets one thing happen.
    fn happen(&mut self, what: What) -> Check {
        if let Some(node) = self.node_of(&what)
            && self.nodes[node.0].silent_until > self.now
        {
            self.nodes[node.0].backlog.push(what);
            return Ok(());
        }
        if self.trace.is_some() {
            self.trace_event(&what);
        }
        match what {
            What::Arrive(request) => self.arrive(request),
            What::Open(call) if self.calls[call].is_opening => self.opened(call),
            What::Item(call, answer, is_bad) if self.is_heard(call) => self.heard(call, *answer, is_bad),
            What::End(call, outcome) if self.is_heard(call) => {
                self.calls[call].at_caller = false;
                self.ended(call, outcome, false)
            }
            What::CallerLost(call) if self.is_heard(call) => {
                self.calls[call].at_caller = false;
                self.ended(call, Err(crate::network::lost("the connection broke")), true)
            }
            What::TimeOut(call) if self.is_heard(call) => {
                self.cancel(call);
                self.ended(call, Err(crate::network::lost("no answer in time")), true)
            }
            What::ServerLost(call) if self.is_served(call) => {
                self.calls[call].at_server = false;
                self.dropped(call)
            }
            // What was on its way is lost with its connection.
            What::ServerLost(call) => {
                self.calls[call].is_opening = false;
                Ok(())
            }
            What::Credit(call) if self.is_served(call) => self.credit(call, 1),
            What::Step(node, life) if self.nodes[node.0].is_life(life) => self.step(node),
            What::Wake(node, life) if self.nodes[node.0].is_life(life) => self.wake(node),
            What::Tick(node, life, call) if self.nodes[node.0].is_life(life) => self.tick(node, call),
            What::Audit(node, life, call) if self.nodes[node.0].is_life(life) => self.audit(node, call),
            What::Relieved(request, attempt) => self.check_relieved(request, attempt),
            What::Poll(node, life) if self.nodes[node.0].is_life(life) => {
                self.poll(node);
                Ok(())
            }
            What::ClientTick(request) => self.client_tick(request),
            What::ClientDeadline(request) => self.client_deadline(request),
            What::Fault(index) => self.fault(index),
            What::Restart(node) => {
                self.healing -= 1;
                self.restart(node);
                Ok(())
            }
            What::Awake(node) => {
                self.healing -= 1;
                for what in std::mem::take(&mut self.nodes[node.0].backlog) {
                    self.push(Duration::ZERO, what);
                }
                Ok(())
            }
            What::CutNoticed(a, b) => {
                self.break_calls(Duration::ZERO, |call| joins(call, a, b));
                Ok(())
            }
            What::Silence(node) => {
                self.break_calls(Duration::ZERO, |call| call.from == node || call.to == node);
                Ok(())
            }
            What::Healed => {
                self.healing -= 1;
                Ok(())
            }
            _ => Ok(()),
        }?;
        self.watch_phases();
        Ok(())
    }

    /// The process to which it happens, if it is one that may stand still.
    fn node_of(&self, what: &What) -> Option<Node> {
        match what {
            What::Open(call) | What::ServerLost(call) | What::Credit(call) => Some(self.calls[*call].to),
            What::Item(call, ..) | What::End(call, _) | What::CallerLost(call) | What::TimeOut(call) => {
                Some(self.calls[*call].from)
            }
            What::Step(node, _)
            | What::Wake(node, _)
            | What::Tick(node, ..)
            | What::Poll(node, _)
            | What::Audit(node, ..) => Some(*node),
            _ => None,
        }
    }

    /// A call reaches its server.
    fn opened(&mut self, key: CallKey) -> Check {
        let to = self.calls[key].to;
        if !self.nodes[to.0].up {
            self.calls[key].is_opening = false;
            let after = self.delay();
            self.push(after, What::CallerLost(key));
            return Ok(());
        }
        self.accept(key);
        if self.is_router(to) { self.router_asked(key) } else { self.worker_asked(key) }
    }

    fn heard(&mut self, key: CallKey, answer: Answer, is_bad: bool) -> Check {
        match self.calls[key].from {
            GATEWAY => self.client_heard(key, answer),
            ADVERSARY => Ok(()),
            from if self.is_router(from) => self.router_heard(key, answer),
            _ => self.worker_heard(key, answer, is_bad),
        }
    }

    fn ended(&mut self, key: CallKey, outcome: Result<(), Error>, is_lost: bool) -> Check {
        match self.calls[key].from {
            GATEWAY => self.client_ended(key, outcome, is_lost),
            ADVERSARY => Ok(()),
            from if self.is_router(from) => self.router_ended(key, outcome, is_lost),
            _ => self.worker_ended(key, outcome),
        }
    }

    fn dropped(&mut self, key: CallKey) -> Check {
        if self.is_router(self.calls[key].to) { self.router_dropped(key) } else { self.worker_dropped(key) }
    }

    /// What is to happen `after` now.
    pub(crate) fn push(&mut self, after: Duration, what: What) {
        self.push_at(self.now + after, what);
    }

    pub(crate) fn push_at(&mut self, at: Duration, what: What) {
        self.order += 1;
        self.queue.push(Reverse(Entry { at, order: self.order, what }));
    }

    pub(crate) fn truth(&self) -> Truth<'_> {
        Truth { requests: &self.plan.requests, now: self.now }
    }

    pub(crate) fn is_router(&self, node: Node) -> bool {
        (FIRST_ROUTER..FIRST_ROUTER + self.plan.routers).contains(&node.0)
    }

    /// The place of a router or worker in its table.
    pub(crate) fn index(&self, node: Node) -> usize {
        if self.is_router(node) { node.0 - FIRST_ROUTER } else { node.0 - FIRST_ROUTER - self.plan.routers }
    }

    pub(crate) fn router_nodes(&self) -> impl Iterator<Item = Node> + use<> {
        (FIRST_ROUTER..FIRST_ROUTER + self.plan.routers).map(Node)
    }

    /// The node of that address.
    pub(crate) fn named(&self, address: &str) -> Option<Node> {
        self.nodes.iter().position(|node| node.name == address).map(Node)
    }

    pub(crate) fn name(&self, node: Node) -> &str {
        &self.nodes[node.0].name
    }

    pub(crate) fn silent_until(&self, node: Node) -> Duration {
        self.nodes[node.0].silent_until
    }

    /// An epoch that no other life of any worker has.
    pub(crate) fn epoch(&self, node: Node) -> WorkerEpoch {
        WorkerEpoch((node.0 as u64) << 32 | u64::from(self.nodes[node.0].life) << 1 | 1)
    }

    pub(crate) fn cut_until(&self, a: Node, b: Node) -> Option<Duration> {
        self.cuts.get(&(a.min(b), a.max(b))).copied().filter(|until| *until > self.now)
    }

    /// A process dies; who was connected to it learns it `after` that.
    pub(crate) fn crash(&mut self, node: Node, after: Duration) {
        self.break_calls(after, |call| call.from == node || call.to == node);
        let state = &mut self.nodes[node.0];
        state.up = false;
        state.life += 1;
        state.silent_until = Duration::ZERO;
        state.backlog.clear();
        self.note(|world| format!("** {} dies", world.name(node)));
    }

    /// A process starts, empty.
    pub(crate) fn restart(&mut self, node: Node) {
        self.nodes[node.0].up = true;
        let index = self.index(node);
        if self.is_router(node) {
            self.routers[index] = self.new_router(false);
            self.push(Duration::ZERO, What::Poll(node, self.nodes[node.0].life));
        } else {
            self.workers[index] = self.new_worker(node);
        }
        self.note(|world| format!("** {} starts again", world.name(node)));
    }
}

pub(crate) fn joins(call: &Call, a: Node, b: Node) -> bool {
    (call.from == a && call.to == b) || (call.from == b && call.to == a)
}
