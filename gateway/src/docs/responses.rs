//! Answers and refusals, as the description of the API shows them. See `requests`.

#![expect(dead_code, reason = "what the derived description reads is no code")]

use serde::Serialize;
use serde_json::Value;
use utoipa::{IntoResponses, ToSchema};

/// What the routes of Triton, vLLM and TGI answer when they refuse.
#[derive(ToSchema)]
pub(crate) struct MindIeError {
    /// What was expected, and what came.
    pub(crate) error: String,
    /// Its kind.
    pub(crate) error_type: String,
}

/// What `/v1` answers when it refuses.
#[derive(ToSchema)]
pub(crate) struct OpenAiError {
    /// The error.
    pub(crate) error: OpenAiErrorObject,
}

/// An error of `/v1`.
#[derive(ToSchema)]
pub(crate) struct OpenAiErrorObject {
    /// What was expected, and what came.
    pub(crate) message: String,
    /// Its kind.
    pub(crate) r#type: String,
    /// The field at fault.
    #[schema(required)]
    pub(crate) param: Option<String>,
    /// Its name for programs.
    #[schema(required)]
    pub(crate) code: Option<String>,
}

/// The refusals of the routes of Triton, vLLM and TGI.
#[derive(IntoResponses)]
pub(crate) enum MindIeRefusals {
    /// A faulty request, where the server is as strict as Triton.
    #[response(status = 400)]
    BadRequest(#[to_schema] MindIeError),
    /// No key that is valid here.
    #[response(status = 401)]
    Unauthorized(#[to_schema] MindIeError),
    /// No such model, request or path.
    #[response(status = 404)]
    NotFound(#[to_schema] MindIeError),
    /// Another method is served here.
    #[response(status = 405)]
    WrongMethod(#[to_schema] MindIeError),
    /// The request's deadline passed, or its body did not come in time.
    #[response(status = 408)]
    Late(#[to_schema] MindIeError),
    /// The body is too large.
    #[response(status = 413)]
    TooLarge(#[to_schema] MindIeError),
    /// The body is coded.
    #[response(status = 415)]
    Coded(#[to_schema] MindIeError),
    /// A parameter is missing or out of its range.
    #[response(status = 422)]
    Invalid(#[to_schema] MindIeError),
    /// The generation failed.
    #[response(status = 424)]
    Failed(#[to_schema] MindIeError),
    /// As many requests as may run and wait do.
    #[response(status = 429)]
    Busy(#[to_schema] MindIeError),
    /// Nothing can be served now.
    #[response(status = 503)]
    Unavailable(#[to_schema] MindIeError),
}

/// The refusals of `/v1`.
#[derive(IntoResponses)]
pub(crate) enum OpenAiRefusals {
    /// A field is missing or out of its range.
    #[response(status = 400)]
    Invalid(#[to_schema] OpenAiError),
    /// No key that is valid here.
    #[response(status = 401)]
    Unauthorized(#[to_schema] OpenAiError),
    /// No such model or path.
    #[response(status = 404)]
    NotFound(#[to_schema] OpenAiError),
    /// Another method is served here.
    #[response(status = 405)]
    WrongMethod(#[to_schema] OpenAiError),
    /// The request's deadline passed, or its body did not come in time.
    #[response(status = 408)]
    Late(#[to_schema] OpenAiError),
    /// The body is too large.
    #[response(status = 413)]
    TooLarge(#[to_schema] OpenAiError),
    /// The body is coded.
    #[response(status = 415)]
    Coded(#[to_schema] OpenAiError),
    /// As many requests as may run and wait do.
    #[response(status = 429)]
    Busy(#[to_schema] OpenAiError),
    /// Nothing can be served now.
    #[response(status = 503)]
    Unavailable(#[to_schema] OpenAiError),
}

/// The answer of `generate`; each event of `generate_stream` is one too, with the times of its token.
#[derive(ToSchema)]
pub(crate) struct TritonAnswer {
    /// The request's name.
    pub(crate) id: String,
    /// The model.
    pub(crate) model_name: String,
    /// Null.
    pub(crate) model_version: Option<String>,
    /// The text.
    pub(crate) text_output: String,
    /// Counts and times, if asked for.
    #[schema(value_type = Option<Object>)]
    pub(crate) details: Option<Value>,
}

/// An event of a stream.
#[derive(ToSchema)]
pub(crate) struct StreamEvent {
    /// An answer as JSON, or `[DONE]`.
    pub(crate) data: String,
}

/// vLLM's answer of `/generate`.
#[derive(Serialize, ToSchema)]
pub(crate) struct TextsAnswer {
    /// Prompt and text of each sequence.
    pub(crate) text: Vec<String>,
}

/// Tokens of a call.
#[derive(ToSchema)]
#[expect(clippy::struct_field_names, reason = "the API's names")]
pub(crate) struct Usage {
    /// Of the prompts.
    pub(crate) prompt_tokens: u64,
    /// Of the answers.
    pub(crate) completion_tokens: u64,
    /// Of both.
    pub(crate) total_tokens: u64,
}

/// The answer of `/v1/completions`.
#[derive(ToSchema)]
pub(crate) struct CompletionAnswer {
    /// Names the answer.
    pub(crate) id: String,
    /// `text_completion`.
    pub(crate) object: String,
    /// Seconds of Unix time.
    pub(crate) created: u64,
    /// The model.
    pub(crate) model: String,
    /// Prompt by prompt.
    pub(crate) choices: Vec<CompletionChoice>,
    /// Tokens.
    pub(crate) usage: Usage,
}

/// A choice of `/v1/completions`.
#[derive(ToSchema)]
pub(crate) struct CompletionChoice {
    /// Its number.
    pub(crate) index: u64,
    /// Its text.
    pub(crate) text: String,
    /// If asked for.
    #[schema(value_type = Option<Object>)]
    pub(crate) logprobs: Option<Value>,
    /// `stop` or `length`.
    pub(crate) finish_reason: String,
}

/// The answer of `/v1/chat/completions`.
#[derive(ToSchema)]
pub(crate) struct ChatAnswer {
    /// Names the answer.
    pub(crate) id: String,
    /// `chat.completion`.
    pub(crate) object: String,
    /// Seconds of Unix time.
    pub(crate) created: u64,
    /// The model.
    pub(crate) model: String,
    /// As many as asked for.
    pub(crate) choices: Vec<ChatChoice>,
    /// Tokens.
    pub(crate) usage: Usage,
}

/// A choice of a chat.
#[derive(ToSchema)]
pub(crate) struct ChatChoice {
    /// Its number.
    pub(crate) index: u64,
    /// The message.
    pub(crate) message: AnswerMessage,
    /// `stop`, `length`, `tool_calls` or `function_call`.
    pub(crate) finish_reason: String,
}

/// What the model answers.
#[derive(ToSchema)]
pub(crate) struct AnswerMessage {
    /// `assistant`.
    pub(crate) role: String,
    /// The text; null when there are only calls.
    #[schema(required)]
    pub(crate) content: Option<String>,
    /// The calls.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(crate) tool_calls: Option<Value>,
}

/// A served model.
#[derive(ToSchema)]
pub(crate) struct ModelAnswer {
    /// Its name.
    pub(crate) id: String,
    /// `model`.
    pub(crate) object: String,
    /// When this server started, seconds of Unix time.
    pub(crate) created: u64,
    /// `baton`.
    pub(crate) owned_by: String,
}

/// The served models.
#[derive(ToSchema)]
pub(crate) struct ModelsAnswer {
    /// `list`.
    pub(crate) object: String,
    /// The models.
    pub(crate) data: Vec<ModelAnswer>,
}

/// The body of `stopInfer`.
#[derive(ToSchema)]
pub(crate) struct StopRequest {
    /// The request to stop.
    #[schema(pattern = "^[A-Za-z0-9_-]{1,256}$")]
    pub(crate) id: String,
}

/// The answer of `stopInfer`.
#[derive(ToSchema)]
pub(crate) struct StoppedAnswer {
    /// The request that was stopped.
    pub(crate) id: String,
}

/// The answer of `getSlotCount`.
#[derive(ToSchema)]
pub(crate) struct SlotsAnswer {
    /// Requests that may run at once.
    pub(crate) total_slots: u64,
    /// Those that more may run now.
    pub(crate) free_slots: u64,
    /// Tokens that the decode workers have room for.
    pub(crate) available_tokens_length: u64,
}
