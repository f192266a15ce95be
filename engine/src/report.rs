//! What the engine tells its owner: events of a step, counts, and KV on its way to another engine.

use proto::{FinishReason, PromptReport, TokenId, TokenLogprob};

use crate::sequence::SequenceId;

/// What one [`step`](crate::Engine::step) did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Tokens computed.
    pub batch_tokens: usize,
    /// Sequences that had tokens in the step.
    pub batch_sequences: usize,
    /// What happened, sequence after sequence in the order of the batch.
    pub events: Vec<EngineEvent>,
    /// The step was stopped by [`Interrupt`](crate::model::Interrupt): nothing was computed and no events are
    /// reported; the next step takes the same work up again.
    pub interrupted: bool,
}

/// Something that happened to a sequence in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// The sequence's first chunk (after activation, its first decode) was computed. Reported once, even when it
    /// is preempted later.
    Scheduled {
        /// The sequence.
        id: SequenceId,
        /// Tokens at its front whose KV was here already.
        cached: usize,
    },
    /// KV of the sequence is sealed and can be exported. Only for [`Until::FirstToken`](crate::Until::FirstToken).
    Sealed {
        /// The sequence.
        id: SequenceId,
        /// The KV of tokens `..tokens` is sealed.
        tokens: usize,
    },
    /// A token was chosen.
    Token {
        /// The sequence.
        id: SequenceId,
        /// Position among the generated tokens, from 0; contiguous across attempts.
        index: usize,
        /// The token.
        token: TokenId,
        /// Natural logarithm of its probability under the model, before penalties, temperature and filters.
        logprob: f32,
        /// The likeliest tokens in its place, falling, as many as were asked for.
        top: Vec<TokenLogprob>,
        /// With the first token of a sequence whose prompt was computed here.
        prompt: Option<Box<PromptReport>>,
        /// Set when the token ends the sequence.
        finish: Option<FinishReason>,
    },
    /// The sequence ended without finishing; its blocks are free, and nothing follows.
    Failed {
        /// The sequence.
        id: SequenceId,
        /// Why.
        error: proto::Error,
    },
}

impl EngineEvent {
    /// The sequence that the event is about.
    pub fn id(&self) -> SequenceId {
        match self {
            Self::Scheduled { id, .. }
            | Self::Sealed { id, .. }
            | Self::Token { id, .. }
            | Self::Failed { id, .. } => *id,
        }
    }
}

/// A sequence that [`hand_over`](crate::Engine::hand_over) has stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedOver {
    /// The tokens whose KV is held.
    pub tokens: Vec<TokenId>,
    /// The token that follows them, the last one that was generated.
    pub next: TokenId,
}

/// Answer to [`reserve`](crate::Engine::reserve).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The sequence.
    pub id: SequenceId,
    /// Tokens at its front whose KV is here already, at most all of them.
    pub skip: usize,
}

/// KV of consecutive tokens in the canonical layout of [`proto::kv`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvBlock {
    /// Position of the first token.
    pub first: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// The slabs, layer after layer: `[layers][K|V][tokens][kv_heads][head_dim]`.
    pub slabs: Vec<u8>,
    /// CRC32C of each slab, taken when the block was sealed. `[layers]`
    pub checksums: Vec<u32>,
}

/// KV blocks by state: `free + cached + used == total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCounts {
    /// Blocks of the arena.
    pub total: usize,
    /// Blocks with nothing of worth in them.
    pub free: usize,
    /// Blocks that no sequence owns but the prefix cache can still give out.
    pub cached: usize,
    /// Blocks that sequences own.
    pub used: usize,
    /// Those of the used blocks that belong to sequences held for another worker, or computed to be held.
    pub held: usize,
}

/// Tokens that an engine has to do with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Those whose KV is still to be computed, of sequences that wait, run, or were preempted.
    pub waiting: usize,
    /// Those whose KV is there, of sequences that take part in steps.
    pub running: usize,
}

/// Sequences by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceCounts {
    /// Submitted, not computed yet.
    pub waiting: usize,
    /// Taking part in steps.
    pub running: usize,
    /// Lost their blocks to an older sequence; they are computed again when blocks are free.
    pub preempted: usize,
    /// Waiting for their KV to be imported.
    pub reserved: usize,
    /// Computed, and kept for another worker to fetch.
    pub held: usize,
}
