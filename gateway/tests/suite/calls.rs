//! The public gRPC port: limits, deadlines, codings, what it tells of itself. Calls are made by bare HTTP/2 where a
//! client's library would step in.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Bytes;
use futures::stream::{self, StreamExt};
use http::{HeaderMap, Request};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use proto::wire::GenerateRequest;
use proto::wire::generate_request::Prompt;
use proto::wire::generation_service_client::GenerationServiceClient;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tonic::Code;
use tonic::codec::CompressionEncoding;
use tonic::transport::{Channel, Endpoint};

use crate::support::{Cluster, Trouble};

async fn start(change: impl FnOnce(&mut gateway::Config)) -> Cluster {
    let cluster = Cluster::start(&["r0"], |config| {
        config.grpc_listen = "127.0.0.1:0".to_owned();
        change(config);
    })
    .await;
    cluster.script.says("ok");
    cluster
}

fn text(text: impl Into<String>) -> GenerateRequest {
    GenerateRequest { prompt: Some(Prompt::Text(text.into())), ..GenerateRequest::default() }
}

/// A channel of tonic's own transport.
async fn channel(cluster: &Cluster) -> Channel {
    let address = format!("http://{}", cluster.gateway.grpc_address());
    Endpoint::from_shared(address).unwrap().connect().await.unwrap()
}

async fn client(cluster: &Cluster) -> GenerationServiceClient<Channel> {
    GenerationServiceClient::new(channel(cluster).await)
}

/// A connection of bare HTTP/2; its tasks end with it.
struct Bare {
    send: SendRequest<UnsyncBoxBody<Bytes, Infallible>>,
    _tasks: JoinSet<()>,
}

impl Bare {
    async fn to(cluster: &Cluster) -> Self {
        let socket = TcpStream::connect(cluster.gateway.grpc_address()).await.unwrap();
        let (send, connection) = handshake(TokioExecutor::new(), TokioIo::new(socket)).await.unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { drop(connection.await) });
        Self { send, _tasks: tasks }
    }

    /// Starts a call of `Generate`; with `open`, its side of the stream does not end.
    async fn call(
        &mut self,
        headers: &[(&str, &str)],
        message: Bytes,
        open: bool,
    ) -> hyper::Result<http::Response<hyper::body::Incoming>> {
        let first = stream::iter([Ok(Frame::data(message))]);
        let rest = if open { stream::pending().boxed() } else { stream::empty().boxed() };
        let mut request = Request::post("http://localhost/baton.v1.GenerationService/Generate")
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = UnsyncBoxBody::new(StreamBody::new(first.chain(rest)));
        self.send.ready().await?;
        self.send.send_request(request.body(body).unwrap()).await
    }
}

/// A message as it stands in a stream.
fn framed(message: &impl Message) -> Bytes {
    let message = message.encode_to_vec();
    let mut framed = vec![0];
    framed.extend((message.len() as u32).to_be_bytes());
    framed.extend(message);
    framed.into()
}

/// The status of a call that ended, from its trailers or, if it never began, its headers.
async fn status(answer: http::Response<hyper::body::Incoming>) -> (Code, HeaderMap) {
    let headers = answer.headers().clone();
    let trailers = answer.into_body().collect().await.unwrap().trailers().cloned();
    let status = trailers.as_ref().unwrap_or(&headers)["grpc-status"].to_str().unwrap().parse().unwrap();
    (Code::from_i32(status), headers)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_may_be_large_and_has_a_limit() {
    let cluster = start(|_| ()).await;
    let mut client = client(&cluster).await;
    let refused = client.generate(text("x".repeat(63 << 20))).await.unwrap_err();
    // It came through, to be refused for what it says.
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().starts_with("prompt: the prompt has 66060288 bytes"), "{refused}");
    let refused = client.generate(text("x".repeat((64 << 20) + 1))).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    assert!(client.generate(text("x")).await.is_ok(), "the connection goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_compresses_is_answered_compressed() {
    let cluster = start(|_| ()).await;
    for (coding, name) in [(CompressionEncoding::Gzip, "gzip"), (CompressionEncoding::Deflate, "deflate")] {
        let mut client = client(&cluster).await.send_compressed(coding).accept_compressed(coding);
        let mut answer = client.generate(text("x".repeat(40))).await.unwrap();
        assert_eq!(answer.metadata().get("grpc-encoding").unwrap(), name);
        let mut whole = String::new();
        while let Some(response) = answer.get_mut().message().await.unwrap() {
            whole += &response.text;
        }
        assert_eq!(whole, "ok");
    }
    // Merely to understand it is not to ask for it: tokens are too small to gain.
    let mut client = client(&cluster).await.accept_compressed(CompressionEncoding::Gzip);
    let answer = client.generate(text("x")).await.unwrap();
    assert!(!answer.metadata().contains_key("grpc-encoding"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_unpacks_to_too_much_is_refused() {
    let cluster = start(|config| config.grpc_message_bytes_max = 1 << 20).await;
    let mut client = client(&cluster).await.send_compressed(CompressionEncoding::Gzip);
    let refused = client.generate(text("x".repeat(8 << 20))).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_the_call_and_its_work() {
    let cluster = start(|_| ()).await;
    let mut bare = Bare::to(&cluster).await;
    for tokens in [0, 1] {
        cluster.script.trouble("r0", tokens, Trouble::Hang);
        let message = framed(&GenerateRequest { max_tokens: Some(9), ..text("x") });
        let answer = bare.call(&[("grpc-timeout", "300m"), ("x-request-id", "d")], message, false).await;
        let (code, headers) = status(answer.unwrap()).await;
        assert_eq!(code, Code::DeadlineExceeded, "after {tokens} tokens");
        assert_eq!(headers["x-request-id"], "d");
        cluster.until_idle().await;
    }
    cluster.script.troubles.lock().unwrap().clear();
    // So short that it may have passed before anything began.
    for limit in ["1n", "1m"].repeat(50) {
        let answer = bare.call(&[("grpc-timeout", limit)], framed(&text("x")), false).await.unwrap();
        assert!(matches!(status(answer).await.0, Code::DeadlineExceeded | Code::Ok));
    }
    let answer = bare.call(&[("grpc-timeout", "soon")], framed(&text("x")), false).await.unwrap();
    assert_eq!(status(answer).await.0, Code::InvalidArgument);
    let answer = bare.call(&[], framed(&text("x")), false).await.unwrap();
    assert_eq!(status(answer).await.0, Code::Ok);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_has_a_limit_of_calls_at_a_time() {
    let cluster = start(|config| config.streams_max = 2).await;
    cluster.script.trouble("r0", 1, Trouble::Hang);
    let mut bare = Bare::to(&cluster).await;
    let mut running = Vec::new();
    for _ in 0..2 {
        running.push(bare.call(&[], framed(&text("x")), false).await.unwrap());
    }
    let third = bare.call(&[], framed(&text("x")), false);
    tokio::pin!(third);
    assert!(tokio::time::timeout(Duration::from_millis(300), &mut third).await.is_err(), "it waits");
    assert_eq!(cluster.script.take_seen().len(), 2);
    drop(running.pop());
    third.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_cut_short_does_not_hold_a_drain() {
    let cluster = start(|_| ()).await;
    let whole = framed(&text("x"));
    let mut bare = Bare::to(&cluster).await;
    let mut other = Bare::to(&cluster).await;
    // Half a message, and a whole one that is not the end of the call's input.
    let (half, unended) = (whole.slice(..3), whole.clone());
    let calls = async {
        let (half, unended) = tokio::join!(bare.call(&[], half, true), other.call(&[], unended, true));
        [status(half.unwrap()).await.0, status(unended.unwrap()).await.0]
    };
    let drain = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        cluster.context.shutdown.drain();
    };
    let (codes, ()) = tokio::join!(calls, drain);
    assert_eq!(codes, [Code::Unavailable; 2]);
    let Cluster { gateway, .. } = cluster;
    tokio::time::timeout(Duration::from_secs(5), gateway.finished()).await.expect("the drain ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn health_follows_readiness() {
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_check_response::ServingStatus;
    use tonic_health::pb::health_client::HealthClient;

    let cluster = Cluster::start_unready(&["r0"], |config| {
        config.grpc_listen = "127.0.0.1:0".to_owned();
        // Whoever watches needs no key.
        config.api_key = ["sk-1"].into_iter().collect();
    })
    .await;
    let lost = proto::Error::new(proto::Reason::WorkerLost, "no decode worker");
    cluster.script.trouble("r0", 0, Trouble::Fail(lost));
    let mut health = HealthClient::new(channel(&cluster).await);
    let mut until = async |service: &str, expected: ServingStatus| {
        for _ in 0..1000 {
            let request = HealthCheckRequest { service: service.to_owned() };
            if health.check(request).await.unwrap().into_inner().status() == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{service:?} does not become {expected:?}");
    };
    until("", ServingStatus::NotServing).await;
    cluster.script.troubles.lock().unwrap().clear();
    for service in ["", "baton.v1.GenerationService"] {
        until(service, ServingStatus::Serving).await;
    }
    let _busy = cluster.context.shutdown.busy();
    cluster.context.shutdown.drain();
    until("", ServingStatus::NotServing).await;
}

/// Services and messages that clients have nothing to do with.
const INTERNAL: [&str; 5] =
    ["baton.v1.Router", "baton.v1.Worker", "baton.v1.Prefill", "baton.v1.Decode", "baton.v1.KvTransfer"];

/// Asks a version of the reflection service, and checks what it tells.
macro_rules! check_reflection {
    ($version:ident, $channel:expr) => {
        use pb::server_reflection_request::MessageRequest;
        use pb::server_reflection_response::MessageResponse;
        use tonic_reflection::pb::$version as pb;

        let client = pb::server_reflection_client::ServerReflectionClient::new($channel);
        let ask = async |message| {
            let request = pb::ServerReflectionRequest { host: String::new(), message_request: Some(message) };
            let answer = client.clone().server_reflection_info(stream::iter([request])).await.unwrap();
            answer.into_inner().message().await.map(|answer| answer.unwrap().message_response.unwrap())
        };
        let list = ask(MessageRequest::ListServices(String::new())).await.unwrap();
        let MessageResponse::ListServicesResponse(list) = list else { panic!("{list:?}") };
        let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
        for expected in ["baton.v1.GenerationService", "grpc.health.v1.Health"] {
            assert!(names.iter().any(|name| name == expected), "{names:?}");
        }
        assert!(!names.iter().any(|name| INTERNAL.contains(&name.as_str())), "{names:?}");
        let is_known = async |symbol: &str| {
            let file = ask(MessageRequest::FileContainingSymbol(symbol.to_owned())).await;
            matches!(file, Ok(MessageResponse::FileDescriptorResponse(_)))
        };
        for public in ["baton.v1.GenerationService.Generate", "baton.v1.SamplingParams"] {
            assert!(is_known(public).await, "{public}");
        }
        for internal in INTERNAL {
            assert!(!is_known(internal).await, "{internal}");
        }
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn reflection_tells_of_public_services_alone() {
    let cluster = start(|_| ()).await;
    check_reflection!(v1, channel(&cluster).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn so_does_its_earlier_version() {
    let cluster = start(|_| ()).await;
    check_reflection!(v1alpha, channel(&cluster).await);
}
