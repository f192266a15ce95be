//! The prefill worker: turns tokens into KV that it holds under a lease until a decode worker has fetched it.
//!
//! [`PrefillCore`] is the whole of its rules, without a socket or a clock; the rest of this crate puts the core into
//! the shell that `worker` provides, with the `Prefill` service in front.

pub mod core;
mod service;

pub use crate::core::PrefillCore;

use node::Context;
use proto::Role;
use proto::wire::prefill_server::PrefillServer;
use worker::core::Core;
use worker::core_config::CoreConfig;
use worker::load::LoadedEngine;
use worker::run::RoleParts;

pub use worker::Config;

/// Serves prefills until the shutdown ends them. See [`worker::run::run`] for errors.
pub async fn run(config: Config, context: Context) -> Result<(), node::Error> {
    worker::run::run(&[parts()], config, context).await
}

/// What makes a worker a prefill worker.
pub fn parts() -> RoleParts {
    RoleParts {
        role: Role::Prefill,
        core: new_core,
        service: |services, lives| {
            services.add(node::limits!(PrefillServer::new(service::PrefillService::new(lives))))
        },
    }
}

fn new_core(engine: LoadedEngine, config: CoreConfig) -> Box<dyn Core> {
    match engine {
        LoadedEngine::Cpu(engine) => Box::new(PrefillCore::new(*engine, config)),
        LoadedEngine::Cuda(engine) => Box::new(PrefillCore::new(*engine, config)),
        LoadedEngine::Sim(engine) => Box::new(PrefillCore::new(*engine, config)),
    }
}
