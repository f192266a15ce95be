//! The one request that every dialect converts into, and the pieces that answer it.

use std::sync::Arc;
use std::time::Duration;

pub use proto::Priority;
use proto::{FinishReason, PromptReport, SamplingParams, Token, TokenId};
use serde_json::{Map, Value};

/// Least repetition penalty: below it single precision has no full digits, and a division by it no bounds.
pub const REPETITION_PENALTY_MIN: f32 = f32::MIN_POSITIVE;

/// Longest deadline. Nobody waits for it, and no clock or wire format overflows at it.
pub const TIMEOUT_MAX: Duration = Duration::from_hours(24 * 30);

/// A request for text, parsed and within its API's ranges; whether it fits the model is left to admission.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Public name of the model; the only one served when absent.
    pub model: Option<String>,
    /// What to continue.
    pub prompt: Prompt,
    /// How to choose tokens; its seed has no meaning, [`Request::seed`] has.
    pub sampling: SamplingParams,
    /// Decides the random numbers; drawn at admission when absent.
    pub seed: Option<u64>,
    /// How much to generate.
    pub max_tokens: MaxTokens,
    /// When to stop before that.
    pub stop: Stop,
    /// Leave the text of special tokens out.
    pub skip_special_tokens: bool,
    /// Total deadline; the gateway's own when absent.
    pub timeout: Option<Duration>,
    /// Who goes first when requests wait.
    pub priority: Priority,
    /// How many sequences to answer with, at least 1.
    pub n: usize,
    /// How many sequences to generate, at least `n`: the answer is the likeliest of them.
    pub best_of: usize,
    /// Texts that the output never has.
    pub bad_words: Vec<String>,
    /// Keep only so many tokens of the prompt, at least 1; `None` keeps all.
    pub truncate: Option<Truncate>,
    /// The name under which another call may end this one.
    pub stoppable: Option<String>,
    /// The conversation or user that it belongs to: requests of one session may be computed together.
    pub session: Option<String>,
    /// Answer with the likeliest sequence first, also when all are returned.
    pub ranked: bool,
    /// The answer's writer wants the prompt's text.
    pub echo: bool,
    /// It wants the ids of the prompt's tokens.
    pub prompt_ids: bool,
    /// What the dialect calls the fields that admission may find at fault.
    pub names: FieldNames,
}

impl Request {
    /// A greedy request with nothing but a prompt.
    pub fn new(prompt: Prompt, names: FieldNames) -> Self {
        Self {
            model: None,
            prompt,
            sampling: SamplingParams::default(),
            seed: None,
            max_tokens: MaxTokens::Fill,
            stop: Stop::default(),
            skip_special_tokens: true,
            timeout: None,
            priority: Priority::default(),
            n: 1,
            best_of: 1,
            ranked: false,
            bad_words: Vec::new(),
            truncate: None,
            stoppable: None,
            session: None,
            echo: false,
            prompt_ids: false,
            names,
        }
    }

    /// Its total deadline, where `default` stands for none: at most [`TIMEOUT_MAX`].
    pub fn deadline(&self, default: Duration) -> Duration {
        self.timeout.unwrap_or(default).min(TIMEOUT_MAX)
    }
}

/// What to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text; special tokens in it are read as such.
    Text(String),
    /// Tokens, taken as they are.
    Tokens(Vec<TokenId>),
    /// Tokens of which the last were generated before, for a client that itself moves a request.
    Resumed {
        /// Prompt, then the generated tokens.
        tokens: Vec<TokenId>,
        /// How many at the end were generated.
        generated: usize,
    },
    /// A chat, rendered by a template.
    Chat(Box<Chat>),
}

impl Prompt {
    /// About how many bytes have to be looked at to make tokens of it; most of all for a template that nobody knows.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(tokens) | Self::Resumed { tokens, .. } => size_of_val(tokens.as_slice()),
            Self::Chat(chat) if chat.template.is_some() => usize::MAX,
            Self::Chat(chat) => {
                let rest = chat.tools.iter().chain(chat.variables.values());
                chat.messages.iter().chain(rest).map(bytes_of).fold(0, usize::saturating_add)
            }
        }
    }
}

fn bytes_of(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(bytes_of).fold(0, usize::saturating_add),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| name.len() + bytes_of(value)).fold(0, usize::saturating_add)
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => size_of::<Value>(),
    }
}

/// A chat, and how to render it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// The messages, each an object of the form that templates read: `role`, `content`, and what else it has.
    pub messages: Vec<Value>,
    /// The tools, in the form that templates read; `None` hides them.
    pub tools: Option<Value>,
    /// A template in place of the model's own.
    pub template: Option<String>,
    /// Further variables of the template.
    pub variables: Map<String, Value>,
    /// How the rendered text ends.
    pub tail: Tail,
}

/// How a rendered chat ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tail {
    /// With the beginning of an assistant's message.
    #[default]
    Assistant,
    /// With the last message's end.
    Nothing,
    /// Within the last message, which the answer continues.
    Continue,
}

/// Which tokens of a long prompt are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncate {
    /// The last so many.
    Last(usize),
    /// The first so many.
    First(usize),
}

/// How much to generate. None at all makes a text that ends with its length before it begins, once the prompt was
/// computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// As much as fits the context.
    Fill,
    /// So many, or fewer where the context ends before.
    Clamp(usize),
    /// So many, and a fault where the context ends before.
    Exact(usize),
}

/// What ends the text besides its length.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Stop {
    /// Strings; the first to be complete in the text ends it. Admission checks them, whatever the dialect.
    pub strings: Vec<String>,
    /// Token ids.
    pub token_ids: Vec<TokenId>,
    /// Keep what ended the text.
    pub include: bool,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Generated tokens before which neither such a token nor a stop token is chosen.
    pub min_tokens: usize,
}

/// A dialect's names of the fields that admission looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldNames {
    /// The prompt.
    pub prompt: &'static str,
    /// Most tokens to generate.
    pub max_tokens: &'static str,
    /// Stop strings.
    pub stop: &'static str,
    /// Stop tokens.
    pub stop_token_ids: &'static str,
    /// The model.
    pub model: &'static str,
    /// Tokens before which nothing ends.
    pub min_tokens: &'static str,
    /// Texts that the output never has.
    pub bad_words: &'static str,
    /// The only tokens there may be.
    pub allowed_token_ids: &'static str,
    /// What is added to logits.
    pub logit_bias: &'static str,
    /// What the output must look like.
    pub grammar: &'static str,
}

impl FieldNames {
    /// The names most APIs use.
    pub const PLAIN: Self = Self {
        prompt: "prompt",
        max_tokens: "max_tokens",
        stop: "stop",
        stop_token_ids: "stop_token_ids",
        model: "model",
        min_tokens: "min_tokens",
        bad_words: "bad_words",
        allowed_token_ids: "allowed_token_ids",
        logit_bias: "logit_bias",
        grammar: "grammar",
    };
}

/// One generated token and the text that it completed.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// The token.
    pub token: Token,
    /// Whole characters; empty while a character or a possible stop string is incomplete.
    pub text: String,
    /// From arrival to the first token, then from token to token, on the gateway's clock.
    pub latency: Duration,
    /// Set on the last piece.
    pub finish: Option<Finish>,
    /// The token was computed for the sake of its prompt and is no part of the answer, which has none.
    pub discarded: bool,
}

impl Piece {
    /// Tokens generated so far, this one included.
    pub fn generated(&self) -> usize {
        if self.discarded { self.token.index } else { self.token.index + 1 }
    }
}

/// Why a text ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it.
    Eos,
    /// A stop token.
    StopToken,
    /// A stop string, this one.
    StopString(String),
    /// The most tokens asked for, or the end of the context.
    Length,
    /// The grammar was complete.
    Grammar,
    /// Another call ended it.
    Stopped,
}

impl From<FinishReason> for Finish {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Eos => Self::Eos,
            FinishReason::StopToken => Self::StopToken,
            FinishReason::Length => Self::Length,
            FinishReason::Grammar => Self::Grammar,
        }
    }
}

impl From<&Finish> for FinishReason {
    fn from(finish: &Finish) -> Self {
        match finish {
            Finish::Eos => Self::Eos,
            Finish::StopToken | Finish::StopString(_) | Finish::Stopped => Self::StopToken,
            Finish::Length => Self::Length,
            Finish::Grammar => Self::Grammar,
        }
    }
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// See [`Piece::latency`]; one per token.
    pub latencies: Vec<Duration>,
    /// What computing the prompt has told, where it is known.
    pub prompt: Option<Arc<PromptReport>>,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of other sequences of its prompt, which are less likely and not part of the answer.
    pub unreturned: usize,
}

impl Whole {
    /// Tokens generated, counting those that a resumed request brought.
    pub fn generated(&self) -> usize {
        self.tokens.last().map_or(0, |token| token.index + 1)
    }

    /// Natural logarithm of the probability of all tokens in a row.
    pub fn cumulative_logprob(&self) -> f64 {
        self.tokens.iter().map(|token| f64::from(token.logprob)).sum()
    }
}
