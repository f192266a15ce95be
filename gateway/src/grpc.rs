//! The public gRPC service: text or token ids in, text and token ids out.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use proto::convert::micros;
use proto::wire::generate_request::Prompt as WirePrompt;
use proto::wire::generation_service_server::GenerationService;
use proto::wire::{
    GenerateRequest, GenerateResponse, ListServedModelsRequest, ListServedModelsResponse, Timings,
};
use proto::{Error, FinishReason, LOGPROBS_MAX, SamplingParams, Watermark};
use serde_json::{Value, json};
use tonic::{Response, Status};
use uuid::Uuid;

use crate::answers::Answers;
use crate::dialect::Family;
use crate::dialect::mindie::{MindIe, check_id};
use crate::domain::{
    Chat, FieldNames, Finish, MaxTokens, Piece, Priority, Prompt, REPETITION_PENALTY_MIN, Request, Stop,
    Tail, Truncate,
};
use crate::fault::Fault;
use crate::http::named_session;
use crate::metrics;
use crate::service::{Service, Ticket};
use crate::timing::{Part, Parts};

const NAMES: FieldNames = FieldNames::PLAIN;

const DIALECT: &str = "grpc";

/// Most sequences of a request.
const SEQUENCES_MAX: u32 = 128;

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
        let session = named_session(request.metadata().as_ref());
        let answering = match self.start(request.into_inner(), session, &mut ticket).await {
            Ok((id, n, answer)) => Answering { id, answer, ticket, ttft: vec![None; n], unfinished: n },
            Err(fault) => {
                ticket.ended(status_of(&fault));
                return Err(status(fault));
            }
        };
        let stream = futures::stream::unfold(Some(answering), |answering| async move {
            let mut answering = answering?;
            match answering.answer.next().await {
                Ok(Some((sequence, piece))) => {
                    Some((Ok(answering.response(sequence, piece)), Some(answering)))
                }
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
    async fn start(
        &self,
        request: GenerateRequest,
        session: Option<String>,
        ticket: &mut Ticket,
    ) -> Result<(String, usize, Answers), Fault> {
        let (id, mut request) = parse(request)?;
        request.session = session;
        let n = request.n;
        let answer = self.service.start(vec![request], ticket).await?;
        Ok((id, n, answer))
    }
}

struct Answering {
    id: String,
    answer: Answers,
    ticket: Ticket,
    /// Of each sequence.
    ttft: Vec<Option<Duration>>,
    unfinished: usize,
}

impl Answering {
    fn response(&mut self, sequence: usize, piece: Piece) -> GenerateResponse {
        let ttft = *self.ttft[sequence].get_or_insert(piece.latency);
        let generated_tokens = piece.generated() as u64;
        let finish = piece.finish.as_ref().map(FinishReason::from);
        self.unfinished -= usize::from(finish.is_some());
        let mut timings = None;
        if self.unfinished == 0 {
            self.ticket.ended(200);
            timings = Some(self::timings(&self.ticket.mark(Part::Write)));
        }
        let started = &self.answer.started()[0];
        let token = proto::Token { finish, ..piece.token };
        GenerateResponse {
            id: self.id.clone(),
            model: started.model.description.name.clone(),
            text: piece.text,
            tokens: if piece.discarded { Vec::new() } else { vec![token.into()] },
            generated_tokens,
            prompt_tokens: started.prompt_tokens as u64,
            finish: finish.map(|finish| proto::wire::FinishReason::from(finish).into()),
            ttft_us: finish.map(|_| micros(ttft)),
            sequence: sequence as u32,
            stop_string: match piece.finish {
                Some(Finish::StopString(text)) => Some(text),
                _ => None,
            },
            timings,
        }
    }
}

fn timings(parts: &Parts) -> Timings {
    let of = |part| micros(parts.of(part));
    Timings {
        total_us: micros(parts.total()),
        read_us: of(Part::Read),
        tokenise_us: of(Part::Tokenise),
        queue_us: of(Part::Queue),
        placement_us: of(Part::Placement),
        prefill_queue_us: of(Part::PrefillQueue),
        prefill_us: of(Part::Prefill),
        transfer_us: of(Part::Transfer),
        decode_us: of(Part::Decode),
        replay_us: of(Part::Replay),
        write_us: of(Part::Write),
        other_us: of(Part::Other),
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
    let at_least_one = |field: &str, value: Option<u64>| match value {
        Some(0) => Err(Fault::field(field, "expected at least 1, got 0")),
        value => Ok(value.map(|count| usize::try_from(count).unwrap_or(usize::MAX))),
    };
    let prompt = match wire.prompt {
        Some(WirePrompt::Text(text)) => Prompt::Text(text),
        Some(WirePrompt::TokenIds(tokens)) => Prompt::Tokens(tokens.ids),
        Some(WirePrompt::Chat(chat)) => Prompt::Chat(Box::new(self::chat(chat)?)),
        None => return Err(Fault::field("prompt", "is required: text, token_ids or chat")),
    };
    let max_tokens = at_least_one("max_tokens", wire.max_tokens)?;
    let truncate = at_least_one("truncate_prompt_tokens", wire.truncate_prompt_tokens)?;
    at_least_one("timeout_us", wire.timeout_us)?;
    let sampling = wire.sampling.unwrap_or_default();
    let seed = sampling.seed;
    let sampling =
        SamplingParams::try_from(sampling).map_err(|error| Fault::field("sampling", error.message))?;
    check_sampling(&sampling)?;
    let n = wire.n.unwrap_or(1);
    if !(1..=SEQUENCES_MAX).contains(&n) {
        return Err(Fault::field("n", format!("expected 1 to {SEQUENCES_MAX}, got {n}")));
    }
    let priority = wire.priority.unwrap_or(5);
    if !(1..=5).contains(&priority) {
        return Err(Fault::field("priority", format!("expected 1 to 5, got {priority}")));
    }

    let mut request = Request::new(prompt, NAMES);
    request.model = wire.model;
    request.sampling = sampling;
    request.seed = seed;
    request.max_tokens = max_tokens.map_or(MaxTokens::Fill, MaxTokens::Exact);
    request.stop = Stop {
        strings: wire.stop,
        token_ids: wire.stop_token_ids,
        include: wire.include_stop,
        ignore_eos: wire.ignore_eos,
        min_tokens: usize::try_from(wire.min_tokens).unwrap_or(usize::MAX),
    };
    request.skip_special_tokens = !wire.show_special_tokens;
    request.timeout = wire.timeout_us.map(Duration::from_micros);
    request.priority = Priority(priority as u8);
    (request.n, request.best_of) = (n as usize, n as usize);
    request.bad_words = wire.bad_words;
    request.truncate = truncate.map(Truncate::Last);
    let id = wire.id.unwrap_or_else(|| Uuid::new_v4().simple().to_string());
    Ok((id, request))
}

/// A chat in the form that templates read.
fn chat(wire: proto::wire::Chat) -> Result<Chat, Fault> {
    if wire.messages.is_empty() {
        return Err(Fault::field("chat.messages", "expected at least 1 message, got none"));
    }
    let messages = wire.messages.into_iter().enumerate().map(|(index, message)| {
        if message.role.is_empty() {
            return Err(Fault::field(format!("chat.messages[{index}].role"), "must not be empty"));
        }
        let mut object = json!({"role": message.role, "content": message.content});
        if let Some(name) = message.name {
            object["name"] = name.into();
        }
        Ok(object)
    });
    let messages = messages.collect::<Result<_, _>>()?;
    let tools = match wire.tools_json.map(|text| serde_json::from_str::<Value>(&text)) {
        None => None,
        Some(Ok(tools @ Value::Array(_))) => Some(tools),
        Some(Ok(_)) => return Err(Fault::field("chat.tools_json", "expected a list")),
        Some(Err(error)) => return Err(Fault::field("chat.tools_json", format!("expected JSON: {error}"))),
    };
    let tail = if wire.continue_final_message { Tail::Continue } else { Tail::Assistant };
    Ok(Chat { messages, tools, tail, ..Chat::default() })
}

/// The ranges that the `.proto` file documents.
fn check_sampling(sampling: &SamplingParams) -> Result<(), Fault> {
    let check = |field: &str, value: f32, is_within: bool, expected: &str| {
        if value.is_finite() && is_within {
            return Ok(());
        }
        Err(Fault::field(format!("sampling.{field}"), format!("expected {expected}, got {value}")))
    };
    let share = |value: f32| value > 0.0 && value <= 1.0;
    let penalty = |value: f32| (-2.0..=2.0).contains(&value);
    let SamplingParams { temperature, top_p, typical_p, min_p, repetition_penalty, .. } = *sampling;
    check("temperature", temperature, temperature >= 0.0, "at least 0")?;
    if sampling.top_k == Some(0) {
        return Err(Fault::field("sampling.top_k", "expected at least 1, got 0"));
    }
    check("top_p", top_p, share(top_p), "a number in (0, 1]")?;
    check("typical_p", typical_p, share(typical_p), "a number in (0, 1]")?;
    check("min_p", min_p, (0.0..=1.0).contains(&min_p), "a number in [0, 1]")?;
    let expected = format!("at least {REPETITION_PENALTY_MIN:e}");
    check("repetition_penalty", repetition_penalty, repetition_penalty >= REPETITION_PENALTY_MIN, &expected)?;
    for (field, value) in
        [("presence_penalty", sampling.presence_penalty), ("frequency_penalty", sampling.frequency_penalty)]
    {
        check(field, value, penalty(value), "a number in [-2, 2]")?;
    }
    for (_, bias) in &sampling.logit_bias {
        check("logit_bias", *bias, true, "finite numbers")?;
    }
    if let Some(Watermark { gamma, delta, .. }) = sampling.watermark {
        check("watermark.gamma", gamma, gamma > 0.0 && gamma < 1.0, "a number in (0, 1)")?;
        check("watermark.delta", delta, delta > 0.0, "a number greater than 0")?;
    }
    for (field, count) in [("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)] {
        if let Some(count) = count.filter(|count| *count > LOGPROBS_MAX) {
            let message = format!("expected at most {LOGPROBS_MAX}, got {count}");
            return Err(Fault::field(format!("sampling.{field}"), message));
        }
    }
    if sampling.bad_words.iter().any(Vec::is_empty) {
        return Err(Fault::field("sampling.bad_words", "expected at least 1 token each, got none"));
    }
    if sampling.sequence != 0 {
        let message = format!("is the server's to number, expected 0, got {}", sampling.sequence);
        return Err(Fault::field("sampling.sequence", message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proto::wire::ChatMessage;

    use super::*;

    fn text(text: &str) -> GenerateRequest {
        GenerateRequest { prompt: Some(WirePrompt::Text(text.into())), ..GenerateRequest::default() }
    }

    fn said(role: &str, content: &str) -> ChatMessage {
        ChatMessage { role: role.into(), content: content.into(), name: None }
    }

    fn chatting(messages: Vec<ChatMessage>, tools: Option<&str>) -> GenerateRequest {
        let chat = proto::wire::Chat {
            messages,
            tools_json: tools.map(ToOwned::to_owned),
            continue_final_message: false,
        };
        GenerateRequest { prompt: Some(WirePrompt::Chat(chat)), ..GenerateRequest::default() }
    }

    #[test]
    fn a_chat_is_what_a_template_reads() {
        let (_, request) = parse(chatting(vec![said("user", "Hi")], Some("[{}]"))).unwrap();
        let Prompt::Chat(chat) = request.prompt else { panic!("no chat") };
        assert_eq!(chat.messages, [json!({"role": "user", "content": "Hi"})]);
        assert_eq!((chat.tools, chat.tail), (Some(json!([{}])), Tail::Assistant));
        let mut wire = chatting(vec![said("user", "Hi"), said("assistant", "Hi t")], None);
        let Some(WirePrompt::Chat(chat)) = &mut wire.prompt else { panic!("no chat") };
        chat.continue_final_message = true;
        chat.messages[0].name = Some("ann".into());
        let Prompt::Chat(chat) = parse(wire).unwrap().1.prompt else { panic!("no chat") };
        assert_eq!(chat.messages[0], json!({"role": "user", "content": "Hi", "name": "ann"}));
        assert_eq!((chat.tools, chat.tail), (None, Tail::Continue));
    }

    #[test]
    fn absent_fields_take_their_defaults() {
        let (id, request) = parse(text("x")).unwrap();
        assert_eq!(request, Request::new(Prompt::Text("x".into()), NAMES));
        assert_eq!(id.len(), 32);
    }

    #[test]
    fn every_field_has_its_effect() {
        let wire = GenerateRequest {
            id: Some("g-1".into()),
            model: Some("m".into()),
            sampling: Some(proto::wire::SamplingParams {
                temperature: Some(0.5),
                top_k: Some(3),
                seed: Some(9),
                ..proto::wire::SamplingParams::default()
            }),
            max_tokens: Some(7),
            stop: vec!["a".into()],
            stop_token_ids: vec![4],
            ignore_eos: true,
            timeout_us: Some(1000),
            n: Some(2),
            include_stop: true,
            show_special_tokens: true,
            priority: Some(1),
            bad_words: vec!["b".into()],
            min_tokens: 5,
            truncate_prompt_tokens: Some(6),
            ..text("x")
        };
        let mut expected = Request::new(Prompt::Text("x".into()), NAMES);
        expected.model = Some("m".into());
        expected.sampling = SamplingParams { temperature: 0.5, top_k: Some(3), ..SamplingParams::default() };
        expected.seed = Some(9);
        expected.max_tokens = MaxTokens::Exact(7);
        expected.stop = Stop {
            strings: vec!["a".into()],
            token_ids: vec![4],
            include: true,
            ignore_eos: true,
            min_tokens: 5,
        };
        expected.timeout = Some(Duration::from_millis(1));
        (expected.n, expected.best_of, expected.priority) = (2, 2, Priority(1));
        expected.skip_special_tokens = false;
        expected.bad_words = vec!["b".into()];
        expected.truncate = Some(Truncate::Last(6));
        let (id, mut request) = parse(wire).unwrap();
        // Where the seed is kept besides is the engine's affair.
        request.sampling.seed = 0;
        assert_eq!((id.as_str(), request), ("g-1", expected));
    }

    #[test]
    fn a_fault_names_its_field() {
        let watermark = |gamma: f32, delta: f32| {
            let watermark = proto::wire::Watermark { gamma, delta, ..proto::wire::Watermark::default() };
            let sampling = proto::wire::SamplingParams { watermark: Some(watermark), ..Default::default() };
            GenerateRequest { sampling: Some(sampling), ..text("x") }
        };
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
            (sampled(|s| s.typical_p = Some(0.0)), "sampling.typical_p: expected a number in (0, 1], got 0"),
            (sampled(|s| s.min_p = Some(1.5)), "sampling.min_p: "),
            (sampled(|s| s.logprobs = Some(21)), "sampling.logprobs: expected at most 20, got 21"),
            (sampled(|s| s.sequence = 1), "sampling.sequence: "),
            (sampled(|s| s.grammar = Some(proto::wire::Grammar { kind: None })), "sampling: grammar.kind"),
            (
                sampled(|s| s.logit_bias = vec![proto::wire::LogitBias { id: 1, bias: f32::NAN }]),
                "sampling.logit_bias: expected finite numbers",
            ),
            (watermark(1.0, 2.0), "sampling.watermark.gamma: expected a number in (0, 1), got 1"),
            (watermark(0.5, 0.0), "sampling.watermark.delta: expected a number greater than 0, got 0"),
            (
                sampled(|s| s.bad_words = vec![proto::wire::TokenIds::default()]),
                "sampling.bad_words: expected at least 1 token",
            ),
            (sampled(|s| s.prompt_logprobs = Some(21)), "sampling.prompt_logprobs: expected at most 20"),
            (GenerateRequest { n: Some(0), ..text("x") }, "n: expected 1 to 128, got 0"),
            (GenerateRequest { n: Some(129), ..text("x") }, "n: "),
            (GenerateRequest { priority: Some(6), ..text("x") }, "priority: expected 1 to 5"),
            (GenerateRequest { truncate_prompt_tokens: Some(0), ..text("x") }, "truncate_prompt_tokens: "),
            (chatting(vec![], None), "chat.messages: expected at least 1"),
            (chatting(vec![said("", "x")], None), "chat.messages[0].role: must not be empty"),
            (chatting(vec![said("user", "x")], Some("{}")), "chat.tools_json: expected a list"),
            (chatting(vec![said("user", "x")], Some("[")), "chat.tools_json: expected JSON"),
        ] {
            let fault = parse(request).unwrap_err().to_string();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }
}
