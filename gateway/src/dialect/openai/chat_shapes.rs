//! The JSON of chat completions. The order of fields follows the API's own examples, and what other servers print as
//! null is printed as null.

use serde::Serialize;
use serde_json::Value;

use super::logprobs::{Entry, PromptLogprobs};
use crate::timing::Parts;

/// An answer in one piece.
#[derive(Serialize)]
pub(super) struct Response<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: Vec<Choice>,
    pub(super) usage: Usage,
    pub(super) system_fingerprint: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<Option<PromptLogprobs>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
pub(super) struct Choice {
    pub(super) index: usize,
    pub(super) message: AssistantMessage,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: &'static str,
    pub(super) stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
pub(super) struct AssistantMessage {
    pub(super) role: &'static str,
    pub(super) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    pub(super) refusal: (),
    pub(super) tool_calls: Option<Vec<Call>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) function_call: Option<Function>,
    pub(super) name: (),
    pub(super) tool_call_id: (),
}

#[derive(Serialize)]
pub(super) struct Call {
    pub(super) id: String,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) function: Function,
}

#[derive(Serialize)]
pub(super) struct Function {
    pub(super) name: String,
    pub(super) arguments: Arguments,
}

/// Arguments of a call.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Arguments {
    /// JSON text, as `OpenAI` has it.
    Text(String),
    /// An object, as MLC has it.
    Object(Value),
}

/// What ended a text, besides its own end.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum StopReason {
    Token(u32),
    Text(String),
}

#[derive(Serialize)]
pub(super) struct Logprobs {
    pub(super) content: Vec<Entry>,
    pub(super) refusal: (),
}

/// An event of a stream.
#[derive(Serialize)]
pub(super) struct Chunk<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) system_fingerprint: &'a str,
    pub(super) choices: &'a [ChunkChoice<'a>],
    /// Absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<ChunkUsage>,
}

#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum ChunkUsage {
    /// Printed as null.
    Later(()),
    Now(Usage),
}

#[derive(Serialize)]
pub(super) struct ChunkChoice<'a> {
    pub(super) index: usize,
    pub(super) delta: Delta<'a>,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Delta<'a> {
    OpenAi(OpenAiDelta<'a>),
    Mlc(MlcDelta<'a>),
}

/// What is new, and nothing else.
#[derive(Default, Serialize)]
pub(super) struct OpenAiDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_calls: Option<[CallDelta<'a>; 1]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) function_call: Option<FunctionDelta<'a>>,
}

/// A message of which every field is there.
#[derive(Serialize)]
pub(super) struct MlcDelta<'a> {
    pub(super) content: &'a str,
    pub(super) role: &'static str,
    pub(super) name: (),
    pub(super) tool_calls: (),
    pub(super) tool_call_id: (),
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<&'a str>,
}

#[derive(Serialize)]
pub(super) struct CallDelta<'a> {
    pub(super) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
    pub(super) function: FunctionDelta<'a>,
}

#[derive(Serialize)]
pub(super) struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<&'a str>,
    pub(super) arguments: &'a str,
}

#[derive(Serialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) total_tokens: usize,
    pub(super) prompt_tokens_details: PromptDetails,
    /// MLC's, of which nothing is known here: printed as null, and to nobody else.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) extra: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timings: Option<Box<Parts>>,
}

#[derive(Serialize)]
pub(super) struct PromptDetails {
    pub(super) cached_tokens: usize,
}
