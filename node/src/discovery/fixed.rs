//! Members from a TOML file of `[[member]]` tables.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::sync::watch;

use super::Member;
use crate::{Error, Listener};

/// How often the file is looked at.
const POLL_EVERY: Duration = Duration::from_secs(1);

/// A file that was read.
pub(super) struct Fixed {
    path: PathBuf,
    text: String,
}

impl Fixed {
    /// Reads the file, and its members.
    pub(super) fn open(path: PathBuf) -> Result<(Self, Arc<[Member]>), Error> {
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Error::File { path: path.clone(), message: error.to_string() })?;
        let members = parse(&path, &text)?;
        Ok((Self { path, text }, members))
    }

    /// Reads the file again and again. Its content is compared, not its time: the file is small, and times are coarse.
    pub(super) async fn follow(mut self, sender: watch::Sender<Arc<[Member]>>) {
        loop {
            tokio::time::sleep(POLL_EVERY).await;
            let text = match tokio::fs::read_to_string(&self.path).await {
                Ok(text) if text == self.text => continue,
                Ok(text) => text,
                // A file that is being replaced is missing for an instant.
                Err(error) => {
                    tracing::debug!(path = %self.path.display(), %error, "members not readable, keeping the last list");
                    continue;
                }
            };
            match parse(&self.path, &text) {
                Ok(members) => {
                    tracing::info!(count = members.len(), "members changed");
                    sender.send_replace(members);
                }
                Err(error) => tracing::error!(%error, "members unreadable, keeping the last list"),
            }
            self.text = text;
        }
    }
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
