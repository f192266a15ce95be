//! The watermark as clients get it: 200 tokens of a real model over HTTP tell with the server's key, and those that no
//! client asked to be marked do not.

use baton_tests::cluster::{Cluster, MODEL, Service, Settings};
use engine::watermark::detect;
use serde_json::{Value, json};

const KEY: u64 = 271_828_182_845_904_523;
const GAMMA: f32 = 0.25;

async fn tokens(http: &reqwest::Client, port: u16, marked: bool) -> Vec<u32> {
    let body = json!({
        "parameters": {
            "watermark": marked, "max_tokens": 200, "ignore_eos": true, "temperature": 1, "seed": 11
        },
        "inputs": [{
            "name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Once upon a time, there was"]
        }],
        "outputs": [{ "name": "output_ids" }]
    });
    let answer =
        http.post(format!("http://127.0.0.1:{port}/v2/models/{MODEL}/infer")).json(&body).send().await;
    let answer: Value = answer.expect("the server answers").json().await.expect("JSON");
    let ids = answer["outputs"][0]["data"].as_array().unwrap_or_else(|| panic!("no ids in {answer}"));
    ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_tokens_of_an_answer_tell_with_the_key_alone() {
    let serve = format!("--placement split --watermark-key {KEY} --watermark-gamma {GAMMA}");
    let serve = serve.split_whitespace().map(str::to_owned).collect();
    let mut cluster = Cluster::new(Settings { serve, ..Settings::default() });
    cluster.spawn((Service::Serve, 0));
    cluster.wait_ready().await;
    let (http, port) = (reqwest::Client::new(), cluster.http_port());
    let (marked, plain) = tokio::join!(tokens(&http, port, true), tokens(&http, port, false));
    assert_eq!((marked.len(), plain.len()), (200, 200));
    let z = |key, text: &[u32]| detect(key, GAMMA, text).z;
    assert!(z(KEY, &marked) > 4.0, "{}", z(KEY, &marked));
    assert!(z(KEY, &plain).abs() < 3.0, "{}", z(KEY, &plain));
    for other in [KEY + 1, 0] {
        assert!(z(other, &marked).abs() < 3.0, "key {other}: {}", z(other, &marked));
    }
}
