//! Processes that are silent rather than dead: stopped by a signal, or behind a cable that was pulled. No connection is
//! closed, so nothing but the lack of answers tells of it. With a spare the request goes on elsewhere; what comes back to
//! life has no say in it any more.

use std::sync::Arc;
use std::time::Duration;

use baton_tests::cluster::{Service, apart, host};

use crate::report::{Report, Row};
use crate::scene::{Fault, ONE_OF_EACH, Scene, WITH_SPARES, settings};

/// A dead peer is known as such by then.
const DETECT_MAX: Duration = Duration::from_secs(2);

/// Where the request is when its worker or router falls silent: at a fail point of it.
const PLACES: [(&str, Service, &str); 5] = [
    ("prefill, prefilling", Service::Prefill, "prefill.computing"),
    ("prefill, transferring", Service::Prefill, "prefill.transferring"),
    ("decode, transferring", Service::Decode, "decode.transferring"),
    ("decode, decoding", Service::Decode, "decode.decoding"),
    ("router, decoding", Service::Router, "router.decoding"),
];

/// How a process falls silent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Silence {
    Stopped,
    Cut,
}

pub(crate) fn stopped(report: &Arc<Report>) {
    everywhere("SIGSTOP", Silence::Stopped, report);
}

pub(crate) fn cut(report: &Arc<Report>) {
    everywhere("half-open TCP", Silence::Cut, report);
}

fn everywhere(scenario: &'static str, silence: Silence, report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &WITH_SPARES, scenario, report).await;
        for (place, victim, point) in PLACES {
            let ask = scene.ask();
            let (running, name) = scene.stop_one(&ask, victim, point, "return").await;
            let fault = Fault::now();
            let cluster = &scene.cluster;
            match silence {
                Silence::Stopped => cluster.signal(name, "STOP"),
                Silence::Cut => cluster.net().cut(&host(name)),
            }
            let row = scene.end(running, &ask, fault, false).await;
            let detect = row.detect.expect("a survivor tells of it");
            assert!(detect <= DETECT_MAX, "{scenario}, {place}: known after {detect:?} only");
            let cluster = &scene.cluster;
            match silence {
                Silence::Stopped => cluster.signal(name, "CONT"),
                Silence::Cut => cluster.net().mend(&host(name)),
            }
            // What stands at a fail point for good has no place among the living.
            if victim != Service::Prefill || point != "prefill.computing" {
                scene.recovered(fault, Row { fault: place.to_owned(), ..row }).await;
            } else {
                scene.cluster.kill(name);
                scene.cluster.spawn(name);
                scene.recovered(fault, Row { fault: place.to_owned(), ..row }).await;
            }
            scene.settled().await;
        }
        silent_gateway(&mut scene, silence).await;
        if silence == Silence::Cut {
            parted(&mut scene).await;
        }
    });
}

/// A gateway has no spare; its clients wait, and when it comes back they get what they asked for.
async fn silent_gateway(scene: &mut Scene, silence: Silence) {
    let ask = scene.ask();
    let (running, _) = scene.stop_one(&ask, Service::Decode, "decode.decoding", "return(200)").await;
    let fault = Fault::now();
    let gateway = (Service::Gateway, 0);
    match silence {
        Silence::Stopped => scene.cluster.signal(gateway, "STOP"),
        Silence::Cut => scene.cluster.net().cut(&host(gateway)),
    }
    tokio::time::sleep(DETECT_MAX + Duration::from_millis(500)).await;
    match silence {
        Silence::Stopped => scene.cluster.signal(gateway, "CONT"),
        Silence::Cut => scene.cluster.net().mend(&host(gateway)),
    }
    let row = scene.end(running, &ask, fault, true).await;
    scene.recovered(fault, Row { fault: "gateway, decoding, for 2.5 s".to_owned(), ..row }).await;
}

/// Prefill and decode lose each other after the first block, while the router still reaches both.
async fn parted(scene: &mut Scene) {
    let ask = scene.ask();
    let (running, prefill) =
        scene.stop_one(&ask, Service::Prefill, "prefill.transferring", "return(200)").await;
    let decode = scene.placed(Service::Decode);
    let fault = Fault::now();
    scene.cluster.net().part(&host(prefill), &host(decode));
    let row = scene.end(running, &ask, fault, false).await;
    scene.cluster.net().join(&host(prefill), &host(decode));
    scene.recovered(fault, Row { fault: "prefill from decode, transferring".to_owned(), ..row }).await;
    scene.settled().await;
}

/// A pause that is shorter than what a dead peer is told by changes nothing but the time.
pub(crate) fn paused(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "a pause that is none", report).await;
        for victim in [Service::Prefill, Service::Decode, Service::Router, Service::Gateway] {
            let ask = scene.ask();
            let (running, _) =
                scene.stop_one(&ask, Service::Decode, "decode.transferring", "return(50)").await;
            let fault = Fault::now();
            scene.cluster.signal((victim, 0), "STOP");
            tokio::time::sleep(Duration::from_millis(400)).await;
            scene.cluster.signal((victim, 0), "CONT");
            let row = scene.end(running, &ask, fault, false).await;
            let retries =
                scene.cluster.metrics((Service::Router, 0)).await.sum("baton_router_retries_total", &[]);
            assert_eq!((row.detect, retries), (None, 0.0), "no alarm; logs:\n{}", scene.cluster.logs());
            let name = format!("{victim:?}, for 0.4 s").to_lowercase();
            scene.recovered(fault, Row { fault: name, ..row }).await;
        }
    });
}
