//! The three `generate`s, which answer with text.

use serde_json::{Map, Value, json};

use crate::answer::{Answer, Finish};
use crate::case::Case;
use crate::dialect::Mode;
use crate::server::{Server, read};

/// Triton's, as MindIE has it.
pub(crate) async fn triton(server: &Server, case: &Case, mode: Mode) -> Answer {
    let mut parameters = case.options();
    parameters.extend(case.lists());
    parameters.insert("max_new_tokens".into(), json!(case.max_tokens));
    parameters.insert("details".into(), json!(true));
    let body = json!({ "text_input": case.prompt, "parameters": parameters });
    let events = match mode {
        Mode::Whole => vec![server.whole(&Server::model_path("generate"), &body).await],
        Mode::Streamed => server.events(&Server::model_path("generate_stream"), &body).await,
    };
    let mut answer = Answer::of(1);
    for event in &events {
        answer.outputs[0].text.push_str(event["text_output"].as_str().expect("a text"));
        let details = &event["details"];
        answer.completion_tokens = details["generated_tokens"].as_u64();
        if let Some(word) = details["finish_reason"].as_str() {
            answer.outputs[0].finished(Finish::named(word));
        }
    }
    assert_ne!(answer.outputs[0].finish, Finish::Untold, "the last event says why");
    answer
}

/// vLLM's.
pub(crate) async fn vllm(server: &Server, case: &Case, mode: Mode) -> Answer {
    let mut body: Map<String, Value> = case.options();
    body.extend(case.lists());
    body.insert("prompt".into(), json!(case.prompt));
    body.insert("max_tokens".into(), json!(case.max_tokens));
    body.insert("n".into(), json!(case.n));
    body.insert("stream".into(), json!(mode == Mode::Streamed));
    body.entry("temperature").or_insert(json!(0));
    let came = server.post("/generate", &Value::Object(body)).await;
    let mut answer = Answer::of(case.n);
    let mut add = |object: &Value, skipped: &str| {
        let texts = object["text"].as_array().expect("a list of texts");
        assert_eq!(texts.len(), case.n);
        for (output, text) in answer.outputs.iter_mut().zip(texts) {
            let text = text.as_str().expect("a text");
            output.text.push_str(text.strip_prefix(skipped).expect("the prompt comes first"));
        }
    };
    match mode {
        // A whole answer repeats the prompt.
        Mode::Whole => add(&read(&came), &format!("{} ", case.prompt)),
        Mode::Streamed => {
            let objects = came.strip_suffix('\0').expect("each object ends with NUL");
            objects.split('\0').for_each(|object| add(&read(object), ""));
        }
    }
    answer
}

/// TGI's, where a stop string is the last part of its text.
pub(crate) async fn tgi(server: &Server, case: &Case, mode: Mode) -> Answer {
    let mut parameters = case.options();
    parameters.extend(case.lists());
    parameters.insert("max_new_tokens".into(), json!(case.max_tokens));
    parameters.insert("details".into(), json!(true));
    let body = json!({ "inputs": case.prompt, "parameters": parameters });
    let mut answer = Answer::of(1);
    let output = &mut answer.outputs[0];
    let mut add = |token: &Value| {
        output.ids_mut().push(token["id"].as_u64().expect("an id") as u32);
        output.logprobs_mut().push(token["logprob"].as_f64().expect("a number") as f32);
    };
    let last = match mode {
        Mode::Whole => {
            let whole = server.whole("/generate", &body).await;
            whole["details"]["tokens"].as_array().expect("a list of tokens").iter().for_each(add);
            whole
        }
        Mode::Streamed => {
            let mut events = server.events("/generate_stream", &body).await;
            events.iter().for_each(|event| add(&event["token"]));
            events.pop().expect("an event")
        }
    };
    output.text = last["generated_text"].as_str().expect("the whole text").to_owned();
    let details = &last["details"];
    output.finished(Finish::named(details["finish_reason"].as_str().expect("a word")));
    answer.completion_tokens = details["generated_tokens"].as_u64();
    answer
}
