//! The request body of `/generate`.

use std::ops::Bound::{Excluded, Included};
use std::ops::RangeInclusive;

use proto::{SamplingParams, TokenId};
use serde_json::Value;

use super::VllmWriter;
use crate::Config;
use crate::dialect::fields::{Fields, Integers, unsigned};
use crate::dialect::mindie::{self, COUNT, prompt_text};
use crate::dialect::{Call, sampling};
use crate::domain::{
    FieldNames, MaxTokens, Priority, Prompt, REPETITION_PENALTY_MIN, Request, Stop, Truncate,
};
use crate::fault::Fault;

const NAMES: FieldNames = FieldNames::PLAIN;

const MAX_TOKENS: usize = 16;

/// Range of `n` and `best_of`.
const SEQUENCES: RangeInclusive<u64> = 1..=128;

/// What the field `model` says when no adapter is meant.
const NO_ADAPTER: &str = "None";

/// Reads a call from the fields of its body.
pub(crate) fn parse(config: &Config, mut fields: Fields) -> Result<Call<VllmWriter>, Fault> {
    let mut request = Request::new(prompt(fields.require("prompt")?)?, NAMES);
    // As many as the server allows, where that is configured.
    let default = config.max_iter_times.unwrap_or(MAX_TOKENS);
    let max_tokens = fields.integer("max_tokens", COUNT)?.map_or(default, |count| count as usize);
    request.max_tokens = MaxTokens::Clamp(max_tokens);
    request.sampling = sampling(&mut fields)?;
    request.seed = mindie::seed(&mut fields, "seed")?;
    request.stop = stop(&mut fields)?;
    request.skip_special_tokens = fields.flag("skip_special_tokens")?.unwrap_or(true);
    request.model = fields.string("model")?.filter(|model| model != NO_ADAPTER);
    request.priority =
        fields.integer("priority", 1..=5)?.map_or_else(Priority::default, |p| Priority(p as u8));
    request.bad_words = sampling::strings(&mut fields, "bad_words")?;
    let truncate = fields.integer("truncate_prompt_tokens", COUNT)?;
    request.truncate = truncate.map(|count| Truncate::Last(count as usize));
    let sequences = sequences(&mut fields, request.sampling.temperature)?;
    (request.n, request.best_of, request.ranked) = (sequences, sequences, sequences > 1);
    without_effect(&mut fields)?;
    let stream = fields.flag("stream")?.unwrap_or(false);
    request.echo = !stream;
    fields.finish("/generate");
    Ok(Call { requests: vec![request], writer: VllmWriter::new(config, sequences), stream })
}

/// How many sequences: `best_of`, or `n` without it.
fn sequences(fields: &mut Fields, temperature: f32) -> Result<usize, Fault> {
    let n = fields.integer("n", SEQUENCES)?;
    let best_of = fields.integer("best_of", SEQUENCES)?;
    if let (Some(n), Some(best_of)) = (n, best_of)
        && best_of < n
    {
        return Err(fields.fault("best_of", format!("expected at least n, which is {n}, got {best_of}")));
    }
    let (name, count) = best_of.map_or(("n", n.unwrap_or(1)), |best_of| ("best_of", best_of));
    if count > 1 && temperature == 0.0 {
        return Err(fields.fault(name, format!("expected 1 at a temperature of 0, got {count}")));
    }
    Ok(count as usize)
}

/// Fields whose effect nothing in a response of this API could show, or that say what is so anyway.
fn without_effect(fields: &mut Fields) -> Result<(), Fault> {
    sampling::logprobs(fields, "logprobs")?;
    sampling::logprobs(fields, "prompt_logprobs")?;
    for name in ["detokenize", "spaces_between_special_tokens"] {
        fields.flag(name)?;
    }
    Ok(())
}

fn prompt(value: Value) -> Result<Prompt, Fault> {
    match value {
        Value::Array(list) if list.iter().any(Value::is_number) => token_ids(&list).map(Prompt::Tokens),
        other => prompt_text(other, "prompt").map(Prompt::Text),
    }
}

fn token_ids(list: &[Value]) -> Result<Vec<TokenId>, Fault> {
    let ids = list.iter().enumerate();
    ids.map(|(index, value)| sampling::token_id(value, &format!("prompt[{index}]"))).collect()
}

fn sampling(fields: &mut Fields) -> Result<SamplingParams, Fault> {
    let penalty = (Included(-2.0), Included(2.0));
    let temperature = fields.float("temperature", (Included(0.0), Included(f32::MAX)))?.unwrap_or(1.0);
    let mut sampling = SamplingParams {
        temperature,
        top_k: fields.integer("top_k", COUNT)?.map(|k| k as u32),
        top_p: fields.float("top_p", (Excluded(1e-6), Included(1.0)))?.unwrap_or(1.0),
        repetition_penalty: fields.float("repetition_penalty", REPETITION_PENALTY_MIN..=2.0)?.unwrap_or(1.0),
        presence_penalty: fields.float("presence_penalty", penalty)?.unwrap_or(0.0),
        frequency_penalty: fields.float("frequency_penalty", penalty)?.unwrap_or(0.0),
        grammar: sampling::structured(fields)?,
        ..SamplingParams::default()
    };
    sampling::filters(fields, &mut sampling)?;
    Ok(sampling)
}

fn stop(fields: &mut Fields) -> Result<Stop, Fault> {
    let strings = sampling::texts(fields.take("stop"), "stop")?;
    // What is no integer of 32 bits is ignored, and so is what cannot be a token.
    let ids = fields.list("stop_token_ids")?.unwrap_or_default();
    let ids = ids
        .iter()
        .filter_map(|value| unsigned(value, Integers::Strict))
        .filter(|id| COUNT.contains(id) || *id == 0);
    let mut stop = Stop {
        strings,
        token_ids: ids.map(|id| id as TokenId).collect(),
        include: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        ..Stop::default()
    };
    sampling::min_tokens(fields, &mut stop)?;
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(body: &Value) -> Fields {
        Fields::parse(body.to_string().as_bytes(), Integers::Strict).unwrap()
    }

    fn read(body: &Value) -> Result<Request, String> {
        parse(&Config::default(), fields(body))
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
            "best_of": 2, "n": 2
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
        (expected.n, expected.best_of, expected.ranked) = (2, 2, true);
        assert_eq!(read(&body), Ok(expected));
    }

    #[test]
    fn defaults_sample_at_temperature_one() {
        let request = read(&json!({"prompt": "x"})).unwrap();
        assert_eq!(request.sampling, SamplingParams { temperature: 1.0, ..SamplingParams::default() });
        assert_eq!(request.max_tokens, MaxTokens::Clamp(16));
        assert_eq!((request.seed, request.model, request.stop), (None, None, Stop::default()));
        assert!(request.skip_special_tokens);
        assert!(!read(&json!({"prompt": "x", "skip_special_tokens": false})).unwrap().skip_special_tokens);
        let greedy = read(&json!({"prompt": "x", "temperature": 0.0, "stream": true})).unwrap();
        assert_eq!((greedy.sampling.temperature, greedy.echo), (0.0, false));
    }

    #[test]
    fn sequences_are_best_of_or_n() {
        let count =
            |body: Value| read(&body).map(|request| (request.n, request.best_of, request.ranked)).unwrap();
        assert_eq!(count(json!({"prompt": "x", "n": 2})), (2, 2, true));
        assert_eq!(count(json!({"prompt": "x", "n": 2, "best_of": 3})), (3, 3, true));
        assert_eq!(count(json!({"prompt": "x", "n": null, "best_of": null})), (1, 1, false));
        assert_eq!(count(json!({"prompt": "x", "n": 1, "temperature": 0})), (1, 1, false));
    }

    #[test]
    fn the_users_of_vllm_have_their_parameters() {
        let body = json!({"prompt": "x", "min_p": 0.1, "min_tokens": 3, "bad_words": ["a"], "logit_bias": {"5": -1},
            "allowed_token_ids": [1, 2], "guided_regex": "a+", "truncate_prompt_tokens": 7, "priority": 1,
            "logprobs": 3, "prompt_logprobs": 0, "detokenize": true, "spaces_between_special_tokens": false});
        let request = read(&body).unwrap();
        let sampling = &request.sampling;
        assert_eq!((sampling.min_p, request.stop.min_tokens), (0.1, 3));
        assert_eq!(request.bad_words, ["a"]);
        assert_eq!(
            (sampling.logit_bias.as_slice(), sampling.allowed_token_ids.as_slice()),
            (&[(5, -1.0)][..], &[1, 2][..])
        );
        assert_eq!(sampling.grammar, Some(proto::Grammar::Regex("a+".into())));
        assert_eq!((request.truncate, request.priority), (Some(Truncate::Last(7)), Priority(1)));
    }

    #[test]
    fn the_default_length_is_the_servers_most_where_it_has_one() {
        let config = Config { max_iter_times: Some(512), ..Config::default() };
        let call = parse(&config, fields(&json!({"prompt": "x"}))).unwrap();
        assert_eq!(call.requests[0].max_tokens, MaxTokens::Clamp(512));
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
            (
                json!({"prompt": [{"type": "video_url", "video_url": "x"}]}),
                "prompt[0].type: this model takes text only",
            ),
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
            (json!({"prompt": "x", "n": 3, "best_of": 2}), "best_of: expected at least n, which is 3, got 2"),
            (json!({"prompt": "x", "n": 2, "temperature": 0}), "n: expected 1 at a temperature of 0, got 2"),
            (json!({"prompt": "x", "best_of": 2, "temperature": 0}), "best_of: expected 1 at"),
            (json!({"prompt": "x", "best_of": 129}), "best_of: expected an integer in [1, 128]"),
            (json!({"prompt": "x", "min_p": 1.5}), "min_p: "),
            (json!({"prompt": "x", "min_tokens": -1}), "min_tokens: "),
            (json!({"prompt": "x", "logprobs": 21}), "logprobs: expected an integer in [0, 20]"),
            (json!({"prompt": "x", "prompt_logprobs": true}), "prompt_logprobs: "),
            (json!({"prompt": "x", "priority": 6}), "priority: expected an integer in [1, 5]"),
            (json!({"prompt": "x", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens: "),
            (json!({"prompt": "x", "bad_words": "a"}), "bad_words: expected a list"),
            (json!({"prompt": "x", "allowed_token_ids": ["a"]}), "allowed_token_ids[0]: expected a token id"),
            (json!({"prompt": "x", "guided_choice": []}), "guided_choice: expected 1 to"),
            (json!({"prompt": "x", "detokenize": 1}), "detokenize: "),
            (json!({"prompt": "x", "n": 129}), "n: expected an integer in [1, 128]"),
            (json!({"prompt": "x", "n": 0}), "n: expected an integer in [1, 128]"),
            (json!({"prompt": "x", "max_tokens": 2_147_483_648_u64}), "max_tokens: "),
            (json!({"prompt": "x", "top_p": 1e-6}), "top_p: expected a number greater than 0.000001"),
            (json!({"prompt": "x", "top_p": 1.01}), "top_p: "),
            (json!({"prompt": "x", "top_k": 0}), "top_k: "),
            (json!({"prompt": "x", "presence_penalty": -2.1}), "presence_penalty: "),
            (json!({"prompt": "x", "frequency_penalty": 2.1}), "frequency_penalty: "),
            (json!({"prompt": "x", "repetition_penalty": 0}), "repetition_penalty: "),
            (json!({"prompt": "x", "stop": {}}), "stop: expected a string or a list of strings"),
            (json!({"prompt": "x", "model": 5}), "model: expected a string"),
            (json!({"prompt": "x", "skip_special_tokens": 1}), "skip_special_tokens: expected true or false"),
            (json!({"prompt": "x", "ignore_eos": 1}), "ignore_eos: expected true or false"),
            (json!({"prompt": "x", "include_stop_str_in_output": 1}), "include_stop_str_in_output: expected"),
            (json!({"prompt": "x", "spaces_between_special_tokens": 1}), "spaces_between_special_tokens: "),
            (json!({"prompt": "x", "logit_bias": []}), "logit_bias: expected an object"),
            (json!({"prompt": "x", "structured_outputs": []}), "structured_outputs: expected an object"),
        ] {
            let fault = read(&body).unwrap_err();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }
}
