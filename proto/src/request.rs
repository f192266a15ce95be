//! A request for tokens, and the tokens that answer it.

use std::sync::Arc;
use std::time::Duration;

use crate::{Attempt, Placed, RequestId, TokenId};

/// Most alternatives that log-probabilities are given of.
pub const LOGPROBS_MAX: u32 = 20;

/// How the next token is chosen. `temperature == 0` is greedy; ties go to the lowest id.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 means greedy, and then seed and filters (top-k, top-p, min-p, typical-p) are without effect.
    pub temperature: f32,
    /// Keep the k most likely tokens; `None` keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1], 1 keeps all.
    pub top_p: f32,
    /// Divides (or, for negative logits, multiplies) the logits of tokens already in prompt or output; > 0.
    pub repetition_penalty: f32,
    /// Taken off the logit of each token already in the output; in [-2, 2].
    pub presence_penalty: f32,
    /// Taken off the logit of each token as often as it is in the output; in [-2, 2].
    pub frequency_penalty: f32,
    /// With the sequence's index and the token's position it decides the token's random number; drawn by the gateway
    /// when the client gave none.
    pub seed: u64,
    /// Which of the sequences that one prompt is continued to this is, from 0.
    pub sequence: u32,
    /// Keep tokens at least this share as likely as the likeliest; in [0, 1], 0 keeps all.
    pub min_p: f32,
    /// Keep the most typical tokens whose probability reaches this (Meister et al. 2022); in (0, 1], 1 keeps all.
    pub typical_p: f32,
    /// Added to the logits of single tokens, each finite; a token comes once.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Sequences of tokens that are never completed in the output; none is empty.
    pub bad_words: Vec<Vec<TokenId>>,
    /// The only tokens that may be chosen; empty for all.
    pub allowed_token_ids: Vec<TokenId>,
    /// Marks the output; `None` leaves it as it is.
    pub watermark: Option<Watermark>,
    /// What the output must look like; `None` for anything.
    pub grammar: Option<Grammar>,
    /// How many of the likeliest tokens to report with each token, at most [`LOGPROBS_MAX`]; `None` reports the
    /// chosen one's log-probability alone.
    pub logprobs: Option<u32>,
    /// The same for the tokens of the prompt; `None` reports nothing of them.
    pub prompt_logprobs: Option<u32>,
}

/// A green-list watermark (Kirchenbauer et al., *A Watermark for Large Language Models*, 2023): a hash of the key and
/// of the token before decides which share of the vocabulary is green, and green tokens are made likelier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watermark {
    /// The secret with which it is found again.
    pub key: u64,
    /// Share of the vocabulary that is green, in (0, 1).
    pub gamma: f32,
    /// Added to the logits of green tokens, > 0.
    pub delta: f32,
}

/// What a whole output must look like. An output that is cut by its length is a beginning of such a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grammar {
    /// A JSON value that the schema (JSON text) allows.
    JsonSchema(Arc<str>),
    /// A text that the regular expression matches from end to end.
    Regex(Arc<str>),
    /// A text of the grammar's `start` rule, in the dialect of Lark that llguidance reads.
    Lark(Arc<str>),
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            sequence: 0,
            min_p: 0.0,
            typical_p: 1.0,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            allowed_token_ids: Vec::new(),
            watermark: None,
            grammar: None,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

/// When a sequence ends, as far as token ids can tell. Stop strings are the gateway's.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct StopConditions {
    /// Generated tokens in all, counting those of earlier attempts; at least 1.
    pub max_tokens: usize,
    /// Ids that end the sequence with [`FinishReason::Eos`]; empty when end-of-sequence is to be ignored.
    pub eos_ids: Vec<TokenId>,
    /// Ids that end the sequence with [`FinishReason::StopToken`].
    pub stop_token_ids: Vec<TokenId>,
    /// Generated tokens before which none of these ids is chosen; at most `max_tokens`.
    pub min_tokens: usize,
}

/// Who goes first where requests wait: 1 before all others, 5 after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(pub u8);

impl Default for Priority {
    /// The last.
    fn default() -> Self {
        Self(5)
    }
}

/// What the gateway asks of a router, and a router of a worker: one sequence of tokens to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The request's name, the same in every attempt.
    pub request: RequestId,
    /// Counts placements of this request across routers; a later attempt fences every earlier one.
    pub attempt: Attempt,
    /// The served model's public name.
    pub model: String,
    /// The prompt followed by the tokens already generated by earlier attempts; never empty.
    pub tokens: Vec<TokenId>,
    /// How many at the end of `tokens` were generated; less than `tokens.len()`.
    pub generated: usize,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// When to stop.
    pub stop: StopConditions,
    /// What is left of the request's one total deadline.
    pub time_left: Duration,
    /// A readiness probe: served like any other, counted apart.
    pub probe: bool,
    /// Where a sequence with the same prompt was placed, whose KV this one can share: the place to prefer. Without
    /// workers there the request is placed like any other.
    pub beside: Option<Placed>,
    /// Names the conversation or user that the request belongs to, where the client has said so. Requests of one
    /// session may be placed together.
    pub session: Option<String>,
    /// Who goes first where requests wait.
    pub priority: Priority,
}

impl Generation {
    /// Tokens of the prompt proper.
    pub fn prompt_len(&self) -> usize {
        self.tokens.len() - self.generated
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model chose an end-of-sequence token.
    Eos,
    /// A stop token or (found by the gateway) a stop string.
    StopToken,
    /// `max_tokens` or the context length was reached.
    Length,
    /// The grammar is complete and allows nothing more; the last token belongs to the text.
    Grammar,
}

/// A token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub id: TokenId,
    /// Natural logarithm of its probability under the model, before penalties, temperature and filters.
    pub logprob: f32,
}

/// What computing the prompt has told. Comes with the first token of a placement.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptReport {
    /// Tokens at the front whose KV was there already.
    pub cached_tokens: usize,
    /// For every token of the prompt but the first: itself, then the likeliest in its place, as many as
    /// [`SamplingParams::prompt_logprobs`] asks for. Empty when it asks for nothing.
    pub logprobs: Vec<PromptLogprobs>,
}

/// A token of the prompt and what might have stood in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprobs {
    /// The token.
    pub token: TokenLogprob,
    /// The likeliest tokens there, falling.
    pub top: Vec<TokenLogprob>,
}

/// One generated token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Token {
    /// Position among the generated tokens of the request, from 0; contiguous across attempts.
    pub index: usize,
    /// The token.
    pub id: TokenId,
    /// Natural logarithm of its probability under the model (before temperature and filters).
    pub logprob: f32,
    /// Sequences in the step that computed it.
    pub batch_size: u32,
    /// Time the sequence waited for that step to be scheduled.
    pub queue_wait: Duration,
    /// Time from there to the end of the step that computed it: of the first token of a placement, all steps of its prompt.
    pub compute: Duration,
    /// Set on the last token.
    pub finish: Option<FinishReason>,
    /// The likeliest tokens in its place, falling, as many as [`SamplingParams::logprobs`] asks for.
    pub top: Vec<TokenLogprob>,
    /// Set on the first token that a placement computes.
    pub prompt: Option<Box<PromptReport>>,
}
