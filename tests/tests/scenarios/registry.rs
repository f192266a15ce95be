//! etcd goes away for sixty times its lease, and comes back: with all it knew, or having forgotten everything. The
//! cluster serves on what it knew last, deaths and restarts of its members included.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_tests::client::Ask;
use baton_tests::cluster::{PATIENCE, Service, Settings, apart};
use tokio::task::JoinSet;

use crate::report::{Report, Row};
use crate::scene::{Fault, Scene, WITH_SPARES, settings, words};

/// What a registration in etcd outlives its owner by, and how many of these etcd is away.
const LEASE: Duration = Duration::from_secs(1);
const LEASES: u32 = 60;

/// Clients that ask all the time.
const CLIENTS: usize = 4;

pub(crate) fn away(report: &Arc<Report>) {
    let report = Arc::clone(report);
    let service = words(&format!("--etcd-lease-seconds {}", LEASE.as_secs()));
    apart(Settings { service, ..settings() }, move |cluster| async move {
        let mut scene = Scene::start(cluster, &WITH_SPARES, "etcd down", report).await;
        let fault = Fault::now();
        scene.etcd().kill();
        let asking = Asking::start(&mut scene);
        tokio::time::sleep(LEASE * LEASES / 3).await;
        // Members die and come back meanwhile, and nobody tells of it.
        for name in [(Service::Decode, 1), (Service::Prefill, 1), (Service::Router, 1)] {
            scene.cluster.kill(name);
            tokio::time::sleep(LEASE * 2).await;
            scene.cluster.spawn(name);
        }
        tokio::time::sleep((LEASE * LEASES).saturating_sub(fault.at.elapsed())).await;
        let (answers, longest) = asking.end().await;
        let row = Row {
            fault: format!("for {LEASES} leases, a member of each kind restarted"),
            outcome: format!("{answers} right, the slowest took {:.1} s", longest.as_secs_f64()),
            ..Row::default()
        };
        scene.recovered(Fault::now(), row).await;

        for (what, forgets) in [("comes back", false), ("comes back without its data", true)] {
            if forgets {
                let asking = Asking::start(&mut scene);
                scene.etcd().kill();
                scene.etcd().forget();
                tokio::time::sleep(LEASE * 2).await;
                scene.etcd().run();
                tokio::time::sleep(LEASE * 3).await;
                asking.end().await;
            } else {
                scene.etcd().run();
            }
            let back = Fault::now();
            // Whoever is new is found, so it knows, and is asked.
            let newcomer = (Service::Decode, if forgets { 3 } else { 2 });
            scene.cluster.spawn(newcomer);
            let joined =
                format!("worker is live role=\"decode\" address=\"{}\"", scene.cluster.address(newcomer));
            let until = Instant::now() + PATIENCE;
            while scene.cluster.count_log((Service::Router, 0), &joined) == 0 {
                assert!(Instant::now() < until, "a new worker is found; logs:\n{}", scene.cluster.logs());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let detect = Some(back.at.elapsed());
            scene.settled().await;
            let row = Row {
                fault: format!("{what}, and a worker joins"),
                outcome: "right".to_owned(),
                detect,
                ..Row::default()
            };
            scene.recovered(back, row).await;
        }
    });
}

/// Clients that ask until told to end; each answer must be right.
struct Asking {
    clients: JoinSet<(usize, Duration)>,
    over: Arc<AtomicBool>,
}

impl Asking {
    fn start(scene: &mut Scene) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let (client, over) = (scene.client(), Arc::clone(&over));
            let ask = scene.ask();
            let expected = scene.expected(&ask);
            clients.spawn(async move {
                let (mut answers, mut longest) = (0, Duration::ZERO);
                while !over.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    // Drawn anew for each, or they would be one request.
                    let answer = client.ask(&Ask { id: None, ..ask.clone() }).await;
                    assert_eq!((answer.error, &answer.tokens), (None, &expected), "while etcd is away");
                    (answers, longest) = (answers + 1, longest.max(begun.elapsed()));
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                (answers, longest)
            });
        }
        Self { clients, over }
    }

    /// How many answers there were, and how long the slowest took.
    async fn end(mut self) -> (usize, Duration) {
        self.over.store(true, Ordering::Relaxed);
        let (mut answers, mut longest) = (0, Duration::ZERO);
        while let Some(client) = self.clients.join_next().await {
            let (of_client, slowest) = client.expect("every answer is right");
            (answers, longest) = (answers + of_client, longest.max(slowest));
        }
        (answers, longest)
    }
}
