//! The one bounded queue into the engine's thread.
//!
//! Many async tasks put messages in; one plain thread takes them out. A sender that must never fail or wait (the
//! guard of a call, when it is dropped) reserves its slot beforehand. The thread parks while there is nothing to do,
//! with no runtime of its own.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use node::telemetry::TraceContext;
use proto::{BlockHash, Error, Reason};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::call::Call;
use crate::core::{CallId, Event, FetchItem};
use crate::dump::EngineDump;

/// What the engine's thread is told.
pub(crate) enum Message {
    /// A peer opened a call: where its answer goes, the event that it is, and the trace that it is part of.
    Open { id: CallId, call: Call, event: Event, trace: TraceContext },
    /// Anything else that happened.
    Event(Event),
    /// An item of a fetch that this worker started. The permit is the item's place in that fetch's window, free
    /// again when the core has taken the item.
    Fetched { call: CallId, item: FetchItem, place: OwnedSemaphorePermit },
    /// An operator asks for the state in detail.
    Dump(oneshot::Sender<EngineDump>),
    /// Somebody who watches wants to know all blocks that the prefix cache has, and the number of the change after.
    Known(oneshot::Sender<(u64, Vec<BlockHash>)>),
    /// Somebody asks whether nothing is left to do or to keep, as of this message.
    Idle(oneshot::Sender<bool>),
    /// End the thread.
    Stop,
}

/// A reserved slot: sending into it neither waits nor fails.
pub(crate) type Slot = mpsc::OwnedPermit<Message>;

/// The sending half.
#[derive(Clone)]
pub(crate) struct Outbox(mpsc::Sender<Message>);

impl Outbox {
    /// Reserves a slot now: QUEUE_FULL when there is none.
    pub(crate) fn reserve_now(&self) -> Result<Slot, Error> {
        self.0.clone().try_reserve_owned().map_err(|fault| match fault {
            mpsc::error::TrySendError::Full(_) => {
                let bound = self.0.max_capacity();
                Error::new(Reason::QueueFull, format!("all {bound} places of the event queue are taken"))
            }
            mpsc::error::TrySendError::Closed(_) => stopped(),
        })
    }

    /// Sends when there is room: INTERNAL when the thread has ended.
    pub(crate) async fn send(&self, message: Message) -> Result<(), Error> {
        self.0.send(message).await.map_err(|_| stopped())
    }
}

/// What is said to a caller once the engine's thread has ended.
pub(crate) fn stopped() -> Error {
    Error::new(Reason::WorkerLost, "the worker's engine has stopped")
}

/// The taking half, for a plain thread.
pub(crate) struct Inbox {
    receiver: mpsc::Receiver<Message>,
    waker: Waker,
}

/// A queue of at most `bound` messages. The thread that takes them calls [`Inbox::of_this_thread`].
pub(crate) fn queue(bound: usize) -> (Outbox, mpsc::Receiver<Message>) {
    let (sender, receiver) = mpsc::channel(bound);
    (Outbox(sender), receiver)
}

impl Inbox {
    /// The taking half; parks and wakes the calling thread.
    pub(crate) fn of_this_thread(receiver: mpsc::Receiver<Message>) -> Self {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        Self { receiver, waker }
    }

    /// Messages there now.
    pub(crate) fn len(&self) -> usize {
        self.receiver.len()
    }

    /// The next message, if one is there.
    pub(crate) fn try_next(&mut self) -> Option<Message> {
        self.receiver.try_recv().ok()
    }

    /// Waits for a message, at most so long; for ever without a limit. `None` when the time is over.
    pub(crate) fn wait(&mut self, at_most: Option<Duration>) -> Option<Message> {
        let until = at_most.and_then(|wait| Instant::now().checked_add(wait));
        loop {
            match self.receiver.poll_recv(&mut Context::from_waker(&self.waker)) {
                Poll::Ready(Some(message)) => return Some(message),
                // Nobody is left who could send: the same as being told to stop.
                Poll::Ready(None) => return Some(Message::Stop),
                Poll::Pending => {}
            }
            match until {
                None => std::thread::park(),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    std::thread::park_timeout(left);
                }
            }
        }
    }

    /// Refuses further messages, and gives back those that are there.
    pub(crate) fn close(&mut self) -> Vec<Message> {
        self.receiver.close();
        std::iter::from_fn(|| self.try_next()).collect()
    }
}

/// Wakes a parked thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
