//! The bodies of the routes that count tokens, as the description of the API shows them. See `requests`.

#![expect(dead_code, reason = "what the derived description reads is no code")]

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// The body of `/tokenize`: a text, or a chat.
#[derive(Serialize, ToSchema)]
#[schema(example = json!({"prompt": "Once upon a time"}))]
pub(crate) struct TokenizeRequest {
    /// The model; may be absent when one is served.
    pub(crate) model: Option<String>,
    /// A text of at most 4 MiB.
    pub(crate) prompt: Option<String>,
    /// A chat, in place of a text.
    #[schema(value_type = Option<Vec<Object>>, min_items = 1)]
    pub(crate) messages: Option<Value>,
    /// Begin with the token that begins a sequence, if the model wants one; when absent, with a text and not with a
    /// chat, whose template does.
    pub(crate) add_special_tokens: Option<bool>,
    /// Give the tokens' texts too.
    #[schema(default = false)]
    pub(crate) return_token_strs: Option<bool>,
    /// End a chat with the beginning of an answer; true unless the last message is to go on.
    pub(crate) add_generation_prompt: Option<bool>,
    /// End a chat within its last message.
    #[schema(default = false)]
    pub(crate) continue_final_message: Option<bool>,
    /// A template in place of the model's, where the server allows it.
    pub(crate) chat_template: Option<String>,
    /// Further variables of the template.
    #[schema(value_type = Option<Object>)]
    pub(crate) chat_template_kwargs: Option<Value>,
    /// Documents for the template.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(crate) documents: Option<Value>,
    /// Functions that the chat may call.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(crate) tools: Option<Value>,
    /// Which of them.
    pub(crate) tool_choice: Option<Value>,
    /// More than one of them.
    pub(crate) parallel_tool_calls: Option<bool>,
    /// The older form of `tools`.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(crate) functions: Option<Value>,
    /// The older form of `tool_choice`.
    pub(crate) function_call: Option<Value>,
}

/// The answer of `/tokenize`.
#[derive(ToSchema)]
pub(crate) struct TokenizedAnswer {
    /// How many.
    pub(crate) count: u64,
    /// Tokens that the context has room for.
    pub(crate) max_model_len: u64,
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// Their texts, if asked for.
    #[schema(required)]
    pub(crate) token_strs: Option<Vec<String>>,
}

/// The body of `/detokenize`.
#[derive(Serialize, ToSchema)]
pub(crate) struct DetokenizeRequest {
    /// The model; may be absent when one is served.
    pub(crate) model: Option<String>,
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
}

/// The answer of `/detokenize`.
#[derive(ToSchema)]
pub(crate) struct DetokenizedAnswer {
    /// The text.
    pub(crate) prompt: String,
}

/// The body of `/v1/tokenizer`.
#[derive(Serialize, ToSchema)]
#[schema(example = json!({"inputs": "Once upon a time"}))]
pub(crate) struct CountRequest {
    /// A text of at most 4 Mi characters.
    #[schema(min_length = 1)]
    pub(crate) inputs: String,
    /// The model; may be absent when one is served.
    pub(crate) model: Option<String>,
}

/// The answer of `/v1/tokenizer`.
#[derive(ToSchema)]
pub(crate) struct CountedAnswer {
    /// How many tokens.
    pub(crate) token_number: u64,
    /// Their texts; a character of several tokens stands once.
    pub(crate) tokens: Vec<String>,
}

/// The answer of `/version`.
#[derive(ToSchema)]
pub(crate) struct VersionAnswer {
    /// The version.
    pub(crate) version: String,
}
