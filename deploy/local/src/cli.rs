//! The command line. Every field is an option that may also be set in the file or the environment, so all of them are
//! `None` unless they were said here; defaults are those of the configurations they are merged into.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use node::Error;
use node::config::Layers;
use serde::Serialize;

use crate::clients::ClientOptions;
use crate::options::{ClusterConfig, ModelChoice, ProcessConfig, ServeConfig, ServeOptions};
use crate::single;

/// Serves large language models with prefill and decode on different workers.
///
/// Every option can also be set in a TOML file (`grpc_port = 9001`) and in the environment (`BATON_GRPC_PORT=9001`).
/// The command line wins over the environment, and the environment over the file.
#[derive(Parser)]
#[command(name = "baton", version, arg_required_else_help = true, args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What to run.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run everything in one process
    Serve(Box<ServeArgs>),
    /// Run one gateway: text to tokens, HTTP and public gRPC
    Gateway(GatewayArgs),
    /// Run one router: where requests execute, and what comes next
    Router(RouterArgs),
    /// Run one prefill worker: tokens to KV
    PrefillWorker(WorkerArgs),
    /// Run one decode worker: KV to tokens
    DecodeWorker(WorkerArgs),
}

#[derive(Args)]
struct ProcessArgs {
    /// TOML file with options [env: BATON_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    options: ProcessOptions,
}

#[derive(Args, Serialize)]
struct ProcessOptions {
    /// What to log: a level, or directives such as info,router=debug [default: info]
    #[arg(long)]
    log: Option<String>,
    /// Log JSON lines
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    log_json: Option<bool>,
    /// Seconds that running streams may go on after Ctrl-C or SIGTERM [default: 30]
    #[arg(long, value_name = "SECONDS")]
    grace: Option<f64>,
}

#[derive(Args, Serialize)]
struct ClusterOptions {
    /// Where the other services are listed: fixed:FILE
    #[arg(long, value_name = "SOURCE")]
    discovery: Option<String>,
    /// Address to serve metrics at; none by default
    #[arg(long, value_name = "HOST:PORT")]
    metrics_listen: Option<String>,
}

#[derive(Args, Serialize)]
struct ListenOptions {
    /// Address to serve gRPC at [default: 127.0.0.1:9100]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Address under which others reach this worker, if it is not that of --listen
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
}

#[derive(Args, Serialize)]
struct EngineOptions {
    /// Model file (GGUF), or sim: for the simulated model
    #[arg(long, value_name = "PATH")]
    model: Option<String>,
    /// The model's public name [default: the file's name]
    #[arg(long, value_name = "NAME")]
    served_name: Option<String>,
    /// Threads that compute, per worker [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Scheduling priority of those threads, 0 to 19 [default: 10 for prefill, 0 for decode]
    #[arg(long, value_name = "N")]
    nice: Option<i32>,
    /// KV blocks of each worker [default: what fits the machine]
    #[arg(long, value_name = "N")]
    kv_blocks: Option<usize>,
    /// Tokens per KV block [default: 16]
    #[arg(long, value_name = "N")]
    block_tokens: Option<usize>,
    /// Most tokens of an engine step, which long prefills are cut into
    #[arg(long, value_name = "N")]
    step_tokens: Option<usize>,
    /// Most sequences that run at once
    #[arg(long, value_name = "N")]
    sequences_max: Option<usize>,
    /// Folder where the digests of model files are kept between starts
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
}

#[derive(Args, Serialize)]
struct PlacementOptions {
    /// How to place requests: auto, split or fused [default: auto]
    #[arg(long, value_name = "MODE")]
    placement: Option<String>,
}

#[derive(Args, Serialize)]
struct FrontOptions {
    /// Most requests that run at once [default: 1000]
    #[arg(long, value_name = "N", alias = "maxLinkNum")]
    requests_max: Option<usize>,
    /// Most requests that wait for their turn; the next is refused [default: twice --requests-max]
    #[arg(long, value_name = "N")]
    queue_max: Option<usize>,
    /// Whose behaviour /v1 follows where they differ: openai or mlc [default: openai]
    #[arg(long, value_name = "NAME")]
    dialect: Option<String>,
    /// Take any model name where one model is served [default: with --dialect mlc]
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    accept_any_model: Option<bool>,
    /// Serve /chat/completions, /completions and /models without /v1 as well
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    prefixless_aliases: Option<bool>,
    /// What ends each object of a stream of /generate: nul or newline [default: nul]
    #[arg(long, value_name = "NAME")]
    vllm_delimiter: Option<String>,
    /// What stands between prompt and completion in the text of /generate [default: one blank]
    #[arg(long, value_name = "TEXT")]
    vllm_separator: Option<String>,
    /// Send the whole text so far with every event of the streams of Triton and vLLM
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", alias = "fullTextEnabled")]
    full_text_enabled: Option<bool>,
    /// Most tokens of a sequence, prompt and output [default: the model's context]
    #[arg(long, value_name = "N", alias = "maxSeqLen")]
    max_seq_len: Option<usize>,
    /// Most tokens of a prompt [default: what fits a sequence]
    #[arg(long, value_name = "N", alias = "maxInputTokenLen")]
    max_input_token_len: Option<usize>,
    /// Most tokens that a request generates [default: what fits a sequence]
    #[arg(long, value_name = "N", alias = "maxIterTimes")]
    max_iter_times: Option<usize>,
    /// Fill first_token_cost and decode_cost for every request
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    report_costs: Option<bool>,
    /// Refuse faulty requests on /v2 with 400, not 422
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    triton_strict: Option<bool>,
    /// Key of the watermark [default: 15485863]
    #[arg(long, value_name = "N")]
    watermark_key: Option<u64>,
    /// Part of the vocabulary that a watermark favours [default: 0.25]
    #[arg(long, value_name = "PART")]
    watermark_gamma: Option<f32>,
    /// What a watermark adds to the logits of that part [default: 2]
    #[arg(long, value_name = "LOGIT")]
    watermark_delta: Option<f32>,
    /// How the model writes tool calls: auto, hermes, llama3_json, pythonic or mistral [default: auto]
    #[arg(long, value_name = "NAME")]
    tool_parser: Option<String>,
    /// How the model writes its reasoning: auto, none or think [default: auto]
    #[arg(long, value_name = "NAME")]
    reasoning_parser: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    clients: ClientOptions,
}

#[derive(Args, Serialize)]
struct PortOptions {
    /// Address that all ports are opened at [default: 127.0.0.1]
    #[arg(long)]
    host: Option<String>,
    /// HTTP port [default: 8000]
    #[arg(long)]
    port: Option<u16>,
    /// gRPC port [default: 8001]
    #[arg(long, value_name = "PORT")]
    grpc_port: Option<u16>,
    /// Metrics port [default: 8002]
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    /// Prefill workers [default: 1]
    #[arg(long, value_name = "N")]
    prefill: Option<usize>,
    /// Decode workers [default: 1]
    #[arg(long, value_name = "N")]
    decode: Option<usize>,
}

/// Arguments of `baton serve`.
#[derive(Args)]
pub(crate) struct ServeArgs {
    /// The same as --model
    #[arg(value_name = "MODEL")]
    word: Option<String>,
    #[command(flatten)]
    engine: EngineOptions,
    #[command(flatten)]
    ports: PortOptions,
    #[command(flatten)]
    placement: PlacementOptions,
    #[command(flatten)]
    front: FrontOptions,
    #[command(flatten)]
    process: ProcessArgs,
}

/// Arguments of `baton gateway`.
#[derive(Args)]
pub(crate) struct GatewayArgs {
    #[command(flatten)]
    gateway: GatewayOptions,
    #[command(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    process: ProcessArgs,
}

#[derive(Args, Serialize)]
struct GatewayOptions {
    /// Address to serve HTTP at [default: 127.0.0.1:8000]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Address to serve gRPC at [default: 127.0.0.1:8001]
    #[arg(long, value_name = "HOST:PORT")]
    grpc_listen: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    front: FrontOptions,
}

/// Arguments of `baton router`.
#[derive(Args)]
pub(crate) struct RouterArgs {
    #[command(flatten)]
    router: RouterOptions,
    #[command(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    process: ProcessArgs,
}

#[derive(Args, Serialize)]
struct RouterOptions {
    /// Address to serve gRPC at [default: 127.0.0.1:9000]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    placement: PlacementOptions,
}

/// Arguments of `baton prefill-worker` and `baton decode-worker`.
#[derive(Args)]
pub(crate) struct WorkerArgs {
    /// The same as --model
    #[arg(value_name = "MODEL")]
    word: Option<String>,
    #[command(flatten)]
    worker: WorkerOptions,
    #[command(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    process: ProcessArgs,
}

#[derive(Args, Serialize)]
struct WorkerOptions {
    #[command(flatten)]
    #[serde(flatten)]
    listen: ListenOptions,
    #[command(flatten)]
    #[serde(flatten)]
    engine: EngineOptions,
}

/// What a command runs, with everything loaded.
pub(crate) enum Service {
    /// All services in one process.
    All(Box<ServeConfig>),
    /// One service of a cluster.
    One(Box<single::Service>, ClusterConfig),
}

/// Parses the command line. `Err` is the code to exit with: help was shown, or one line that says what is wrong.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, ExitCode> {
    Cli::try_parse_from(arguments).map(|cli| cli.command).map_err(|error| {
        if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
            print!("{error}");
            return ExitCode::SUCCESS;
        }
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            eprint!("{error}");
        } else {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            let tip = text.lines().find_map(|line| line.trim().strip_prefix("tip: "));
            let tip = tip.map(|tip| format!("; {tip}")).unwrap_or_default();
            eprintln!("baton: {}{tip}", line.strip_prefix("error: ").unwrap_or(line));
        }
        ExitCode::from(2)
    })
}

impl Command {
    /// Loads every configuration that the command needs.
    pub(crate) fn load(self) -> Result<(ProcessConfig, Service), Error> {
        let mut layers = Layers::read(self.process().file().as_deref())?;
        layers.alias(gateway::Config::ALIASES)?;
        let process = layers.load(&self.process().options)?;
        let service = self.load_service(&mut layers)?;
        layers.finish()?;
        Ok((process, service))
    }

    fn process(&self) -> &ProcessArgs {
        match self {
            Self::Serve(args) => &args.process,
            Self::Gateway(args) => &args.process,
            Self::Router(args) => &args.process,
            Self::PrefillWorker(args) | Self::DecodeWorker(args) => &args.process,
        }
    }

    fn load_service(self, layers: &mut Layers) -> Result<Service, Error> {
        let (service, cluster) = match self {
            Self::Serve(args) => return args.load(layers).map(|config| Service::All(Box::new(config))),
            Self::Gateway(args) => (single::Service::Gateway(layers.load(&args.gateway)?), args.cluster),
            Self::Router(args) => (single::Service::Router(layers.load(&args.router)?), args.cluster),
            Self::PrefillWorker(args) => {
                let (config, cluster) = args.load(layers)?;
                (single::Service::Prefill(config), cluster)
            }
            Self::DecodeWorker(args) => {
                let (config, cluster) = args.load(layers)?;
                (single::Service::Decode(config), cluster)
            }
        };
        Ok(Service::One(Box::new(service), layers.load(&cluster)?))
    }
}

impl ProcessArgs {
    /// The file: named here, or in the environment.
    fn file(&self) -> Option<PathBuf> {
        self.config.clone().or_else(|| node::config::env("CONFIG").map(PathBuf::from))
    }
}

impl ServeArgs {
    fn load(mut self, layers: &mut Layers) -> Result<ServeConfig, Error> {
        self.engine.take_word(self.word)?;
        self.engine.check_model(layers)?;
        Ok(ServeConfig {
            options: layers.load::<ServeOptions>(&self.ports)?,
            gateway: layers.load(&self.front)?,
            router: layers.load(&self.placement)?,
            worker: layers.load(&self.engine)?,
        })
    }
}

impl WorkerArgs {
    fn load(mut self, layers: &mut Layers) -> Result<(worker::Config, ClusterOptions), Error> {
        self.worker.engine.take_word(self.word)?;
        self.worker.engine.check_model(layers)?;
        Ok((layers.load(&self.worker)?, self.cluster))
    }
}

impl EngineOptions {
    /// The word and the option mean the same.
    fn take_word(&mut self, word: Option<String>) -> Result<(), Error> {
        match (word, &self.model) {
            (Some(word), Some(model)) if word != *model => Err(Error::option(
                "--model",
                format!("two models were named, {word} and {model}; one is served"),
            )),
            (Some(word), _) => {
                self.model = Some(word);
                Ok(())
            }
            (None, _) => Ok(()),
        }
    }

    fn check_model(&self, layers: &mut Layers) -> Result<(), Error> {
        #[derive(Serialize)]
        struct Said<'a> {
            model: &'a Option<String>,
        }
        layers.load::<ModelChoice>(&Said { model: &self.model })?.check()
    }
}
