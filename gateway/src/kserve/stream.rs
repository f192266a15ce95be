//! `ModelStreamInfer`: any number of requests on one stream, whose responses interleave as they come.
//!
//! Everything runs in the stream of responses itself, so dropping that ends all of it. A request that fails does not
//! disturb the others, unless the client asked for that.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::stream::{BoxStream, SelectAll};
use futures::{FutureExt, Stream, StreamExt};
use proto::wire::inference::{ModelInferRequest, ModelInferResponse, ModelStreamInferResponse};
use tonic::{Status, Streaming};

use super::Running;
use super::grpc::{start, status, status_of, ticket};
use crate::dialect::kserve::messages::Head;
use crate::fault::Fault;
use crate::http::panic_fault;
use crate::service::{Service, Ticket};

/// A response, or the fault of a request of that name.
type Item = Result<ModelInferResponse, (String, Fault)>;

/// The responses to all requests of a stream. With `as_status` the first fault is the stream's own.
pub(super) fn responses(
    service: Arc<Service>,
    requests: Streaming<ModelInferRequest>,
    as_status: bool,
) -> impl Stream<Item = Result<ModelStreamInferResponse, Status>> + Send + 'static {
    let running_max = service.config.streams_max as usize;
    let many = Many { service, requests: Some(requests), running: SelectAll::new(), running_max, as_status };
    futures::stream::unfold(Some(many), |many| async move {
        let mut many = many?;
        match many.next().await? {
            Ok(response) => Some((Ok(response), Some(many))),
            Err(status) => Some((Err(status), None)),
        }
    })
}

struct Many {
    service: Arc<Service>,
    /// `None` once the client has sent its last.
    requests: Option<Streaming<ModelInferRequest>>,
    running: SelectAll<BoxStream<'static, Item>>,
    /// Most that run at once: no more are read until one ends.
    running_max: usize,
    as_status: bool,
}

/// What happened on the stream.
enum Event {
    Request(Option<Result<ModelInferRequest, Status>>),
    Response(Item),
    /// Nothing runs any more.
    Ended,
    Draining,
}

impl Many {
    async fn next(&mut self) -> Option<Result<ModelStreamInferResponse, Status>> {
        loop {
            match self.event().await? {
                Event::Request(Some(Ok(message))) => {
                    self.running.push(answer(self.service.clone(), message).boxed());
                }
                // Closed for good: what was asked for is answered all the same.
                Event::Request(None) => self.requests = None,
                // The way from the client is broken, or what came over it is no message.
                Event::Request(Some(Err(status))) => return Some(Err(status)),
                Event::Response(Ok(response)) => {
                    let error_message = String::new();
                    let infer_response = Some(response);
                    return Some(Ok(ModelStreamInferResponse { error_message, infer_response }));
                }
                Event::Response(Err((_, fault))) if self.as_status => return Some(Err(status(fault))),
                Event::Response(Err((id, fault))) => {
                    let infer_response = Some(Head { id, ..Head::default() }.part(&[], true));
                    let error_message = fault.to_string();
                    return Some(Ok(ModelStreamInferResponse { error_message, infer_response }));
                }
                Event::Ended => {}
                Event::Draining => {
                    return Some(Err(status(Fault::NotReady("the server is shutting down".to_owned()))));
                }
            }
        }
    }

    /// `None` when all is done.
    async fn event(&mut self) -> Option<Event> {
        let Self { service, requests, running, running_max, .. } = self;
        let idle = running.is_empty();
        let has_room = running.len() < *running_max;
        if idle && requests.is_none() {
            return None;
        }
        let request = async {
            match requests {
                Some(requests) if has_room => requests.next().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            // None left: the last of them has ended without a word.
            item = running.next(), if !idle => Some(item.map_or(Event::Ended, Event::Response)),
            message = request => Some(Event::Request(message)),
            // A stream without work must not hold up the end.
            () = service.shutdown.draining(), if idle => Some(Event::Draining),
        }
    }
}

/// One request on its way.
enum Answering {
    Fresh(Box<ModelInferRequest>),
    Running(Box<Responding>),
    Over,
}

struct Responding {
    head: Head,
    running: Running,
    ticket: Ticket,
}

/// The responses to one request: at least one, the last of which says so, or a fault as the last.
fn answer(service: Arc<Service>, message: ModelInferRequest) -> impl Stream<Item = Item> + Send + 'static {
    let id = message.id.clone();
    let state = (service, id, Answering::Fresh(Box::new(message)));
    futures::stream::unfold(state, |(service, id, answering)| async move {
        let step = match answering {
            Answering::Over => return None,
            answering => AssertUnwindSafe(step(&service, answering)).catch_unwind().await,
        };
        // A panic is a fault of its own request alone.
        match step.unwrap_or_else(|panic| Err(panic_fault(&*panic))) {
            Ok((response, answering)) => Some((Ok(response), (service, id, answering))),
            Err(fault) => Some((Err((id.clone(), fault)), (service, id, Answering::Over))),
        }
    })
}

/// The next response.
async fn step(
    service: &Arc<Service>,
    answering: Answering,
) -> Result<(ModelInferResponse, Answering), Fault> {
    let mut responding = match answering {
        Answering::Fresh(message) => Box::new(begin(service, *message).await?),
        Answering::Running(responding) => responding,
        Answering::Over => return Err(proto::Error::new(proto::Reason::Internal, "read past its end").into()),
    };
    let next = if responding.running.stream {
        responding.running.next().await
    } else {
        responding.running.whole().await.map(|outputs| Some((outputs, true)))
    };
    let next = next.and_then(|next| {
        next.ok_or_else(|| {
            proto::Error::new(proto::Reason::Internal, "the answer ended without a last token").into()
        })
    });
    match next {
        Ok((outputs, last)) => {
            let response = responding.head.part(&outputs, last);
            if !last {
                return Ok((response, Answering::Running(responding)));
            }
            responding.ticket.ended(200);
            Ok((response, Answering::Over))
        }
        Err(fault) => {
            responding.ticket.ended(status_of(&fault));
            Err(fault)
        }
    }
}

async fn begin(service: &Arc<Service>, message: ModelInferRequest) -> Result<Responding, Fault> {
    let mut ticket = ticket(service)?;
    match start(service, message, &mut ticket).await {
        Ok((head, running)) => Ok(Responding { head, running, ticket }),
        Err(fault) => {
            ticket.ended(status_of(&fault));
            Err(fault)
        }
    }
}
