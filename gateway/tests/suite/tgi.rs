//! TGI's routes from a client's side, byte by byte.

use proto::{Error, Reason};
use serde_json::{Value, json};

use crate::support::{Cluster, MODEL, Trouble};

/// The events of a stream, each with its text as it came.
fn events(body: &str) -> Vec<Value> {
    let events = body.strip_suffix("\n\n").expect("a blank line at the end").split("\n\n");
    events.map(|event| serde_json::from_str(event.strip_prefix("data:").expect("data")).unwrap()).collect()
}

#[tokio::test]
async fn a_body_with_inputs_is_answered_in_tgis_form() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let (status, body) = cluster.answer("/generate", &json!({"inputs": "x"})).await;
    assert_eq!((status, body.as_str()), (200, "{\"generated_text\":\"ok\"}"));
    let (status, body) = cluster.answer("/", &json!({"inputs": "x"})).await;
    assert_eq!((status, body.as_str()), (200, "[{\"generated_text\":\"ok\"}]"));
    let full = json!({"inputs": "x", "parameters": {"return_full_text": true}, "model": MODEL});
    let (_, body) = cluster.answer("/", &full).await;
    assert_eq!(body, "[{\"generated_text\":\"xok\"}]");
    let detailed = json!({"inputs": "x", "parameters": {"details": true, "max_new_tokens": 2, "seed": 7}});
    let (_, body) = cluster.answer("/generate", &detailed).await;
    assert_eq!(
        body,
        "{\"generated_text\":\"ok\",\"details\":{\"finish_reason\":\"length\",\"generated_tokens\":2,\"seed\":7,\
         \"prefill\":[],\"tokens\":[{\"id\":111,\"text\":\"o\",\"logprob\":-0.5,\"special\":false},\
         {\"id\":107,\"text\":\"k\",\"logprob\":-0.5,\"special\":false}]}}"
    );
    let seen = cluster.script.take_seen();
    assert_eq!(seen[0].1.stop.max_tokens, 20);
    assert_eq!((seen[3].1.sampling.seed, seen[3].1.sampling.temperature), (7, 1.0));
}

#[tokio::test]
async fn a_stream_has_an_event_per_token_and_the_text_with_the_last() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("Hi");
    let body = json!({"inputs": "x", "parameters": {"details": true, "seed": 7}, "stream": true});
    let mut streams = Vec::new();
    for path in ["/generate_stream", "/generate", "/"] {
        let response = cluster.post(path, &body).await;
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        streams.push(response.text().await.unwrap());
    }
    assert_eq!(
        streams[0],
        "data:{\"index\":1,\"token\":{\"id\":72,\"text\":\"H\",\"logprob\":-0.5,\"special\":false},\
         \"generated_text\":null,\"details\":null}\n\n\
         data:{\"index\":2,\"token\":{\"id\":105,\"text\":\"i\",\"logprob\":-0.5,\"special\":false},\
         \"generated_text\":null,\"details\":null}\n\n\
         data:{\"index\":3,\"token\":{\"id\":257,\"text\":\"<|im_end|>\",\"logprob\":-0.5,\"special\":true},\
         \"generated_text\":\"Hi\",\"details\":{\"finish_reason\":\"eos_token\",\"generated_tokens\":3,\"seed\":7,\
         \"input_length\":1}}\n\n"
    );
    assert!(streams.iter().all(|stream| *stream == streams[0]));
}

#[tokio::test]
async fn a_stop_string_ends_the_text_and_is_its_last_part() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("one, two, three");
    let body = |stream: bool| json!({"inputs": "x", "parameters": {"stop": ["two", "zz"]}, "stream": stream});
    let (_, whole) = cluster.answer("/generate", &body(false)).await;
    assert_eq!(whole, "{\"generated_text\":\"one, two\"}");
    let (_, stream) = cluster.answer("/generate", &body(true)).await;
    let events = events(&stream);
    let texts: String = events.iter().map(|event| event["token"]["text"].as_str().unwrap()).collect();
    assert_eq!(texts, "one, two");
    assert_eq!(events.last().unwrap()["generated_text"], "one, two");
    cluster.until_idle().await;
}

#[tokio::test]
async fn several_sequences_are_asked_for_and_the_likeliest_is_the_answer() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let body = json!({"inputs": "x", "parameters": {"best_of": 3, "do_sample": true, "details": true,
        "decoder_input_details": true, "top_n_tokens": 2}});
    let (status, answer) = cluster.answer("/generate", &body).await;
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((status, &answer["generated_text"]), (200, &json!("ok")));
    let details = &answer["details"];
    assert_eq!(details["best_of_sequences"].as_array().unwrap().len(), 2);
    assert_eq!(details["prefill"], json!([{"id": 120, "text": "x", "logprob": null}]));
    assert!(details["seed"].is_u64());
    let seen = cluster.script.take_seen();
    assert_eq!(seen.len(), 3);
    assert_eq!(seen[0].1.sampling.logprobs, Some(2));
    assert_eq!(seen[0].1.sampling.prompt_logprobs, Some(0));
}

#[tokio::test]
async fn a_fault_is_json_before_a_stream_and_an_event_within() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    for path in ["/generate", "/generate_stream", "/"] {
        let body = json!({"inputs": "x", "parameters": {"temperature": 0}, "stream": true});
        let (status, body) = cluster.answer(path, &body).await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &body["error_type"]), (422, &json!("Input Validation Error")));
        assert!(body["error"].as_str().unwrap().starts_with("parameters.temperature: "), "{body}");
        let (status, _) = cluster.answer(path, &json!({"inputs": "x", "model": "other"})).await;
        assert_eq!(status, 404, "{path}");
    }
    let (status, body) = cluster.answer("/generate", &json!({})).await;
    assert_eq!(status, 422);
    assert!(body.contains("prompt: is required; or inputs"), "{body}");
    cluster.script.says("abcdef");
    cluster.script.trouble("r0", 2, Trouble::Fail(Error::new(Reason::Internal, "a fault")));
    let (_, body) = cluster.answer("/generate_stream", &json!({"inputs": "x"})).await;
    let events = events(&body);
    assert_eq!(events.len(), 3, "{body}");
    assert_eq!(events[2], json!({"error": "a fault", "error_type": "Incomplete Generation"}));
}

#[tokio::test]
async fn the_server_says_what_it_serves() {
    let cluster = Cluster::start(&["r0"], |config| config.max_input_token_len = Some(40)).await;
    let told: Value = cluster.get("/info").await.json().await.unwrap();
    assert_eq!(told["model_id"], MODEL);
    assert_eq!((&told["max_input_tokens"], &told["max_total_tokens"]), (&json!(40), &json!(64)));
    assert_eq!(told["models"][0]["model_id"], MODEL);
}
