//! OpenAI's two routes.

use serde_json::{Map, Value, json};

use crate::answer::{Answer, Finish, Output};
use crate::case::{Case, LOGPROBS};
use crate::dialect::Mode;
use crate::server::Server;

fn body(case: &Case, mode: Mode) -> Map<String, Value> {
    let mut body = case.options();
    body.extend(case.lists());
    body.insert("max_tokens".into(), json!(case.max_tokens));
    body.insert("n".into(), json!(case.n));
    body.entry("temperature").or_insert(json!(0));
    if mode == Mode::Streamed {
        body.insert("stream".into(), json!(true));
        body.insert("stream_options".into(), json!({ "include_usage": true }));
    }
    body
}

pub(crate) async fn completion(server: &Server, case: &Case, mode: Mode) -> Answer {
    let mut body = body(case, mode);
    body.insert("prompt".into(), json!(case.prompt));
    body.insert("logprobs".into(), json!(LOGPROBS));
    body.insert("return_tokens_as_token_ids".into(), json!(true));
    ask(server, "/v1/completions", (case, mode, body), |output, choice| {
        output.text.push_str(choice["text"].as_str().expect("a text"));
        let logprobs = &choice["logprobs"];
        let list = |name: &str| logprobs[name].as_array().cloned().unwrap_or_default();
        let places = list("text_offset").into_iter().zip(list("top_logprobs"));
        for ((token, logprob), place) in list("tokens").iter().zip(list("token_logprobs")).zip(places) {
            let id = token.as_str().and_then(|token| token.strip_prefix("token_id:")).expect("an id");
            output.ids_mut().push(id.parse().expect("a number"));
            output.logprobs_mut().push(logprob.as_f64().expect("a number") as f32);
            output.alternatives.push(json!(place));
        }
    })
    .await
}

pub(crate) async fn chat(server: &Server, case: &Case, mode: Mode) -> Answer {
    let mut body = body(case, mode);
    body.insert("messages".into(), case.messages.clone().expect("a chat"));
    body.insert("logprobs".into(), json!(true));
    body.insert("top_logprobs".into(), json!(LOGPROBS));
    body.insert("return_token_ids".into(), json!(true));
    if case.continues {
        body.insert("continue_final_message".into(), json!(true));
        body.insert("add_generation_prompt".into(), json!(false));
    }
    ask(server, "/v1/chat/completions", (case, mode, body), |output, choice| {
        let message = choice.get("message").or(choice.get("delta")).expect("a message or what is new of it");
        output.text.push_str(message["content"].as_str().unwrap_or_default());
        for id in choice["token_ids"].as_array().into_iter().flatten() {
            output.ids_mut().push(id.as_u64().expect("an id") as u32);
        }
        for entry in choice["logprobs"]["content"].as_array().into_iter().flatten() {
            output.logprobs_mut().push(entry["logprob"].as_f64().expect("a number") as f32);
            output.alternatives.push(entry.clone());
        }
    })
    .await
}

async fn ask(
    server: &Server,
    path: &str,
    (case, mode, body): (&Case, Mode, Map<String, Value>),
    add: impl Fn(&mut Output, &Value),
) -> Answer {
    let body = Value::Object(body);
    let objects = match mode {
        Mode::Whole => vec![server.whole(path, &body).await],
        Mode::Streamed => server.events(path, &body).await,
    };
    let mut answer = Answer::of(case.n);
    for object in &objects {
        for choice in object["choices"].as_array().expect("choices") {
            let output = &mut answer.outputs[choice["index"].as_u64().expect("an index") as usize];
            add(output, choice);
            if let Some(word) = choice["finish_reason"].as_str() {
                output.finished(Finish::named(word));
            }
        }
        if let Some(usage) = object["usage"].as_object() {
            assert_eq!(answer.completion_tokens, None, "usage comes once");
            answer.prompt_tokens = usage["prompt_tokens"].as_u64();
            answer.completion_tokens = usage["completion_tokens"].as_u64();
        }
    }
    assert!(answer.completion_tokens.is_some(), "usage comes");
    assert!(
        answer.outputs.iter().all(|output| output.finish != Finish::Untold),
        "each choice says why it ended"
    );
    answer
}
