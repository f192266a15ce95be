//! One deadline from end to end: a request that is stuck in any phase ends when its time is over, everywhere, and leaves
//! nothing behind; so do thousands whose time is hardly enough.

use std::sync::Arc;
use std::time::Duration;

use baton_tests::client::Ask;
use baton_tests::cluster::apart;
use futures::StreamExt as _;

use crate::kill::PHASES;
use crate::report::{Report, Row};
use crate::scene::{Fault, ONE_OF_EACH, Scene, settings};

/// Time of a request that gets stuck.
const TIME: Duration = Duration::from_millis(700);

/// What the end may take on top of it.
const LATE_MAX: Duration = Duration::from_secs(1);

/// Requests that have hardly enough time, and how many run at once.
const HURRIED: usize = 2000;
const AT_ONCE: usize = 64;

pub(crate) fn deadlines(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "deadline", report).await;
        for (phase, stop) in PHASES {
            let Some((service, point)) = stop else { continue };
            // The engine's thread is let go in the end: nothing can be freed without it, nor told of.
            let stands = if point == "prefill.computing" { Some(TIME * 2) } else { None };
            let action = stands.map_or("return".to_owned(), |time| format!("return({})", time.as_millis()));
            let ask = Ask { timeout: Some(TIME), ..scene.ask() };
            let (running, _) = scene.stop_one(&ask, service, point, &action).await;
            let fault = Fault::now();
            let row = scene.end(running, &ask, fault, true).await;
            assert_eq!(row.outcome, "honest error", "stuck while {phase}");
            let took = fault.at.elapsed();
            assert!(took < TIME + LATE_MAX, "stuck while {phase}: ended after {took:?}");
            if let Some(stands) = stands {
                tokio::time::sleep(stands.saturating_sub(fault.at.elapsed())).await;
            }
            scene
                .recovered(
                    fault,
                    Row { fault: format!("stuck while {phase}, 0.7 s left"), go_on: Some(took), ..row },
                )
                .await;
        }
        hurried(&mut scene).await;
    });
}

/// Requests with 1 to 90 ms for what takes some 70.
async fn hurried(scene: &mut Scene) {
    let asks: Vec<Ask> = (0..HURRIED as u64)
        .map(|number| Ask { timeout: Some(Duration::from_millis(1 + number * 7 % 90)), ..scene.ask() })
        .collect();
    let client = &scene.client();
    let (mut right, mut late, mut refused) = (0, 0, 0);
    let mut answers = futures::stream::iter(&asks)
        .map(|ask| async move { (ask, client.ask(ask).await) })
        .buffer_unordered(AT_ONCE);
    while let Some((ask, answer)) = answers.next().await {
        let expected = scene.expected(ask);
        match answer.error {
            None => {
                assert_eq!(answer.tokens, expected, "{:?}", ask.id);
                right += 1;
            }
            Some(error) => {
                assert!(expected.starts_with(&answer.tokens), "{:?}: {:?}", ask.id, answer.tokens);
                if error.contains("the first token is expected in") {
                    assert!(answer.tokens.is_empty(), "refused before it began");
                    refused += 1;
                } else {
                    assert!(error.starts_with("DeadlineExceeded"), "{error}");
                    late += 1;
                }
            }
        }
    }
    drop(answers);
    let fault = Fault::now();
    assert!(late + refused > 0, "all of {right} were in time");
    let row = Row {
        fault: format!("{HURRIED} requests with 1 to 90 ms, {AT_ONCE} at once"),
        outcome: format!("{right} right, {late} too late, {refused} refused at once"),
        ..Row::default()
    };
    scene.recovered(fault, row).await;
}
