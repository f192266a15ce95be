//! Entry points for the fuzz targets, and no part of the API: what a front makes of bytes, without socket or router.

use std::sync::Arc;

use bytes::Bytes;
use proto::{Error, Generation, RequestId};

use crate::admit::admit;
use crate::answer::Started;
use crate::dialect::mindie::MindIe;
use crate::dialect::openai::{self, OpenAi};
use crate::dialect::triton::{self, Envelope};
use crate::dialect::{Call, Events, Family, Writer, vllm};
use crate::domain::{Piece, Request, Whole};
use crate::fault::Fault;
use crate::models::Model;

/// Drawn at admission where the client gave none.
const SEED: u64 = 1;

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
    /// `/generate`.
    Vllm,
    /// `/v1/chat/completions`.
    Chat,
}

/// The model that serves, and the answer that it gives whatever is asked.
#[derive(Clone, Debug)]
pub struct Script {
    /// The model.
    pub model: Arc<Model>,
    /// At least one, the last with its finish.
    pub pieces: Vec<Piece>,
    /// A failure in place of the piece of this index.
    pub fails_at: Option<usize>,
}

/// A body that its front took.
#[derive(Debug)]
pub struct Taken {
    /// What it asks for.
    pub request: Request,
    /// The client asked for a stream.
    pub stream: bool,
    /// What is asked of a router, or why it is not.
    pub admitted: Result<Generation, Refused>,
    /// The script as a stream.
    pub events: Vec<Bytes>,
    /// The script as one body.
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
    match front {
        Front::Triton { stream, recompute } => {
            let model = &script.model.description.name;
            answered::<MindIe, _>(|| triton::parse(Envelope { model, stream, recompute }, body), script)
        }
        Front::Vllm => answered::<MindIe, _>(|| vllm::parse(body), script),
        Front::Chat => answered::<OpenAi, _>(|| openai::parse_chat(body), script),
    }
}

/// What the public gRPC service makes of a request.
pub fn take_grpc(
    request: proto::wire::GenerateRequest,
    model: &Model,
) -> Result<(Request, Generation), Error> {
    let (_, request) = crate::grpc::parse(request)?;
    let admitted = admit(&request, model, RequestId("fuzz".to_owned()), SEED)?;
    Ok((request, admitted.generation))
}

fn answered<F: Family, W: Writer>(
    parse: impl Fn() -> Result<Call<W>, Fault>,
    script: &Script,
) -> Result<Taken, Refused> {
    let Call { request, mut writer, stream } = parse().map_err(|fault| refused::<F>(&fault))?;
    let model = &script.model;
    let admitted = admit(&request, model, RequestId("fuzz".to_owned()), SEED);
    let prompt_tokens = admitted.as_ref().map_or(1, |admitted| admitted.generation.prompt_len());
    let prompt_text = admitted.as_ref().ok().and_then(|admitted| admitted.prompt_text.clone());
    let started = Started { model: model.clone(), prompt_tokens, prompt_text };

    let mut events = Events::new();
    writer.begin(&started, &mut events);
    for (index, piece) in script.pieces.iter().enumerate() {
        if script.fails_at == Some(index) {
            events.push(writer.fault(&Fault::NotReady("the script says so".to_owned())));
            break;
        }
        writer.piece(piece, &mut events);
    }
    if script.fails_at.is_none() {
        writer.end(&mut events);
    }
    // A writer writes one answer.
    let mut writer = parse().map_err(|fault| refused::<F>(&fault))?.writer;
    let whole = writer.whole(&started, &whole(&script.pieces));
    let admitted = admitted.map(|admitted| admitted.generation).map_err(|fault| refused::<F>(&fault));
    Ok(Taken { request, stream, admitted, events, whole })
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
        finish: pieces.last().and_then(|piece| piece.finish.clone()).expect("a script has a last piece"),
    }
}
