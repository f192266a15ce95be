//! Every API from a client's side, byte by byte.

use std::time::Duration;

use crate::support::bundle::END;
use crate::support::{ABC, Cluster, DEF, GH, MODEL};
use futures::StreamExt;
use proto::wire::generate_request::Prompt;
use proto::wire::{GenerateRequest, GenerateResponse, ListServedModelsRequest, SamplingParams, TokenIds};
use serde_json::{Value, json};

fn triton_stream() -> String {
    format!("/v2/models/{MODEL}/generate_stream")
}

fn triton_whole() -> String {
    format!("/v2/models/{MODEL}/generate")
}

/// The events of a stream of server-sent events, without their prefix.
fn events<'a>(body: &'a str, prefix: &str) -> Vec<&'a str> {
    let events = body.strip_suffix("\n\n").expect("a blank line at the end").split("\n\n");
    events.map(|event| event.strip_prefix(prefix).unwrap_or_else(|| panic!("{prefix}: {event}"))).collect()
}

/// The texts of a stream of `/generate`.
fn vllm_texts(body: &str) -> Vec<String> {
    let objects = body.strip_suffix('\0').expect("NUL at the end").split('\0');
    objects
        .map(|object| serde_json::from_str::<Value>(object).unwrap()["text"][0].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn triton_streams_an_event_per_token() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says(" in Paris");
    let body =
        json!({"id": "a123", "text_input": "I live", "parameters": {"details": true, "max_new_tokens": 3}});
    let response = cluster.post(&triton_stream(), &body).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let body = response.text().await.unwrap();
    let events = events(&body, "data:");
    assert_eq!(events.len(), 3, "{body}");
    let start = |text: &str, details: &str| {
        format!(
            "{{\"id\":\"a123\",\"model_name\":\"{MODEL}\",\"model_version\":null,\"text_output\":\"{text}\",\"details\":\
             {{{details},\"first_token_cost\":null,\"decode_cost\":null,\"batch_size\":1,\"queue_wait_time\":40}},\
             \"prefill_time\":"
        )
    };
    assert!(events[0].starts_with(&start(" ", "\"generated_tokens\":1")), "{}", events[0]);
    assert!(events[1].starts_with(&start("i", "\"generated_tokens\":2")), "{}", events[1]);
    assert!(
        events[2].starts_with(&start("n", "\"finish_reason\":\"length\",\"generated_tokens\":3")),
        "{}",
        events[2]
    );
    let first: Value = serde_json::from_str(events[0]).unwrap();
    assert!(first["prefill_time"].as_f64().unwrap() > 0.0 && first["decode_time"].is_null());
    let second: Value = serde_json::from_str(events[1]).unwrap();
    assert!(second["prefill_time"].is_null() && second["decode_time"].is_number());

    let seen = cluster.script.take_seen();
    assert_eq!(seen[0].1.tokens, b"I live".map(u32::from));
    assert_eq!(seen[0].1.stop.eos_ids, [END]);
    assert_eq!(seen[0].1.sampling.temperature, 0.0);
}

#[tokio::test]
async fn triton_answers_whole() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let (status, body) = cluster.answer(&triton_whole(), &json!({"id": "a", "text_input": "x"})).await;
    assert_eq!(status, 200);
    assert_eq!(
        body,
        format!("{{\"id\":\"a\",\"model_name\":\"{MODEL}\",\"model_version\":null,\"text_output\":\"ok\"}}")
    );
    let body = json!({"text_input": "x", "parameters": {"details": true}});
    let (_, body) = cluster.answer(&triton_whole(), &body).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(answer["id"].as_str().unwrap().len(), 32);
    // The token that ends the text counts; its own text is not shown.
    assert_eq!(answer["details"]["generated_tokens"], 3);
    assert_eq!(answer["details"]["finish_reason"], "eos_token");
    assert_eq!(answer["details"]["batch_size"], json!([1, 1, 1]));
}

#[tokio::test]
async fn a_moved_request_goes_on_behind_its_tokens() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("abcdef");
    let body = json!({
        "text_input": "2,120,121,97,98",
        "parameters": {"details": true, "max_new_tokens": 4, "firstTokenCost": 31, "decodeTime": [9]}
    });
    let request =
        cluster.client().post(cluster.url(&triton_stream())).header("is-recompute", "true").json(&body);
    let body = request.send().await.unwrap().text().await.unwrap();
    let events: Vec<Value> =
        events(&body, "data:").iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let texts: Vec<&str> = events.iter().map(|event| event["text_output"].as_str().unwrap()).collect();
    assert_eq!(texts, ["c", "d"]);
    assert_eq!(events[1]["details"]["generated_tokens"], 4);
    assert_eq!(events[1]["details"]["first_token_cost"], 31);
    assert!(events[1]["details"]["decode_cost"].as_u64().unwrap() >= 9);
    assert!(events[0]["prefill_time"].is_null() && events[0]["decode_time"].is_number());
    let generation = &cluster.script.take_seen()[0].1;
    assert_eq!((generation.prompt_len(), generation.generated), (2, 2));
}

#[tokio::test]
async fn vllm_streams_deltas_and_answers_with_the_prompt() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("'m the");
    let response = cluster.post("/generate", &json!({"prompt": "I", "stream": true, "temperature": 0})).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let body = response.text().await.unwrap();
    assert_eq!(vllm_texts(&body).concat(), "'m the");
    assert!(body.starts_with("{\"text\":[\"'\"]}\0{\"text\":[\"m\"]}\0"), "{body:?}");

    let (status, body) = cluster.answer("/generate", &json!({"prompt": "I", "model": "None"})).await;
    assert_eq!((status, body.as_str()), (200, "{\"text\":[\"I 'm the\"]}"));
    let (_, body) = cluster.answer("/generate", &json!({"prompt": [72, 105]})).await;
    assert_eq!(body, "{\"text\":[\"Hi 'm the\"]}");
    let seen = cluster.script.take_seen();
    assert_eq!(seen[1].1.sampling.temperature, 1.0);
    // Nobody gave a seed, so each request has its own.
    assert_ne!(seen[1].1.sampling.seed, seen[2].1.sampling.seed);
    assert_eq!(seen[1].1.stop.max_tokens, 16);
}

#[tokio::test]
async fn chat_streams_chunks_each_sent_on_its_own() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("Hi");
    let body = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": true,
        "stream_options": {"include_usage": true}, "seed": 5
    });
    let response = cluster.post("/v1/chat/completions", &body).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let chunks: Vec<String> = response
        .bytes_stream()
        .map(|chunk| String::from_utf8(chunk.unwrap().to_vec()).unwrap())
        .collect()
        .await;
    let body = chunks.concat();
    let events = events(&body, "data: ");
    assert_eq!(events.last(), Some(&"[DONE]"));
    let objects: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let deltas: Vec<&Value> = objects[..4].iter().map(|object| &object["choices"][0]["delta"]).collect();
    assert_eq!(
        deltas,
        [
            &json!({"role": "assistant", "content": ""}),
            &json!({"content": "H"}),
            &json!({"content": "i"}),
            &json!({})
        ]
    );
    assert_eq!(objects[3]["choices"][0]["finish_reason"], "stop");
    let rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n";
    let prompt_tokens =
        rendered.len() - 3 * "<|im_start|>".len() + 3 + "<|im_start|>".len() - "<|im_end|>".len();
    let usage = &objects[4]["usage"];
    let counts =
        ["prompt_tokens", "completion_tokens", "total_tokens"].map(|count| usage[count].as_u64().unwrap());
    assert_eq!(counts, [prompt_tokens as u64, 3, prompt_tokens as u64 + 3]);
    let generation = &cluster.script.take_seen()[0].1;
    assert_eq!(generation.tokens.len(), prompt_tokens);
    assert_eq!((generation.sampling.seed, generation.sampling.temperature), (5, 1.0));
    assert_eq!(generation.stop.max_tokens, 64 - prompt_tokens);
}

#[tokio::test]
async fn a_chat_answers_whole() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("Hi there");
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2});
    let (status, body) = cluster.answer("/v1/chat/completions", &body).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &answer["object"]), (200, &json!("chat.completion")));
    assert_eq!(answer["choices"][0]["message"]["content"], "Hi");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    assert_eq!(answer["system_fingerprint"], "fp_070707070707");
}

#[tokio::test]
async fn the_tokens_of_a_prompt_are_told_where_asked() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let chat =
        json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "return_token_ids": true});
    let (_, body) = cluster.answer("/v1/chat/completions", &chat).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    let computed = cluster.script.take_seen()[0].1.tokens.clone();
    assert_eq!(answer["prompt_token_ids"], json!(computed));
    for stream in [false, true] {
        let body =
            json!({"prompt": ["ab", "cd"], "max_tokens": 1, "echo": true, "logprobs": 0, "stream": stream});
        let (status, body) = cluster.answer("/v1/completions", &body).await;
        assert_eq!(status, 200);
        // Of its prompt's tokens the first is known by its id alone.
        for first in ["a", "c"] {
            assert!(body.contains(&format!("\"tokens\":[\"{first}\"")), "{body}");
        }
    }
}

#[tokio::test]
async fn a_stop_string_ends_the_text_wherever_tokens_are_cut_and_stops_the_router() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.goes_on_with(&[ABC, DEF, GH, u32::from(b'I'), u32::from(b'J'), u32::from(b'K')]);
    let body = |stream: bool, include: bool| {
        json!({"prompt": "x", "temperature": 0, "stop": ["EFGHI", "KK"], "stream": stream,
               "include_stop_str_in_output": include})
    };
    let (_, whole) = cluster.answer("/generate", &body(false, false)).await;
    assert_eq!(whole, "{\"text\":[\"x ABCD\"]}");
    let (_, stream) = cluster.answer("/generate", &body(true, false)).await;
    assert_eq!(vllm_texts(&stream), ["ABC", "D"]);
    let (_, whole) = cluster.answer("/generate", &body(false, true)).await;
    assert_eq!(whole, "{\"text\":[\"x ABCDEFGHI\"]}");
    cluster.until_idle().await;

    let chat = json!({"messages": [{"role": "user", "content": "x"}], "stop": "EFGHI"});
    let (_, body) = cluster.answer("/v1/chat/completions", &chat).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_stop_token_shows_only_when_asked_for() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.goes_on_with(&[ABC, DEF, GH]);
    for (include, text) in [(false, "x ABC"), (true, "x ABCDEF")] {
        let body = json!({"prompt": "x", "stop_token_ids": [DEF], "include_stop_str_in_output": include});
        let (_, body) = cluster.answer("/generate", &body).await;
        assert_eq!(body, json!({"text": [text]}).to_string());
    }
}

#[tokio::test]
async fn no_event_has_half_a_character() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let text = "🦜漢é\u{2028}";
    cluster.script.says(text);
    let (_, body) = cluster.answer("/generate", &json!({"prompt": "x", "stream": true})).await;
    assert_eq!(vllm_texts(&body), ["🦜", "漢", "é", "\u{2028}"]);
    assert!(!body.contains('\u{2028}'), "a line separator is escaped");
    let (_, body) = cluster.answer(&triton_stream(), &json!({"text_input": "x"})).await;
    let events = events(&body, "data:");
    assert_eq!(events.len(), text.len() + 1, "an event per token");
    let texts: String = events
        .iter()
        .map(|event| {
            serde_json::from_str::<Value>(event).unwrap()["text_output"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(texts, text);
    // What can become no character is shown as that, in both modes alike.
    cluster.script.goes_on_with(&[0x9c]);
    let (_, body) = cluster.answer("/generate", &json!({"prompt": "x", "max_tokens": 3})).await;
    assert_eq!(body, "{\"text\":[\"x \u{fffd}\u{fffd}\u{fffd}\"]}");
    let (_, body) =
        cluster.answer("/generate", &json!({"prompt": "x", "max_tokens": 3, "stream": true})).await;
    assert_eq!(vllm_texts(&body).concat(), "\u{fffd}\u{fffd}\u{fffd}");
}

#[tokio::test]
async fn models_are_listed() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let list: Value = cluster.get("/v1/models").await.json().await.unwrap();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], MODEL);
    let model: Value = cluster.get(&format!("/v1/models/{MODEL}")).await.json().await.unwrap();
    assert_eq!((&model["id"], &model["object"]), (&json!(MODEL), &json!("model")));
    let missing = cluster.get("/v1/models/a/b").await;
    assert_eq!(missing.status(), 404);
    let error: Value = missing.json().await.unwrap();
    assert_eq!(error["error"]["code"], "model_not_found");
    let served = cluster.grpc().list_served_models(ListServedModelsRequest {}).await.unwrap();
    assert_eq!(served.into_inner().models, [MODEL]);
}

#[tokio::test]
async fn any_model_s_name_is_taken_where_the_server_says_so() {
    let chat = json!({"model": "other", "messages": [{"role": "user", "content": "x"}]});
    for (accept_any_model, dialect, status) in [
        (None, gateway::Dialect::OpenAi, 404),
        (Some(true), gateway::Dialect::OpenAi, 200),
        (None, gateway::Dialect::Mlc, 200),
        (Some(false), gateway::Dialect::Mlc, 404),
    ] {
        let change = |config: &mut gateway::Config| {
            (config.accept_any_model, config.dialect) = (accept_any_model, dialect);
        };
        let cluster = Cluster::start(&["r0"], change).await;
        cluster.script.says("ok");
        let text = json!({"model": "other", "prompt": "x"});
        for (path, body) in [("/v1/chat/completions", &chat), ("/v1/completions", &text)] {
            assert_eq!(cluster.answer(path, body).await.0, status, "{path} {accept_any_model:?} {dialect:?}");
        }
    }
}

#[tokio::test]
async fn paths_may_lack_their_prefix_where_the_server_says_so() {
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    let text = json!({"prompt": "x"});
    for (aliases, status) in [(true, 200), (false, 404)] {
        let cluster = Cluster::start(&["r0"], |config| config.prefixless_aliases = aliases).await;
        cluster.script.says("ok");
        for (path, body) in [("/chat/completions", &chat), ("/completions", &text)] {
            for prefix in ["/v1", ""] {
                let (got, answer) = cluster.answer(&format!("{prefix}{path}"), body).await;
                assert_eq!(got, if prefix.is_empty() { status } else { 200 }, "{prefix}{path}: {answer}");
            }
        }
        for path in ["/models", &format!("/models/{MODEL}")] {
            assert_eq!(cluster.get(path).await.status(), status, "{path}");
        }
        // Their refusals are of the family either way.
        let refused = cluster.get("/completions").await;
        assert_eq!(refused.status(), if aliases { 405 } else { 404 });
        let error: Value = refused.json().await.unwrap();
        assert_eq!(error["error"]["type"], "invalid_request_error");
    }
}

async fn generate(cluster: &Cluster, request: GenerateRequest) -> Vec<GenerateResponse> {
    let stream = cluster.grpc().generate(request).await.unwrap().into_inner();
    stream.map(Result::unwrap).collect().await
}

#[tokio::test]
async fn grpc_takes_text_or_tokens() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let request = GenerateRequest {
        id: Some("g-1".into()),
        prompt: Some(Prompt::Text("Hi".into())),
        sampling: Some(SamplingParams { seed: Some(9), temperature: Some(0.5), ..SamplingParams::default() }),
        ..GenerateRequest::default()
    };
    let responses = generate(&cluster, request).await;
    assert_eq!(responses.iter().map(|r| r.text.as_str()).collect::<Vec<_>>(), ["o", "k", ""]);
    let last = responses.last().unwrap();
    assert_eq!((last.id.as_str(), last.model.as_str()), ("g-1", MODEL));
    assert_eq!((last.prompt_tokens, last.generated_tokens), (2, 3));
    assert_eq!(last.finish(), proto::wire::FinishReason::Eos);
    assert!(last.ttft_us.is_some() && responses[0].finish.is_none());
    assert_eq!(responses[0].tokens[0].id, u32::from(b'o'));

    let request = GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![72, 105] })),
        max_tokens: Some(1),
        ..GenerateRequest::default()
    };
    let responses = generate(&cluster, request).await;
    assert_eq!(responses.len(), 1);
    assert_eq!(responses[0].finish(), proto::wire::FinishReason::Length);
    let seen = cluster.script.take_seen();
    assert_eq!((seen[0].1.sampling.seed, seen[0].1.sampling.temperature), (9, 0.5));
    assert_eq!(seen[1].1.tokens, [72, 105]);

    let refused = cluster.grpc().generate(GenerateRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.message().starts_with("prompt: "), "{refused}");
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.pace(Duration::from_millis(20));
    for body in [
        json!({"prompt": "x", "max_tokens": 40, "stream": true}),
        json!({"prompt": "x", "max_tokens": 40, "stream": false}),
    ] {
        let call = tokio::time::timeout(Duration::from_millis(200), cluster.answer("/generate", &body));
        assert!(call.await.is_err(), "the client left before the end");
        cluster.until_idle().await;
    }
    assert_eq!(cluster.script.take_seen().len(), 2);
}

#[tokio::test]
async fn requests_are_counted_and_probes_apart() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    cluster.answer("/generate", &json!({"prompt": "x"})).await;
    cluster.answer("/generate", &json!({"prompt": ""})).await;
    cluster.answer("/generate", &json!({"inputs": "x"})).await;
    assert_eq!(cluster.get("/health/timed-601").await.status().as_u16(), 422);
    let page = node::metrics::render().unwrap();
    for line in [
        "baton_gateway_requests_total{dialect=\"vllm\",status=\"200\",probe=\"false\"}",
        "baton_gateway_requests_total{dialect=\"vllm\",status=\"422\",probe=\"false\"}",
        "baton_gateway_requests_total{dialect=\"tgi\",status=\"200\",probe=\"false\"}",
        "baton_gateway_requests_total{dialect=\"trial\",status=\"422\",probe=\"false\"}",
        "baton_gateway_requests_total{dialect=\"probe\",status=\"200\",probe=\"true\"}",
        "baton_gateway_requests{state=\"running\"}",
        "baton_gateway_ttft_seconds_count{probe=\"false\"}",
        "baton_gateway_ttft_seconds_count{probe=\"true\"}",
        "baton_gateway_itl_seconds_count{probe=\"false\"}",
    ] {
        assert!(page.contains(line), "{line} is missing in\n{page}");
    }
}

#[tokio::test]
async fn several_sequences_share_a_prompt() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("one");
    let body = json!({"prompt": "xy", "max_tokens": 12, "n": 3, "seed": 5});
    let (status, answer) = cluster.answer("/generate", &body).await;
    assert_eq!((status, answer.as_str()), (200, r#"{"text":["xy one","xy one","xy one"]}"#));
    let mut seen: Vec<_> = cluster.script.take_seen().into_iter().map(|(_, generation)| generation).collect();
    seen.sort_by_key(|generation| generation.sampling.sequence);
    let sequences: Vec<u32> = seen.iter().map(|generation| generation.sampling.sequence).collect();
    assert_eq!(sequences, [0, 1, 2]);
    assert!(seen.iter().all(|generation| generation.sampling.seed == 5));
    // The first is placed freely, the others where its KV is.
    let besides: Vec<Option<&str>> = seen
        .iter()
        .map(|generation| generation.beside.as_ref().map(|placed| placed.decode.as_str()))
        .collect();
    assert_eq!(besides, [None, Some("local:worker"), Some("local:worker")]);

    let streamed = json!({"prompt": "xy", "max_tokens": 12, "n": 2, "stream": true});
    let (status, answer) = cluster.answer("/generate", &streamed).await;
    let expected = "{\"text\":[\"o\",\"o\"]}\0{\"text\":[\"n\",\"n\"]}\0{\"text\":[\"e\",\"e\"]}\0";
    assert_eq!((status, answer.as_str()), (200, expected));
    cluster.until_idle().await;
}

#[tokio::test]
async fn the_likeliest_sequence_comes_first_unless_it_is_streamed() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    *cluster.script.firsts.lock().unwrap() = [(b'a', -2.0), (b'b', -0.25), (b'c', -1.0)]
        .map(|(letter, logprob)| (u32::from(letter), logprob))
        .to_vec();
    for sequences in [json!({"n": 3}), json!({"n": 1, "best_of": 3})] {
        let mut body = json!({"prompt": "x", "max_tokens": 1});
        body.as_object_mut().unwrap().extend(sequences.as_object().unwrap().clone());
        assert_eq!(cluster.answer("/generate", &body).await.1, r#"{"text":["x b","x c","x a"]}"#);
        body["stream"] = json!(true);
        assert_eq!(cluster.answer("/generate", &body).await.1, "{\"text\":[\"a\",\"b\",\"c\"]}\0");
    }
    let body = json!({"prompt": "x", "max_tokens": 1, "n": 1, "best_of": 3});
    let answer: Value = serde_json::from_str(&cluster.answer("/v1/completions", &body).await.1).unwrap();
    assert_eq!(answer["choices"].as_array().unwrap().len(), 1);
    assert_eq!(answer["choices"][0]["text"], "b");
    assert_eq!(answer["usage"]["completion_tokens"], 3);
}

#[tokio::test]
async fn what_is_served_is_described_without_the_internet() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let described: Value = cluster.get("/openapi.json").await.json().await.unwrap();
    for path in ["/v1/models", "/v1/chat/completions", "/generate", "/v2/models/{model}/generate_stream"] {
        assert!(described["paths"][path].is_object(), "{path}");
    }
    let page = cluster.get("/docs").await;
    assert_eq!(page.headers()["content-type"], "text/html; charset=utf-8");
    let page = page.text().await.unwrap();
    assert!(page.contains("openapi.json") && !page.contains("//"), "{page}");
}

#[tokio::test]
async fn a_client_that_leaves_takes_all_its_sequences_along() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("a long answer that is never read");
    cluster.script.pace(std::time::Duration::from_millis(20));
    let streamed = json!({"prompt": "x", "max_tokens": 32, "n": 4, "stream": true});
    let mut running = cluster.post("/generate", &streamed).await;
    assert!(running.chunk().await.unwrap().is_some());
    drop(running);
    cluster.until_idle().await;
    assert_eq!(cluster.script.open(), 0);
}

#[tokio::test]
async fn a_call_whose_first_sequence_is_refused_is_refused() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let full = proto::Error::new(proto::Reason::QueueFull, "no room");
    cluster.script.trouble("r0", 0, crate::support::Trouble::Fail(full));
    let (status, _) = cluster.answer("/generate", &json!({"prompt": "x", "n": 2})).await;
    assert_eq!(status, 429);
    assert_eq!(cluster.script.take_seen().len(), 1, "the others are not even asked for");
}

#[tokio::test]
async fn grpc_takes_chats_and_answers_with_several_sequences() {
    use proto::wire::{Chat, ChatMessage};
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("one");
    let message = ChatMessage { role: "user".into(), content: "Hi".into(), name: None };
    let chat = Chat { messages: vec![message], ..Chat::default() };
    let request = GenerateRequest {
        prompt: Some(Prompt::Chat(chat)),
        n: Some(2),
        stop: vec!["e".into()],
        ..GenerateRequest::default()
    };
    let mut stream = cluster.grpc().generate(request).await.unwrap().into_inner();
    let (mut texts, mut last) = ([String::new(), String::new()], Vec::new());
    while let Some(item) = stream.next().await {
        let item: GenerateResponse = item.unwrap();
        texts[item.sequence as usize].push_str(&item.text);
        if item.finish.is_some() {
            last.push((item.sequence, item.stop_string.unwrap(), item.generated_tokens));
        }
    }
    last.sort();
    assert_eq!(texts, ["on", "on"]);
    assert_eq!(last, [(0, "e".to_owned(), 3), (1, "e".to_owned(), 3)]);
}

#[tokio::test]
async fn a_session_reaches_the_router() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let chat =
        |user: Value| json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "user": user});
    let ask = async |body: Value, header: Option<&str>| {
        let mut request = cluster.client().post(cluster.url("/v1/chat/completions")).json(&body);
        if let Some(name) = header {
            request = request.header("x-session-id", name);
        }
        assert_eq!(request.send().await.unwrap().status(), 200);
        cluster.script.take_seen().pop().unwrap().1.session
    };
    assert_eq!(ask(chat(json!("ann")), None).await.as_deref(), Some("ann"));
    assert_eq!(ask(chat(json!("ann")), Some("talk 7")).await.as_deref(), Some("talk 7"));
    assert_eq!(ask(chat(Value::Null), None).await, None);
    assert_eq!(ask(chat(Value::Null), Some(&"x".repeat(1025))).await, None);
    let mut call = tonic::Request::new(proto::wire::GenerateRequest {
        prompt: Some(proto::wire::generate_request::Prompt::Text("x".into())),
        max_tokens: Some(2),
        ..proto::wire::GenerateRequest::default()
    });
    call.metadata_mut().insert("x-session-id", "grpc".parse().unwrap());
    let mut stream = cluster.grpc().generate(call).await.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}
    assert_eq!(cluster.script.take_seen().pop().unwrap().1.session.as_deref(), Some("grpc"));
}
