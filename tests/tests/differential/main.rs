//! One prompt, one way of sampling, every API: the same tokens, and the same whether they come whole or as a stream.
//!
//! Real processes with prefill and decode apart answer each case once by every dialect, all at the same time. The
//! native API, which tells the most, is the reference. A dialect that comes to be is one more entry of
//! [`dialect::ALL`].

mod answer;
mod case;
mod dialect;
mod kserve;
mod native;
mod openai;
mod server;
mod text;

use baton_tests::cluster::{Cluster, Service, Settings};

use answer::Answer;
use case::Case;
use dialect::{ALL, Dialect, Mode, NATIVE};
use server::Server;

/// What a dialect gave.
struct Given {
    what: String,
    dialect: &'static Dialect,
    answer: Answer,
}

#[tokio::test(flavor = "multi_thread")]
async fn every_dialect_gives_the_same_whole_and_streamed() {
    let router = ["--placement", "split"].map(str::to_owned).to_vec();
    let mut cluster = Cluster::new(Settings { router, ..Settings::default() });
    for service in [Service::Prefill, Service::Decode, Service::Router, Service::Gateway] {
        cluster.spawn((service, 0));
    }
    cluster.wait_ready().await;
    let server = Server::new(cluster.http_port(), cluster.grpc_port());

    let plain = Case::plain();
    let reference = (NATIVE.ask)(&server, &plain, Mode::Streamed).await;
    let mut faults = Vec::new();
    for case in [vec![plain], Case::all_after(&reference)].concat() {
        println!("{}", case.name);
        faults.extend(tried(&server, &case).await);
    }
    assert_eq!(faults, Vec::<String>::new(), "logs:\n{}", cluster.logs());
    let moved = cluster.metrics((Service::Decode, 0)).await;
    let moved = moved.sum("baton_worker_kv_transfer_bytes_total", &["direction=\"in\""]);
    assert!(moved > 0.0, "prefill and decode were apart");
}

/// What dialects disagree on in a case.
async fn tried(server: &Server, case: &Case) -> Vec<String> {
    let asked = ALL.iter().filter(|dialect| (dialect.takes)(case)).flat_map(|dialect| {
        dialect.modes.iter().map(move |mode| async move {
            let answer = (dialect.ask)(server, case, *mode).await;
            Given { what: format!("{}: {} {mode:?}", case.name, dialect.name), dialect, answer }
        })
    });
    let all = futures::future::join_all(asked).await;
    let reference = &all.iter().find(|given| given.dialect.name == NATIVE.name).expect("it takes all").answer;
    let mut faults = case.unexpected(reference);
    for given in &all {
        let differences = given.answer.unlike(reference, given.dialect.ranked);
        faults.extend(differences.into_iter().map(|difference| format!("{}: {difference}", given.what)));
    }
    for pair in all.windows(2) {
        let [first, second] = pair else { continue };
        let same = first.dialect.name == second.dialect.name;
        if same && first.answer.in_order(first.dialect.ranked) != second.answer.in_order(first.dialect.ranked)
        {
            faults.push(format!("{} {:?}\n{} {:?}", first.what, first.answer, second.what, second.answer));
        }
    }
    faults
}
