//! The life of a worker, the same for both roles: load, serve, drain, stop.

use std::sync::Arc;
use std::time::Duration;

use node::{Context, Services, Shutdown, limits};
use proto::wire::kv_transfer_server::KvTransferServer;
use proto::wire::worker_server::WorkerServer;
use proto::{Error, Reason, Role, WorkerEpoch};

use crate::config::Config;
use crate::core::Core;
use crate::core_config::CoreConfig;
use crate::dump::WorkerDump;
use crate::fail_points;
use crate::kv_transfer::KvTransferService;
use crate::load::{self, Loaded, LoadedEngine};
use crate::shell::{self, Handle, ShellConfig};
use crate::worker_service::{Identity, WorkerService};

/// What a role adds to a worker.
pub struct RoleParts {
    /// Which role.
    pub role: Role,
    /// Makes the role's core.
    pub core: fn(LoadedEngine, CoreConfig) -> Box<dyn Core>,
    /// Adds the role's own gRPC service; the name is that of the served model.
    pub service: fn(Services, Handle, &str) -> Services,
}

/// Runs a worker until the shutdown ends it.
///
/// # Errors
/// An option that has no valid value, a model that cannot be loaded, an address that cannot be listened on, or under which no
/// peer reaches it; INTERNAL when the engine's thread panicked, after which the process is told to stop.
pub async fn run(parts: RoleParts, config: Config, context: Context) -> Result<(), node::Error> {
    let standing = context.readiness.join(&context.name, "the model is being loaded");
    config.validate()?;
    let (listener, address) = config.addresses()?;
    let loaded = {
        let (config, role) = (config.clone(), parts.role);
        let load = move || {
            node::fail_point_blocking(fail_points::WORKER_LOADING);
            load::load(&config, role)
        };
        context.tasks.spawn_blocking("load", load).await??
    };
    let (handle, identity) = start(&parts, &config, &context, (loaded, address.clone()))?;
    let services = Services::new()
        .add(limits!(KvTransferServer::new(KvTransferService::new(handle.clone()))))
        .add(limits!(WorkerServer::new(WorkerService::new(
            identity.clone(),
            handle.clone(),
            context.shutdown.clone(),
        ))));
    let services = services.add(node::figures::service(&context.name));
    let services = (parts.service)(services, handle.clone(), &identity.model.name);
    let _dump = {
        let (identity, handle) = (Arc::new(identity.clone()), handle.clone());
        context.debug.add(&context.name, move || WorkerDump::of(Arc::clone(&identity), handle.clone()))
    };
    let serving = node::serve_grpc(&listener, services, &context).await?;
    context.registry.join(identity.entry(&address), &context)?;
    standing.ready();
    // Aborted when this function returns.
    let _drain = context
        .tasks
        .spawn_call("drain", drain(handle.clone(), context.shutdown.clone(), config.drain_notice_seconds));
    tokio::select! {
        () = serving.finished() => {}
        end = handle.ended() => {
            let error = end.err().unwrap_or_else(|| Error::new(Reason::Internal, "the engine stopped by itself"));
            context.shutdown.fail(error.clone().into());
            return Err(error.into());
        }
    }
    Ok(handle.stop().await?)
}

/// Makes the core and starts its thread.
fn start(
    parts: &RoleParts,
    config: &Config,
    context: &Context,
    (loaded, address): (Loaded, String),
) -> Result<(Handle, Identity), Error> {
    let Loaded { engine, model, tokenizer, vocabulary } = loaded;
    let layout = engine.layout();
    let epoch = WorkerEpoch::random();
    let core_config = CoreConfig {
        lease_ttl: config.lease_ttl_seconds,
        renew_every: config.renew_every_seconds,
        ..CoreConfig::new(address, epoch, model.clone())
    };
    let shell_config = ShellConfig {
        calls_max: config.calls_max,
        events_max: config.events_max,
        changes_max: config.changes_max,
        fetch_window: config.fetch_window,
        nice: config.nice(parts.role),
        context_len: model.context_len,
        vocabulary,
    };
    let handle = shell::spawn((parts.core)(engine, core_config), shell_config, context)?;
    Ok((handle, Identity { epoch, role: parts.role, model, layout, tokenizer }))
}

/// Tells the core of a drain, after routers had time to learn of it from `Describe`, and keeps the process busy until nothing is left that a peer may still come for.
async fn drain(handle: Handle, shutdown: Shutdown, notice: Duration) {
    let mut shown = handle.watch();
    // Taken before the drain begins, so that there is no moment in which the process looks idle and is not.
    let mut busy = None;
    loop {
        let is_idle = shown.borrow_and_update().is_idle;
        busy = if is_idle { None } else { busy.or_else(|| Some(shutdown.busy())) };
        tokio::select! {
            changed = shown.changed() => if changed.is_err() { return },
            () = shutdown.draining() => break,
        }
    }
    let busy = busy.unwrap_or_else(|| shutdown.busy());
    tokio::time::sleep(notice).await;
    // An engine that has ended needs no drain, and has nothing left either.
    let _ = handle.drain().await;
    let _ = shown.wait_for(|shown| shown.is_idle).await;
    drop(busy);
}
