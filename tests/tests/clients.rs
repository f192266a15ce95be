//! Clients of other makers, at pinned versions, against real processes with prefill and decode apart. What each must
//! see is in its script in `tests/clients`; this starts the servers and runs them.

use std::time::Duration;

use baton_tests::cluster::{Cluster, Name, Service, Settings};
use baton_tests::script::{Python, Server};

/// Longest that the scripts of one pytest may take.
const PATIENCE: Duration = Duration::from_mins(5);

/// The gateway with its defaults.
const PLAIN: Name = (Service::Gateway, 0);

/// Scripts for a gateway with its defaults. Those of a line share a process, since importing a client takes seconds.
const SCRIPTS: &[&[&str]] = &[&["printed_curl"]];

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

    let mut cluster = Cluster::new(Settings { router: words("--placement split"), ..Settings::default() });
    for service in [Service::Prefill, Service::Decode, Service::Router, Service::Gateway] {
        cluster.spawn((service, 0));
    }
    cluster.wait_ready().await;

    let plain = server(&cluster, PLAIN);
    for scripts in SCRIPTS {
        runs.run(&plain, scripts).await;
    }

    let failures = runs.failures.join("\n");
    assert!(failures.is_empty(), "{failures}\n\nlogs of the servers:\n{}", cluster.logs());
    let moved = cluster.metrics((Service::Decode, 0)).await;
    let moved = moved.sum("baton_worker_kv_transfer_bytes_total", &["direction=\"in\""]);
    assert!(moved > 0.0, "prefill and decode were apart");
}
