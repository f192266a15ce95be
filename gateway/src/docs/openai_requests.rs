//! The bodies of `/v1`, as the description of the API shows them. See `requests`.

#![expect(dead_code, reason = "what the derived description reads is no code")]

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::requests::{OneOrMany, Prompts, Structured, TextOrParts};

/// What chat and text completions have in common.
#[derive(Serialize, ToSchema)]
pub(crate) struct Common {
    /// The model; may be absent when one is served.
    pub(crate) model: Option<String>,
    /// Divides the logits; 0 takes the likeliest.
    #[schema(minimum = 0.0, maximum = 2.0, default = 1.0)]
    pub(crate) temperature: Option<f32>,
    /// Keep the smallest set of the most likely with this probability.
    #[schema(minimum = 0.0, maximum = 1.0, default = 1.0)]
    pub(crate) top_p: Option<f32>,
    /// Keep the most likely tokens; 0 and -1 keep all.
    #[schema(minimum = -1, maximum = 2_147_483_647)]
    pub(crate) top_k: Option<i64>,
    /// Keep tokens at least this share as likely as the likeliest.
    #[schema(minimum = 0.0, maximum = 1.0, default = 0.0)]
    pub(crate) min_p: Option<f32>,
    /// Taken off the logits of tokens that were generated.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub(crate) presence_penalty: Option<f32>,
    /// The same for each time they were.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub(crate) frequency_penalty: Option<f32>,
    /// More than 1 makes tokens less likely that are there already.
    #[schema(exclusive_minimum = 0.0, maximum = 2.0, default = 1.0)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Added to logits, by token id.
    #[schema(value_type = Option<BTreeMap<String, f32>>)]
    pub(crate) logit_bias: Option<Value>,
    /// The only tokens there may be.
    pub(crate) allowed_token_ids: Option<Vec<u32>>,
    /// Texts that are never written.
    pub(crate) bad_words: Option<Vec<String>>,
    /// Decides the random numbers.
    pub(crate) seed: Option<i64>,
    /// Choices of each prompt, whose KV is computed once.
    #[schema(minimum = 1, maximum = 128, default = 1)]
    pub(crate) n: Option<u32>,
    /// Texts that end the text.
    #[schema(value_type = Option<OneOrMany>)]
    pub(crate) stop: Option<Value>,
    /// Tokens that end it.
    pub(crate) stop_token_ids: Option<Vec<u32>>,
    /// Keep what ended it.
    #[schema(default = false)]
    pub(crate) include_stop_str_in_output: Option<bool>,
    /// Go on after the model's own end.
    #[schema(default = false)]
    pub(crate) ignore_eos: Option<bool>,
    /// Generated tokens before which nothing ends.
    #[schema(minimum = 0, maximum = 2_147_483_647)]
    pub(crate) min_tokens: Option<u32>,
    /// Leave the text of special tokens out.
    #[schema(default = true)]
    pub(crate) skip_special_tokens: Option<bool>,
    /// Answer chunk by chunk.
    #[schema(default = false)]
    pub(crate) stream: Option<bool>,
    /// Show in `usage` where the request's time went.
    #[schema(default = false)]
    pub(crate) include_timings: Option<bool>,
    /// For a stream only.
    pub(crate) stream_options: Option<StreamOptions>,
    /// The likeliest of each token of the prompt.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) prompt_logprobs: Option<u32>,
    /// Show tokens as `token_id:7`.
    pub(crate) return_tokens_as_token_ids: Option<bool>,
    /// Keep only so many tokens at the end of the prompt.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) truncate_prompt_tokens: Option<u32>,
    /// Who goes first when requests wait: 1 before all others.
    #[schema(minimum = 1, maximum = 5, default = 5)]
    pub(crate) priority: Option<u8>,
    /// The form of the answer.
    pub(crate) response_format: Option<ResponseFormat>,
    /// A JSON schema that the text keeps to.
    #[schema(value_type = Option<Object>)]
    pub(crate) guided_json: Option<Value>,
    /// Any JSON object.
    pub(crate) guided_json_object: Option<bool>,
    /// A regular expression that the text matches.
    pub(crate) guided_regex: Option<String>,
    /// The texts of which the text is one.
    pub(crate) guided_choice: Option<Vec<String>>,
    /// A grammar in Lark.
    pub(crate) guided_grammar: Option<String>,
    /// Checked, and without effect.
    pub(crate) guided_decoding_backend: Option<String>,
    /// Checked, and without effect.
    pub(crate) guided_whitespace_pattern: Option<String>,
    /// The same fields without their prefix.
    pub(crate) structured_outputs: Option<Structured>,
    /// The same fields without their prefix.
    pub(crate) guided_decoding: Option<Structured>,
    /// Refused when true.
    pub(crate) use_beam_search: Option<bool>,
    /// Whose it is: requests of one user may be computed together.
    pub(crate) user: Option<String>,
}

/// What of usage a stream tells.
#[derive(Serialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// In a last chunk of its own.
    pub(crate) include_usage: Option<bool>,
    /// In every chunk.
    pub(crate) continuous_usage_stats: Option<bool>,
    /// Without effect.
    pub(crate) include_obfuscation: Option<bool>,
}

/// The form of an answer.
#[derive(Serialize, ToSchema)]
pub(crate) struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[schema(pattern = "^(text|json_object|json_schema)$")]
    pub(crate) r#type: String,
    /// For `json_schema`.
    pub(crate) json_schema: Option<NamedSchema>,
    /// For `json_object`: a schema, as text or as an object.
    pub(crate) schema: Option<String>,
}

/// A schema with a name.
#[derive(Serialize, ToSchema)]
pub(crate) struct NamedSchema {
    /// The name.
    #[schema(pattern = "^[A-Za-z0-9_-]{1,64}$")]
    pub(crate) name: String,
    /// What it is for.
    pub(crate) description: Option<String>,
    /// Any object when absent.
    #[schema(value_type = Option<Object>)]
    pub(crate) schema: Option<Value>,
    /// Every answer keeps to its schema, whatever this says.
    pub(crate) strict: Option<bool>,
}

/// The body of `/v1/completions`.
#[derive(Serialize, ToSchema)]
#[schema(example = json!({"prompt": "Once upon a time", "max_tokens": 16}))]
pub(crate) struct CompletionRequest {
    /// What to continue.
    #[schema(value_type = Prompts)]
    pub(crate) prompt: Value,
    /// Most tokens to generate; 0 computes the prompt alone.
    #[schema(minimum = 0, maximum = 2_147_483_647, default = 16)]
    pub(crate) max_tokens: Option<u32>,
    /// Sequences of which the likeliest `n` are returned.
    #[schema(minimum = 1, maximum = 20)]
    pub(crate) best_of: Option<u32>,
    /// Begin each text with its prompt.
    #[schema(default = false)]
    pub(crate) echo: Option<bool>,
    /// Log-probabilities, with so many alternatives.
    #[schema(minimum = 0, maximum = 5)]
    pub(crate) logprobs: Option<u32>,
    /// What follows each text.
    pub(crate) suffix: Option<String>,
    #[serde(flatten)]
    pub(crate) common: Common,
}

/// The body of `/v1/chat/completions`.
#[derive(Serialize, ToSchema)]
#[schema(example = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}))]
pub(crate) struct ChatRequest {
    /// What was said.
    #[schema(min_items = 1)]
    pub(crate) messages: Vec<ChatMessage>,
    /// Most tokens to generate; as many as fit when absent.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) max_completion_tokens: Option<u32>,
    /// The same under its older name.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) max_tokens: Option<u32>,
    /// Tell log-probabilities.
    #[schema(default = false)]
    pub(crate) logprobs: Option<bool>,
    /// With so many alternatives.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) top_logprobs: Option<u32>,
    /// What the model may call.
    pub(crate) tools: Option<Vec<ChatTool>>,
    /// `none`, `auto`, `required`, or an object that names a function.
    #[schema(value_type = Option<ToolChoice>)]
    pub(crate) tool_choice: Option<Value>,
    /// More than one call may come.
    #[schema(default = true)]
    pub(crate) parallel_tool_calls: Option<bool>,
    /// A template in place of the model's own.
    pub(crate) chat_template: Option<String>,
    /// Variables of the template.
    #[schema(value_type = Option<Object>)]
    pub(crate) chat_template_kwargs: Option<Value>,
    /// Begin an assistant's message.
    #[schema(default = true)]
    pub(crate) add_generation_prompt: Option<bool>,
    /// Go on with the last message.
    #[schema(default = false)]
    pub(crate) continue_final_message: Option<bool>,
    /// Begin the answer with the last message.
    #[schema(default = false)]
    pub(crate) echo: Option<bool>,
    /// Tell the model's reasoning apart from its answer.
    #[schema(default = true)]
    pub(crate) include_reasoning: Option<bool>,
    /// How hard to think, for templates that ask.
    pub(crate) reasoning_effort: Option<String>,
    #[serde(flatten)]
    pub(crate) common: Common,
}

/// A message.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatMessage {
    /// Who speaks.
    #[schema(pattern = "^(system|developer|user|assistant|tool|function)$")]
    pub(crate) role: String,
    /// What is said; may be absent from an assistant that calls a tool.
    #[schema(value_type = Option<TextOrParts>)]
    pub(crate) content: Option<Value>,
    /// The speaker's name.
    pub(crate) name: Option<String>,
    /// The calls of an assistant.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(crate) tool_calls: Option<Value>,
    /// The call that a tool answers.
    pub(crate) tool_call_id: Option<String>,
}

/// A function that the model may call.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatTool {
    /// `function`.
    #[schema(pattern = "^function$")]
    pub(crate) r#type: String,
    /// The function.
    pub(crate) function: ToolFunction,
}

/// A function.
#[derive(Serialize, ToSchema)]
pub(crate) struct ToolFunction {
    /// Its name.
    #[schema(pattern = "^[A-Za-z0-9_.-]{1,64}$")]
    pub(crate) name: String,
    /// What it does.
    pub(crate) description: Option<String>,
    /// The schema of its arguments.
    #[schema(value_type = Option<Object>)]
    pub(crate) parameters: Option<Value>,
    /// Keep to the schema to the letter.
    pub(crate) strict: Option<bool>,
}

/// Which tools are called.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum ToolChoice {
    /// `none`, `auto` or `required`.
    Word(String),
    /// `{"type": "function", "function": {"name": …}}`.
    Named(BTreeMap<String, Value>),
}
