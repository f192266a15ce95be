//! KServe's protocol over gRPC, as a client of its own makes calls.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use proto::wire::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use proto::wire::inference::infer_parameter::ParameterChoice;
use proto::wire::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use proto::wire::inference::*;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::CompressionEncoding;
use tonic::{Code, Request, Streaming};

use crate::support::{ABC, Cluster, DEF, MODEL, Trouble};

type Client = GrpcInferenceServiceClient<node::Channel>;

fn client(cluster: &Cluster) -> Client {
    GrpcInferenceServiceClient::new(cluster.context.network.connect(cluster.gateway.grpc_address()))
}

fn parameter(choice: ParameterChoice) -> InferParameter {
    InferParameter { parameter_choice: Some(choice) }
}

fn int(number: i64) -> InferParameter {
    parameter(ParameterChoice::Int64Param(number))
}

fn flag(flag: bool) -> InferParameter {
    parameter(ParameterChoice::BoolParam(flag))
}

/// A request of one text, with parameters.
fn ask(id: &str, parameters: &[(&str, InferParameter)]) -> ModelInferRequest {
    let input = InferInputTensor {
        name: "text_input".into(),
        datatype: "BYTES".into(),
        shape: vec![1],
        ..InferInputTensor::default()
    };
    ModelInferRequest {
        model_name: MODEL.into(),
        id: id.into(),
        parameters: parameters.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
        inputs: vec![input],
        raw_input_contents: vec![Bytes::from_static(b"\x01\0\0\0x")],
        ..ModelInferRequest::default()
    }
}

fn streaming(id: &str) -> ModelInferRequest {
    ask(id, &[("stream", flag(true))])
}

/// The texts of an output, whose elements have their lengths before them.
fn texts(response: &ModelInferResponse, name: &str) -> Vec<String> {
    let index = response.outputs.iter().position(|output| output.name == name).expect(name);
    let mut raw = response.raw_output_contents[index].clone();
    let mut texts = Vec::new();
    while !raw.is_empty() {
        let length = u32::from_le_bytes(raw.split_to(4)[..].try_into().unwrap());
        texts.push(String::from_utf8(raw.split_to(length as usize).to_vec()).unwrap());
    }
    texts
}

fn is_final(response: &ModelInferResponse) -> bool {
    response.parameters.get("triton_final_response") == Some(&flag(true))
}

/// A stream to send requests on as the test goes.
async fn open(cluster: &Cluster) -> (mpsc::Sender<ModelInferRequest>, Streaming<ModelStreamInferResponse>) {
    let (send, requests) = mpsc::channel(16);
    let responses = client(cluster).model_stream_infer(ReceiverStream::new(requests)).await.unwrap();
    (send, responses.into_inner())
}

/// All responses to these requests, sent at once.
async fn all(cluster: &Cluster, requests: Vec<ModelInferRequest>) -> Vec<ModelStreamInferResponse> {
    let responses = client(cluster).model_stream_infer(tokio_stream::iter(requests)).await.unwrap();
    responses.into_inner().map(Result::unwrap).collect().await
}

/// The text of a request, in the order of its responses.
fn text_of(responses: &[ModelStreamInferResponse], id: &str) -> String {
    let own = responses.iter().filter_map(|response| response.infer_response.as_ref());
    own.filter(|response| response.id == id).map(|response| texts(response, "text_output").concat()).collect()
}

#[tokio::test]
async fn a_call_is_answered_whole() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let mut request = ask("a", &[("temperature", parameter(ParameterChoice::DoubleParam(0.5)))]);
    let response = client(&cluster).model_infer(request.clone()).await.unwrap().into_inner();
    assert_eq!((response.model_name.as_str(), response.model_version.as_str()), (MODEL, "1"));
    assert_eq!(response.id, "a");
    assert_eq!(texts(&response, "text_output"), ["xok"]);
    assert_eq!(response.outputs[0].shape, [1]);
    assert_eq!(cluster.script.take_seen()[0].1.sampling.temperature, 0.5);

    request.parameters.insert("n".into(), int(2));
    request.parameters.insert("exclude_input_in_output".into(), flag(true));
    request.model_version = "1".into();
    request.outputs = ["finish_reason", "text_output"]
        .map(|name| InferRequestedOutputTensor { name: name.into(), parameters: HashMap::new() })
        .to_vec();
    let response = client(&cluster).model_infer(request).await.unwrap().into_inner();
    assert_eq!(response.outputs[0].name, "finish_reason");
    assert_eq!(texts(&response, "finish_reason"), ["stop", "stop"]);
    assert_eq!(texts(&response, "text_output"), ["ok", "ok"]);
}

#[tokio::test]
async fn tokens_come_raw_or_typed() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.goes_on_with(&[ABC, DEF]);
    let mut request = ask("", &[("max_tokens", int(2))]);
    let input = &mut request.inputs[0];
    (input.name, input.datatype, input.shape) = ("input_ids".into(), "INT32".into(), vec![1, 2]);
    request.raw_input_contents = vec![Bytes::from_static(b"\x48\0\0\0\x69\0\0\0")];
    let raw = client(&cluster).model_infer(request.clone()).await.unwrap().into_inner();
    assert_eq!((raw.outputs[0].name.as_str(), raw.outputs[0].shape.as_slice()), ("output_ids", &[1, 2][..]));
    let ids: Vec<u8> = [ABC, DEF].iter().flat_map(|id| id.to_le_bytes()).collect();
    assert_eq!(raw.raw_output_contents[0], ids);
    request.raw_input_contents.clear();
    request.inputs[0].contents =
        Some(InferTensorContents { int_contents: vec![72, 105], ..InferTensorContents::default() });
    let typed = client(&cluster).model_infer(request).await.unwrap().into_inner();
    assert_eq!(typed, raw);
    let seen = cluster.script.take_seen();
    assert_eq!((&seen[0].1.tokens, &seen[1].1.tokens), (&vec![72, 105], &vec![72, 105]));
}

#[tokio::test]
async fn responses_of_several_requests_interleave() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("abcd");
    cluster.script.pace(Duration::from_millis(20));
    let responses = all(&cluster, vec![streaming("1"), streaming("2"), ask("3", &[])]).await;
    let ids: Vec<&str> =
        responses.iter().map(|response| response.infer_response.as_ref().unwrap().id.as_str()).collect();
    for id in ["1", "2"] {
        assert_eq!(text_of(&responses, id), "abcd");
        let own: Vec<_> = responses
            .iter()
            .filter_map(|response| response.infer_response.as_ref())
            .filter(|response| response.id == id)
            .collect();
        // One for each token, of which the last alone says so.
        assert_eq!(
            own.iter().map(|response| is_final(response)).collect::<Vec<_>>(),
            [false, false, false, false, true]
        );
    }
    let first_end = ids.iter().rposition(|id| *id == "1").unwrap();
    let second_begin = ids.iter().position(|id| *id == "2").unwrap();
    assert!(second_begin < first_end, "{ids:?}");
    // Without a stream of its own a request has one response.
    assert_eq!(ids.iter().filter(|id| **id == "3").count(), 1);
    assert_eq!(text_of(&responses, "3"), "xabcd");
}

#[tokio::test]
async fn a_stream_goes_on_while_requests_come() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ab");
    let (send, mut responses) = open(&cluster).await;
    for id in ["1", "2"] {
        send.send(streaming(id)).await.unwrap();
        let mut text = String::new();
        loop {
            let response = responses.message().await.unwrap().unwrap().infer_response.unwrap();
            assert_eq!(response.id, id);
            text.push_str(&texts(&response, "text_output")[0]);
            if is_final(&response) {
                break;
            }
        }
        assert_eq!(text, "ab");
    }
    // What was asked for before the last word is answered after it.
    send.send(streaming("3")).await.unwrap();
    drop(send);
    let mut rest = Vec::new();
    while let Some(response) = responses.message().await.unwrap() {
        rest.push(response);
    }
    assert_eq!(text_of(&rest, "3"), "ab");
}

#[tokio::test]
async fn sequences_of_a_stream_share_its_responses() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let two = ask(
        "1",
        &[
            ("stream", flag(true)),
            ("n", int(2)),
            ("temperature", int(1)),
            ("return_finish_reason", flag(true)),
        ],
    );
    let responses = all(&cluster, vec![two]).await;
    let mut sequences = [String::new(), String::new()];
    for response in &responses {
        let new = texts(response.infer_response.as_ref().unwrap(), "text_output");
        assert_eq!(new.len(), 2);
        sequences.iter_mut().zip(new).for_each(|(text, new)| text.push_str(&new));
    }
    assert_eq!(sequences, ["ok", "ok"]);
    let last = responses.last().unwrap().infer_response.as_ref().unwrap();
    assert_eq!(texts(last, "finish_reason"), ["stop", "stop"]);
    let finals = responses.iter().filter(|response| is_final(response.infer_response.as_ref().unwrap()));
    assert_eq!(finals.count(), 1);
}

#[tokio::test]
async fn the_empty_final_response_is_never_needed() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    for wanted in [false, true] {
        let request =
            ask("1", &[("stream", flag(true)), ("triton_enable_empty_final_response", flag(wanted))]);
        let responses = all(&cluster, vec![request]).await;
        let finals: Vec<bool> =
            responses.iter().map(|response| is_final(response.infer_response.as_ref().unwrap())).collect();
        assert_eq!(finals, [false, false, true]);
        let all_have_outputs =
            responses.iter().all(|response| !response.infer_response.as_ref().unwrap().outputs.is_empty());
        assert!(all_have_outputs);
    }
}

#[tokio::test]
async fn a_fault_is_its_own_requests_alone() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let unknown = ModelInferRequest { model_name: "other".into(), ..streaming("bad-1") };
    let wrong = ask("bad-2", &[("top_p", int(7))]);
    let responses = all(&cluster, vec![unknown, streaming("good"), wrong]).await;
    assert_eq!(text_of(&responses[..], "good"), "ok");
    let fault = |id: &str| {
        let own = responses.iter().filter(|response| response.infer_response.as_ref().unwrap().id == id);
        let own: Vec<_> = own.collect();
        assert_eq!(own.len(), 1);
        own[0].error_message.clone()
    };
    assert_eq!(fault("bad-1"), "model \"other\" is not served here");
    assert!(fault("bad-2").starts_with("top_p: expected a number greater than 0"), "{}", fault("bad-2"));
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_told() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("abcd");
    cluster.script.trouble(
        "r0",
        2,
        Trouble::Fail(proto::Error::new(proto::Reason::ChecksumMismatch, "torn")),
    );
    let responses = all(&cluster, vec![streaming("1")]).await;
    assert_eq!(text_of(&responses[..2], "1"), "ab");
    assert_eq!(responses.len(), 3);
    assert_eq!(responses[2].error_message, "torn");
    assert_eq!(responses[2].infer_response.as_ref().unwrap().id, "1");
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_client_may_want_faults_as_the_streams_own() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    cluster.script.pace(Duration::from_millis(20));
    let unknown = ModelInferRequest { model_name: "other".into(), ..streaming("bad") };
    let mut request = Request::new(tokio_stream::iter([streaming("good"), unknown]));
    request.metadata_mut().insert("triton_grpc_error", "true".parse().unwrap());
    let responses = client(&cluster).model_stream_infer(request).await.unwrap().into_inner();
    let responses: Vec<_> = responses.collect().await;
    let status = responses.last().unwrap().as_ref().unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    cluster.until_idle().await;
}

#[tokio::test]
async fn cancelling_a_stream_ends_all_of_it() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.pace(Duration::from_millis(20));
    let (send, mut responses) = open(&cluster).await;
    for id in ["1", "2", "3"] {
        send.send(ask(id, &[("stream", flag(true)), ("max_tokens", int(50))])).await.unwrap();
    }
    for _ in 0..6 {
        responses.message().await.unwrap().unwrap();
    }
    assert_eq!(cluster.script.open(), 3);
    drop(responses);
    cluster.until_idle().await;
    let call = client(&cluster);
    let request = ask("4", &[("max_tokens", int(50))]);
    let unary =
        tokio::time::timeout(
            Duration::from_millis(100),
            async move { call.clone().model_infer(request).await },
        );
    assert!(unary.await.is_err(), "the client left before the end");
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_stream_runs_so_many_requests_at_once() {
    let cluster = Cluster::start(&["r0"], |config| config.streams_max = 2).await;
    cluster.script.says("abcdef");
    cluster.script.pace(Duration::from_millis(5));
    let ids: Vec<String> = (0..6).map(|id| id.to_string()).collect();
    let requests = ids.iter().map(|id| streaming(id)).collect();
    let (responses, most) = {
        let responses = all(&cluster, requests);
        tokio::pin!(responses);
        let mut most = 0;
        loop {
            tokio::select! {
                responses = &mut responses => break (responses, most),
                () = tokio::time::sleep(Duration::from_millis(1)) => most = most.max(cluster.script.open()),
            }
        }
    };
    assert_eq!(most, 2);
    for id in &ids {
        assert_eq!(text_of(&responses, id), "abcdef");
    }
}

#[tokio::test]
async fn faults_have_the_protocols_codes() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.pace(Duration::from_millis(100));
    let unknown = ModelInferRequest { model_name: "other".into(), ..ask("", &[]) };
    let version = ModelInferRequest { model_version: "2".into(), ..ask("", &[]) };
    for (request, code, start) in [
        (unknown, Code::NotFound, "model \"other\" is not served here"),
        (version, Code::NotFound, "model \"test-model/versions/2\" is not served here"),
        (ask("", &[("max_tokens", int(0))]), Code::InvalidArgument, "max_tokens: expected an integer in [1"),
        (
            ask("", &[("triton_x", int(0))]),
            Code::InvalidArgument,
            "parameters.triton_x: the name is reserved",
        ),
        (ask("", &[("timeout", int(20_000))]), Code::DeadlineExceeded, "the request's total deadline"),
        (
            ModelInferRequest { inputs: vec![], raw_input_contents: vec![], ..ask("", &[]) },
            Code::InvalidArgument,
            "inputs: ",
        ),
    ] {
        let status = client(&cluster).model_infer(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().starts_with(start), "{status}");
    }
    cluster.script.trouble("r0", 0, Trouble::Fail(proto::Error::new(proto::Reason::QueueFull, "full")));
    let status = client(&cluster).model_infer(ask("", &[])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
}

#[tokio::test]
async fn messages_may_be_compressed() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    for coding in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
        let mut client =
            client(&cluster).send_compressed(coding).accept_compressed(CompressionEncoding::Gzip);
        let response = client.model_infer(ask("a", &[])).await.unwrap().into_inner();
        assert_eq!(texts(&response, "text_output"), ["xok"], "{coding}");
    }
}

#[tokio::test]
async fn the_server_says_what_it_is() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let mut client = client(&cluster);
    assert!(client.server_live(ServerLiveRequest {}).await.unwrap().into_inner().live);
    assert!(client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready);
    for (name, version, ready) in
        [(MODEL, "", true), (MODEL, "1", true), (MODEL, "2", false), ("other", "", false)]
    {
        let request = ModelReadyRequest { name: name.into(), version: version.into() };
        assert_eq!(client.model_ready(request).await.unwrap().into_inner().ready, ready, "{name} {version}");
    }
    let server = client.server_metadata(ServerMetadataRequest {}).await.unwrap().into_inner();
    assert_eq!(server.name, "baton");
    let request = ModelMetadataRequest { name: MODEL.into(), version: String::new() };
    let metadata = client.model_metadata(request).await.unwrap().into_inner();
    assert_eq!((metadata.versions, metadata.inputs[0].name.as_str()), (vec!["1".to_owned()], "text_input"));
    let request = ModelConfigRequest { name: MODEL.into(), version: "1".into() };
    let config = client.model_config(request).await.unwrap().into_inner().config.unwrap();
    assert!(config.model_transaction_policy.unwrap().decoupled);
    assert_eq!(config.input[0].data_type(), DataType::TypeString);
    let request = RepositoryIndexRequest { repository_name: String::new(), ready: true };
    let index = client.repository_index(request).await.unwrap().into_inner();
    assert_eq!((index.models[0].name.as_str(), index.models[0].state.as_str()), (MODEL, "READY"));

    client.model_infer(ask("a", &[])).await.unwrap();
    for name in ["", MODEL] {
        let request = ModelStatisticsRequest { name: name.into(), version: String::new() };
        let statistics = client.model_statistics(request).await.unwrap().into_inner();
        assert_eq!(statistics.model_stats[0].inference_count, 1);
        assert_eq!(statistics.model_stats[0].inference_stats.unwrap().success.unwrap().count, 1);
    }
    let request = ModelStatisticsRequest { name: "other".into(), version: String::new() };
    assert_eq!(client.model_statistics(request).await.unwrap_err().code(), Code::NotFound);
    let request = ModelMetadataRequest { name: "other".into(), version: String::new() };
    assert_eq!(client.model_metadata(request).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn what_the_protocol_has_beyond_is_unimplemented_by_name() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    macro_rules! refused {
        ($($call:ident $request:ident $name:literal),* $(,)?) => {$(
            let status = client(&cluster).$call($request::default()).await.unwrap_err();
            assert_eq!(status.code(), Code::Unimplemented);
            let start = concat!($name, " is not supported: ");
            assert!(status.message().starts_with(start), "{status}");
        )*};
    }
    refused!(
        repository_model_load RepositoryModelLoadRequest "RepositoryModelLoad",
        repository_model_unload RepositoryModelUnloadRequest "RepositoryModelUnload",
        system_shared_memory_status SystemSharedMemoryStatusRequest "SystemSharedMemoryStatus",
        system_shared_memory_register SystemSharedMemoryRegisterRequest "SystemSharedMemoryRegister",
        system_shared_memory_unregister SystemSharedMemoryUnregisterRequest "SystemSharedMemoryUnregister",
        cuda_shared_memory_status CudaSharedMemoryStatusRequest "CudaSharedMemoryStatus",
        cuda_shared_memory_register CudaSharedMemoryRegisterRequest "CudaSharedMemoryRegister",
        cuda_shared_memory_unregister CudaSharedMemoryUnregisterRequest "CudaSharedMemoryUnregister",
        trace_setting TraceSettingRequest "TraceSetting",
        log_settings LogSettingsRequest "LogSettings",
    );
}

#[tokio::test]
async fn a_drain_finishes_what_runs_and_ends_streams_without_work() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("abcdef");
    cluster.script.pace(Duration::from_millis(20));
    let (send, mut responses) = open(&cluster).await;
    let (_idle, mut silent) = open(&cluster).await;
    send.send(streaming("1")).await.unwrap();
    responses.message().await.unwrap().unwrap();
    cluster.context.shutdown.drain();
    send.send(streaming("2")).await.unwrap();
    let mut rest = Vec::new();
    let status = loop {
        match responses.message().await {
            Ok(Some(response)) => rest.push(response),
            Ok(None) => panic!("the client has not sent its last"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::Unavailable);
    let refused: Vec<_> = rest.iter().filter(|response| !response.error_message.is_empty()).collect();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].error_message, "the server is shutting down");
    assert_eq!(refused[0].infer_response.as_ref().unwrap().id, "2");
    let served: Vec<_> = rest.into_iter().filter(|response| response.error_message.is_empty()).collect();
    assert_eq!(text_of(&served, "1"), "bcdef");
    assert_eq!(silent.message().await.unwrap_err().code(), Code::Unavailable);
    let Cluster { gateway, .. } = cluster;
    tokio::time::timeout(Duration::from_secs(5), gateway.finished()).await.expect("the drain ends");
}
