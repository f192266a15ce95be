//! `X-Request-Id`: the client's name for its request, or one that is drawn. Every answer bears it, and so does all that
//! is logged on the way to that answer.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body::{Frame, SizeHint};
use tracing::{Instrument, Span};
use uuid::Uuid;

pub(super) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Most bytes of a name that is given back; a longer one is replaced.
const NAME_BYTES_MAX: usize = 8 << 10;

/// Most characters of a name or a path that are logged.
const LOGGED_CHARS_MAX: usize = 128;

/// Names the request, its answer and its span.
pub(super) async fn layer(request: Request, next: Next) -> Response {
    let name = name(request.headers());
    let logged = |text: &str| text.chars().take(LOGGED_CHARS_MAX).collect::<String>();
    let span = tracing::info_span!(
        "request",
        id = logged(name.to_str().unwrap_or_default()),
        method = request.method().as_str(),
        path = logged(request.uri().path()),
        // Known once the request is let in, if traces are exported.
        trace_id = tracing::field::Empty
    );
    let mut response = next.run(request).instrument(span.clone()).await;
    response.headers_mut().insert(X_REQUEST_ID, name);
    if span.is_disabled() || response.body().is_end_stream() {
        return response;
    }
    response.map(|body| Body::new(Spanned { body, span }))
}

/// The client's name if it can be given back, else a new one.
fn name(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(X_REQUEST_ID).filter(|name| {
        let bytes = name.as_bytes();
        (1..=NAME_BYTES_MAX).contains(&bytes.len()) && bytes.iter().all(|byte| (b' '..=b'~').contains(byte))
    });
    given.cloned().unwrap_or_else(|| {
        HeaderValue::try_from(Uuid::new_v4().simple().to_string()).expect("hexadecimal digits")
    })
}

/// A body that is written within its request's span.
struct Spanned {
    body: Body,
    span: Span,
}

impl HttpBody for Spanned {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let _entered = this.span.enter();
        Pin::new(&mut this.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(value: &[u8]) -> HeaderValue {
        name(&HeaderMap::from_iter([(X_REQUEST_ID, HeaderValue::from_bytes(value).unwrap())]))
    }

    #[test]
    fn a_printable_name_is_kept_and_any_other_replaced() {
        for kept in ["a", "order 7/2 {x}~", &"n".repeat(NAME_BYTES_MAX)] {
            assert_eq!(named(kept.as_bytes()), kept);
        }
        for replaced in ["", "tab\there", "é", &"n".repeat(NAME_BYTES_MAX + 1)] {
            let name = named(replaced.as_bytes());
            assert_eq!(name.len(), 32, "{replaced:?}");
            assert_ne!(name, named(replaced.as_bytes()), "each is new");
        }
        assert_eq!(name(&HeaderMap::new()).len(), 32);
    }
}
