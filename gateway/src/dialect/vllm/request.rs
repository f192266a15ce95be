//! The request body of `/generate`.

use std::ops::Bound::{Excluded, Included};

use proto::{SamplingParams, TokenId};
use serde_json::Value;

use super::VllmWriter;
use crate::dialect::fields::{Fields, Integers, unexpected, unsigned};
use crate::dialect::mindie::{COUNT, check_prompt};
use crate::dialect::{Call, parts};
use crate::domain::{FieldNames, MaxTokens, Prompt, REPETITION_PENALTY_MIN, Request, Stop};
use crate::fault::Fault;

const NAMES: FieldNames = FieldNames::PLAIN;

const MAX_TOKENS: u64 = 16;

/// What the field `model` says when no adapter is meant.
const NO_ADAPTER: &str = "None";

/// Reads a call.
pub(crate) fn parse(body: &[u8]) -> Result<Call<VllmWriter>, Fault> {
    let mut fields = Fields::parse(body, Integers::Strict)?;
    let prompt = prompt(fields.require("prompt")?)?;
    let max_tokens = fields.integer("max_tokens", COUNT)?.unwrap_or(MAX_TOKENS) as usize;
    let sampling = sampling(&mut fields)?;
    let seed = fields.integer("seed", 1..=u64::MAX)?;
    let stream = fields.flag("stream")?.unwrap_or(false);
    let stop = stop(&mut fields)?;
    let skip_special_tokens = fields.flag("skip_special_tokens")?.unwrap_or(true);
    let model = fields.string("model")?.filter(|model| model != NO_ADAPTER);
    one_sequence(&mut fields)?;
    fields.finish("/generate");

    let mut request = Request::new(prompt, NAMES);
    request.model = model;
    request.sampling = sampling;
    request.seed = seed;
    request.max_tokens = MaxTokens::Clamp(max_tokens);
    request.stop = stop;
    request.skip_special_tokens = skip_special_tokens;
    request.echo = !stream;
    Ok(Call { requests: vec![request], writer: VllmWriter::default(), stream })
}

fn prompt(value: Value) -> Result<Prompt, Fault> {
    match value {
        Value::Array(list) if list.iter().any(Value::is_number) => token_ids(&list).map(Prompt::Tokens),
        other => {
            let text = parts::text_or_parts(other, "prompt")?;
            check_prompt(&text, "prompt")?;
            Ok(Prompt::Text(text))
        }
    }
}

fn token_ids(list: &[Value]) -> Result<Vec<TokenId>, Fault> {
    let ids = list.iter().enumerate().map(|(index, value)| {
        let id = unsigned(value, Integers::Strict).and_then(|id| TokenId::try_from(id).ok());
        id.ok_or_else(|| unexpected(&format!("prompt[{index}]"), "a token id", value))
    });
    ids.collect()
}

fn sampling(fields: &mut Fields) -> Result<SamplingParams, Fault> {
    let penalty = (Included(-2.0), Included(2.0));
    let temperature = fields.float("temperature", (Included(0.0), Included(f32::MAX)))?.unwrap_or(1.0);
    Ok(SamplingParams {
        temperature,
        top_k: fields.integer("top_k", COUNT)?.map(|k| k as u32),
        top_p: fields.float("top_p", (Excluded(1e-6), Included(1.0)))?.unwrap_or(1.0),
        repetition_penalty: fields.float("repetition_penalty", REPETITION_PENALTY_MIN..=2.0)?.unwrap_or(1.0),
        presence_penalty: fields.float("presence_penalty", penalty)?.unwrap_or(0.0),
        frequency_penalty: fields.float("frequency_penalty", penalty)?.unwrap_or(0.0),
        ..SamplingParams::default()
    })
}

fn stop(fields: &mut Fields) -> Result<Stop, Fault> {
    let strings = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(list)) => stop_list(list)?,
        Some(other) => return Err(unexpected("stop", "a string or a list of strings", &other)),
    };
    // What is no integer of 32 bits is ignored, and so is what cannot be a token.
    let ids = fields.list("stop_token_ids")?.unwrap_or_default();
    let ids = ids
        .iter()
        .filter_map(|value| unsigned(value, Integers::Strict))
        .filter(|id| COUNT.contains(id) || *id == 0);
    Ok(Stop {
        strings,
        token_ids: ids.map(|id| id as TokenId).collect(),
        include: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        ..Stop::default()
    })
}

fn stop_list(list: Vec<Value>) -> Result<Vec<String>, Fault> {
    let strings = list.into_iter().enumerate().map(|(index, value)| match value {
        Value::String(text) => Ok(text),
        other => Err(unexpected(&format!("stop[{index}]"), "a string", &other)),
    });
    strings.collect()
}

/// Checks `n` and `best_of`, of which only one is served yet.
fn one_sequence(fields: &mut Fields) -> Result<(), Fault> {
    for name in ["n", "best_of"] {
        if let Some(count) = fields.integer(name, 1..=128)?
            && count > 1
        {
            return Err(fields.fault(name, format!("more than 1 sequence is not supported yet, got {count}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value) -> Result<Request, String> {
        parse(body.to_string().as_bytes())
            .map(|call| call.requests[0].clone())
            .map_err(|fault| fault.to_string())
    }

    #[test]
    fn the_documented_example_is_understood() {
        let body = json!({
            "prompt": "My name is Olivier and I", "max_tokens": 20, "repetition_penalty": 1.03,
            "presence_penalty": 1.2, "frequency_penalty": 1.2, "temperature": 0.5, "top_p": 0.95, "top_k": 10,
            "seed": null, "stream": false, "stop": null, "stop_token_ids": null, "model": "None",
            "include_stop_str_in_output": false, "skip_special_tokens": true, "ignore_eos": false,
            "best_of": null, "n": null
        });
        let mut expected = Request::new(Prompt::Text("My name is Olivier and I".into()), NAMES);
        expected.sampling = SamplingParams {
            temperature: 0.5,
            top_k: Some(10),
            top_p: 0.95,
            repetition_penalty: 1.03,
            presence_penalty: 1.2,
            frequency_penalty: 1.2,
            ..SamplingParams::default()
        };
        expected.max_tokens = MaxTokens::Clamp(20);
        expected.echo = true;
        assert_eq!(read(&body), Ok(expected));
    }

    #[test]
    fn defaults_sample_at_temperature_one() {
        let request = read(&json!({"prompt": "x"})).unwrap();
        assert_eq!(request.sampling, SamplingParams { temperature: 1.0, ..SamplingParams::default() });
        assert_eq!(request.max_tokens, MaxTokens::Clamp(16));
        assert_eq!((request.seed, request.model, request.stop), (None, None, Stop::default()));
        assert!(request.skip_special_tokens);
        let greedy = read(&json!({"prompt": "x", "temperature": 0.0, "stream": true})).unwrap();
        assert_eq!((greedy.sampling.temperature, greedy.echo), (0.0, false));
    }

    #[test]
    fn prompts_come_in_three_forms() {
        for (value, prompt) in [
            (json!("x"), Prompt::Text("x".into())),
            (
                json!([{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]),
                Prompt::Text("xy".into()),
            ),
            (json!([1, 2]), Prompt::Tokens(vec![1, 2])),
        ] {
            assert_eq!(read(&json!({"prompt": value})).unwrap().prompt, prompt);
        }
    }

    #[test]
    fn stops_come_as_one_or_many() {
        let stop = |body: Value| read(&body).map(|request| request.stop);
        assert_eq!(stop(json!({"prompt": "x", "stop": "a"})).unwrap().strings, ["a"]);
        assert_eq!(stop(json!({"prompt": "x", "stop": ["a", "b"]})).unwrap().strings, ["a", "b"]);
        assert!(stop(json!({"prompt": "x", "stop": []})).unwrap().strings.is_empty());
        let body = json!({"prompt": "x", "stop_token_ids": [7042, "x", -1, 3e9, null, 0],
            "include_stop_str_in_output": true, "ignore_eos": true});
        let expected = Stop {
            strings: vec![],
            token_ids: vec![7042, 0],
            include: true,
            ignore_eos: true,
            min_tokens: 0,
        };
        assert_eq!(stop(body), Ok(expected));
    }

    #[test]
    fn a_fault_names_its_field() {
        for (body, start) in [
            (json!({}), "prompt: is required"),
            (json!({"prompt": ""}), "prompt: must not be empty"),
            (json!({"prompt": [1, -2]}), "prompt[1]: expected a token id, got -2"),
            (json!({"prompt": [1, "x"]}), "prompt[1]: expected a token id"),
            (json!({"prompt": [{"type": "video_url", "video_url": "x"}]}), "prompt[0].type: only text"),
            (
                json!({"prompt": "x", "max_tokens": 0}),
                "max_tokens: expected an integer in [1, 2147483647], got 0",
            ),
            (json!({"prompt": "x", "max_tokens": 1.5}), "max_tokens: "),
            (json!({"prompt": "x", "temperature": -0.1}), "temperature: "),
            (json!({"prompt": "x", "temperature": 1e300}), "temperature: "),
            (json!({"prompt": "x", "top_p": 0}), "top_p: "),
            (json!({"prompt": "x", "top_k": -1}), "top_k: "),
            (json!({"prompt": "x", "repetition_penalty": 2.1}), "repetition_penalty: "),
            (
                json!({"prompt": "x", "repetition_penalty": 1e-45}),
                "repetition_penalty: expected a number of at least 1.1754944e-38 and at most 2, got ",
            ),
            (json!({"prompt": "x", "repetition_penalty": 1e-40}), "repetition_penalty: "),
            (json!({"prompt": "x", "seed": 1e20}), "seed: "),
            (json!({"prompt": "x", "presence_penalty": 2.1}), "presence_penalty: "),
            (json!({"prompt": "x", "frequency_penalty": -2.1}), "frequency_penalty: "),
            (json!({"prompt": "x", "seed": 0}), "seed: "),
            (json!({"prompt": "x", "stream": "yes"}), "stream: "),
            (json!({"prompt": "x", "stop": [1]}), "stop[0]: expected a string"),
            (json!({"prompt": "x", "stop_token_ids": 5}), "stop_token_ids: expected a list"),
            (json!({"prompt": "x", "n": 2}), "n: more than 1 sequence is not supported yet, got 2"),
            (json!({"prompt": "x", "best_of": 2}), "best_of: more than 1"),
            (json!({"prompt": "x", "n": 129}), "n: expected an integer in [1, 128]"),
        ] {
            let fault = read(&body).unwrap_err();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }
}
