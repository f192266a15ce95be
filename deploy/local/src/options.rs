//! The options of the binary itself. Those of each service are that service's `Config`; all are loaded from the same
//! layers, see [`node::config`].

use std::path::PathBuf;
use std::time::Duration;

use node::operators::Pages;
use node::{ClusterTlsConfig, Error, EtcdConfig};
use serde::{Deserialize, Serialize};

use crate::effective::Effective;

/// Options of any process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProcessConfig {
    /// What to log: a level, or directives such as `info,router=debug`.
    pub log: String,
    /// Log JSON lines.
    pub log_json: bool,
    /// Log what happens to each request, whatever `log` says of it: see [`node::telemetry::REQUESTS`].
    pub enable_tracing: bool,
    /// OpenTelemetry collector that traces are sent to by OTLP over gRPC, `http://host:port`; none when neither this nor
    /// `OTEL_EXPORTER_OTLP_ENDPOINT` is there.
    pub otlp_endpoint: Option<String>,
    /// Share of the traces begun here that are sent, 0 to 1; a request with a `traceparent` goes by its word.
    pub otlp_sampling: f64,
    /// How long running streams may go on after a drain began, seconds.
    #[serde(with = "node::config::seconds")]
    pub grace: Duration,
    /// Serve `/debug` and `/dashboard` on the metrics port.
    pub debug_pages: bool,
}

impl Default for ProcessConfig {
    fn default() -> Self {
        Self {
            log: "info".to_owned(),
            log_json: false,
            enable_tracing: false,
            otlp_endpoint: None,
            otlp_sampling: 1.0,
            grace: Duration::from_secs(30),
            debug_pages: true,
        }
    }
}

impl ProcessConfig {
    /// What the port for operators serves.
    pub(crate) fn pages(&self) -> Pages {
        if self.debug_pages { Pages::Shown } else { Pages::Hidden }
    }

    /// What is logged: what happens to requests only when it was asked for.
    pub(crate) fn filter(&self) -> String {
        let requests = if self.enable_tracing { "info" } else { "off" };
        format!("{}={requests},{}", node::telemetry::REQUESTS, self.log)
    }
}

/// Options of a process that is one service of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterConfig {
    /// Where the other services are listed: `fixed:FILE`, `dns:ROLE=HOST:PORT,…` where each address of a name is one, or
    /// `etcd:http://HOST:PORT,…/PREFIX` where each registers itself.
    pub discovery: Option<String>,
    /// How long a service that died without a word stays registered in etcd, whole seconds.
    #[serde(with = "node::config::seconds")]
    pub etcd_lease_seconds: Duration,
    /// PEM file with the authorities of etcd's certificates; needed with `https`.
    pub etcd_tls_ca: Option<PathBuf>,
    /// PEM file with the certificate that this process shows to etcd.
    pub etcd_tls_cert: Option<PathBuf>,
    /// PEM file with that certificate's private key.
    pub etcd_tls_key: Option<PathBuf>,
    /// PEM file with the authorities of the certificates that services show each other; plain text between them when absent.
    pub cluster_tls_ca: Option<PathBuf>,
    /// PEM file with this service's certificate, its issuers after it.
    pub cluster_tls_cert: Option<PathBuf>,
    /// PEM file with that certificate's private key.
    pub cluster_tls_key: Option<PathBuf>,
    /// The name that every service's certificate is for; the host of its address when absent.
    pub cluster_tls_name: Option<String>,
    /// Address to serve metrics at, `host:port`; none when absent.
    pub metrics_listen: Option<String>,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        let EtcdConfig { lease, ca, cert, key } = EtcdConfig::default();
        Self {
            discovery: None,
            etcd_lease_seconds: lease,
            etcd_tls_ca: ca,
            etcd_tls_cert: cert,
            etcd_tls_key: key,
            cluster_tls_ca: None,
            cluster_tls_cert: None,
            cluster_tls_key: None,
            cluster_tls_name: None,
            metrics_listen: None,
        }
    }
}

impl ClusterConfig {
    /// How the process meets etcd, if it does.
    pub(crate) fn etcd(&self) -> EtcdConfig {
        EtcdConfig {
            lease: self.etcd_lease_seconds,
            ca: self.etcd_tls_ca.clone(),
            cert: self.etcd_tls_cert.clone(),
            key: self.etcd_tls_key.clone(),
        }
    }

    /// What secures calls between services.
    pub(crate) fn tls(&self) -> ClusterTlsConfig {
        ClusterTlsConfig {
            ca: self.cluster_tls_ca.clone(),
            cert: self.cluster_tls_cert.clone(),
            key: self.cluster_tls_key.clone(),
            name: self.cluster_tls_name.clone(),
        }
    }
}

/// Options of a process that is all services at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServeOptions {
    /// Address that all ports are opened at.
    pub host: String,
    /// HTTP port; 0 lets the system choose, as with the others.
    pub port: u16,
    /// gRPC port.
    pub grpc_port: u16,
    /// Metrics port.
    pub metrics_port: u16,
    /// Prefill workers.
    pub prefill: usize,
    /// Decode workers.
    pub decode: usize,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            grpc_port: 8001,
            metrics_port: 8002,
            prefill: 1,
            decode: 1,
        }
    }
}

/// Everything in one process. Addresses in the services' own configurations are not used.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServeConfig {
    /// Ports, and how many workers.
    pub options: ServeOptions,
    /// The gateway.
    pub gateway: gateway::Config,
    /// The router.
    pub router: router::Config,
    /// Each worker.
    pub worker: worker::Config,
    /// The process.
    pub process: ProcessConfig,
}

impl ServeConfig {
    /// Refuses combinations that could never serve, before anything is opened or loaded.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        self.gateway.validate()?;
        self.router.validate()?;
        self.worker.validate()?;
        if self.options.decode == 0 {
            return Err(Error::option("--decode", "expected at least 1, got 0"));
        }
        if self.options.prefill == 0 && self.router.placement == router::PlacementMode::Split {
            return Err(Error::option("--prefill", "expected at least 1 with --placement split, got 0"));
        }
        Ok(())
    }

    /// With a mode, lets no more requests run than the decode workers take sequences: the others wait at the gateway,
    /// where nothing but their own deadline ends the wait.
    pub(crate) fn bound_by_mode(&mut self) {
        let Some(mode) = self.worker.mode else { return };
        let sequences = self.worker.sequences_max.unwrap_or(mode.sequences());
        let running = sequences.saturating_mul(self.options.decode).max(1);
        if running < self.gateway.requests_max {
            self.gateway.queue_max = Some(self.gateway.queue_max());
            self.gateway.requests_max = running;
        }
    }

    /// Adds all options that count.
    pub(crate) fn show(&self, shown: &mut Effective) {
        // Ports decide where the gateway listens, and what is within the process listens nowhere.
        let unused = ["listen", "grpc_listen", "advertise", "drain_notice_seconds"];
        shown.section("ports and workers", &self.options);
        shown.section_without("gateway", &self.gateway, &unused);
        shown.section_without("router", &self.router, &unused);
        shown.section_without("each worker", &self.worker, &unused);
    }

    /// The address of a port.
    pub(crate) fn address(&self, port: u16) -> String {
        let host = &self.options.host;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

#[cfg(test)]
mod tests {
    use worker::limits::Mode;

    use super::*;

    #[test]
    fn what_could_never_serve_is_refused() {
        ServeConfig::default().validate().unwrap();
        let mut config = ServeConfig::default();
        config.options.prefill = 0;
        config.validate().unwrap();
        config.router.placement = router::PlacementMode::Split;
        assert!(config.validate().unwrap_err().to_string().starts_with("--prefill: "));
        let mut config = ServeConfig::default();
        config.options.decode = 0;
        assert!(config.validate().unwrap_err().to_string().starts_with("--decode: "));
    }

    #[test]
    fn with_a_mode_no_more_run_than_the_workers_take() {
        let bounds = |mode, sequences_max, requests_max, decode| {
            let mut config = ServeConfig::default();
            (config.worker.mode, config.worker.sequences_max) = (mode, sequences_max);
            (config.gateway.requests_max, config.options.decode) = (requests_max, decode);
            config.bound_by_mode();
            (config.gateway.requests_max, config.gateway.queue_max())
        };
        assert_eq!(bounds(None, None, 1000, 1), (1000, 2000));
        assert_eq!(bounds(Some(Mode::Interactive), None, 1000, 1), (1, 2000));
        assert_eq!(bounds(Some(Mode::Local), None, 1000, 2), (8, 2000));
        assert_eq!(bounds(Some(Mode::Local), Some(10), 1000, 2), (20, 2000));
        assert_eq!(bounds(Some(Mode::Server), None, 30, 1), (30, 60));
    }

    #[test]
    fn ipv6_hosts_get_their_brackets() {
        let mut config = ServeConfig::default();
        assert_eq!(config.address(80), "127.0.0.1:80");
        config.options.host = "::1".to_owned();
        assert_eq!(config.address(80), "[::1]:80");
    }
}
