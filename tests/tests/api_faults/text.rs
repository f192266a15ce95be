//! Text, bytes and log-probabilities of answers.

use serde_json::{Value, json};

use crate::server::{CHAT, COMPLETION, Server, chat, chat_in};

/// A token of one byte, which begins no character.
const LONE_BYTE: u32 = 246;
/// " Paris"
const PARIS: u32 = 7042;
const CAPITAL: &str = "The capital of France is";

#[tokio::test(flavor = "multi_thread")]
async fn characters_come_whole_and_stops_leave_no_token_out() {
    let server = Server::start("").await;
    let said = server.say_both_ways(CHAT, &chat_in(&json!({ "const": "🦜漢字é" }))).await;
    assert_eq!((said.text.as_str(), said.finish.as_str()), ("\"🦜漢字é\"", "stop"));

    let mut stopped = chat_in(&json!({ "const": "ABCDEFGHIJKL" }));
    stopped["stop"] = json!("EFGHI");
    stopped["logprobs"] = json!(true);
    let said = server.say_both_ways(CHAT, &stopped).await;
    assert_eq!((said.text.as_str(), said.finish.as_str()), ("\"ABCD", "stop"));
    assert_eq!(said.entries.len() as u64, said.completion_tokens);
    let told: String = said.entries.iter().filter_map(|entry| entry["token"].as_str()).collect();
    assert!(told.starts_with("\"ABCDEFGHI"), "every token is told of: {told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_no_text_are_shown_as_such() {
    let server = Server::start("").await;
    let mut body =
        json!({ "prompt": "Hello", "max_tokens": 6, "logit_bias": { LONE_BYTE.to_string(): 100 } });
    let said = server.say_both_ways(COMPLETION, &body).await;
    assert_eq!((said.text.as_str(), said.completion_tokens), ("\u{fffd}".repeat(6).as_str(), 6));
    body["logprobs"] = json!(1);
    assert_eq!(server.say_both_ways(COMPLETION, &body).await.entries.len(), 6);

    let mut body = chat("Hello");
    body["logit_bias"] = json!({ LONE_BYTE.to_string(): 100 });
    body["max_tokens"] = json!(6);
    body["logprobs"] = json!(true);
    let said = server.say_both_ways(CHAT, &body).await;
    assert_eq!(said.text, "\u{fffd}".repeat(6));
    for entry in &said.entries {
        // A count of alternatives is not needed for the tokens themselves to be told of.
        assert_eq!((&entry["bytes"], &entry["top_logprobs"]), (&json!([156]), &json!([])));
    }
    assert_eq!(said.entries.len(), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_may_stop_an_answer_or_be_kept_out_of_it() {
    let server = Server::start("").await;
    let ask = |extra: Value| {
        let mut body = json!({ "prompt": CAPITAL, "max_tokens": 4, "logprobs": 0 });
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        body
    };
    let paris = |shown: bool| json!({ "stop_token_ids": [PARIS], "include_stop_str_in_output": shown });
    for (shown, text) in [(false, ""), (true, " Paris")] {
        let said = server.say_both_ways(COMPLETION, &ask(paris(shown))).await;
        assert_eq!((said.text.as_str(), said.finish.as_str()), (text, "stop"));
        assert_eq!((said.completion_tokens, said.entries.len()), (1, 1));
    }
    let said =
        server.say_both_ways(COMPLETION, &ask(json!({ "logit_bias": { PARIS.to_string(): -100 } }))).await;
    assert!(!said.text.starts_with(" Paris") && said.completion_tokens == 4, "{said:?}");
    // Next to nothing of the probability is the likeliest token alone.
    let likeliest = server.say_both_ways(COMPLETION, &ask(json!({}))).await;
    let nucleus = json!({ "temperature": 1, "seed": 3, "top_p": 1e-12 });
    let said = server.say_both_ways(COMPLETION, &ask(nucleus)).await;
    assert_eq!(said.text, likeliest.text);
    assert!(likeliest.text.starts_with(" Paris"), "{likeliest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_echo_with_log_probabilities_streams_to_its_end() {
    let server = Server::start("").await;
    let prompt = format!("{CAPITAL}\u{2028}\u{85}\r\nParis, and é");
    for max_tokens in [4, 0] {
        let body = json!({ "prompt": prompt, "max_tokens": max_tokens, "echo": true, "logprobs": 1 });
        let said = server.say_both_ways(COMPLETION, &body).await;
        assert!(said.text.starts_with(&prompt), "{said:?}");
        assert_eq!((said.completion_tokens, said.finish.as_str()), (max_tokens, "length"));
        let prompt_entries = said.entries.len() - max_tokens as usize;
        let unknown = said.entries.iter().take_while(|entry| entry[1].is_null()).count();
        assert!(prompt_entries > 10 && unknown == 1, "{said:?}");
    }
}
