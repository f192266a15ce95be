//! A server of files on loopback, as good or as bad as a test wants it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures::{StreamExt as _, stream};
use http::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_RANGE, LOCATION, RANGE};
use http::{HeaderMap, StatusCode};
use node::{Context, Public};

/// What the server does with its next request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mood {
    /// Sends so many bytes and closes the connection.
    CutAfter(usize),
    /// Answers with this status and nothing else.
    Status(u16),
    /// Answers nothing, ever.
    Silent,
}

/// One request that came: its path with the query, what of the file it asked for, and who asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) range: Option<String>,
    pub(crate) if_range: Option<String>,
    pub(crate) authorization: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Held {
    pub(crate) bytes: Vec<u8>,
    /// The version's name; a server without one names none.
    pub(crate) tag: Option<String>,
    pub(crate) knows_ranges: bool,
    pub(crate) moods: VecDeque<Mood>,
    pub(crate) asked: Vec<Asked>,
    /// Bytes of bodies that were handed out.
    pub(crate) sent: usize,
    /// The listing of a hub, which wants a token.
    pub(crate) listing: Option<(String, &'static str)>,
    /// Where a hub's files really are, and the digest that it tells on the way there.
    pub(crate) linked: Option<(String, String)>,
}

/// A running server. It ends when this is dropped.
pub(crate) struct Server {
    pub(crate) address: String,
    pub(crate) held: Arc<Mutex<Held>>,
    context: Context,
}

impl Server {
    pub(crate) async fn start(held: Held) -> Self {
        Self::start_public(held, &Public::default()).await
    }

    pub(crate) async fn start_public(held: Held, public: &Public) -> Self {
        let context = Context::new("files", Vec::new());
        let held = Arc::new(Mutex::new(held));
        let router = Router::new().fallback(answer).with_state(held.clone());
        let serving = node::serve_public_http("127.0.0.1:0", router, public, &context).await.unwrap();
        Self { address: serving.address, held, context }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// What was asked since this was asked last.
    pub(crate) fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.held.lock().unwrap().asked)
    }

    pub(crate) fn sent(&self) -> usize {
        self.held.lock().unwrap().sent
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.context.shutdown.stop();
    }
}

async fn answer(State(held): State<Arc<Mutex<Held>>>, request: Request) -> Response {
    let mood = {
        let mut held = held.lock().unwrap();
        held.asked.push(asked(&request));
        held.moods.pop_front()
    };
    match mood {
        Some(Mood::Silent) => std::future::pending().await,
        Some(Mood::Status(status)) => StatusCode::from_u16(status).unwrap().into_response(),
        Some(Mood::CutAfter(bytes)) => file(&mut held.lock().unwrap(), request.headers(), bytes),
        None => {
            let mut held = held.lock().unwrap();
            if request.uri().path().starts_with("/api/models/") {
                return listing(&held, request.headers());
            }
            match &held.linked {
                Some((location, digest)) => {
                    let headers = [
                        (LOCATION.as_str(), location.clone()),
                        ("x-linked-etag", format!("\"{digest}\"")),
                        (ETAG.as_str(), "\"a-tag-of-the-redirect\"".to_owned()),
                    ];
                    (StatusCode::FOUND, headers).into_response()
                }
                None => file(&mut held, request.headers(), usize::MAX),
            }
        }
    }
}

fn asked(request: &Request) -> Asked {
    let header = |name| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    Asked {
        path: request.uri().to_string(),
        range: header(RANGE),
        if_range: header(IF_RANGE),
        authorization: header(http::header::AUTHORIZATION),
    }
}

fn listing(held: &Held, headers: &HeaderMap) -> Response {
    let Some((text, token)) = &held.listing else { return StatusCode::NOT_FOUND.into_response() };
    let shown = headers.get(http::header::AUTHORIZATION).map(|value| value.to_str().unwrap());
    if shown != Some(&format!("Bearer {token}")) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    text.clone().into_response()
}

fn file(held: &mut Held, headers: &HeaderMap, cut_after: usize) -> Response {
    let header = |name| headers.get(name).map(|value| value.to_str().unwrap());
    let whole = held.bytes.len();
    let range = header(RANGE).filter(|_| held.knows_ranges);
    let is_same = header(IF_RANGE).is_none_or(|tag| Some(tag) == held.tag.as_deref());
    let from = range.filter(|_| is_same).map(|range| {
        range.strip_prefix("bytes=").and_then(|range| range.strip_suffix('-')).unwrap().parse().unwrap()
    });
    let start: usize = from.unwrap_or(0);
    if start >= whole && from.is_some() {
        return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
    }
    let part = Bytes::copy_from_slice(&held.bytes[start..]);
    let sent = part.slice(..cut_after.min(part.len()));
    held.sent += sent.len();
    let is_cut = sent.len() < part.len();
    // What was handed out is on its way before the connection breaks: a body that waits is written out.
    let cut = stream::iter(is_cut.then_some(())).then(async |()| {
        tokio::time::sleep(Duration::from_millis(20)).await;
        Err(std::io::Error::other("cut"))
    });
    let mut answer = Response::new(Body::from_stream(stream::iter([Ok(sent)]).chain(cut)));
    answer.headers_mut().insert(CONTENT_LENGTH, part.len().into());
    if let Some(tag) = &held.tag {
        answer.headers_mut().insert(ETAG, tag.parse().unwrap());
    }
    if held.knows_ranges {
        answer.headers_mut().insert(ACCEPT_RANGES, "bytes".parse().unwrap());
    }
    if from.is_some() {
        let range = format!("bytes {start}-{}/{whole}", whole - 1);
        answer.headers_mut().insert(CONTENT_RANGE, range.parse().unwrap());
        *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    answer
}
