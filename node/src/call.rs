//! One call on the server's side: its deadline holds, a panic of its handler is contained, and while it is open the
//! process is busy.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::FutureExt;
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use proto::Reason;
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tower::ServiceExt;

use crate::deadline::{bounded, is_last, trailers};
use crate::tasks::panic_message;
use crate::{Busy, Shutdown, telemetry};

/// Services and methods whose calls never end by themselves, so that no drain may wait for them.
const ENDLESS: [&str; 3] = ["/grpc.health.", "/grpc.reflection.", "/baton.v1.Worker/Watch"];

/// Serves a call. Always answers with a response: a fault is a gRPC status.
pub(crate) async fn serve(
    routes: Routes,
    shutdown: Shutdown,
    request: Request<Body>,
) -> Result<Response<Body>, Status> {
    let endless = ENDLESS.iter().any(|service| request.uri().path().starts_with(service));
    let busy = (!endless).then(|| shutdown.busy());
    let trace = telemetry::incoming(request.headers());
    bounded(request, |request| async move {
        let answer = AssertUnwindSafe(trace.scope(routes.oneshot(request))).catch_unwind().await;
        let response = match answer {
            Ok(Ok(response)) => response,
            Ok(Err(never)) => match never {},
            Err(panic) => return Ok(panicked(&*panic).into_http()),
        };
        Ok(response.map(|body| Body::new(CallBody { open: Some((body, busy)) })))
    })
    .await
}

/// Serves an HTTP request, and keeps `busy` until its answer is read. A panic of its handler is a bare 500; one of its
/// body ends the connection.
pub(crate) async fn serve_http(
    router: axum::Router,
    busy: Option<Busy>,
    request: Request<axum::body::Body>,
) -> Response<axum::body::Body> {
    let trace = telemetry::incoming(request.headers());
    let answer = AssertUnwindSafe(trace.scope(router.oneshot(request))).catch_unwind().await;
    match answer {
        Ok(Ok(response)) => response.map(|body| {
            // The guard lives in the closure, and so as long as the body.
            axum::body::Body::new(body.map_frame(move |frame| {
                let _ = &busy;
                frame
            }))
        }),
        Ok(Err(never)) => match never {},
        Err(panic) => {
            tracing::error!(message = panic_message(&*panic), "a handler panicked");
            let mut response = Response::new(axum::body::Body::empty());
            *response.status_mut() = http::StatusCode::INTERNAL_SERVER_ERROR;
            response
        }
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Status {
    let message = panic_message(panic);
    tracing::error!(message, "a handler panicked");
    proto::Error::new(Reason::Internal, format!("handler panicked: {message}")).into()
}

/// A response body that holds the call's guard and contains its panics. It lets go of both with its last frame, not
/// when its reader gets round to dropping it.
struct CallBody {
    /// `None` once it ended.
    open: Option<(Body, Option<Busy>)>,
}

impl http_body::Body for CallBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some((body, _)) = &mut self.open else { return Poll::Ready(None) };
        let frame = match catch_unwind(AssertUnwindSafe(|| Pin::new(body).poll_frame(cx))) {
            Ok(frame) => ready!(frame),
            Err(panic) => Some(trailers(&panicked(&*panic))),
        };
        if is_last(frame.as_ref()) {
            self.open = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.open.as_ref().is_none_or(|(body, _)| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.open.as_ref().map_or_else(|| SizeHint::with_exact(0), |(body, _)| body.size_hint())
    }
}
