//! A cluster of real processes whose services speak to each other by mutual TLS, and to nobody else.

use std::time::{Duration, Instant};

use baton_tests::certificates::{Certificates, MEMBER_NAME};
use baton_tests::client::{Ask, Client};
use baton_tests::cluster::{Cluster, MODEL, Name, PATIENCE, Service, Settings};
use serde_json::{Value, json};
use tonic::body::Body;
use tonic::codegen::{Service as _, http};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

const GATEWAY: Name = (Service::Gateway, 0);
const ROUTER: Name = (Service::Router, 0);
const PREFILL: Name = (Service::Prefill, 0);
const DECODE: Name = (Service::Decode, 0);

/// What every internal server has.
const EVERYWHERE: [&str; 4] = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];
/// What every worker has besides.
const WORKERS: [&str; 7] = [
    "/baton.v1.KvTransfer/Fetch",
    "/baton.v1.KvTransfer/Renew",
    "/baton.v1.KvTransfer/Release",
    "/baton.v1.Worker/Describe",
    "/baton.v1.Worker/GetTokenizer",
    "/baton.v1.Worker/Fence",
    "/baton.v1.Worker/ChangeRole",
];

/// The calls that a server has.
fn calls(service: Service) -> Vec<&'static str> {
    let own: &[&str] = match service {
        Service::Router => &["/baton.v1.Router/Route", "/baton.v1.Router/ListModels"],
        Service::Prefill => &["/baton.v1.Prefill/Prefill"],
        Service::Decode => &["/baton.v1.Decode/Decode"],
        Service::Gateway | Service::Serve => unreachable!("what serves clients is no internal server"),
    };
    let workers: &[&str] = if service == Service::Router { &[] } else { &WORKERS };
    [own, workers, &EVERYWHERE].concat()
}

/// How a caller shows itself.
#[derive(Clone, Copy, Debug)]
enum Caller {
    /// In plain text.
    Plain,
    /// By TLS without a certificate.
    Nameless,
    /// By TLS with this certificate.
    Named(&'static str),
}

fn channel(certificates: &Certificates, port: u16, caller: Caller) -> Channel {
    let scheme = if matches!(caller, Caller::Plain) { "http" } else { "https" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://127.0.0.1:{port}")).expect("an address");
    let authority = Certificate::from_pem(certificates.text("ca.pem"));
    let tls = ClientTlsConfig::new().ca_certificate(authority).domain_name(MEMBER_NAME);
    let tls = match caller {
        Caller::Plain => return endpoint.connect_lazy(),
        Caller::Nameless => tls,
        Caller::Named(name) => {
            let [cert, key] = ["pem", "key.pem"].map(|ending| certificates.text(&format!("{name}.{ending}")));
            tls.identity(Identity::from_pem(cert, key))
        }
    };
    endpoint.tls_config(tls).expect("whole certificates").connect_lazy()
}

/// Calls, without a message: the status that a server answers with, if it answers at all.
async fn call(channel: &Channel, path: &str) -> Result<Option<String>, String> {
    let request = http::Request::post(format!("http://{MEMBER_NAME}{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::empty())
        .expect("a request");
    let mut channel = channel.clone();
    let answered = async {
        std::future::poll_fn(|cx| channel.poll_ready(cx)).await?;
        channel.call(request).await
    };
    let answer = tokio::time::timeout(PATIENCE, answered).await.expect("an answer or none");
    let answer = answer.map_err(|error| error.to_string())?;
    Ok(answer.headers().get("grpc-status").map(|status| status.to_str().unwrap_or("?").to_owned()))
}

/// Makes every call to a server as a caller that is let in, or is not.
async fn all_calls(cluster: &Cluster, certificates: &Certificates, caller: Caller, is_member: bool) -> usize {
    let mut made = 0;
    for name in [ROUTER, PREFILL, DECODE] {
        let channel = channel(certificates, cluster.ports(name).0, caller);
        for path in calls(name.0) {
            let answer = call(&channel, path).await;
            if is_member {
                // Whatever it says of the missing message: the call is known here.
                let is_known = answer.as_ref().is_ok_and(|status| status.as_deref() != Some("12"));
                assert!(is_known, "{caller:?} at {name:?}{path}: {answer:?}");
            } else {
                assert!(answer.is_err(), "{caller:?} at {name:?}{path}: {answer:?}");
            }
            made += 1;
        }
    }
    made
}

async fn start(certificates: &Certificates) -> Cluster {
    let path = |file: &str| certificates.path(file).display().to_string();
    let service = [
        "--cluster-tls-ca",
        &path("ca.pem"),
        "--cluster-tls-cert",
        &path("member.pem"),
        "--cluster-tls-key",
        &path("member.key.pem"),
        "--cluster-tls-name",
        MEMBER_NAME,
    ];
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
    let mut cluster = Cluster::new(Settings {
        model: "sim:vocab=4096,context_len=8192".to_owned(),
        service: words(&service),
        router: words(&["--placement", "split"]),
        worker: words(&["--threads", "1"]),
        ..Settings::default()
    });
    for name in [PREFILL, DECODE, ROUTER, GATEWAY] {
        cluster.spawn(name);
    }
    cluster.wait_ready().await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cluster_serves_a_chat_and_refuses_every_stranger() {
    let certificates = Certificates::generate();
    let cluster = start(&certificates).await;
    let url = format!("http://127.0.0.1:{}/v1/chat/completions", cluster.http_port());
    let chat = json!({"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]});
    let response = reqwest::Client::new().post(url).json(&chat).send().await.expect("an answer");
    let answer: Value = response.json().await.expect("JSON");
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default();
    assert!(!content.is_empty(), "{answer}; logs:\n{}", cluster.logs());
    let handed_off = cluster.metrics(ROUTER).await.sum("baton_router_placements_total", &["kind=\"split\""]);
    assert!(handed_off > 0.0, "KV went from worker to worker");

    let made = all_calls(&cluster, &certificates, Caller::Named("member"), true).await;
    // Whatever name is in it, a certificate of the authority is one of the cluster.
    all_calls(&cluster, &certificates, Caller::Named("client"), true).await;
    for stranger in [Caller::Plain, Caller::Nameless, Caller::Named("stranger")] {
        assert_eq!(all_calls(&cluster, &certificates, stranger, false).await, made);
    }
    println!("{made} calls of 3 servers, each refused to each of 3 kinds of stranger");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_a_certificate_of_the_cluster_gets_no_request() {
    let certificates = Certificates::generate();
    let mut cluster = start(&certificates).await;
    // The later of two options counts.
    let path = |file: &str| certificates.path(file).display().to_string();
    let (cert, key) = (path("stranger.pem"), path("stranger.key.pem"));
    cluster.spawn_with((Service::Decode, 1), &["--cluster-tls-cert", &cert, "--cluster-tls-key", &key]);
    cluster.wait_log((Service::Decode, 1), "serving grpc").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let metrics = cluster.metrics(ROUTER).await;
    let live = metrics.sum("baton_router_workers", &["role=\"decode\"", "state=\"live\""]);
    assert_eq!(live, 1.0, "logs:\n{}", cluster.logs());
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_replaced_while_the_cluster_serves() {
    let mut certificates = Certificates::generate();
    let mut cluster = start(&certificates).await;
    let client = Client::new(cluster.grpc_port());
    let ask = Ask::seeded(&(1..40).collect::<Vec<_>>(), 8, 7);
    let expected = client.ask(&ask).await;
    assert!(expected.finished && expected.error.is_none(), "{expected:?}");
    let mut step = 0;
    certificates
        .rotate(async || {
            step += 1;
            let until = Instant::now() + PATIENCE;
            for name in [ROUTER, PREFILL, DECODE, GATEWAY] {
                while cluster.log(name).matches("certificates read again").count() < step {
                    assert!(Instant::now() < until, "{name:?} takes step {step}; logs:\n{}", cluster.logs());
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
            assert_eq!(client.ask(&ask).await, expected);
        })
        .await;
    // Who has a certificate of the old authority is a stranger now.
    all_calls(&cluster, &certificates, Caller::Named("client"), false).await;
    all_calls(&cluster, &certificates, Caller::Named("member"), true).await;
    // Connections are made anew, by the new certificates.
    cluster.kill(DECODE);
    cluster.spawn(DECODE);
    cluster.wait_log(DECODE, "serving grpc").await;
    assert_eq!(client.ask(&ask).await, expected);
}
