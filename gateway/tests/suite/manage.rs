//! What MindIE's clients ask for beside generation.

use std::time::Duration;

use crate::support::{Cluster, MODEL, Trouble};
use serde_json::{Value, json};

fn parsed(body: &str) -> Value {
    serde_json::from_str(body).unwrap()
}

#[tokio::test]
async fn a_running_request_is_stopped_by_its_id() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("one");
    cluster.script.trouble("r0", 2, Trouble::Hang);
    let stop = format!("/v2/models/{MODEL}/stopInfer");
    let body = |id: &str| json!({"id": id, "text_input": "x", "parameters": {"details": true}});

    let mut running = cluster.post(&format!("/v2/models/{MODEL}/generate_stream"), &body("s-1")).await;
    let mut text = String::new();
    while !text.contains("\"generated_tokens\":2") {
        text.push_str(std::str::from_utf8(&running.chunk().await.unwrap().unwrap()).unwrap());
    }
    assert_eq!(cluster.answer(&stop, &json!({"id": "s-1"})).await, (200, r#"{"id":"s-1"}"#.to_owned()));
    text.push_str(&running.text().await.unwrap());
    let last = parsed(text.trim_end().rsplit("data:").next().unwrap());
    assert_eq!(last["details"]["finish_reason"], "stop_sequence");
    assert_eq!(last["details"]["generated_tokens"], 2);

    // Who waits for the whole has what there is.
    let path = format!("/v2/models/{MODEL}/generate");
    let whole = async { cluster.answer(&path, &body("s-2")).await };
    let stopping = async {
        while cluster.answer(&stop, &json!({"id": "s-2"})).await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let ((status, answer), ()) = tokio::join!(whole, stopping);
    // It may have been stopped before its first token, which is a failure.
    assert!(matches!(status, 200 | 424), "{status}: {answer}");
    cluster.until_idle().await;

    let (status, answer) = cluster.answer(&stop, &json!({"id": "s-1"})).await;
    assert_eq!((status, &parsed(&answer)["error_type"]), (404, &json!("NotFoundError")));
    assert_eq!(cluster.answer(&stop, &json!({})).await.0, 422);
    assert_eq!(cluster.answer("/v2/models/other/stopInfer", &json!({"id": "s-1"})).await.0, 404);
}

#[tokio::test]
async fn places_are_counted() {
    let cluster = Cluster::start(&["r0"], |config| config.requests_max = 3).await;
    let slots = || async {
        parsed(&cluster.get(&format!("/v2/models/{MODEL}/getSlotCount")).await.text().await.unwrap())
    };
    let free = slots().await;
    assert_eq!((&free["total_slots"], &free["free_slots"]), (&json!(3), &json!(3)));
    assert_eq!(free["available_tokens_length"], 160);
    cluster.script.trouble("r0", 1, Trouble::Hang);
    let running = cluster.post("/generate", &json!({"prompt": "x", "stream": true})).await;
    assert_eq!(slots().await["free_slots"], 2);
    drop(running);
    cluster.until_idle().await;
    assert_eq!(cluster.get("/v2/models/other/getSlotCount").await.status(), 404);
}

#[tokio::test]
async fn a_trial_runs_a_token_in_time() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("one");
    for (path, seconds) in [("/health/timed", 10), ("/health/timed-2", 2), ("/health/timed-600", 600)] {
        assert_eq!(cluster.get(path).await.status(), 200);
        let left = cluster.script.take_seen()[0].1.time_left;
        assert!(
            left <= Duration::from_secs(seconds) && left > Duration::from_secs(seconds - 1),
            "{path}: {left:?}"
        );
    }
    cluster.script.trouble("r0", 0, Trouble::Hang);
    assert_eq!(cluster.get("/health/timed-1").await.status(), 408);
    let broken = proto::Error::new(proto::Reason::Internal, "as told");
    cluster.script.trouble("r0", 0, Trouble::Fail(broken));
    assert_eq!(cluster.get("/health/timed").await.status(), 503);
    for path in ["/health/timed-0", "/health/timed-601"] {
        assert_eq!(cluster.get(path).await.status(), 422);
    }
    assert_eq!(cluster.get("/health/timer").await.status(), 404);
}

#[tokio::test]
async fn a_model_has_one_version() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("one");
    for (version, expected) in [("1", 200), ("2", 404), ("x", 404)] {
        for route in ["generate", "generate_stream"] {
            let path = format!("/v2/models/{MODEL}/versions/{version}/{route}");
            assert_eq!(cluster.answer(&path, &json!({"text_input": "x"})).await.0, expected, "{path}");
        }
    }
}

#[tokio::test]
async fn requests_wait_by_priority() {
    let limits = |config: &mut gateway::Config| (config.requests_max, config.queue_max) = (1, Some(2));
    let cluster = Cluster::start(&["r0"], limits).await;
    cluster.script.trouble("r0", 1, Trouble::Hang);
    let running = cluster.post("/generate", &json!({"prompt": "x", "stream": true})).await;
    cluster.script.take_seen();
    cluster.script.troubles.lock().unwrap().clear();
    cluster.script.says("one");
    let ask = |prompt: &'static str, priority: u64, after: Duration| {
        let cluster = &cluster;
        async move {
            tokio::time::sleep(after).await;
            cluster.answer("/generate", &json!({"prompt": prompt, "priority": priority})).await.0
        }
    };
    let free = async {
        tokio::time::sleep(Duration::from_millis(600)).await;
        // There are two in line, so a third is refused.
        let refused = cluster.answer("/generate", &json!({"prompt": "c"})).await.0;
        drop(running);
        refused
    };
    let (later, sooner, refused) =
        tokio::join!(ask("a", 5, Duration::ZERO), ask("b", 1, Duration::from_millis(200)), free);
    assert_eq!((later, sooner, refused), (200, 200, 429));
    let order: Vec<u32> =
        cluster.script.take_seen().iter().map(|(_, generation)| generation.tokens[0]).collect();
    assert_eq!(order, [u32::from(b'b'), u32::from(b'a')]);
}
