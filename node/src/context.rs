//! What a service is given to live with.

use std::sync::Arc;

use tokio::sync::watch;

use crate::debug::Dumps;
use crate::{Clock, Member, Network, NetworkConfig, Readiness, Registry, Shutdown, Tasks};

/// What `run(Config, Context)` of every service takes: everything it shares with the rest of its process.
#[derive(Clone, Debug)]
pub struct Context {
    /// The service's name within its process, such as `decode-0`; the label `worker` of its metrics.
    pub name: String,
    /// How to reach others.
    pub network: Network,
    /// Who the others are, as discovery knows them now.
    pub members: watch::Receiver<Arc<[Member]>>,
    /// How to become one of them.
    pub registry: Registry,
    /// When to stop.
    pub shutdown: Shutdown,
    /// Where to spawn.
    pub tasks: Tasks,
    /// What time it is.
    pub clock: Clock,
    /// Where to say whether the service takes work.
    pub readiness: Readiness,
    /// Where to offer what operators may want to see.
    pub debug: Dumps,
}

impl Context {
    /// A context of its own network, tasks and clock, with a fixed list of members. Must be in a tokio runtime.
    pub fn new(name: impl Into<String>, members: Vec<Member>) -> Self {
        let shutdown = Shutdown::new();
        Self {
            name: name.into(),
            network: Network::new(NetworkConfig::default()),
            members: watch::channel(members.into()).1,
            registry: Registry::default(),
            tasks: Tasks::new(shutdown.clone()),
            shutdown,
            clock: Clock::new(),
            readiness: Readiness::default(),
            debug: Dumps::default(),
        }
    }

    /// The same context for another service of this process.
    #[must_use]
    pub fn named(&self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self.clone() }
    }

    /// The same context for services that those of this one call: their drain begins when these have finished.
    #[must_use]
    pub fn downstream(&self) -> Self {
        let (shutdown, follow) = self.shutdown.downstream();
        drop(self.tasks.spawn("drain downstream", follow));
        Self { shutdown, ..self.clone() }
    }
}
