//! The public gRPC service: text or token ids in, text and token ids out.

use std::ops::Bound::{Excluded, Included};
use std::ops::RangeBounds;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use proto::convert::micros;
use proto::wire::generate_request::Prompt as WirePrompt;
use proto::wire::generation_service_server::GenerationService;
use proto::wire::{GenerateRequest, GenerateResponse, ListServedModelsRequest, ListServedModelsResponse};
use proto::{Error, FinishReason, SamplingParams};
use tonic::{Response, Status};
use uuid::Uuid;

use crate::answers::Answers;
use crate::dialect::Family;
use crate::dialect::mindie::{MindIe, check_id};
use crate::domain::{FieldNames, MaxTokens, Piece, Prompt, REPETITION_PENALTY_MIN, Request, Stop};
use crate::fault::Fault;
use crate::metrics;
use crate::service::{Service, Ticket};

const NAMES: FieldNames = FieldNames::PLAIN;

const DIALECT: &str = "grpc";

/// The service.
pub(crate) struct Generations {
    pub(crate) service: Arc<Service>,
}

#[tonic::async_trait]
impl GenerationService for Generations {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

    async fn generate(
        &self,
        request: tonic::Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let mut ticket = self.service.ticket(DIALECT).map_err(|fault| {
            metrics::answered(DIALECT, status_of(&fault));
            status(fault)
        })?;
        let answering = match self.start(request.into_inner(), &mut ticket).await {
            Ok((id, answer)) => Answering { id, answer, ticket, ttft: None },
            Err(fault) => {
                ticket.ended(status_of(&fault));
                return Err(status(fault));
            }
        };
        let stream = futures::stream::unfold(Some(answering), |answering| async move {
            let mut answering = answering?;
            match answering.answer.next().await {
                Ok(Some((_, piece))) => Some((Ok(answering.response(piece)), Some(answering))),
                Ok(None) => None,
                Err(fault) => {
                    answering.ticket.ended(status_of(&fault));
                    Some((Err(status(fault)), None))
                }
            }
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn list_served_models(
        &self,
        _request: tonic::Request<ListServedModelsRequest>,
    ) -> Result<Response<ListServedModelsResponse>, Status> {
        let served = self.service.served.borrow().clone();
        let models = served.models.iter().map(|model| model.description.name.clone()).collect();
        Ok(Response::new(ListServedModelsResponse { models }))
    }
}

impl Generations {
    async fn start(&self, request: GenerateRequest, ticket: &mut Ticket) -> Result<(String, Answers), Fault> {
        let (id, request) = parse(request)?;
        let answer = self.service.start(vec![request], ticket).await?;
        Ok((id, answer))
    }
}

struct Answering {
    id: String,
    answer: Answers,
    ticket: Ticket,
    ttft: Option<Duration>,
}

impl Answering {
    fn response(&mut self, piece: Piece) -> GenerateResponse {
        let ttft = *self.ttft.get_or_insert(piece.latency);
        let generated_tokens = piece.generated() as u64;
        let finish = piece.finish.as_ref().map(FinishReason::from);
        if finish.is_some() {
            self.ticket.ended(200);
        }
        let started = &self.answer.started()[0];
        let token = proto::Token { finish, ..piece.token };
        GenerateResponse {
            id: self.id.clone(),
            model: started.model.description.name.clone(),
            text: piece.text,
            tokens: vec![token.into()],
            generated_tokens,
            prompt_tokens: started.prompt_tokens as u64,
            finish: finish.map(|finish| proto::wire::FinishReason::from(finish).into()),
            ttft_us: finish.map(|_| micros(ttft)),
        }
    }
}

/// Metrics count gRPC by the HTTP status of the same fault.
fn status_of(fault: &Fault) -> u16 {
    MindIe::refusal(fault).0.as_u16()
}

fn status(fault: Fault) -> Status {
    Error::from(fault).into()
}

/// The request's name and the domain request.
pub(crate) fn parse(wire: GenerateRequest) -> Result<(String, Request), Fault> {
    if let Some(id) = &wire.id {
        check_id(id, "id")?;
    }
    let prompt = match wire.prompt {
        Some(WirePrompt::Text(text)) => Prompt::Text(text),
        Some(WirePrompt::TokenIds(tokens)) => Prompt::Tokens(tokens.ids),
        None => return Err(Fault::field("prompt", "is required: text or token_ids")),
    };
    if wire.max_tokens == Some(0) {
        return Err(Fault::field("max_tokens", "expected at least 1, got 0"));
    }
    if wire.timeout_us == Some(0) {
        return Err(Fault::field("timeout_us", "expected at least 1, got 0"));
    }
    let sampling = wire.sampling.unwrap_or_default();
    let seed = sampling.seed;
    let sampling =
        SamplingParams::try_from(sampling).map_err(|error| Fault::field("sampling", error.message))?;
    check_sampling(&sampling)?;

    let mut request = Request::new(prompt, NAMES);
    request.model = wire.model;
    request.sampling = sampling;
    request.seed = seed;
    request.max_tokens = wire
        .max_tokens
        .map_or(MaxTokens::Fill, |count| MaxTokens::Exact(usize::try_from(count).unwrap_or(usize::MAX)));
    request.stop = Stop {
        strings: wire.stop,
        token_ids: wire.stop_token_ids,
        include: false,
        ignore_eos: wire.ignore_eos,
        min_tokens: 0,
    };
    request.timeout = wire.timeout_us.map(Duration::from_micros);
    let id = wire.id.unwrap_or_else(|| Uuid::new_v4().simple().to_string());
    Ok((id, request))
}

/// The ranges that the `.proto` file documents.
fn check_sampling(sampling: &SamplingParams) -> Result<(), Fault> {
    let check = |field: &str, value: f32, range: &dyn Fn(&f32) -> bool, expected: &str| {
        if value.is_finite() && range(&value) {
            return Ok(());
        }
        Err(Fault::field(format!("sampling.{field}"), format!("expected {expected}, got {value}")))
    };
    let penalty = |value: &f32| (-2.0..=2.0).contains(value);
    check("temperature", sampling.temperature, &|value| *value >= 0.0, "at least 0")?;
    if sampling.top_k == Some(0) {
        return Err(Fault::field("sampling.top_k", "expected at least 1, got 0"));
    }
    check(
        "top_p",
        sampling.top_p,
        &|value| (Excluded(0.0), Included(1.0)).contains(value),
        "a number in (0, 1]",
    )?;
    let expected = format!("at least {REPETITION_PENALTY_MIN:e}");
    check(
        "repetition_penalty",
        sampling.repetition_penalty,
        &|value| *value >= REPETITION_PENALTY_MIN,
        &expected,
    )?;
    check("presence_penalty", sampling.presence_penalty, &penalty, "a number in [-2, 2]")?;
    check("frequency_penalty", sampling.frequency_penalty, &penalty, "a number in [-2, 2]")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> GenerateRequest {
        GenerateRequest { prompt: Some(WirePrompt::Text(text.into())), ..GenerateRequest::default() }
    }

    #[test]
    fn absent_fields_take_their_defaults() {
        let (id, request) = parse(text("x")).unwrap();
        assert_eq!(request, Request::new(Prompt::Text("x".into()), NAMES));
        assert_eq!(id.len(), 32);
    }

    #[test]
    fn a_fault_names_its_field() {
        let sampled = |change: fn(&mut proto::wire::SamplingParams)| {
            let mut sampling = proto::wire::SamplingParams::default();
            change(&mut sampling);
            GenerateRequest { sampling: Some(sampling), ..text("x") }
        };
        for (request, start) in [
            (GenerateRequest::default(), "prompt: is required"),
            (GenerateRequest { id: Some("a b".into()), ..text("x") }, "id: expected"),
            (GenerateRequest { max_tokens: Some(0), ..text("x") }, "max_tokens: expected at least 1"),
            (GenerateRequest { timeout_us: Some(0), ..text("x") }, "timeout_us: expected at least 1, got 0"),
            (sampled(|s| s.temperature = Some(-1.0)), "sampling.temperature: expected at least 0, got -1"),
            (sampled(|s| s.temperature = Some(f32::NAN)), "sampling.temperature: "),
            (sampled(|s| s.top_k = Some(0)), "sampling.top_k: "),
            (sampled(|s| s.top_p = Some(0.0)), "sampling.top_p: "),
            (sampled(|s| s.repetition_penalty = Some(0.0)), "sampling.repetition_penalty: "),
            (
                sampled(|s| s.repetition_penalty = Some(1e-40)),
                "sampling.repetition_penalty: expected at least 1.1754944e-38, got 0.0000",
            ),
            (sampled(|s| s.temperature = Some(f32::INFINITY)), "sampling.temperature: "),
            (sampled(|s| s.presence_penalty = Some(2.5)), "sampling.presence_penalty: "),
            (sampled(|s| s.frequency_penalty = Some(-2.5)), "sampling.frequency_penalty: "),
        ] {
            let fault = parse(request).unwrap_err().to_string();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }
}
