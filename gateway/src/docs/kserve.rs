//! The bodies of KServe's routes, as the description of the API shows them. See `requests`.

#![expect(dead_code, reason = "what the derived description reads is no code")]

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::requests::OneOrMany;

/// The body of `infer`.
#[derive(Serialize, ToSchema)]
pub(crate) struct InferRequest {
    /// Names the request; drawn when absent.
    pub(crate) id: Option<String>,
    /// How to continue. Every option of one element may be an input tensor instead, by the same name.
    pub(crate) parameters: Option<InferParameters>,
    /// The prompt, as `text_input` (BYTES, one element) or as `input0` (token ids), and options.
    #[schema(min_items = 1, max_items = 64)]
    pub(crate) inputs: Vec<InferInput>,
    /// Outputs that are wanted; those that the request implies when absent.
    #[schema(max_items = 64)]
    pub(crate) outputs: Option<Vec<InferWanted>>,
}

/// A tensor that goes in.
#[derive(Serialize, ToSchema)]
pub(crate) struct InferInput {
    /// Its name, once.
    pub(crate) name: String,
    /// Type of its elements.
    pub(crate) datatype: InferDatatype,
    /// Dimensions.
    #[schema(max_items = 16)]
    pub(crate) shape: Vec<u64>,
    /// Where the elements are binary data.
    pub(crate) parameters: Option<InferInputParameters>,
    /// The elements: a flat list, or lists within lists by the shape. Absent where they are binary data.
    #[schema(value_type = Option<Vec<Value>>)]
    pub(crate) data: Option<Value>,
}

/// Parameters of an input.
#[derive(Serialize, ToSchema)]
pub(crate) struct InferInputParameters {
    /// Bytes of the tensor behind the JSON, whose length the header `Inference-Header-Content-Length` names.
    pub(crate) binary_data_size: Option<u64>,
}

/// An output that is wanted.
#[derive(Serialize, ToSchema)]
pub(crate) struct InferWanted {
    /// Its name, once.
    #[schema(
        pattern = "^(text_output|output0|output_ids|sequence_length|finish_reason|cumulative_logprob|cum_log_probs|logprobs|output_log_probs|num_input_tokens|num_output_tokens)$"
    )]
    pub(crate) name: String,
    /// How it goes out.
    pub(crate) parameters: Option<InferWantedParameters>,
}

/// Parameters of an output.
#[derive(Serialize, ToSchema)]
pub(crate) struct InferWantedParameters {
    /// As binary data behind the JSON.
    pub(crate) binary_data: Option<bool>,
}

/// Type of a tensor's elements.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum InferDatatype {
    /// True or false.
    Bool,
    /// Unsigned, 8 bits.
    Uint8,
    /// Unsigned, 16 bits.
    Uint16,
    /// Unsigned, 32 bits.
    Uint32,
    /// Unsigned, 64 bits.
    Uint64,
    /// Signed, 8 bits.
    Int8,
    /// Signed, 16 bits.
    Int16,
    /// Signed, 32 bits.
    Int32,
    /// Signed, 64 bits.
    Int64,
    /// Half precision.
    Fp16,
    /// Single precision.
    Fp32,
    /// Double precision.
    Fp64,
    /// Single precision without its lower half.
    Bf16,
    /// Text or bytes of any length.
    Bytes,
}

/// How `infer` continues a prompt.
#[derive(Serialize, ToSchema)]
pub(crate) struct InferParameters {
    /// Who goes first when requests wait: 1 before all others, 0 for the default.
    #[schema(minimum = 0, default = 0)]
    pub(crate) priority: Option<u64>,
    /// Microseconds until the request is given up; 0 for the default.
    #[schema(minimum = 0)]
    pub(crate) timeout: Option<u64>,
    /// All outputs as binary data behind the JSON.
    #[schema(default = false)]
    pub(crate) binary_data_output: Option<bool>,
    /// More options, as the text of a JSON object.
    pub(crate) sampling_parameters: Option<String>,
    /// Most tokens to generate.
    #[schema(minimum = 1, maximum = 2_147_483_647, default = 20)]
    pub(crate) max_new_tokens: Option<u32>,
    /// The same under another name.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) max_tokens: Option<u32>,
    /// Generated tokens before which nothing ends.
    #[schema(minimum = 0, maximum = 2_147_483_647)]
    pub(crate) min_tokens: Option<u32>,
    /// The same under another name.
    #[schema(minimum = 0, maximum = 2_147_483_647)]
    pub(crate) min_length: Option<u32>,
    /// Sample, or take the likeliest; when absent, sample if any of `temperature`, `top_k`, `top_p`, `min_p`,
    /// `typical_p` and `seed` is there.
    pub(crate) do_sample: Option<bool>,
    /// Divides the logits; 0 takes the likeliest.
    #[schema(minimum = 0.0, default = 1.0)]
    pub(crate) temperature: Option<f32>,
    /// Keep the most likely tokens; 0 and -1 keep all.
    #[schema(minimum = -1, maximum = 2_147_483_647)]
    pub(crate) top_k: Option<i32>,
    /// Keep the smallest set of the most likely with this probability.
    #[schema(exclusive_minimum = 0.0, maximum = 1.0, default = 1.0)]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least this share as likely as the likeliest.
    #[schema(minimum = 0.0, maximum = 1.0, default = 0.0)]
    pub(crate) min_p: Option<f32>,
    /// Keep the most typical set with this probability.
    #[schema(exclusive_minimum = 0.0, maximum = 1.0)]
    pub(crate) typical_p: Option<f32>,
    /// Decides the random numbers; -1 for any.
    #[schema(minimum = -1)]
    pub(crate) seed: Option<i64>,
    /// More than 1 makes tokens less likely that are there already.
    #[schema(exclusive_minimum = 0.0, default = 1.0)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Taken off the logits of tokens that were generated.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub(crate) presence_penalty: Option<f32>,
    /// The same for each time they were.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Checked, and without effect: it is for beam search.
    pub(crate) length_penalty: Option<f32>,
    /// There is no beam search.
    #[schema(minimum = 1, maximum = 1, default = 1)]
    pub(crate) beam_width: Option<u32>,
    /// Checked, and without effect: batches are the engine's.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) batch_size: Option<u32>,
    /// Sequences to answer with; more than 1 need a temperature above 0.
    #[schema(minimum = 1, maximum = 128, default = 1)]
    pub(crate) n: Option<u32>,
    /// The same under another name.
    #[schema(minimum = 1, maximum = 128)]
    pub(crate) num_return_sequences: Option<u32>,
    /// Sequences to generate, of which the likeliest are the answer; at least `n`.
    #[schema(minimum = 1, maximum = 128)]
    pub(crate) best_of: Option<u32>,
    /// Texts that end the text.
    #[schema(value_type = Option<OneOrMany>)]
    pub(crate) stop_words: Option<Value>,
    /// The same under another name.
    #[schema(value_type = Option<OneOrMany>)]
    pub(crate) stop: Option<Value>,
    /// Texts that are never written.
    #[schema(value_type = Option<OneOrMany>)]
    pub(crate) bad_words: Option<Value>,
    /// Tokens that end the text.
    pub(crate) stop_token_ids: Option<Vec<u32>>,
    /// One more of them; a negative one for none.
    pub(crate) end_id: Option<i64>,
    /// Fills the rows of the shorter sequences in outputs of tokens.
    pub(crate) pad_id: Option<i64>,
    /// Keep what ended the text.
    #[schema(default = false)]
    pub(crate) include_stop_str_in_output: Option<bool>,
    /// Go on after the model's own end.
    #[schema(default = false)]
    pub(crate) ignore_eos: Option<bool>,
    /// Leave the text of special tokens out.
    #[schema(default = true)]
    pub(crate) skip_special_tokens: Option<bool>,
    /// Keep the last so many tokens of the prompt.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub(crate) truncate_prompt_tokens: Option<u32>,
    /// Added to the logits of tokens, by their ids.
    #[schema(value_type = Option<Object>)]
    pub(crate) logit_bias: Option<Value>,
    /// The only tokens there may be.
    pub(crate) allowed_token_ids: Option<Vec<u32>>,
    /// Mark the text with the server's watermark.
    #[schema(default = false)]
    pub(crate) watermark: Option<bool>,
    /// Likeliest tokens that the output `logprobs` tells beside each.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) logprobs: Option<u32>,
    /// Checked, and without effect.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) prompt_logprobs: Option<u32>,
    /// Leave the input out of `text_output`; without a stream it stands in front when absent.
    pub(crate) exclude_input_in_output: Option<bool>,
    /// Answer as tokens come, where the transport has that; here it leaves the input out.
    #[schema(default = false)]
    pub(crate) stream: Option<bool>,
    /// The same under another name.
    #[schema(default = false)]
    pub(crate) streaming: Option<bool>,
    /// Give the output `finish_reason`.
    #[schema(default = false)]
    pub(crate) return_finish_reason: Option<bool>,
    /// Give the output `cumulative_logprob`.
    #[schema(default = false)]
    pub(crate) return_cumulative_logprob: Option<bool>,
    /// Give the output `logprobs`.
    #[schema(default = false)]
    pub(crate) return_logprobs: Option<bool>,
    /// Give the outputs `cum_log_probs` and `output_log_probs`.
    #[schema(default = false)]
    pub(crate) return_log_probs: Option<bool>,
    /// Give the output `num_input_tokens`.
    #[schema(default = false)]
    pub(crate) return_num_input_tokens: Option<bool>,
    /// Give the output `num_output_tokens`.
    #[schema(default = false)]
    pub(crate) return_num_output_tokens: Option<bool>,
    /// What the output must look like: `json`, or by the guide `json_schema`, `regex` or `lark`.
    #[schema(pattern = "^(json|json_schema|regex|lark)$")]
    pub(crate) guided_decoding_guide_type: Option<String>,
    /// The schema, expression or grammar.
    pub(crate) guided_decoding_guide: Option<String>,
}

/// The answer of `infer`. Binary data of outputs follows it where asked for.
#[derive(ToSchema)]
pub(crate) struct InferAnswer {
    /// The request's name.
    pub(crate) id: Option<String>,
    /// The model.
    pub(crate) model_name: String,
    /// Its version.
    pub(crate) model_version: String,
    /// The outputs.
    pub(crate) outputs: Vec<InferOutput>,
}

/// A tensor that comes out.
#[derive(ToSchema)]
pub(crate) struct InferOutput {
    /// Its name.
    pub(crate) name: String,
    /// Type of its elements.
    pub(crate) datatype: String,
    /// Dimensions.
    pub(crate) shape: Vec<u64>,
    /// Where its elements are binary data.
    pub(crate) parameters: Option<InferInputParameters>,
    /// Its elements as a flat list.
    #[schema(value_type = Option<Vec<Value>>)]
    pub(crate) data: Option<Value>,
}

/// What the server is.
#[derive(ToSchema)]
pub(crate) struct ServerAnswer {
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// Extensions of the protocol that it has.
    pub(crate) extensions: Vec<String>,
}

/// What a model takes and gives.
#[derive(ToSchema)]
pub(crate) struct MetadataAnswer {
    /// Its name.
    pub(crate) name: String,
    /// Its versions.
    pub(crate) versions: Vec<String>,
    /// What runs it.
    pub(crate) platform: String,
    /// Inputs.
    pub(crate) inputs: Vec<TensorAnswer>,
    /// Outputs.
    pub(crate) outputs: Vec<TensorAnswer>,
}

/// A tensor of a model.
#[derive(ToSchema)]
pub(crate) struct TensorAnswer {
    /// Its name.
    pub(crate) name: String,
    /// Type of its elements.
    pub(crate) datatype: String,
    /// Dimensions; -1 for one of any size.
    pub(crate) shape: Vec<i64>,
}

/// A model's configuration.
#[derive(ToSchema)]
pub(crate) struct ConfigAnswer {
    /// Its name.
    pub(crate) name: String,
    /// What runs it.
    pub(crate) platform: String,
    /// The part of the platform that runs it.
    pub(crate) backend: String,
    /// 0: clients put no several requests into one.
    pub(crate) max_batch_size: i32,
    /// Inputs.
    #[schema(value_type = Vec<Object>)]
    pub(crate) input: Vec<Value>,
    /// Outputs.
    #[schema(value_type = Vec<Object>)]
    pub(crate) output: Vec<Value>,
}

/// What was served.
#[derive(ToSchema)]
pub(crate) struct StatisticsAnswer {
    /// One entry for each model.
    #[schema(value_type = Vec<Object>)]
    pub(crate) model_stats: Vec<Value>,
}

/// The body of a request for the index.
#[derive(ToSchema)]
pub(crate) struct IndexRequest {
    /// Only models that can be used.
    #[schema(default = false)]
    pub(crate) ready: Option<bool>,
}

/// A model in the index.
#[derive(ToSchema)]
pub(crate) struct IndexEntry {
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// `READY` or `UNAVAILABLE`.
    pub(crate) state: String,
    /// Why, if there is something to say.
    pub(crate) reason: String,
}
