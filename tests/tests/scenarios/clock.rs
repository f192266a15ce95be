//! The clock of the wall jumps, in the processes alone: leases, deadlines and keep-alives run on the monotonic clock and
//! do not notice.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_tests::cluster::{Service, Settings, apart};
use baton_tests::{golden, quiet};

use crate::peer::Peer;
use crate::report::{Report, Row};
use crate::scene::{FREE_MAX, Fault, ONE_OF_EACH, Scene, settings};

/// How far the clock jumps, each from where it was before.
const JUMPS: [&str; 4] = ["+3600", "-3600", "+31536000", "-31536000"];

/// Builds what makes a process see another time than the machine has.
fn library(folder: &Path) -> PathBuf {
    let library = folder.join("clock.so");
    let source = golden::root().join("tests/tests/scenarios/clock.c");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-O2", "-o"]).arg(&library).arg(source).status();
    assert!(built.expect("a C compiler, as Rust itself needs").success(), "clock.c can be built");
    library
}

pub(crate) fn jumps(report: &Arc<Report>) {
    let report = Arc::clone(report);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let time = folder.path().join("time");
    fs::write(&time, "0").expect("it can be written");
    let environment = [("LD_PRELOAD", library(folder.path())), ("WALL_CLOCK_FILE", time.clone())];
    let environment = environment.map(|(name, path)| (name.to_owned(), path.display().to_string())).to_vec();
    apart(Settings { environment, ..settings() }, move |cluster| async move {
        let _folder = folder;
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "clock jump", report).await;
        for jump in JUMPS {
            let owner = Peer::of(&scene.cluster, (Service::Prefill, 0));
            // One hand-off that nobody comes for, and one request in the middle of its life.
            owner.prefill(&scene.ask(), 0).await.expect("a hand-off");
            let held = Instant::now();
            let ask = scene.ask();
            let (running, _) =
                scene.stop_one(&ask, Service::Decode, "decode.transferring", "return(300)").await;
            let fault = Fault::now();
            let new = time.with_extension("new");
            fs::write(&new, jump).and_then(|()| fs::rename(&new, &time)).expect("the clock can be set");
            let row = scene.end(running, &ask, fault, false).await;
            let shown = scene.cluster.log((Service::Router, 0));
            let free = quiet::quiet(&scene.cluster, Instant::now(), FREE_MAX, "after a jump").await;
            assert!(free - held > Duration::from_millis(1500), "the lease ran its time: {:?}", free - held);
            let retries = scene.cluster.metrics((Service::Router, 0)).await;
            assert_eq!(retries.sum("baton_router_retries_total", &[]), 0.0, "nothing was retried:\n{shown}");
            let row = Row { fault: format!("{jump} s, transferring"), detect: None, ..row };
            scene.recovered_at(fault, free, row).await;
        }
        assert!(
            scene.saw_another_year(),
            "the processes saw the clock jump; logs:\n{}",
            scene.cluster.logs()
        );
    });
}
