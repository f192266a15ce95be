//! The request body of `generate` and `generate_stream`.

use std::ops::Bound::{Excluded, Included};
use std::time::Duration;

use proto::SamplingParams;
use serde_json::Value;
use uuid::Uuid;

use super::TritonWriter;
use super::response::{Earlier, Shape};
use crate::dialect::fields::{Fields, Integers, unexpected, unsigned};
use crate::dialect::mindie::{COUNT, check_id, check_prompt};
use crate::dialect::{Call, parts};
use crate::domain::{FieldNames, MaxTokens, Prompt, REPETITION_PENALTY_MIN, Request};
use crate::fault::Fault;

const NAMES: FieldNames = FieldNames {
    prompt: "text_input",
    max_tokens: "parameters.max_new_tokens",
    stop: "parameters.stop",
    stop_token_ids: "parameters.stop_token_ids",
    ..FieldNames::PLAIN
};

const MAX_NEW_TOKENS: u64 = 20;

/// What a call says outside its body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Envelope<'a> {
    /// The model in the path.
    pub(crate) model: &'a str,
    /// `generate_stream`, not `generate`.
    pub(crate) stream: bool,
    /// The header `is-recompute: true`: the client moves a request that already has tokens.
    pub(crate) recompute: bool,
}

/// Reads a call.
pub(crate) fn parse(envelope: Envelope<'_>, body: &[u8]) -> Result<Call<TritonWriter>, Fault> {
    let mut fields = Fields::parse(body, Integers::Strict)?;
    let id = fields.string("id")?;
    if let Some(id) = &id {
        check_id(id, "id")?;
    }
    let prompt = prompt(fields.require("text_input")?, envelope.recompute)?;
    let parameters = match fields.object("parameters")? {
        Some(parameters) => Parameters::read(parameters)?,
        None => Parameters::read(Fields::of(
            Value::Object(serde_json::Map::default()),
            "parameters",
            Integers::Strict,
        )?)?,
    };
    fields.finish("generate");

    let earlier = parameters.earlier(&prompt)?;
    let mut request = Request::new(prompt, NAMES);
    request.model = Some(envelope.model.to_owned());
    request.sampling = parameters.sampling;
    request.seed = parameters.seed;
    request.max_tokens = MaxTokens::Clamp(parameters.max_new_tokens);
    request.timeout = parameters.timeout;
    let id = id.unwrap_or_else(|| Uuid::new_v4().simple().to_string());
    let writer = TritonWriter::new(Shape { id, details: parameters.details }, earlier);
    Ok(Call { requests: vec![request], writer, stream: envelope.stream })
}

fn prompt(value: Value, recompute: bool) -> Result<Prompt, Fault> {
    let text = parts::text_or_parts(value, "text_input")?;
    check_prompt(&text, "text_input")?;
    if recompute { resumed(&text) } else { Ok(Prompt::Text(text)) }
}

/// Token ids as text: how many are the prompt's, then the prompt's, then those generated so far.
fn resumed(text: &str) -> Result<Prompt, Fault> {
    let expected =
        "expected the prompt's token count, its tokens and those generated so far, separated by commas";
    let fault = |got: String| Fault::field("text_input", format!("{expected}; {got}"));
    let mut numbers = text.split(',').map(|word| {
        let word = word.trim();
        word.parse::<u32>().map_err(|_| fault(format!("{word:?} is no token id")))
    });
    let prompt = numbers.next().transpose()?.unwrap_or(0) as usize;
    let tokens = numbers.collect::<Result<Vec<u32>, _>>()?;
    if prompt == 0 || tokens.len() < prompt {
        return Err(fault(format!("got a count of {prompt} and {} tokens", tokens.len())));
    }
    let generated = tokens.len() - prompt;
    Ok(Prompt::Resumed { tokens, generated })
}

/// The object `parameters`.
struct Parameters {
    details: bool,
    max_new_tokens: usize,
    sampling: SamplingParams,
    seed: Option<u64>,
    timeout: Option<Duration>,
    first_token_cost: Option<u64>,
    decode_time: Option<Vec<u64>>,
}

impl Parameters {
    fn read(mut fields: Fields) -> Result<Self, Fault> {
        let details = fields.flag("details")?.unwrap_or(false);
        let do_sample = fields.flag("do_sample")?;
        let max_new_tokens = fields.integer("max_new_tokens", COUNT)?.unwrap_or(MAX_NEW_TOKENS) as usize;
        let repetition_penalty = fields.float("repetition_penalty", REPETITION_PENALTY_MIN..=f32::MAX)?;
        let seed = fields.integer("seed", 1..=u64::MAX)?;
        let temperature = fields.float("temperature", (Excluded(1e-6), Included(f32::MAX)))?;
        let top_k = fields.integer("top_k", COUNT)?;
        let top_p = fields.float("top_p", (Excluded(1e-6), Included(1.0)))?;
        let typical_p = fields.float("typical_p", (Excluded(0.0), Included(1.0)))?;
        Self::check_without_effect(&mut fields)?;
        let timeout = fields.integer("timeout", 1..=3600)?.map(Duration::from_secs);
        let first_token_cost = fields.integer("firstTokenCost", 0..=u64::MAX)?;
        let decode_time = decode_time(&mut fields)?;
        fields.finish("generate");

        let sampled = temperature.is_some()
            || top_k.is_some()
            || top_p.is_some()
            || typical_p.is_some()
            || seed.is_some();
        let sampling = SamplingParams {
            temperature: if do_sample.unwrap_or(sampled) { temperature.unwrap_or(1.0) } else { 0.0 },
            top_k: top_k.map(|k| k as u32),
            top_p: top_p.unwrap_or(1.0),
            repetition_penalty: repetition_penalty.unwrap_or(1.0),
            ..SamplingParams::default()
        };
        Ok(Self { details, max_new_tokens, sampling, seed, timeout, first_token_cost, decode_time })
    }

    /// Fields that are checked and change nothing: scheduling hints, and a watermark that nothing could add.
    fn check_without_effect(fields: &mut Fields) -> Result<(), Fault> {
        fields.integer("batch_size", COUNT)?;
        fields.integer("priority", 1..=5)?;
        if fields.flag("watermark")?.unwrap_or(false) {
            return Err(fields.fault("watermark", "true is not supported yet"));
        }
        Ok(())
    }

    /// What the client was already told of a request that it moves here.
    fn earlier(&self, prompt: &Prompt) -> Result<Option<Earlier>, Fault> {
        let Prompt::Resumed { generated, .. } = prompt else { return Ok(None) };
        let decode_time = self.decode_time.clone().unwrap_or_default();
        let expected = generated.saturating_sub(1);
        if decode_time.len() != expected {
            return Err(Fault::field(
                "parameters.decodeTime",
                format!(
                    "expected {expected} times, one per generated token after the first, got {}",
                    decode_time.len()
                ),
            ));
        }
        if *generated == 0 {
            return Ok(None);
        }
        Ok(Some(Earlier { first_token_cost: self.first_token_cost, decode_time }))
    }
}

fn decode_time(fields: &mut Fields) -> Result<Option<Vec<u64>>, Fault> {
    let path = fields.path("decodeTime");
    let Some(list) = fields.list("decodeTime")? else { return Ok(None) };
    let times = list.iter().enumerate().map(|(index, value)| {
        unsigned(value, Integers::Strict).ok_or_else(|| {
            unexpected(&format!("{path}[{index}]"), "milliseconds as an unsigned integer", value)
        })
    });
    times.collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ENVELOPE: Envelope<'_> = Envelope { model: "m", stream: true, recompute: false };

    fn read(envelope: Envelope<'_>, body: &Value) -> Result<Request, String> {
        parse(envelope, body.to_string().as_bytes())
            .map(|call| call.requests[0].clone())
            .map_err(|fault| fault.to_string())
    }

    fn with(parameters: Value) -> Result<Request, String> {
        read(ENVELOPE, &json!({"text_input": "x", "parameters": parameters}))
    }

    #[test]
    fn the_documented_example_is_understood() {
        let body = json!({
            "id": "a123",
            "text_input": "My name is Olivier and I",
            "parameters": {
                "details": true, "do_sample": true, "max_new_tokens": 5, "repetition_penalty": 1.1, "seed": 123,
                "temperature": 1, "top_k": 10, "top_p": 0.99, "batch_size": 100, "typical_p": 0.5,
                "watermark": false, "priority": 5, "timeout": 10
            }
        });
        let mut expected = Request::new(Prompt::Text("My name is Olivier and I".into()), NAMES);
        expected.model = Some("m".into());
        expected.sampling = SamplingParams {
            temperature: 1.0,
            top_k: Some(10),
            top_p: 0.99,
            repetition_penalty: 1.1,
            ..SamplingParams::default()
        };
        expected.seed = Some(123);
        expected.max_tokens = MaxTokens::Clamp(5);
        expected.timeout = Some(Duration::from_secs(10));
        assert_eq!(read(ENVELOPE, &body), Ok(expected));
    }

    #[test]
    fn defaults_are_greedy_and_twenty_tokens() {
        let mut expected = Request::new(Prompt::Text("x".into()), NAMES);
        expected.model = Some("m".into());
        expected.max_tokens = MaxTokens::Clamp(20);
        for body in [
            json!({"text_input": "x"}),
            json!({"text_input": "x", "id": null, "parameters": null}),
            json!({"text_input": "x", "parameters": {"temperature": null, "unknown": 1}, "unknown": {}}),
            json!({"text_input": [{"type": "text", "text": "x"}]}),
        ] {
            assert_eq!(read(ENVELOPE, &body), Ok(expected.clone()), "{body}");
        }
    }

    #[test]
    fn sampling_follows_do_sample_or_else_the_other_fields() {
        for (parameters, temperature) in [
            (json!({"do_sample": true}), 1.0),
            (json!({"do_sample": false, "temperature": 0.5, "seed": 1}), 0.0),
            (json!({"temperature": 0.5}), 0.5),
            (json!({"top_k": 3}), 1.0),
            (json!({"top_p": 0.5}), 1.0),
            (json!({"typical_p": 0.5}), 1.0),
            (json!({"seed": 7}), 1.0),
            (json!({"repetition_penalty": 1.2}), 0.0),
        ] {
            let request = with(parameters.clone()).unwrap();
            assert_eq!(request.sampling.temperature, temperature, "{parameters}");
        }
    }

    #[test]
    fn a_value_outside_its_range_is_a_fault_that_names_the_field() {
        for (field, values) in [
            ("details", vec![json!(1), json!("true")]),
            ("do_sample", vec![json!(0)]),
            ("max_new_tokens", vec![json!(0), json!(-1), json!(2_147_483_648_u64), json!(5.0), json!(true)]),
            (
                "repetition_penalty",
                vec![
                    json!(0),
                    json!(1e-45),
                    json!(1e-40),
                    json!(1e-300),
                    json!(-0.5),
                    json!("1"),
                    json!(1e300),
                ],
            ),
            ("seed", vec![json!(0), json!(-1), json!(1.5)]),
            ("temperature", vec![json!(0), json!(1e-6), json!(1e300), json!(false)]),
            ("top_k", vec![json!(0), json!(-1), json!(2_147_483_648_u64)]),
            ("top_p", vec![json!(0), json!(1e-6), json!(1.01)]),
            ("batch_size", vec![json!(0), json!(1.0)]),
            ("typical_p", vec![json!(0), json!(-1.0), json!(1.5)]),
            ("watermark", vec![json!(true), json!(1)]),
            ("priority", vec![json!(0), json!(6)]),
            ("timeout", vec![json!(0), json!(3601), json!(1.0)]),
            ("firstTokenCost", vec![json!(-1), json!(1.0)]),
            ("decodeTime", vec![json!(1), json!([1, -1]), json!([1.5])]),
        ] {
            for value in values {
                let fault = with(json!({field: value})).expect_err(field);
                assert!(fault.starts_with(&format!("parameters.{field}")), "{field} = {value}: {fault}");
            }
        }
        for (field, value) in [
            ("seed", json!(u64::MAX)),
            ("max_new_tokens", json!(i32::MAX)),
            ("timeout", json!(3600)),
            ("top_p", json!(1.0)),
        ] {
            assert!(with(json!({field: value})).is_ok(), "{field} = {value}");
        }
    }

    #[test]
    fn prompts_and_ids_are_checked() {
        for (body, start) in [
            (json!({}), "text_input: is required"),
            (json!({"text_input": null}), "text_input: is required"),
            (json!({"text_input": ""}), "text_input: must not be empty"),
            (json!({"text_input": []}), "text_input: must not be empty"),
            (json!({"text_input": 5}), "text_input: expected a string or a list of parts"),
            (
                json!({"text_input": [{"type": "image_url", "image_url": "/x.png"}]}),
                "text_input[0].type: this model takes text only",
            ),
            (json!({"text_input": [{"type": "text"}]}), "text_input[0].text: is required"),
            (json!({"text_input": ["x"]}), "text_input[0]: expected an object"),
            (json!({"text_input": "x", "id": ""}), "id: expected 1 to 256"),
            (json!({"text_input": "x", "id": 7}), "id: expected a string, got 7"),
            (json!({"text_input": "x", "parameters": []}), "parameters: expected an object"),
        ] {
            let fault = read(ENVELOPE, &body).unwrap_err();
            assert!(fault.starts_with(start), "{body}: {fault}");
        }
    }

    #[test]
    fn a_moved_request_brings_its_tokens_and_times() {
        let envelope = Envelope { recompute: true, ..ENVELOPE };
        let body = |text: &str, times: Value| json!({"text_input": text, "parameters": {"firstTokenCost": 31, "decodeTime": times}});
        let request = read(envelope, &body("3,11,12,13,20,21", json!([9]))).unwrap();
        assert_eq!(request.prompt, Prompt::Resumed { tokens: vec![11, 12, 13, 20, 21], generated: 2 });
        let fault = read(envelope, &body("3,11,12,13,20,21", json!([9, 9]))).unwrap_err();
        assert!(fault.starts_with("parameters.decodeTime: expected 1 times"), "{fault}");
        for text in ["3,11,12", "0", "x", "3,11,,13", "-1,5"] {
            let fault = read(envelope, &body(text, json!([]))).unwrap_err();
            assert!(fault.starts_with("text_input: expected the prompt's token count"), "{text}: {fault}");
        }
        // Without the header the same fields are checked and not used.
        assert!(read(ENVELOPE, &body("any text", json!([1, 2, 3]))).is_ok());
    }
}
