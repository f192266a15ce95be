//! Routers: the shell around pools and dispatches, in virtual time.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::{Error, Role};
use router::dispatch::{Action, Dispatch, DispatchConfig, Emission, Event};
use router::pools::{Change, Pools};
use worker::core::{DecodeItem, PrefillItem};

use crate::checks::{Check, DispatchWatch, ensure};
use crate::network::{Answer, Ask, CallKey, Purpose};
use crate::relief::RELIEF;
use crate::world::{Node, What, World};

/// How often workers are asked how they are.
const POLL_EVERY: Duration = Duration::from_millis(700);

/// One life of a router.
pub(crate) struct RouterNode {
    pools: Pools,
    /// By the gateway's call.
    requests: BTreeMap<CallKey, Routed>,
}

struct Routed {
    dispatch: Dispatch,
    prefill: Option<CallKey>,
    decode: Option<CallKey>,
    watch: DispatchWatch,
}

impl World {
    /// A router that knows the workers' addresses, and more when it is there from the start.
    pub(crate) fn new_router(&self, from_the_start: bool) -> RouterNode {
        let mut pools = Pools::new();
        pools.set_members(self.workers.iter().map(|worker| (worker.role, self.name(worker.node))));
        if from_the_start {
            for worker in &self.workers {
                pools.described(self.name(worker.node), worker.description());
            }
        }
        RouterNode { pools, requests: BTreeMap::new() }
    }

    /// A gateway's call has come.
    pub(crate) fn router_asked(&mut self, key: CallKey) -> Check {
        let Ask::Route(generation) = self.calls[key].ask.clone() else {
            return ensure(false, "contract", || "a router was asked for something else than a route".into());
        };
        let node = self.calls[key].to;
        let index = self.index(node);
        let config = DispatchConfig { placement: self.plan.placement, ..DispatchConfig::default() };
        let audit = self.now + generation.time_left + Duration::from_millis(1);
        self.push_at(audit, What::Audit(node, self.nodes[node.0].life, key));
        let routed = Routed {
            watch: DispatchWatch::new(&generation),
            dispatch: Dispatch::new(generation, config),
            prefill: None,
            decode: None,
        };
        self.routers[index].requests.insert(key, routed);
        self.on_dispatch(index, key, Event::Start)
    }

    fn on_dispatch(&mut self, index: usize, key: CallKey, event: Event) -> Check {
        let truth = crate::checks::Truth { requests: &self.plan.requests, now: self.now };
        let router = &mut self.routers[index];
        let Some(routed) = router.requests.get_mut(&key) else { return Ok(()) };
        let mut actions = Vec::new();
        routed.dispatch.on(event, &router.pools, self.now, &mut actions);
        routed.watch.check(&actions, truth)?;
        let is_finished = routed.watch.finished;
        let node = self.calls[key].to;
        for action in actions {
            self.route(index, node, key, action);
        }
        if is_finished
            && let Some(routed) = self.routers[index].requests.remove(&key)
            && let Some(request) = self.calls[key].request
        {
            self.push(RELIEF, What::Relieved(request, routed.dispatch.generation().attempt));
        }
        Ok(())
    }

    fn route(&mut self, index: usize, node: Node, key: CallKey, action: Action) {
        match action {
            Action::StartPrefill { worker, generation } => {
                let purpose = Purpose::Prefill(key, generation.attempt);
                let call = self.call_worker(node, &worker, Ask::Prefill(generation), purpose);
                self.routed(index, key, |routed| routed.prefill = call);
            }
            Action::StartDecode { worker, generation, handoff } => {
                let purpose = Purpose::Decode(key, generation.attempt);
                self.continued(key, &worker, generation.attempt);
                let call = self.call_worker(node, &worker, Ask::Decode(generation, handoff), purpose);
                let mut earlier = None;
                self.routed(index, key, |routed| earlier = std::mem::replace(&mut routed.decode, call));
                // Its sequence has moved; nobody listens any more.
                if let Some(earlier) = earlier {
                    self.cancel(earlier);
                }
            }
            Action::DropPrefill => {
                let mut call = None;
                self.routed(index, key, |routed| call = routed.prefill.take());
                if let Some(call) = call {
                    self.cancel(call);
                }
            }
            Action::DropDecode => {
                let mut call = None;
                self.routed(index, key, |routed| call = routed.decode.take());
                if let Some(call) = call {
                    self.cancel(call);
                }
            }
            Action::Fence { worker, request, attempt } => {
                self.call_worker(node, &worker, Ask::Fence(request, attempt), Purpose::Nothing);
            }
            Action::Emit(emission) => {
                if let Emission::Placed(placed) = &emission {
                    self.placed(key, node, placed);
                }
                self.answer(key, Answer::Emission(emission));
            }
            Action::Finish(outcome) => self.end(key, outcome),
            Action::WakeAt(at) => {
                let life = self.nodes[node.0].life;
                self.push_at(at.max(self.now), What::Tick(node, life, key));
            }
            Action::Move { worker, request, attempt } => {
                self.call_worker(node, &worker, Ask::Move(request, attempt), Purpose::Nothing);
            }
            Action::Moved { from, to, outcome } => {
                self.moves += u64::from(outcome.is_ok());
                self.note(|_| format!("moved from {from} to {to:?}: {outcome:?}"));
            }
            Action::Retry { failed, cause } => {
                self.note(|world| format!("{}: attempt {} failed: {cause}", world.name(node), failed.0));
            }
        }
    }

    fn routed(&mut self, index: usize, key: CallKey, change: impl FnOnce(&mut Routed)) {
        if let Some(routed) = self.routers[index].requests.get_mut(&key) {
            change(routed);
        }
    }

    fn call_worker(&mut self, router: Node, worker: &str, ask: Ask, purpose: Purpose) -> Option<CallKey> {
        let worker = self.named(worker)?;
        Some(self.open(router, worker, ask, purpose))
    }

    /// The gateway went away.
    pub(crate) fn router_dropped(&mut self, key: CallKey) -> Check {
        let index = self.index(self.calls[key].to);
        self.on_dispatch(index, key, Event::ClientGone)
    }

    pub(crate) fn tick(&mut self, node: Node, key: CallKey) -> Check {
        let index = self.index(node);
        self.on_dispatch(index, key, Event::Tick)
    }

    /// By now the dispatch has ended, if only because of its deadline.
    pub(crate) fn audit(&mut self, node: Node, key: CallKey) -> Check {
        let is_over = !self.routers[self.index(node)].requests.contains_key(&key);
        ensure(is_over, "I6", || format!("{}: a dispatch goes on past its deadline", self.name(node)))
    }

    /// An item of a call that a router opened.
    pub(crate) fn router_heard(&mut self, key: CallKey, answer: Answer) -> Check {
        let index = self.index(self.calls[key].from);
        match (self.calls[key].purpose.clone(), answer) {
            (Purpose::Prefill(request, attempt), Answer::Prefill(item)) => {
                let event = match item {
                    PrefillItem::Issued { handoff, .. } => Event::PrefillIssued { attempt, handoff },
                    PrefillItem::Done { token, .. } => {
                        self.routed(index, request, |routed| routed.watch.prefill_ended());
                        Event::PrefillDone { attempt, token }
                    }
                };
                self.on_dispatch(index, request, event)
            }
            (Purpose::Decode(request, attempt), Answer::Decode(item)) => {
                let event = match item {
                    DecodeItem::Admitted { .. } => Event::DecodeAdmitted { attempt },
                    DecodeItem::Moved { handoff } => {
                        self.routed(index, request, |routed| routed.watch.decode_ended());
                        Event::DecodeMoved { attempt, handoff }
                    }
                    DecodeItem::Token(token) => {
                        if token.finish.is_some() {
                            self.routed(index, request, |routed| routed.watch.decode_ended());
                        }
                        Event::DecodeToken { attempt, token }
                    }
                };
                self.on_dispatch(index, request, event)
            }
            (Purpose::Describe(worker), Answer::Description(description)) => {
                let name = self.nodes[worker.0].name.clone();
                let changes = self.routers[index].pools.described(&name, *description);
                self.pools_changed(index, &changes)
            }
            _ => Ok(()),
        }
    }

    /// A call that a router opened has ended.
    pub(crate) fn router_ended(&mut self, key: CallKey, outcome: Result<(), Error>, is_lost: bool) -> Check {
        let index = self.index(self.calls[key].from);
        let error = outcome.err();
        if is_lost && let Some(error) = &error {
            let name = self.nodes[self.calls[key].to.0].name.clone();
            let changes = self.routers[index].pools.lost(&name, error.clone());
            self.pools_changed(index, &changes)?;
        }
        match self.calls[key].purpose {
            Purpose::Prefill(request, attempt) => {
                self.routed(index, request, |routed| {
                    if routed.prefill == Some(key) {
                        routed.watch.prefill_ended();
                    }
                });
                self.on_dispatch(index, request, Event::PrefillEnded { attempt, error })
            }
            Purpose::Decode(request, attempt) => {
                self.routed(index, request, |routed| {
                    if routed.decode == Some(key) {
                        routed.watch.decode_ended();
                    }
                });
                self.on_dispatch(index, request, Event::DecodeEnded { attempt, error })
            }
            _ => Ok(()),
        }
    }

    /// True while the router works on that request.
    pub(crate) fn is_routed(&self, request: usize) -> bool {
        let keys = self.routers.iter().flat_map(|router| router.requests.keys());
        keys.into_iter().any(|&key| self.calls[key].request == Some(request))
    }

    fn pools_changed(&mut self, index: usize, changes: &[Change]) -> Check {
        if changes.is_empty() {
            return Ok(());
        }
        let keys: Vec<_> = self.routers[index].requests.keys().copied().collect();
        keys.into_iter().try_for_each(|key| self.on_dispatch(index, key, Event::PoolsChanged))
    }

    /// Asks every worker how it is, and again after a while.
    pub(crate) fn poll(&mut self, node: Node) {
        if !self.is_polling {
            return;
        }
        for index in 0..self.workers.len() {
            let worker = self.workers[index].node;
            self.open(node, worker, Ask::Describe, Purpose::Describe(worker));
        }
        self.push(POLL_EVERY, What::Poll(node, self.nodes[node.0].life));
    }

    /// A worker of that role, or any.
    pub(crate) fn any_worker(&mut self, role: Role) -> Node {
        let nodes: Vec<_> = self.workers.iter().filter(|it| it.role == role).map(|it| it.node).collect();
        self.rng.pick(&nodes)
    }
}
