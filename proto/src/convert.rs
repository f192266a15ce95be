//! The one place that names both halves: wire messages into plain types, with errors that name the field, and back.

use std::time::Duration;

use crate::watch::{News, WatchEvent};
use crate::wire;
use crate::{
    Attempt, BlockHash, Digest, Error, FinishReason, Generation, Grammar, Handoff, HandoffId, KvDtype,
    KvLayout, ModelDescription, Placed, PlacementKind, Priority, PromptLogprobs, PromptReport, Reason,
    RequestId, Role, SamplingParams, StopConditions, Token, TokenLogprob, Watermark, WorkerDescription,
    WorkerEpoch, WorkerLoad,
};

/// Metadata key under which a status carries the stable name of its reason.
pub const REASON_KEY: &str = "baton-reason";

/// True when the status comes from the way to the peer and not from the peer: it carries no reason of ours.
pub fn is_transport(status: &tonic::Status) -> bool {
    status.metadata().get(REASON_KEY).is_none()
}

/// Microseconds of a duration, saturating.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl From<Error> for tonic::Status {
    fn from(error: Error) -> Self {
        use tonic::Code;
        let code = match error.reason {
            Reason::StaleEpoch | Reason::StaleAttempt | Reason::LeaseExpired => Code::FailedPrecondition,
            Reason::FingerprintMismatch | Reason::LayoutMismatch => Code::FailedPrecondition,
            Reason::UnknownHandoff | Reason::ModelNotFound => Code::NotFound,
            Reason::ChecksumMismatch | Reason::Truncated => Code::DataLoss,
            Reason::OutOfBlocks | Reason::QueueFull => Code::ResourceExhausted,
            Reason::Deadline => Code::DeadlineExceeded,
            Reason::Cancelled => Code::Cancelled,
            Reason::WorkerLost => Code::Unavailable,
            Reason::InvalidArgument => Code::InvalidArgument,
            Reason::Internal => Code::Internal,
        };
        let mut status = Self::new(code, error.message);
        let name = tonic::metadata::MetadataValue::from_static(error.reason.name());
        status.metadata_mut().insert(REASON_KEY, name);
        status
    }
}

/// The error in a status: by its reason metadata, or, from a transport that has none, by its code.
impl From<tonic::Status> for Error {
    fn from(status: tonic::Status) -> Self {
        use tonic::Code;
        let named = status.metadata().get(REASON_KEY).and_then(|value| value.to_str().ok());
        let reason = named.and_then(Reason::from_name).unwrap_or(match status.code() {
            Code::InvalidArgument | Code::OutOfRange => Reason::InvalidArgument,
            Code::NotFound => Reason::ModelNotFound,
            Code::DeadlineExceeded => Reason::Deadline,
            Code::ResourceExhausted => Reason::QueueFull,
            Code::DataLoss => Reason::Truncated,
            // A cancel that nobody here asked for, a reset or a refused connection: the peer is gone.
            Code::Cancelled | Code::Unavailable | Code::Unknown | Code::Aborted => Reason::WorkerLost,
            _ => Reason::Internal,
        });
        Self::new(reason, status.message())
    }
}

/// The field, or an error that names it.
pub fn required<T>(field: &str, value: Option<T>) -> Result<T, Error> {
    value.ok_or_else(|| Error::invalid(field, "is required"))
}

/// A count that fits the machine, or an error that names the field.
pub fn count(field: &str, value: u64) -> Result<usize, Error> {
    usize::try_from(value).map_err(|_| Error::invalid(field, format!("{value} is too large")))
}

/// A digest of exactly 32 bytes.
fn digest(field: &str, bytes: &[u8]) -> Result<Digest, Error> {
    let bytes = bytes
        .try_into()
        .map_err(|_| Error::invalid(field, format!("expected 32 bytes, got {}", bytes.len())))?;
    Ok(Digest(bytes))
}

impl wire::FetchEnd {
    /// The digest, checked for its length.
    pub fn digest(&self) -> Result<Digest, Error> {
        digest("digest", &self.digest)
    }
}

impl wire::GetTokenizerRequest {
    /// The digest, checked for its length.
    pub fn digest(&self) -> Result<Digest, Error> {
        digest("digest", &self.digest)
    }
}

impl From<SamplingParams> for wire::SamplingParams {
    fn from(plain: SamplingParams) -> Self {
        Self {
            temperature: Some(plain.temperature),
            top_k: plain.top_k,
            top_p: Some(plain.top_p),
            repetition_penalty: Some(plain.repetition_penalty),
            presence_penalty: Some(plain.presence_penalty),
            frequency_penalty: Some(plain.frequency_penalty),
            seed: Some(plain.seed),
            sequence: plain.sequence,
            min_p: Some(plain.min_p),
            typical_p: Some(plain.typical_p),
            logit_bias: plain.logit_bias.into_iter().map(|(id, bias)| wire::LogitBias { id, bias }).collect(),
            bad_words: plain.bad_words.into_iter().map(|ids| wire::TokenIds { ids }).collect(),
            allowed_token_ids: plain.allowed_token_ids,
            watermark: plain.watermark.map(Into::into),
            grammar: plain.grammar.map(Into::into),
            logprobs: plain.logprobs,
            prompt_logprobs: plain.prompt_logprobs,
        }
    }
}

impl TryFrom<wire::SamplingParams> for SamplingParams {
    type Error = Error;

    /// Absent fields take the plain type's default. Ranges are the engine's to check.
    fn try_from(wire: wire::SamplingParams) -> Result<Self, Error> {
        let default = Self::default();
        Ok(Self {
            temperature: wire.temperature.unwrap_or(default.temperature),
            top_k: wire.top_k,
            top_p: wire.top_p.unwrap_or(default.top_p),
            repetition_penalty: wire.repetition_penalty.unwrap_or(default.repetition_penalty),
            presence_penalty: wire.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: wire.frequency_penalty.unwrap_or(default.frequency_penalty),
            seed: wire.seed.unwrap_or(default.seed),
            sequence: wire.sequence,
            min_p: wire.min_p.unwrap_or(default.min_p),
            typical_p: wire.typical_p.unwrap_or(default.typical_p),
            logit_bias: wire.logit_bias.into_iter().map(|bias| (bias.id, bias.bias)).collect(),
            bad_words: wire.bad_words.into_iter().map(|word| word.ids).collect(),
            allowed_token_ids: wire.allowed_token_ids,
            watermark: wire.watermark.map(Into::into),
            grammar: wire.grammar.map(TryInto::try_into).transpose()?,
            logprobs: wire.logprobs,
            prompt_logprobs: wire.prompt_logprobs,
        })
    }
}

impl From<Watermark> for wire::Watermark {
    fn from(plain: Watermark) -> Self {
        Self { key: plain.key, gamma: plain.gamma, delta: plain.delta }
    }
}

impl From<wire::Watermark> for Watermark {
    fn from(wire: wire::Watermark) -> Self {
        Self { key: wire.key, gamma: wire.gamma, delta: wire.delta }
    }
}

impl From<Grammar> for wire::Grammar {
    fn from(plain: Grammar) -> Self {
        use wire::grammar::Kind;
        let kind = match plain {
            Grammar::JsonSchema(text) => Kind::JsonSchema(text.to_string()),
            Grammar::Regex(text) => Kind::Regex(text.to_string()),
            Grammar::Lark(text) => Kind::Lark(text.to_string()),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<wire::Grammar> for Grammar {
    type Error = Error;

    fn try_from(wire: wire::Grammar) -> Result<Self, Error> {
        use wire::grammar::Kind;
        Ok(match required("grammar.kind", wire.kind)? {
            Kind::JsonSchema(text) => Self::JsonSchema(text.into()),
            Kind::Regex(text) => Self::Regex(text.into()),
            Kind::Lark(text) => Self::Lark(text.into()),
        })
    }
}

impl From<StopConditions> for wire::StopConditions {
    fn from(plain: StopConditions) -> Self {
        Self {
            max_tokens: plain.max_tokens as u64,
            eos_ids: plain.eos_ids,
            stop_token_ids: plain.stop_token_ids,
            min_tokens: plain.min_tokens as u64,
        }
    }
}

impl TryFrom<wire::StopConditions> for StopConditions {
    type Error = Error;

    fn try_from(wire: wire::StopConditions) -> Result<Self, Error> {
        Ok(Self {
            max_tokens: count("stop.max_tokens", wire.max_tokens)?,
            eos_ids: wire.eos_ids,
            stop_token_ids: wire.stop_token_ids,
            min_tokens: count("stop.min_tokens", wire.min_tokens)?,
        })
    }
}

impl From<Generation> for wire::Generation {
    fn from(plain: Generation) -> Self {
        Self {
            request: plain.request.0,
            attempt: plain.attempt.0,
            model: plain.model,
            tokens: plain.tokens,
            generated: plain.generated as u64,
            sampling: Some(plain.sampling.into()),
            stop: Some(plain.stop.into()),
            time_left_us: micros(plain.time_left),
            probe: plain.probe,
            beside: plain.beside.map(Into::into),
            session: plain.session,
            priority: u32::from(plain.priority.0),
        }
    }
}

impl TryFrom<wire::Generation> for Generation {
    type Error = Error;

    fn try_from(wire: wire::Generation) -> Result<Self, Error> {
        if wire.request.is_empty() {
            return Err(Error::invalid("request", "must not be empty"));
        }
        if wire.tokens.is_empty() {
            return Err(Error::invalid("tokens", "must not be empty"));
        }
        let generated = count("generated", wire.generated)?;
        if generated >= wire.tokens.len() {
            let message = format!("{generated} is not less than the {} tokens given", wire.tokens.len());
            return Err(Error::invalid("generated", message));
        }
        Ok(Self {
            request: RequestId(wire.request),
            attempt: Attempt(wire.attempt),
            model: wire.model,
            tokens: wire.tokens,
            generated,
            sampling: required("sampling", wire.sampling)?.try_into()?,
            stop: required("stop", wire.stop)?.try_into()?,
            time_left: Duration::from_micros(wire.time_left_us),
            probe: wire.probe,
            beside: wire.beside.map(TryInto::try_into).transpose()?,
            session: wire.session,
            priority: priority(wire.priority)?,
        })
    }
}

/// A router or gateway of an earlier release says 0: nothing.
fn priority(wire: u32) -> Result<Priority, Error> {
    match wire {
        0 => Ok(Priority::default()),
        1..=5 => Ok(Priority(wire as u8)),
        _ => Err(Error::invalid("priority", format!("expected 1 to 5, got {wire}"))),
    }
}

impl From<FinishReason> for wire::FinishReason {
    fn from(plain: FinishReason) -> Self {
        match plain {
            FinishReason::Eos => Self::Eos,
            FinishReason::StopToken => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Grammar => Self::Grammar,
        }
    }
}

impl From<Token> for wire::Token {
    fn from(plain: Token) -> Self {
        Self {
            index: plain.index as u64,
            id: plain.id,
            logprob: plain.logprob,
            batch_size: plain.batch_size,
            queue_wait_us: micros(plain.queue_wait),
            compute_us: micros(plain.compute),
            finish: plain.finish.map(|finish| wire::FinishReason::from(finish).into()),
            top: plain.top.into_iter().map(Into::into).collect(),
            prompt: plain.prompt.map(|prompt| (*prompt).into()),
        }
    }
}

impl From<TokenLogprob> for wire::TokenLogprob {
    fn from(plain: TokenLogprob) -> Self {
        Self { id: plain.id, logprob: plain.logprob }
    }
}

impl From<wire::TokenLogprob> for TokenLogprob {
    fn from(wire: wire::TokenLogprob) -> Self {
        Self { id: wire.id, logprob: wire.logprob }
    }
}

impl From<PromptReport> for wire::PromptReport {
    fn from(plain: PromptReport) -> Self {
        let logprobs = plain.logprobs.into_iter().map(|of| wire::PromptLogprobs {
            token: Some(of.token.into()),
            top: of.top.into_iter().map(Into::into).collect(),
        });
        Self { cached_tokens: plain.cached_tokens as u64, logprobs: logprobs.collect() }
    }
}

impl TryFrom<wire::PromptReport> for PromptReport {
    type Error = Error;

    fn try_from(wire: wire::PromptReport) -> Result<Self, Error> {
        let logprobs = wire.logprobs.into_iter().map(|of| {
            Ok(PromptLogprobs {
                token: required("prompt.logprobs.token", of.token)?.into(),
                top: of.top.into_iter().map(Into::into).collect(),
            })
        });
        Ok(Self {
            cached_tokens: count("prompt.cached_tokens", wire.cached_tokens)?,
            logprobs: logprobs.collect::<Result<_, Error>>()?,
        })
    }
}

impl TryFrom<wire::Token> for Token {
    type Error = Error;

    fn try_from(wire: wire::Token) -> Result<Self, Error> {
        let finish = match wire.finish.map(|_| wire.finish()) {
            None => None,
            Some(wire::FinishReason::Eos) => Some(FinishReason::Eos),
            Some(wire::FinishReason::Stop) => Some(FinishReason::StopToken),
            Some(wire::FinishReason::Length) => Some(FinishReason::Length),
            Some(wire::FinishReason::Grammar) => Some(FinishReason::Grammar),
            Some(wire::FinishReason::Unspecified) => {
                return Err(Error::invalid("token.finish", "is not a known finish reason"));
            }
        };
        Ok(Self {
            index: count("token.index", wire.index)?,
            id: wire.id,
            logprob: wire.logprob,
            batch_size: wire.batch_size,
            queue_wait: Duration::from_micros(wire.queue_wait_us),
            compute: Duration::from_micros(wire.compute_us),
            finish,
            top: wire.top.into_iter().map(Into::into).collect(),
            prompt: wire.prompt.map(TryInto::try_into).transpose()?.map(Box::new),
        })
    }
}

impl From<Placed> for wire::Placed {
    fn from(plain: Placed) -> Self {
        let kind = match plain.kind() {
            PlacementKind::Split => wire::PlacementKind::Split,
            PlacementKind::Fused => wire::PlacementKind::Fused,
        };
        Self {
            attempt: plain.attempt.0,
            kind: kind.into(),
            prefill: plain.prefill.unwrap_or_default(),
            decode: plain.decode,
        }
    }
}

impl TryFrom<wire::Placed> for Placed {
    type Error = Error;

    fn try_from(wire: wire::Placed) -> Result<Self, Error> {
        let prefill = match wire.kind() {
            wire::PlacementKind::Split => Some(wire.prefill),
            wire::PlacementKind::Fused => None,
            wire::PlacementKind::Unspecified => {
                return Err(Error::invalid("placed.kind", "is neither split nor fused"));
            }
        };
        Ok(Self { attempt: Attempt(wire.attempt), prefill, decode: wire.decode })
    }
}

impl From<KvLayout> for wire::KvLayout {
    fn from(plain: KvLayout) -> Self {
        let dtype = match plain.dtype {
            KvDtype::F16 => wire::KvDtype::F16,
            KvDtype::F32 => wire::KvDtype::F32,
        };
        Self {
            layers: plain.layers as u32,
            kv_heads: plain.kv_heads as u32,
            head_dim: plain.head_dim as u32,
            dtype: dtype.into(),
            block_tokens: plain.block_tokens as u32,
        }
    }
}

impl TryFrom<wire::KvLayout> for KvLayout {
    type Error = Error;

    fn try_from(wire: wire::KvLayout) -> Result<Self, Error> {
        let dtype = match wire.dtype() {
            wire::KvDtype::F16 => KvDtype::F16,
            wire::KvDtype::F32 => KvDtype::F32,
            wire::KvDtype::Unspecified => {
                return Err(Error::invalid("layout.dtype", "is not a known KV dtype"));
            }
        };
        let positive = |field: &str, value: u32| match value {
            0 => Err(Error::invalid(field, "must be at least 1")),
            n => Ok(n as usize),
        };
        Ok(Self {
            layers: positive("layout.layers", wire.layers)?,
            kv_heads: positive("layout.kv_heads", wire.kv_heads)?,
            head_dim: positive("layout.head_dim", wire.head_dim)?,
            dtype,
            block_tokens: positive("layout.block_tokens", wire.block_tokens)?,
        })
    }
}

impl From<Handoff> for wire::Handoff {
    fn from(plain: Handoff) -> Self {
        Self {
            owner: plain.owner,
            epoch: plain.epoch.0,
            request: plain.request.0,
            attempt: plain.attempt.0,
            id: plain.id.0.to_vec(),
            fingerprint: plain.fingerprint.0.to_vec(),
            layout: Some(plain.layout.into()),
            tokens: plain.tokens as u64,
        }
    }
}

impl TryFrom<wire::Handoff> for Handoff {
    type Error = Error;

    fn try_from(wire: wire::Handoff) -> Result<Self, Error> {
        let id =
            wire.id.as_slice().try_into().map_err(|_| {
                Error::invalid("handoff.id", format!("expected 16 bytes, got {}", wire.id.len()))
            })?;
        Ok(Self {
            owner: wire.owner,
            epoch: WorkerEpoch(wire.epoch),
            request: RequestId(wire.request),
            attempt: Attempt(wire.attempt),
            id: HandoffId(id),
            fingerprint: digest("handoff.fingerprint", &wire.fingerprint)?,
            layout: required("handoff.layout", wire.layout)?.try_into()?,
            tokens: count("handoff.tokens", wire.tokens)?,
        })
    }
}

impl From<ModelDescription> for wire::ModelDescription {
    fn from(plain: ModelDescription) -> Self {
        Self {
            name: plain.name,
            fingerprint: plain.fingerprint.0.to_vec(),
            tokenizer: plain.tokenizer.0.to_vec(),
            context_len: plain.context_len as u64,
            vocab_size: plain.vocab_size as u64,
            numerics: plain.numerics,
        }
    }
}

impl TryFrom<wire::ModelDescription> for ModelDescription {
    type Error = Error;

    fn try_from(wire: wire::ModelDescription) -> Result<Self, Error> {
        Ok(Self {
            name: wire.name,
            fingerprint: digest("model.fingerprint", &wire.fingerprint)?,
            tokenizer: digest("model.tokenizer", &wire.tokenizer)?,
            context_len: count("model.context_len", wire.context_len)?,
            vocab_size: count("model.vocab_size", wire.vocab_size)?,
            numerics: wire.numerics,
        })
    }
}

impl From<Role> for wire::WorkerRole {
    fn from(plain: Role) -> Self {
        match plain {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
            Role::Router => Self::Unspecified,
        }
    }
}

impl TryFrom<wire::WorkerRole> for Role {
    type Error = Error;

    fn try_from(wire: wire::WorkerRole) -> Result<Self, Error> {
        match wire {
            wire::WorkerRole::Prefill => Ok(Self::Prefill),
            wire::WorkerRole::Decode => Ok(Self::Decode),
            wire::WorkerRole::Unspecified => Err(Error::invalid("role", "is neither prefill nor decode")),
        }
    }
}

impl From<WorkerDescription> for wire::DescribeResponse {
    fn from(plain: WorkerDescription) -> Self {
        Self {
            protocol: plain.protocol,
            epoch: plain.epoch.0,
            role: wire::WorkerRole::from(plain.role).into(),
            model: Some(plain.model.into()),
            layout: Some(plain.layout.into()),
            draining: plain.draining,
            blocks_total: plain.blocks_total as u64,
            blocks_free: plain.blocks_free as u64,
            sequences: plain.sequences as u64,
        }
    }
}

impl TryFrom<wire::DescribeResponse> for WorkerDescription {
    type Error = Error;

    fn try_from(wire: wire::DescribeResponse) -> Result<Self, Error> {
        let role = wire.role().try_into()?;
        Ok(Self {
            protocol: wire.protocol,
            epoch: WorkerEpoch(wire.epoch),
            role,
            model: required("model", wire.model)?.try_into()?,
            layout: required("layout", wire.layout)?.try_into()?,
            draining: wire.draining,
            blocks_total: count("blocks_total", wire.blocks_total)?,
            blocks_free: count("blocks_free", wire.blocks_free)?,
            sequences: count("sequences", wire.sequences)?,
        })
    }
}

impl From<WorkerLoad> for wire::LoadReport {
    fn from(plain: WorkerLoad) -> Self {
        Self {
            waiting: plain.waiting as u64,
            running: plain.running as u64,
            waiting_tokens: plain.waiting_tokens as u64,
            running_tokens: plain.running_tokens as u64,
            blocks_free: plain.blocks_free as u64,
            blocks_total: plain.blocks_total as u64,
            draining: plain.draining,
        }
    }
}

impl TryFrom<wire::LoadReport> for WorkerLoad {
    type Error = Error;

    fn try_from(wire: wire::LoadReport) -> Result<Self, Error> {
        Ok(Self {
            waiting: count("load.waiting", wire.waiting)?,
            running: count("load.running", wire.running)?,
            waiting_tokens: count("load.waiting_tokens", wire.waiting_tokens)?,
            running_tokens: count("load.running_tokens", wire.running_tokens)?,
            blocks_free: count("load.blocks_free", wire.blocks_free)?,
            blocks_total: count("load.blocks_total", wire.blocks_total)?,
            draining: wire.draining,
        })
    }
}

/// Names of blocks, one after another.
fn names(blocks: &[BlockHash]) -> Vec<u8> {
    blocks.iter().flat_map(|block| block.0).collect()
}

fn blocks(field: &str, names: &[u8]) -> Result<Vec<BlockHash>, Error> {
    let (names, rest) = names.as_chunks::<16>();
    if rest.is_empty() {
        return Ok(names.iter().copied().map(BlockHash).collect());
    }
    let bytes = names.len() * 16 + rest.len();
    Err(Error::invalid(field, format!("expected names of 16 bytes each, got {bytes} bytes")))
}

impl From<WatchEvent> for wire::WatchEvent {
    fn from(plain: WatchEvent) -> Self {
        use wire::watch_event::Event;
        let event = match plain.news {
            News::Load(load) => Event::Load(load.into()),
            News::Known { chunk, last, blocks } => {
                Event::Known(wire::KnownBlocks { chunk, last, names: names(&blocks) })
            }
            News::Stored(blocks) => Event::Stored(wire::BlockNames { names: names(&blocks) }),
            News::Removed(blocks) => Event::Removed(wire::BlockNames { names: names(&blocks) }),
        };
        Self { epoch: plain.epoch.0, sequence: plain.sequence, event: Some(event) }
    }
}

impl TryFrom<wire::WatchEvent> for WatchEvent {
    type Error = Error;

    fn try_from(wire: wire::WatchEvent) -> Result<Self, Error> {
        use wire::watch_event::Event;
        let news = match required("event", wire.event)? {
            Event::Load(load) => News::Load(load.try_into()?),
            Event::Known(wire::KnownBlocks { chunk, last, names }) => {
                News::Known { chunk, last, blocks: blocks("known.names", &names)? }
            }
            Event::Stored(stored) => News::Stored(blocks("stored.names", &stored.names)?),
            Event::Removed(removed) => News::Removed(blocks("removed.names", &removed.names)?),
        };
        Ok(Self { epoch: WorkerEpoch(wire.epoch), sequence: wire.sequence, news })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No field has its default.
    fn sampling() -> SamplingParams {
        SamplingParams {
            temperature: 0.5,
            top_k: Some(5),
            top_p: 0.9,
            repetition_penalty: 1.1,
            presence_penalty: 0.1,
            frequency_penalty: 0.2,
            seed: 9,
            sequence: 3,
            min_p: 0.05,
            typical_p: 0.7,
            logit_bias: vec![(7, -100.0)],
            bad_words: vec![vec![1, 2], vec![3]],
            allowed_token_ids: vec![4, 5],
            watermark: Some(Watermark { key: 1, gamma: 0.25, delta: 2.0 }),
            grammar: Some(Grammar::JsonSchema("{}".into())),
            logprobs: Some(20),
            prompt_logprobs: Some(0),
        }
    }

    fn generation() -> Generation {
        Generation {
            request: "r-1".into(),
            attempt: Attempt(3),
            model: "m".into(),
            tokens: vec![1, 2, 3],
            generated: 1,
            sampling: sampling(),
            stop: StopConditions { max_tokens: 4, eos_ids: vec![2], stop_token_ids: vec![7], min_tokens: 2 },
            time_left: Duration::from_millis(1500),
            probe: false,
            beside: Some(Placed { attempt: Attempt(1), prefill: None, decode: "127.0.0.1:9102".into() }),
            session: Some("s".into()),
            priority: Priority(2),
        }
    }

    fn handoff() -> Handoff {
        Handoff {
            owner: "127.0.0.1:1".into(),
            epoch: WorkerEpoch(5),
            request: "r-1".into(),
            attempt: Attempt(3),
            id: HandoffId([7; 16]),
            fingerprint: Digest([1; 32]),
            layout: KvLayout { layers: 2, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 },
            tokens: 3,
        }
    }

    #[test]
    fn plain_types_survive_the_wire() {
        let sent = generation();
        assert_eq!(Generation::try_from(wire::Generation::from(sent.clone())), Ok(sent));
        let sent = handoff();
        assert_eq!(Handoff::try_from(wire::Handoff::from(sent.clone())), Ok(sent));
        use FinishReason::{Eos, Grammar, Length, StopToken};
        let scored = TokenLogprob { id: 5, logprob: -0.25 };
        let logprobs = vec![PromptLogprobs { token: scored, top: vec![scored, scored] }];
        let report = PromptReport { cached_tokens: 16, logprobs };
        for finish in [None, Some(Eos), Some(StopToken), Some(Length), Some(Grammar)] {
            let sent = Token {
                index: 4,
                id: 9,
                logprob: -0.5,
                batch_size: 2,
                queue_wait: Duration::from_micros(7),
                compute: Duration::from_micros(8),
                finish,
                top: vec![scored],
                prompt: finish.is_none().then(|| Box::new(report.clone())),
            };
            assert_eq!(Token::try_from(wire::Token::from(sent.clone())), Ok(sent));
        }
    }

    #[test]
    fn grammars_survive_the_wire() {
        for sent in [
            Grammar::JsonSchema("{}".into()),
            Grammar::Regex("a+".into()),
            Grammar::Lark("start: \"a\"".into()),
        ] {
            assert_eq!(Grammar::try_from(wire::Grammar::from(sent.clone())), Ok(sent));
        }
        let error = Grammar::try_from(wire::Grammar { kind: None }).expect_err("no kind");
        assert_eq!(error.message, "grammar.kind: is required");
    }

    #[test]
    fn a_placement_survives_the_wire() {
        for prefill in [None, Some("127.0.0.1:9101".to_owned())] {
            let sent = Placed { attempt: Attempt(2), prefill, decode: "127.0.0.1:9102".into() };
            assert_eq!(Placed::try_from(wire::Placed::from(sent.clone())), Ok(sent));
        }
    }

    #[test]
    fn a_watch_survives_the_wire() {
        let load = WorkerLoad {
            waiting: 1,
            running: 2,
            waiting_tokens: 3,
            running_tokens: 4,
            blocks_free: 5,
            blocks_total: 6,
            draining: true,
        };
        let names = || vec![BlockHash([1; 16]), BlockHash([2; 16])];
        for news in [
            News::Load(load),
            News::Known { chunk: 3, last: true, blocks: names() },
            News::Stored(names()),
            News::Removed(Vec::new()),
        ] {
            let sent = WatchEvent { epoch: WorkerEpoch(9), sequence: 7, news };
            assert_eq!(WatchEvent::try_from(wire::WatchEvent::from(sent.clone())), Ok(sent));
        }
        let event = wire::watch_event::Event::Stored(wire::BlockNames { names: vec![0; 17] });
        let error = WatchEvent::try_from(wire::WatchEvent { epoch: 1, sequence: 1, event: Some(event) });
        let message = error.expect_err("17 bytes").message;
        assert_eq!(message, "stored.names: expected names of 16 bytes each, got 17 bytes");
    }

    #[test]
    fn a_fault_names_its_field() {
        let fault = |change: fn(&mut wire::Generation)| {
            let mut message = wire::Generation::from(generation());
            change(&mut message);
            Generation::try_from(message).map(|_| ()).map_err(|error| (error.reason, error.message))
        };
        let named = |field: &str, result: Result<(), (Reason, String)>| {
            let (reason, message) = result.expect_err(field);
            assert_eq!(reason, Reason::InvalidArgument);
            assert!(message.starts_with(field), "{message}");
        };
        named("request", fault(|g| g.request.clear()));
        named("tokens", fault(|g| g.tokens.clear()));
        named("generated", fault(|g| g.generated = 3));
        named("sampling", fault(|g| g.sampling = None));
        named("stop", fault(|g| g.stop = None));

        let mut message = wire::Handoff::from(handoff());
        message.id.pop();
        let error = Handoff::try_from(message).expect_err("a short id");
        assert_eq!(error.message, "handoff.id: expected 16 bytes, got 15");
    }

    #[test]
    fn a_reason_survives_a_status() {
        for reason in Reason::ALL {
            let error = Error::new(reason, "what came");
            assert_eq!(Error::from(tonic::Status::from(error.clone())), error);
        }
        let bare = tonic::Status::unavailable("connection refused");
        assert_eq!(Error::from(bare).reason, Reason::WorkerLost);
    }
}
