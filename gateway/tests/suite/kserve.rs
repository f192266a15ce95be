//! KServe's protocol over HTTP: tensors in JSON and as binary data, what the server says of itself.

use std::io::Write;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{ABC, Cluster, DEF, MODEL, Trouble};

const LENGTH: &str = "inference-header-content-length";

fn infer() -> String {
    format!("/v2/models/{MODEL}/infer")
}

fn text(options: &Value) -> Value {
    json!({
        "id": "a", "parameters": options,
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["I live"]}]
    })
}

/// JSON and what follows it, as a request.
async fn post_binary(cluster: &Cluster, json: &Value, binary: &[u8]) -> reqwest::Response {
    let mut body = json.to_string().into_bytes();
    let length = body.len();
    body.extend_from_slice(binary);
    cluster.client().post(cluster.url(&infer())).header(LENGTH, length).body(body).send().await.unwrap()
}

async fn json_of(cluster: &Cluster, path: &str) -> (u16, Value) {
    let response = cluster.get(path).await;
    let status = response.status().as_u16();
    (status, serde_json::from_str(&response.text().await.unwrap()).unwrap_or(Value::Null))
}

#[tokio::test]
async fn text_goes_in_and_out() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says(" in Paris");
    // Whoever does not ask to leave the input out gets it, as these servers have it.
    let (status, body) = cluster.answer(&infer(), &text(&json!({"max_tokens": 3}))).await;
    assert_eq!(status, 200);
    assert_eq!(
        body,
        format!(
            "{{\"id\":\"a\",\"model_name\":\"{MODEL}\",\"model_version\":\"1\",\"outputs\":[{{\"name\":\
             \"text_output\",\"datatype\":\"BYTES\",\"shape\":[1],\"data\":[\"I live in\"]}}]}}"
        )
    );
    let options = json!({
        "exclude_input_in_output": true, "return_finish_reason": true, "return_num_input_tokens": true,
        "return_num_output_tokens": true, "return_cumulative_logprob": true, "temperature": 0.5, "seed": 7
    });
    let (_, body) = cluster.answer(&infer(), &text(&options)).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    let outputs: Vec<(&Value, &Value)> = answer["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|output| (&output["name"], &output["data"]))
        .collect();
    assert_eq!(
        outputs,
        [
            (&json!("text_output"), &json!([" in Paris"])),
            (&json!("finish_reason"), &json!(["stop"])),
            (&json!("cumulative_logprob"), &json!([-5.0])),
            (&json!("num_input_tokens"), &json!([6])),
            (&json!("num_output_tokens"), &json!([10])),
        ]
    );
    let seen = cluster.script.take_seen();
    assert_eq!(seen[0].1.sampling.temperature, 0.0);
    assert_eq!((seen[1].1.sampling.temperature, seen[1].1.sampling.seed), (0.5, 7));
}

#[tokio::test]
async fn options_come_as_tensors_too() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("abcdef");
    let one = |name: &str, datatype: &str, data: Value| json!({"name": name, "datatype": datatype, "shape": [1, 1], "data": [data]});
    let body = json!({"inputs": [
        one("text_input", "BYTES", json!("x")),
        one("max_tokens", "INT32", json!(5)),
        one("temperature", "FP32", json!(0.5)),
        one("exclude_input_in_output", "BOOL", json!(true)),
        one("sampling_parameters", "BYTES", json!("{\"top_k\": \"3\", \"stop\": \"d\"}")),
        {"name": "bad_words", "datatype": "BYTES", "shape": [1, 2], "data": ["q", "zz"]}
    ]});
    let (status, body) = cluster.answer(&infer(), &body).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &answer["outputs"][0]["data"]), (200, &json!(["abc"])));
    assert_eq!(answer["id"].as_str().unwrap().len(), 32, "every request has a name");
    let generation = &cluster.script.take_seen()[0].1;
    assert_eq!((generation.sampling.top_k, generation.stop.max_tokens), (Some(3), 5));
    assert!(generation.sampling.bad_words.contains(&b"zz".map(u32::from).to_vec()));
}

#[tokio::test]
async fn several_sequences_are_several_elements() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let options =
        json!({"n": 3, "temperature": 1, "exclude_input_in_output": true, "return_num_output_tokens": true});
    let (_, body) = cluster.answer(&infer(), &text(&options)).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(answer["outputs"][0]["shape"], json!([3]));
    assert_eq!(answer["outputs"][0]["data"], json!(["ok", "ok", "ok"]));
    assert_eq!(answer["outputs"][1]["data"], json!([3, 3, 3]));
}

#[tokio::test]
async fn tokens_go_in_and_out() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.goes_on_with(&[ABC, DEF]);
    // The documented example, but for its ids.
    let body = json!({
        "id": "42",
        "inputs": [{"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [72, 105, 33]}],
        "outputs": [{"name": "output0"}],
        "parameters": {
            "temperature": 0.5, "top_k": 10, "top_p": 0.95, "do_sample": true, "seed": null,
            "repetition_penalty": 1.03, "max_new_tokens": 2, "watermark": true, "priority": 5,
            "timeout": 10_000_000
        }
    });
    let (status, body) = cluster.answer(&infer(), &body).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &answer["id"]), (200, &json!("42")));
    assert_eq!(
        answer["outputs"],
        json!([{"name": "output0", "datatype": "UINT32", "shape": [1, 2], "data": [ABC, DEF]}])
    );
    let generation = &cluster.script.take_seen()[0].1;
    assert_eq!(generation.tokens, [72, 105, 33]);
    assert!(generation.sampling.watermark.is_some());
}

#[tokio::test]
async fn binary_data_goes_in_and_out() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("é");
    let json = json!({
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
            {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "parameters": {"binary_data_size": 1}}
        ],
        "outputs": [
            {"name": "text_output", "parameters": {"binary_data": true}}, {"name": "num_input_tokens"},
            {"name": "output0", "parameters": {"binary_data": true}}
        ]
    });
    let response = post_binary(&cluster, &json, b"\x02\0\0\0Hi\x01").await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "application/octet-stream");
    let length: usize = response.headers()[LENGTH].to_str().unwrap().parse().unwrap();
    let body = response.bytes().await.unwrap();
    let answer: Value = serde_json::from_slice(&body[..length]).unwrap();
    assert_eq!(answer["outputs"][0]["parameters"]["binary_data_size"], 6);
    assert_eq!(answer["outputs"][1]["data"], json!([2]));
    assert_eq!(&body[length..], b"\x02\0\0\0\xc3\xa9\xc3\0\0\0\xa9\0\0\0\x01\x01\0\0");

    let mut all = text(&json!({"binary_data_output": true, "exclude_input_in_output": true}));
    all["outputs"] = json!([{"name": "text_output"}]);
    let response = cluster.post(&infer(), &all).await;
    assert!(response.headers().contains_key(LENGTH));
    assert!(response.bytes().await.unwrap().ends_with(b"\x02\0\0\0\xc3\xa9"));

    // The whole body is the text.
    let request = cluster.client().post(cluster.url(&infer())).header(LENGTH, 0).body("Hi");
    let answer: Value = request.send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["outputs"][0]["data"], json!(["Hié"]));
}

#[tokio::test]
async fn bodies_may_be_compressed() {
    let cluster = Cluster::start(&["r0"], |config| config.body_bytes_max = 2000).await;
    cluster.script.says("ok");
    let gzip = |text: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    };
    let post = |body: Vec<u8>, coding: &'static str| {
        cluster.client().post(cluster.url(&infer())).header("content-encoding", coding).body(body).send()
    };
    let body = text(&json!({})).to_string();
    assert_eq!(post(gzip(body.as_bytes()), "gzip").await.unwrap().status(), 200);
    assert_eq!(post(gzip(&vec![b' '; 2001]), "gzip").await.unwrap().status(), 413);
    assert_eq!(post(b"junk".to_vec(), "gzip").await.unwrap().status(), 422);
    assert_eq!(post(b"junk".to_vec(), "br").await.unwrap().status(), 415);
}

#[tokio::test]
async fn faults_name_the_field_and_keep_the_server_alive() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let input = |shape: Value, data: Value| json!({"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": shape, "data": data}]});
    for (body, start) in [
        (json!({}), "inputs: is required"),
        (input(json!([-1]), json!(["x"])), "inputs[0].shape: expected dimensions of at least 0, got -1"),
        (input(json!([1_u64 << 62, 4]), json!(["x"])), "inputs[0].shape: expected fewer elements"),
        (input(json!([2]), json!(["x"])), "inputs[0].data: expected 2 elements by the shape, got 1"),
        (input(json!([1]), json!([""])), "text_input: must not be empty"),
        (text(&json!({"temperature": -1})), "temperature: expected a number of at least 0"),
        (text(&json!({"triton_x": 1})), "parameters.triton_x: the name is reserved"),
        (text(&json!({"priority": -1})), "parameters.priority: expected an integer"),
        (text(&json!({"stop_words": ["", ""]})), "stop_words: expected strings of at least 1 character"),
    ] {
        let (status, answer) = cluster.answer(&infer(), &body).await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let error = answer["error"].as_str().unwrap();
        assert!(status == 422 && error.starts_with(start), "{body}: {status} {error}");
        assert_eq!(answer["error_type"], "Input Validation Error");
    }
    let mut twice = text(&json!({}));
    twice["outputs"] = json!([{"name": "text_output"}, {"name": "text_output"}]);
    let (status, answer) = cluster.answer(&infer(), &twice).await;
    assert!(status == 422 && answer.contains("is given twice"), "{answer}");
    let response = post_binary(&cluster, &twice, b"extra").await;
    assert_eq!(response.status(), 422);
    let deep = format!("{{\"inputs\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    let response = cluster.client().post(cluster.url(&infer())).body(deep).send().await.unwrap();
    assert_eq!(response.status(), 422);
    let request = cluster.client().post(cluster.url(&infer())).header(LENGTH, 1000).body("{}");
    assert_eq!(request.send().await.unwrap().status(), 422);

    let (status, answer) = cluster.answer("/v2/models/other/infer", &json!({})).await;
    assert_eq!(status, 404);
    assert!(answer.contains("model \\\"other\\\" is not served here"), "{answer}");
    let (status, _) =
        cluster.answer(&format!("/v2/models/{MODEL}/versions/2/infer"), &text(&json!({}))).await;
    assert_eq!(status, 404);
    let (status, _) = cluster
        .answer(&format!("/v2/models/{MODEL}/versions/1/infer"), &text(&json!({"max_tokens": 1})))
        .await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn a_strict_server_refuses_as_triton_does() {
    let cluster = Cluster::start(&["r0"], |config| config.triton_strict = true).await;
    cluster.script.says("ok");
    assert_eq!(cluster.answer(&infer(), &json!({})).await.0, 400);
    assert_eq!(cluster.answer(&format!("/v2/models/{MODEL}/generate"), &json!({})).await.0, 400);
    assert_eq!(cluster.answer("/generate", &json!({})).await.0, 422, "not a route of Triton's");
    let mut unnamed = text(&json!({}));
    unnamed.as_object_mut().unwrap().remove("id");
    let (_, body) = cluster.answer(&infer(), &unnamed).await;
    assert!(body.starts_with("{\"model_name\""), "nothing that was not given: {body}");
}

#[tokio::test]
async fn many_small_chunks_are_one_body() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let body = format!("{}{}", " ".repeat(70_000), text(&json!({})));
    let mut socket = TcpStream::connect(cluster.gateway.http_address()).await.unwrap();
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n",
        infer()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    let chunks: String = body.chars().map(|char| format!("1\r\n{char}\r\n")).collect();
    socket.write_all(chunks.as_bytes()).await.unwrap();
    socket.write_all(b"0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

#[tokio::test]
async fn the_timeout_is_in_microseconds() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.pace(Duration::from_millis(100));
    let (status, answer) = cluster.answer(&infer(), &text(&json!({"timeout": 50_000}))).await;
    assert_eq!(status, 408, "{answer}");
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_inference() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.pace(Duration::from_millis(20));
    let body = text(&json!({"max_tokens": 40}));
    let path = infer();
    let call = tokio::time::timeout(Duration::from_millis(200), cluster.answer(&path, &body));
    assert!(call.await.is_err(), "the client left before the end");
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_request_can_be_stopped_by_its_name() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.pace(Duration::from_millis(20));
    let body = text(&json!({"max_tokens": 50, "return_finish_reason": true}));
    let stop = async {
        let path = format!("/v2/models/{MODEL}/stopInfer");
        while cluster.answer(&path, &json!({"id": "a"})).await.0 != 200 || cluster.script.open() > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let path = infer();
    let ((status, _), ()) = tokio::join!(cluster.answer(&path, &body), stop);
    // With its text so far, or without any when it had none.
    assert!(matches!(status, 200 | 424), "{status}");
}

#[tokio::test]
async fn the_server_says_what_it_is() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let (status, server) = json_of(&cluster, "/v2").await;
    assert_eq!((status, &server["name"]), (200, &json!("baton")));
    assert!(server["extensions"].as_array().unwrap().contains(&json!("binary_tensor_data")));
    for path in [format!("/v2/models/{MODEL}"), format!("/v2/models/{MODEL}/versions/1")] {
        let (status, metadata) = json_of(&cluster, &path).await;
        assert_eq!((status, &metadata["versions"]), (200, &json!(["1"])));
        assert_eq!(metadata["inputs"][0]["name"], "text_input");
        let (status, config) = json_of(&cluster, &format!("{path}/config")).await;
        assert_eq!((status, &config["max_batch_size"]), (200, &json!(0)));
        assert_eq!(cluster.get(&format!("{path}/ready")).await.status(), 200);
    }
    for path in
        ["/v2/models/other", "/v2/models/other/ready", "/v2/models/other/config", "/v2/models/other/stats"]
    {
        let (status, answer) = json_of(&cluster, path).await;
        assert_eq!((status, &answer["error"]), (404, &json!("model \"other\" is not served here")), "{path}");
    }
    assert_eq!(cluster.get(&format!("/v2/models/{MODEL}/versions/2/ready")).await.status(), 404);
    let (status, index) = cluster.answer("/v2/repository/index", &json!({})).await;
    assert_eq!(status, 200);
    assert_eq!(
        serde_json::from_str::<Value>(&index).unwrap(),
        json!([{"name": MODEL, "version": "1", "state": "READY", "reason": ""}])
    );
}

#[tokio::test]
async fn what_the_protocol_has_beyond_is_refused_by_name() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    for path in [
        "/v2/systemsharedmemory/status",
        "/v2/systemsharedmemory/region/x/register",
        "/v2/cudasharedmemory/region/x/unregister",
        "/v2/repository/models/m/load",
        "/v2/repository/models/m/unload",
        "/v2/trace/setting",
        "/v2/models/m/trace/setting",
        "/v2/logging",
    ] {
        let (status, answer) = cluster.answer(path, &json!({})).await;
        assert!(status == 501 && answer.contains("\"error\":\"not supported: "), "{path}: {status} {answer}");
        assert_eq!(cluster.get(path).await.status(), 501, "{path}");
    }
}

#[tokio::test]
async fn statistics_count_what_was_served() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let path = format!("/v2/models/{MODEL}/stats");
    let (_, before) = json_of(&cluster, &path).await;
    assert_eq!(before["model_stats"][0]["inference_count"], 0, "a probe is no inference");
    for _ in 0..2 {
        cluster.answer(&infer(), &text(&json!({}))).await;
    }
    // Every API counts.
    cluster.answer("/generate", &json!({"prompt": "x"})).await;
    cluster.script.trouble("r0", 1, Trouble::Fail(proto::Error::new(proto::Reason::Internal, "broken")));
    assert_eq!(cluster.answer(&infer(), &text(&json!({}))).await.0, 500);
    let (_, all) = json_of(&cluster, "/v2/models/stats").await;
    let (status, stats) = json_of(&cluster, &path).await;
    assert_eq!((status, &stats), (200, &all));
    let model = &stats["model_stats"][0];
    assert_eq!((&model["inference_count"], &model["execution_count"]), (&json!(3), &json!(3)));
    let times = &model["inference_stats"];
    assert_eq!((&times["success"]["count"], &times["fail"]["count"]), (&json!(3), &json!(1)));
    let ns = |name: &str| times[name]["ns"].as_u64().unwrap();
    assert!(ns("queue") >= 3 * 40_000, "three first tokens that waited 40 µs");
    assert_eq!(ns("success"), ns("queue") + ns("compute_input") + ns("compute_infer"));
    assert!(model["last_inference"].as_u64().unwrap() > 1_600_000_000_000);
    assert_eq!(model["batch_stats"][0]["compute_infer"]["count"], 3);
}
