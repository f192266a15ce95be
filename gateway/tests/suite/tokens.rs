//! Tokens without generation, and the version.

use serde_json::{Value, json};

use crate::support::{Cluster, MODEL};

#[tokio::test]
async fn texts_and_chats_become_tokens_and_texts_again() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let body = json!({"model": MODEL, "prompt": "Hi", "return_token_strs": true});
    let (status, body) = cluster.answer("/tokenize", &body).await;
    let expected = r#"{"count":2,"max_model_len":64,"tokens":[72,105],"token_strs":["H","i"]}"#;
    assert_eq!((status, body.as_str()), (200, expected));
    let chat = json!([{"role": "user", "content": "x"}]);
    let (_, body) = cluster.answer("/tokenize", &json!({"messages": chat})).await;
    let counted: Value = serde_json::from_str(&body).unwrap();
    let (_, body) = cluster.answer("/detokenize", &json!({"tokens": counted["tokens"]})).await;
    let text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(body, json!({"prompt": text}).to_string());
    // They are those that an answer continues.
    cluster.answer("/v1/chat/completions", &json!({"messages": chat})).await;
    assert_eq!(json!(cluster.script.take_seen()[0].1.tokens), counted["tokens"]);
    let (status, body) = cluster.answer("/v1/tokenizer", &json!({"inputs": "a漢"})).await;
    assert_eq!((status, body.as_str()), (200, "{\"token_number\":4,\"tokens\":[\"a\",\"漢\"]}"));
}

#[tokio::test]
async fn faults_are_of_the_routes_family() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    for (path, body, expected) in [
        ("/tokenize", json!({}), 400),
        ("/tokenize", json!({"prompt": "x", "model": "other"}), 404),
        ("/detokenize", json!({"tokens": [-1]}), 400),
    ] {
        let (status, body) = cluster.answer(path, &body).await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(status, expected, "{path} {body}");
        assert!(body["error"]["message"].is_string(), "{path} {body}");
    }
    assert_eq!(cluster.get("/tokenize").await.status(), 405);
    let (status, body) = cluster.answer("/v1/tokenizer", &json!({"inputs": ""})).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &body["error_type"]), (422, &json!("Input Validation Error")));
}

#[tokio::test]
async fn the_version_and_a_sign_of_life_are_told() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let body: Value = cluster.get("/version").await.json().await.unwrap();
    assert_eq!(body, json!({"version": env!("CARGO_PKG_VERSION")}));
    assert_eq!(cluster.get("/ping").await.status(), 200);
    assert_eq!(cluster.post("/ping", &json!({})).await.status(), 200);
    assert_eq!(cluster.get("/health").await.status(), 200);
}
