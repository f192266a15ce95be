//! The routes of those who want a text's tokens and nothing generated, and the server's version.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use crate::dialect::mindie::MindIe;
use crate::dialect::mindie_tokens;
use crate::dialect::openai::{self, OpenAi, Setting};
use crate::dialect::{Family, json};
use crate::docs::{
    CountRequest, CountedAnswer, DetokenizeRequest, DetokenizedAnswer, MindIeRefusals, OpenAiRefusals,
    TokenizeRequest, TokenizedAnswer, VersionAnswer,
};
use crate::fault::Fault;
use crate::http::{Shared, enter, json_body, read_body, refusal};
use crate::service::Service;

/// Answers with what `work` makes of the body. It has a place among the requests in the house, and a thread that may
/// take its time.
async fn work<F: Family>(
    service: &Arc<Service>,
    dialect: &'static str,
    request: Request,
    work: impl FnOnce(&Service, &[u8]) -> Result<String, Fault> + Send + 'static,
) -> Response {
    let mut ticket = match enter::<F>(service, dialect) {
        Ok(ticket) => ticket,
        Err(refused) => return *refused,
    };
    let working = service.clone();
    let answer = async {
        let body = read_body(service, request).await?;
        service.tasks.spawn_blocking("tokenize", move || work(&working, &body)).await?
    };
    let response = match answer.await {
        Ok(body) => json_body(body),
        Err(fault) => refusal::<F>(&fault),
    };
    ticket.ended(response.status().as_u16());
    response
}

/// The tokens of a text or a chat.
#[utoipa::path(post, path = "/tokenize", tag = "tokens", request_body = TokenizeRequest,
    responses((status = 200, description = "the tokens", body = TokenizedAnswer), OpenAiRefusals))]
pub(crate) async fn tokenize(State(service): Shared, request: Request) -> Response {
    work::<OpenAi>(&service, "tokenize", request, |service, body| {
        let find = |name: Option<&str>| service.model(name, "model");
        openai::tokenized(body, &Setting { config: &service.config, model: &find })
    })
    .await
}

/// The text of tokens.
#[utoipa::path(post, path = "/detokenize", tag = "tokens", request_body = DetokenizeRequest,
    responses((status = 200, description = "the text", body = DetokenizedAnswer), OpenAiRefusals))]
pub(crate) async fn detokenize(State(service): Shared, request: Request) -> Response {
    work::<OpenAi>(&service, "detokenize", request, |service, body| {
        let find = |name: Option<&str>| service.model(name, "model");
        openai::detokenized(body, &Setting { config: &service.config, model: &find })
    })
    .await
}

/// How many tokens a text has, and which.
#[utoipa::path(post, path = "/v1/tokenizer", tag = "tokens", request_body = CountRequest,
    responses((status = 200, description = "the tokens", body = CountedAnswer), MindIeRefusals))]
pub(crate) async fn tokenizer(State(service): Shared, request: Request) -> Response {
    work::<MindIe>(&service, "tokenize", request, |service, body| {
        let asked = mindie_tokens::parse(body)?;
        let model = service.model(asked.model.as_deref(), "model")?;
        mindie_tokens::counted(&asked, &model)
    })
    .await
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
}

/// The server's version.
#[utoipa::path(get, path = "/version", tag = "health",
    responses((status = 200, description = "the version", body = VersionAnswer)))]
pub(crate) async fn version() -> Response {
    json_body(json(&Version { version: env!("CARGO_PKG_VERSION") }))
}
