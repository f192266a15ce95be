//! The virtual network: calls between nodes, the time their messages take, and what may happen to them.
//!
//! A call is a question and a stream of answers, as in gRPC: answers come in order, then one end; either side learns
//! when the connection under it breaks. Messages take up to the schedule's latency. A call that its opener gives up
//! while the question is on its way may have reached its server for a moment, or never: what was not sent yet is not
//! sent any more, and no server hears of it. What a connection guarantees, faults take away: see [`Fault`].

use std::time::Duration;

use proto::{Attempt, Error, Generation, Handoff, Reason, RequestId, WorkerDescription};
use router::dispatch::Emission;
use worker::core::{CallId, DecodeItem, FetchItem, PrefillItem};

use crate::table::Fault;
use crate::world::{Node, What, World};

/// Index of a call.
pub(crate) type CallKey = usize;

/// How long a peer that says nothing passes for alive: a keep-alive after 0.75 s, and as long to answer.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_millis(1500);

/// How long connecting, and a question with one answer, may take.
pub(crate) const SHORT_CALL: Duration = Duration::from_secs(1);

/// Of a hundred calls that are given up while their question is on its way, those that never arrive.
const UNSENT: usize = 50;

/// What opens a call.
#[derive(Clone, Debug)]
pub(crate) enum Ask {
    Route(Generation),
    Prefill(Generation),
    Decode(Generation, Option<Handoff>),
    Fetch(Handoff, usize),
    Renew(Handoff),
    Release(Handoff),
    Fence(RequestId, Attempt),
    Move(RequestId, Attempt),
    Describe,
}

/// An item of a call's stream.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Emission(Emission),
    Prefill(PrefillItem),
    Decode(DecodeItem),
    Fetch(FetchItem),
    Lease(Duration),
    Description(Box<WorkerDescription>),
}

/// What the caller opened it for.
#[derive(Clone, Debug)]
pub(crate) enum Purpose {
    /// The request of that number, at a gateway.
    Client(usize),
    /// For the request that came to a router by that call.
    Prefill(CallKey, Attempt),
    Decode(CallKey, Attempt),
    /// A worker's call, under the core's name for it.
    Fetch(CallId),
    Renew(CallId),
    /// How many more times to try.
    Release(Handoff, usize),
    Describe(Node),
    Nothing,
}

/// A call.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) from: Node,
    from_life: u32,
    pub(crate) to: Node,
    to_life: u32,
    pub(crate) purpose: Purpose,
    pub(crate) ask: Ask,
    /// The number of the request that it is about.
    pub(crate) request: Option<usize>,
    /// What opens it is on its way.
    pub(crate) is_opening: bool,
    /// The caller listens.
    pub(crate) at_caller: bool,
    /// The server works on it.
    pub(crate) at_server: bool,
    /// The last message of each direction arrives then.
    up: Duration,
    down: Duration,
}

/// Which way a message goes, and what it is to its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Open,
    Item,
    End,
    Cancel,
}

fn is_short(ask: &Ask) -> bool {
    matches!(ask, Ask::Renew(_) | Ask::Release(_) | Ask::Fence(..) | Ask::Move(..) | Ask::Describe)
}

pub(crate) fn lost(what: &str) -> Error {
    Error::new(Reason::WorkerLost, what)
}

impl World {
    /// Opens a call.
    pub(crate) fn open(&mut self, from: Node, to: Node, ask: Ask, purpose: Purpose) -> CallKey {
        let request = match &ask {
            Ask::Route(generation) | Ask::Prefill(generation) | Ask::Decode(generation, _) => {
                crate::checks::number(&generation.request)
            }
            Ask::Fetch(handoff, _) | Ask::Renew(handoff) | Ask::Release(handoff) => {
                crate::checks::number(&handoff.request)
            }
            Ask::Fence(request, _) | Ask::Move(request, _) => crate::checks::number(request),
            Ask::Describe => None,
        };
        let key = self.calls.len();
        let short = is_short(&ask);
        self.calls.push(Call {
            from,
            from_life: self.nodes[from.0].life,
            to,
            to_life: 0,
            purpose,
            ask,
            request,
            is_opening: true,
            at_caller: true,
            at_server: false,
            up: Duration::ZERO,
            down: Duration::ZERO,
        });
        self.open_calls.insert(key);
        self.transmit(key, Class::Open, What::Open(key));
        if short {
            self.push(SHORT_CALL, What::TimeOut(key));
        } else if self.silent_until(to) > self.now + KEEP_ALIVE {
            self.push(KEEP_ALIVE, What::CallerLost(key));
            self.push(KEEP_ALIVE, What::ServerLost(key));
        }
        key
    }

    /// Sends an item to the caller.
    pub(crate) fn answer(&mut self, key: CallKey, answer: Answer) {
        if self.calls[key].at_server {
            self.transmit(key, Class::Item, What::Item(key, Box::new(answer), false));
        }
    }

    /// Ends the call at its server.
    pub(crate) fn end(&mut self, key: CallKey, outcome: Result<(), Error>) {
        if std::mem::take(&mut self.calls[key].at_server) {
            self.transmit(key, Class::End, What::End(key, outcome));
        }
    }

    /// Gives the call up at its caller. Where the question is still on its way, it may never arrive.
    pub(crate) fn cancel(&mut self, key: CallKey) {
        if !std::mem::take(&mut self.calls[key].at_caller) {
            return;
        }
        if self.calls[key].is_opening && self.rng.percent(UNSENT) {
            self.calls[key].is_opening = false;
            self.note(|_| format!("** #{key} is given up before it was sent"));
            return;
        }
        self.transmit(key, Class::Cancel, What::ServerLost(key));
    }

    /// Sends one message, with what befalls it.
    fn transmit(&mut self, key: CallKey, class: Class, mut what: What) {
        let (from, to) = (self.calls[key].from, self.calls[key].to);
        let mut at = self.now + self.delay();
        let mut in_order = true;
        match self.strike(key, class == Class::Item, &mut what) {
            Some(Fault::Delay) => at += self.rng.millis(20, 4000),
            Some(Fault::Loss) if class == Class::Item => return self.return_credit(key, at),
            Some(Fault::Loss) => return self.lose_call(key),
            Some(Fault::Duplicate) => self.duplicate(key, class, &what),
            Some(Fault::Reorder) => {
                in_order = false;
                at += 3 * self.plan.latency + self.plan.step;
            }
            _ => {}
        }
        if let Some(heals) = self.cut_until(from, to) {
            let patience = if class == Class::Open { SHORT_CALL } else { KEEP_ALIVE };
            if heals > self.now + patience {
                if class == Class::Open {
                    self.push(SHORT_CALL, What::CallerLost(key));
                }
                return;
            }
            at = at.max(heals + self.delay());
        }
        let call = &mut self.calls[key];
        let last = if matches!(class, Class::Open | Class::Cancel) { &mut call.up } else { &mut call.down };
        if in_order {
            at = at.max(*last);
            *last = at;
        }
        let is_fetch = matches!(call.ask, Ask::Fetch(..));
        self.push_at(at, what);
        if class == Class::Item && is_fetch {
            self.return_credit(key, at);
        }
    }

    /// The receiver has taken an item: its place in the window is free again.
    fn return_credit(&mut self, key: CallKey, at: Duration) {
        if matches!(self.calls[key].ask, Ask::Fetch(..)) {
            self.push_at(at, What::Credit(key));
        }
    }

    /// A message that a call cannot do without is lost, so its connection is.
    fn lose_call(&mut self, key: CallKey) {
        self.push(KEEP_ALIVE, What::CallerLost(key));
        self.push(KEEP_ALIVE, What::ServerLost(key));
    }

    fn duplicate(&mut self, key: CallKey, class: Class, what: &What) {
        let after = self.delay() + self.delay();
        match class {
            Class::Item => self.push(after, what.clone()),
            Class::Open => {
                // Nobody listens to the second call of that name, and its server learns that soon.
                let copy = self.copy_unheard(key);
                self.push(after, What::Open(copy));
                self.push(after + Duration::from_millis(300), What::ServerLost(copy));
            }
            Class::End | Class::Cancel => {}
        }
    }

    /// A call like that one, to which nobody listens; opens when its [`What::Open`] is pushed.
    fn copy_unheard(&mut self, of: CallKey) -> CallKey {
        let key = self.calls.len();
        let original = &self.calls[of];
        self.calls.push(Call {
            purpose: Purpose::Nothing,
            ask: original.ask.clone(),
            is_opening: true,
            at_caller: false,
            at_server: false,
            up: Duration::ZERO,
            down: Duration::ZERO,
            ..*original
        });
        self.open_calls.insert(key);
        key
    }

    /// Up to the latency of the schedule.
    pub(crate) fn delay(&mut self) -> Duration {
        let most = self.plan.latency.as_micros() as usize;
        Duration::from_micros(self.rng.between(most / 8, most) as u64)
    }

    /// A call reached its node, which is up.
    pub(crate) fn accept(&mut self, key: CallKey) {
        let to = self.calls[key].to;
        self.calls[key].to_life = self.nodes[to.0].life;
        self.calls[key].is_opening = false;
        self.calls[key].at_server = true;
    }

    /// True when the caller is still the process that opened the call, and listens.
    pub(crate) fn is_heard(&self, key: CallKey) -> bool {
        let call = &self.calls[key];
        call.at_caller && self.nodes[call.from.0].is_life(call.from_life)
    }

    /// True when the server is still the process that took the call, and works on it.
    pub(crate) fn is_served(&self, key: CallKey) -> bool {
        let call = &self.calls[key];
        call.at_server && self.nodes[call.to.0].is_life(call.to_life)
    }

    /// Breaks the connections between the nodes that `is_meant` chooses: both ends learn it `after` that.
    pub(crate) fn break_calls(&mut self, after: Duration, is_meant: impl Fn(&Call) -> bool) {
        let calls = &self.calls;
        self.open_calls.retain(|&key| calls[key].is_opening || calls[key].at_caller || calls[key].at_server);
        let keys: Vec<_> =
            self.open_calls.iter().copied().filter(|&key| is_meant(&self.calls[key])).collect();
        for key in keys {
            let (caller, server) = (after + self.delay(), after + self.delay());
            self.push(caller, What::CallerLost(key));
            self.push(server, What::ServerLost(key));
        }
    }
}
