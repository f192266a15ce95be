//! Whose KV this worker takes, and whom it tells that it has: members of its cluster, and nobody else that a hand-off
//! may name.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use node::Member;
use proto::{Error, Reason, Role};
use tokio::sync::watch;

/// Longest wait for an owner to become a member: routers may learn of it first.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// The members of the cluster, as the owners of what is handed off.
#[derive(Clone)]
pub(crate) struct Owners(watch::Receiver<Arc<[Member]>>);

impl Owners {
    /// The members that discovery names.
    pub(crate) fn new(members: watch::Receiver<Arc<[Member]>>) -> Self {
        Self(members)
    }

    /// Refuses an owner that is no worker of the cluster. While discovery has named nobody, as when a worker starts and a
    /// registry is away, there is nothing to hold an owner to.
    pub(crate) async fn check(&self, owner: &str) -> Result<(), Error> {
        let mut members = self.0.clone();
        let named = async {
            loop {
                let now = members.borrow_and_update().clone();
                if now.is_empty() || is_worker(&now, owner).await {
                    return true;
                }
                if members.changed().await.is_err() {
                    return false;
                }
            }
        };
        if tokio::time::timeout(WAIT_MAX, named).await.unwrap_or(false) {
            return Ok(());
        }
        let message =
            format!("handoff.owner: expected a worker that is a member of the cluster, got {owner:?}");
        Err(Error::new(Reason::WorkerLost, message))
    }
}

/// True when a worker has that address: by the same text, or by another that stands for the same.
async fn is_worker(members: &[Member], owner: &str) -> bool {
    let workers = || members.iter().filter(|member| member.role != Role::Router);
    if workers().any(|worker| worker.address == owner) {
        return true;
    }
    let owner = sockets(owner).await;
    for worker in workers().filter(|_| !owner.is_empty()) {
        if sockets(&worker.address).await.iter().any(|socket| owner.contains(socket)) {
            return true;
        }
    }
    false
}

/// What an address stands for; nothing within a process, and nothing when it has no answer.
async fn sockets(address: &str) -> Vec<SocketAddr> {
    if address.starts_with("local:") {
        return Vec::new();
    }
    tokio::net::lookup_host(address).await.map(Iterator::collect).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(address: &str) -> Member {
        Member { role: Role::Prefill, address: address.to_owned() }
    }

    async fn refused(owners: &Owners, owner: &str) -> String {
        let error = owners.check(owner).await.unwrap_err();
        assert_eq!(error.reason, Reason::WorkerLost, "another attempt may succeed");
        error.message
    }

    #[tokio::test]
    async fn only_workers_of_the_cluster_own_what_is_fetched() {
        let router = Member { role: Role::Router, address: "127.0.0.1:9000".to_owned() };
        let members = [worker("127.0.0.1:9101"), worker("local:prefill-0"), router];
        let owners = Owners::new(watch::channel(members.into()).1);
        for owner in ["127.0.0.1:9101", "local:prefill-0", "localhost:9101"] {
            owners.check(owner).await.unwrap();
        }
        for owner in
            ["127.0.0.1:9102", "127.0.0.1:9000", "local:prefill-1", "local:", "", "no-such.invalid:9101"]
        {
            let expected =
                format!("handoff.owner: expected a worker that is a member of the cluster, got {owner:?}");
            assert_eq!(refused(&owners, owner).await, expected);
        }
    }

    #[tokio::test]
    async fn an_owner_has_a_moment_to_become_a_member() {
        let (sender, members) = watch::channel(Arc::<[Member]>::default());
        let owners = Owners::new(members);
        owners.check("10.0.0.9:1").await.expect("nobody is named yet");
        sender.send_replace([worker("10.0.0.1:1")].into());
        let late = async {
            tokio::time::sleep(WAIT_MAX / 2).await;
            sender.send_replace([worker("10.0.0.1:1"), worker("10.0.0.2:1")].into());
        };
        tokio::join!(owners.check("10.0.0.2:1"), late).0.unwrap();
        assert!(refused(&owners, "10.0.0.3:1").await.contains("10.0.0.3:1"));
    }
}
