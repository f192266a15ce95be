//! What goes wrong: when, to whom, and in which phase of a request.

use std::sync::atomic::Ordering;

use engine::KvBlock;
use proto::{Attempt, Placed, Role, WorkerEpoch};
use worker::core::{Event, FetchItem};

use crate::checks::{Check, Violation};
use crate::network::{Answer, Ask, CallKey, KEEP_ALIVE, Purpose};
use crate::oracle::checksums;
use crate::table::{Fault, Phase};
use crate::world::{ADVERSARY, GATEWAY, Node, What, World, joins};

/// A fault that waits for the next message of its kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Armed {
    fault: Fault,
    request: usize,
    /// Where the request was when it was aimed at.
    phase: Option<Phase>,
}

/// How far the present attempt of a request has come, as an onlooker sees it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Marks {
    attempt: Attempt,
    router: Option<Node>,
    prefill: Option<Node>,
    decode: Option<Node>,
    /// The decode worker that gave it away last.
    source: Option<Node>,
    pub(crate) issued: bool,
    pub(crate) admitted: bool,
    pub(crate) arriving: bool,
    pub(crate) arrived: bool,
    pub(crate) decoding: bool,
}

impl Marks {
    /// Its decode worker has given the request away.
    pub(crate) fn moved_away(&mut self) {
        self.source = self.decode;
        (self.admitted, self.arriving, self.arrived, self.decoding) = (false, false, false, false);
    }
}

impl World {
    /// A router goes on with the request of that call at that decode worker.
    pub(crate) fn continued(&mut self, key: CallKey, worker: &str, attempt: Attempt) {
        let node = self.named(worker);
        if let Some(marks) = self.calls[key].request.and_then(|request| self.marks.get_mut(request))
            && marks.attempt == attempt
        {
            marks.decode = node;
        }
    }

    /// A router has placed the request of that call.
    pub(crate) fn placed(&mut self, key: CallKey, router: Node, placed: &Placed) {
        let Some(request) = self.calls[key].request else { return };
        let marks = Marks {
            attempt: placed.attempt,
            router: Some(router),
            prefill: placed.prefill.as_deref().and_then(|name| self.named(name)),
            decode: self.named(&placed.decode),
            ..Marks::default()
        };
        if self.marks[request].attempt <= placed.attempt {
            self.marks[request] = marks;
        }
    }

    /// Something was seen of the request of that call.
    pub(crate) fn marked(&mut self, key: CallKey, change: impl FnOnce(&mut Marks)) {
        let call = &self.calls[key];
        let attempt = match &call.ask {
            Ask::Prefill(generation) | Ask::Decode(generation, _) => generation.attempt,
            Ask::Fetch(handoff, _) => handoff.attempt,
            _ => return,
        };
        if let Some(marks) = call.request.and_then(|request| self.marks.get_mut(request))
            && marks.attempt == attempt
        {
            change(marks);
        }
    }

    /// Where the request is.
    pub(crate) fn phase(&self, request: usize) -> Option<Phase> {
        let client = &self.clients[request];
        if !client.has_arrived() {
            return None;
        }
        let id = proto::RequestId(format!("r{request}"));
        let is_held =
            || self.workers.iter().any(|worker| self.nodes[worker.node.0].up && worker.owner.holds(&id));
        let marks = &self.marks[request];
        if client.is_over() {
            return is_held().then_some(Phase::FinishedButHeld);
        }
        Some(if marks.decoding || marks.arrived {
            if is_held() { Phase::FinishedButHeld } else { Phase::Decoding }
        } else if marks.source.is_some() {
            Phase::Moving
        } else if marks.arriving {
            Phase::Transferring
        } else if marks.admitted {
            if marks.prefill.is_some() { Phase::Issued } else { Phase::Prefilling }
        } else if marks.issued {
            Phase::Prefilling
        } else {
            Phase::Queued
        })
    }

    /// Sees which requests have entered another phase, and lets the faults come that wait for that.
    pub(crate) fn watch_phases(&mut self) {
        for request in 0..self.clients.len() {
            let phase = self.phase(request);
            let (entered, last) = &mut self.entered[request];
            if *last == phase {
                continue;
            }
            *last = phase;
            let Some(phase) = phase else { continue };
            entered[phase as usize] += 1;
            let times = entered[phase as usize];
            for index in 0..self.plan.faults.len() {
                let planned = self.plan.faults[index];
                if (planned.request, planned.phase, planned.nth) == (request, phase, times) {
                    self.push(planned.after, What::Fault(index));
                }
            }
        }
    }

    /// A planned fault strikes, or waits for its message.
    pub(crate) fn fault(&mut self, index: usize) -> Check {
        let planned = self.plan.faults[index];
        let (fault, request) = (planned.fault, planned.request);
        let phase = self.phase(request);
        self.note(|_| format!("** {fault:?} at r{request} in {phase:?}"));
        let marks = self.marks[request].clone();
        let struck = match fault {
            Fault::Delay
            | Fault::Loss
            | Fault::Duplicate
            | Fault::Reorder
            | Fault::FlippedByte
            | Fault::ForgedBlock
            | Fault::Truncation => {
                self.armed.push(Armed { fault, request, phase });
                false
            }
            Fault::BrokenConnection => {
                let (a, b) = self.link(&marks);
                let after = self.delay();
                self.break_calls(after, |call| joins(call, a, b));
                true
            }
            Fault::Partition => self.partition(&marks),
            Fault::SilentPeer => {
                let node = self.any_node(&marks);
                self.silence(node)
            }
            Fault::PrefillCrash => {
                let node = marks.prefill.unwrap_or_else(|| self.any_worker(Role::Prefill));
                self.kill(node)
            }
            Fault::DecodeCrash => {
                let nodes: Vec<_> = [marks.source, marks.decode].into_iter().flatten().collect();
                let is_known = !nodes.is_empty();
                let node = if is_known { self.rng.pick(&nodes) } else { self.any_worker(Role::Decode) };
                self.kill(node)
            }
            Fault::RouterCrash => {
                let node = marks.router.or_else(|| self.router_nodes().next()).expect("a router");
                self.kill(node)
            }
            Fault::ClientCrash | Fault::Cancel => self.client_leaves(request, fault == Fault::ClientCrash)?,
            Fault::StaleReference | Fault::Replay | Fault::ForgedId | Fault::OtherEpoch => {
                self.attack(fault, request)
            }
            Fault::StrayWrite => self.stray(&marks),
            Fault::Drain => {
                let node = self.rng.pick(&[marks.prefill, marks.decode]);
                self.drain(node)?
            }
            Fault::DecodeDrain => self.drain(marks.decode)?,
            Fault::Deadline => false,
        };
        if let Some(phase) = phase.filter(|_| struck) {
            self.table.count(fault, phase);
        }
        self.is_disturbed |= struck && fault.disturbs_the_network();
        Ok(())
    }

    /// Two nodes that the request connects.
    fn link(&mut self, marks: &Marks) -> (Node, Node) {
        let router = marks.router.or_else(|| self.router_nodes().next()).expect("a router");
        let decode = marks.decode.unwrap_or_else(|| self.any_worker(Role::Decode));
        let owner = marks.source.or(marks.prefill);
        let prefill = owner.unwrap_or_else(|| self.any_worker(Role::Prefill));
        match self.rng.below(5) {
            0 => (GATEWAY, router),
            1 => (router, prefill),
            2 => (router, decode),
            _ => (decode, prefill),
        }
    }

    fn any_node(&mut self, marks: &Marks) -> Node {
        let nodes = [marks.router, marks.source.or(marks.prefill), marks.decode];
        let nodes: Vec<_> = nodes.into_iter().flatten().collect();
        if nodes.is_empty() { self.any_worker(Role::Decode) } else { self.rng.pick(&nodes) }
    }

    fn partition(&mut self, marks: &Marks) -> bool {
        let (a, b) = self.link(marks);
        let lasts = self.rng.millis(50, 14_000);
        self.cuts.insert((a.min(b), a.max(b)), self.now + lasts);
        self.healing += 1;
        self.push(lasts, What::Healed);
        if lasts > KEEP_ALIVE {
            self.push(KEEP_ALIVE, What::CutNoticed(a, b));
        }
        self.note(|world| format!("** {} and {} are cut off for {lasts:?}", world.name(a), world.name(b)));
        true
    }

    fn silence(&mut self, node: Node) -> bool {
        let lasts = self.rng.millis(50, 13_000);
        if !self.nodes[node.0].up {
            return false;
        }
        let until = self.now + lasts;
        self.nodes[node.0].silent_until = until.max(self.nodes[node.0].silent_until);
        self.healing += 1;
        self.push(lasts, What::Awake(node));
        if lasts > KEEP_ALIVE {
            self.push(KEEP_ALIVE, What::Silence(node));
        }
        self.note(|world| format!("** {} stands still for {lasts:?}", world.name(node)));
        true
    }

    /// A process dies: its host says so at once, or is gone with it.
    fn kill(&mut self, node: Node) -> bool {
        if !self.nodes[node.0].up {
            return false;
        }
        let after = if self.rng.percent(70) { self.delay() } else { KEEP_ALIVE };
        self.crash(node, after);
        self.healing += 1;
        let back = self.rng.millis(20, 4000);
        self.push(back, What::Restart(node));
        true
    }

    fn stray(&mut self, marks: &Marks) -> bool {
        let node = marks.prefill.unwrap_or_else(|| self.any_worker(Role::Prefill));
        let index = self.index(node);
        self.workers[index].owner.is_stray = true;
        self.workers[index].stray.store(true, Ordering::Relaxed);
        true
    }

    fn drain(&mut self, node: Option<Node>) -> Result<bool, Violation> {
        let node = node.unwrap_or_else(|| self.any_worker(Role::Decode));
        if !self.nodes[node.0].up {
            return Ok(false);
        }
        let index = self.index(node);
        self.workers[index].is_draining = true;
        self.on_worker(index, Event::Drain, false)?;
        // Routers hear of it soon: that is what the notice before a drain is for.
        for router in self.router_nodes() {
            if self.nodes[router.0].up {
                self.open(router, node, Ask::Describe, Purpose::Describe(node));
            }
        }
        Ok(true)
    }

    /// The adversary uses a reference that is worth nothing in every way there is.
    fn attack(&mut self, fault: Fault, request: usize) -> bool {
        let mut usable = Vec::new();
        for handoff in self.captured.iter().rev() {
            let Some(owner) = self.named(&handoff.owner).filter(|owner| self.nodes[owner.0].up) else {
                continue;
            };
            let refusal = self.workers[self.index(owner)].owner.refusal(handoff);
            let is_own = crate::checks::number(&handoff.request) == Some(request);
            let fits = match fault {
                Fault::StaleReference => refusal == Some("a fenced attempt"),
                Fault::Replay => {
                    refusal.is_some_and(|why| why != "another epoch" && why != "a fenced attempt")
                }
                // Best of all while the true one is worth something.
                _ => true,
            };
            if fits {
                usable.push((is_own && refusal.is_none(), is_own, handoff.clone(), owner));
            }
        }
        usable.sort_by_key(|(is_live, is_own, ..)| std::cmp::Reverse((*is_live, *is_own)));
        let Some((.., mut handoff, owner)) = usable.into_iter().next() else { return false };
        match fault {
            Fault::ForgedId => handoff.id.0[self.rng.below(16)] ^= 1 << self.rng.below(8),
            Fault::OtherEpoch => handoff.epoch = WorkerEpoch(handoff.epoch.0 ^ 2),
            _ => {}
        }
        let fetch = self.open(ADVERSARY, owner, Ask::Fetch(handoff.clone(), 0), Purpose::Nothing);
        self.push(KEEP_ALIVE, What::TimeOut(fetch));
        self.open(ADVERSARY, owner, Ask::Renew(handoff.clone()), Purpose::Nothing);
        self.open(ADVERSARY, owner, Ask::Release(handoff), Purpose::Nothing);
        true
    }

    /// The armed fault that strikes this message, if one does. What changes content does so here.
    pub(crate) fn strike(&mut self, key: CallKey, is_item: bool, what: &mut What) -> Option<Fault> {
        let request = self.calls[key].request;
        let strikes = |armed: &Armed| match armed.fault {
            Fault::Reorder => is_item && request == Some(armed.request),
            Fault::FlippedByte | Fault::Truncation => is_content(what, true),
            Fault::ForgedBlock => is_content(what, false),
            _ => request == Some(armed.request),
        };
        let place = self.armed.iter().position(strikes)?;
        let armed = self.armed.remove(place);
        let fault = armed.fault;
        if let Some(phase) = armed.phase {
            self.table.count(fault, phase);
        }
        self.note(|_| format!("** {fault:?} strikes #{key}"));
        if fault.disturbs_a_call() {
            self.clients[armed.request].is_disturbed = true;
        }
        let What::Item(_, answer, is_bad) = what else { return Some(fault) };
        let Answer::Fetch(item) = &mut **answer else { return Some(fault) };
        let bit = self.rng.below(8);
        match (fault, item) {
            (Fault::FlippedByte, FetchItem::Block(block)) => {
                let byte = self.rng.below(block.slabs.len());
                block.slabs[byte] ^= 1 << bit;
            }
            (Fault::FlippedByte, FetchItem::End { first_token, digest }) => match self.rng.below(2) {
                0 => *first_token ^= 1 << (bit % 5),
                _ => digest.0[bit] ^= 1,
            },
            (Fault::ForgedBlock, FetchItem::Block(block)) => forge(block, bit),
            (Fault::Truncation, FetchItem::Block(block)) => {
                let left = self.rng.below(block.slabs.len());
                block.slabs.truncate(left);
            }
            // The end itself is what is cut off.
            (Fault::Truncation, _) => return Some(Fault::Loss),
            _ => return Some(fault),
        }
        *is_bad = true;
        Some(fault)
    }
}

/// Other KV, with the checksums that belong to it.
fn forge(block: &mut KvBlock, bit: usize) {
    block.slabs.iter_mut().for_each(|byte| *byte ^= 1 << bit);
    block.checksums = checksums(&block.slabs);
}

fn is_content(what: &What, also_the_end: bool) -> bool {
    let What::Item(_, answer, _) = what else { return false };
    match &**answer {
        Answer::Fetch(FetchItem::Block(_)) => true,
        Answer::Fetch(FetchItem::End { .. }) => also_the_end,
        _ => false,
    }
}
