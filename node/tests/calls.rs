//! What holds for every call, in process and over TCP alike.

#![expect(clippy::unwrap_used, reason = "these are tests")]

mod probe;

use std::time::{Duration, Instant};

use probe::{Rig, ask, fence, tokenizer, within};
use proto::convert::is_transport;
use proto::{Error, Reason};
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn answers_refusals_and_large_messages_come_through() {
    for rig in Rig::both().await {
        let mut client = rig.client();
        client.fence(fence("good")).await.unwrap();
        let refusal = Error::from(client.describe(proto::wire::DescribeRequest {}).await.unwrap_err());
        assert_eq!(refusal, Error::new(Reason::ModelNotFound, "no model here"));

        let mut stream = client.get_tokenizer(tokenizer(ask::LARGE)).await.unwrap().into_inner();
        let chunk = stream.message().await.unwrap().unwrap();
        assert_eq!(chunk.bytes.len(), 8 << 20, "over tonic's default limit of 4 MiB");
        assert!(stream.message().await.unwrap().is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_stream_is_gone_at_the_server() {
    let [local, tcp] = Rig::both().await;
    for (rig, most) in [(local, Duration::from_millis(5)), (tcp, Duration::from_millis(500))] {
        let mut stream = rig.client().get_tokenizer(tokenizer(ask::SILENCE)).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        assert!(rig.inside.count() > 0);
        drop(stream);
        rig.inside.empty(most).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_call_is_gone_at_the_server() {
    for rig in Rig::both().await {
        let mut client = rig.client();
        let call = client.fence(fence("hang"));
        assert!(tokio::time::timeout(Duration::from_millis(100), call).await.is_err());
        rig.inside.empty(Duration::from_millis(500)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panicking_handler_is_an_internal_error_and_the_process_goes_on() {
    for rig in Rig::both().await {
        let mut client = rig.client();
        let error = Error::from(client.fence(fence("panic")).await.unwrap_err());
        assert_eq!(error, Error::new(Reason::Internal, "handler panicked: as asked"));

        let mut stream = client.get_tokenizer(tokenizer(ask::PANIC)).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        let error = Error::from(stream.message().await.unwrap_err());
        assert_eq!(error, Error::new(Reason::Internal, "handler panicked: as asked"));

        client.fence(fence("good")).await.unwrap();
        rig.inside.empty(Duration::from_millis(500)).await;
        assert!(!rig.context.shutdown.is_draining());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_a_call_on_both_sides() {
    let limit = Duration::from_millis(150);
    for rig in Rig::both().await {
        let start = Instant::now();
        let status = rig.client().fence(within(limit, fence("hang"))).await.unwrap_err();
        assert_deadline(&status, start, limit);
        rig.inside.empty(Duration::from_millis(500)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_a_running_stream_on_both_sides() {
    let limit = Duration::from_millis(150);
    for rig in Rig::both().await {
        for what in [ask::SILENCE, ask::TICKS] {
            let start = Instant::now();
            let call = within(limit, tokenizer(what));
            let mut stream = rig.client().get_tokenizer(call).await.unwrap().into_inner();
            let mut chunks = 0;
            let status = loop {
                match stream.message().await {
                    Ok(Some(_)) => chunks += 1,
                    Ok(None) => panic!("the stream ended well"),
                    Err(status) => break status,
                }
            };
            assert!(chunks > 0);
            assert_deadline(&status, start, limit);
            assert!(stream.message().await.unwrap().is_none(), "one terminal item");
            drop(stream);
            rig.inside.empty(Duration::from_millis(500)).await;
        }
    }
}

fn assert_deadline(status: &tonic::Status, start: Instant, limit: Duration) {
    let took = start.elapsed();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!(!is_transport(status), "{status:?}");
    assert_eq!(Error::from(status.clone()).reason, Reason::Deadline);
    assert!(took >= limit && took < limit + Duration::from_millis(500), "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_without_a_service_is_a_transport_failure() {
    let context = node::Context::new("lonely", Vec::new());
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for address in ["local:nobody", nobody.as_str(), "no port", ""] {
        let status = probe::client(&context, address).fence(fence("good")).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{address}: {status:?}");
        assert!(is_transport(&status), "{address}: {status:?}");
        assert_eq!(Error::from(status).reason, Reason::WorkerLost);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_streams_than_http2_allows_by_default_run_at_once() {
    let rig = Rig::at("127.0.0.1:0").await;
    let mut streams = Vec::new();
    for _ in 0..400 {
        let mut stream = rig.client().get_tokenizer(tokenizer(ask::SILENCE)).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        streams.push(stream);
    }
    drop(streams);
    rig.inside.empty(Duration::from_secs(2)).await;
}
