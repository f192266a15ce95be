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

#[cfg(test)]
mod tests {
    use gateway::{ApiKeys, Config};

    use crate::cli::{self, Service};

    /// The gateway's configuration by `baton serve sim:` with these arguments.
    fn loaded(arguments: &[&str]) -> Result<Config, String> {
        let all = ["baton", "serve", "sim:"].iter().chain(arguments).map(|&argument| argument.into());
        let Ok(cli::Task::Run(command)) = cli::parse(all) else { return Err("not parsed".to_owned()) };
        match command.load().map_err(|error| error.to_string())?.service {
            Service::All(config) => Ok(config.gateway),
            Service::One(..) | Service::Fetch(_) | Service::Role(..) => unreachable!("serve runs everything"),
        }
    }

    #[test]
    fn what_pages_may_do_has_two_spellings() {
        let lists = |prefix: &str| {
            let option = |name| format!("--{prefix}-{name}");
            loaded(&[
                &option("origins"),
                r#"["https://a.example", "null"]"#,
                &option("methods"),
                r#"["POST"]"#,
                &option("headers"),
                "[]",
                "--allow-credentials",
            ])
            .unwrap()
        };
        for prefix in ["allowed", "allow"] {
            let config = lists(prefix);
            assert_eq!(config.allowed_origins, ["https://a.example", "null"]);
            assert_eq!(config.allowed_methods, ["POST"]);
            assert!(config.allowed_headers.is_empty() && config.allow_credentials);
        }
        let config = loaded(&[]).unwrap();
        for list in [&config.allowed_origins, &config.allowed_methods, &config.allowed_headers] {
            assert_eq!(list, &["*"]);
        }
        assert!(!config.allow_credentials);
    }

    #[test]
    fn a_list_is_json() {
        for value in ["*", "[*]", "[1]", "{}", ""] {
            assert!(super::list(value).map(drop).unwrap_err().starts_with("expected a JSON list of strings"));
            assert!(loaded(&["--allowed-origins", value]).is_err(), "{value}");
        }
    }

    #[test]
    fn every_key_counts() {
        let config = loaded(&["--api-key", "sk-1", "--api-key", "271828", "--api-key-file", "keys"]).unwrap();
        assert_eq!(config.api_key, ["sk-1", "271828"].into_iter().collect::<ApiKeys>());
        assert_eq!(config.api_key_file.unwrap().to_str(), Some("keys"));
    }

    #[test]
    fn tls_files_are_options() {
        let config =
            loaded(&["--tls-cert", "c.pem", "--tls-key", "k.pem", "--tls-client-ca", "a.pem"]).unwrap();
        let files = [config.tls_cert, config.tls_key, config.tls_client_ca].map(|path| path.unwrap());
        assert_eq!(files.each_ref().map(|path| path.to_str().unwrap()), ["c.pem", "k.pem", "a.pem"]);
    }
}
