//! Structured output: bounds that hold together, and schemas that cost too much.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{CHAT, Server, chat, chat_in};

/// Most time that a schema may take to be refused, or a plain chat to be answered beside many of them.
const SOON: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn a_length_holds_beside_a_pattern() {
    let server = Server::start("").await;
    let schema = json!({ "type": "string", "pattern": "^[a-z]+$", "maxLength": 4 });
    for seed in 1..=6 {
        let mut body = chat_in(&schema);
        body["temperature"] = json!(1);
        body["seed"] = json!(seed);
        let said = server.say_both_ways(CHAT, &body).await;
        let text: String = serde_json::from_str(&said.text).expect("a string in JSON");
        assert!(
            (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_lowercase()),
            "{text:?}"
        );
    }
    for schema in
        [json!({ "type": "strin" }), json!({ "type": "string", "pattern": "(" }), json!({ "not": {} })]
    {
        let (status, answer) = server.post(CHAT, &chat_in(&schema)).await;
        assert!(status == 400 && answer.contains("schema"), "{schema}: {status} {answer}");
    }
}

/// Alternatives of alternatives that may all hold at once.
fn nested(depth: usize) -> Value {
    (0..depth).fold(json!({ "type": "string" }), |inner, _| {
        let object = json!({ "type": "object", "properties": { "a": inner }, "required": ["a"] });
        json!({ "oneOf": [inner, object, { "type": "array", "items": inner }] })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_costly_schema_holds_up_nobody() {
    let server = Server::start("").await;
    let bounded = async |depth: usize| {
        let started = Instant::now();
        let mut body = chat_in(&nested(depth));
        body["max_tokens"] = json!(8);
        let (status, answer) = server.post(CHAT, &body).await;
        assert!(matches!(status, 200 | 400), "depth {depth}: {status} {answer}");
        assert!(started.elapsed() < SOON, "depth {depth}: {:?}", started.elapsed());
        status
    };
    let served = async {
        for _ in 0..6 {
            let started = Instant::now();
            let mut body = chat("Hi");
            body["max_tokens"] = json!(4);
            server.say(CHAT, &body, false).await;
            assert!(started.elapsed() < SOON, "a plain chat took {:?}", started.elapsed());
        }
    };
    let schemas = futures::future::join_all([9, 9, 9, 8, 7, 5, 3, 2].map(bounded));
    let (statuses, ()) = tokio::join!(schemas, served);
    assert_eq!(statuses[..3], [400; 3], "nine deep is more than anybody compiles");
}
