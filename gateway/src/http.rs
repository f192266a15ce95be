//! The HTTP front: routes, limits, and how an answer of any dialect goes out.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::PathRejection;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::FutureExt;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, TE, TRAILER, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body::Frame;
use http_body_util::StreamBody;
use serde::Deserialize;
use tower_http::catch_panic::CatchPanicLayer;

use crate::answers::Answers;
use crate::dialect::mindie::MindIe;
use crate::dialect::openai::{self, OpenAi};
use crate::dialect::triton::{self, Envelope};
use crate::dialect::{Call, Events, Family, Writer, generate};
use crate::docs::{
    self, ChatAnswer, ChatRequest, CompletionAnswer, CompletionRequest, GenerateRequest, GeneratedAnswer,
    MindIeRefusals, ModelAnswer, ModelsAnswer, OpenAiRefusals, StreamEvent, TritonAnswer, TritonRequest,
};
use crate::fault::Fault;
use crate::front::body::parsed;
pub(crate) use crate::front::body::read as read_body;
use crate::service::{Service, Ticket};
use crate::timing::{Part, Parts};
use crate::{manage, tgi, tokens};

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Set by a client that moves a request which already has tokens.
const IS_RECOMPUTE: HeaderName = HeaderName::from_static("is-recompute");

/// Where a request's time went: <https://www.w3.org/TR/server-timing/>.
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// The session that a request belongs to.
const X_SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");

/// Most characters of a session's name; a longer one is none.
const SESSION_CHARS_MAX: usize = 1024;

/// Tells OpenAI's clients whether to try again.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

pub(crate) type Shared = State<Arc<Service>>;

/// A word of the path, which may not be UTF-8 once decoded.
pub(crate) type PathResult = Result<Path<String>, PathRejection>;

/// All routes. Each family contains its own panics, so that even those are answered in its own words.
pub(crate) fn routes(service: Arc<Service>) -> Router {
    let body_limit = DefaultBodyLimit::max(service.config.body_bytes_max);
    let strict = service.config.triton_strict;
    let v2 = Router::new()
        .route("/v2/health/live", get(live))
        .route("/v2/health/ready", get(ready))
        .route("/v2/models/{model}/generate", post(triton_generate))
        .route("/v2/models/{model}/generate_stream", post(triton_generate_stream))
        .route("/v2/models/{model}/versions/{version}/generate", post(triton_generate))
        .route("/v2/models/{model}/versions/{version}/generate_stream", post(triton_generate_stream))
        .route("/v2/models/{model}/stopInfer", post(manage::stop))
        .route("/v2/models/{model}/getSlotCount", get(manage::slots))
        .merge(crate::kserve::http::routes())
        .layer(map_response(move |response: Response| {
            std::future::ready(if strict { as_triton(response) } else { response })
        }));
    let mindie = Router::new()
        .route("/health", get(ready))
        .route("/health/{timed}", get(manage::trial))
        .route("/ping", get(ready).post(ready))
        .route("/version", get(tokens::version))
        .route("/info", get(tgi::info))
        .route("/", post(tgi::root))
        .route("/generate", post(plain_generate))
        .route("/generate_stream", post(tgi::generate_stream))
        .route("/v1/tokenizer", post(tokens::tokenizer))
        .merge(v2)
        .layer(CatchPanicLayer::custom(panicked::<MindIe>));
    let mut openai = Router::new()
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .merge(openai_routes("/v1"));
    if service.config.prefixless_aliases {
        openai = openai.merge(openai_routes(""));
    }
    let openai = openai.layer(CatchPanicLayer::custom(panicked::<OpenAi>));
    mindie
        .merge(openai)
        .merge(docs::routes())
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(body_limit)
        .with_state(service)
}

/// The routes of `OpenAI`'s family behind a prefix.
fn openai_routes(prefix: &str) -> Router<Arc<Service>> {
    let path = |rest: &str| format!("{prefix}{rest}");
    Router::new()
        .route(&path("/chat/completions"), post(chat_completions))
        .route(&path("/completions"), post(completions))
        .route(&path("/models"), get(list_models))
        .route(&path("/models/{*id}"), get(get_model))
}

/// Whether a path is of `OpenAI`'s family, with its prefix or without.
fn is_openai(path: &str) -> bool {
    let known = ["/chat/completions", "/completions", "/models", "/tokenize", "/detokenize", "/v1"];
    let below = ["/models/", "/v1/"].iter().any(|folder| path.starts_with(folder));
    // MindIE's own path is among them.
    (known.contains(&path) || below) && path != "/v1/tokenizer"
}

/// Triton refuses faulty requests with 400, where MindIE says 422.
fn as_triton(mut response: Response) -> Response {
    if response.status() == StatusCode::UNPROCESSABLE_ENTITY {
        *response.status_mut() = StatusCode::BAD_REQUEST;
    }
    response
}

/// Whether the server runs.
#[utoipa::path(get, path = "/v2/health/live", tag = "health", responses((status = 200, description = "it runs")))]
pub(crate) async fn live() -> StatusCode {
    StatusCode::OK
}

/// Whether the server can answer. `/health` and `/ping` say the same.
#[utoipa::path(get, path = "/v2/health/ready", tag = "health", responses(
    (status = 200, description = "it can"), (status = 503, description = "it cannot")
))]
pub(crate) async fn ready(State(service): Shared) -> StatusCode {
    if service.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// A model of the path, and its version where one is named.
#[derive(Deserialize)]
pub(crate) struct ModelPath {
    model: String,
    version: Option<String>,
}

impl ModelPath {
    /// The model's name. A model has one version, the first.
    fn model(self) -> Option<String> {
        let Self { model, version } = self;
        version.is_none_or(|version| version == "1").then_some(model)
    }
}

pub(crate) type ModelPathResult = Result<Path<ModelPath>, PathRejection>;

/// Continues a text.
#[utoipa::path(post, path = "/v2/models/{model}/generate", tag = "Triton",
    params(("model" = String, Path, description = "the model")), request_body = TritonRequest,
    responses((status = 200, description = "the text", body = TritonAnswer), MindIeRefusals))]
pub(crate) async fn triton_generate(state: Shared, path: ModelPathResult, request: Request) -> Response {
    triton_call(state, path, request, false).await
}

/// Continues a text, token by token, as server-sent events.
#[utoipa::path(post, path = "/v2/models/{model}/generate_stream", tag = "Triton",
    params(("model" = String, Path, description = "the model")), request_body = TritonRequest,
    responses((status = 200, description = "an event for each token", content_type = "text/event-stream",
        body = StreamEvent), MindIeRefusals))]
pub(crate) async fn triton_generate_stream(
    state: Shared,
    path: ModelPathResult,
    request: Request,
) -> Response {
    triton_call(state, path, request, true).await
}

async fn triton_call(
    State(service): Shared,
    path: ModelPathResult,
    request: Request,
    stream: bool,
) -> Response {
    let Some(model) = path.ok().and_then(|Path(path)| path.model()) else {
        return unknown_path(request).await;
    };
    let recompute = request
        .headers()
        .get(IS_RECOMPUTE)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"));
    serve::<MindIe, _>(&service, "triton", request, move |service, body| {
        // An unknown model comes before a fault of the body.
        service.model(Some(&model), "model")?;
        triton::parse(&service.config, Envelope { model: &model, stream, recompute }, body)
    })
    .await
}

/// Continues a text. A body with `prompt` is vLLM's, in whose stream each object is followed by NUL; one with `inputs`
/// is TGI's, and its stream one of server-sent events.
#[utoipa::path(post, path = "/generate", tag = "vLLM", request_body = GenerateRequest,
    responses((status = 200, description = "the texts, vLLM's or TGI's", content(
        (GeneratedAnswer = "application/json"), (StreamEvent = "text/event-stream"))), MindIeRefusals))]
pub(crate) async fn plain_generate(State(service): Shared, request: Request) -> Response {
    serve::<MindIe, _>(&service, "vllm", request, |service, body| generate::parse(&service.config, body))
        .await
}

/// Answers a chat.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "OpenAI", request_body = ChatRequest,
    responses((status = 200, description = "the answer, or a stream of its chunks", content(
        (ChatAnswer = "application/json"), (StreamEvent = "text/event-stream"))), OpenAiRefusals))]
pub(crate) async fn chat_completions(State(service): Shared, request: Request) -> Response {
    serve::<OpenAi, _>(&service, "openai", request, |service, body| {
        let setting =
            openai::Setting { config: &service.config, model: &|name| service.model(name, "model") };
        openai::parse_chat(body, &setting)
    })
    .await
}

/// Continues texts.
#[utoipa::path(post, path = "/v1/completions", tag = "OpenAI", request_body = CompletionRequest,
    responses((status = 200, description = "the texts, or a stream of their chunks", content(
        (CompletionAnswer = "application/json"), (StreamEvent = "text/event-stream"))), OpenAiRefusals))]
pub(crate) async fn completions(State(service): Shared, request: Request) -> Response {
    serve::<OpenAi, _>(&service, "openai", request, |_, body| openai::parse_completion(body)).await
}

/// The served models.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI",
    responses((status = 200, description = "the models", body = ModelsAnswer), OpenAiRefusals))]
pub(crate) async fn list_models(State(service): Shared) -> Response {
    let served = service.served.borrow().clone();
    let models = openai::models(served.models.iter().map(Arc::as_ref), service.started_at);
    json_body(models)
}

/// A served model.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "OpenAI", params(("id" = String, Path, description = "its name")),
    responses((status = 200, description = "the model", body = ModelAnswer), OpenAiRefusals))]
pub(crate) async fn get_model(State(service): Shared, path: PathResult, request: Request) -> Response {
    let Ok(Path(id)) = path else { return unknown_path(request).await };
    let served = service.served.borrow().clone();
    match served.find(&id) {
        Some(model) => json_body(openai::model(model, service.started_at)),
        None => refusal::<OpenAi>(&Fault::Model(id)),
    }
}

/// Lets a request in, or refuses it in its family's words and counts that.
pub(crate) fn enter<F: Family>(service: &Service, dialect: &'static str) -> Result<Ticket, Box<Response>> {
    service.ticket(dialect).map_err(|fault| {
        let response = refusal::<F>(&fault);
        crate::metrics::answered(dialect, response.status().as_u16());
        Box::new(response)
    })
}

/// One request from arrival to the start of its answer: a place, the body, the dialect's reading of it, the first
/// token. A fault up to there has a status of its own.
pub(crate) async fn serve<F: Family, W: Writer>(
    service: &Arc<Service>,
    dialect: &'static str,
    request: Request,
    parse: impl FnOnce(&Service, &[u8]) -> Result<Call<W>, Fault> + Send + 'static,
) -> Response {
    let mut ticket = match enter::<F>(service, dialect) {
        Ok(ticket) => ticket,
        Err(refused) => return *refused,
    };
    let trailers = takes_trailers(request.headers());
    match answer::<F, W>(service, &mut ticket, request, parse).await {
        Ok(Out::Whole(body)) => {
            ticket.ended(StatusCode::OK.as_u16());
            let mut response = json_body(body);
            response.headers_mut().extend(server_timing(&ticket.mark(Part::Write)));
            response
        }
        Ok(Out::Stream(answers, writer)) => stream::<F, W>(*answers, writer, (ticket, trailers)),
        Err(fault) => {
            let response = refusal::<F>(&fault);
            ticket.ended(response.status().as_u16());
            response
        }
    }
}

enum Out<W> {
    Whole(Bytes),
    Stream(Box<Answers>, W),
}

async fn answer<F: Family, W: Writer>(
    service: &Arc<Service>,
    ticket: &mut Ticket,
    request: Request,
    parse: impl FnOnce(&Service, &[u8]) -> Result<Call<W>, Fault> + Send + 'static,
) -> Result<Out<W>, Fault> {
    let reading = ticket.span().child("gateway.read");
    let named = named_session(request.headers());
    let body = read_body(service, request).await?;
    let parsing = service.clone();
    let parsed = parsed(&service.tasks, body, move |body| parse(&parsing, body)).await;
    let Call { mut requests, mut writer, stream } = parsed?;
    drop(reading);
    if let Some(dialect) = writer.dialect() {
        ticket.is_of(dialect);
    }
    if named.is_some() {
        requests.iter_mut().for_each(|request| request.session.clone_from(&named));
    }
    let mut answers = service.start(requests, ticket).await?;
    if stream {
        return Ok(Out::Stream(Box::new(answers), writer));
    }
    let wholes = answers.whole().await?;
    writer.take_timings(&ticket.mark(Part::Write));
    Ok(Out::Whole(writer.whole(answers.started(), &wholes)))
}

/// The session that the client names beside its request, up to [`SESSION_CHARS_MAX`] of printable ASCII.
pub(crate) fn named_session(headers: &HeaderMap) -> Option<String> {
    let name = headers.get(X_SESSION_ID)?.to_str().ok()?;
    (1..=SESSION_CHARS_MAX).contains(&name.len()).then(|| name.to_owned())
}

/// Sends an answer piece by piece. Each event is a chunk of its own, so that clients that take a chunk for an event
/// are right. When the client goes away the body is dropped, and with it the request everywhere.
fn stream<F: Family, W: Writer>(
    mut answers: Answers,
    mut writer: W,
    (ticket, trailers): (Ticket, bool),
) -> Response {
    let mut events = Events::new();
    writer.begin(&answers.take_started(), &mut events);
    let state = Streaming { answers, writer, ticket, events, sent: 0, ended: false, trailers };
    let body = futures::stream::unfold(state, |mut state| async move {
        let frame = match state.next::<F>().await {
            Some(event) => Frame::data(event),
            None => Frame::trailers(state.take_trailers()?),
        };
        Some((Ok::<_, std::convert::Infallible>(frame), state))
    });
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static(W::STREAM_TYPE)),
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    let announced = trailers.then_some([(TRAILER, HeaderValue::from_static("server-timing"))]);
    let mut response = (headers, Body::new(StreamBody::new(body))).into_response();
    response.headers_mut().extend(announced.into_iter().flatten());
    response
}

struct Streaming<W> {
    answers: Answers,
    writer: W,
    ticket: Ticket,
    /// Events that are written.
    events: Events,
    /// How many of them are sent.
    sent: usize,
    ended: bool,
    /// Trailers are still to be sent.
    trailers: bool,
}

impl<W: Writer> Streaming<W> {
    async fn next<F: Family>(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.events.get_mut(self.sent) {
                self.sent += 1;
                return Some(std::mem::take(event));
            }
            if self.ended {
                return None;
            }
            self.events.clear();
            self.sent = 0;
            // A panic becomes the last event: a stream is never cut without a word.
            let next = AssertUnwindSafe(self.answers.next()).catch_unwind().await;
            match next.unwrap_or_else(|panic| Err(panic_fault(&*panic))) {
                Ok(Some((choice, piece))) => self.writer.piece(choice, &piece, &mut self.events),
                Ok(None) => {
                    self.writer.take_timings(&self.ticket.mark(Part::Write));
                    self.writer.end(&mut self.events);
                    self.end(StatusCode::OK);
                }
                Err(fault) => {
                    tracing::warn!(%fault, "answer failed after it began");
                    self.events.push(self.writer.fault(&fault));
                    self.end(F::refusal(&fault).0);
                }
            }
        }
    }

    /// What follows the last event, once, for who takes it.
    fn take_trailers(&mut self) -> Option<HeaderMap> {
        let wanted = std::mem::take(&mut self.trailers);
        wanted.then(|| HeaderMap::from_iter(server_timing(&self.ticket.mark(Part::Write))))
    }

    fn end(&mut self, status: StatusCode) {
        self.ended = true;
        self.ticket.ended(status.as_u16());
    }
}

/// Whether the client has said that it takes trailers.
fn takes_trailers(headers: &HeaderMap) -> bool {
    let values = headers.get_all(TE).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
}

/// Where a request's time went, as a header or trailer.
fn server_timing(parts: &Parts) -> Option<(HeaderName, HeaderValue)> {
    Some((SERVER_TIMING, HeaderValue::try_from(parts.header()).ok()?))
}

/// A body of JSON.
pub(crate) fn json_body(body: impl IntoResponse) -> Response {
    ([(CONTENT_TYPE, JSON)], body).into_response()
}

/// A refusal before the answer begins.
pub(crate) fn refusal<F: Family>(fault: &Fault) -> Response {
    let (status, body) = F::refusal(fault);
    tracing::debug!(%fault, status = status.as_u16(), "request refused");
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, JSON);
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        StatusCode::UNAUTHORIZED => {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // OpenAI's clients repeat a request that timed out, which would only time out again.
        StatusCode::REQUEST_TIMEOUT => {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        _ => {}
    }
    (status, headers, body).into_response()
}

/// A refusal by the path's family.
pub(crate) fn refusal_at(path: &str, fault: &Fault) -> Response {
    if is_openai(path) { refusal::<OpenAi>(fault) } else { refusal::<MindIe>(fault) }
}

pub(crate) async fn unknown_path(request: Request) -> Response {
    let path = request.uri().path();
    refusal_at(path, &Fault::Path(path.to_owned()))
}

async fn wrong_method(request: Request) -> Response {
    let path = request.uri().path();
    refusal_at(path, &Fault::Method { method: request.method().to_string(), path: path.to_owned() })
}

/// Answers for a handler that panicked.
fn panicked<F: Family>(panic: Box<dyn std::any::Any + Send>) -> Response {
    refusal::<F>(&panic_fault(&*panic))
}

pub(crate) fn panic_fault(panic: &(dyn std::any::Any + Send)) -> Fault {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(message = text.unwrap_or("a panic without a message"), "a handler panicked");
    Fault::Service(proto::Error::new(proto::Reason::Internal, "internal error"))
}
