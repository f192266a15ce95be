//! What clients see when something is wrong: with the request, with a router, with time.

use std::time::Duration;

use crate::support::{Cluster, MODEL, Trouble};
use gateway::Config;
use proto::wire::GenerateRequest;
use proto::wire::generate_request::Prompt;
use proto::{Attempt, Error, Reason};
use serde_json::{Value, json};

fn streaming() -> Value {
    json!({"prompt": "x", "max_tokens": 12, "stream": true})
}

/// The stream of `/generate` as its texts, and its last object if that is an error.
fn read(body: &str) -> (String, Option<Value>) {
    let mut text = String::new();
    for object in body.split_terminator('\0') {
        let object: Value = serde_json::from_str(object).unwrap();
        if object.get("error").is_some() {
            return (text, Some(object));
        }
        text.push_str(object["text"][0].as_str().unwrap());
    }
    (text, None)
}

#[tokio::test]
async fn a_stream_goes_on_when_its_router_breaks() {
    let cluster = Cluster::start(&["r0", "r1"], |_| ()).await;
    cluster.script.says("one two three");
    for trouble in [Trouble::Break, Trouble::End] {
        for after in [0, 1, 5] {
            *cluster.script.first.lock().unwrap() = Some((after, trouble.clone()));
            let (status, body) = cluster.answer("/generate", &streaming()).await;
            assert_eq!(
                (status, read(&body)),
                (200, ("one two thre".to_owned(), None)),
                "{trouble:?} {after}"
            );
            let seen = cluster.script.take_seen();
            let [(broken, _), (other, generation)] = &seen[..] else { panic!("{seen:?}") };
            assert_ne!(broken, other);
            assert_eq!((generation.attempt, generation.generated), (Attempt(Attempt::PER_ROUTER), after));
            let so_far: Vec<u32> = b"xone two three"[..=after].iter().map(|byte| u32::from(*byte)).collect();
            assert_eq!(generation.tokens, so_far);
            assert!(generation.time_left < Duration::from_mins(10));
        }
    }
    cluster.until_idle().await;
}

#[tokio::test]
async fn a_stream_waits_for_its_only_router_to_come_back() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("one two three");
    cluster.script.pace(Duration::from_millis(10));
    cluster.script.trouble("r0", 3, Trouble::Break);
    let back = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        cluster.fell("r0");
        tokio::time::sleep(Duration::from_millis(600)).await;
        cluster.script.troubles.lock().unwrap().clear();
        cluster.raise("r0");
    };
    let body = streaming();
    let ((status, body), ()) = tokio::join!(cluster.answer("/generate", &body), back);
    assert_eq!((status, read(&body)), (200, ("one two thre".to_owned(), None)));
}

#[tokio::test]
async fn without_a_router_the_client_is_told_so() {
    let window = Duration::from_millis(300);
    let cluster = Cluster::start(&["r0"], |config| config.resume_window = window).await;
    cluster.script.says("one two three");
    cluster.script.trouble("r0", 0, Trouble::Break);
    let (status, body) = cluster.answer("/generate", &streaming()).await;
    assert_eq!(status, 503);
    let error: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(error["error_type"], "Service Unavailable");
    assert!(error["error"].as_str().unwrap().starts_with("no router went on within 0.3 s"), "{body}");

    // After the first byte the same is the last event. The router gives one token a call, and then none.
    cluster.script.trouble("r0", 3, Trouble::Break);
    let fell = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        cluster.fell("r0");
    };
    cluster.script.pace(Duration::from_millis(45));
    let body = streaming();
    let ((status, body), ()) = tokio::join!(cluster.answer("/generate", &body), fell);
    let (text, error) = read(&body);
    assert_eq!((status, text.as_str()), (200, "one"));
    assert_eq!(error.expect("an error at the end")["error_type"], "Service Unavailable");
    cluster.until_ready(false).await;
}

#[tokio::test]
async fn a_router_that_drains_is_passed_over() {
    let cluster = Cluster::start(&["r0", "r1"], |_| ()).await;
    cluster.script.says("one");
    let draining = Error::new(Reason::WorkerLost, "the router is draining");
    cluster.script.trouble("r0", 0, Trouble::Fail(draining));
    for _ in 0..4 {
        let (status, body) = cluster.answer("/generate", &streaming()).await;
        assert_eq!((status, read(&body)), (200, ("one".to_owned(), None)));
    }
}

#[tokio::test]
async fn a_failure_has_a_status_before_the_answer_and_an_event_after_it() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("one");
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "stream": true});
    let triton = format!("/v2/models/{MODEL}/generate_stream");
    let text = json!({"text_input": "x"});
    for (reason, mindie, openai) in [
        (Reason::QueueFull, 429, 429),
        (Reason::OutOfBlocks, 429, 429),
        (Reason::ChecksumMismatch, 424, 500),
        (Reason::WorkerLost, 503, 503),
        (Reason::Internal, 500, 500),
    ] {
        let error = Error::new(reason, "as told");
        cluster.script.trouble("r0", 0, Trouble::Fail(error.clone()));
        let (status, body) = cluster.answer(&triton, &text).await;
        assert_eq!(status, mindie, "{reason}");
        assert_eq!(serde_json::from_str::<Value>(&body).unwrap()["error"], "as told");
        let (status, body) = cluster.answer("/v1/chat/completions", &chat).await;
        assert_eq!(status, openai, "{reason}");
        assert_eq!(serde_json::from_str::<Value>(&body).unwrap()["error"]["message"], "as told");

        if reason == Reason::WorkerLost {
            continue; // A router may say this because it drains, so the stream goes on.
        }
        cluster.script.trouble("r0", 2, Trouble::Fail(error));
        let (status, body) = cluster.answer(&triton, &text).await;
        let last = body.trim_end().rsplit("\n\n").next().unwrap();
        assert_eq!(status, 200);
        assert!(last.starts_with("data:{\"error\":\"as told\",\"error_type\":"), "{last}");
        let (status, body) = cluster.answer("/v1/chat/completions", &chat).await;
        let last = body.trim_end().rsplit("\n\n").next().unwrap();
        assert_eq!(status, 200);
        assert!(last.starts_with("data: {\"error\":{\"message\":\"as told\","), "{last}");
    }
}

#[tokio::test]
async fn a_deadline_ends_a_request_in_every_phase() {
    let cluster = Cluster::start(&["r0"], |config| config.timeout = Duration::from_millis(400)).await;
    cluster.script.says("one");
    cluster.script.trouble("r0", 0, Trouble::Hang);
    let (status, body) = cluster.answer("/generate", &streaming()).await;
    assert_eq!(status, 408, "{body}");
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    let response = cluster.post("/v1/chat/completions", &chat).await;
    assert_eq!(
        (response.status().as_u16(), &response.headers()["x-should-retry"]),
        (408, &"false".parse().unwrap())
    );
    cluster.script.trouble("r0", 2, Trouble::Hang);
    let (status, body) = cluster.answer("/generate", &streaming()).await;
    let (text, error) = read(&body);
    assert_eq!((status, text.as_str()), (200, "on"));
    assert_eq!(error.unwrap()["error_type"], "Incomplete Generation");
    cluster.until_idle().await;

    // A request's own timeout, in seconds on this route, in microseconds on gRPC.
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.trouble("r0", 0, Trouble::Hang);
    let body = json!({"text_input": "x", "parameters": {"timeout": 1}});
    let started = std::time::Instant::now();
    let (status, _) = cluster.answer(&format!("/v2/models/{MODEL}/generate"), &body).await;
    assert_eq!(status, 408);
    assert!((900..3000).contains(&started.elapsed().as_millis()));
    let request = GenerateRequest {
        prompt: Some(Prompt::Text("x".into())),
        timeout_us: Some(100_000),
        ..GenerateRequest::default()
    };
    let status = cluster.grpc().generate(request).await.unwrap_err();
    assert_eq!(
        (status.code(), Error::from(status).reason),
        (tonic::Code::DeadlineExceeded, Reason::Deadline)
    );
}

#[tokio::test]
async fn requests_beyond_the_most_are_refused() {
    let limits = |config: &mut Config| (config.requests_max, config.queue_max) = (1, Some(0));
    let cluster = Cluster::start(&["r0"], limits).await;
    cluster.script.trouble("r0", 1, Trouble::Hang);
    let running = cluster.post("/generate", &streaming()).await;
    assert_eq!(running.status(), 200);
    let (status, body) = cluster.answer("/generate", &streaming()).await;
    assert_eq!((status, body.contains("1 requests are running")), (429, true));
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    let response = cluster.post("/v1/chat/completions", &chat).await;
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (429, &"1".parse().unwrap())
    );
    let request = GenerateRequest { prompt: Some(Prompt::Text("x".into())), ..GenerateRequest::default() };
    let status = cluster.grpc().generate(request).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    drop(running);
    cluster.until_idle().await;
    cluster.script.troubles.lock().unwrap().clear();
    cluster.script.says("ok");
    // The place is free as soon as the gateway sees that the client is gone.
    for _ in 0..100 {
        if cluster.answer("/generate", &streaming()).await.0 == 200 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the place of a client that left is not free");
}

#[tokio::test]
async fn refusals_are_json_of_the_path_s_family() {
    let cluster = Cluster::start(&["r0"], |config| config.body_bytes_max = 1000).await;
    let triton = format!("/v2/models/{MODEL}/generate_stream");
    let send = |method: &str, path: &str, body: &str| {
        let method = method.parse::<reqwest::Method>().unwrap();
        cluster.client().request(method, cluster.url(path)).body(body.to_owned()).send()
    };
    let long = format!("{{\"prompt\":\"{}\"}}", "x".repeat(1000));
    let prompt_too_long = json!({"prompt": "x".repeat(70)}).to_string();
    let chat_too_long =
        json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 100}).to_string();
    let other_model = json!({"model": "other", "messages": [{"role": "user", "content": "x"}]}).to_string();
    for (method, path, body, status, words) in [
        ("GET", "/nowhere", "", 404, "no such path: /nowhere"),
        ("GET", "/v2/models/m/versions/1/generate", "", 405, "method GET is not allowed"),
        ("POST", "/v2/models/m/versions/2/generate", "{}", 404, "no such path"),
        ("GET", "/v1/nowhere", "", 404, "no such path: /v1/nowhere"),
        ("GET", "/generate", "", 405, "method GET is not allowed"),
        ("PUT", "/v1/chat/completions", "{}", 405, "method PUT is not allowed"),
        ("POST", "/generate", "{", 422, "body: expected JSON"),
        ("POST", "/generate", "[]", 422, "body: expected a JSON object"),
        ("POST", "/generate", "{\"prompt\":\"\\ud800\"}", 422, "body: expected JSON"),
        ("POST", "/generate", "{}", 422, "prompt: is required"),
        ("POST", "/generate", "{\"prompt\":[300]}", 422, "prompt: expected token ids below 261, got 300"),
        (
            "POST",
            "/generate",
            "{\"prompt\":\"x\",\"model\":\"adapter\"}",
            404,
            "model \"adapter\" is not served",
        ),
        ("POST", "/generate", &long, 413, "more than 1000 bytes"),
        (
            "POST",
            "/generate",
            &prompt_too_long,
            422,
            "prompt: the prompt has 70 tokens, and the model's context of 64",
        ),
        ("POST", &triton, "{\"text_input\":\"\"}", 422, "text_input: must not be empty"),
        ("POST", "/v2/models/other/generate", "{}", 404, "model \"other\" is not served"),
        ("POST", "/v1/chat/completions", "{", 400, "body: expected JSON"),
        ("POST", "/v1/chat/completions", &chat_too_long, 400, "max_tokens: the prompt has "),
        ("POST", "/v1/chat/completions", &other_model, 404, "model \"other\" is not served"),
    ] {
        let response = send(method, path, body).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{method} {path} {body}");
        assert_eq!(response.headers()["content-type"], "application/json");
        let error: Value = response.json().await.unwrap();
        let message = if path.starts_with("/v1") { &error["error"]["message"] } else { &error["error"] };
        assert!(message.as_str().unwrap().contains(words), "{method} {path}: {error}");
        assert_eq!(error["error_type"].is_string(), !path.starts_with("/v1"), "{error}");
    }
    assert!(cluster.script.take_seen().is_empty(), "nothing of this reached a router");
}

#[tokio::test]
async fn mindie_clamps_what_the_context_cannot_hold() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let body = json!({"prompt": "x".repeat(60), "max_tokens": 1000});
    let (status, _) = cluster.answer("/generate", &body).await;
    assert_eq!(status, 200);
    assert_eq!(cluster.script.take_seen()[0].1.stop.max_tokens, 4);
}

#[tokio::test]
async fn ready_means_that_a_probe_came_back() {
    let cluster = Cluster::start_unready(&["r0"], |_| ()).await;
    cluster.script.trouble("r0", 1, Trouble::Fail(Error::new(Reason::WorkerLost, "no decode worker")));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(cluster.get("/v2/health/live").await.status(), 200);
    assert_eq!(cluster.get("/v2/health/ready").await.status(), 503);
    assert_eq!(cluster.get("/health").await.status(), 503);
    cluster.script.troubles.lock().unwrap().clear();
    cluster.until_ready(true).await;
    assert_eq!(cluster.get("/health").await.status(), 200);
    assert!(cluster.script.probes.load(std::sync::atomic::Ordering::SeqCst) >= 2);
    assert!(cluster.script.take_seen().is_empty());

    // Workers go: routers no longer list the model, and readiness ends without any request.
    let models = std::mem::take(&mut *cluster.script.models.lock().unwrap());
    cluster.until_ready(false).await;
    *cluster.script.models.lock().unwrap() = models;
    cluster.until_ready(true).await;
}

#[tokio::test]
async fn a_drain_refuses_new_requests_and_finishes_running_ones() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("one two three");
    cluster.script.pace(Duration::from_millis(20));
    let running = cluster.post("/generate", &streaming()).await;
    cluster.context.shutdown.drain();
    let request = GenerateRequest { prompt: Some(Prompt::Text("x".into())), ..GenerateRequest::default() };
    let refused = cluster.grpc().generate(request).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable);
    assert_eq!(read(&running.text().await.unwrap()), ("one two thre".to_owned(), None));
    let Cluster { gateway, .. } = cluster;
    tokio::time::timeout(Duration::from_secs(5), gateway.finished())
        .await
        .expect("the gateway has nothing to do");
}

#[tokio::test]
async fn a_stop_ends_a_stream_with_a_word() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.trouble("r0", 2, Trouble::Hang);
    let running = cluster.post("/generate", &streaming()).await;
    cluster.context.shutdown.drain();
    cluster.context.shutdown.stop();
    // The connection may close with the process before the word is out; never is the answer taken for whole.
    if let Ok(body) = running.text().await {
        assert!(read(&body).1.is_some(), "{body:?}");
    }
}
