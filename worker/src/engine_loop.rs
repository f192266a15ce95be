//! The engine's thread: take events, step, carry out actions, publish, and park when there is nothing to do.
//!
//! Nothing here waits for a peer. The loop adds no rule of its own to the core's; it knows which channel belongs
//! to which call, and that is all.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use node::Clock;
use proto::watch::BlockChange;
use proto::{Error, Reason, Token};
use tokio::sync::{mpsc, watch};

use crate::call::{Call, SolePrefill, Unsent};
use crate::core::{Action, CallId, Core, DecodeItem, Event, FetchItem, Now, PrefillItem};
use crate::dump::{CallsDump, EngineDump};
use crate::fail_points;
use crate::feed::Feed;
use crate::inbox::{self, Inbox, Message};
use crate::meters::{Direction, Meters, Prompt};
use crate::peers::Peers;
use crate::shell::Shown;

/// How long the loop waits for an event before it tries a step again that computed nothing though the core said
/// there was work.
const RETRY_AFTER: Duration = Duration::from_millis(5);

/// A prompt that is to be computed, for metrics.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    probe: bool,
    tokens: usize,
}

impl Asked {
    /// The prompt that the event asks for, if it asks for one.
    fn of(event: &Event) -> Option<Self> {
        match event {
            Event::Prefill { generation, .. } | Event::Decode { generation, handoff: None, .. } => {
                Some(Self { probe: generation.probe, tokens: generation.tokens.len() })
            }
            _ => None,
        }
    }
}

/// All that the engine's thread owns.
pub(crate) struct EngineLoop {
    pub(crate) core: Box<dyn Core>,
    pub(crate) peers: Peers,
    pub(crate) meters: Meters,
    /// Calls that peers opened and the core has not ended.
    pub(crate) calls: HashMap<CallId, Call>,
    /// Those of them whose prompt is computed here and has no token yet.
    pub(crate) prompts: HashMap<CallId, Asked>,
    /// When the fetches began that run.
    pub(crate) fetches: HashMap<CallId, Now>,
    /// What the core wants done.
    pub(crate) actions: Vec<Action>,
    pub(crate) sole_prefill: Arc<SolePrefill>,
    pub(crate) shown: watch::Sender<Shown>,
    pub(crate) feed: Arc<Feed>,
    /// True while the core notes changes of its blocks, because somebody watches.
    pub(crate) feeding: bool,
    /// Changes on their way from the core to the feed.
    pub(crate) changes: Vec<BlockChange>,
    pub(crate) clock: Clock,
}

impl EngineLoop {
    /// Runs until told to stop. A panic of the core ends here: it is logged, every open call is ended with INTERNAL,
    /// and so is the outcome.
    pub(crate) fn run_to_end(mut self, receiver: mpsc::Receiver<Message>) -> Result<(), Error> {
        let mut inbox = Inbox::of_this_thread(receiver);
        let run = std::panic::catch_unwind(AssertUnwindSafe(|| self.run(&mut inbox)));
        let (outcome, error) = match run {
            Ok(()) => (Ok(()), inbox::stopped()),
            Err(panic) => {
                let what = panic_message(panic.as_ref());
                tracing::error!(what, "the engine's thread panicked; this worker ends");
                let error = Error::new(Reason::Internal, format!("the worker's engine panicked: {what}"));
                (Err(error.clone()), error)
            }
        };
        for message in inbox.close() {
            if let Message::Open { id, call, .. } = message {
                self.calls.insert(id, call);
            }
        }
        for (_, call) in self.calls.drain() {
            call.end(Err(error.clone()));
        }
        // A later life of the worker has metrics of its own.
        self.meters.clear();
        outcome
    }

    fn run(&mut self, inbox: &mut Inbox) {
        self.publish();
        let mut computed = true;
        while self.take_events(inbox, computed) {
            self.tick();
            self.carry_out();
            computed = self.step();
            self.carry_out();
            self.publish();
        }
    }

    fn now(&self) -> Now {
        self.clock.now()
    }

    /// Takes all events that are there now, and no more, so that a constant stream of them cannot hold up steps.
    /// Waits for one when there is no work. False when told to stop.
    fn take_events(&mut self, inbox: &mut Inbox, computed: bool) -> bool {
        let there = inbox.len();
        for _ in 0..there {
            match inbox.try_next() {
                Some(Message::Stop) => return false,
                Some(message) => self.take(message, there),
                None => break,
            }
        }
        if there > 0 {
            // Even an event without actions changes what is to be shown, or when to wake.
            return true;
        }
        let until_wake = self.core.next_wake().map(|wake| wake.saturating_sub(self.now()));
        let wait = match (self.core.has_work(), computed) {
            (true, true) => return true,
            (true, false) => Some(until_wake.map_or(RETRY_AFTER, |wake| wake.min(RETRY_AFTER))),
            (false, _) => until_wake,
        };
        match inbox.wait(wait) {
            Some(Message::Stop) => return false,
            Some(message) => self.take(message, 1),
            None => {}
        }
        true
    }

    /// Takes one of `there` messages.
    fn take(&mut self, message: Message, there: usize) {
        match message {
            Message::Open { id, call, event, trace } => {
                self.calls.insert(id, call);
                self.prompts.extend(Asked::of(&event).map(|asked| (id, asked)));
                if let Event::Decode { handoff: Some(handoff), .. } = &event {
                    self.peers.trace(handoff.id, trace);
                }
                self.on(event);
            }
            Message::Event(event) => {
                match &event {
                    Event::Dropped { call } => {
                        self.calls.remove(call);
                        self.prompts.remove(call);
                    }
                    Event::FetchFailed { call, .. } => {
                        self.fetches.remove(call);
                        self.peers.fetch_ended(*call);
                    }
                    Event::RenewAnswered { call, .. } => self.peers.renewal_ended(*call),
                    _ => {}
                }
                self.on(event);
            }
            Message::Fetched { call, item, place } => {
                match &item {
                    FetchItem::Block(block) => self.meters.moved(Direction::In, block.slabs.len()),
                    FetchItem::End { .. } => {
                        if let Some(start) = self.fetches.remove(&call) {
                            self.meters.fetched(self.now().saturating_sub(start));
                        }
                        self.peers.fetch_ended(call);
                    }
                    FetchItem::Header { .. } => {}
                }
                self.on(Event::Fetched { call, item });
                drop(place);
            }
            // Who asked may have given up.
            Message::Dump(answer) => drop(answer.send(self.dump(there))),
            Message::Known(answer) => {
                // Whoever asks watches already: from here on the core notes what changes.
                self.feed();
                // A watch that has ended needs no answer.
                let _ = answer.send((self.feed.next(), self.core.known_blocks()));
            }
            // Who asked may have given up.
            Message::Idle(answer) => drop(answer.send(self.core.is_idle())),
            Message::Stop => {}
        }
    }

    fn dump(&self, events_waiting: usize) -> EngineDump {
        let mut calls = CallsDump::default();
        for call in self.calls.values() {
            match call {
                Call::Prefill(_) => calls.prefill += 1,
                Call::Decode(..) => calls.decode += 1,
                Call::Fetch(_) => calls.fetch += 1,
                Call::Renew(_) => calls.renew += 1,
            }
        }
        let (fetches, renewals) = self.peers.open();
        EngineDump { core: self.core.dump(self.now()), calls, fetches, renewals, events_waiting }
    }

    /// Takes what changed among the core's blocks to those who watch.
    fn feed(&mut self) {
        let followed = self.feed.is_followed();
        if followed != self.feeding {
            self.core.follow_blocks(followed.then(|| self.feed.bound()));
            self.feeding = followed;
        }
        if followed {
            let complete = self.core.take_block_changes(&mut self.changes);
            self.feed.add(&mut self.changes, complete);
        }
    }

    fn on(&mut self, event: Event) {
        let now = self.now();
        self.core.on(event, now, &mut self.actions);
    }

    fn tick(&mut self) {
        let now = self.now();
        if self.core.next_wake().is_some_and(|wake| wake <= now) {
            self.core.on(Event::Tick, now, &mut self.actions);
        }
    }

    /// One step. False when nothing was computed.
    fn step(&mut self) -> bool {
        if !self.core.has_work() {
            return false;
        }
        self.sole_prefill.publish(self.core.sole_prefill());
        let start = Instant::now();
        let size = self.core.step(&|| self.clock.now(), &mut self.actions);
        self.sole_prefill.withdraw();
        let Some(size) = size else { return false };
        self.meters.stepped(size, start.elapsed());
        let issued =
            |action: &Action| matches!(action, Action::Prefill { item: PrefillItem::Issued { .. }, .. });
        if self.actions.iter().any(issued) {
            node::fail_point_blocking(fail_points::PREFILL_COMPUTING);
        }
        size.tokens > 0
    }

    /// Carries actions out in order; those that follow from it, too.
    fn carry_out(&mut self) {
        while !self.actions.is_empty() {
            for action in std::mem::take(&mut self.actions) {
                self.act(action);
            }
        }
        self.peers.forget_traces();
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Prefill { call, item } => {
                if let PrefillItem::Done { token, .. } = &item {
                    self.count_prompt(call, token);
                }
                let sent = match self.calls.get(&call) {
                    Some(Call::Prefill(sender)) => sender.send(item),
                    _ => Err(Unsent::Gone),
                };
                self.settle(call, sent);
            }
            Action::Decode { call, item } => {
                if let DecodeItem::Token(token) = &item {
                    self.count_prompt(call, token);
                }
                let sent = match self.calls.get(&call) {
                    Some(Call::Decode(sender, _)) => sender.send(item),
                    _ => Err(Unsent::Gone),
                };
                self.settle(call, sent);
            }
            Action::Fetch { call, item } => {
                let bytes = if let FetchItem::Block(block) = &item { block.slabs.len() } else { 0 };
                let sent = match self.calls.get(&call) {
                    Some(Call::Fetch(sender)) => sender.send(item),
                    _ => Err(Unsent::Gone),
                };
                if sent.is_ok() {
                    self.meters.moved(Direction::Out, bytes);
                }
                self.settle(call, sent);
            }
            Action::Close { call, error } => {
                self.prompts.remove(&call);
                if let Some(open) = self.calls.remove(&call) {
                    self.count_failure(&open, error.as_ref());
                    open.end(error.map_or(Ok(()), Err));
                }
            }
            Action::Renewed { call, result } => {
                if let Some(Call::Renew(answer)) = self.calls.remove(&call) {
                    // The caller may have given up, and then nobody needs the answer.
                    let _ = answer.send(result);
                }
            }
            Action::StartFetch { call, handoff, skip, time_left } => {
                self.fetches.insert(call, self.now());
                self.peers.start_fetch(call, handoff, skip, time_left);
            }
            Action::DropFetch { call } => {
                self.fetches.remove(&call);
                self.peers.drop_fetch(call);
            }
            Action::Renew { call, handoff } => self.peers.renew(call, handoff),
            Action::Release { handoff } => self.peers.release(handoff),
        }
    }

    /// A call that got more items than it can carry is a fault of the core: it ends with INTERNAL, and the core is
    /// told that the peer is gone. A peer that is gone already needs nothing.
    fn settle(&mut self, call: CallId, sent: Result<(), Unsent>) {
        if sent != Err(Unsent::Full) {
            return;
        }
        tracing::error!(call = call.0, "more items than the call can carry");
        if let Some(open) = self.calls.remove(&call) {
            open.end(Err(Error::new(Reason::Internal, "more items than the call can carry")));
        }
        self.on(Event::Dropped { call });
    }

    /// The first token of a prompt tells what the prompt took.
    fn count_prompt(&mut self, call: CallId, token: &Token) {
        let Some(report) = &token.prompt else { return };
        let Some(Asked { probe, tokens }) = self.prompts.remove(&call) else { return };
        let Token { queue_wait: queue, compute, .. } = *token;
        self.meters.prompt(Prompt { queue, compute, tokens, cached: report.cached_tokens }, probe);
    }

    /// A hand-off failed when its fetch ends with an error at the owner, or its decode call does here.
    fn count_failure(&self, call: &Call, error: Option<&Error>) {
        let Some(error) = error else { return };
        match call {
            Call::Fetch(_) | Call::Decode(_, true) => self.meters.transfer_failed(error.reason),
            Call::Prefill(_) | Call::Decode(_, false) | Call::Renew(_) => {}
        }
    }

    /// Shows the core's state to metrics and `Describe`.
    fn publish(&mut self) {
        let now = Shown::of(self.core.as_ref());
        let changed = self.shown.send_if_modified(|shown| std::mem::replace(shown, now) != now);
        if changed || !self.meters.shown() {
            self.meters.show(&now.gauges);
        }
        self.feed();
    }
}

/// What a panic said.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
