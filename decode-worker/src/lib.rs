//! The decode worker: fetches the KV that a prefill worker holds, or computes it, and turns it into tokens.
//!
//! [`DecodeCore`] is the whole of its rules, without a socket or a clock; the rest of this crate puts the core into
//! the shell that `worker` provides, with the `Decode` service in front.

pub mod core;
mod service;

pub use crate::core::DecodeCore;

use node::Context;
use proto::Role;
use proto::wire::decode_server::DecodeServer;
use worker::core::Core;
use worker::core_config::CoreConfig;
use worker::load::LoadedEngine;
use worker::run::RoleParts;

pub use worker::Config;

/// Serves tokens until the shutdown ends them. See [`worker::run::run`] for errors.
pub async fn run(config: Config, context: Context) -> Result<(), node::Error> {
    worker::run::run(&[parts()], config, context).await
}

/// What makes a worker a decode worker.
pub fn parts() -> RoleParts {
    RoleParts {
        role: Role::Decode,
        core: new_core,
        service: |services, lives| {
            services.add(node::limits!(DecodeServer::new(service::DecodeService::new(lives))))
        },
    }
}

fn new_core(engine: LoadedEngine, config: CoreConfig) -> Box<dyn Core> {
    match engine {
        LoadedEngine::Cpu(engine) => Box::new(DecodeCore::new(*engine, config)),
        LoadedEngine::Cuda(engine) => Box::new(DecodeCore::new(*engine, config)),
        LoadedEngine::Sim(engine) => Box::new(DecodeCore::new(*engine, config)),
    }
}
