//! Hand-offs that go wrong: a block that is damaged or missing, references that are stale, replayed or forged, and a
//! lease that runs out while its blocks are read.

use std::sync::Arc;
use std::time::Duration;

use baton_tests::client::Ask;
use baton_tests::cluster::{Service, Settings, apart};
use baton_tests::quiet;
use engine::sim::SimConfig;
use proto::wire;

use crate::peer::Peer;
use crate::report::{Report, Row};
use crate::scene::{Fault, ONE_OF_EACH, PROMPT, SHAPE, Scene, settings, words};

const PREFILL: (Service, usize) = (Service::Prefill, 0);
const DECODE: (Service, usize) = (Service::Decode, 0);

/// Requests whose transfers run side by side, of which one fails.
const SIBLINGS: usize = 8;

/// One of several transfers fails: its request is replayed, and nobody else's is touched.
pub(crate) fn one_fails(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let processes =
            [(Service::Prefill, 1), (Service::Decode, 2), (Service::Router, 1), (Service::Gateway, 1)];
        let mut scene = Scene::start(cluster, &processes, "one transfer of several fails", report).await;
        // The block that fails is a middle one of some request: each has seven.
        for (point, cause) in [("transfer.corrupted", "CHECKSUM_MISMATCH"), ("transfer.cut", "TRUNCATED")] {
            let reached = format!("fail point reached: {point}");
            scene.cluster.arm(PREFILL, &format!("{point}=17*off->1*return->off")).await;
            let asks: Vec<_> = (0..SIBLINGS).map(|_| scene.ask()).collect();
            let fault = Fault::now();
            let answers = scene.client().ask_all(&asks).await;
            for (ask, answer) in asks.iter().zip(&answers) {
                assert_eq!(answer.error, None, "{point}; logs:\n{}", scene.cluster.logs());
                assert_eq!(answer.tokens, scene.expected(ask), "{point}: {:?}", ask.id);
            }
            assert_eq!(scene.cluster.count_log(PREFILL, &reached), 1, "one block of one request");
            let metrics = scene.cluster.metrics((Service::Router, 0)).await;
            let retries = metrics.sum("baton_router_retries_total", &[&format!("cause=\"{cause}\"")]);
            assert_eq!(retries, 1.0, "{point}: replays; logs:\n{}", scene.cluster.logs());
            let mut failures = 0.0;
            for name in scene.cluster.workers() {
                let metrics = scene.cluster.metrics(name).await;
                let cause = format!("cause=\"{cause}\"");
                failures += metrics.sum("baton_worker_kv_transfer_failures_total", &[&cause]);
            }
            assert_eq!(failures, 1.0, "{point}: failures counted as {cause}");
            // Nor has what was damaged got into any cache.
            for (ask, answer) in asks.iter().zip(scene.client().ask_all(&asks).await) {
                assert_eq!((answer.error, answer.tokens), (None, scene.expected(ask)), "{point}: again");
            }
            let row = Row {
                fault: format!("a block of 1 of {SIBLINGS}: {}", point.trim_start_matches("transfer.")),
                outcome: "all right".to_owned(),
                detect: scene.detected(fault),
                ..Row::default()
            };
            scene.recovered(fault, row).await;
        }
    });
}

/// Many times what the pools have room for goes through while blocks are damaged all the time.
pub(crate) fn many_fail(report: &Arc<Report>) {
    let report = Arc::clone(report);
    let worker = words(
        "--step-tokens 32 --kv-blocks 64 --lease-ttl-seconds 2 --renew-every-seconds 0.5 --prefix-cache=false",
    );
    let router = words("--placement split --attempts-max 100");
    apart(Settings { worker, router, ..settings() }, move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "many transfers fail", report).await;
        scene.cluster.arm(PREFILL, "transfer.corrupted=8%return").await;
        let fault = Fault::now();
        // Eight blocks each, of 64.
        for _ in 0..10 {
            let asks: Vec<_> = (0..SIBLINGS).map(|_| scene.ask()).collect();
            for (ask, answer) in asks.iter().zip(scene.client().ask_all(&asks).await) {
                assert_eq!(answer.error, None, "logs:\n{}", scene.cluster.logs());
                assert_eq!(answer.tokens, scene.expected(ask));
            }
        }
        let failed = scene.cluster.count_log(PREFILL, "fail point reached: transfer.corrupted");
        assert!(failed > 10, "{failed} blocks were damaged");
        scene.cluster.arm(PREFILL, "transfer.corrupted=off").await;
        let row = Row {
            fault: format!("{failed} damaged blocks in ten times the pool"),
            outcome: "all right".to_owned(),
            ..Row::default()
        };
        scene.recovered(fault, row).await;
    });
}

/// What is forged, the owner's reason, and how.
type Forgery = (&'static str, &'static str, fn(&mut wire::Handoff));

const FORGERIES: [Forgery; 9] = [
    ("another id", "UNKNOWN_HANDOFF", |forged| forged.id[0] ^= 1),
    ("another request", "UNKNOWN_HANDOFF", |forged| forged.request.push('x')),
    ("a later attempt", "UNKNOWN_HANDOFF", |forged| forged.attempt += 1),
    ("fewer tokens", "UNKNOWN_HANDOFF", |forged| forged.tokens -= 16),
    ("more tokens", "UNKNOWN_HANDOFF", |forged| forged.tokens += 16),
    ("another life", "STALE_EPOCH", |forged| forged.epoch ^= 1),
    ("another model", "FINGERPRINT_MISMATCH", |forged| forged.fingerprint[0] ^= 1),
    ("more layers", "LAYOUT_MISMATCH", |forged| layout(forged).layers += 1),
    ("another dtype", "LAYOUT_MISMATCH", |forged| layout(forged).dtype = wire::KvDtype::F32.into()),
];

/// References that must not be honoured, sent to the owner and to a decode worker by a peer that speaks the protocol.
pub(crate) fn references(report: &Arc<Report>) {
    let report = Arc::clone(report);
    apart(settings(), move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "stale, replayed, forged", report).await;
        let owner = Peer::of(&scene.cluster, PREFILL);
        let decode = Peer::of(&scene.cluster, DECODE);
        for (what, reason, forge) in FORGERIES {
            let ask = scene.ask();
            let handoff = owner.prefill(&ask, 0).await.expect("a hand-off");
            let mut forged = handoff.clone();
            forge(&mut forged);
            let fault = Fault::now();
            assert_eq!(owner.fetch(&forged, 0).await, Err(reason.to_owned()), "{what}, to the owner");
            assert_eq!(owner.renew(&forged).await, Err(reason.to_owned()), "{what}, a renewal");
            assert_eq!(owner.fetch(&handoff, 0).await, Ok(PROMPT), "{what}: the true one is still good");
            let (tokens, error) = decode.decode(&ask, 0, Some(&forged)).await;
            assert!(tokens.is_empty(), "{what}: decoded {tokens:?}");
            let error = error.expect("decode refuses it");
            scene.add(refused(format!("{what}: {reason}, at decode {error}"), fault));
            owner.release(&handoff).await;
        }

        let ask = scene.ask();
        let handoff = owner.prefill(&ask, 0).await.expect("a hand-off");
        assert_eq!(owner.fetch(&handoff, 0).await, Ok(PROMPT), "consumed");
        owner.release(&handoff).await;
        let fault = Fault::now();
        assert_eq!(owner.fetch(&handoff, 0).await, Err("UNKNOWN_HANDOFF".to_owned()), "replayed");
        let replayed = decode.decode(&ask, 0, Some(&handoff)).await;
        assert_eq!(replayed, (Vec::new(), Some("UNKNOWN_HANDOFF".to_owned())), "replayed at decode");
        scene.add(refused("replayed when released: UNKNOWN_HANDOFF".to_owned(), fault));

        let ask = scene.ask();
        let first = owner.prefill(&ask, 0).await.expect("a hand-off");
        let second = owner.prefill(&ask, 1).await.expect("a hand-off of the next attempt");
        let fault = Fault::now();
        assert_eq!(owner.fetch(&first, 0).await, Err("STALE_ATTEMPT".to_owned()), "fenced");
        assert_eq!(owner.fetch(&second, 0).await, Ok(PROMPT), "the later attempt's");
        assert_eq!(owner.fetch(&second, 100_000).await, Ok(PROMPT), "skipping more than there is");
        scene.add(refused("an earlier attempt's: STALE_ATTEMPT".to_owned(), fault));

        scene.cluster.kill(PREFILL);
        scene.cluster.spawn(PREFILL);
        scene.settled().await;
        let fault = Fault::now();
        let (owner, decode) = (Peer::of(&scene.cluster, PREFILL), Peer::of(&scene.cluster, DECODE));
        assert_eq!(owner.fetch(&second, 0).await, Err("STALE_EPOCH".to_owned()), "of the life before");
        let stale = decode.decode(&ask, 1, Some(&second)).await;
        assert_eq!(stale, (Vec::new(), Some("STALE_EPOCH".to_owned())), "the same at decode");
        let row = refused("of the life before, at the same address: STALE_EPOCH".to_owned(), fault);
        scene.recovered(fault, row).await;
    });
}

fn layout(handoff: &mut wire::Handoff) -> &mut wire::KvLayout {
    handoff.layout.as_mut().expect("a hand-off has a layout")
}

fn refused(fault: String, since: Fault) -> Row {
    Row { fault, outcome: "refused".to_owned(), detect: Some(since.at.elapsed()), ..Row::default() }
}

/// A lease that is over before its blocks are read: the reader gets an error and never the end.
pub(crate) fn lease(report: &Arc<Report>) {
    let report = Arc::clone(report);
    // Enough KV that the network between does not hold all of it.
    let shape = SimConfig { layers: 8, kv_heads: 8, head_dim: 64, ..SHAPE };
    let model = "sim:layers=8,kv_heads=8,head_dim=64,vocab=4096,context_len=2048".to_owned();
    let worker = words("--kv-blocks 256 --step-tokens 512 --lease-ttl-seconds 1 --renew-every-seconds 0.5");
    let settings = Settings { model, worker, ..settings() };
    apart(settings, move |cluster| async move {
        let mut scene = Scene::start(cluster, &ONE_OF_EACH, "lease expiry during read", report).await;
        scene.shape = shape;
        let lease = Duration::from_secs(1);
        let owner = Peer::of(&scene.cluster, PREFILL);
        let ask = Ask { prompt: (0..1600).collect(), ..scene.ask() };
        let handoff = owner.prefill(&ask, 0).await.expect("a hand-off");
        let mut reading = owner.open(&handoff, 0).await.expect("an authorised fetch");
        assert!(reading.block().await.is_ok_and(|block| block.is_some()), "a first block comes");
        let fault = Fault::now();
        let freed = quiet::quiet(&scene.cluster, fault.at, lease * 2, "a silent reader").await;
        assert!(freed - fault.at >= lease / 2, "blocks stay for as long as the lease runs");
        let mut blocks = 1;
        let error = loop {
            match reading.block().await {
                Ok(Some(_)) => blocks += 1,
                Ok(None) => panic!("the end came after the lease"),
                Err(reason) => break reason,
            }
        };
        assert_eq!(error, "LEASE_EXPIRED", "after {blocks} blocks");
        assert_eq!(owner.fetch(&handoff, 0).await, Err(error.clone()), "and it stays so");
        let fault_name = format!("a reader falls silent, {blocks} of 100 blocks on their way: {error}");
        let row = Row { fault: fault_name, outcome: "refused".to_owned(), ..Row::default() };
        scene.recovered_at(fault, freed, row).await;

        // Decode stands still while it reads, for longer than its lease and not for as long as a dead peer would.
        let ask = Ask { prompt: (0..400).map(|index| index * 3).collect(), ..scene.ask() };
        let (running, _) =
            scene.stop_one(&ask, Service::Prefill, "prefill.transferring", "return(1500)").await;
        let fault = Fault::now();
        scene.cluster.signal(DECODE, "STOP");
        tokio::time::sleep(Duration::from_millis(1200)).await;
        scene.cluster.signal(DECODE, "CONT");
        let row = scene.end(running, &ask, fault, false).await;
        let metrics = scene.cluster.metrics((Service::Router, 0)).await;
        let expired = metrics.sum("baton_router_retries_total", &["cause=\"LEASE_EXPIRED\""]);
        assert_eq!(expired, 1.0, "replayed for that; logs:\n{}", scene.cluster.logs());
        scene
            .recovered(fault, Row { fault: "decode pauses for 1.2 s of a lease of 1 s".to_owned(), ..row })
            .await;
    });
}
