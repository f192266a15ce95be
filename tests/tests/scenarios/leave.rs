//! Clients and routers that go away: a client in each window of its request, and peers that have prompts computed and never
//! come for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_tests::cluster::{Name, PATIENCE, Service, Settings, apart};
use baton_tests::quiet;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::kill::PHASES;
use crate::peer::Peer;
use crate::report::{Report, Row};
use crate::scene::{FREE_MAX, Fault, ONE_OF_EACH, Scene, settings, words};

const PREFILL: Name = (Service::Prefill, 0);

/// A client leaves in every window: gRPC by dropping its stream, REST by closing its connection.
pub(crate) fn in_each_window(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "disconnect in each window", report).await;
        for (phase, stop) in PHASES {
            let Some((service, point)) = stop else { continue };
            let ask = scene.ask();
            let (running, _) = scene.stop_one(&ask, service, point, "return(300)").await;
            let fault = Fault::now();
            drop(running);
            let row = Row { fault: format!("{phase}, gRPC"), outcome: "left".to_owned(), ..Row::default() };
            scene.recovered(fault, row).await;

            let ask = scene.ask();
            let body = serde_json::json!({ "prompt": ask.prompt, "max_tokens": ask.max_tokens, "stream": true,
                "ignore_eos": true });
            let address = scene.cluster.gateway().0;
            let (connection, _) =
                scene.stop_any(service, point, "return(300)", || post(address, body.to_string())).await;
            let fault = Fault::now();
            drop(connection);
            let row = Row { fault: format!("{phase}, REST"), outcome: "left".to_owned(), ..Row::default() };
            scene.recovered(fault, row).await;
        }
    });
}

/// Sends a request of vLLM's dialect on a connection of its own.
async fn post(address: String, body: String) -> TcpStream {
    let mut connection = TcpStream::connect(&address).await.expect("the gateway listens");
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes()).await.expect("the gateway reads");
    connection
}

/// Ten times as many prompts as the pool has room for are computed and never fetched. When the pool is full the owner says
/// so; a lease later it is empty, without any traffic, and one probe is served.
pub(crate) fn orphans(report: &Arc<Report>) {
    let report = Arc::clone(report);
    let worker = words("--kv-blocks 64 --lease-ttl-seconds 2 --renew-every-seconds 0.5");
    apart(Settings { worker, ..settings() }, move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "orphans exhaust the pool", report).await;
        let (mut held, mut refused) = (0, 0);
        // Each holds seven blocks of 64.
        let orphans = 10 * 64 / 7;
        let begun = Instant::now();
        let mut fault = Fault::now();
        while held < orphans {
            let owner = Peer::of(&scene.cluster, PREFILL);
            let asks: Vec<_> = (0..12).map(|_| scene.ask()).collect();
            let prefills = asks.iter().map(|ask| {
                let prefill = owner.prefill(ask, 0);
                tokio::time::timeout(Duration::from_millis(500), prefill)
            });
            for outcome in futures::future::join_all(prefills).await {
                match outcome {
                    Ok(Ok(_)) => held += 1,
                    Ok(Err(reason)) => {
                        assert!(matches!(&*reason, "OUT_OF_BLOCKS" | "QUEUE_FULL"), "refused with {reason}");
                        refused += 1;
                    }
                    // It waits for room that orphans take; nobody waits for it any more.
                    Err(_) => refused += 1,
                }
            }
            fault = Fault::now();
            assert!(begun.elapsed() < PATIENCE, "{held} orphans, {refused} refused or given up");
        }
        assert!(refused > 0, "the pool was full");
        let free = quiet::quiet(&scene.cluster, fault.at, FREE_MAX, "orphans").await;
        let row = Row {
            fault: format!("{held} hand-offs that nobody takes, {refused} refused or given up"),
            outcome: "the probe: right".to_owned(),
            ..Row::default()
        };
        scene.recovered_at(fault, free, row).await;

        // The same from above: clients that leave while their prompt is computed, four bursts.
        for _ in 0..4 {
            let client = scene.client();
            let burst: Vec<_> = (0..24).map(|_| client.clone().watch(scene.ask())).collect();
            tokio::time::sleep(Duration::from_millis(60)).await;
            fault = Fault::now();
            drop(burst);
        }
        let row = Row {
            fault: "four bursts of 24 requests, all left".to_owned(),
            outcome: "the probe: right".to_owned(),
            ..Row::default()
        };
        scene.recovered(fault, row).await;
    });
}
