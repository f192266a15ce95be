//! The description of the HTTP API, derived from its handlers, and a page that shows it without the internet.

mod kserve;
mod openai_requests;
mod requests;
mod responses;
mod tgi;
mod tokens;

use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::body::Bytes;
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use http::header::CONTENT_TYPE;
use utoipa::OpenApi;

pub(crate) use kserve::{
    ConfigAnswer, IndexEntry, IndexRequest, InferAnswer, InferRequest, MetadataAnswer, ServerAnswer,
    StatisticsAnswer,
};
pub(crate) use openai_requests::{ChatRequest, CompletionRequest};
pub(crate) use requests::TritonRequest;
pub(crate) use responses::MindIeError as Refusal;
pub(crate) use responses::{
    ChatAnswer, CompletionAnswer, MindIeRefusals, ModelAnswer, ModelsAnswer, OpenAiRefusals, SlotsAnswer,
    StopRequest, StoppedAnswer, StreamEvent, TritonAnswer,
};
pub(crate) use tgi::{DescriptionAnswer, GenerateRequest, GeneratedAnswer, TgiAnswer, TgiRequest};
pub(crate) use tokens::{
    CountRequest, CountedAnswer, DetokenizeRequest, DetokenizedAnswer, TokenizeRequest, TokenizedAnswer,
    VersionAnswer,
};

use crate::service::Service;

/// The description.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Baton",
        description = "Generates text with prefill and decode on different workers. The same models are served by \
                       several APIs: KServe's inference by tensors, Triton's generate as MindIE has it, vLLM's \
                       and TGI's /generate, and OpenAI's."
    ),
    paths(
        crate::http::live,
        crate::http::ready,
        crate::http::triton_generate,
        crate::http::triton_generate_stream,
        crate::http::plain_generate,
        crate::tgi::root,
        crate::tgi::generate_stream,
        crate::tgi::info,
        crate::tokens::tokenize,
        crate::tokens::detokenize,
        crate::tokens::tokenizer,
        crate::tokens::version,
        crate::http::chat_completions,
        crate::http::completions,
        crate::http::list_models,
        crate::http::get_model,
        crate::manage::stop,
        crate::manage::slots,
        crate::manage::trial,
        crate::kserve::http::server,
        crate::kserve::http::metadata,
        crate::kserve::http::config,
        crate::kserve::http::ready,
        crate::kserve::http::model_statistics,
        crate::kserve::http::all_statistics,
        crate::kserve::http::index,
        crate::kserve::http::infer,
    )
)]
struct Document;

/// The description as JSON.
static DOCUMENT: LazyLock<Bytes> =
    LazyLock::new(|| Document::openapi().to_json().expect("a derived description is always JSON").into());

/// `/openapi.json` and `/docs`.
pub(crate) fn routes() -> Router<Arc<Service>> {
    Router::new().route("/openapi.json", get(document)).route("/docs", get(page))
}

async fn document() -> Response {
    ([(CONTENT_TYPE, "application/json")], DOCUMENT.clone()).into_response()
}

async fn page() -> Html<&'static str> {
    Html(include_str!("page.html"))
}

#[cfg(test)]
mod tests;
