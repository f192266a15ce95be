//! Options of any process, and of one among others.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

/// What is not an option of a configuration: where they come from.
#[derive(Args)]
pub(crate) struct SourceArgs {
    /// TOML file with options [env: BATON_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print all options as they are set, as such a file, and end
    #[arg(long)]
    pub(crate) print_config: bool,
}

impl SourceArgs {
    /// The file: named here, or in the environment.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        self.config.clone().or_else(|| node::config::env("CONFIG").map(PathBuf::from))
    }
}

/// What any command logs.
#[derive(Args, Serialize)]
#[command(next_help_heading = "Process")]
pub(crate) struct LogOptions {
    /// What to log: a level, or directives such as info,router=debug
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
    /// Log JSON lines
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    log_json: Option<bool>,
}

/// See [`crate::ProcessConfig`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "Process")]
pub(crate) struct ProcessOptions {
    #[command(flatten)]
    #[serde(flatten)]
    log: LogOptions,
    /// Log what happens to each request: that it arrived, was placed, had its first token, ended
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    enable_tracing: Option<bool>,
    /// OpenTelemetry collector that traces are sent to by OTLP over gRPC, http://HOST:PORT
    /// [default: OTEL_EXPORTER_OTLP_ENDPOINT, or none]
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Share of the traces begun here that are sent, 0 to 1; a request with a traceparent goes by its word
    #[arg(long, value_name = "SHARE")]
    otlp_sampling: Option<f64>,
    /// Seconds that running streams may go on after Ctrl-C or SIGTERM
    #[arg(long, value_name = "SECONDS")]
    grace: Option<f64>,
    /// Serve /debug and /dashboard on the metrics port
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    debug_pages: Option<bool>,
}

/// See [`crate::options::ClusterConfig`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct ClusterOptions {
    /// Where the other services are listed: fixed:FILE, dns:ROLE=HOST:PORT,… where each address of a name is one, or
    /// etcd:http://HOST:PORT,…/PREFIX where each registers itself
    #[arg(long, value_name = "SOURCE")]
    discovery: Option<String>,
    /// Whole seconds that a service which died without a word stays registered in etcd
    #[arg(long, value_name = "SECONDS")]
    etcd_lease_seconds: Option<f64>,
    /// PEM file with the authorities of etcd's certificates, needed with https
    #[arg(long, value_name = "FILE")]
    etcd_tls_ca: Option<PathBuf>,
    /// PEM file with the certificate that is shown to etcd
    #[arg(long, value_name = "FILE")]
    etcd_tls_cert: Option<PathBuf>,
    /// PEM file with that certificate's private key
    #[arg(long, value_name = "FILE")]
    etcd_tls_key: Option<PathBuf>,
    #[command(flatten)]
    #[serde(flatten)]
    tls: ClusterTlsOptions,
    /// Address to serve metrics at [default: none]
    #[arg(long, value_name = "HOST:PORT")]
    metrics_listen: Option<String>,
}

/// What secures calls between services: see [`crate::options::ClusterConfig`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "Cluster")]
pub(crate) struct ClusterTlsOptions {
    /// PEM file with the authorities of the certificates that services show each other [default: plain text]
    #[arg(long, value_name = "FILE")]
    cluster_tls_ca: Option<PathBuf>,
    /// PEM file with this service's certificate, its issuers after it
    #[arg(long, value_name = "FILE")]
    cluster_tls_cert: Option<PathBuf>,
    /// PEM file with that certificate's private key
    #[arg(long, value_name = "FILE")]
    cluster_tls_key: Option<PathBuf>,
    /// Name that every service's certificate is for [default: the host of its address]
    #[arg(long, value_name = "NAME")]
    cluster_tls_name: Option<String>,
}

/// See [`crate::ServeOptions`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "Ports and workers")]
pub(crate) struct ServeOptions {
    /// Address that all ports are opened at
    #[arg(long)]
    host: Option<String>,
    /// HTTP port
    #[arg(long)]
    port: Option<u16>,
    /// gRPC port
    #[arg(long, value_name = "PORT")]
    grpc_port: Option<u16>,
    /// Metrics port
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    /// Prefill workers
    #[arg(long, value_name = "N")]
    prefill: Option<usize>,
    /// Decode workers
    #[arg(long, value_name = "N")]
    decode: Option<usize>,
}
