//! What other servers of these APIs were found to do wrong, tried here.

use std::time::{Duration, Instant};

use proto::wire::GenerateRequest;
use proto::wire::generate_request::Prompt;
use proto::wire::generation_service_client::GenerationServiceClient;
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::support::{Cluster, MODEL};

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";
const VLLM: &str = "/generate";

/// A route of the model in the path.
fn v2(operation: &str) -> String {
    format!("/v2/models/{MODEL}/{operation}")
}

/// Every route that generates over HTTP, with a body that asks for the continuation of a text.
fn routes(text: &str, stream: bool) -> [(String, Value); 5] {
    let triton = v2(if stream { "generate_stream" } else { "generate" });
    [
        (triton, json!({"text_input": text})),
        (VLLM.to_owned(), json!({"prompt": text, "stream": stream})),
        (COMPLETION.to_owned(), json!({"prompt": text, "stream": stream})),
        (CHAT.to_owned(), json!({"messages": [{"role": "user", "content": text}], "stream": stream})),
        (
            v2("infer"),
            json!({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}]}),
        ),
    ]
}

/// Sets a parameter where the route has its own.
fn with(path: &str, mut body: Value, name: &str, value: &Value) -> Value {
    if path.starts_with("/v2") {
        body["parameters"][name] = value.clone();
    } else {
        body[name] = value.clone();
    }
    body
}

/// The JSON objects of a stream, whatever stands around them.
fn objects(path: &str, body: &str) -> Vec<Value> {
    let parse = |text: &str| serde_json::from_str(text).unwrap_or_else(|fault| panic!("{fault}: {text:?}"));
    if path == VLLM {
        let objects = body.strip_suffix('\0').expect("each object ends with NUL");
        return objects.split('\0').map(parse).collect();
    }
    let events = body.strip_suffix("\n\n").expect("each event ends with a blank line").split("\n\n");
    let data: Vec<&str> = events.map(|event| event.strip_prefix("data:").expect("a line of data")).collect();
    assert!(data.iter().all(|data| data.lines().count() == 1), "an event is one line");
    let ends = data.last() == Some(&" [DONE]");
    assert_eq!(ends, path.starts_with("/v1"), "{body}");
    data[..data.len() - usize::from(ends)].iter().map(|data| parse(data)).collect()
}

/// The text of a stream.
fn text(path: &str, body: &str) -> String {
    let of = |object: &Value| {
        let places = [
            object.pointer("/text_output"),
            object.pointer("/text/0"),
            object.pointer("/choices/0/text"),
            object.pointer("/choices/0/delta/content"),
        ];
        places.into_iter().flatten().filter_map(Value::as_str).collect::<String>()
    };
    objects(path, body).iter().map(of).collect()
}

#[tokio::test]
async fn a_faulty_streaming_request_gets_a_plain_error() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    for (path, body) in routes(&"x".repeat(70), true) {
        let response = cluster.post(&path, &body).await;
        let expected = if path.starts_with("/v1") { 400 } else { 422 };
        assert_eq!(response.status().as_u16(), expected, "{path}");
        assert_eq!(response.headers()["content-type"], "application/json", "{path}");
        let error: Value = response.json().await.unwrap();
        let told = error["error"]["message"].as_str().or(error["error"].as_str()).expect("a message");
        assert!(told.contains("70 tokens") || path == CHAT, "{path}: {told}");
        assert!(told.contains("the model's context of 64"), "{path}: {told}");
    }
    for path in [CHAT, COMPLETION] {
        let (_, body) = routes("x", true).into_iter().find(|(known, _)| known == path).unwrap();
        let (status, answer) = cluster.answer(path, &with(path, body, "max_tokens", &json!(640))).await;
        assert!(status == 400 && answer.contains("640") && answer.contains("64 "), "{path}: {answer}");
    }
    assert!(cluster.script.take_seen().is_empty(), "nothing of this reached a router");
}

#[tokio::test]
async fn no_character_ends_a_line_too_early() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let odd = "a\u{2028}b\u{2029}c\u{85}d\0e\r\nf\n\ng\u{c}h\u{1e}";
    cluster.script.says(odd);
    for (path, body) in routes("x", true).into_iter().filter(|(path, _)| !path.ends_with("infer")) {
        let name = if path.starts_with("/v2") { "max_new_tokens" } else { "max_tokens" };
        let (status, answer) = cluster.answer(&path, &with(&path, body, name, &json!(32))).await;
        assert_eq!((status, text(&path, &answer).as_str()), (200, odd), "{path}");
        assert!(
            !answer.contains(['\u{2028}', '\u{2029}', '\u{85}', '\r', '\u{c}', '\u{1e}']),
            "{path}: {answer:?}"
        );
    }
    let echo = json!({"prompt": odd, "echo": true, "max_tokens": 32, "stream": true});
    let (status, answer) = cluster.answer(COMPLETION, &echo).await;
    assert_eq!((status, text(COMPLETION, &answer)), (200, odd.repeat(2)));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_streams_at_once_are_all_whole() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let said = "é🦜 forty tokens of a text for all";
    cluster.script.says(said);
    cluster.script.pace(Duration::from_millis(1));
    let streams = (0..32).map(|index| {
        let (path, body) = routes("x", true)[index % 4].clone();
        let name = if path.starts_with("/v2") { "max_new_tokens" } else { "max_tokens" };
        let body = with(&path, body, name, &json!(50));
        let cluster = &cluster;
        async move {
            // As many as fit where the chat's own words leave less.
            let body = if path == CHAT { with(&path, body, "max_tokens", &Value::Null) } else { body };
            let (status, answer) = cluster.answer(&path, &body).await;
            let came = text(&path, &answer);
            assert!(status == 200 && !came.is_empty() && said.starts_with(&came), "{path}: {answer}");
            assert!(came == said || path == CHAT, "{path}: {came}");
        }
    });
    futures::future::join_all(streams).await;
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_charset_is_no_reason_to_refuse() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    for kind in ["application/json; charset=utf-8", "application/json;charset=UTF-8", "text/plain"] {
        for (path, body) in routes("é", false) {
            let call = cluster.client().post(cluster.url(&path)).header("content-type", kind);
            let answer = call.body(body.to_string()).send().await.unwrap();
            assert_eq!(answer.status(), 200, "{path} {kind}");
        }
    }
}

#[tokio::test]
async fn half_a_surrogate_is_a_fault_of_the_client() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    for half in ["\\ud83d", "\\udd9c", "\\ud83d\\ud83d"] {
        for (path, body) in routes("HALF", false) {
            let call = cluster.client().post(cluster.url(&path)).body(body.to_string().replace("HALF", half));
            let status = call.send().await.unwrap().status().as_u16();
            assert_eq!(status, if path.starts_with("/v1") { 400 } else { 422 }, "{path} {half}");
        }
    }
    for (path, body) in routes("\u{1f99c}", false) {
        assert_eq!(cluster.answer(&path, &body).await.0, 200, "{path}");
    }
}

#[tokio::test]
async fn an_empty_stop_never_ends_an_answer() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    for stop in [json!(""), json!([""]), json!(["never", ""])] {
        for (path, body) in routes("x", false) {
            // Tensors bring stops to the last route; they are tried where it is.
            if path.ends_with("infer") {
                continue;
            }
            let (status, answer) = cluster.answer(&path, &with(&path, body, "stop", &stop)).await;
            let refused = if path.starts_with("/v1") { 400 } else { 422 };
            assert!(status == refused || (status == 200 && answer.contains("ok")), "{path} {stop}: {answer}");
        }
    }
}

#[tokio::test]
async fn numbers_beyond_reason_are_refused_or_served() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let started = Instant::now();
    for (name, value, refused) in [
        ("temperature", "1e300", true),
        ("temperature", "1e39", true),
        ("temperature", "-1", true),
        ("repetition_penalty", "0", true),
        ("repetition_penalty", "-1e300", true),
        ("top_p", "1e-12", false),
        ("top_p", "1e300", true),
        ("top_k", "1e300", true),
        ("seed", "1e300", true),
        ("presence_penalty", "1e300", true),
        ("max_tokens", "0", false),
    ] {
        for (path, body) in routes("x", false) {
            let value: Value = serde_json::from_str(value).unwrap();
            let (status, answer) = cluster.answer(&path, &with(&path, body, name, &value)).await;
            let fault = if path.starts_with("/v1") { 400 } else { 422 };
            assert!(
                status == fault || (status == 200 && !refused),
                "{path} {name} {value}: {status} {answer}"
            );
            assert!(status == 200 || answer.contains(name), "{path} {name} {value}: {answer}");
        }
    }
    // OpenAI's own bound; elsewhere any temperature will do.
    for path in [CHAT, COMPLETION] {
        let (_, body) = routes("x", false).into_iter().find(|(known, _)| known == path).unwrap();
        assert_eq!(
            cluster.answer(path, &with(path, body, "temperature", &json!(2.01))).await.0,
            400,
            "{path}"
        );
    }
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn deadlines_of_a_moment_leave_the_server_alive() {
    let cluster = Cluster::start(&["r0"], |config| config.grpc_listen = "127.0.0.1:0".to_owned()).await;
    cluster.script.pace(Duration::from_millis(20));
    let address = format!("http://{}", cluster.gateway.grpc_address());
    let client = GenerationServiceClient::connect(address).await.unwrap();
    let calls = (0..100).map(|index| {
        let (path, body) = routes("x", index % 2 == 0)[index % 5].clone();
        let (cluster, client) = (&cluster, client.clone());
        async move {
            let limit = Duration::from_millis(if index % 10 == 0 { 500 } else { 1 });
            let call = cluster.client().post(cluster.url(&path)).timeout(limit).json(&body);
            let answer = async { call.send().await?.text().await };
            let (_, code) = tokio::join!(answer, by_grpc(client, limit));
            assert!(code != Some(tonic::Code::Internal), "a deadline is no failure of the server's");
        }
    });
    futures::future::join_all(calls).await;
    cluster.until_idle().await;
    cluster.script.says("ok");
    cluster.script.pace(Duration::ZERO);
    for (path, body) in routes("x", false) {
        assert_eq!(cluster.answer(&path, &body).await.0, 200, "{path}");
    }
}

/// A call with a deadline that its metadata bears; gives its code if it failed.
async fn by_grpc(mut client: GenerationServiceClient<Channel>, limit: Duration) -> Option<tonic::Code> {
    let prompt = Some(Prompt::Text("x".into()));
    let mut request = tonic::Request::new(GenerateRequest { prompt, ..GenerateRequest::default() });
    request.set_timeout(limit);
    let mut items = match client.generate(request).await {
        Ok(items) => items.into_inner(),
        Err(status) => return Some(status.code()),
    };
    loop {
        match items.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(status) => return Some(status.code()),
        }
    }
}

#[tokio::test]
async fn json_nested_without_end_is_refused_on_every_route() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let deep = [
        format!("{}{}", "[".repeat(10_000), "]".repeat(10_000)),
        format!("{}1{}", "{\"a\":".repeat(10_000), "}".repeat(10_000)),
        "[".repeat(1_000_000),
    ];
    for deep in &deep {
        for (path, body) in routes("x", false) {
            // As the body, as a field that is read, and as one that nobody knows.
            let known = body.to_string().replace("\"x\"", deep);
            let unknown = format!("{{\"unknown\":{deep},{}", &body.to_string()[1..]);
            for body in [deep, &known, &unknown] {
                let call = cluster.client().post(cluster.url(&path)).body(body.clone()).send();
                let status = call.await.unwrap().status().as_u16();
                let refused = if path.starts_with("/v1") { 400 } else { 422 };
                // The last route passes over what nobody knows, without going down into it.
                let passed = status == 200 && path.ends_with("infer") && body == &unknown;
                assert!(status == refused || passed, "{path}: {status}");
            }
        }
    }
    for (path, body) in routes("x", false) {
        assert_eq!(cluster.answer(&path, &body).await.0, 200, "{path}");
    }
}
