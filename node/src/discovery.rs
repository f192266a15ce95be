//! Who else is there: the routers and workers of a cluster.
//!
//! A source is one variant of [`DiscoverySource`]; all of them end in the same watched list. Where members register
//! themselves, a service does so through the [`Registry`]; elsewhere somebody has named it already.

mod dns;
mod etcd;
mod fixed;

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use proto::Role;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{Context, Error, Shutdown, Tasks};
pub use dns::Name;
pub use etcd::{Entry, EtcdConfig, Place};
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

/// What `--discovery` takes.
pub const EXPECTED: &str = "fixed:FILE, dns:ROLE=HOST:PORT,… or etcd:http://HOST:PORT,…/PREFIX";

/// Where the list of members comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoverySource {
    /// A list that does not change: the services of one process.
    Local(Vec<Member>),
    /// A TOML file of `[[member]]` tables with `role` and `address`, read again when it changes.
    Fixed(PathBuf),
    /// Names, looked up again and again.
    Dns(Vec<Name>),
    /// A place in etcd where members register themselves.
    Etcd(Place),
}

/// What a process knows of its cluster.
#[derive(Debug)]
pub struct Discovery {
    /// The members, now and as they change.
    pub members: watch::Receiver<Arc<[Member]>>,
    /// Where services of this process become members.
    pub registry: Registry,
}

/// Where services become members, if that is not done for them.
#[derive(Clone, Debug, Default)]
pub struct Registry(Option<Registrar>);

/// A registry, and whether it has answered.
#[derive(Clone, Debug)]
struct Registrar {
    etcd: etcd::Registry,
    has_answered: watch::Receiver<bool>,
}

/// A service's place among the members, if it has to see to that itself. Dropping it changes nothing: the service stays a
/// member until the process drains (a router) or has drained (a worker).
#[derive(Debug)]
pub struct Membership(Option<watch::Sender<Entry>>);

impl Membership {
    /// Says something else of the member from now on, perhaps that it has another role. Whoever follows the members sees the
    /// old entry replaced by the new one, and never neither. Returns at once. The capabilities must be those of before: they
    /// are not compared with the others' again.
    pub fn change(&self, entry: Entry) {
        if let Some(wanted) = &self.0 {
            wanted.send_replace(entry);
        }
    }
}

impl Registry {
    /// Waits until it has said once who the members are: whoever knows nobody before would send others astray. At once
    /// where nobody registers.
    pub async fn answered(&self) {
        let Some(registrar) = &self.0 else { return };
        let mut has_answered = registrar.has_answered.clone();
        if has_answered.wait_for(|answered| *answered).await.is_err() {
            // Whoever follows it was stopped, and so is the process.
            std::future::pending::<()>().await;
        }
    }

    /// Makes a service that serves by now a member, until the process drains (a router) or has drained (a worker). Returns at
    /// once. Where it turns out that a worker does not fit the others of its model (invariant I9), the process stops with an
    /// error that names the field.
    ///
    /// # Errors
    /// [`Error::Option`] of `advertise` when the address is none under which others reach this process.
    pub fn join(&self, entry: Entry, context: &Context) -> Result<Membership, Error> {
        let Some(registrar) = &self.0 else { return Ok(Membership(None)) };
        self.check(&entry.address)?;
        Ok(Membership(Some(etcd::join(&registrar.etcd, entry, context))))
    }

    /// Whether others could reach a member of this process at that address, as far as one can tell by its looks.
    ///
    /// # Errors
    /// [`Error::Option`] of `advertise` when they could not.
    pub fn check(&self, address: &str) -> Result<(), Error> {
        let everywhere =
            address.parse::<std::net::SocketAddr>().is_ok_and(|address| address.ip().is_unspecified());
        if self.0.is_none() || !everywhere {
            return Ok(());
        }
        let message = format!("expected the address under which others reach this process, got {address}");
        Err(Error::option("advertise", message))
    }
}

impl FromStr for DiscoverySource {
    type Err = Error;

    /// Parses `fixed:FILE`, `dns:ROLE=HOST:PORT,…` and `etcd:URL,…/PREFIX`.
    fn from_str(value: &str) -> Result<Self, Error> {
        let parsed = match value.split_once(':') {
            Some(("fixed", file)) if !file.is_empty() => Ok(Self::Fixed(file.into())),
            Some(("dns", names)) => dns::parse(names).map(Self::Dns),
            Some(("etcd", place)) => etcd::parse(place).map(Self::Etcd),
            _ => Err(format!("expected {EXPECTED}, got {value:?}")),
        };
        parsed.map_err(|message| Error::option("--discovery", message))
    }
}

/// The members, now and as they change, and how to become one. A file that is broken when the process starts is an error;
/// one that breaks later is logged, and the last good list stays. Names may come to stand for something, and etcd may come
/// to answer, after the process has started.
///
/// # Errors
/// [`Error::File`] that says what is wrong with the file; [`Error::Option`] for an option of `etcd` without a valid value.
pub async fn start(
    source: DiscoverySource,
    etcd: &EtcdConfig,
    tasks: &Tasks,
    shutdown: &Shutdown,
) -> Result<Discovery, Error> {
    let members = match source {
        DiscoverySource::Local(members) => watch::channel(members.into()).1,
        DiscoverySource::Fixed(path) => {
            let (file, members) = Fixed::open(path)?;
            let (sender, receiver) = watch::channel(members);
            spawn(tasks, shutdown, file.follow(sender));
            receiver
        }
        DiscoverySource::Dns(names) => {
            let (sender, receiver) = watch::channel(Arc::default());
            spawn(tasks, shutdown, dns::follow(names, sender));
            receiver
        }
        DiscoverySource::Etcd(place) => return etcd::follow(place, etcd, tasks, shutdown).await,
    };
    Ok(Discovery { members, registry: Registry::default() })
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
