//! Who else is there: the routers and workers of a cluster.
//!
//! A source is one variant of [`DiscoverySource`]; all of them end in the same watched list, so a registry joins as
//! another variant and nothing that reads the list changes.

mod dns;
mod fixed;

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use proto::Role;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{Error, Shutdown, Tasks};
pub use dns::Name;
use fixed::Fixed;

/// One member of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// What it does.
    pub role: Role,
    /// `host:port` or `local:NAME`.
    pub address: String,
}

/// Where the list of members comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoverySource {
    /// A list that does not change: the services of one process.
    Local(Vec<Member>),
    /// A TOML file of `[[member]]` tables with `role` and `address`, read again when it changes.
    Fixed(PathBuf),
    /// Names, looked up again and again.
    Dns(Vec<Name>),
}

impl FromStr for DiscoverySource {
    type Err = Error;

    /// Parses `fixed:FILE` and `dns:ROLE=HOST:PORT,…`.
    fn from_str(value: &str) -> Result<Self, Error> {
        let parsed = match value.split_once(':') {
            Some(("fixed", file)) if !file.is_empty() => Ok(Self::Fixed(file.into())),
            Some(("dns", names)) => dns::parse(names).map(Self::Dns),
            Some(("etcd", _)) => {
                Err("etcd is not built in yet, use fixed:FILE or dns:ROLE=HOST:PORT,…".to_owned())
            }
            _ => Err(format!("expected fixed:FILE or dns:ROLE=HOST:PORT,…, got {value:?}")),
        };
        parsed.map_err(|message| Error::option("--discovery", message))
    }
}

/// The members, now and as they change. A file that is broken when the process starts is an error; one that breaks
/// later is logged, and the last good list stays. Names may come to stand for something after the process has started.
///
/// # Errors
/// [`Error::File`] that says what is wrong with the file.
pub fn watch(
    source: DiscoverySource,
    tasks: &Tasks,
    shutdown: &Shutdown,
) -> Result<watch::Receiver<Arc<[Member]>>, Error> {
    match source {
        DiscoverySource::Local(members) => Ok(watch::channel(members.into()).1),
        DiscoverySource::Fixed(path) => {
            let (file, members) = Fixed::open(path)?;
            let (sender, receiver) = watch::channel(members);
            spawn(tasks, shutdown, file.follow(sender));
            Ok(receiver)
        }
        DiscoverySource::Dns(names) => {
            let (sender, receiver) = watch::channel(Arc::default());
            spawn(tasks, shutdown, dns::follow(names, sender));
            Ok(receiver)
        }
    }
}

/// Follows a source until the process stops.
fn spawn(tasks: &Tasks, shutdown: &Shutdown, follow: impl Future<Output = ()> + Send + 'static) {
    let shutdown = shutdown.clone();
    drop(tasks.spawn("discovery", async move {
        tokio::select! {
            () = follow => {}
            () = shutdown.stopped() => {}
        }
    }));
}
