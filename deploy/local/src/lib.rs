//! The `baton` binary, as a library: everything in one process ([`start`]), one service alone, a model fetched, or a
//! worker's role changed.
//!
//! Read [`options`] for what can be configured, [`serve`] for how the services of one process are put together, and
//! `single` for one service.

mod cli;
mod clients;
mod effective;
pub mod fetch;
mod greeting;
mod mlc;
mod model;
pub mod options;
mod overrides;
#[cfg(test)]
mod reference;
mod role;
pub mod serve;
mod single;

pub use options::{ProcessConfig, ServeConfig, ServeOptions};
pub use serve::{Running, start};

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use node::Error;
use node::telemetry::{TraceConfig, Traces};

/// How long threads that compute may take to end once everything is stopped. They are left behind after it.
const THREADS_END_MAX: Duration = Duration::from_millis(500);

/// How long the last traces may take to be sent.
const TRACES_END_MAX: Duration = Duration::from_secs(2);

/// The binary's main function. Exit codes: 0 after a drain, 1 for a fault, 2 for a fault in what was asked.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let outcome = match cli::parse(arguments) {
        Ok(cli::Task::Run(command)) => run_command(command),
        Ok(cli::Task::Plan(planning)) => planning.run().map(|text| print!("{text}")).map_err(Error::from),
        Err(exit) => return exit,
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("baton: {error}");
            ExitCode::from(if error.is_usage() { 2 } else { 1 })
        }
    }
}

fn run_command(command: cli::Command) -> Result<(), Error> {
    let loaded = command.load()?;
    for note in &loaded.notes {
        eprintln!("baton: {note}");
    }
    if loaded.print {
        print!("{}", loaded.shown());
        return Ok(());
    }
    let cli::Loaded { process, service, .. } = loaded;
    node::telemetry::init(&process.filter(), process.log_json)?;
    node::arm_fail_points();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| proto::Error::new(proto::Reason::Internal, format!("runtime: {error}")))?;
    let traces = {
        let _runtime = runtime.enter();
        Traces::export(TraceConfig {
            endpoint: process.otlp_endpoint.as_deref(),
            sampling: process.otlp_sampling,
            service: service.name(),
        })?
    };
    let outcome = runtime.block_on(async {
        match service {
            cli::Service::All(config) => greeting::serve(*config, process.grace).await,
            cli::Service::Fetch(config) => {
                fetch::run(*config, fetch::Hub::from_environment()).await.map(drop)
            }
            cli::Service::Role(role, config) => role::change(role, &config).await,
            cli::Service::One(service, cluster) => single::run(*service, *cluster, process).await,
        }
    });
    traces.finish(TRACES_END_MAX);
    runtime.shutdown_timeout(THREADS_END_MAX);
    outcome
}
