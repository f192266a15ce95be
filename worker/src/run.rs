//! A worker from its start to its end, whatever its role: load, serve, perhaps take another role, drain, stop.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use node::{Context, Membership, Services, Shutdown, Standing, TaskGuard, limits};
use proto::wire::kv_transfer_server::KvTransferServer;
use proto::wire::worker_server::WorkerServer;
use proto::{Error, Reason, Role, WorkerEpoch};
use tokio::sync::{mpsc, watch};

use crate::config::Config;
use crate::core::Core;
use crate::core_config::CoreConfig;
use crate::dump::WorkerDump;
use crate::fail_points;
use crate::kv_transfer::KvTransferService;
use crate::lives::{Asked, Changed, Life, Lives, ending};
use crate::load::{self, Loaded, LoadedEngine};
use crate::shell::{self, Handle, ShellConfig};
use crate::worker_service::{Identity, WorkerService};

/// What a worker waits for that has no engine.
const LOADING: &str = "the model is being loaded";

/// What a role adds to a worker.
#[derive(Clone, Copy)]
pub struct RoleParts {
    /// Which role.
    pub role: Role,
    /// Makes the role's core.
    pub core: fn(LoadedEngine, CoreConfig) -> Box<dyn Core>,
    /// Adds the role's own gRPC service. It stands at the worker's address whatever the present role is.
    pub service: fn(Services, Lives) -> Services,
}

/// Runs a worker until the shutdown ends it. It begins with the first of the roles, and takes another of them when it is
/// asked to (`Worker.ChangeRole`). Metrics, dumps and readiness name a worker of several roles by the present one, and
/// one of a single role by the context's name.
///
/// # Errors
/// An option that has no valid value, a model that cannot be loaded, or is another than before where the role changes, an
/// address that cannot be listened on, or under which no peer reaches it; INTERNAL when the engine's thread panicked, after
/// which the process is told to stop.
pub async fn run(roles: &[RoleParts], config: Config, context: Context) -> Result<(), node::Error> {
    let first = roles.first().ok_or_else(|| Error::invalid("roles", "at least one is expected"))?;
    let names = Names { roles, context: &context };
    let standing = context.readiness.join(&names.of(first.role), LOADING);
    config.validate()?;
    let (listener, address) = config.addresses()?;
    let maker = Maker { names, config: &config, address };
    let life = maker.begin(first, None).await?;
    let entry = life.identity.entry(&maker.address);
    let (present, lives, asks) = Lives::channel(life);
    let named = lives.clone();
    let services = Services::new()
        .add(limits!(KvTransferServer::new(KvTransferService::new(lives.clone()))))
        .add(limits!(WorkerServer::new(WorkerService::new(lives.clone(), context.shutdown.clone()))))
        .add(node::figures::service(move || named.present().name.clone()));
    let services = roles.iter().fold(services, |services, parts| (parts.service)(services, lives.clone()));
    let serving = node::serve_grpc(&listener, services, &context).await?;
    let membership = context.registry.join(entry, &context)?;
    standing.ready();
    Worker { maker, lives, present, asks, standing, membership }.live(serving.finished()).await
}

/// How a worker is called.
struct Names<'a> {
    /// Those that it can have.
    roles: &'a [RoleParts],
    context: &'a Context,
}

impl Names<'_> {
    fn of(&self, role: Role) -> String {
        if self.roles.len() > 1 { role.name().to_owned() } else { self.context.name.clone() }
    }
}

/// What every life of a worker begins from.
struct Maker<'a> {
    names: Names<'a>,
    config: &'a Config,
    /// As peers reach it.
    address: String,
}

impl Maker<'_> {
    /// Loads the model and starts the engine's thread: one of its own, since a thread that was made less urgent for prefill
    /// may not be made more urgent again.
    async fn begin(&self, parts: &RoleParts, before: Option<&Identity>) -> Result<Life, node::Error> {
        let (config, role) = (self.config.clone(), parts.role);
        let load = move || {
            node::fail_point_blocking(fail_points::WORKER_LOADING);
            load::load(&config, role)
        };
        let context = self.names.context.named(self.names.of(role));
        let Loaded { engine, model, tokenizer, vocabulary } =
            context.tasks.spawn_blocking("load", load).await??;
        let identity =
            Identity { epoch: WorkerEpoch::random(), role, layout: engine.layout(), model, tokenizer };
        if let Some(Error { reason, message }) =
            before.and_then(|before| before.capabilities().mismatch(&identity.capabilities()))
        {
            let message =
                format!("the model has changed under the worker, which is to be started anew: {message}");
            return Err(Error::new(reason, message).into());
        }
        let core_config = CoreConfig {
            lease_ttl: self.config.lease_ttl_seconds,
            renew_every: self.config.renew_every_seconds,
            ..CoreConfig::new(self.address.clone(), identity.epoch, identity.model.clone())
        };
        let shell_config = ShellConfig {
            calls_max: self.config.calls_max,
            events_max: self.config.events_max,
            changes_max: self.config.changes_max,
            fetch_window: self.config.fetch_window,
            nice: self.config.nice(role),
            context_len: identity.model.context_len,
            vocabulary,
        };
        let shell = shell::spawn((parts.core)(engine, core_config), shell_config, &context)?;
        Ok(Life::new(context.name, identity, shell))
    }

    /// Lets a drain of the process reach a life, until the guard is dropped.
    fn drain(&self, life: &Life) -> TaskGuard {
        let Context { tasks, shutdown, .. } = self.names.context;
        tasks.spawn_call(
            "drain",
            drain(life.shell.clone(), shutdown.clone(), self.config.drain_notice_seconds),
        )
    }

    fn shutdown(&self) -> &Shutdown {
        &self.names.context.shutdown
    }

    /// The engine's thread has ended before its time: the process is told to stop.
    fn failed(&self, end: Result<(), Error>) -> node::Error {
        let error = end.err().unwrap_or_else(|| Error::new(Reason::Internal, "the engine stopped by itself"));
        self.shutdown().fail(error.clone().into());
        error.into()
    }
}

/// A worker that serves.
struct Worker<'a> {
    maker: Maker<'a>,
    lives: Lives,
    present: watch::Sender<Arc<Life>>,
    asks: mpsc::Receiver<Asked>,
    standing: Standing,
    membership: Membership,
}

impl Worker<'_> {
    /// Lives one life after the other until the server has `finished`.
    async fn live(mut self, finished: impl Future<Output = ()>) -> Result<(), node::Error> {
        let mut finished = pin!(finished);
        let mut goes_on = true;
        while goes_on {
            let life = self.lives.present();
            let lives = self.lives.clone();
            let debug = &self.maker.names.context.debug;
            let _dump = debug.add(&life.name, move || WorkerDump::of(lives.present()));
            let _drain = self.maker.drain(&life);
            let asked = tokio::select! {
                () = &mut finished => break,
                end = life.shell.ended() => return Err(self.maker.failed(end)),
                Some(asked) = self.asks.recv() => asked,
            };
            goes_on = self.answer(&life, asked, finished.as_mut()).await?;
        }
        Ok(self.lives.present().shell.stop().await?)
    }

    /// Does what is asked, whether or not whoever asked still waits. False when the worker ends instead.
    async fn answer(
        &mut self,
        life: &Life,
        asked: Asked,
        finished: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<bool, node::Error> {
        let Asked { role, answer, _turn } = asked;
        let roles = self.maker.names.roles;
        let Some(parts) = roles.iter().find(|parts| parts.role == role) else {
            let can: Vec<&str> = roles.iter().map(|parts| parts.role.name()).collect();
            let message = format!("expected one of this worker's ({}), got {}", can.join(", "), role.name());
            drop(answer.send(Err(Error::invalid("role", message))));
            return Ok(true);
        };
        let epoch = life.identity.epoch;
        if role == life.identity.role {
            drop(answer.send(Ok(Changed { epoch, is_new: false })));
            return Ok(true);
        }
        match self.change(life, parts).await {
            Ok(Some(next)) => {
                let epoch = next.identity.epoch;
                self.begin(next);
                drop(answer.send(Ok(Changed { epoch, is_new: true })));
                Ok(true)
            }
            Ok(None) => {
                drop(answer.send(Err(ending())));
                tokio::select! {
                    () = finished => Ok(false),
                    Err(error) = life.shell.ended() => Err(self.maker.failed(Err(error))),
                }
            }
            Err(error) => {
                drop(answer.send(Err(Error::new(Reason::Internal, error.to_string()))));
                Err(error)
            }
        }
    }

    /// Ends a life and makes the next. The address answers meanwhile, as a worker that drains. `None` when the process is
    /// told to end before there is a next one.
    async fn change(&mut self, life: &Life, parts: &RoleParts) -> Result<Option<Life>, node::Error> {
        let (from, to) = (life.identity.role.name(), parts.role.name());
        tracing::info!(from, to, "the role is to change, draining");
        self.standing.not_ready(format!("drains, to become a {to} worker"));
        self.present.send_modify(|present| {
            *present = Arc::new(Life { leaves_for: Some(parts.role), ..Life::clone(present) });
        });
        tokio::select! {
            () = self.maker.shutdown().draining() => return Ok(None),
            end = life.shell.ended() => return Err(self.maker.failed(end)),
            left = leave(&life.shell, self.maker.config.drain_notice_seconds) => {
                if left.is_err() {
                    return Err(self.maker.failed(life.shell.ended().await));
                }
            }
        }
        // Gone before the next one comes: they need not fit into the memory together.
        life.shell.stop().await?;
        self.standing.not_ready(LOADING);
        tokio::select! {
            () = self.maker.shutdown().draining() => Ok(None),
            next = self.maker.begin(parts, Some(&life.identity)) => next.map(Some),
        }
    }

    /// From now on the worker is that life.
    fn begin(&mut self, life: Life) {
        let Identity { role, epoch, .. } = &*life.identity;
        tracing::info!(role = role.name(), %epoch, "the role has changed");
        self.standing.rename(&life.name);
        self.membership.change(life.identity.entry(&self.maker.address));
        self.present.send_replace(Arc::new(life));
        self.standing.ready();
    }
}

/// Announces the end of a life, lets what runs end or move away, and waits until nobody may still come for anything.
async fn leave(shell: &Handle, notice: Duration) -> Result<(), Error> {
    tokio::time::sleep(notice).await;
    shell.drain().await?;
    shell.finish().await
}

/// Tells the core of a drain, after routers had time to learn of it from its watch, and keeps the process busy until nothing is
/// left that a peer may still come for.
async fn drain(handle: Handle, shutdown: Shutdown, notice: Duration) {
    // Held from the start, so that there is no moment in which a drain has begun and the process looks idle.
    let busy = shutdown.busy();
    shutdown.draining().await;
    tokio::time::sleep(notice).await;
    // An engine that has ended needs no drain, and has nothing left either.
    let _ = handle.drain().await;
    let _ = handle.watch().wait_for(|shown| shown.is_idle).await;
    drop(busy);
}
