//! Gives a running worker the other role.

use std::path::PathBuf;

use node::{ClusterTls, ClusterTlsConfig, Error, Listener, Network, NetworkConfig};
use proto::{Role, WorkerEpoch, wire};
use serde::{Deserialize, Serialize};
use tonic::Code;
use wire::worker_client::WorkerClient;

/// Options of `baton role`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// Where the worker serves gRPC, `host:port`; there is none to ask when absent.
    pub(crate) worker: Option<String>,
    /// PEM file with the authorities of the certificates that services show each other; plain text to the worker when absent.
    pub(crate) cluster_tls_ca: Option<PathBuf>,
    /// PEM file with the certificate that is shown to the worker, its issuers after it.
    pub(crate) cluster_tls_cert: Option<PathBuf>,
    /// PEM file with that certificate's private key.
    pub(crate) cluster_tls_key: Option<PathBuf>,
    /// The name that every service's certificate is for; the host of the worker's address when absent.
    pub(crate) cluster_tls_name: Option<String>,
}

impl Config {
    /// Refuses what nobody can be asked by.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        self.worker().map(drop)
    }

    fn worker(&self) -> Result<&str, Error> {
        let expected = || Error::option("--worker", "expected HOST:PORT, where the worker serves gRPC");
        let worker = self.worker.as_deref().ok_or_else(expected)?;
        match Listener::parse("--worker", worker)? {
            Listener::Tcp(_) => Ok(worker),
            Listener::Local(_) => Err(expected()),
        }
    }

    fn tls(&self) -> ClusterTlsConfig {
        ClusterTlsConfig {
            ca: self.cluster_tls_ca.clone(),
            cert: self.cluster_tls_cert.clone(),
            key: self.cluster_tls_key.clone(),
            name: self.cluster_tls_name.clone(),
        }
    }
}

/// Asks the worker for the role, waits until it serves it, and says so.
///
/// # Errors
/// What the worker answers, or that it cannot be reached or asked.
pub(crate) async fn change(role: Role, config: &Config) -> Result<(), Error> {
    let worker = config.worker()?;
    let network = Network::secured(NetworkConfig::default(), ClusterTls::read(&config.tls())?);
    let mut client = node::limits!(WorkerClient::new(network.connect(worker)));
    tracing::info!(worker, role = role.name(), "asking; it drains before it answers");
    let wanted = wire::WorkerRole::from(role);
    let answer = client.change_role(wire::ChangeRoleRequest { role: wanted.into() }).await;
    let answer = answer.map_err(|status| match status.code() {
        Code::Unimplemented => {
            let message =
                format!("expected a worker whose role can be changed, {worker} says that it is none");
            Error::option("--worker", message)
        }
        _ => worker::items::peer_error(worker, status).into(),
    })?;
    let wire::ChangeRoleResponse { epoch, changed } = answer.into_inner();
    let (epoch, already) = (WorkerEpoch(epoch), if changed { "" } else { " already" });
    println!("{worker} is a {} worker{already}, epoch {epoch}", role.name());
    Ok(())
}

/// What a worker can be, by its name.
///
/// # Errors
/// An error of the command line for anything else.
pub(crate) fn named(name: &str) -> Result<Role, Error> {
    Role::from_name(name)
        .filter(|role| *role != Role::Router)
        .ok_or_else(|| Error::option("ROLE", format!("expected prefill or decode, got {name:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_one_that_workers_have() {
        assert_eq!(named("prefill").unwrap(), Role::Prefill);
        assert_eq!(named("decode").unwrap(), Role::Decode);
        for name in ["router", "cook", ""] {
            let error = named(name).unwrap_err().to_string();
            assert_eq!(error, format!("ROLE: expected prefill or decode, got {name:?}"));
        }
    }

    #[test]
    fn a_worker_is_asked_at_its_address() {
        let refused = |worker: Option<&str>| {
            let config = Config { worker: worker.map(str::to_owned), ..Config::default() };
            config.validate().unwrap_err().to_string()
        };
        for worker in [None, Some("local:prefill-0"), Some("nowhere")] {
            assert!(refused(worker).starts_with("--worker: "), "{worker:?}: {}", refused(worker));
        }
        let config = Config { worker: Some("10.0.0.1:9101".to_owned()), ..Config::default() };
        config.validate().unwrap();
    }
}
