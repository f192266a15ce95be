//! Workers that do not fit together: they end when they register, by the name of what differs; or, where the members are
//! listed, the router refuses them, so that no request is ever split over them. And workers that differ in what may differ.

use std::sync::Arc;
use std::time::Instant;

use baton_tests::cluster::{PATIENCE, Service, apart};

use crate::report::{Report, Row};
use crate::scene::{Fault, ONE_OF_EACH, Scene, listed, settings};

/// Models that are not the cluster's, under its name, and what the router says of their worker.
const STRANGERS: [(&str, &str, &str); 3] = [
    ("more layers", "sim:layers=3,vocab=4096,context_len=2048", "FINGERPRINT_MISMATCH"),
    ("larger heads", "sim:head_dim=8,vocab=4096,context_len=2048", "FINGERPRINT_MISMATCH"),
    ("another vocabulary", "sim:vocab=512,context_len=2048", "FINGERPRINT_MISMATCH"),
];

/// Where members register, a stranger ends before anybody hears of it.
pub(crate) fn registration(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "mismatch, registering", report).await;
        for (index, (what, model, _)) in (1..).zip(STRANGERS) {
            let stranger = (Service::Decode, index);
            let ask = scene.ask();
            let running = scene.client().watch(ask.clone());
            let fault = Fault::now();
            scene.cluster.spawn_with(stranger, &["--model", model]);
            let code = scene.cluster.wait_exit(stranger, PATIENCE);
            let detect = Some(fault.at.elapsed());
            let log = scene.cluster.log(stranger);
            assert_eq!(code.code(), Some(1), "{log}");
            let last = log.lines().last().unwrap_or_default();
            assert!(last.starts_with("baton: checkpoint fingerprint: "), "{log}");
            let address = scene.cluster.address(stranger);
            assert!(!scene.cluster.log((Service::Router, 0)).contains(&address), "the router never saw it");
            scene.cluster.kill(stranger);
            let row = scene.end(running, &ask, fault, false).await;
            scene.recovered(fault, Row { fault: what.to_owned(), detect, go_on: None, ..row }).await;
        }
    });
}

pub(crate) fn mismatch(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(listed(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "mismatch, listed", report).await;
        for (index, (what, model, reason)) in (1..).zip(STRANGERS) {
            let stranger = (Service::Decode, index);
            let fault = Fault::now();
            scene.cluster.spawn_with(stranger, &["--model", model]);
            let refusal = refused(&scene, stranger).await;
            let detect = fault.at.elapsed();
            assert!(refusal.contains(reason), "{refusal}");
            // Nothing is placed there, however many requests come.
            let asks: Vec<_> = (0..8).map(|_| scene.ask()).collect();
            for (ask, answer) in asks.iter().zip(scene.client().ask_all(&asks).await) {
                assert_eq!((answer.error, answer.tokens), (None, scene.expected(ask)), "{what}");
            }
            scene.cluster.kill(stranger);
            scene.cluster.forget(stranger);
            let outcome = "right, by others".to_owned();
            scene.add(Row {
                fault: format!("{what}: {reason}"),
                outcome,
                detect: Some(detect),
                ..Row::default()
            });
        }
        // With nobody else to go to, the client hears of it.
        let (only, stranger) = ((Service::Decode, 0), (Service::Decode, 9));
        scene.cluster.kill(only);
        scene.cluster.forget(only);
        let fault = Fault::now();
        scene.cluster.spawn_with(stranger, &["--model", STRANGERS[0].1]);
        // One prefill worker and one decode worker: whoever was there first is right.
        refused(&scene, stranger).await;
        let detect = fault.at.elapsed();
        let ask = scene.ask();
        let answer = scene.client().ask(&ask).await;
        let error = answer.error.expect("an error");
        assert!(error.contains("FINGERPRINT_MISMATCH") || error.contains("fingerprint"), "{error}");
        assert!(answer.tokens.is_empty());
        scene.cluster.kill(stranger);
        scene.cluster.forget(stranger);
        scene.add(Row {
            fault: "more layers, and no other decode worker".to_owned(),
            outcome: "honest error".to_owned(),
            detect: Some(detect),
            go_on: Some(fault.at.elapsed()),
            ..Row::default()
        });
        // Blocks of another size are cut anew on their way.
        let fault = Fault::now();
        scene.cluster.spawn_with(only, &["--block-tokens", "8"]);
        scene.settled().await;
        let ask = scene.ask();
        let running = scene.client().watch(ask.clone());
        let row = scene.end(running, &ask, fault, false).await;
        let row = Row { fault: "block size: 16 and 8 tokens".to_owned(), detect: None, go_on: None, ..row };
        scene.recovered(fault, row).await;
    });
}

/// Waits until the router refuses the worker, and gives what it says.
async fn refused(scene: &Scene, stranger: (Service, usize)) -> String {
    let address = scene.cluster.address(stranger);
    let until = Instant::now() + PATIENCE;
    loop {
        let log = scene.cluster.log((Service::Router, 0));
        if let Some(line) =
            log.lines().rfind(|line| line.contains("worker is refused") && line.contains(&address))
        {
            return line.to_owned();
        }
        assert!(Instant::now() < until, "{stranger:?} is refused; logs:\n{}", scene.cluster.logs());
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}
