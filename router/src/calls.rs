//! Calls to workers, as streams of a dispatch's events. Dropping the stream cancels the call.

use std::time::Duration;

use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use node::Network;
use node::telemetry::TraceContext;
use proto::convert::count;
use proto::{Attempt, Error, Generation, Handoff, Reason, RequestId, wire};
use tonic::{Request, Status, Streaming};
use wire::decode_client::DecodeClient;
use wire::prefill_client::PrefillClient;
use wire::worker_client::WorkerClient;

use crate::dispatch::Event;

/// An event of a call.
pub(crate) struct Heard {
    pub(crate) event: Event,
    /// What the item shows of costs.
    pub(crate) shown: Option<Shown>,
    /// Set when the call failed on its way to the worker or back: the worker may be gone.
    pub(crate) lost: Option<Error>,
    /// Nothing follows.
    pub(crate) last: bool,
}

/// What an item shows of costs, beside what it says.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shown {
    /// Tokens that the prefill worker had.
    Cached(usize),
    /// Time that it took to compute the others.
    Prefill(Duration),
    /// Tokens that the decode worker had.
    Skipped(usize),
}

/// What a call says. Ends after an item that is the last.
pub(crate) type Call = BoxStream<'static, Heard>;

/// Which of a worker's services is called, and how its items read.
trait Side: Send + Sync + 'static {
    /// An item of the stream.
    type Item: Send + 'static;
    /// The event that the item stands for, and what it shows besides; an error when it cannot be read.
    fn read(attempt: Attempt, item: Self::Item) -> Result<(Event, Option<Shown>), Error>;
    /// The end of the call.
    fn ended(attempt: Attempt, error: Option<Error>) -> Event;
}

struct Prefill;
struct Decode;

impl Side for Prefill {
    type Item = wire::PrefillEvent;

    fn read(attempt: Attempt, item: wire::PrefillEvent) -> Result<(Event, Option<Shown>), Error> {
        use wire::prefill_event::Event as Item;
        match item.event.ok_or_else(|| Error::invalid("event", "is required"))? {
            Item::Issued(issued) => {
                let handoff = issued.handoff.ok_or_else(|| Error::invalid("handoff", "is required"))?;
                let cached = Shown::Cached(count("cached_tokens", issued.cached_tokens)?);
                Ok((Event::PrefillIssued { attempt, handoff: handoff.try_into()? }, Some(cached)))
            }
            Item::Done(done) => {
                let token = done.token.ok_or_else(|| Error::invalid("token", "is required"))?;
                let took = Shown::Prefill(Duration::from_micros(done.prefill_us));
                Ok((Event::PrefillDone { attempt, token: token.try_into()? }, Some(took)))
            }
        }
    }

    fn ended(attempt: Attempt, error: Option<Error>) -> Event {
        Event::PrefillEnded { attempt, error }
    }
}

impl Side for Decode {
    type Item = wire::DecodeEvent;

    fn read(attempt: Attempt, item: wire::DecodeEvent) -> Result<(Event, Option<Shown>), Error> {
        use wire::decode_event::Event as Item;
        match item.event.ok_or_else(|| Error::invalid("event", "is required"))? {
            Item::Admitted(admitted) => {
                let skipped = Shown::Skipped(count("skipped_tokens", admitted.skipped_tokens)?);
                Ok((Event::DecodeAdmitted { attempt }, Some(skipped)))
            }
            Item::Token(token) => Ok((Event::DecodeToken { attempt, token: token.try_into()? }, None)),
            Item::Moved(moved) => {
                let handoff = moved.handoff.ok_or_else(|| Error::invalid("handoff", "is required"))?;
                Ok((Event::DecodeMoved { attempt, handoff: handoff.try_into()? }, None))
            }
        }
    }

    fn ended(attempt: Attempt, error: Option<Error>) -> Event {
        Event::DecodeEnded { attempt, error }
    }
}

/// Calls for a prefill. Nothing is sent before the stream is polled.
pub(crate) fn prefill(network: &Network, worker: &str, generation: Generation, trace: &TraceContext) -> Call {
    let mut client = node::limits!(PrefillClient::new(network.connect(worker)));
    let Generation { attempt, time_left, probe, .. } = generation;
    let mut request = Request::new(wire::PrefillRequest { generation: Some(generation.into()) });
    node::set_time_left(&mut request, time_left);
    let asked = trace.scope(async move { client.prefill(request).await });
    let opened = async move {
        let answer = asked.await;
        if answer.is_ok() && !probe {
            node::fail_point("router.prefilling").await;
        }
        heard::<Prefill>(attempt, answer.map(tonic::Response::into_inner))
    };
    let paused = opened.flatten_stream().then(move |heard| async move {
        if matches!(heard.event, Event::PrefillIssued { .. }) && !probe {
            node::fail_point("router.issued").await;
        }
        heard
    });
    paused.boxed()
}

/// Tokens of a request after which the fail point `router.decoding` stands.
const DECODING_TOKENS: usize = 3;

/// Calls for tokens. Nothing is sent before the stream is polled.
pub(crate) fn decode(
    network: &Network,
    worker: &str,
    (generation, handoff): (Generation, Option<Handoff>),
    trace: &TraceContext,
) -> Call {
    let mut client = node::limits!(DecodeClient::new(network.connect(worker)));
    let attempt = generation.attempt;
    let time_left = generation.time_left;
    let message =
        wire::DecodeRequest { generation: Some(generation.into()), handoff: handoff.map(Into::into) };
    let mut request = Request::new(message);
    node::set_time_left(&mut request, time_left);
    let asked = trace.scope(async move { client.decode(request).await });
    let opened = async move {
        let answer = asked.await;
        heard::<Decode>(attempt, answer.map(tonic::Response::into_inner))
    };
    let paused = opened.flatten_stream().then(|heard| async move {
        if matches!(&heard.event, Event::DecodeToken { token, .. } if token.index >= DECODING_TOKENS) {
            node::fail_point("router.decoding").await;
        }
        heard
    });
    paused.boxed()
}

/// Turns an answer into events, up to and with the first that is the last.
fn heard<S: Side>(attempt: Attempt, answer: Result<Streaming<S::Item>, Status>) -> Call {
    let items = match answer {
        Ok(items) => items.boxed(),
        Err(status) => stream::once(async { Err(status) }).boxed(),
    };
    let events = items.map(move |item| match item.map(|item| S::read(attempt, item)) {
        Ok(Ok((event, shown))) => Heard { event, shown, lost: None, last: false },
        Ok(Err(error)) => {
            // Whatever is wrong with it, it is the worker's fault and not that of the request.
            let message = format!("the worker sent an item that cannot be read: {}", error.message);
            let error = Error::new(Reason::Internal, message);
            Heard { event: S::ended(attempt, Some(error)), shown: None, lost: None, last: true }
        }
        Err(status) => {
            let on_the_way = proto::convert::is_transport(&status);
            let error = Error::from(status);
            let lost = (on_the_way && error.reason == Reason::WorkerLost).then(|| error.clone());
            Heard { event: S::ended(attempt, Some(error)), shown: None, lost, last: true }
        }
    });
    let end =
        stream::once(
            async move { Heard { event: S::ended(attempt, None), shown: None, lost: None, last: true } },
        );
    let mut over = false;
    let up_to_last = events.chain(end).take_while(move |heard| {
        let taken = !over;
        over |= heard.last;
        std::future::ready(taken)
    });
    up_to_last.boxed()
}

/// Time for one try to fence, or to ask for a move.
const FENCE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(1);
/// Tries to fence. A worker that cannot be reached in all of them is as good as dead, and its epoch with it.
const FENCE_TRIES: u32 = 3;

/// Asks a decode worker to give a sequence away. Once: if the question is lost, the sequence ends where it is.
pub(crate) async fn ask_to_move(network: Network, worker: String, request: RequestId, attempt: Attempt) {
    let mut client = node::limits!(DecodeClient::new(network.connect(&worker)));
    let message = wire::MoveRequest { request: request.0.clone(), attempt: attempt.0 };
    let mut call = Request::new(message);
    call.set_timeout(FENCE_TIMEOUT);
    if let Err(status) = client.r#move(call).await {
        let error = Error::from(status);
        tracing::debug!(%request, worker, attempt = attempt.0, %error, "the question to move did not arrive");
    }
}

/// Tells a worker to refuse attempts below this one.
pub(crate) async fn fence(network: Network, worker: String, request: RequestId, attempt: Attempt) {
    let mut client = node::limits!(WorkerClient::new(network.connect(&worker)));
    for _ in 0..FENCE_TRIES {
        let message = wire::FenceRequest { request: request.0.clone(), attempt: attempt.0 };
        let mut call = Request::new(message);
        call.set_timeout(FENCE_TIMEOUT);
        match client.fence(call).await {
            Ok(_) => return,
            Err(status) => {
                let error = Error::from(status);
                tracing::debug!(%request, worker, attempt = attempt.0, %error, "fence did not arrive");
            }
        }
        tokio::time::sleep(FENCE_TIMEOUT / 5).await;
    }
}
