//! Deadlines, over every transport.
//!
//! gRPC sends a call's remaining time as the header `grpc-timeout`. A direct call has nothing that would read it, and
//! tonic's own transport answers CANCELLED where it passes. So both sides of ours apply it here: at the deadline the
//! call is dropped, which is how anything is cancelled, and the caller reads DEADLINE_EXCEEDED.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Frame, SizeHint};
use proto::Reason;
use tokio::time::Sleep;
use tonic::Status;
use tonic::body::Body;

const HEADER: &str = "grpc-timeout";

/// Longest time that a call says it has left: `grpc-timeout` has no room for much more, and nobody waits for it.
const TIME_LEFT_MAX: Duration = Duration::from_hours(24 * 30);

/// Gives a call what is left of its request's deadline, as the header that every transport here obeys.
pub fn set_time_left<T>(request: &mut tonic::Request<T>, time_left: Duration) {
    request.set_timeout(time_left.min(TIME_LEFT_MAX));
}

/// Makes the call, and ends it at the deadline that its header names.
pub(crate) async fn bounded<F>(
    request: Request<Body>,
    call: impl FnOnce(Request<Body>) -> F,
) -> Result<Response<Body>, Status>
where
    F: Future<Output = Result<Response<Body>, Status>>,
{
    let limit = match timeout(request.headers()) {
        Ok(Some(limit)) => limit,
        Ok(None) => return call(request).await,
        Err(error) => return Ok(Status::from(error).into_http()),
    };
    let mut sleep = Box::pin(tokio::time::sleep(limit));
    tokio::select! {
        biased;
        () = &mut sleep => Ok(exceeded(limit).into_http()),
        response = call(request) => {
            Ok(response?.map(|body| Body::new(BoundedBody { body: Some(body), sleep, limit })))
        }
    }
}

fn exceeded(limit: Duration) -> Status {
    proto::Error::new(Reason::Deadline, format!("deadline of {limit:?} passed")).into()
}

/// Reads the header: at most eight digits and a unit.
fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, proto::Error> {
    let Some(value) = headers.get(HEADER) else { return Ok(None) };
    let malformed = || {
        proto::Error::invalid(
            HEADER,
            format!("expected up to 8 digits and H, M, S, m, u or n, got {value:?}"),
        )
    };
    let (digits, unit) = value
        .to_str()
        .ok()
        .and_then(|text| text.split_at_checked(text.len().saturating_sub(1)))
        .ok_or_else(malformed)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(malformed());
    }
    let amount: u64 = digits.parse().map_err(|_| malformed())?;
    let limit = match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return Err(malformed()),
    };
    Ok(Some(limit))
}

/// A response body that ends at the deadline, with the status in its trailers.
struct BoundedBody {
    /// `None` once it ended.
    body: Option<Body>,
    sleep: Pin<Box<Sleep>>,
    limit: Duration,
}

impl http_body::Body for BoundedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.body.is_some() && self.sleep.as_mut().poll(cx).is_ready() {
            self.body = None;
            return Poll::Ready(Some(trailers(&exceeded(self.limit))));
        }
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(cx));
        if is_last(frame.as_ref()) {
            self.body = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// A stream's last frame: the status, as gRPC says it.
pub(crate) fn trailers(status: &Status) -> Result<Frame<Bytes>, Status> {
    let mut headers = HeaderMap::new();
    status.add_header(&mut headers)?;
    Ok(Frame::trailers(headers))
}

/// True of what nothing follows: the end, trailers, or a fault. Readers of gRPC stop at the trailers.
pub(crate) fn is_last(frame: Option<&Result<Frame<Bytes>, Status>>) -> bool {
    match frame {
        Some(Ok(frame)) => frame.is_trailers(),
        Some(Err(_)) | None => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: &str) -> Result<Option<Duration>, proto::Error> {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, value.parse().expect("a header value"));
        timeout(&headers)
    }

    #[test]
    fn a_time_without_end_is_a_long_one() {
        let mut request = tonic::Request::new(());
        set_time_left(&mut request, Duration::MAX);
        let header = request.metadata().get(HEADER).expect("a header").to_str().expect("text").to_owned();
        assert_eq!(read(&header), Ok(Some(TIME_LEFT_MAX)));
    }

    #[test]
    fn every_unit_is_read() {
        let seconds = [("2H", 7200.0), ("3M", 180.0), ("4S", 4.0), ("5m", 0.005), ("6u", 6e-6), ("7n", 7e-9)];
        for (value, expected) in seconds {
            assert_eq!(read(value).unwrap(), Some(Duration::from_secs_f64(expected)), "{value}");
        }
        assert_eq!(timeout(&HeaderMap::new()).unwrap(), None);
        assert!(read("99999999H").unwrap().is_some());
    }

    #[test]
    fn a_malformed_header_is_the_callers_fault() {
        for value in ["", "S", "5", "5x", "-5S", "+5S", "123456789S", "5 S"] {
            let error = read(value).unwrap_err();
            assert_eq!(error.reason, Reason::InvalidArgument, "{value:?}");
            assert!(error.message.starts_with("grpc-timeout: "), "{}", error.message);
        }
    }
}
