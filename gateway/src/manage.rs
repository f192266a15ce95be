//! What MindIE's clients ask of a server beside generation: ending a request by name, free places, a trial run.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use proto::wire::DescribeRequest;
use proto::wire::worker_client::WorkerClient;
use proto::{Reason, Role, WorkerDescription};
use serde::Serialize;

use crate::dialect::fields::{Fields, Integers};
use crate::dialect::json;
use crate::dialect::mindie::{MindIe, check_id};
use crate::docs::{MindIeRefusals, SlotsAnswer, StopRequest, StoppedAnswer};
use crate::domain::{FieldNames, MaxTokens, Prompt, Request as Generation};
use crate::fault::Fault;
use crate::http::{enter, json_body, read_body, refusal, unknown_path};
use crate::service::Service;

/// Longest wait for what a worker says of itself.
const DESCRIBE_MAX: Duration = Duration::from_secs(1);
/// Seconds that a trial may take, when it names none.
const TRIAL_SECONDS: u64 = 10;
/// Most that it may name.
const TRIAL_SECONDS_MAX: u64 = 600;
/// The label of a trial in metrics.
const DIALECT: &str = "trial";
/// What a trial continues.
const TRIAL: &str = "hello";

type Shared = State<Arc<Service>>;

#[derive(Serialize)]
struct Stopped<'a> {
    id: &'a str,
}

/// Ends the running calls of that id.
#[utoipa::path(post, path = "/v2/models/{model}/stopInfer", tag = "Triton",
    params(("model" = String, Path, description = "the model")), request_body = StopRequest,
    responses((status = 200, description = "it was running", body = StoppedAnswer), MindIeRefusals))]
pub(crate) async fn stop(
    State(service): Shared,
    path: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    let Ok(Path(model)) = path else { return unknown_path(request).await };
    let stopped = async {
        service.model(Some(&model), "model")?;
        let body = read_body(&service, request).await?;
        let mut fields = Fields::parse(&body, Integers::Strict)?;
        let id = fields.string("id")?.ok_or_else(|| fields.fault("id", "is required"))?;
        fields.finish("stopInfer");
        check_id(&id, "id")?;
        if service.stop(&id) { Ok(id) } else { Err(Fault::Request(id)) }
    };
    match stopped.await {
        Ok(id) => json_body(json(&Stopped { id: &id })),
        Err(fault) => refusal::<MindIe>(&fault),
    }
}

#[derive(Serialize)]
struct Slots {
    /// Requests that may run at once.
    total_slots: usize,
    /// Those that more may run now.
    free_slots: usize,
    /// Tokens that the decode workers' KV has room for.
    available_tokens_length: usize,
}

/// Free places.
#[utoipa::path(get, path = "/v2/models/{model}/getSlotCount", tag = "Triton",
    params(("model" = String, Path, description = "the model")),
    responses((status = 200, description = "the places", body = SlotsAnswer), MindIeRefusals))]
pub(crate) async fn slots(
    State(service): Shared,
    path: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    let Ok(Path(model)) = path else { return unknown_path(request).await };
    if let Err(fault) = service.model(Some(&model), "model") {
        return refusal::<MindIe>(&fault);
    }
    let (free_slots, total_slots) = service.queue.places();
    let workers = service.served.borrow().workers.clone();
    let described = workers.iter().map(|worker| describe(&service, worker));
    let described = futures::future::join_all(described).await;
    let decoding = described.into_iter().flatten().filter(|worker| worker.role == Role::Decode);
    let decoding = decoding.filter(|worker| worker.model.name == model && !worker.draining);
    let available_tokens_length =
        decoding.map(|worker| worker.blocks_free * worker.layout.block_tokens).sum();
    json_body(json(&Slots { total_slots, free_slots, available_tokens_length }))
}

/// What a worker says of itself, if it answers.
async fn describe(service: &Service, address: &str) -> Option<WorkerDescription> {
    let mut client = node::limits!(WorkerClient::new(service.routers.channel(address)));
    let answer = tokio::time::timeout(DESCRIBE_MAX, client.describe(DescribeRequest {})).await;
    answer.ok()?.ok()?.into_inner().try_into().ok()
}

/// Whether one token comes within N seconds: `timed-N`, or `timed` for ten.
#[utoipa::path(get, path = "/health/{timed}", tag = "health",
    params(("timed" = String, Path, description = "timed, or timed-N", pattern = "^timed(-[0-9]{1,3})?$")),
    responses((status = 200, description = "it came"), (status = 408, description = "it came too late"),
        (status = 404, description = "another word", body = crate::docs::Refusal),
        (status = 422, description = "N is out of its range", body = crate::docs::Refusal),
        (status = 503, description = "it did not come"), (status = 429, description = "too many requests", body = crate::docs::Refusal)))]
pub(crate) async fn trial(
    State(service): Shared,
    path: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    let seconds = path.ok().and_then(|Path(word)| match word.strip_prefix("timed")? {
        "" => Some(TRIAL_SECONDS),
        rest => rest.strip_prefix('-')?.parse().ok(),
    });
    let Some(seconds) = seconds else { return unknown_path(request).await };
    if !(1..=TRIAL_SECONDS_MAX).contains(&seconds) {
        let message = format!("expected 1 to {TRIAL_SECONDS_MAX} seconds, got {seconds}");
        let response = refusal::<MindIe>(&Fault::field("timed", message));
        crate::metrics::answered(DIALECT, response.status().as_u16());
        return response;
    }
    let mut ticket = match enter::<MindIe>(&service, DIALECT) {
        Ok(ticket) => ticket,
        Err(refused) => return *refused,
    };
    let mut generation = Generation::new(Prompt::Text(TRIAL.to_owned()), FieldNames::PLAIN);
    generation.max_tokens = MaxTokens::Clamp(1);
    generation.timeout = Some(Duration::from_secs(seconds));
    let model = service.served.borrow().models.first().map(|model| model.description.name.clone());
    generation.model = model;
    let outcome = async { service.start(vec![generation], &mut ticket).await?.whole().await }.await;
    let status = match outcome {
        Ok(_) => StatusCode::OK,
        Err(fault) => {
            tracing::warn!(%fault, seconds, "trial failed");
            let late = fault.reason() == Reason::Deadline;
            if late { StatusCode::REQUEST_TIMEOUT } else { StatusCode::SERVICE_UNAVAILABLE }
        }
    };
    ticket.ended(status.as_u16());
    status.into_response()
}
