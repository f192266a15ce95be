//! The request body of `/v1/completions`.

use std::ops::RangeInclusive;

use proto::TokenId;
use serde_json::Value;

use super::completion_response::{CompletionShape, CompletionWriter};
use super::{chat_format, parameters};
use crate::dialect::fields::{Fields, Integers, unexpected};
use crate::dialect::{Call, sampling};
use crate::domain::{FieldNames, MaxTokens, Prompt, Request};
use crate::fault::Fault;

const ROUTE: &str = "/v1/completions";

/// Tokens of an answer that names no number.
const MAX_TOKENS: usize = 16;

/// Range of `logprobs`.
const LOGPROBS: RangeInclusive<u64> = 0..=5;
/// Range of `best_of`.
const BEST_OF: RangeInclusive<u64> = 1..=20;
/// Most prompts of a call.
const PROMPTS_MAX: usize = 1024;

/// Reads a call.
pub(crate) fn parse(body: &[u8]) -> Result<Call<CompletionWriter>, Fault> {
    let mut fields = Fields::parse(body, Integers::Whole)?;
    let prompts = prompts(fields.require("prompt")?)?;
    let Some(first) = prompts.first().cloned() else {
        return Err(Fault::field("prompt", "expected at least 1 prompt, got none"));
    };
    let mut request = Request::new(first, FieldNames { grammar: "response_format", ..FieldNames::PLAIN });
    parameters::read(&mut fields, &mut request)?;
    let max_tokens =
        fields.integer("max_tokens", 0..=i32::MAX as u64)?.map_or(MAX_TOKENS, |count| count as usize);
    request.max_tokens = MaxTokens::Exact(max_tokens);
    let (stream, stream_usage) = parameters::stream(&mut fields, ROUTE)?;
    (request.n, request.best_of) = sequences(&mut fields, stream)?;
    if let Some((grammar, field)) = chat_format::read(&mut fields)? {
        request.sampling.grammar = Some(grammar);
        request.names.grammar = field;
    }
    request.echo = fields.flag("echo")?.unwrap_or(false);
    let logprobs = fields.integer("logprobs", LOGPROBS)?.map(|count| count as u32);
    let prompt_logprobs = parameters::prompt_logprobs(&mut fields, stream)?;
    request.sampling.logprobs = logprobs;
    // An echoed prompt has log-probabilities like the rest of the text.
    let echoed = logprobs.filter(|_| request.echo);
    request.sampling.prompt_logprobs = prompt_logprobs.max(echoed);
    // Nothing else tells of the first.
    request.prompt_ids = echoed.is_some();
    let shape = CompletionShape {
        n: request.n,
        logprobs,
        prompt_logprobs,
        suffix: fields.string("suffix")?.unwrap_or_default(),
        echo: request.echo,
        tokens_as_ids: fields.flag("return_tokens_as_token_ids")?.unwrap_or(false),
        skip_special_tokens: request.skip_special_tokens,
        usage: stream_usage,
    };
    fields.finish(ROUTE);
    let requests = prompts.into_iter().map(|prompt| Request { prompt, ..request.clone() }).collect();
    Ok(Call { requests, writer: CompletionWriter::new(shape), stream })
}

/// A text, a list of texts, a list of token ids, or a list of such lists.
fn prompts(value: Value) -> Result<Vec<Prompt>, Fault> {
    let expected = "a string, a list of strings, a list of token ids, or a list of such lists";
    let list = match value {
        Value::String(text) => return Ok(vec![text_prompt(text, "prompt")?]),
        Value::Array(list) => list,
        other => return Err(unexpected("prompt", expected, &other)),
    };
    if list.iter().any(Value::is_number) {
        return Ok(vec![Prompt::Tokens(tokens(&list, "prompt")?)]);
    }
    if list.len() > PROMPTS_MAX {
        let message = format!("expected at most {PROMPTS_MAX} prompts, got {}", list.len());
        return Err(Fault::field("prompt", message));
    }
    let prompts = list.into_iter().enumerate().map(|(index, value)| {
        let path = format!("prompt[{index}]");
        match value {
            Value::String(text) => text_prompt(text, &path),
            Value::Array(list) if list.is_empty() => {
                Err(Fault::field(path, "expected at least 1 token, got none"))
            }
            Value::Array(list) => Ok(Prompt::Tokens(tokens(&list, &path)?)),
            other => Err(unexpected(&path, "a string or a list of token ids", &other)),
        }
    });
    prompts.collect()
}

fn text_prompt(text: String, path: &str) -> Result<Prompt, Fault> {
    if text.is_empty() {
        return Err(Fault::field(path, "must not be empty"));
    }
    Ok(Prompt::Text(text))
}

fn tokens(list: &[Value], path: &str) -> Result<Vec<TokenId>, Fault> {
    let ids = list.iter().enumerate();
    ids.map(|(index, value)| sampling::token_id(value, &format!("{path}[{index}]"))).collect()
}

/// `n` and `best_of`, of which a stream cannot have more than it returns.
fn sequences(fields: &mut Fields, stream: bool) -> Result<(usize, usize), Fault> {
    let n = parameters::choices(fields)?;
    let Some(best_of) = fields.integer("best_of", BEST_OF)? else { return Ok((n, n)) };
    let best_of = best_of as usize;
    if best_of < n {
        return Err(fields.fault("best_of", format!("expected at least n, which is {n}, got {best_of}")));
    }
    if stream && best_of > n {
        let message = format!("expected n, which is {n}, as stream is true, got {best_of}");
        return Err(fields.fault("best_of", message));
    }
    Ok((n, best_of))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::domain::{Priority, Stop, Truncate};

    fn read(body: &Value) -> Result<Vec<Request>, String> {
        parse(body.to_string().as_bytes()).map(|call| call.requests).map_err(|fault| fault.to_string())
    }

    fn with(extra: Value) -> Result<Request, String> {
        let mut body = json!({"prompt": "x"});
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        read(&body).map(|requests| requests[0].clone())
    }

    #[test]
    fn a_prompt_has_one_of_four_forms() {
        for (value, expected) in [
            (json!("x"), vec![Prompt::Text("x".into())]),
            (json!(["x", "y"]), vec![Prompt::Text("x".into()), Prompt::Text("y".into())]),
            (json!([1, 2]), vec![Prompt::Tokens(vec![1, 2])]),
            (json!([[1], [2, 3]]), vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]),
            (json!(["x", [1]]), vec![Prompt::Text("x".into()), Prompt::Tokens(vec![1])]),
        ] {
            let prompts: Vec<Prompt> =
                read(&json!({"prompt": value})).unwrap().into_iter().map(|request| request.prompt).collect();
            assert_eq!(prompts, expected);
        }
    }

    #[test]
    fn defaults_are_sixteen_tokens_of_one_choice() {
        let request = with(json!({})).unwrap();
        assert_eq!((request.n, request.best_of, request.max_tokens), (1, 1, MaxTokens::Exact(16)));
        assert_eq!((request.sampling.temperature, request.sampling.logprobs), (1.0, None));
        assert!(!request.echo);
    }

    #[test]
    fn what_chats_may_say_texts_may_too() {
        let request = with(json!({"model": "m", "seed": -1, "stop": ["a"], "top_k": 7, "min_p": 0.25, "n": 2,
            "repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1, "temperature": 0.5,
            "top_p": 0.9, "logit_bias": {"5": -100}, "min_tokens": 2, "ignore_eos": true, "stop_token_ids": [3],
            "include_stop_str_in_output": true, "skip_special_tokens": false, "bad_words": ["x"],
            "allowed_token_ids": [5, 6], "truncate_prompt_tokens": 9, "priority": 2, "user": "u",
            "response_format": {"type": "json_object"}}))
        .unwrap();
        let sampling = proto::SamplingParams {
            temperature: 0.5,
            top_k: Some(7),
            top_p: 0.9,
            min_p: 0.25,
            repetition_penalty: 1.5,
            presence_penalty: 1.0,
            frequency_penalty: -1.0,
            logit_bias: vec![(5, -100.0)],
            allowed_token_ids: vec![5, 6],
            grammar: Some(sampling::json_object()),
            ..proto::SamplingParams::default()
        };
        assert_eq!((request.sampling, request.seed), (sampling, Some(u64::MAX)));
        assert_eq!((request.model.as_deref(), request.n, request.priority), (Some("m"), 2, Priority(2)));
        let stop = Stop {
            strings: vec!["a".into()],
            token_ids: vec![3],
            include: true,
            ignore_eos: true,
            min_tokens: 2,
        };
        assert_eq!((request.stop, request.bad_words), (stop, vec!["x".to_owned()]));
        assert_eq!((request.truncate, request.skip_special_tokens), (Some(Truncate::Last(9)), false));
    }

    #[test]
    fn an_echo_with_logprobs_asks_for_those_of_the_prompt() {
        let of = |body: Value| with(body).map(|r| (r.sampling.logprobs, r.sampling.prompt_logprobs)).unwrap();
        assert_eq!(of(json!({"logprobs": 3})), (Some(3), None));
        assert_eq!(of(json!({"logprobs": 3, "echo": true})), (Some(3), Some(3)));
        assert_eq!(of(json!({"logprobs": 3, "echo": true, "prompt_logprobs": 1})), (Some(3), Some(3)));
        assert_eq!(of(json!({"prompt_logprobs": 1})), (None, Some(1)));
        assert_eq!(of(json!({"echo": true})), (None, None));
        let ids = |body: Value| with(body).map(|request| request.prompt_ids).unwrap();
        assert!(ids(json!({"logprobs": 3, "echo": true})) && !ids(json!({"logprobs": 3})));
    }

    #[test]
    fn a_fault_names_its_field() {
        for (extra, start) in [
            (json!({"prompt": null}), "prompt: is required"),
            (json!({"prompt": []}), "prompt: expected at least 1 prompt"),
            (json!({"prompt": ""}), "prompt: must not be empty"),
            (json!({"prompt": ["a", ""]}), "prompt[1]: must not be empty"),
            (json!({"prompt": [[]]}), "prompt[0]: expected at least 1 token"),
            (json!({"prompt": [1, "a"]}), "prompt[1]: expected a token id"),
            (json!({"prompt": [[1, -1]]}), "prompt[0][1]: expected a token id"),
            (json!({"prompt": [true]}), "prompt[0]: expected a string or a list of token ids"),
            (json!({"prompt": 5}), "prompt: expected a string"),
            (json!({"max_tokens": -1}), "max_tokens: expected an integer in [0, "),
            (json!({"logprobs": 6}), "logprobs: expected an integer in [0, 5], got 6"),
            (json!({"logprobs": true}), "logprobs: expected an integer"),
            (json!({"n": 2, "best_of": 1}), "best_of: expected at least n, which is 2, got 1"),
            (json!({"n": 1, "best_of": 2, "stream": true}), "best_of: expected n, which is 1"),
            (json!({"best_of": 0}), "best_of: expected an integer in [1, 20]"),
            (json!({"echo": "yes"}), "echo: expected true or false"),
            (json!({"suffix": 1}), "suffix: expected a string"),
            (json!({"stream_options": {}}), "stream_options: is allowed only"),
            (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs: is not allowed"),
            (json!({"temperature": 2.5}), "temperature: "),
            (json!({"top_p": 1.1}), "top_p: "),
            (json!({"presence_penalty": 2.1}), "presence_penalty: "),
            (json!({"frequency_penalty": -2.1}), "frequency_penalty: "),
            (json!({"n": 129}), "n: expected an integer in [1, 128]"),
            (json!({"logit_bias": {"1": 101}}), "logit_bias.1: expected a number in [-100, 100]"),
            (json!({"seed": "x"}), "seed: expected an integer"),
            (json!({"stop": 1}), "stop: expected a string or a list"),
            (json!({"priority": 6}), "priority: expected an integer in [1, 5]"),
        ] {
            let fault = with(extra.clone()).unwrap_err();
            assert!(fault.starts_with(start), "{extra}: {fault}");
        }
    }
}
