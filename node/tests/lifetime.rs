//! How servers and processes end, and what every server offers beside its services.

#![expect(clippy::unwrap_used, reason = "these are tests")]

mod probe;

use std::time::{Duration, Instant};

use node::{Context, Error, Process};
use probe::{Rig, ask, fence, tokenizer};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

const GRACE: Duration = Duration::from_secs(9);
const SERVICE: &str = "baton.v1.Worker";

async fn health(rig: &Rig, service: &str) -> ServingStatus {
    let mut client = HealthClient::new(rig.context.network.connect(&rig.serving.address));
    let answer = client.check(HealthCheckRequest { service: service.to_owned() }).await.unwrap();
    answer.into_inner().status()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_lets_streams_finish_and_then_closes() {
    for rig in Rig::both().await {
        let mut client = rig.client();
        assert_eq!(health(&rig, SERVICE).await, ServingStatus::Serving);
        let mut stream = client.get_tokenizer(tokenizer(ask::SHORT)).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();

        rig.context.shutdown.drain();
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(health(&rig, SERVICE).await, ServingStatus::NotServing);
        assert_eq!(health(&rig, "").await, ServingStatus::NotServing);
        client.fence(fence("a peer that still has to fetch")).await.unwrap();
        let mut chunks = 1;
        while stream.message().await.unwrap().is_some() {
            chunks += 1;
        }
        assert_eq!(chunks, 3);

        let start = Instant::now();
        rig.serving.finished().await;
        assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
        assert!(!rig.context.shutdown.is_stopped());
        let status = client.fence(fence("good")).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unavailable, "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_guard_holds_a_drain_open() {
    for rig in Rig::both().await {
        let busy = rig.context.shutdown.busy();
        rig.context.shutdown.drain();
        tokio::time::sleep(Duration::from_millis(50)).await;
        rig.client().fence(fence("good")).await.unwrap();
        drop(busy);
        rig.serving.finished().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_health_watch_does_not_hold_a_drain_open() {
    let rig = Rig::at("127.0.0.1:0").await;
    let mut client = HealthClient::new(rig.context.network.connect(&rig.serving.address));
    let request = HealthCheckRequest { service: SERVICE.to_owned() };
    let mut watch = client.watch(request).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    rig.context.shutdown.drain();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    rig.serving.finished().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_ends_everything_at_once() {
    for rig in Rig::both().await {
        let address = rig.serving.address.clone();
        let mut stream = rig.client().get_tokenizer(tokenizer(ask::TICKS)).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        rig.context.shutdown.stop();
        rig.serving.finished().await;
        if !address.starts_with("local:") {
            while stream.message().await.is_ok_and(|chunk| chunk.is_some()) {}
        }
        drop(stream);
        rig.inside.empty(Duration::from_millis(500)).await;
        tokio::time::timeout(Duration::from_secs(1), rig.context.tasks.wait()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reflection_lists_the_services() {
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

    let rig = Rig::at("127.0.0.1:0").await;
    let mut client = ServerReflectionClient::new(rig.context.network.connect(&rig.serving.address));
    let request = tonic_reflection::pb::v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let answer = client.server_reflection_info(futures::stream::iter([request])).await.unwrap();
    let message = answer.into_inner().message().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(list) = message else { panic!("{message:?}") };
    let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    assert!(names.iter().any(|name| name == SERVICE), "{names:?}");
    assert!(names.iter().any(|name| name == "grpc.health.v1.Health"), "{names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_port_is_one_clear_line() {
    let context = Context::new("late", Vec::new());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = node::operators::serve(&address, node::operators::Pages::Shown, &context).await.unwrap_err();
    assert!(!error.is_usage());
    let line = error.to_string();
    assert!(line.starts_with(&format!("cannot listen on {address}: Address already in use")), "{line}");
    assert!(!line.contains('\n'));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_a_service_task_ends_the_process() {
    let context = Context::new("doomed", Vec::new());
    let mut process = Process::new(context.clone());
    process.run("doomed", std::future::pending());
    context.tasks.spawn("loop", async { panic!("as asked") });
    let outcome = process.finished(GRACE).await;
    let Err(Error::Panic { task: "loop", message }) = outcome else { panic!("{outcome:?}") };
    assert_eq!(message, "as asked");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_a_call_does_not() {
    let context = Context::new("tough", Vec::new());
    context.tasks.spawn_contained("call", async { panic!("as asked") }).join().await;
    let guard = context.tasks.spawn_call("call", std::future::pending());
    drop(guard);
    let blocked = context.tasks.spawn_blocking("compute", || -> u8 { panic!("as asked") }).await;
    assert_eq!(blocked.unwrap_err().reason, proto::Reason::Internal);
    assert_eq!(context.tasks.spawn_blocking("compute", || 5).await.unwrap(), 5);
    context.tasks.wait().await;
    assert!(!context.shutdown.is_draining());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_ends_when_its_services_drained() {
    let context = Context::new("good", Vec::new());
    let mut process = Process::new(context.clone());
    for name in ["one", "two"] {
        let shutdown = context.shutdown.clone();
        process.run(name, async move {
            shutdown.draining().await;
            Ok(())
        });
    }
    context.shutdown.drain();
    process.finished(GRACE).await.unwrap();
    assert!(context.shutdown.is_stopped());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grace_period_bounds_a_drain() {
    let context = Context::new("slow", Vec::new());
    let mut process = Process::new(context.clone());
    process.run("slow", std::future::pending());
    let (grace, start) = (Duration::from_millis(200), Instant::now());
    context.shutdown.drain();
    process.finished(grace).await.unwrap();
    assert!(start.elapsed() >= grace && start.elapsed() < grace * 5, "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_fails_or_ends_by_itself_is_a_fault() {
    let fault = Error::option("--model", "no such file");
    let cases = [(Ok(()), "service short ended by itself"), (Err(fault), "--model: no such file")];
    for (result, expected) in cases {
        let context = Context::new("short", Vec::new());
        let mut process = Process::new(context.clone());
        process.run("long", std::future::pending());
        process.run("short", std::future::ready(result));
        assert_eq!(process.finished(GRACE).await.unwrap_err().to_string(), expected);
        assert!(context.shutdown.is_stopped());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_goes_the_way_of_a_request() {
    let upstream = Context::new("gateway", Vec::new());
    let downstream = upstream.downstream().named("router");
    let request = upstream.shutdown.busy();
    upstream.shutdown.drain();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!downstream.shutdown.is_draining(), "a request upstream may still call");
    drop(request);
    tokio::time::timeout(GRACE, downstream.shutdown.draining()).await.unwrap();
    assert!(!downstream.shutdown.is_stopped());
    upstream.shutdown.stop();
    tokio::time::timeout(GRACE, downstream.shutdown.stopped()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_downstream_ends_the_whole_process() {
    let upstream = Context::new("gateway", Vec::new());
    let downstream = upstream.downstream();
    let process = Process::new(upstream.clone());
    downstream.shutdown.fail(Error::Ended("decode-0".into()));
    let outcome = process.finished(GRACE).await;
    assert!(matches!(&outcome, Err(Error::Ended(name)) if name == "decode-0"), "{outcome:?}");
    assert!(downstream.shutdown.is_stopped());
}
