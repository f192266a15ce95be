//! Configuration of the gateway.

mod keys;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use keys::ApiKeys;

/// Every option of the gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address to serve HTTP at, `host:port`; port 0 lets the system choose.
    pub listen: String,
    /// Address to serve gRPC at: `host:port`, or `local:NAME` within the process.
    pub grpc_listen: String,
    /// Most requests that run at once; the next waits. `MindIE`'s `maxLinkNum`.
    pub requests_max: usize,
    /// Most requests that wait for their turn; the next is refused. Twice `requests_max` when absent, see
    /// [`Config::queue_max`].
    pub queue_max: Option<usize>,
    /// Most bytes of a request's body.
    pub body_bytes_max: usize,
    /// Longest that the whole of a request's body may take to arrive, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "body_timeout_seconds")]
    pub body_timeout: Duration,
    /// Total deadline of a request that names none, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "timeout_seconds")]
    pub timeout: Duration,
    /// How long a request whose router is gone waits for one that goes on, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "resume_window_seconds")]
    pub resume_window: Duration,
    /// How often routers are asked what is served, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "models_every_seconds")]
    pub models_every: Duration,
    /// Where just one model is served, take any name for it. When absent only under [`Dialect::Mlc`], see
    /// [`Config::accepts_any_model`].
    pub accept_any_model: Option<bool>,
    /// Whose behaviour `/v1` follows where peers differ.
    pub dialect: Dialect,
    /// Serve the paths below `/v1` without that prefix as well: `/chat/completions`, `/completions`, `/models`.
    pub prefixless_aliases: bool,
    /// What ends each object of a stream of vLLM's `/generate`.
    pub vllm_delimiter: Delimiter,
    /// What stands between prompt and completion in the text of vLLM's `/generate`, when it is not streamed.
    pub vllm_separator: String,
    /// Let every event of a stream on the routes of Triton and vLLM carry the whole text so far, not the new part
    /// alone. `MindIE`'s `fullTextEnabled`.
    pub full_text_enabled: bool,
    /// Most tokens of a sequence, prompt and output together; the model's context when absent. `MindIE`'s `maxSeqLen`.
    pub max_seq_len: Option<usize>,
    /// Most tokens of a prompt, see [`Config::input_tokens_max`]. `MindIE`'s `maxInputTokenLen`.
    pub max_input_token_len: Option<usize>,
    /// Most tokens that a request generates, whatever it asks for. `MindIE`'s `maxIterTimes`.
    pub max_iter_times: Option<usize>,
    /// Fill `first_token_cost` and `decode_cost` for every request, not only for one that brings its own.
    pub report_costs: bool,
    /// Refuse faulty requests on `/v2` with 400, as Triton does, and not with 422.
    pub triton_strict: bool,
    /// Key of the watermark: who knows it can tell marked text.
    pub watermark_key: u64,
    /// Part of the vocabulary that a watermark favours at each token, between 0 and 1.
    pub watermark_gamma: f32,
    /// What a watermark adds to the logits of that part, more than 0.
    pub watermark_delta: f32,
    /// The form in which the model writes tool calls.
    pub tool_parser: ToolParser,
    /// The form in which the model writes its reasoning.
    pub reasoning_parser: ReasoningParser,
    /// Take chat templates out of requests (`chat_template`). A template is a program: its steps are bounded, and its
    /// memory is not, so only for clients that are trusted.
    pub request_chat_template: bool,
    /// PEM file with the certificate that HTTP and gRPC are served with, its issuers after it; plain text when absent.
    pub tls_cert: Option<PathBuf>,
    /// PEM file with that certificate's private key.
    pub tls_key: Option<PathBuf>,
    /// PEM file with authorities, one of which must have issued the certificate of every client; clients need none
    /// when absent.
    pub tls_client_ca: Option<PathBuf>,
    /// Longest that a TLS handshake may take, seconds.
    #[serde(with = "node::config::seconds::positive", rename = "tls_handshake_seconds")]
    pub tls_handshake: Duration,
    /// Keys, one of which a request must name as `Authorization: Bearer KEY`. Without any, here or in the file,
    /// everybody is served.
    pub api_key: ApiKeys,
    /// File with more of them, one a line; empty lines and those that begin with `#` do not count.
    pub api_key_file: Option<PathBuf>,
    /// Let browsers send cookies and authorization from other origins.
    pub allow_credentials: bool,
    /// Origins whose pages may call, such as `https://example.org`; `*` for all.
    pub allowed_origins: Vec<String>,
    /// Methods that such pages may use; `*` for all.
    pub allowed_methods: Vec<String>,
    /// Headers that such pages may send; `*` for all.
    pub allowed_headers: Vec<String>,
    /// Most requests at a time on one connection of HTTP/2, gRPC's included.
    pub streams_max: u32,
    /// Most bytes of a gRPC message, uncompressed.
    pub grpc_message_bytes_max: usize,
}

fn all() -> Vec<String> {
    vec!["*".to_owned()]
}

/// Whose behaviour `/v1` follows where MLC-LLM's differs from `OpenAI`'s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// `OpenAI`'s.
    #[default]
    OpenAi,
    /// MLC-LLM's: the role in every chunk, arguments of tool calls as an object, streamed tool calls as text, any
    /// model name.
    Mlc,
}

/// What ends each object of a stream of vLLM's `/generate`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Delimiter {
    /// A NUL byte.
    #[default]
    Nul,
    /// A line feed.
    Newline,
}

/// The form in which a model writes tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolParser {
    /// What the chat template points to.
    #[default]
    Auto,
    /// JSON between `<tool_call>` tags (Hermes, Qwen).
    Hermes,
    /// A JSON object with `name` and `parameters` (Llama 3).
    Llama3Json,
    /// A list of Python calls (Llama 3.2 and later).
    Pythonic,
    /// A JSON list behind `[TOOL_CALLS]` (Mistral).
    Mistral,
}

/// The form in which a model writes its reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningParser {
    /// What the chat template points to.
    #[default]
    Auto,
    /// None: all text is content.
    None,
    /// Between `<think>` tags.
    Think,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8000".to_owned(),
            grpc_listen: "127.0.0.1:8001".to_owned(),
            requests_max: 1000,
            queue_max: None,
            body_bytes_max: 32 << 20,
            body_timeout: Duration::from_secs(30),
            timeout: Duration::from_mins(10),
            resume_window: Duration::from_secs(15),
            models_every: Duration::from_secs(1),
            accept_any_model: None,
            dialect: Dialect::default(),
            prefixless_aliases: false,
            vllm_delimiter: Delimiter::default(),
            vllm_separator: " ".to_owned(),
            full_text_enabled: false,
            max_seq_len: None,
            max_input_token_len: None,
            max_iter_times: None,
            report_costs: false,
            triton_strict: false,
            // The millionth prime: a number that is easy to state.
            watermark_key: 15_485_863,
            watermark_gamma: 0.25,
            watermark_delta: 2.0,
            tool_parser: ToolParser::default(),
            reasoning_parser: ReasoningParser::default(),
            request_chat_template: false,
            tls_cert: None,
            tls_key: None,
            tls_client_ca: None,
            tls_handshake: Duration::from_secs(10),
            api_key: ApiKeys::default(),
            api_key_file: None,
            allow_credentials: false,
            allowed_origins: all(),
            allowed_methods: all(),
            allowed_headers: all(),
            streams_max: 1024,
            grpc_message_bytes_max: node::MESSAGE_BYTES_MAX,
        }
    }
}

/// Most that [`Config::watermark_delta`] may be: beyond it the favoured part is all that is ever sampled.
const WATERMARK_DELTA_MAX: f32 = 100.0;

impl Config {
    /// Other names that options have in a configuration file: those of `MindIE`, and the second ones of MLC-LLM.
    pub const ALIASES: &[(&str, &str)] = &[
        ("maxSeqLen", "max_seq_len"),
        ("maxInputTokenLen", "max_input_token_len"),
        ("maxIterTimes", "max_iter_times"),
        ("fullTextEnabled", "full_text_enabled"),
        ("maxLinkNum", "requests_max"),
        ("allow_origins", "allowed_origins"),
        ("allow_methods", "allowed_methods"),
        ("allow_headers", "allowed_headers"),
    ];

    /// Options whose values are not shown.
    pub const SECRETS: &[&str] = &["watermark_key", "api_key"];

    /// Most requests that wait for their turn.
    pub fn queue_max(&self) -> usize {
        self.queue_max.unwrap_or(self.requests_max.saturating_mul(2))
    }

    /// Whether any model name is taken where just one model is served.
    pub fn accepts_any_model(&self) -> bool {
        self.accept_any_model.unwrap_or(self.dialect == Dialect::Mlc)
    }

    /// Most tokens of a prompt, if these options say anything of it: `max_input_token_len`, and one less than
    /// `max_seq_len`, so that a token can follow.
    pub fn input_tokens_max(&self) -> Option<usize> {
        let within_sequence = self.max_seq_len.map(|tokens| tokens.saturating_sub(1));
        [self.max_input_token_len, within_sequence].into_iter().flatten().min()
    }

    /// Most tokens that are generated after a prompt of `input` tokens, if these options say anything of it: what
    /// `max_seq_len` leaves, and `max_iter_times`.
    pub fn output_tokens_max(&self, input: usize) -> Option<usize> {
        let within_sequence = self.max_seq_len.map(|tokens| tokens.saturating_sub(input));
        [self.max_iter_times, within_sequence].into_iter().flatten().min()
    }

    /// Refuses values that no gateway can run with.
    ///
    /// # Errors
    /// An option error that names the field, what was expected and what came.
    pub fn validate(&self) -> Result<(), node::Error> {
        // A sequence has a prompt token and a generated one.
        let least = [
            ("requests_max", Some(self.requests_max), 1),
            ("max_seq_len", self.max_seq_len, 2),
            ("max_input_token_len", self.max_input_token_len, 1),
            ("max_iter_times", self.max_iter_times, 1),
            ("streams_max", Some(self.streams_max as usize), 1),
            ("grpc_message_bytes_max", Some(self.grpc_message_bytes_max), 1),
        ];
        for (field, value, least) in least {
            if let Some(value) = value.filter(|value| *value < least) {
                return Err(node::Error::option(field, format!("expected at least {least}, got {value}")));
            }
        }
        let gamma = self.watermark_gamma;
        if !(gamma > 0.0 && gamma < 1.0) {
            let message = format!("expected a number between 0 and 1, got {gamma}");
            return Err(node::Error::option("watermark_gamma", message));
        }
        let delta = self.watermark_delta;
        if !(delta > 0.0 && delta <= WATERMARK_DELTA_MAX) {
            let message =
                format!("expected a number of more than 0 and at most {WATERMARK_DELTA_MAX}, got {delta}");
            return Err(node::Error::option("watermark_delta", message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_seconds_and_unknown_options_faults() {
        let config: Config =
            serde_json::from_str(r#"{"timeout_seconds": 1.5, "body_timeout_seconds": 2, "requests_max": 3}"#)
                .unwrap();
        let expected = Config {
            timeout: Duration::from_millis(1500),
            body_timeout: Duration::from_secs(2),
            requests_max: 3,
            ..Config::default()
        };
        assert_eq!(config, expected);
        let text = serde_json::to_string(&expected).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), expected);
        for bad in [r#"{"timeout_seconds": 0}"#, r#"{"timeout_seconds": -1}"#, r#"{"port": 1}"#] {
            assert!(serde_json::from_str::<Config>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn each_choice_has_a_name() {
        let config: Config = serde_json::from_str(
            r#"{"dialect": "mlc", "vllm_delimiter": "newline", "tool_parser": "llama3_json", "reasoning_parser": "think"}"#,
        )
        .unwrap();
        let choices = (config.dialect, config.vllm_delimiter, config.tool_parser, config.reasoning_parser);
        let expected = (Dialect::Mlc, Delimiter::Newline, ToolParser::Llama3Json, ReasoningParser::Think);
        assert_eq!(choices, expected);
        let text = serde_json::to_value(Config::default()).unwrap();
        for (field, name) in [
            ("dialect", "openai"),
            ("vllm_delimiter", "nul"),
            ("tool_parser", "auto"),
            ("reasoning_parser", "auto"),
        ] {
            assert_eq!(text[field], name);
        }
    }

    #[test]
    fn what_is_absent_follows_from_the_rest() {
        let mut config = Config { requests_max: 7, ..Config::default() };
        assert_eq!((config.queue_max(), config.accepts_any_model()), (14, false));
        config.dialect = Dialect::Mlc;
        assert!(config.accepts_any_model());
        config = Config { queue_max: Some(0), accept_any_model: Some(false), ..config };
        assert_eq!((config.queue_max(), config.accepts_any_model()), (0, false));
    }

    #[test]
    fn lengths_are_limited_as_mindie_documents() {
        let limits = |max_seq_len, max_input_token_len, max_iter_times| {
            let config = Config { max_seq_len, max_input_token_len, max_iter_times, ..Config::default() };
            (config.input_tokens_max(), config.output_tokens_max(100))
        };
        assert_eq!(limits(None, None, None), (None, None));
        // MindIE's own defaults: min(2048, 2560 - 1), min(2560 - 100, 512).
        assert_eq!(limits(Some(2560), Some(2048), Some(512)), (Some(2048), Some(512)));
        // The sequence is shorter than the prompt may be: 150 - 1, 150 - 100.
        assert_eq!(limits(Some(150), Some(2048), Some(512)), (Some(149), Some(50)));
        assert_eq!(limits(Some(100), None, None), (Some(99), Some(0)));
        assert_eq!(limits(None, Some(5), Some(6)), (Some(5), Some(6)));
    }

    #[test]
    fn faults_name_their_field() {
        Config::default().validate().unwrap();
        let fault = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert_eq!(fault(|c| c.requests_max = 0), "requests_max: expected at least 1, got 0");
        assert_eq!(fault(|c| c.max_seq_len = Some(1)), "max_seq_len: expected at least 2, got 1");
        assert!(fault(|c| c.max_input_token_len = Some(0)).starts_with("max_input_token_len: "));
        assert!(fault(|c| c.max_iter_times = Some(0)).starts_with("max_iter_times: "));
        for gamma in [0.0, 1.0, f32::NAN] {
            let config = Config { watermark_gamma: gamma, ..Config::default() };
            assert!(config.validate().unwrap_err().to_string().starts_with("watermark_gamma: "), "{gamma}");
        }
        for delta in [0.0, 101.0, f32::NAN] {
            let config = Config { watermark_delta: delta, ..Config::default() };
            assert!(config.validate().unwrap_err().to_string().starts_with("watermark_delta: "), "{delta}");
        }
    }

    #[test]
    fn every_alias_and_secret_is_an_option() {
        let text = serde_json::to_value(Config::default()).unwrap();
        for field in Config::ALIASES.iter().map(|(_, field)| field).chain(Config::SECRETS) {
            assert!(text.get(field).is_some(), "{field}");
        }
    }
}
