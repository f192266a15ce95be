//! Options of how the gateway meets its clients: TLS, keys, and what pages of other origins may do.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

/// See the fields of the same names in [`gateway::Config`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "Clients")]
pub(crate) struct ClientOptions {
    /// PEM file with the certificate for HTTPS and gRPC, its issuers after it [default: plain text]
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// PEM file with that certificate's private key
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// PEM file with authorities; every client needs a certificate that one of them issued
    #[arg(long, value_name = "FILE")]
    tls_client_ca: Option<PathBuf>,
    /// Most seconds that a TLS handshake may take
    #[arg(long, value_name = "SECONDS")]
    tls_handshake_seconds: Option<f64>,
    /// Key that requests must name as `Authorization: Bearer KEY`; may be given several times
    #[arg(long, value_name = "KEY")]
    api_key: Option<Vec<String>>,
    /// File with such keys, one a line; unlike --api-key it shows in no list of processes
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Let browsers send cookies and authorization from other origins
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    allow_credentials: Option<bool>,
    /// Origins whose pages may call, a JSON list
    #[arg(long, value_name = "LIST", visible_alias = "allow-origins", value_parser = list)]
    allowed_origins: Option<List>,
    /// Methods that such pages may use, a JSON list
    #[arg(long, value_name = "LIST", visible_alias = "allow-methods", value_parser = list)]
    allowed_methods: Option<List>,
    /// Headers that such pages may send, a JSON list
    #[arg(long, value_name = "LIST", visible_alias = "allow-headers", value_parser = list)]
    allowed_headers: Option<List>,
    /// Most requests at a time on one connection of HTTP/2
    #[arg(long, value_name = "N")]
    streams_max: Option<u32>,
    /// Most bytes of a gRPC message
    #[arg(long, value_name = "N")]
    grpc_message_bytes_max: Option<usize>,
}

/// The value of one option that is a list.
#[derive(Clone, Serialize)]
#[serde(transparent)]
struct List(Vec<String>);

fn list(value: &str) -> Result<List, String> {
    serde_json::from_str(value)
        .map(List)
        .map_err(|_| format!("expected a JSON list of strings, such as [\"*\"], got {value}"))
}
