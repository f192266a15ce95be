//! Clients of other makers, at pinned versions, against real processes with prefill and decode apart. What each must
//! see is in its script in `tests/clients`; this starts the servers and runs them.

use std::time::Duration;

use baton_tests::certificates::Certificates;
use baton_tests::cluster::{Cluster, Name, Service, Settings};
use baton_tests::script::{Python, Server};

/// Longest that the scripts of one pytest may take.
const PATIENCE: Duration = Duration::from_mins(5);

/// Gateways before the same router and workers.
const PLAIN: Name = (Service::Gateway, 0);
const MLC: Name = (Service::Gateway, 1);
const MUTUAL_TLS: Name = (Service::Gateway, 2);
const GUARDED: Name = (Service::Gateway, 3);

/// Scripts for a gateway with its defaults. Those of a line share a process, since importing a client takes seconds.
const SCRIPTS: &[&[&str]] = &[
    &["openai_chat", "openai_stream", "openai_async", "openai_errors", "openai_completions", "openai_tools"],
    &["litellm_tools", "langchain_tools"],
    &["triton_http", "triton_grpc", "grpc_reflection_calls", "printed_curl"],
    #[cfg(target_arch = "x86_64")]
    &["grpcurl_calls"],
];

/// A key that the guarded gateway wants.
const KEY: &str = "key-of-the-tests";

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Runs scripts against servers and keeps what failed.
struct Runs {
    python: Python,
    failures: Vec<String>,
}

impl Runs {
    async fn run(&mut self, server: &Server, scripts: &[&str]) {
        self.failures.extend(self.python.run(scripts, server, PATIENCE).await.err());
    }
}

fn server(cluster: &Cluster, gateway: Name) -> Server {
    let (http, grpc) = cluster.ports(gateway);
    Server::plain(http, grpc)
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_meet_four_processes() {
    let mut runs = Runs { python: Python::installed(), failures: Vec::new() };
    let certificates = Certificates::generate();
    let path = |file: &str| certificates.path(file).to_string_lossy().into_owned();

    let mut cluster = Cluster::new(Settings { router: words("--placement split"), ..Settings::default() });
    for service in [Service::Prefill, Service::Decode, Service::Router, Service::Gateway] {
        cluster.spawn((service, 0));
    }
    // The programs printed for MLC-LLM set no limit of their own.
    cluster.spawn_with(MLC, &["--dialect", "mlc", "--max-iter-times", "256"]);
    let (cert, key, ca) = (path("server.pem"), path("server.key.pem"), path("ca.pem"));
    cluster.spawn_with(MUTUAL_TLS, &["--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &ca]);
    cluster.spawn_with(GUARDED, &["--api-key", KEY, "--requests-max", "1", "--queue-max", "0"]);
    cluster.wait_ready().await;

    let plain = server(&cluster, PLAIN);
    for scripts in SCRIPTS {
        runs.run(&plain, scripts).await;
    }
    runs.run(&server(&cluster, MLC), &["printed_mlc"]).await;
    let mut tls = server(&cluster, MUTUAL_TLS);
    tls.http = tls.http.replace("http://", "https://");
    tls.variables.push(("BATON_CERTIFICATES", path("")));
    runs.run(&tls, &["mutual_tls"]).await;
    let mut guarded = server(&cluster, GUARDED);
    guarded.variables.push(("BATON_KEY", KEY.to_owned()));
    runs.run(&guarded, &["openai_keys_and_limits"]).await;

    let failures = runs.failures.join("\n");
    assert!(failures.is_empty(), "{failures}\n\nlogs of the servers:\n{}", cluster.logs());
    let moved = cluster.metrics((Service::Decode, 0)).await;
    let moved = moved.sum("baton_worker_kv_transfer_bytes_total", &["direction=\"in\""]);
    assert!(moved > 0.0, "prefill and decode were apart");
}

/// Thousands of requests, so the model is simulated: what is tried is how they are read and answered.
#[tokio::test(flavor = "multi_thread")]
async fn generated_requests_meet_a_simulated_model() {
    let python = Python::installed();
    let serve = words("--model sim: --placement split --max-iter-times 4 --accept-any-model");
    let mut cluster = Cluster::new(Settings { serve, ..Settings::default() });
    cluster.spawn((Service::Serve, 0));
    cluster.wait_ready().await;
    let server = server(&cluster, (Service::Serve, 0));
    let result = python.run(&["generated_requests"], &server, PATIENCE).await;
    assert!(result.is_ok(), "{}\n\nlog of the server:\n{}", result.unwrap_err(), cluster.logs());
}
