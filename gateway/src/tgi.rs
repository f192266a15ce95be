//! The routes that TGI's clients use. `/generate` is in `http`, since vLLM's clients use it too.

use axum::extract::{Request, State};
use axum::response::Response;

use crate::dialect::fields::{Fields, Integers};
use crate::dialect::mindie::MindIe;
use crate::dialect::tgi::{Route, described, parse};
use crate::docs::{DescriptionAnswer, MindIeRefusals, StreamEvent, TgiAnswer, TgiRequest};
use crate::fault::Fault;
use crate::http::{Shared, json_body, refusal, serve};

async fn call(State(service): Shared, request: Request, route: Route) -> Response {
    serve::<MindIe, _>(&service, "tgi", request, move |service, body| {
        parse(&service.config, route, Fields::parse(body, Integers::Strict)?)
    })
    .await
}

/// Continues a text; an answer in one piece stands in a list.
#[utoipa::path(post, path = "/", tag = "TGI", request_body = TgiRequest,
    responses((status = 200, description = "the text, or a stream of its tokens", content(
        (Vec<TgiAnswer> = "application/json"), (StreamEvent = "text/event-stream"))), MindIeRefusals))]
pub(crate) async fn root(state: Shared, request: Request) -> Response {
    call(state, request, Route::Root).await
}

/// Continues a text, token by token, as server-sent events.
#[utoipa::path(post, path = "/generate_stream", tag = "TGI", request_body = TgiRequest,
    responses((status = 200, description = "an event for each token", content_type = "text/event-stream",
        body = StreamEvent), MindIeRefusals))]
pub(crate) async fn generate_stream(state: Shared, request: Request) -> Response {
    call(state, request, Route::GenerateStream).await
}

/// What is served, and within which limits.
#[utoipa::path(get, path = "/info", tag = "TGI",
    responses((status = 200, description = "models and limits; null for what has no meaning here",
        body = DescriptionAnswer), MindIeRefusals))]
pub(crate) async fn info(State(service): Shared) -> Response {
    let models = service.served.borrow().models.clone();
    match described(&models, &service.config) {
        Some(body) => json_body(body),
        None => refusal::<MindIe>(&Fault::NotReady("no model is served yet".to_owned())),
    }
}
