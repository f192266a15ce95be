//! The prefill worker's core against the scenarios in `testdata`.

use std::path::Path;

use engine::sim::SimModel;
use prefill_worker::core::PrefillCore;
use worker::core::Core;

#[path = "../../worker/tests/scenario/mod.rs"]
mod scenario;

use scenario::{Command, Stage, core_config, engine};

type Worker = Stage<PrefillCore<SimModel>>;

fn perform(stage: &mut Option<Worker>, command: &Command<'_>) -> String {
    let mut actions = Vec::new();
    match command.verb {
        "worker" => {
            // A worker that restarts: time and the references out there go on, all else is lost.
            let mut fresh = Stage::new(PrefillCore::new(engine(command), core_config(command)));
            if let Some(before) = stage.take() {
                (fresh.now, fresh.handoffs) = (before.now, before.handoffs);
            }
            *stage = Some(fresh);
        }
        "sole" => {
            let sole = stage.as_ref().expect("a worker").core.sole_prefill();
            return match sole {
                Some(call) => format!("    {} fills the batch alone\n", call.0),
                None => "    nobody fills the batch alone\n".to_owned(),
            };
        }
        verb => {
            let stage = stage.as_mut().expect("a worker first");
            assert!(stage.run(command, &mut actions), "unknown command {verb}");
        }
    }
    let stage = stage.as_mut().expect("a worker");
    let check = stage.core.engine().check();
    stage.show(actions, check)
}

fn check(name: &str) {
    let mut stage = None;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name);
    scenario::check(&path, |command| perform(&mut stage, command));
}

#[test]
fn hand_off() {
    check("hand_off.txt");
}

#[test]
fn cancel() {
    check("cancel.txt");
}

#[test]
fn lease() {
    check("lease.txt");
}

#[test]
fn fencing() {
    check("fencing.txt");
}

#[test]
fn references() {
    check("references.txt");
}

#[test]
fn admission() {
    check("admission.txt");
}

/// A planted bug that no scenario sees would be none.
#[cfg(feature = "planted")]
mod planted {
    use worker::planted::{Bug, engine_bugs, with};

    use super::{perform, scenario};

    fn outcome(script: &str) -> String {
        scenario::outcome(script, || None, perform)
    }

    fn check(bug: Bug, script: &str) {
        assert_ne!(outcome(script), with(bug, || outcome(script)), "{bug:?}");
    }

    const WORKER: &str = "> worker blocks=16 block=4 step=8 cache=off\n> prefill 2 a.0 tokens=10\n";

    #[test]
    fn each_changes_what_a_worker_does() {
        check(Bug::NoFencing, &format!("{WORKER}> prefill 4 a.1 tokens=10"));
        check(Bug::RenewalByStaleAttempt, &format!("{WORKER}> run\n> fence a.1\n> renew 4 H1"));
        let restart = "> run\n> worker epoch=2 cache=off\n> prefill 2 a.0 tokens=10\n> run\n> fetch 4 H1";
        check(Bug::EpochNotChecked, &format!("{WORKER}{restart}"));
        check(Bug::ForgedIdAccepted, &format!("{WORKER}> run\n> fetch 4 H1 id=7"));
        check(Bug::LeaseNeverExpires, &format!("{WORKER}> run\n> wait 10s"));
        check(Bug::CancelLeaksHold, &format!("{WORKER}> step\n> drop 2"));
    }

    #[test]
    fn blocks_that_are_freed_too_early_are_read() {
        let script = format!("{WORKER}> run\n> fetch 4 H1\n> credit 4 2\n> wait 10s\n> credit 4 9");
        let right = outcome(&script);
        let wrong = engine_bugs::with(engine_bugs::Bug::FreeBeforeQuiescence, || outcome(&script));
        assert_ne!(right, wrong);
    }
}
