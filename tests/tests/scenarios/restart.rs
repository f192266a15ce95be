//! Without a spare: a process dies in the middle of a hand-off and comes back at the same address, as another life. And
//! prompts whose length meets the border of a block.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_tests::client::Ask;
use baton_tests::cluster::{PATIENCE, Service, apart};

use crate::report::{Report, Row};
use crate::scene::{Fault, ONE_OF_EACH, Scene, settings};

/// Who dies, and at which fail point.
const VICTIMS: [(&str, Service, &str); 4] = [
    ("prefill, issued", Service::Prefill, "prefill.issued"),
    ("prefill, transferring", Service::Prefill, "prefill.transferring"),
    ("decode, transferring", Service::Decode, "decode.transferring"),
    ("decode, decoding", Service::Decode, "decode.decoding"),
];

/// Deaths of each: what the first one leaves behind must not be in the way of the next.
const TIMES: usize = 3;

pub(crate) fn same_address(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "restart at the same address", report).await;
        for (place, victim, point) in VICTIMS {
            for time in 1..=TIMES {
                let ask = scene.ask();
                let (running, name) = scene.stop_one(&ask, victim, point, "return").await;
                let fault = Fault::now();
                scene.cluster.kill(name);
                scene.cluster.spawn(name);
                let row = scene.end(running, &ask, fault, false).await;
                let what = format!("{place}, time {time}");
                scene.recovered(fault, Row { fault: what, ..row }).await;
                scene.settled().await;
            }
        }
    });
}

/// Lengths around a block and around a chunk: the first token may begin a block of its own.
pub(crate) fn borders(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "borders of blocks", report).await;
        let fault = Fault::now();
        let mut asks = Vec::new();
        for len in [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 128] {
            for max_tokens in [1, 2, 16, 17] {
                let ask = scene.ask();
                let prompt = ask.prompt.iter().cycle().take(len).copied().collect();
                asks.push(Ask { prompt, max_tokens, ..ask });
            }
        }
        for (ask, answer) in asks.iter().zip(scene.client().ask_all(&asks).await) {
            let expected = scene.expected(ask);
            assert_eq!((answer.error, answer.tokens), (None, expected), "{} tokens", ask.prompt.len());
        }
        let row = Row { fault: "none".to_owned(), outcome: "all right".to_owned(), ..Row::default() };
        scene.recovered(fault, row).await;
    });
}

/// Streams that decode do not notice that prefill dies, and none of them is replayed.
pub(crate) fn others_go_on(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "others go on", report).await;
        let client = scene.client();
        let asks: Vec<Ask> = (0..8).map(|_| Ask { max_tokens: 400, ..scene.ask() }).collect();
        let running: Vec<_> = asks.iter().map(|ask| client.clone().watch(ask.clone())).collect();
        let until = Instant::now() + PATIENCE;
        while running.iter().any(|running| running.arrivals().len() < 10) {
            assert!(Instant::now() < until, "all of them decode; logs:\n{}", scene.cluster.logs());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let fault = Fault::now();
        scene.cluster.kill((Service::Prefill, 0));
        for (running, ask) in running.into_iter().zip(&asks) {
            let answer = running.answer().await;
            assert_eq!((answer.error, answer.tokens), (None, scene.expected(ask)));
        }
        let retries = scene.cluster.metrics((Service::Router, 0)).await;
        assert_eq!(retries.sum("baton_router_retries_total", &[]), 0.0, "logs:\n{}", scene.cluster.logs());
        let detect = scene.detected(fault);
        scene.cluster.spawn((Service::Prefill, 0));
        scene.settled().await;
        let row = Row {
            fault: "kill -9 prefill while eight decode".to_owned(),
            outcome: "all right".to_owned(),
            detect,
            ..Row::default()
        };
        scene.recovered(fault, row).await;
    });
}
