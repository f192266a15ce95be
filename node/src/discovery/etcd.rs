//! Members that register themselves in etcd, each under a lease that it keeps alive.
//!
//! A member is a key `PREFIX/ROLE/ADDRESS` whose value is its [`Entry`] in JSON; the key goes with its lease, `known` says
//! who counts as a member when etcd was away, and `registration` how a member comes in and stays. Neither does IO: `watch`
//! and `register` are their shells, over the calls of `registry`. An outage of etcd ends nothing here: the last known
//! members stay, and every stream is opened again.

mod entry;
mod known;
mod pause;
mod register;
mod registration;
mod registry;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch as channel;

use super::{Discovery, Registrar, spawn};
use crate::address::check_host_port;
use crate::tls;
use crate::{Context, Error, Shutdown, Tasks};
pub use entry::Entry;
pub(super) use registry::Registry;

const LEASE: &str = "--etcd-lease-seconds";
const CA: &str = "--etcd-tls-ca";
const CERT: &str = "--etcd-tls-cert";
const KEY: &str = "--etcd-tls-key";

/// Longest lease, seconds: what is gone without a word would be taken for alive as long.
const LEASE_MAX_SECONDS: u64 = 3600;

/// Which etcd, and where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// `http://HOST:PORT` or `https://HOST:PORT` of each server, all with the same scheme.
    pub endpoints: Vec<String>,
    /// What every key of the cluster begins with, without slashes around it.
    pub prefix: String,
}

impl Place {
    fn is_secured(&self) -> bool {
        self.endpoints.iter().any(|endpoint| endpoint.starts_with("https://"))
    }
}

/// How a process meets etcd.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `--etcd-lease-seconds`: how long a member that died without a word stays one. Whole seconds.
    pub lease: Duration,
    /// `--etcd-tls-ca`: PEM file with the authorities of etcd's certificates; needed with `https`.
    pub ca: Option<PathBuf>,
    /// `--etcd-tls-cert`: PEM file with the certificate that this process shows.
    pub cert: Option<PathBuf>,
    /// `--etcd-tls-key`: PEM file with that certificate's private key.
    pub key: Option<PathBuf>,
}

impl Default for EtcdConfig {
    fn default() -> Self {
        Self { lease: Duration::from_secs(5), ca: None, cert: None, key: None }
    }
}

impl EtcdConfig {
    /// The lease in whole seconds, as etcd counts.
    fn lease_seconds(&self) -> Result<i64, Error> {
        let seconds = self.lease.as_secs();
        if self.lease.subsec_nanos() != 0 || !(1..=LEASE_MAX_SECONDS).contains(&seconds) {
            let came = self.lease.as_secs_f64();
            let message = format!("expected whole seconds from 1 to {LEASE_MAX_SECONDS}, got {came}");
            return Err(Error::option(LEASE, message));
        }
        Ok(seconds as i64)
    }
}

/// Parses `URL,…/PREFIX`.
pub(super) fn parse(value: &str) -> Result<Place, String> {
    let expected = || format!("expected etcd:http://HOST:PORT,…/PREFIX, got {value:?}");
    let last = value.rfind("//").ok_or_else(expected)? + 2;
    let slash =
        last + value[last..].find('/').ok_or_else(|| format!("{}; the prefix is missing", expected()))?;
    let prefix = value[slash..].trim_matches('/');
    if prefix.is_empty() {
        return Err(format!("{}; the prefix is missing", expected()));
    }
    let endpoints: Vec<String> = value[..slash].split(',').map(ToOwned::to_owned).collect();
    for endpoint in &endpoints {
        let host_port = ["http://", "https://"].iter().find_map(|scheme| endpoint.strip_prefix(scheme));
        let host_port = host_port.ok_or_else(|| format!("{}; {endpoint:?} is no URL", expected()))?;
        check_host_port(host_port).map_err(|fault| format!("{}; {fault} in {endpoint:?}", expected()))?;
    }
    let place = Place { endpoints, prefix: prefix.to_owned() };
    if place.is_secured() && place.endpoints.iter().any(|endpoint| endpoint.starts_with("http://")) {
        return Err(format!("{}; either all are https or none", expected()));
    }
    Ok(place)
}

/// Follows the members that are registered there, and lets services of this process join them. Returns at once: nothing
/// is known until etcd answers.
pub(super) async fn follow(
    place: Place,
    config: &EtcdConfig,
    tasks: &Tasks,
    shutdown: &Shutdown,
) -> Result<Discovery, Error> {
    let lease_seconds = config.lease_seconds()?;
    let registry = Registry::connect(place, config, lease_seconds).await?;
    let (sender, members) = channel::channel(Arc::default());
    let (answers, has_answered) = channel::channel(false);
    spawn(tasks, shutdown, watch::follow(registry.clone(), sender, answers));
    Ok(Discovery { members, registry: super::Registry(Some(Registrar { etcd: registry, has_answered })) })
}

/// Keeps a service registered until the process drains (a router) or has drained (a worker). A worker that does not fit those
/// of its model stops the process, with an error that names the field. What is sent becomes the entry.
pub(super) fn join(registry: &Registry, entry: Entry, context: &Context) -> channel::Sender<Entry> {
    let (change, wanted) = channel::channel(entry);
    let (registry, members) = (registry.clone(), context.members.clone());
    let shutdown = context.shutdown.clone();
    // Held to the end: a process that leaves says so before it is gone.
    let busy = shutdown.busy();
    drop(context.tasks.spawn("registration", async move {
        if let Err(refusal) = register::keep(registry, wanted, members, &shutdown, &busy).await {
            shutdown.fail(refusal.into());
        }
        drop(busy);
    }));
    change
}

/// Reads what secures the calls to etcd. `None` for plain text.
fn secured(place: &Place, config: &EtcdConfig) -> Result<Option<etcd_client::TlsOptions>, Error> {
    let EtcdConfig { ca, cert, key, .. } = config;
    if !place.is_secured() {
        let set = [(CA, ca), (CERT, cert), (KEY, key)].into_iter().find(|(_, file)| file.is_some());
        return match set {
            None => Ok(None),
            Some((option, _)) => Err(Error::option(option, "expected an https URL in --discovery beside it")),
        };
    }
    let ca = ca.as_ref().ok_or_else(|| Error::option(CA, "expected a PEM file beside an https URL"))?;
    tls::certificates(CA, ca)?;
    let authorities = etcd_client::Certificate::from_pem(tls::read(CA, ca)?);
    let options = etcd_client::TlsOptions::new().ca_certificate(authorities);
    match (cert, key) {
        (None, None) => Ok(Some(options)),
        (Some(cert), Some(key)) => {
            tls::pair((CERT, cert), (KEY, key))?;
            let identity = etcd_client::Identity::from_pem(tls::read(CERT, cert)?, tls::read(KEY, key)?);
            Ok(Some(options.identity(identity)))
        }
        (Some(_), None) => Err(Error::option(KEY, format!("expected a PEM file beside {CERT}"))),
        (None, Some(_)) => Err(Error::option(CERT, format!("expected a PEM file beside {KEY}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_parsed() {
        let place = parse("http://127.0.0.1:2379/baton").unwrap();
        assert_eq!(place.endpoints, ["http://127.0.0.1:2379"]);
        assert_eq!(place.prefix, "baton");
        let place = parse("https://etcd-0.etcd:2379,https://[fd00::1]:2379/a/b/").unwrap();
        assert_eq!(place.endpoints, ["https://etcd-0.etcd:2379", "https://[fd00::1]:2379"]);
        assert_eq!(place.prefix, "a/b");
        for (value, expected) in [
            ("", "expected etcd:http://HOST:PORT,…/PREFIX, got \"\""),
            ("127.0.0.1:2379/baton", "expected etcd:http://"),
            ("http://127.0.0.1:2379", "the prefix is missing"),
            ("http://127.0.0.1:2379/", "the prefix is missing"),
            ("http://127.0.0.1/baton", "the port is missing in \"http://127.0.0.1\""),
            ("http://a:1/x,http://b:1/y", "the port is no number"),
            ("a:1,http://b:1/y", "\"a:1\" is no URL"),
            ("http://a:1,https://b:1/y", "either all are https or none"),
        ] {
            let error = parse(value).unwrap_err();
            assert!(error.contains(expected), "{value}: {error}");
        }
    }

    #[test]
    fn what_secures_etcd_is_whole_and_beside_https() {
        let refused = |url: &str, change: fn(&mut EtcdConfig)| {
            let mut config = EtcdConfig::default();
            change(&mut config);
            secured(&parse(url).unwrap(), &config).unwrap_err().to_string()
        };
        let plain = "http://a:1/x";
        assert!(secured(&parse(plain).unwrap(), &EtcdConfig::default()).unwrap().is_none());
        assert!(refused(plain, |config| config.cert = Some("c.pem".into())).starts_with("--etcd-tls-cert: "));
        let tls = "https://a:1/x";
        assert!(refused(tls, |_| {}).starts_with("--etcd-tls-ca: expected a PEM file beside an https URL"));
        let missing = refused(tls, |config| config.ca = Some("/no/such.pem".into()));
        assert!(missing.starts_with("--etcd-tls-ca: /no/such.pem: "), "{missing}");
    }

    #[test]
    fn a_lease_is_whole_seconds() {
        let of = |seconds| EtcdConfig { lease: Duration::from_secs_f64(seconds), ..EtcdConfig::default() };
        assert_eq!(of(5.0).lease_seconds().unwrap(), 5);
        for seconds in [0.0, 0.5, 1.5, 3601.0] {
            let error = of(seconds).lease_seconds().unwrap_err().to_string();
            assert!(
                error.starts_with("--etcd-lease-seconds: expected whole seconds from 1 to 3600"),
                "{error}"
            );
        }
    }
}
