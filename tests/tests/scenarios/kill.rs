//! `kill -9` of each service in each phase of a request, with a spare beside it. A gateway has no spare: its clients lose
//! their connection, and ask the one that takes its place.

use std::sync::Arc;
use std::time::Duration;

use baton_tests::cluster::{Service, apart};

use crate::report::{Report, Row};
use crate::scene::{Fault, Scene, WITH_SPARES, settings};

/// Where the request is when the process dies: nowhere, or at a fail point of a service.
pub(crate) const PHASES: [(&str, Option<(Service, &str)>); 8] = [
    ("before a request", None),
    ("accepted", Some((Service::Router, "router.queued"))),
    ("queued", Some((Service::Prefill, "prefill.queued"))),
    ("prefilling", Some((Service::Prefill, "prefill.computing"))),
    ("issued", Some((Service::Prefill, "prefill.issued"))),
    ("asked of decode", Some((Service::Decode, "decode.queued"))),
    ("transferring", Some((Service::Decode, "decode.transferring"))),
    ("decoding", Some((Service::Decode, "decode.decoding"))),
];

/// How long a survivor stands still for its peer to be killed.
const STAND: &str = "return(300)";

pub(crate) fn prefill(report: &Arc<Report>) {
    in_every_phase("kill -9 prefill", Service::Prefill, report);
}

pub(crate) fn decode(report: &Arc<Report>) {
    in_every_phase("kill -9 decode", Service::Decode, report);
}

pub(crate) fn router(report: &Arc<Report>) {
    in_every_phase("kill -9 router", Service::Router, report);
}

pub(crate) fn gateway(report: &Arc<Report>) {
    in_every_phase("kill -9 gateway", Service::Gateway, report);
}

fn in_every_phase(scenario: &'static str, victim: Service, report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &WITH_SPARES, scenario, report).await;
        for (phase, stop) in PHASES {
            kill(&mut scene, victim, phase, stop).await;
        }
    });
}

async fn kill(scene: &mut Scene, victim: Service, phase: &str, stop: Option<(Service, &str)>) {
    let ask = scene.ask();
    let may_fail = victim == Service::Gateway;
    let (killed, fault, row) = match stop {
        None => {
            let killed = (victim, 0);
            let fault = Fault::now();
            scene.cluster.kill(killed);
            let running = scene.client().watch(ask.clone());
            (killed, fault, scene.end(running, &ask, fault, may_fail).await)
        }
        Some((service, point)) => {
            let action = if service == victim { "return" } else { STAND };
            let (running, stopped) = scene.stop_one(&ask, service, point, action).await;
            let killed = match victim {
                Service::Gateway => (Service::Gateway, 0),
                victim if victim == stopped.0 => stopped,
                // Nothing is placed before the router goes on.
                Service::Prefill | Service::Decode if service == Service::Router => (victim, 0),
                victim => scene.placed(victim),
            };
            let fault = Fault::now();
            scene.cluster.kill(killed);
            (killed, fault, scene.end(running, &ask, fault, may_fail).await)
        }
    };
    let row = Row { fault: phase.to_owned(), ..row };
    if victim == Service::Gateway {
        scene.cluster.spawn(killed);
        scene.cluster.wait_ready().await;
    }
    scene.recovered(fault, row).await;
    if victim != Service::Gateway {
        scene.cluster.spawn(killed);
    }
    tokio::time::sleep(Duration::from_millis(10)).await;
    scene.settled().await;
}
