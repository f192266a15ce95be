//! Entry points for the fuzz targets, and no part of the API: what a front makes of bytes, without socket or router.

use std::sync::Arc;

use bytes::Bytes;
use proto::{Error, Generation, RequestId};

use crate::Config;
use crate::admit::admit;
use crate::answer::Started;
use crate::answers::Prepared;
use crate::config::Dialect;
use crate::dialect::fields::{Fields, Integers};
use crate::dialect::mindie::MindIe;
use crate::dialect::openai::{self, OpenAi};
use crate::dialect::tgi::{self, Route};
use crate::dialect::triton::{self, Envelope};
use crate::dialect::{Call, Events, Family, Writer, kserve, vllm};
use crate::domain::{Piece, Request, Whole};
use crate::fault::Fault;
use crate::models::Model;

/// A front that takes JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// `/v2/models/{model}/generate` and `/generate_stream`, with or without `is-recompute`.
    Triton {
        /// `/generate_stream`.
        stream: bool,
        /// `is-recompute: true`.
        recompute: bool,
    },
    /// `/generate` with a prompt.
    Vllm,
    /// `/generate` with inputs, and `/generate_stream`.
    Tgi {
        /// `/generate_stream`.
        stream: bool,
    },
    /// `/v1/chat/completions`.
    Chat {
        /// `--dialect mlc`.
        mlc: bool,
    },
    /// `/v1/completions`.
    Completions,
}

/// The model that serves, and the answer that it gives whatever is asked.
#[derive(Clone, Debug)]
pub struct Script {
    /// The model.
    pub model: Arc<Model>,
    /// What sequences say: at least one list, each with at least one piece and its finish on the last.
    pub says: Vec<Vec<Piece>>,
    /// A failure before the pieces of this index.
    pub fails_at: Option<usize>,
}

impl Script {
    /// What the choice of that number says: the lists go round.
    pub fn says(&self, choice: usize) -> &[Piece] {
        &self.says[choice % self.says.len()]
    }
}

/// A body that its front took.
#[derive(Debug)]
pub struct Taken {
    /// What it asks for, one for each prompt.
    pub requests: Vec<Request>,
    /// The client asked for a stream.
    pub stream: bool,
    /// What is asked of a router for the first sequence of each prompt, or why it is not.
    pub admitted: Result<Vec<Generation>, Refused>,
    /// The script as a stream, told by every choice of it in turn.
    pub events: Vec<Bytes>,
    /// The script as one body, told by every choice of it.
    pub whole: Bytes,
}

/// A body that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// HTTP status.
    pub status: u16,
    /// Error object.
    pub body: Bytes,
}

/// What the front makes of the body, and of the script as its answer.
pub fn take(front: Front, body: &[u8], script: &Script) -> Result<Taken, Refused> {
    let config = &Config::default();
    match front {
        Front::Triton { stream, recompute } => {
            let model = &script.model.description.name;
            answered::<MindIe, _>(
                || triton::parse(config, Envelope { model, stream, recompute }, body),
                script,
            )
        }
        Front::Vllm => {
            let fields = || Fields::parse(body, Integers::Strict);
            answered::<MindIe, _>(|| vllm::parse(config, fields()?), script)
        }
        Front::Tgi { stream } => {
            let route = if stream { Route::GenerateStream } else { Route::Generate };
            let fields = || Fields::parse(body, Integers::Strict);
            answered::<MindIe, _>(|| tgi::parse(config, route, fields()?), script)
        }
        Front::Chat { mlc } => {
            let dialect = if mlc { Dialect::Mlc } else { Dialect::OpenAi };
            let config = &Config { dialect, ..Config::default() };
            let setting = openai::Setting { config, model: &|_| Ok(script.model.clone()) };
            answered::<OpenAi, _>(|| openai::parse_chat(body, &setting), script)
        }
        Front::Completions => answered::<OpenAi, _>(|| openai::parse_completion(body), script),
    }
}

/// A request for inference that was taken.
#[derive(Debug)]
pub struct Inferred {
    /// What it asks for.
    pub request: Request,
    /// What is asked of a router for its first sequence, or why it is not.
    pub admitted: Result<Generation, Refused>,
    /// The script as a body.
    pub whole: Bytes,
    /// How many bytes of that are JSON, where others follow.
    pub json_len: Option<usize>,
    /// The script as a stream of responses.
    pub parts: Vec<proto::wire::inference::ModelInferResponse>,
}

/// What `infer` makes of the body and the header that says how much of it is JSON, and of the script as its answer.
pub fn take_infer(body: &Bytes, header: Option<&[u8]>, script: &Script) -> Result<Inferred, Refused> {
    let inferred = kserve::http_request::parse(body, header).and_then(|inference| infer(inference, script));
    inferred.map_err(|fault| refused::<MindIe>(&fault))
}

/// The same of a message.
pub fn take_infer_message(
    message: proto::wire::inference::ModelInferRequest,
    script: &Script,
) -> Result<Inferred, Refused> {
    let inferred = kserve::messages::read(message).and_then(|inference| infer(inference, script));
    inferred.map_err(|fault| refused::<MindIe>(&fault))
}

fn infer(inference: kserve::inference::Inference, script: &Script) -> Result<Inferred, Fault> {
    let model = &script.model.description.name;
    let encoding = kserve::http_response::Encoding {
        binary: inference.reserved.binary_data_output,
        outputs: inference.outputs.clone(),
    };
    let head = kserve::messages::Head { id: inference.id.clone(), model: model.clone() };
    let (request, shape) = kserve::request::convert(&Config::default(), model, inference)?;
    let prepared = prepare(&request, &script.model);
    let started = prepared.as_ref().map_or_else(|_| started(&script.model), Prepared::started);
    let wholes: Vec<Whole> = (0..request.n).map(|choice| whole(script.says(choice))).collect();
    let outputs = kserve::compose::Composer::new(shape.clone()).whole(&started, &wholes);
    let body = kserve::http_response::write(Some(&head.id), model, &outputs, &encoding);
    let mut composer = kserve::compose::Composer::new(shape);
    let mut parts = Vec::new();
    for choice in 0..request.n {
        for piece in script.says(choice) {
            let last = choice + 1 == request.n && piece.finish.is_some();
            parts.push(head.part(&composer.piece(&started, choice, piece), last));
        }
    }
    let admitted = prepared.map(|prepared| prepared.generation).map_err(|fault| refused::<MindIe>(&fault));
    Ok(Inferred { request, admitted, whole: body.bytes, json_len: body.json_len, parts })
}

/// What the public gRPC service makes of a request.
pub fn take_grpc(
    request: proto::wire::GenerateRequest,
    model: &Arc<Model>,
) -> Result<(Request, Generation), Error> {
    let (_, request) = crate::grpc::parse(request)?;
    let prepared = prepare(&request, model)?;
    Ok((request, prepared.generation))
}

fn prepare(request: &Request, model: &Arc<Model>) -> Result<Prepared, Fault> {
    admit(request.clone(), model, &Config::default(), RequestId("fuzz".to_owned()))
}

fn answered<F: Family, W: Writer>(
    parse: impl Fn() -> Result<Call<W>, Fault>,
    script: &Script,
) -> Result<Taken, Refused> {
    let Call { requests, mut writer, stream } = parse().map_err(|fault| refused::<F>(&fault))?;
    let prepared: Result<Vec<Prepared>, Fault> =
        requests.iter().map(|request| prepare(request, &script.model)).collect();
    let started: Vec<Started> = match &prepared {
        Ok(prepared) => prepared.iter().map(Prepared::started).collect(),
        Err(_) => requests.iter().map(|_| started(&script.model)).collect(),
    };
    let count = requests.iter().map(|request| request.n).sum();
    // What is chosen from more than it returns cannot be streamed.
    let chosen = requests.iter().any(|request| request.best_of > request.n);
    let events = if chosen { Vec::new() } else { stream_of(&mut writer, &started, count, script) };
    // A writer writes one answer.
    let mut writer = parse().map_err(|fault| refused::<F>(&fault))?.writer;
    let wholes: Vec<Whole> = (0..count).map(|choice| whole(script.says(choice))).collect();
    let whole = writer.whole(&started, &wholes);
    let admitted = prepared
        .map(|prepared| prepared.into_iter().map(|prepared| prepared.generation).collect())
        .map_err(|fault| refused::<F>(&fault));
    Ok(Taken { requests, stream, admitted, events, whole })
}

/// What stands for an answer that was not admitted.
fn started(model: &Arc<Model>) -> Started {
    Started {
        model: model.clone(),
        prompt_tokens: 1,
        prompt: vec![0].into(),
        prompt_text: Some("x".to_owned()),
        seed: 1,
    }
}

fn stream_of(writer: &mut impl Writer, started: &[Started], choices: usize, script: &Script) -> Vec<Bytes> {
    let mut events = Events::new();
    writer.begin(started, &mut events);
    let longest = script.says.iter().map(Vec::len).max().unwrap_or_default();
    for index in 0..longest {
        if script.fails_at == Some(index) {
            events.push(writer.fault(&Fault::NotReady("the script says so".to_owned())));
            return events;
        }
        for choice in 0..choices {
            if let Some(piece) = script.says(choice).get(index) {
                writer.piece(choice, piece, &mut events);
            }
        }
    }
    writer.end(&mut events);
    events
}

fn refused<F: Family>(fault: &Fault) -> Refused {
    let (status, body) = F::refusal(fault);
    Refused { status: status.as_u16(), body }
}

fn whole(pieces: &[Piece]) -> Whole {
    Whole {
        text: pieces.iter().map(|piece| piece.text.as_str()).collect(),
        tokens: pieces.iter().map(|piece| piece.token.clone()).collect(),
        latencies: pieces.iter().map(|piece| piece.latency).collect(),
        prompt: None,
        finish: pieces.last().and_then(|piece| piece.finish.clone()).expect("a script has a last piece"),
        unreturned: 0,
    }
}
