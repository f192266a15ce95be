//! Prefill and decode workers: the shell around a core, in virtual time. It carries messages and adds no rule.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use decode_worker::core::DecodeCore;
use engine::Engine;
use engine::SequenceCounts;
use prefill_worker::core::PrefillCore;
use proto::worker::PROTOCOL_VERSION;
use proto::{Digest, Error, Handoff, KvDtype, KvLayout, ModelDescription, Role, WorkerDescription};
use worker::core::{Action, CallId, Core, DecodeItem, Event, FetchItem, PrefillItem};
use worker::core_config::{CoreConfig, HandoffIds};

use crate::checks::{Check, DecodeWatch, OwnerWatch, ensure};
use crate::network::{Answer, Ask, CallKey, Purpose};
use crate::oracle::{MODEL, StrayModel};
use crate::world::{Node, What, World};

/// The checkpoint of every worker.
pub(crate) const FINGERPRINT: Digest = Digest([7; 32]);
pub(crate) const MODEL_NAME: &str = "sim";
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(10);

/// One life of a worker.
pub(crate) struct WorkerNode {
    pub(crate) node: Node,
    pub(crate) role: Role,
    core: Box<dyn Core>,
    description: WorkerDescription,
    /// A step is due.
    is_stepping: bool,
    /// The wake that was asked for last.
    wake: Option<Duration>,
    /// The calls that the core opened.
    outgoing: BTreeMap<CallId, CallKey>,
    /// Fetches whose end has come.
    complete: BTreeMap<CallId, bool>,
    pub(crate) owner: OwnerWatch,
    pub(crate) decode: DecodeWatch,
    pub(crate) is_draining: bool,
    /// Set to overwrite blocks in the next step.
    pub(crate) stray: Arc<AtomicBool>,
}

/// A peer's call, as the core knows it: the shell draws even numbers.
fn call_id(key: CallKey) -> CallId {
    CallId(2 * key as u64 + 2)
}

fn call_key(id: CallId) -> CallKey {
    (id.0 / 2 - 1) as CallKey
}

impl WorkerNode {
    /// What it says about itself.
    pub(crate) fn description(&self) -> WorkerDescription {
        WorkerDescription { draining: self.is_draining, ..self.description.clone() }
    }
}

impl World {
    /// A worker that has just started.
    pub(crate) fn new_worker(&mut self, node: Node) -> WorkerNode {
        let index = self.index(node);
        let role = if index < self.plan.prefills { Role::Prefill } else { Role::Decode };
        let model = ModelDescription {
            name: MODEL_NAME.into(),
            fingerprint: FINGERPRINT,
            tokenizer: Digest([9; 32]),
            context_len: MODEL.context_len,
            vocab_size: MODEL.vocab,
            numerics: "sim".into(),
        };
        let epoch = self.epoch(node);
        let mut config = CoreConfig::new(self.name(node), epoch, model.clone());
        config.lease_ttl = LEASE_TTL;
        // Two lives of a worker draw the same ids: only the epoch tells their references apart.
        config.handoff_ids = HandoffIds::Seeded(node.0 as u64);
        let engine = if role == Role::Prefill { self.plan.prefill_engine } else { self.plan.decode_engine };
        let description = WorkerDescription {
            protocol: PROTOCOL_VERSION,
            epoch,
            role,
            model,
            layout: KvLayout {
                layers: MODEL.layers,
                kv_heads: MODEL.kv_heads,
                head_dim: MODEL.head_dim,
                dtype: KvDtype::F16,
                block_tokens: engine.block_tokens,
            },
            draining: false,
            blocks_total: engine.kv_blocks,
            blocks_free: engine.kv_blocks,
            sequences: 0,
        };
        let stray = Arc::new(AtomicBool::new(false));
        let engine =
            Engine::new(StrayModel::new(Arc::clone(&stray)), engine).expect("a plan's sizes are valid");
        let core: Box<dyn Core> = match role {
            Role::Prefill => Box::new(PrefillCore::new(engine, config)),
            _ => Box::new(DecodeCore::new(engine, config)),
        };
        WorkerNode {
            node,
            role,
            core,
            description,
            is_stepping: false,
            wake: None,
            outgoing: BTreeMap::new(),
            complete: BTreeMap::new(),
            owner: OwnerWatch::new(epoch, LEASE_TTL, role == Role::Decode),
            decode: DecodeWatch::default(),
            is_draining: false,
            stray,
        }
    }

    /// Gives the core an event, carries out what it wants, and checks both.
    pub(crate) fn on_worker(&mut self, index: usize, event: Event, is_bad: bool) -> Check {
        let mut actions = Vec::new();
        let now = self.now;
        let truth = crate::checks::Truth { requests: &self.plan.requests, now };
        let worker = &mut self.workers[index];
        worker.owner.pass(now);
        worker.owner.take(&event, now);
        if worker.role == Role::Decode {
            worker.decode.take(&event, is_bad, truth);
        }
        worker.core.on(event, now, &mut actions);
        self.carry_out(index, actions)
    }

    pub(crate) fn step(&mut self, node: Node) -> Check {
        let index = self.index(node);
        let now = self.now;
        let mut actions = Vec::new();
        let worker = &mut self.workers[index];
        worker.is_stepping = false;
        worker.owner.pass(now);
        worker.core.step(&|| now, &mut actions);
        self.carry_out(index, actions)
    }

    pub(crate) fn wake(&mut self, node: Node) -> Check {
        let index = self.index(node);
        self.on_worker(index, Event::Tick, false)
    }

    fn carry_out(&mut self, index: usize, actions: Vec<Action>) -> Check {
        self.check_actions(index, &actions)?;
        let (node, now) = (self.workers[index].node, self.now);
        for action in actions {
            self.act(index, action)?;
        }
        let worker = &mut self.workers[index];
        let life = self.nodes[node.0].life;
        if worker.core.has_work() && !std::mem::replace(&mut worker.is_stepping, true) {
            self.push(self.plan.step, What::Step(node, life));
        }
        let worker = &mut self.workers[index];
        if let Some(wake) = worker.core.next_wake()
            && worker.wake.is_none_or(|asked| asked <= now || asked > wake)
        {
            worker.wake = Some(wake);
            self.push_at(wake.max(now), What::Wake(node, life));
        }
        Ok(())
    }

    fn check_actions(&mut self, index: usize, actions: &[Action]) -> Check {
        let truth = crate::checks::Truth { requests: &self.plan.requests, now: self.now };
        let worker = &mut self.workers[index];
        let by = self.nodes[worker.node.0].name.as_str();
        let gauges = worker.core.gauges();
        let blocks = gauges.blocks;
        ensure(blocks.free + blocks.cached + blocks.used == blocks.total, "accounting", || {
            format!("{by}: {blocks:?}")
        })?;
        ensure(gauges.orphaned_blocks == 0, "I4", || {
            format!("{by}: {} orphaned blocks", gauges.orphaned_blocks)
        })?;
        ensure(gauges.leases == 0 || !worker.core.is_idle(), "I4", || {
            format!("{by}: idle, and would end, while it holds {} hand-offs", gauges.leases)
        })?;
        worker.owner.check(actions, truth, by)?;
        worker.owner.check_gauges(&gauges, by)?;
        if worker.role == Role::Prefill {
            return Ok(());
        }
        worker.decode.check(actions, truth, by)?;
        worker.decode.check_gauges(&gauges, by)
    }

    fn act(&mut self, index: usize, action: Action) -> Check {
        let node = self.workers[index].node;
        match action {
            Action::Prefill { call, item } => {
                if let PrefillItem::Issued { handoff, .. } = &item {
                    self.captured.push(handoff.clone());
                    self.handoffs += 1;
                    self.marked(call_key(call), |marks| marks.issued = true);
                }
                self.answer(call_key(call), Answer::Prefill(item));
            }
            Action::Decode { call, item } => {
                if let DecodeItem::Moved { handoff } = &item {
                    self.captured.push(handoff.clone());
                    self.handoffs += 1;
                }
                self.marked(call_key(call), |marks| match &item {
                    DecodeItem::Admitted { .. } => marks.admitted = true,
                    DecodeItem::Token(_) => marks.decoding = true,
                    DecodeItem::Moved { .. } => marks.moved_away(),
                });
                self.answer(call_key(call), Answer::Decode(item));
            }
            Action::Fetch { call, item } => self.answer(call_key(call), Answer::Fetch(item)),
            Action::Close { call, error } => self.end(call_key(call), error.map_or(Ok(()), Err)),
            Action::Renewed { call, result } => {
                let key = call_key(call);
                if let Ask::Renew(handoff) = self.calls[key].ask.clone() {
                    let (now, by) = (self.now, self.nodes[node.0].name.as_str());
                    let worker = &mut self.workers[index];
                    worker.owner.check_renewal(&handoff, result.is_ok(), now, by)?;
                }
                match result {
                    Ok(ttl) => {
                        self.answer(key, Answer::Lease(ttl));
                        self.end(key, Ok(()));
                    }
                    Err(error) => self.end(key, Err(error)),
                }
            }
            Action::StartFetch { call, handoff, skip, .. } => {
                if let Some(owner) = self.named(&handoff.owner) {
                    let key = self.open(node, owner, Ask::Fetch(handoff, skip), Purpose::Fetch(call));
                    self.workers[index].outgoing.insert(call, key);
                }
            }
            Action::DropFetch { call } => {
                if let Some(key) = self.workers[index].outgoing.remove(&call) {
                    self.cancel(key);
                }
            }
            Action::Renew { call, handoff } => {
                if let Some(owner) = self.named(&handoff.owner) {
                    self.open(node, owner, Ask::Renew(handoff), Purpose::Renew(call));
                }
            }
            Action::Release { handoff } => self.release(node, handoff, 1),
        }
        Ok(())
    }

    fn release(&mut self, node: Node, handoff: Handoff, more: usize) {
        if let Some(owner) = self.named(&handoff.owner) {
            let purpose = Purpose::Release(handoff.clone(), more);
            self.open(node, owner, Ask::Release(handoff), purpose);
        }
    }

    /// A call came to a worker.
    pub(crate) fn worker_asked(&mut self, key: CallKey) -> Check {
        let index = self.index(self.calls[key].to);
        let call = call_id(key);
        match self.calls[key].ask.clone() {
            Ask::Prefill(generation) => self.on_worker(index, Event::Prefill { call, generation }, false),
            Ask::Decode(generation, handoff) => {
                self.on_worker(index, Event::Decode { call, generation, handoff }, false)
            }
            Ask::Fetch(handoff, skip) => {
                self.on_worker(index, Event::Fetch { call, handoff, skip }, false)?;
                if self.is_served(key) { self.credit(key, self.plan.window) } else { Ok(()) }
            }
            Ask::Renew(handoff) => self.on_worker(index, Event::Renew { call, handoff }, false),
            Ask::Release(handoff) => {
                self.on_worker(index, Event::Release { handoff }, false)?;
                self.end(key, Ok(()));
                Ok(())
            }
            Ask::Fence(request, attempt) => {
                self.on_worker(index, Event::Fence { request, attempt }, false)?;
                self.end(key, Ok(()));
                Ok(())
            }
            Ask::Move(request, attempt) => {
                self.on_worker(index, Event::Move { request, attempt }, false)?;
                self.end(key, Ok(()));
                Ok(())
            }
            Ask::Describe => {
                let description = self.workers[index].description();
                self.answer(key, Answer::Description(Box::new(description)));
                self.end(key, Ok(()));
                Ok(())
            }
            Ask::Route(_) => ensure(false, "contract", || "a worker was asked to route".into()),
        }
    }

    pub(crate) fn credit(&mut self, key: CallKey, items: usize) -> Check {
        let index = self.index(self.calls[key].to);
        self.on_worker(index, Event::FetchCredit { call: call_id(key), items }, false)
    }

    pub(crate) fn worker_dropped(&mut self, key: CallKey) -> Check {
        let index = self.index(self.calls[key].to);
        self.on_worker(index, Event::Dropped { call: call_id(key) }, false)
    }

    /// An answer to a call that a worker opened.
    pub(crate) fn worker_heard(&mut self, key: CallKey, answer: Answer, is_bad: bool) -> Check {
        let index = self.index(self.calls[key].from);
        match (self.calls[key].purpose.clone(), answer) {
            (Purpose::Fetch(call), Answer::Fetch(item)) => {
                let is_end = matches!(item, FetchItem::End { .. });
                self.marked(key, |marks| {
                    marks.arriving = true;
                    marks.arrived |= is_end;
                });
                if is_end {
                    self.workers[index].complete.insert(call, true);
                }
                self.on_worker(index, Event::Fetched { call, item }, is_bad)
            }
            (Purpose::Renew(call), Answer::Lease(ttl)) => {
                self.on_worker(index, Event::RenewAnswered { call, result: Ok(ttl) }, false)
            }
            _ => Ok(()),
        }
    }

    /// A call that a worker opened has ended.
    pub(crate) fn worker_ended(&mut self, key: CallKey, outcome: Result<(), Error>) -> Check {
        let from = self.calls[key].from;
        let index = self.index(from);
        match (self.calls[key].purpose.clone(), outcome) {
            (Purpose::Fetch(call), outcome) => {
                if self.workers[index].complete.remove(&call).is_some() {
                    return Ok(());
                }
                let early = || Error::new(proto::Reason::Truncated, "the fetch ended before its last item");
                let error = outcome.err().unwrap_or_else(early);
                self.on_worker(index, Event::FetchFailed { call, error }, false)
            }
            (Purpose::Renew(call), Err(error)) => {
                self.on_worker(index, Event::RenewAnswered { call, result: Err(error) }, false)
            }
            (Purpose::Release(handoff, more), Err(_)) if more > 0 => {
                self.release(from, handoff, more - 1);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Nothing is left of anything (I4).
    pub(crate) fn check_empty(&self, index: usize) -> Check {
        let worker = &self.workers[index];
        let (gauges, name) = (worker.core.gauges(), self.name(worker.node));
        let is_empty = gauges.leases == 0
            && gauges.blocks.held == 0
            && gauges.blocks.used == 0
            && gauges.sequences == SequenceCounts::default();
        ensure(is_empty, "I4", || format!("{name}: a lease after everything has ended: {gauges:?}"))?;
        ensure(worker.core.is_idle(), "I4", || format!("{name}: has nothing left, and is not idle"))
    }
}
