//! The bodies of requests, as the description of the API shows them.
//!
//! These types are read by no parser: each dialect reads its fields itself, with faults in its own words. A test holds
//! the two together, name by name.

#![expect(dead_code, reason = "what the derived description reads is no code")]

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

/// The body of `generate` and `generate_stream`.
#[derive(Serialize, ToSchema)]
#[schema(example = json!({"text_input": "Once upon a time", "parameters": {"max_new_tokens": 16, "details": true}}))]
pub(crate) struct TritonRequest {
    /// Names the request; drawn when absent.
    #[schema(pattern = "^[A-Za-z0-9_-]{1,256}$")]
    pub(crate) id: Option<String>,
    /// What to continue: a text of at most 4 Mi characters, or a list of parts of type `text`.
    #[schema(value_type = TextOrParts)]
    pub(crate) text_input: Value,
    /// Chosen by the path; read and without effect.
    pub(crate) stream: Option<bool>,
    /// How to continue. Every field may stand beside this object as well.
    pub(crate) parameters: Option<TritonParameters>,
}

/// How `generate` continues a text.
#[derive(Serialize, ToSchema)]
#[expect(non_snake_case, reason = "the API's names")]
pub(crate) struct TritonParameters {
    /// Tell counts and times with the text.
    #[schema(default = false)]
    pub(crate) details: Option<bool>,
    /// Sample, or take the likeliest; when absent, sample if any of `temperature`, `top_k`, `top_p`, `typical_p` and
    /// `seed` is there.
    pub(crate) do_sample: Option<bool>,
    /// Most tokens to generate.
    #[schema(minimum = 1, maximum = 2_147_483_647, default = 20)]
    pub(crate) max_new_tokens: Option<u32>,
    /// The same under another name.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) max_tokens: Option<u32>,
    /// More than 1 makes tokens less likely that are there already.
    #[schema(exclusive_minimum = 0.0, default = 1.0)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Taken off the logits of tokens that were generated.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub(crate) presence_penalty: Option<f32>,
    /// The same for each time they were.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Decides the random numbers.
    #[schema(minimum = 1)]
    pub(crate) seed: Option<u64>,
    /// The same under another name.
    #[schema(minimum = 1)]
    pub(crate) random_seed: Option<u64>,
    /// Divides the logits.
    #[schema(exclusive_minimum = 0.000001, default = 1.0)]
    pub(crate) temperature: Option<f32>,
    /// Keep the most likely tokens.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) top_k: Option<u32>,
    /// Keep the smallest set of the most likely with this probability.
    #[schema(exclusive_minimum = 0.000001, maximum = 1.0, default = 1.0)]
    pub(crate) top_p: Option<f32>,
    /// Keep the most typical set with this probability.
    #[schema(exclusive_minimum = 0.0, maximum = 1.0)]
    pub(crate) typical_p: Option<f32>,
    /// Checked, and without effect: batches are the engine's.
    #[schema(minimum = 1, maximum = 2_147_483_647, default = 1)]
    pub(crate) batch_size: Option<u32>,
    /// Mark the text with the server's watermark.
    #[schema(default = false)]
    pub(crate) watermark: Option<bool>,
    /// Who goes first when requests wait: 1 before all others.
    #[schema(minimum = 1, maximum = 5, default = 5)]
    pub(crate) priority: Option<u8>,
    /// Seconds until the request is given up.
    #[schema(minimum = 1, maximum = 3600, default = 600)]
    pub(crate) timeout: Option<u32>,
    /// Milliseconds to the first token, of a request that is moved here.
    pub(crate) firstTokenCost: Option<u64>,
    /// Milliseconds of each further token that it had.
    pub(crate) decodeTime: Option<Vec<u64>>,
    /// Texts that end the text.
    #[schema(value_type = Option<OneOrMany>)]
    pub(crate) stop: Option<Value>,
    /// The same under another name.
    #[schema(value_type = Option<OneOrMany>)]
    pub(crate) stop_words: Option<Value>,
    /// Tokens that end it.
    pub(crate) stop_token_ids: Option<Vec<u32>>,
    /// Keep what ended it.
    pub(crate) include_stop_str_in_output: Option<bool>,
    /// Go on after the model's own end.
    pub(crate) ignore_eos: Option<bool>,
    /// Generated tokens before which nothing ends.
    #[schema(minimum = 0, maximum = 2_147_483_647)]
    pub(crate) min_tokens: Option<u32>,
    /// The same under another name.
    #[schema(minimum = 0, maximum = 2_147_483_647)]
    pub(crate) min_length: Option<u32>,
    /// Texts that are never written.
    #[schema(value_type = Option<OneOrMany>)]
    pub(crate) bad_words: Option<Value>,
}

/// A text, or a list of parts.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum TextOrParts {
    /// A text.
    Text(String),
    /// Parts in a row.
    Parts(Vec<Part>),
}

/// A part of a text.
#[derive(Serialize, ToSchema)]
pub(crate) struct Part {
    /// `text`, which is what this server takes.
    #[schema(pattern = "^text$")]
    pub(crate) r#type: String,
    /// The text.
    pub(crate) text: String,
}

/// A text, or several.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// What to continue: one of these forms.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Prompts {
    /// A text.
    Text(String),
    /// Texts, each of which is continued.
    Texts(Vec<String>),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Lists of token ids, each of which is continued.
    TokenLists(Vec<Vec<u32>>),
}

/// The body of vLLM's `/generate`.
#[derive(Serialize, ToSchema)]
#[schema(example = json!({"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0.8}))]
pub(crate) struct VllmRequest {
    /// What to continue: a text, a list of parts of type `text`, or token ids.
    #[schema(value_type = TextOrParts)]
    pub(crate) prompt: Value,
    /// Most tokens to generate; the server's own most when absent, or 16.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) max_tokens: Option<u32>,
    /// More than 1 makes tokens less likely that are there already.
    #[schema(exclusive_minimum = 0.0, maximum = 2.0, default = 1.0)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Taken off the logits of tokens that were generated.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub(crate) presence_penalty: Option<f32>,
    /// The same for each time they were.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Divides the logits; 0 takes the likeliest.
    #[schema(minimum = 0.0, default = 1.0)]
    pub(crate) temperature: Option<f32>,
    /// Keep the smallest set of the most likely with this probability.
    #[schema(exclusive_minimum = 0.000001, maximum = 1.0, default = 1.0)]
    pub(crate) top_p: Option<f32>,
    /// Keep the most likely tokens.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) top_k: Option<u32>,
    /// Keep tokens at least this share as likely as the likeliest.
    #[schema(minimum = 0.0, maximum = 1.0, default = 0.0)]
    pub(crate) min_p: Option<f32>,
    /// Decides the random numbers.
    #[schema(minimum = 1)]
    pub(crate) seed: Option<u64>,
    /// Answer token by token.
    #[schema(default = false)]
    pub(crate) stream: Option<bool>,
    /// Texts that end the text.
    #[schema(value_type = Option<OneOrMany>)]
    pub(crate) stop: Option<Value>,
    /// Tokens that end it; what is no integer of 32 bits is ignored.
    #[schema(value_type = Option<Vec<i64>>)]
    pub(crate) stop_token_ids: Option<Value>,
    /// The adapter; `None` for none.
    pub(crate) model: Option<String>,
    /// Keep what ended the text.
    #[schema(default = false)]
    pub(crate) include_stop_str_in_output: Option<bool>,
    /// Leave the text of special tokens out.
    #[schema(default = true)]
    pub(crate) skip_special_tokens: Option<bool>,
    /// Go on after the model's own end.
    #[schema(default = false)]
    pub(crate) ignore_eos: Option<bool>,
    /// Sequences, all of which are answered with.
    #[schema(minimum = 1, maximum = 128, default = 1)]
    pub(crate) best_of: Option<u32>,
    /// Sequences, when `best_of` is absent.
    #[schema(minimum = 1, maximum = 128, default = 1)]
    pub(crate) n: Option<u32>,
    /// Generated tokens before which nothing ends.
    #[schema(minimum = 0, maximum = 2_147_483_647)]
    pub(crate) min_tokens: Option<u32>,
    /// Texts that are never written.
    pub(crate) bad_words: Option<Vec<String>>,
    /// Added to logits, by token id.
    #[schema(value_type = Option<std::collections::BTreeMap<String, f32>>)]
    pub(crate) logit_bias: Option<Value>,
    /// The only tokens there may be.
    pub(crate) allowed_token_ids: Option<Vec<u32>>,
    /// Checked; the answer has no place for it.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) logprobs: Option<u32>,
    /// Checked; the answer has no place for it.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) prompt_logprobs: Option<u32>,
    /// Keep only so many tokens at the end of the prompt.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) truncate_prompt_tokens: Option<u32>,
    /// Who goes first when requests wait: 1 before all others.
    #[schema(minimum = 1, maximum = 5, default = 5)]
    pub(crate) priority: Option<u8>,
    /// Checked, and without effect: text is what the answer is.
    pub(crate) detokenize: Option<bool>,
    /// Checked, and without effect.
    pub(crate) spaces_between_special_tokens: Option<bool>,
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
}

/// What an output must look like; one of these.
#[derive(Serialize, ToSchema)]
pub(crate) struct Structured {
    /// A JSON schema.
    #[schema(value_type = Option<Object>)]
    pub(crate) json: Option<Value>,
    /// Any JSON object.
    pub(crate) json_object: Option<bool>,
    /// A regular expression.
    pub(crate) regex: Option<String>,
    /// One of these texts.
    pub(crate) choice: Option<Vec<String>>,
    /// A grammar in Lark.
    pub(crate) grammar: Option<String>,
}
