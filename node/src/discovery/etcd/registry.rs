//! The calls to etcd, each within a bounded time.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{
    Client, ConnectOptions, GetOptions, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp,
    WatchOptions, WatchStream,
};

use super::{Entry, EtcdConfig, Place, secured};
use crate::{Error, Member};

/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Bounds of the wait for an answer, which is as long as a lease within them.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(5));
/// Quiet time on a connection after which the server is asked whether it lives, and time to answer. etcd closes the
/// connections of those that ask more often than every 5 seconds.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));
/// Longest wait for the answer to a last word, and tries. The lease's end is what catches the rest.
const LEAVE_MAX: Duration = Duration::from_secs(1);
const LEAVE_TRIES: usize = 2;

/// A registry in etcd. Connects at its first call, and anew whenever it has to.
#[derive(Clone)]
pub(crate) struct Registry {
    client: Client,
    prefix: Arc<str>,
    lease_seconds: i64,
}

/// Why a call came to nothing.
#[derive(Debug)]
pub(super) enum Fault {
    /// The lease is not known there.
    LeaseGone,
    /// No answer, or one that is no help: to be tried again.
    Unanswered(String),
}

/// A registered member.
pub(super) struct Registered {
    pub(super) key: String,
    pub(super) entry: Entry,
    /// The revision at which it was put.
    pub(super) revision: i64,
}

/// All that is registered.
pub(super) struct Reading {
    pub(super) revision: i64,
    pub(super) members: Vec<Registered>,
}

impl Registry {
    pub(super) async fn connect(
        place: Place,
        config: &EtcdConfig,
        lease_seconds: i64,
    ) -> Result<Self, Error> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_MAX)
            .with_keep_alive(KEEP_ALIVE.0, KEEP_ALIVE.1)
            .with_keep_alive_while_idle(false);
        if let Some(tls) = secured(&place, config)? {
            options = options.with_tls(tls);
        }
        let client = Client::connect(&place.endpoints, Some(options)).await;
        let client = client.map_err(|error| Error::option("--discovery", format!("etcd: {error}")))?;
        Ok(Self { client, prefix: place.prefix.into(), lease_seconds })
    }

    /// How long a lease is asked for.
    pub(super) fn lease(&self) -> Duration {
        Duration::from_secs(self.lease_seconds.unsigned_abs())
    }

    /// Longest wait for an answer.
    pub(super) fn patience(&self) -> Duration {
        self.lease().clamp(PATIENCE.0, PATIENCE.1)
    }

    /// The key of a member.
    pub(super) fn key(&self, entry: &Entry) -> String {
        entry.key(&self.prefix)
    }

    fn range(&self) -> String {
        format!("{}/", self.prefix)
    }

    async fn within<T>(&self, call: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, Fault> {
        within(self.patience(), call).await
    }

    /// Reads everything.
    pub(super) async fn read(&self) -> Result<Reading, Fault> {
        let mut client = self.client.clone();
        let answer = self.within(client.get(self.range(), Some(GetOptions::new().with_prefix()))).await?;
        let revision = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
        let members = answer.kvs().iter().filter_map(|kv| {
            let (key, entry) = registered(kv)?;
            Some(Registered { key, entry, revision: kv.mod_revision() })
        });
        Ok(Reading { revision, members: members.collect() })
    }

    /// Opens the stream of changes from a revision on.
    pub(super) async fn watch(&self, from: i64) -> Result<WatchStream, Fault> {
        let mut client = self.client.clone();
        let options = WatchOptions::new().with_prefix().with_start_revision(from);
        self.within(client.watch(self.range(), Some(options))).await
    }

    /// Asks for a lease: its id, and how long it lives.
    pub(super) async fn grant(&self) -> Result<(i64, Duration), Fault> {
        let mut client = self.client.clone();
        let answer = self.within(client.lease_grant(self.lease_seconds, None)).await?;
        Ok((answer.id(), Duration::from_secs(answer.ttl().max(1).unsigned_abs())))
    }

    /// Puts a member's key under a lease, and in the same moment takes its former key out, if there is one. Gives the
    /// revision of that.
    pub(super) async fn put(&self, entry: &Entry, former: Option<&str>, lease: i64) -> Result<i64, Fault> {
        let mut client = self.client.clone();
        let options = PutOptions::new().with_lease(lease);
        let put = TxnOp::put(self.key(entry), entry.value(), Some(options));
        let steps: Vec<TxnOp> =
            [put].into_iter().chain(former.map(|former| TxnOp::delete(former, None))).collect();
        let answer = self.within(client.txn(Txn::new().and_then(steps))).await?;
        Ok(answer.header().map_or(0, etcd_client::ResponseHeader::revision))
    }

    /// Opens the stream that keeps a lease alive, with a first beat.
    pub(super) async fn keep_alive(&self, lease: i64) -> Result<Beats, Fault> {
        let mut client = self.client.clone();
        let (keeper, stream) = self.within(client.lease_keep_alive(lease)).await?;
        Ok(Beats { keeper, stream, patience: self.patience() })
    }

    /// Gives a lease back, and with it the member's key, as well as it goes.
    pub(super) async fn leave(&self, lease: i64) {
        let mut client = self.client.clone();
        for _ in 0..LEAVE_TRIES {
            match within(LEAVE_MAX, client.lease_revoke(lease)).await {
                Ok(_) | Err(Fault::LeaseGone) => return,
                Err(fault) => tracing::debug!(%fault, "lease not given back"),
            }
        }
        tracing::warn!("etcd does not answer, the registration is left to its lease's end");
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// The stream that keeps a lease alive.
pub(super) struct Beats {
    keeper: LeaseKeeper,
    stream: LeaseKeepAliveStream,
    patience: Duration,
}

impl Beats {
    /// One beat.
    pub(super) async fn beat(&mut self) -> Result<(), Fault> {
        let Self { keeper, stream, patience } = self;
        let answered = async {
            keeper.keep_alive().await?;
            stream.message().await
        };
        match within(*patience, answered).await? {
            Some(answer) if answer.ttl() > 0 => Ok(()),
            Some(_) => Err(Fault::LeaseGone),
            None => Err(Fault::Unanswered("the stream ended".to_owned())),
        }
    }
}

/// What a key holds, if that can be read.
pub(super) fn registered(kv: &etcd_client::KeyValue) -> Option<(String, Entry)> {
    let key = String::from_utf8_lossy(kv.key()).into_owned();
    match Entry::read(kv.value()) {
        Ok(entry) => Some((key, entry)),
        Err(error) => {
            tracing::warn!(key, error, "registration unreadable, left out");
            None
        }
    }
}

/// Role and address for others.
impl From<Registered> for (String, Member) {
    fn from(registered: Registered) -> Self {
        (registered.key, registered.entry.member())
    }
}

async fn within<T>(
    longest: Duration,
    call: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, Fault> {
    match tokio::time::timeout(longest, call).await {
        Ok(answer) => answer.map_err(Fault::from),
        Err(_) => Err(Fault::Unanswered(format!("no answer within {} s", longest.as_secs()))),
    }
}

impl From<etcd_client::Error> for Fault {
    fn from(error: etcd_client::Error) -> Self {
        use etcd_client::Error as From;
        match error {
            From::LeaseKeepAliveError(message) if message == "lease not found" => Self::LeaseGone,
            From::GRpcStatus(status) if status.message().contains("lease not found") => Self::LeaseGone,
            From::GRpcStatus(status) => Self::Unanswered(status.message().to_owned()),
            error => Self::Unanswered(error.to_string()),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeaseGone => f.write_str("the lease is not known"),
            Self::Unanswered(message) => f.write_str(message),
        }
    }
}
