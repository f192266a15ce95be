//! The body of a request of HTTP: read as a whole within its limits, and parsed where it holds up nobody.

use axum::body::HttpBody;
use axum::extract::Request;
use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use http_body_util::BodyExt;
use node::Tasks;

use crate::fault::Fault;
use crate::service::Service;

/// Most characters of a header that a fault shows.
const SHOWN_CHARS_MAX: usize = 40;

/// Most bytes of a body that are parsed between other requests' turns: some tenths of a millisecond.
const PARSED_INLINE_BYTES_MAX: usize = 64 << 10;

/// The whole body. What its headers already rule out is refused before any of it is read.
pub(crate) async fn read(service: &Service, request: Request) -> Result<Bytes, Fault> {
    let config = &service.config;
    check_encoding(request.headers())?;
    if request.body().size_hint().lower() > config.body_bytes_max as u64 {
        return Err(Fault::BodyTooLarge { limit: config.body_bytes_max });
    }
    let limit = config.body_timeout.min(config.timeout);
    match tokio::time::timeout(limit, collect(request, config.body_bytes_max)).await {
        Ok(body) => body,
        Err(_) => Err(Fault::BodyTimeout { limit }),
    }
}

/// Copies what comes into one piece, so that a body costs what it holds, however many chunks it came in.
async fn collect(request: Request, limit: usize) -> Result<Bytes, Fault> {
    let mut body = request.into_body();
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(unreadable)?.into_data() else { continue };
        if data.len() > limit - whole.len() {
            return Err(Fault::BodyTooLarge { limit });
        }
        if whole.is_empty() && body.is_end_stream() {
            return Ok(data);
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

fn unreadable(error: axum::Error) -> Fault {
    let error = error.into_inner();
    match error.downcast_ref::<node::Stalled>() {
        Some(stalled) => Fault::NotReady(stalled.to_string()),
        None => Fault::Body(format!("cannot be read: {error}")),
    }
}

/// Checks that the body is not coded.
fn check_encoding(headers: &HeaderMap) -> Result<(), Fault> {
    for value in headers.get_all(CONTENT_ENCODING) {
        let text = String::from_utf8_lossy(value.as_bytes());
        let mut codings = text.split(',').map(str::trim).filter(|coding| !coding.is_empty());
        if let Some(coding) = codings.find(|coding| !coding.eq_ignore_ascii_case("identity")) {
            return Err(Fault::Encoding(coding.chars().take(SHOWN_CHARS_MAX).collect()));
        }
    }
    Ok(())
}

/// What `parse` makes of the body: a small one at once, a large one on a thread where blocking is allowed.
pub(crate) async fn parsed<T: Send + 'static>(
    tasks: &Tasks,
    body: Bytes,
    parse: impl FnOnce(&[u8]) -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    if body.len() <= PARSED_INLINE_BYTES_MAX {
        return parse(&body);
    }
    tasks.spawn_blocking("parse", move || parse(&body)).await?
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::{StreamExt, stream};
    use node::Shutdown;

    use super::*;

    /// Memory that a frame holds as long as it lives.
    struct Held(Arc<AtomicUsize>);

    impl AsRef<[u8]> for Held {
        fn as_ref(&self) -> &[u8] {
            b"x"
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn frames_are_let_go_as_they_come() {
        let held = Arc::new(AtomicUsize::new(0));
        let most = Arc::new(AtomicUsize::new(0));
        let request = || {
            let (counted, peak) = (held.clone(), most.clone());
            let frames = stream::iter(0..70_000).map(move |_| {
                peak.fetch_max(counted.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                Ok::<_, std::io::Error>(Bytes::from_owner(Held(counted.clone())))
            });
            Request::new(axum::body::Body::from_stream(frames))
        };
        let body = collect(request(), 70_000).await.unwrap();
        assert_eq!((body.len(), held.load(Ordering::Relaxed)), (70_000, 0));
        assert!(most.load(Ordering::Relaxed) <= 2, "{most:?} frames were held at once");
        assert_eq!(collect(request(), 69_999).await, Err(Fault::BodyTooLarge { limit: 69_999 }));
    }

    #[tokio::test]
    async fn a_large_body_is_parsed_on_another_thread() {
        let tasks = Tasks::new(Shutdown::new());
        let here = std::thread::current().id();
        let same = async |bytes: usize| {
            let body = Bytes::from(vec![0; bytes]);
            parsed(&tasks, body, move |_| Ok(std::thread::current().id() == here)).await
        };
        assert_eq!(same(PARSED_INLINE_BYTES_MAX).await, Ok(true));
        assert_eq!(same(PARSED_INLINE_BYTES_MAX + 1).await, Ok(false));
    }
}
