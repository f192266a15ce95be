//! The command line. Every option may also be set in the file or the environment, so all of them are `None` unless
//! they were said here; defaults are those of the configurations they are merged into, and are added to the help
//! from there.

mod defaults;
mod fetch;
mod gateway;
mod mlc;
mod process;
mod role;
mod router;
mod worker;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, FromArgMatches, Parser, Subcommand};
use node::Error;
use node::config::Layers;
use proto::Role;
use serde::Serialize;

use crate::cli::fetch::FetchOptions;
use crate::cli::gateway::{FrontOptions, GatewayListenOptions};
use crate::cli::mlc::MlcOptions;
use crate::cli::process::{
    ClusterOptions, ClusterTlsOptions, LogOptions, ProcessOptions, ServeOptions, SourceArgs,
};
use crate::cli::role::RoleOptions;
use crate::cli::router::{RouterListenOptions, RoutingOptions};
use crate::cli::worker::{EngineOptions, WorkerListenOptions};
use crate::effective::Effective;
use crate::model::ModelChoice;
use crate::options::{ClusterConfig, ProcessConfig, ServeConfig};
use crate::{fetch as fetch_model, mlc as mlc_words, role as role_change, single};

pub(crate) use defaults::command;
#[cfg(test)]
pub(crate) use defaults::{defaults, shown as shown_default};

/// Serves large language models with prefill and decode on different workers.
///
/// Every option can also be set in a TOML file (`grpc_port = 9001`) and in the environment (`BATON_GRPC_PORT=9001`).
/// The command line wins over the environment, and the environment over the file.
#[derive(Parser)]
#[command(name = "baton", version, arg_required_else_help = true, args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

/// What to do.
#[derive(Subcommand)]
pub(crate) enum Task {
    /// Serve.
    #[command(flatten)]
    Run(Command),
    /// Plan what is to serve.
    #[command(flatten)]
    Plan(planner::cli::Planning),
}

/// What to run.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run everything in one process
    Serve(Box<ServeArgs>),
    /// Run one gateway: text to tokens, HTTP and public gRPC
    Gateway(Box<GatewayArgs>),
    /// Run one router: where requests execute, and what comes next
    Router(Box<RouterArgs>),
    /// Run one prefill worker: tokens to KV
    PrefillWorker(Box<WorkerArgs>),
    /// Run one decode worker: KV to tokens
    DecodeWorker(Box<WorkerArgs>),
    /// Put the files of a model into a folder
    Fetch(Box<FetchArgs>),
    /// Give a running worker the other role: it drains first, then serves that
    Role(Box<RoleArgs>),
}

/// Arguments of `baton serve`.
#[derive(Args, Serialize)]
pub(crate) struct ServeArgs {
    /// The same as --model
    #[arg(value_name = "MODEL")]
    #[serde(skip)]
    word: Option<String>,
    #[command(flatten)]
    #[serde(skip)]
    source: SourceArgs,
    #[command(flatten)]
    #[serde(flatten)]
    engine: EngineOptions,
    #[command(flatten)]
    #[serde(flatten)]
    serve: ServeOptions,
    #[command(flatten)]
    #[serde(flatten)]
    mlc: MlcOptions,
    #[command(flatten)]
    #[serde(flatten)]
    front: FrontOptions,
    #[command(flatten)]
    #[serde(flatten)]
    routing: RoutingOptions,
    #[command(flatten)]
    #[serde(flatten)]
    process: ProcessOptions,
}

/// Arguments of `baton gateway`.
#[derive(Args, Serialize)]
pub(crate) struct GatewayArgs {
    #[command(flatten)]
    #[serde(skip)]
    source: SourceArgs,
    #[command(flatten)]
    #[serde(flatten)]
    listen: GatewayListenOptions,
    #[command(flatten)]
    #[serde(flatten)]
    front: FrontOptions,
    #[command(flatten)]
    #[serde(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    #[serde(flatten)]
    process: ProcessOptions,
}

/// Arguments of `baton router`.
#[derive(Args, Serialize)]
pub(crate) struct RouterArgs {
    #[command(flatten)]
    #[serde(skip)]
    source: SourceArgs,
    #[command(flatten)]
    #[serde(flatten)]
    listen: RouterListenOptions,
    #[command(flatten)]
    #[serde(flatten)]
    routing: RoutingOptions,
    #[command(flatten)]
    #[serde(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    #[serde(flatten)]
    process: ProcessOptions,
}

/// Arguments of `baton prefill-worker` and `baton decode-worker`.
#[derive(Args, Serialize)]
pub(crate) struct WorkerArgs {
    /// The same as --model
    #[arg(value_name = "MODEL")]
    #[serde(skip)]
    word: Option<String>,
    #[command(flatten)]
    #[serde(skip)]
    source: SourceArgs,
    #[command(flatten)]
    #[serde(flatten)]
    listen: WorkerListenOptions,
    #[command(flatten)]
    #[serde(flatten)]
    engine: EngineOptions,
    #[command(flatten)]
    #[serde(flatten)]
    mlc: MlcOptions,
    #[command(flatten)]
    #[serde(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    #[serde(flatten)]
    process: ProcessOptions,
}

/// Arguments of `baton fetch`.
#[derive(Args, Serialize)]
pub(crate) struct FetchArgs {
    /// The same as --source
    #[arg(value_name = "SOURCE")]
    #[serde(skip)]
    word: Option<String>,
    #[command(flatten)]
    #[serde(skip)]
    from: SourceArgs,
    #[command(flatten)]
    #[serde(flatten)]
    fetch: FetchOptions,
    #[command(flatten)]
    #[serde(flatten)]
    log: LogOptions,
}

/// Arguments of `baton role`.
#[derive(Args, Serialize)]
pub(crate) struct RoleArgs {
    /// What the worker is to be: prefill or decode
    #[arg(value_name = "ROLE")]
    #[serde(skip)]
    word: String,
    #[command(flatten)]
    #[serde(skip)]
    source: SourceArgs,
    #[command(flatten)]
    #[serde(flatten)]
    role: RoleOptions,
    #[command(flatten)]
    #[serde(flatten)]
    tls: ClusterTlsOptions,
    #[command(flatten)]
    #[serde(flatten)]
    log: LogOptions,
}

/// What a command runs.
pub(crate) enum Service {
    /// All services in one process.
    All(Box<ServeConfig>),
    /// One service of a cluster.
    One(Box<single::Service>, Box<ClusterConfig>),
    /// A model is fetched.
    Fetch(Box<fetch_model::Config>),
    /// A worker is asked to take that role.
    Role(Role, Box<role_change::Config>),
}

/// A command with everything loaded.
pub(crate) struct Loaded {
    pub(crate) process: ProcessConfig,
    pub(crate) service: Service,
    /// What was asked for and has no effect, a line each.
    pub(crate) notes: Vec<String>,
    /// Print the configuration and end.
    pub(crate) print: bool,
}

/// Parses the command line. `Err` is the code to exit with: help was shown, or one line that says what is wrong.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Task, ExitCode> {
    let parsed =
        command().try_get_matches_from(arguments).and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map(|cli| cli.task).map_err(|error| {
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
    pub(crate) fn load(self) -> Result<Loaded, Error> {
        match self {
            Self::Serve(mut args) => {
                args.engine.take_word(args.word.take())?;
                load(&args.source, &*args, load_serve)
            }
            Self::Gateway(args) => load(&args.source, &*args, |layers, _| {
                Ok(one(single::Service::Gateway(layers.load()?), layers.load()?))
            }),
            Self::Router(args) => load(&args.source, &*args, |layers, _| {
                Ok(one(single::Service::Router(layers.load()?), layers.load()?))
            }),
            Self::PrefillWorker(args) => args.load(single::Service::Prefill),
            Self::DecodeWorker(args) => args.load(single::Service::Decode),
            Self::Fetch(mut args) => {
                args.fetch.take_word(args.word.take())?;
                load(&args.from, &*args, |layers, _| Ok(Service::Fetch(Box::new(layers.load()?))))
            }
            Self::Role(args) => {
                let role = role_change::named(&args.word)?;
                load(&args.source, &*args, |layers, _| Ok(Service::Role(role, Box::new(layers.load()?))))
            }
        }
    }
}

impl WorkerArgs {
    fn load(mut self: Box<Self>, service: fn(::worker::Config) -> single::Service) -> Result<Loaded, Error> {
        self.engine.take_word(self.word.take())?;
        load(&self.source, &*self, |layers, notes| {
            let config = load_worker(layers, notes)?;
            Ok(one(service(config), layers.load()?))
        })
    }
}

/// Reads the layers, lets `service` take what it needs, and refuses what nobody took.
fn load(
    source: &SourceArgs,
    said: &impl Serialize,
    service: impl FnOnce(&mut Layers, &mut Vec<String>) -> Result<Service, Error>,
) -> Result<Loaded, Error> {
    let mut layers = Layers::read(source.file().as_deref(), said)?;
    layers.alias(::gateway::Config::ALIASES)?;
    layers.alias(::worker::Config::ALIASES)?;
    let mut notes = Vec::new();
    let process: ProcessConfig = layers.load()?;
    let service = service(&mut layers, &mut notes)?;
    layers.finish()?;
    service.validate()?;
    Ok(Loaded { process, service, notes, print: source.print_config })
}

fn one(service: single::Service, cluster: ClusterConfig) -> Service {
    Service::One(Box::new(service), Box::new(cluster))
}

fn load_serve(layers: &mut Layers, notes: &mut Vec<String>) -> Result<Service, Error> {
    let mut worker = load_worker(layers, notes)?;
    let gateway: ::gateway::Config = layers.load()?;
    if gateway.dialect == ::gateway::Dialect::Mlc {
        worker.mode = worker.mode.or(Some(::worker::limits::Mode::Local));
    }
    let (options, router, process) = (layers.load()?, layers.load()?, layers.load()?);
    let mut config = ServeConfig { options, gateway, router, worker, process };
    config.bound_by_mode();
    Ok(Service::All(Box::new(config)))
}

fn load_worker(layers: &mut Layers, notes: &mut Vec<String>) -> Result<::worker::Config, Error> {
    notes.extend(mlc_words::translate(layers)?);
    let choice: ModelChoice = layers.load()?;
    let config = layers.load()?;
    Ok(::worker::Config { model: choice.find()?, ..config })
}

impl Service {
    /// The name of the process in traces.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::All(_) => "baton",
            Self::One(service, _) => match **service {
                single::Service::Gateway(_) => "baton-gateway",
                single::Service::Router(_) => "baton-router",
                single::Service::Prefill(_) => "baton-prefill",
                single::Service::Decode(_) => "baton-decode",
            },
            Self::Fetch(_) => "baton-fetch",
            Self::Role(..) => "baton-role",
        }
    }

    /// Refuses values that nothing can run with, before anything does.
    fn validate(&self) -> Result<(), Error> {
        match self {
            Self::All(config) => config.validate(),
            Self::One(service, _) => service.validate(),
            Self::Fetch(config) => config.validate(),
            Self::Role(_, config) => config.validate(),
        }
    }
}

impl Loaded {
    /// The options as they are set, as a file.
    pub(crate) fn shown(&self) -> String {
        let mut shown = Effective::new();
        let serves = matches!(self.service, Service::All(_) | Service::One(..));
        let unused: &[&str] = if serves { &[] } else { &defaults::OF_SERVERS };
        shown.section_without("process", &self.process, unused);
        match &self.service {
            Service::All(config) => config.show(&mut shown),
            Service::Fetch(config) => shown.section("fetch", config),
            Service::Role(_, config) => shown.section("role", config),
            Service::One(service, cluster) => {
                shown.section("cluster", cluster);
                service.show(&mut shown);
            }
        }
        shown.text()
    }
}

impl EngineOptions {
    /// The word and the option mean the same.
    fn take_word(&mut self, word: Option<String>) -> Result<(), Error> {
        match (word, &self.model.model) {
            (Some(word), Some(model)) if word != *model => Err(Error::option(
                "--model",
                format!("two models were named, {word} and {model}; one is served"),
            )),
            (Some(word), _) => {
                self.model.model = Some(word);
                Ok(())
            }
            (None, _) => Ok(()),
        }
    }
}
