//! Members from names: every address that a name has is a member, as Kubernetes' headless services tell of their pods.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use proto::Role;
use tokio::sync::watch;

use super::Member;
use crate::address::check_host_port;

/// How often names are looked up.
const LOOK_UP_EVERY: Duration = Duration::from_secs(2);
/// Longest that a look-up may take.
const LOOK_UP_MAX: Duration = Duration::from_secs(5);

/// A name whose addresses are members of a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// What they do.
    pub role: Role,
    /// `host:port`.
    pub host_port: String,
}

/// Parses `ROLE=HOST:PORT,…`.
pub(super) fn parse(value: &str) -> Result<Vec<Name>, String> {
    let names = value.split(',').map(|entry| {
        let expected =
            || format!("expected dns:ROLE=HOST:PORT, where ROLE is router, prefill or decode, got {entry:?}");
        let (role, host_port) = entry.split_once('=').ok_or_else(expected)?;
        let role = Role::from_name(role).ok_or_else(expected)?;
        check_host_port(host_port).map_err(|fault| format!("{}; {fault}", expected()))?;
        Ok(Name { role, host_port: host_port.to_owned() })
    });
    names.collect()
}

/// Names, and what each stood for when it was last looked up.
struct Known(Vec<(Name, Vec<SocketAddr>)>);

impl Known {
    fn new(names: Vec<Name>) -> Self {
        Self(names.into_iter().map(|name| (name, Vec::new())).collect())
    }

    /// Takes what look-ups of the names told, in their order. A name that has no answer keeps its addresses: an outage of
    /// the names is none of the members, and those that are gone are found out by calling them.
    fn take(&mut self, told: impl IntoIterator<Item = Result<Vec<SocketAddr>, String>>) {
        for ((name, known), told) in self.0.iter_mut().zip(told) {
            match told {
                Ok(mut addresses) => {
                    addresses.sort_unstable();
                    addresses.dedup();
                    *known = addresses;
                }
                Err(error) => {
                    let name = &name.host_port;
                    tracing::debug!(name, error, "name not resolved, keeping its last addresses");
                }
            }
        }
    }

    fn members(&self) -> Vec<Member> {
        let members = self.0.iter().flat_map(|(name, addresses)| {
            addresses.iter().map(|address| Member { role: name.role, address: address.to_string() })
        });
        members.collect()
    }
}

/// Looks the names up again and again.
pub(super) async fn follow(names: Vec<Name>, sender: watch::Sender<Arc<[Member]>>) {
    let mut known = Known::new(names);
    loop {
        let look_ups = known.0.iter().map(|(name, _)| look_up(&name.host_port));
        let told = futures::future::join_all(look_ups).await;
        known.take(told);
        let members = known.members();
        if **sender.borrow() != *members {
            tracing::info!(count = members.len(), "members changed");
            sender.send_replace(members.into());
        }
        tokio::time::sleep(LOOK_UP_EVERY).await;
    }
}

async fn look_up(host_port: &str) -> Result<Vec<SocketAddr>, String> {
    match tokio::time::timeout(LOOK_UP_MAX, tokio::net::lookup_host(host_port)).await {
        Ok(Ok(addresses)) => Ok(addresses.collect()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", LOOK_UP_MAX.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_an_answer_keeps_its_addresses() {
        let names = parse("prefill=prefill.baton:9101,decode=decode.baton:9201").unwrap();
        let mut known = Known::new(names);
        assert_eq!(known.members(), []);
        let at = |address: &str| address.parse::<SocketAddr>().unwrap();
        let prefill = vec![at("10.0.0.2:9101"), at("10.0.0.1:9101"), at("10.0.0.2:9101")];
        known.take([Ok(prefill), Ok(vec![at("[fd00::1]:9201")])]);
        let member = |role, address: &str| Member { role, address: address.to_owned() };
        let all = [
            member(Role::Prefill, "10.0.0.1:9101"),
            member(Role::Prefill, "10.0.0.2:9101"),
            member(Role::Decode, "[fd00::1]:9201"),
        ];
        assert_eq!(known.members(), all);
        known.take([Err("no such name".to_owned()), Ok(Vec::new())]);
        assert_eq!(known.members(), all[..2]);
    }

    #[test]
    fn faults_show_what_was_expected() {
        for (value, expected) in [
            ("", "expected dns:ROLE=HOST:PORT"),
            ("cook=a:1", "router, prefill or decode, got \"cook=a:1\""),
            ("prefill=a:1,decode=b", "got \"decode=b\"; the port is missing"),
            ("prefill=a:1,", "got \"\""),
        ] {
            let error = parse(value).unwrap_err();
            assert!(error.contains(expected), "{value}: {error}");
        }
    }
}
