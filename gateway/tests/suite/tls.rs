//! TLS on both ports, as real clients use it.

use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use proto::wire::ListServedModelsRequest;
use proto::wire::generation_service_client::GenerationServiceClient;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;
use tonic::transport::{Channel, Endpoint};

use crate::support::{Authority, Cluster, MODEL};

/// A cluster that speaks TLS on both ports; with `mutual`, to clients of this authority alone.
async fn start(authority: &Authority, mutual: bool) -> Cluster {
    let cluster = Cluster::start_unready(&["r0"], |config| {
        authority.serve(config);
        config.tls_client_ca = mutual.then(|| authority.path("ca.pem"));
        config.tls_handshake = Duration::from_secs(1);
        config.grpc_listen = "127.0.0.1:0".to_owned();
    })
    .await;
    assert!(cluster.gateway.status().ready().await);
    cluster.script.says("ok");
    cluster
}

/// `curl`, as a user types it.
async fn curl(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--max-time", "20"]).args(arguments);
    let Output { status, stdout, stderr } = command.output().await.expect("curl is installed");
    assert!(status.success() || !stderr.is_empty());
    (status.code(), String::from_utf8(stdout).unwrap())
}

fn file(authority: &Authority, name: &str) -> String {
    authority.path(name).display().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_with_a_client_certificate_is_served() {
    let authority = Authority::new();
    let cluster = start(&authority, true).await;
    let [ca, cert, key] = ["ca.pem", "client.pem", "client.key.pem"].map(|name| file(&authority, name));
    let own = ["--cacert", &ca, "--cert", &cert, "--key", &key];
    let url = format!("https://{}", cluster.gateway.http_address());
    let ready = format!("{url}/v2/health/ready");
    for (option, version) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let shown = [option, "--write-out", "%{http_code} %{http_version}", &ready];
        let (code, out) = curl(&[&own[..], &shown].concat()).await;
        assert_eq!((code, out), (Some(0), format!("200 {version}")));
    }
    let generate = format!("{url}/v2/models/{MODEL}/generate_stream");
    let body = json!({"text_input": "x", "parameters": {"max_new_tokens": 3}}).to_string();
    let (code, out) = curl(&[&own[..], &["--request", "POST", "--data", &body, &generate]].concat()).await;
    assert_eq!(code, Some(0));
    assert_eq!(out.matches("data:").count(), 3, "{out}");

    let stranger = Authority::new();
    let [cert, key] = ["client.pem", "client.key.pem"].map(|name| file(&stranger, name));
    let refused: [&[&str]; 2] = [&["--cacert", &ca], &["--cacert", &ca, "--cert", &cert, "--key", &key]];
    for own in refused {
        let (code, out) = curl(&[own, &[&ready]].concat()).await;
        assert!(code != Some(0) && out.is_empty(), "{own:?}: {code:?} {out}");
    }
    // Who does not know the authority does not trust the server.
    let (code, _) = curl(&[&ready]).await;
    assert_eq!(code, Some(60));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_authority_clients_need_no_certificate_but_tls() {
    let authority = Authority::new();
    let cluster = start(&authority, false).await;
    let address = cluster.gateway.http_address();
    let (code, out) =
        curl(&["--cacert", &file(&authority, "ca.pem"), &format!("https://{address}/v1/models")]).await;
    assert!(code == Some(0) && out.contains(MODEL), "{code:?} {out}");
    let (code, _) = curl(&[&format!("http://{address}/v1/models")]).await;
    assert_ne!(code, Some(0), "plain text is not understood");
}

/// A channel to the gRPC port, with the certificates of `client`.
async fn channel(
    cluster: &Cluster,
    server: &Authority,
    client: Option<&Authority>,
) -> Result<Channel, String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(server.path("ca.pem")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut tls = match client {
        None => builder.with_no_client_auth(),
        Some(client) => {
            let chain = vec![CertificateDer::from_pem_file(client.path("client.pem")).unwrap()];
            let key = PrivateKeyDer::from_pem_file(client.path("client.key.pem")).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let (tls, address) = (Arc::new(tls), cluster.gateway.grpc_address().to_owned());
    let connect = tower::service_fn(move |_| {
        let (tls, address) = (tls.clone(), address.clone());
        async move {
            let socket = TcpStream::connect(address).await?;
            let name = ServerName::try_from("localhost").unwrap();
            tokio_rustls::TlsConnector::from(tls).connect(name, socket).await.map(TokioIo::new)
        }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(connect).await.map_err(|error| error.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_asks_for_the_same_certificates() {
    let authority = Authority::new();
    let cluster = start(&authority, true).await;
    let channel_of = async |client| channel(&cluster, &authority, client).await;
    let list = async |channel| {
        GenerationServiceClient::new(channel).list_served_models(ListServedModelsRequest {}).await
    };
    let models = list(channel_of(Some(&authority)).await.unwrap()).await.unwrap();
    assert_eq!(models.into_inner().models, [MODEL]);
    let stranger = Authority::new();
    for client in [None, Some(&stranger)] {
        // By TLS 1.3 a client learns that it was refused when it first reads.
        if let Ok(channel) = channel_of(client).await {
            assert!(list(channel).await.is_err());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_handshake_holds_up_nobody_and_ends() {
    let authority = Authority::new();
    let cluster = start(&authority, false).await;
    let mut stuck = Vec::new();
    for address in [cluster.gateway.http_address(), cluster.gateway.grpc_address()].repeat(20) {
        let mut socket = TcpStream::connect(address).await.unwrap();
        if stuck.len() % 2 == 0 {
            // The first bytes of a handshake message that announces more.
            socket.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap();
        }
        stuck.push(socket);
    }
    let url = format!("https://{}/v1/models", cluster.gateway.http_address());
    let (code, _) = curl(&["--cacert", &file(&authority, "ca.pem"), &url]).await;
    assert_eq!(code, Some(0));
    let started = Instant::now();
    for mut socket in stuck {
        let mut read = Vec::new();
        let end = socket.read_to_end(&mut read);
        // An end or a reset, as long as it comes.
        let _ = tokio::time::timeout(Duration::from_secs(15), end).await.expect("the server gives up");
    }
    assert!(started.elapsed() < Duration::from_secs(15));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_does_not_wait_for_handshakes() {
    let authority = Authority::new();
    let cluster = Cluster::start_unready(&["r0"], |config| {
        authority.serve(config);
        config.tls_handshake = Duration::from_mins(10);
    })
    .await;
    let _stuck = TcpStream::connect(cluster.gateway.http_address()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    cluster.context.shutdown.drain();
    let Cluster { gateway, .. } = cluster;
    tokio::time::timeout(Duration::from_secs(5), gateway.finished()).await.expect("the drain ends");
}

#[tokio::test]
async fn a_file_that_cannot_be_used_ends_the_start() {
    let authority = Authority::new();
    let context = node::Context::new("gateway", Vec::new());
    let mut config = gateway::Config { listen: "127.0.0.1:0".to_owned(), ..gateway::Config::default() };
    authority.serve(&mut config);
    config.tls_key = Some(authority.path("client.key.pem"));
    let error = gateway::bind(config, context).await.unwrap_err();
    let named = format!("--tls-key: {}: ", file(&authority, "client.key.pem"));
    assert!(error.is_usage() && error.to_string().starts_with(&named), "{error}");
}
