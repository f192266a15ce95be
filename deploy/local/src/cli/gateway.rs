//! Options of the gateway, but for those in [`crate::clients`].

use clap::Args;
use serde::Serialize;

use crate::clients::ClientOptions;

/// Where a gateway of its own listens.
#[derive(Args, Serialize)]
#[command(next_help_heading = "Addresses")]
pub(crate) struct GatewayListenOptions {
    /// Address to serve HTTP at
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Address to serve gRPC at
    #[arg(long, value_name = "HOST:PORT")]
    grpc_listen: Option<String>,
}

/// See [`gateway::Config`].
#[derive(Args, Serialize)]
pub(crate) struct FrontOptions {
    #[command(flatten)]
    #[serde(flatten)]
    apis: ApiOptions,
    #[command(flatten)]
    #[serde(flatten)]
    bounds: BoundOptions,
    #[command(flatten)]
    #[serde(flatten)]
    clients: ClientOptions,
}

#[derive(Args, Serialize)]
#[command(next_help_heading = "APIs")]
struct ApiOptions {
    /// Whose behaviour /v1 follows where they differ: openai or mlc
    #[arg(long, value_name = "NAME")]
    dialect: Option<String>,
    /// Take any model name where one model is served [default: with --dialect mlc]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    accept_any_model: Option<bool>,
    /// Serve /chat/completions, /completions and /models without /v1 as well
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    prefixless_aliases: Option<bool>,
    /// What ends each object of a stream of /generate: nul or newline
    #[arg(long, value_name = "NAME")]
    vllm_delimiter: Option<String>,
    /// What stands between prompt and completion in the text of /generate
    #[arg(long, value_name = "TEXT")]
    vllm_separator: Option<String>,
    /// Send the whole text so far with every event of the streams of Triton and vLLM
    #[arg(
        long,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_name = "BOOL",
        alias = "fullTextEnabled"
    )]
    full_text_enabled: Option<bool>,
    /// Fill first_token_cost and decode_cost for every request, not only for one that brings its own
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    report_costs: Option<bool>,
    /// Refuse faulty requests on /v2 with 400, not 422
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    triton_strict: Option<bool>,
    /// How the model writes tool calls: auto, hermes, llama3_json, pythonic or mistral
    #[arg(long, value_name = "NAME")]
    tool_parser: Option<String>,
    /// How the model writes its reasoning: auto, none or think
    #[arg(long, value_name = "NAME")]
    reasoning_parser: Option<String>,
    /// Take chat templates out of requests, whose memory nothing bounds: for trusted clients only
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    request_chat_template: Option<bool>,
    /// Key of the watermark: who knows it can tell marked text
    #[arg(long, value_name = "N")]
    watermark_key: Option<u64>,
    /// Part of the vocabulary that a watermark favours at each token, between 0 and 1
    #[arg(long, value_name = "PART")]
    watermark_gamma: Option<f32>,
    /// What a watermark adds to the logits of that part, more than 0
    #[arg(long, value_name = "LOGIT")]
    watermark_delta: Option<f32>,
}

#[derive(Args, Serialize)]
#[command(next_help_heading = "Limits of requests")]
struct BoundOptions {
    /// Most requests that run at once
    #[arg(long, value_name = "N", alias = "maxLinkNum")]
    requests_max: Option<usize>,
    /// Most requests that wait for their turn; the next is refused [default: twice --requests-max]
    #[arg(long, value_name = "N")]
    queue_max: Option<usize>,
    /// Most tokens of a sequence, prompt and output [default: the model's context]
    #[arg(long, value_name = "N", alias = "maxSeqLen")]
    max_seq_len: Option<usize>,
    /// Most tokens of a prompt; one less than --max-seq-len at most [default: what fits a sequence]
    #[arg(long, value_name = "N", alias = "maxInputTokenLen")]
    max_input_token_len: Option<usize>,
    /// Most tokens that a request generates, whatever it asks for [default: what fits a sequence]
    #[arg(long, value_name = "N", alias = "maxIterTimes")]
    max_iter_times: Option<usize>,
    /// Seconds that a request may take in all, if it names no time of its own
    #[arg(long, value_name = "SECONDS")]
    timeout_seconds: Option<f64>,
    /// Most bytes of a request's body
    #[arg(long, value_name = "N")]
    body_bytes_max: Option<usize>,
    /// Seconds that the whole of a request's body may take to arrive
    #[arg(long, value_name = "SECONDS")]
    body_timeout_seconds: Option<f64>,
    /// Seconds that a request whose router is gone waits for one that goes on
    #[arg(long, value_name = "SECONDS")]
    resume_window_seconds: Option<f64>,
    /// Seconds between two questions to a router about what is served
    #[arg(long, value_name = "SECONDS")]
    models_every_seconds: Option<f64>,
}
