//! Both workers as services over the in-process network, on the simulated model, whose tokens are wrong as soon as one
//! byte of KV is. The test plays the router.

mod cluster;
mod proxy;

use std::time::Duration;

use cluster::{Cluster, MODEL, PREFILL, generation, prompt, reference};
use proto::wire::fetch_event;
use proto::{Attempt, Digest, FinishReason, HandoffId, KvDtype, Reason, WorkerEpoch, wire};
use proxy::Proxy;

#[tokio::test]
async fn split_gives_the_tokens_of_one_engine() {
    let cluster = Cluster::start().await;
    for len in [1, 15, 16, 17, 64, 100] {
        let generation = generation(&format!("r-{len}"), prompt(len), 12);
        let expected = reference(&generation);
        let outcome = cluster.split(generation.clone(), |_| {}).await.unwrap();
        assert_eq!(outcome.tokens, expected, "prompt of {len} tokens");
        assert_eq!(outcome.finish, Some(FinishReason::Length));
        let fused = cluster.decode(generation, None).await.unwrap();
        assert_eq!(fused.tokens, expected, "fused, prompt of {len} tokens");
    }
    cluster.settled().await;
}

#[tokio::test]
async fn split_gives_the_same_tokens_over_tcp() {
    let cluster = Cluster::start_tcp().await;
    for len in [17, 100] {
        let generation = generation(&format!("r-{len}"), prompt(len), 12);
        let expected = reference(&generation);
        assert_eq!(cluster.split(generation, |_| {}).await.unwrap().tokens, expected);
    }
    cluster.settled().await;
}

#[tokio::test]
async fn kv_that_decode_has_is_not_fetched_again() {
    let cluster = Cluster::start().await;
    let first = generation("r-1", prompt(64), 8);
    let expected = reference(&first);
    let outcome = cluster.split(first.clone(), |_| {}).await.unwrap();
    assert_eq!((outcome.skipped, &outcome.tokens), (0, &expected));
    let again = proto::Generation { request: "r-2".into(), ..first };
    let outcome = cluster.split(again, |_| {}).await.unwrap();
    assert_eq!((outcome.skipped, &outcome.tokens), (64, &expected));
    cluster.settled().await;
}

#[tokio::test]
async fn requests_at_the_same_time_do_not_disturb_each_other() {
    let cluster = Cluster::start().await;
    let requests = (0..8).map(|n| {
        let generation = generation(&format!("r-{n}"), prompt(20 + 7 * n), 10);
        let expected = reference(&generation);
        let cluster = &cluster;
        async move { (n, cluster.split(generation, |_| {}).await.unwrap().tokens, expected) }
    });
    for (n, tokens, expected) in futures::future::join_all(requests).await {
        assert_eq!(tokens, expected, "request {n}");
    }
    cluster.settled().await;
}

#[tokio::test]
async fn a_flipped_byte_is_a_checksum_mismatch() {
    let flip = |event: &mut fetch_event::Event| {
        if let fetch_event::Event::Block(block) = event
            && block.first == 16
        {
            let mut slabs = block.slabs.to_vec();
            slabs[5] ^= 1;
            block.slabs = slabs.into();
        }
        true
    };
    refused_through(Proxy::new(PREFILL, flip), Reason::ChecksumMismatch).await;
}

#[tokio::test]
async fn a_proof_of_something_else_is_a_checksum_mismatch() {
    let forge = |event: &mut fetch_event::Event| {
        if let fetch_event::Event::End(end) = event {
            end.digest = vec![7; 32];
        }
        true
    };
    refused_through(Proxy::new(PREFILL, forge), Reason::ChecksumMismatch).await;
    let other_token = |event: &mut fetch_event::Event| {
        if let fetch_event::Event::End(end) = event {
            end.first_token ^= 1;
        }
        true
    };
    refused_through(Proxy::new(PREFILL, other_token), Reason::ChecksumMismatch).await;
}

#[tokio::test]
async fn a_stream_that_ends_early_is_truncated() {
    let no_end = |event: &mut fetch_event::Event| !matches!(event, fetch_event::Event::End(_));
    refused_through(Proxy::new(PREFILL, no_end), Reason::Truncated).await;
    let one_block = |event: &mut fetch_event::Event| match event {
        fetch_event::Event::Block(block) => block.first < 16,
        _ => true,
    };
    refused_through(Proxy::new(PREFILL, one_block), Reason::Truncated).await;
}

/// Hands over through a proxy that changes what passes: decode must refuse, with no token of it.
async fn refused_through(proxy: Proxy, reason: Reason) {
    let cluster = Cluster::start().await;
    cluster.offer("proxy", proxy).await;
    let generation = generation("r", prompt(50), 8);
    let outcome = cluster.split(generation, |handoff| handoff.owner = "local:proxy".into()).await;
    assert_eq!(outcome.expect_err("refused").reason, reason);
    cluster.settled().await;
}

/// Hands over with a reference that the test changes: it must be refused, with no token of it.
async fn refused_with(reason: Reason, change: impl Fn(&mut proto::Handoff)) {
    let cluster = Cluster::start().await;
    let outcome = cluster.split(generation("r", prompt(50), 8), change).await;
    assert_eq!(outcome.expect_err("refused").reason, reason);
    // The true hold is nobody's any more: its lease frees it.
    cluster.settled().await;
}

#[tokio::test]
async fn a_forged_reference_is_unknown() {
    refused_with(Reason::UnknownHandoff, |handoff| handoff.id = HandoffId([9; 16])).await;
}

#[tokio::test]
async fn a_reference_from_another_life_is_stale() {
    refused_with(Reason::StaleEpoch, |handoff| handoff.epoch = WorkerEpoch(handoff.epoch.0 ^ 2)).await;
}

#[tokio::test]
async fn another_checkpoint_is_a_fingerprint_mismatch() {
    refused_with(Reason::FingerprintMismatch, |handoff| handoff.fingerprint = Digest([1; 32])).await;
}

#[tokio::test]
async fn another_kv_type_is_a_layout_mismatch() {
    refused_with(Reason::LayoutMismatch, |handoff| handoff.layout.dtype = KvDtype::F32).await;
}

#[tokio::test]
async fn an_owner_that_is_gone_is_a_lost_worker() {
    refused_with(Reason::WorkerLost, |handoff| handoff.owner = "local:nobody".into()).await;
}

#[tokio::test]
async fn a_reference_is_good_once() {
    let cluster = Cluster::start().await;
    let generation = generation("r", prompt(40), 6);
    let used = std::sync::Mutex::new(None);
    let keep = |handoff: &mut proto::Handoff| *used.lock().unwrap() = Some(handoff.clone());
    cluster.split(generation.clone(), keep).await.unwrap();
    let replayed = used.into_inner().unwrap();
    cluster.settled().await;
    let outcome = cluster.decode(generation, replayed).await;
    assert_eq!(outcome.unwrap_err().reason, Reason::UnknownHandoff);
    cluster.settled().await;
}

#[tokio::test]
async fn a_fenced_attempt_can_neither_fetch_nor_renew_nor_start() {
    let cluster = Cluster::start().await;
    let stale = generation("r", prompt(40), 6);
    let (handoff, _, _prefill) = cluster.prefill(stale.clone()).await.unwrap();
    let fence = wire::FenceRequest { request: "r".into(), attempt: 2 };
    cluster.worker(&cluster.prefill).fence(fence).await.unwrap();

    let error = cluster.decode(stale.clone(), Some(handoff.clone())).await.unwrap_err();
    assert_eq!(error.reason, Reason::StaleAttempt);
    let renew = wire::RenewRequest { handoff: Some(handoff.into()) };
    let status = cluster.kv_transfer(&cluster.prefill).renew(renew).await.unwrap_err();
    assert_eq!(proto::Error::from(status).reason, Reason::StaleAttempt);
    let error = cluster.prefill(stale.clone()).await.err().unwrap();
    assert_eq!(error.reason, Reason::StaleAttempt);

    let fresh = proto::Generation { attempt: Attempt(2), ..stale };
    let expected = reference(&fresh);
    assert_eq!(cluster.split(fresh, |_| {}).await.unwrap().tokens, expected);
    cluster.settled().await;
}

#[tokio::test]
async fn a_dropped_decode_frees_both_sides() {
    let cluster = Cluster::start().await;
    let generation = generation("r", prompt(40), 900);
    let (handoff, _, _prefill) = cluster.prefill(generation.clone()).await.unwrap();
    let request = wire::DecodeRequest { generation: Some(generation.into()), handoff: Some(handoff.into()) };
    let mut stream = cluster.decoder().decode(request).await.unwrap().into_inner();
    for _ in 0..3 {
        assert!(stream.message().await.unwrap().is_some());
    }
    drop(stream);
    cluster.settled().await;
}

#[tokio::test]
async fn requests_are_checked_before_they_reach_the_core() {
    let cluster = Cluster::start().await;
    let other = proto::Generation { model: "other".into(), ..generation("r", prompt(4), 2) };
    let error = cluster.decode(other.clone(), None).await.unwrap_err();
    assert_eq!(error.reason, Reason::ModelNotFound);
    assert!(error.message.contains(MODEL) && error.message.contains("other"), "{error}");
    assert_eq!(cluster.prefill(other).await.err().unwrap().reason, Reason::ModelNotFound);

    let empty = proto::Generation { tokens: vec![], ..generation("r", prompt(4), 2) };
    let error = cluster.decode(empty, None).await.unwrap_err();
    assert_eq!(error.reason, Reason::InvalidArgument);
    assert!(error.message.starts_with("tokens: "), "{error}");
    let absent = wire::PrefillRequest { generation: None };
    let status = cluster.prefiller().prefill(absent).await.unwrap_err();
    assert!(proto::Error::from(status).message.starts_with("generation: "));

    let unknown = wire::GetTokenizerRequest { digest: vec![3; 32] };
    let status = cluster.worker(&cluster.decode).get_tokenizer(unknown).await.unwrap_err();
    assert_eq!(proto::Error::from(status).reason, Reason::ModelNotFound);
}

#[tokio::test]
async fn workers_describe_themselves_alike() {
    let cluster = Cluster::start().await;
    let (prefill, decode) =
        (cluster.describe(&cluster.prefill).await, cluster.describe(&cluster.decode).await);
    assert_eq!(prefill.mismatch(&decode), None);
    assert_ne!(prefill.epoch, decode.epoch);
    assert_eq!((prefill.role, decode.role), (proto::Role::Prefill, proto::Role::Decode));
    assert_eq!(decode.model.name, MODEL);
    assert!(!decode.draining && decode.blocks_total == decode.blocks_free);
}

#[tokio::test]
async fn a_drain_lets_streams_finish_and_takes_no_new_ones() {
    let cluster = Cluster::start().await;
    let long = generation("r", prompt(40), 400);
    let expected = reference(&long);
    let request = wire::DecodeRequest { generation: Some(long.into()), handoff: None };
    let mut stream = cluster.decoder().decode(request).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    cluster.context.shutdown.drain();
    let mut tokens = Vec::new();
    let mut refused = None;
    while let Some(event) = stream.message().await.unwrap() {
        if let Some(wire::decode_event::Event::Token(token)) = event.event {
            tokens.push(token.id);
        }
        if refused.is_none() && cluster.describe(&cluster.decode).await.draining {
            refused = cluster.decode(generation("late", prompt(4), 2), None).await.err();
        }
    }
    assert_eq!(tokens, expected);
    assert_eq!(refused.map(|error| error.reason), Some(Reason::WorkerLost));
    drop(stream);
    tokio::time::timeout(Duration::from_secs(10), cluster.context.shutdown.idle()).await.unwrap();
    for worker in cluster.workers {
        tokio::time::timeout(Duration::from_secs(10), worker.join()).await.unwrap();
    }
}
