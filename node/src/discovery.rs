//! Who else is there: the routers and workers of a cluster.
//!
//! A source is one variant of [`DiscoverySource`]; all of them end in the same watched list, so a registry joins as
//! another variant and nothing that reads the list changes.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use proto::Role;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{Error, Listener, Shutdown, Tasks};

/// How often a member file is looked at.
const POLL_EVERY: Duration = Duration::from_secs(1);

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
}

impl FromStr for DiscoverySource {
    type Err = Error;

    /// Parses `fixed:FILE`.
    fn from_str(value: &str) -> Result<Self, Error> {
        let message = match value.split_once(':') {
            Some(("fixed", file)) if !file.is_empty() => return Ok(Self::Fixed(file.into())),
            Some(("etcd", _)) => "etcd is not built in yet, use fixed:FILE".to_owned(),
            _ => format!("expected fixed:FILE, got {value:?}"),
        };
        Err(Error::option("--discovery", message))
    }
}

/// The members, now and as they change. A file that is broken when the process starts is an error; one that breaks
/// later is logged, and the last good list stays.
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
            let text = read(&path)?;
            let (sender, receiver) = watch::channel(parse(&path, &text)?);
            let shutdown = shutdown.clone();
            drop(tasks.spawn("discovery", async move {
                tokio::select! {
                    () = follow(path, text, sender) => {}
                    () = shutdown.stopped() => {}
                }
            }));
            Ok(receiver)
        }
    }
}

/// Reads the file again and again. Its content is compared, not its time: the file is small, and times are coarse.
async fn follow(path: PathBuf, mut last: String, sender: watch::Sender<Arc<[Member]>>) {
    loop {
        tokio::time::sleep(POLL_EVERY).await;
        let text = match tokio::fs::read_to_string(&path).await {
            Ok(text) if text == last => continue,
            Ok(text) => text,
            // A file that is being replaced is missing for an instant.
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "members not readable, keeping the last list");
                continue;
            }
        };
        match parse(&path, &text) {
            Ok(members) => {
                tracing::info!(count = members.len(), "members changed");
                sender.send_replace(members);
            }
            Err(error) => tracing::error!(%error, "members unreadable, keeping the last list"),
        }
        last = text;
    }
}

fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path)
        .map_err(|error| Error::File { path: path.to_owned(), message: error.to_string() })
}

fn parse(path: &Path, text: &str) -> Result<Arc<[Member]>, Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        #[serde(default)]
        member: Vec<Member>,
    }
    let fault = |message: String| Error::File { path: path.to_owned(), message };
    let File { member } = toml::from_str(text).map_err(|error| fault(error.message().to_owned()))?;
    for (index, entry) in member.iter().enumerate() {
        Listener::parse(&format!("member {}, address", index + 1), &entry.address)
            .map_err(|error| fault(error.to_string()))?;
    }
    Ok(member.into())
}
