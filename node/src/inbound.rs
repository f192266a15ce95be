//! What a drain expects of requests that have not arrived: that they go on arriving.
//!
//! A request of which a part is missing counts as a call in flight, and a peer that has stopped sending would hold a
//! drain open until the grace period ends.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::Shutdown;
use crate::linger::Unread;

/// Longest silence of a peer that still owes a part of its request, once the process drains.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// The fault of a request's body whose peer fell silent while the process drains.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the server is shutting down, and the rest of the request does not come")]
pub struct Stalled;

type Fault = Box<dyn std::error::Error + Send + Sync>;

/// The body of a request. Until the request is answered it ends with [`Stalled`] when its peer is silent for too long
/// in a drain. A body that is read beside its answer, as in a stream of both ways, may be silent: that is for its
/// service to judge.
pub(crate) struct Inbound<B: Body> {
    body: B,
    shutdown: Shutdown,
    answered: Arc<AtomicBool>,
    patience: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// Told when this is dropped before its end.
    unread: Option<Unread>,
}

/// Kept until the request is answered.
#[must_use]
pub(crate) struct Unanswered(Arc<AtomicBool>);

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl<B: Body> Inbound<B> {
    pub(crate) fn new(body: B, unread: Option<Unread>, shutdown: &Shutdown) -> (Self, Unanswered) {
        let answered = Arc::new(AtomicBool::new(false));
        let unanswered = Unanswered(answered.clone());
        (Self { body, shutdown: shutdown.clone(), answered, patience: None, unread }, unanswered)
    }

    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let shutdown = &self.shutdown;
        let patience = self.patience.get_or_insert_with(|| {
            let shutdown = shutdown.clone();
            Box::pin(async move {
                shutdown.draining().await;
                tokio::time::sleep(SILENCE_MAX).await;
            })
        });
        patience.as_mut().poll(cx)
    }
}

impl<B: Body> Drop for Inbound<B> {
    fn drop(&mut self) {
        if let Some(unread) = &self.unread
            && !self.body.is_end_stream()
        {
            unread.set();
        }
    }
}

impl<B> Body for Inbound<B>
where
    B: Body<Data = Bytes, Error: Into<Fault>> + Unpin,
{
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            self.patience = None;
            if frame.is_none() {
                self.unread = None;
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        if self.answered.load(Ordering::Relaxed) || self.poll_patience(cx).is_pending() {
            return Poll::Pending;
        }
        self.patience = None;
        Poll::Ready(Some(Err(Stalled.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
