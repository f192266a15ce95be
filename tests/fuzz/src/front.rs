//! Whatever body a front is given, it refuses with a fault of the request or asks for something that can be served.

use std::time::Duration;

use gateway::domain::{REPETITION_PENALTY_MIN, Request, TIMEOUT_MAX};
use gateway::fuzzing::{Front, Refused, Script, Taken, take};
use proto::{Generation, LOGPROBS_MAX, wire};
use serde_json::{Value, json};

use crate::{json, model, pieces, streams};

/// Longest refusal, bytes: it may show what came, and never all of it.
const REFUSAL_BYTES_MAX: usize = 8192;

/// Names of the fields of each API, one a line; a name with dots is a field within objects.
const TRITON: &str = include_str!("../fields/triton.txt");
const VLLM: &str = include_str!("../fields/vllm.txt");
const TGI: &str = include_str!("../fields/tgi.txt");
const CHAT: &str = include_str!("../fields/chat.txt");
const COMPLETIONS: &str = include_str!("../fields/completions.txt");

/// `/v2/models/{model}/generate` and `/generate_stream`.
pub fn json_triton(data: &[u8]) {
    // Readable bodies leave no room for a choice: their length makes it.
    let front = Front::Triton { stream: data.len() & 1 != 0, recompute: data.len() & 2 != 0 };
    check(front, &json::body(data, &json!({"text_input": "x"}), TRITON), TRITON);
}

/// `/generate`.
pub fn json_vllm(data: &[u8]) {
    check(Front::Vllm, &json::body(data, &json!({"prompt": "x"}), VLLM), VLLM);
}

/// TGI's `/generate` and `/generate_stream`.
pub fn json_tgi(data: &[u8]) {
    let front = Front::Tgi { stream: data.len() & 1 != 0 };
    check(front, &json::body(data, &json!({"inputs": "x"}), TGI), TGI);
}

/// `/v1/chat/completions`.
pub fn json_chat(data: &[u8]) {
    let required = json!({"messages": [{"role": "user", "content": "x"}]});
    check(Front::Chat { mlc: data.len() % 4 == 3 }, &json::body(data, &required, CHAT), CHAT);
}

/// `/v1/completions`.
pub fn json_completions(data: &[u8]) {
    check(Front::Completions, &json::body(data, &json!({"prompt": "x"}), COMPLETIONS), COMPLETIONS);
}

fn check(front: Front, body: &[u8], names: &str) {
    let script = Script { model: model::model().clone(), says: vec![pieces::short()], fails_at: None };
    let outcome = take(front, body, &script);
    match &outcome {
        Ok(taken) => {
            served(front, taken);
            streams::agree(front, taken, &script);
        }
        Err(refusal) => refused(front, refusal),
    }
    if let Ok(Value::Object(object)) = serde_json::from_slice(body) {
        let same =
            |object: &Value| told(&take(front, object.to_string().as_bytes(), &script)) == told(&outcome);
        let value = Value::Object(object.clone());
        // A number of many digits may be read as a neighbour of the one that is then written.
        if serde_json::from_str::<Value>(&value.to_string()).is_ok_and(|again| again == value) {
            assert!(same(&value), "how a body is spelt makes a difference");
            let mut more = object;
            more.insert("a field that nobody knows".to_owned(), json!({"text_input": 1}));
            for name in names.lines() {
                more.entry(name).or_insert(Value::Null);
            }
            assert!(same(&Value::Object(more)), "unknown fields or nulls make a difference");
        }
    }
}

/// What a body led to, without what is drawn anew for each.
fn told(outcome: &Result<Taken, Refused>) -> String {
    match outcome {
        Ok(taken) => {
            let drawn = taken.requests.iter().any(|request| request.seed.is_none());
            let admitted = taken.admitted.clone().map(|mut generations| {
                generations.iter_mut().filter(|_| drawn).for_each(|generation| generation.sampling.seed = 0);
                generations
            });
            format!("{:?} {} {admitted:?}", taken.requests, taken.stream)
        }
        Err(refusal) => format!("{refusal:?}"),
    }
}

/// A refusal blames the request, in the family's words and few of them.
fn refused(front: Front, refusal: &Refused) {
    match front {
        Front::Chat { .. } | Front::Completions => refused_in(refusal, "/error/message", &[400, 404]),
        Front::Triton { .. } | Front::Vllm | Front::Tgi { .. } => refused_by_mindie(refusal),
    }
}

/// A refusal of MindIE's family.
pub(crate) fn refused_by_mindie(refusal: &Refused) {
    refused_in(refusal, "/error", &[422, 404]);
}

fn refused_in(refusal: &Refused, message: &str, statuses: &[u16]) {
    let body: Value = serde_json::from_slice(&refusal.body).expect("a refusal is JSON");
    let message = body.pointer(message).and_then(Value::as_str).expect("a refusal has a message");
    assert!(statuses.contains(&refusal.status), "{}: {message}", refusal.status);
    assert!(!message.is_empty() && !message.ends_with('.'), "{message:?}");
    assert!(refusal.body.len() <= REFUSAL_BYTES_MAX, "a refusal of {} bytes", refusal.body.len());
}

fn served(front: Front, taken: &Taken) {
    assert!(!taken.requests.is_empty());
    taken.requests.iter().for_each(in_range);
    match &taken.admitted {
        Ok(generations) => {
            assert_eq!(generations.len(), taken.requests.len());
            taken
                .requests
                .iter()
                .zip(generations)
                .for_each(|(request, generation)| fits(request, generation));
        }
        Err(refusal) => refused(front, refusal),
    }
}

/// The ranges that everything behind the gateway counts on.
pub(crate) fn in_range(request: &Request) {
    let sampling = &request.sampling;
    assert!(sampling.temperature >= 0.0 && sampling.temperature.is_finite(), "{sampling:?}");
    assert!(sampling.top_p > 0.0 && sampling.top_p <= 1.0, "{sampling:?}");
    assert!(sampling.top_k != Some(0), "{sampling:?}");
    let repetition = sampling.repetition_penalty;
    assert!(repetition >= REPETITION_PENALTY_MIN && repetition.is_finite(), "{sampling:?}");
    for penalty in [sampling.presence_penalty, sampling.frequency_penalty] {
        assert!((-2.0..=2.0).contains(&penalty), "{sampling:?}");
    }
    assert!((0.0..=1.0).contains(&sampling.min_p), "{sampling:?}");
    assert!(sampling.typical_p > 0.0 && sampling.typical_p <= 1.0, "{sampling:?}");
    assert!(sampling.logit_bias.iter().all(|(_, bias)| bias.is_finite()), "{sampling:?}");
    assert!(sampling.bad_words.iter().all(|word| !word.is_empty()), "{sampling:?}");
    let reported = [sampling.logprobs, sampling.prompt_logprobs];
    assert!(reported.iter().flatten().all(|count| *count <= LOGPROBS_MAX), "{sampling:?}");
    assert!((1..=5).contains(&request.priority.0));
    assert!(request.n >= 1 && request.best_of >= request.n);
    assert!(request.deadline(Duration::from_secs(1)) <= TIMEOUT_MAX);
    assert!(!request.deadline(Duration::from_secs(1)).is_zero());
}

/// What admission promises of what it lets in.
pub(crate) fn fits(request: &Request, generation: &Generation) {
    let description = &model::model().description;
    assert!(generation.tokens.iter().all(|id| (*id as usize) < description.vocab_size));
    assert!(generation.generated < generation.tokens.len());
    assert!(generation.tokens.len() < description.context_len);
    let max_tokens = generation.stop.max_tokens;
    assert!(
        max_tokens > generation.generated && generation.prompt_len() + max_tokens <= description.context_len
    );
    assert_eq!(generation.stop.eos_ids.is_empty(), request.stop.ignore_eos);
    if let Some(seed) = request.seed {
        assert_eq!(generation.sampling.seed, seed);
    }
    let again = Generation::try_from(wire::Generation::from(generation.clone()));
    assert_eq!(again.as_ref(), Ok(generation), "what is admitted survives the wire");
}
