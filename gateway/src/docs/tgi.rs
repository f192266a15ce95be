//! The bodies of TGI's routes, and of `/generate`, which it shares with vLLM, as the description of the API shows them.
//! See `requests`.

#![expect(dead_code, reason = "what the derived description reads is no code")]

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::requests::{OneOrMany, TextOrParts, VllmRequest};
use super::responses::TextsAnswer;

/// The body of `/generate`.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum GenerateRequest {
    /// vLLM's, with a prompt.
    Vllm(Box<VllmRequest>),
    /// TGI's, with inputs.
    Tgi(Box<TgiRequest>),
}

/// The answer of `/generate`.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum GeneratedAnswer {
    /// vLLM's.
    Vllm(TextsAnswer),
    /// TGI's.
    Tgi(TgiAnswer),
}

/// The body of TGI's routes.
#[derive(Serialize, ToSchema)]
#[schema(example = json!({"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16, "details": true}}))]
pub(crate) struct TgiRequest {
    /// What to continue: a text of at most 4 Mi characters, or a list of parts of type `text`.
    #[schema(value_type = TextOrParts)]
    pub(crate) inputs: Value,
    /// How to continue.
    pub(crate) parameters: Option<TgiParameters>,
    /// Answer token by token; `/generate_stream` always does.
    #[schema(default = false)]
    pub(crate) stream: Option<bool>,
    /// The model; may be absent when one is served.
    pub(crate) model: Option<String>,
}

/// How TGI's routes continue a text.
#[derive(Serialize, ToSchema)]
pub(crate) struct TgiParameters {
    /// Sequences, of which the likeliest is the answer and the others are details; 1 in a stream and without sampling.
    #[schema(minimum = 1, maximum = 128, default = 1)]
    pub(crate) best_of: Option<u32>,
    /// Tell of the prompt's tokens, and of all details; not in a stream.
    #[schema(default = false)]
    pub(crate) decoder_input_details: Option<bool>,
    /// Tell of tokens, counts and the seed.
    #[schema(default = false)]
    pub(crate) details: Option<bool>,
    /// Sample, or take the likeliest; when absent, sample if any of `temperature`, `top_k`, `top_p`, `typical_p` and
    /// `seed` is there.
    pub(crate) do_sample: Option<bool>,
    /// For each time a token was generated, taken off its logit.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub(crate) frequency_penalty: Option<f32>,
    /// What the output must look like.
    pub(crate) grammar: Option<TgiGrammar>,
    /// Most tokens to generate.
    #[schema(minimum = 1, maximum = 2_147_483_647, default = 20)]
    pub(crate) max_new_tokens: Option<u32>,
    /// More than 1 makes tokens less likely that are there already.
    #[schema(exclusive_minimum = 0.0, default = 1.0)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Put the prompt before the text.
    #[schema(default = false)]
    pub(crate) return_full_text: Option<bool>,
    /// Decides the random numbers.
    #[schema(minimum = 0)]
    pub(crate) seed: Option<u64>,
    /// Texts that end the text, of which they are the last part.
    #[schema(value_type = Option<OneOrMany>)]
    pub(crate) stop: Option<Value>,
    /// Divides the logits.
    #[schema(exclusive_minimum = 0.0, default = 1.0)]
    pub(crate) temperature: Option<f32>,
    /// Keep the most likely tokens.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) top_k: Option<u32>,
    /// Likeliest tokens to tell of beside each.
    #[schema(minimum = 0, maximum = 20, default = 0)]
    pub(crate) top_n_tokens: Option<u32>,
    /// Keep the smallest set of the most likely with this probability.
    #[schema(exclusive_minimum = 0.0, maximum = 1.0, default = 1.0)]
    pub(crate) top_p: Option<f32>,
    /// Keep only so many tokens at the end of the prompt.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) truncate: Option<u32>,
    /// Keep the most typical set with this probability.
    #[schema(exclusive_minimum = 0.0, maximum = 1.0)]
    pub(crate) typical_p: Option<f32>,
    /// Mark the text with the server's watermark.
    #[schema(default = false)]
    pub(crate) watermark: Option<bool>,
    /// Refused: no adapters are served here.
    #[schema(max_length = 0)]
    pub(crate) adapter_id: Option<String>,
}

/// What an output must look like.
#[derive(Serialize, ToSchema)]
pub(crate) struct TgiGrammar {
    /// What `value` is: a JSON schema, an object with `name` and `schema`, or a regular expression.
    #[schema(pattern = "^(json|json_object|json_schema|regex)$")]
    pub(crate) r#type: String,
    /// The schema or expression.
    pub(crate) value: Value,
}

/// An answer of TGI's routes.
#[derive(Serialize, ToSchema)]
pub(crate) struct TgiAnswer {
    /// The text.
    pub(crate) generated_text: String,
    /// Tokens, counts and the seed, if asked for.
    #[schema(value_type = Option<Object>)]
    pub(crate) details: Option<Value>,
}

/// The answer of `/info`.
#[derive(ToSchema)]
pub(crate) struct DescriptionAnswer {
    /// The first model.
    pub(crate) model_id: String,
    /// Digest of its files.
    pub(crate) model_sha: String,
    /// `text-generation`.
    pub(crate) model_pipeline_tag: String,
    /// Requests that may run at once.
    pub(crate) max_concurrent_requests: u64,
    /// Most sequences of a prompt.
    pub(crate) max_best_of: u64,
    /// Most stop strings.
    pub(crate) max_stop_sequences: u64,
    /// Most of `top_n_tokens`.
    pub(crate) max_top_n_tokens: u64,
    /// Most tokens of a prompt.
    pub(crate) max_input_tokens: u64,
    /// The same.
    pub(crate) max_input_length: u64,
    /// Most tokens of prompt and output.
    pub(crate) max_total_tokens: u64,
    /// Prompts of a request.
    pub(crate) max_client_batch_size: u64,
    /// All models.
    #[schema(value_type = Vec<Object>)]
    pub(crate) models: Vec<Value>,
    /// Of the server.
    pub(crate) version: String,
}
