//! A call that a peer opened here: the engine thread's end of it, and the peer's.
//!
//! The engine thread never waits for a peer. Each call has a bounded channel that is large enough for all that the
//! core may send (a decode call: its most tokens; a fetch: its credit), and the place of the terminal item is
//! reserved from the start. The peer's end is a stream whose drop tells the core, through a slot of the event queue
//! that was reserved when the call was opened.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use engine::model::Interrupt;
use proto::{Error, Reason};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::core::{CallId, DecodeItem, Event, FetchItem, PrefillItem};
use crate::inbox::{Message, Slot};

/// The engine thread's end of a call.
pub(crate) enum Call {
    /// A router's prefill.
    Prefill(ItemSender<PrefillItem>),
    /// A router's decode; true with a hand-off.
    Decode(ItemSender<DecodeItem>, bool),
    /// A peer's fetch.
    Fetch(ItemSender<FetchItem>),
    /// A peer's renewal.
    Renew(oneshot::Sender<Result<Duration, Error>>),
}

impl Call {
    /// Ends the call.
    pub(crate) fn end(self, outcome: Result<(), Error>) {
        match self {
            Self::Prefill(sender) => sender.end(outcome),
            Self::Decode(sender, _) => sender.end(outcome),
            Self::Fetch(sender) => sender.end(outcome),
            Self::Renew(answer) => {
                if let Err(error) = outcome {
                    // The caller may be gone, and then nobody needs the answer.
                    let _ = answer.send(Err(error));
                }
            }
        }
    }
}

/// What goes through a call's channel.
pub(crate) enum Entry<T> {
    Item(T),
    End(Result<(), Error>),
}

/// Sends items of one call, and its end.
pub(crate) struct ItemSender<T> {
    items: mpsc::Sender<Entry<T>>,
    end: mpsc::OwnedPermit<Entry<T>>,
}

/// Why an item could not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unsent {
    /// The core sent more than the call can carry: a fault of the core.
    Full,
    /// The peer is gone; the core hears of it by its own event.
    Gone,
}

impl<T> ItemSender<T> {
    /// A channel for at most `items_max` items that wait to be taken, and the end.
    fn channel(items_max: usize) -> (Self, mpsc::Receiver<Entry<T>>) {
        let (items, receiver) = mpsc::channel(items_max.saturating_add(1));
        let end = items.clone().try_reserve_owned();
        let end = end.unwrap_or_else(|_| unreachable!("a new channel with a place for the end has a place"));
        (Self { items, end }, receiver)
    }

    pub(crate) fn send(&self, item: T) -> Result<(), Unsent> {
        self.items.try_send(Entry::Item(item)).map_err(|fault| match fault {
            mpsc::error::TrySendError::Full(_) => Unsent::Full,
            mpsc::error::TrySendError::Closed(_) => Unsent::Gone,
        })
    }

    fn end(self, outcome: Result<(), Error>) {
        self.end.send(Entry::End(outcome));
    }
}

/// Tells whose prefill fills the running step alone, so that dropping that call can stop the step.
pub(crate) struct SolePrefill {
    /// The call's id; 0 names none.
    call: AtomicU64,
    interrupt: Interrupt,
}

impl SolePrefill {
    pub(crate) fn new(interrupt: Interrupt) -> Self {
        Self { call: AtomicU64::new(0), interrupt }
    }

    /// Before a step, by the engine thread. Clearing the flag first and publishing the call second means that a
    /// drop which sees the call stops this very step.
    pub(crate) fn publish(&self, call: Option<CallId>) {
        self.interrupt.clear();
        self.call.store(call.map_or(0, |call| call.0), Ordering::SeqCst);
    }

    /// After the step.
    pub(crate) fn withdraw(&self) {
        self.call.store(0, Ordering::SeqCst);
    }

    /// Stops the running step, whoever it is for.
    pub(crate) fn stop_step(&self) {
        self.interrupt.raise();
    }

    fn dropped(&self, call: CallId) {
        if self.call.load(Ordering::SeqCst) == call.0 {
            self.interrupt.raise();
        }
    }
}

/// Tells the core that the peer is gone, when it is dropped before the call's end.
pub(crate) struct Guard {
    pub(crate) call: CallId,
    pub(crate) slot: Option<Slot>,
    pub(crate) sole_prefill: Arc<SolePrefill>,
    /// The call's share of the bound on open calls.
    pub(crate) _open: OwnedSemaphorePermit,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.send(Message::Event(Event::Dropped { call: self.call }));
            self.sole_prefill.dropped(self.call);
        }
    }
}

/// An item that knows its place in a call's stream.
pub trait Item: Send + 'static {
    /// True for the one item that may only be followed by a good end.
    fn is_last(&self) -> bool;
}

impl Item for PrefillItem {
    fn is_last(&self) -> bool {
        matches!(self, Self::Done { .. })
    }
}

impl Item for DecodeItem {
    fn is_last(&self) -> bool {
        match self {
            Self::Admitted { .. } => false,
            Self::Token(token) => token.finish.is_some(),
            Self::Moved { .. } => true,
        }
    }
}

impl Item for FetchItem {
    fn is_last(&self) -> bool {
        matches!(self, Self::End { .. })
    }
}

/// The peer's end of a call: its items, then `None` or one error. Dropping it cancels the call.
pub struct CallStream<T> {
    entries: mpsc::Receiver<Entry<T>>,
    guard: Option<Guard>,
    last_seen: bool,
}

impl<T: Item> CallStream<T> {
    /// Both ends of a call.
    pub(crate) fn channel(items_max: usize, guard: Guard) -> (ItemSender<T>, Self) {
        let (sender, entries) = ItemSender::channel(items_max);
        (sender, Self { entries, guard: Some(guard), last_seen: false })
    }

    /// The call's id.
    pub(crate) fn call(&self) -> Option<CallId> {
        self.guard.as_ref().map(|guard| guard.call)
    }

    /// The next item. After an error or `None` it is `None` for ever.
    pub async fn next(&mut self) -> Option<Result<T, Error>> {
        self.guard.as_ref()?;
        match self.entries.recv().await {
            Some(Entry::Item(item)) => match self.check(&item) {
                Ok(()) => Some(Ok(item)),
                Err(error) => Some(Err(self.refuse(error))),
            },
            Some(Entry::End(outcome)) => {
                self.settle();
                match outcome {
                    Ok(()) if cfg!(debug_assertions) && !self.last_seen => {
                        Some(Err(contract("the call ended well without its last item")))
                    }
                    Ok(()) => None,
                    Err(error) => Some(Err(error)),
                }
            }
            // The engine's thread is gone without having ended its calls.
            None => {
                self.settle();
                Some(Err(Error::new(Reason::Internal, "the worker's engine ended without an answer")))
            }
        }
    }

    /// In debug builds: nothing may follow the last item.
    fn check(&mut self, item: &T) -> Result<(), Error> {
        if cfg!(debug_assertions) && self.last_seen {
            return Err(contract("an item followed the last one"));
        }
        self.last_seen |= item.is_last();
        Ok(())
    }

    /// Ends the stream with an error of its own; the core is told to drop the call.
    fn refuse(&mut self, error: Error) -> Error {
        self.guard = None;
        error
    }

    /// The core has ended the call, so its drop is no news.
    fn settle(&mut self) {
        if let Some(mut guard) = self.guard.take() {
            guard.slot = None;
        }
    }
}

/// A stream that breaks its own contract: a fault of the core.
fn contract(what: &str) -> Error {
    tracing::error!(what, "a call's stream breaks its contract");
    Error::new(Reason::Internal, what)
}
