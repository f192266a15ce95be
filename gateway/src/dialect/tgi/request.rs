//! The request body of TGI's routes.

use std::ops::Bound::{Excluded, Included};
use std::ops::RangeInclusive;

use proto::{Grammar, SamplingParams};
use serde_json::Value;

use super::TgiWriter;
use super::response::Shape;
use crate::Config;
use crate::dialect::fields::{Fields, Integers, shown, unexpected};
use crate::dialect::mindie::{COUNT, Choosing, prompt_text};
use crate::dialect::{Call, sampling};
use crate::domain::{FieldNames, MaxTokens, Prompt, REPETITION_PENALTY_MIN, Request, Stop, Truncate};
use crate::fault::Fault;

const NAMES: FieldNames = FieldNames {
    prompt: "inputs",
    max_tokens: "parameters.max_new_tokens",
    stop: "parameters.stop",
    grammar: "parameters.grammar",
    ..FieldNames::PLAIN
};

/// As `MindIE` documents it; TGI's own is 100.
const MAX_NEW_TOKENS: u64 = 20;

/// Range of `best_of`.
pub(super) const BEST_OF: RangeInclusive<u64> = 1..=128;

/// Where a call arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/generate`: `stream` decides.
    Generate,
    /// `/generate_stream`: always a stream.
    GenerateStream,
    /// `/`: `stream` decides, and an answer in one piece stands in a list.
    Root,
}

/// Reads a call from the fields of its body.
pub(crate) fn parse(config: &Config, route: Route, mut fields: Fields) -> Result<Call<TgiWriter>, Fault> {
    let text = prompt_text(fields.require("inputs")?, "inputs")?;
    let asked = fields.flag("stream")?.unwrap_or(false);
    let stream = asked || route == Route::GenerateStream;
    let mut request = Request::new(Prompt::Text(text), NAMES);
    // Beyond TGI, which serves one model.
    request.model = fields.string("model")?;
    let mut parameters = match fields.object("parameters")? {
        Some(parameters) => parameters,
        None => Fields::of(Value::Object(serde_json::Map::default()), "parameters", Integers::Strict)?,
    };
    fields.finish("TGI");
    let shape = read(&mut parameters, &mut request, config, stream)?;
    parameters.finish("TGI");
    let shape = Shape { listed: route == Route::Root, ..shape };
    Ok(Call { requests: vec![request], writer: TgiWriter::new(shape), stream })
}

/// Reads what `parameters` say.
fn read(fields: &mut Fields, request: &mut Request, config: &Config, stream: bool) -> Result<Shape, Fault> {
    if fields.string("adapter_id")?.is_some_and(|id| !id.is_empty()) {
        return Err(fields.fault("adapter_id", "no adapters are served here"));
    }
    request.max_tokens =
        MaxTokens::Clamp(fields.integer("max_new_tokens", COUNT)?.unwrap_or(MAX_NEW_TOKENS) as usize);
    request.seed = fields.integer("seed", 0..=u64::MAX)?;
    request.sampling = sampling(fields, request.seed.is_some(), config)?;
    request.sampling.grammar = grammar(fields)?;
    // What stops a text is its last part, as TGI has it.
    let stop = sampling::texts(fields.take("stop"), &fields.path("stop"))?;
    request.stop = Stop { strings: stop, include: true, ..Stop::default() };
    request.truncate = fields.integer("truncate", COUNT)?.map(|count| Truncate::Last(count as usize));
    request.echo = fields.flag("return_full_text")?.unwrap_or(false);
    let sampled = request.sampling.temperature > 0.0;
    let best_of = best_of(fields, sampled, stream)?;
    (request.n, request.best_of, request.ranked) = (best_of, best_of, best_of > 1);
    let details = fields.flag("details")?.unwrap_or(false);
    let prefill = fields.flag("decoder_input_details")?.unwrap_or(false);
    if prefill && stream {
        return Err(fields.fault("decoder_input_details", "is not allowed in a stream"));
    }
    request.sampling.prompt_logprobs = prefill.then_some(0);
    request.prompt_ids = prefill;
    let top = sampling::logprobs(fields, "top_n_tokens")?.unwrap_or(0);
    request.sampling.logprobs = (top > 0).then_some(top);
    Ok(Shape {
        details: details || prefill,
        prefill,
        top: top as usize,
        sampled,
        stop: request.stop.clone(),
        listed: false,
    })
}

/// How many sequences, of which the likeliest is the answer and the others are its details.
fn best_of(fields: &mut Fields, sampled: bool, stream: bool) -> Result<usize, Fault> {
    let count = fields.integer("best_of", BEST_OF)?.unwrap_or(1);
    if count > 1 && stream {
        return Err(fields.fault("best_of", format!("expected 1 in a stream, got {count}")));
    }
    if count > 1 && !sampled {
        return Err(fields.fault("best_of", format!("expected 1 without sampling, got {count}")));
    }
    Ok(count as usize)
}

/// How to choose tokens.
fn sampling(fields: &mut Fields, seeded: bool, config: &Config) -> Result<SamplingParams, Fault> {
    let do_sample = fields.flag("do_sample")?;
    let temperature = fields.float("temperature", (Excluded(0.0), Included(f32::MAX)))?;
    let top_k = fields.integer("top_k", COUNT)?;
    let top_p = fields.float("top_p", (Excluded(0.0), Included(1.0)))?;
    let typical_p = fields.float("typical_p", (Excluded(0.0), Included(1.0)))?;
    let watermark = fields.flag("watermark")?.unwrap_or(false);
    let choosing = Choosing { do_sample, seeded, temperature, top_k, top_p, typical_p };
    Ok(SamplingParams {
        repetition_penalty: fields
            .float("repetition_penalty", REPETITION_PENALTY_MIN..=f32::MAX)?
            .unwrap_or(1.0),
        frequency_penalty: fields.float("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        watermark: watermark.then(|| sampling::watermark(config)),
        ..choosing.params()
    })
}

/// `{"type", "value"}`: a JSON schema, one with a name, or a regular expression.
fn grammar(fields: &mut Fields) -> Result<Option<Grammar>, Fault> {
    let Some(mut object) = fields.object("grammar")? else { return Ok(None) };
    let kind = object.require("type")?;
    let value = object.require("value")?;
    let path = object.path("value");
    let grammar = match kind.as_str() {
        Some("json" | "json_object") => sampling::json_schema(value, &path)?,
        Some("json_schema") => {
            let mut named = Fields::of(value, &path, Integers::Strict)?;
            named.string("name")?;
            let schema = named.require("schema")?;
            let grammar = sampling::json_schema(schema, &named.path("schema"))?;
            named.finish("TGI");
            grammar
        }
        Some("regex") => match value {
            Value::String(regex) => Grammar::Regex(regex.into()),
            other => return Err(unexpected(&path, "a regular expression", &other)),
        },
        _ => {
            let message = format!("expected json, json_schema or regex, got {}", shown(&kind));
            return Err(object.fault("type", message));
        }
    };
    object.finish("TGI");
    Ok(Some(grammar))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(route: Route, body: &Value) -> Result<(Request, bool), String> {
        let fields = Fields::parse(body.to_string().as_bytes(), Integers::Strict).unwrap();
        parse(&Config::default(), route, fields)
            .map(|call| (call.requests[0].clone(), call.stream))
            .map_err(|fault| fault.to_string())
    }

    fn with(parameters: Value) -> Result<Request, String> {
        at(Route::Generate, &json!({"inputs": "x", "parameters": parameters})).map(|(request, _)| request)
    }

    #[test]
    fn every_documented_parameter_is_understood() {
        let body = json!({
            "inputs": "My name is Olivier and I",
            "parameters": {
                "best_of": 1, "decoder_input_details": true, "details": true, "do_sample": true,
                "frequency_penalty": 0.1, "grammar": null, "max_new_tokens": 5, "repetition_penalty": 1.03,
                "return_full_text": false, "seed": 7, "stop": ["photographer"], "temperature": 0.5, "top_k": 10,
                "top_n_tokens": 5, "top_p": 0.95, "truncate": 9, "typical_p": 0.9, "watermark": false,
                "adapter_id": null
            },
            "stream": false
        });
        let mut expected = Request::new(Prompt::Text("My name is Olivier and I".into()), NAMES);
        expected.sampling = SamplingParams {
            temperature: 0.5,
            top_k: Some(10),
            top_p: 0.95,
            typical_p: 0.9,
            repetition_penalty: 1.03,
            frequency_penalty: 0.1,
            logprobs: Some(5),
            prompt_logprobs: Some(0),
            ..SamplingParams::default()
        };
        expected.seed = Some(7);
        expected.max_tokens = MaxTokens::Clamp(5);
        expected.stop = Stop { strings: vec!["photographer".into()], include: true, ..Stop::default() };
        expected.truncate = Some(Truncate::Last(9));
        expected.prompt_ids = true;
        assert_eq!(at(Route::Generate, &body), Ok((expected, false)));
    }

    #[test]
    fn defaults_are_greedy_and_twenty_tokens() {
        let mut expected = Request::new(Prompt::Text("x".into()), NAMES);
        expected.max_tokens = MaxTokens::Clamp(20);
        expected.stop.include = true;
        for body in [
            json!({"inputs": "x"}),
            json!({"inputs": [{"type": "text", "text": "x"}], "parameters": null, "unknown": 1}),
            json!({"inputs": "x", "parameters": {"temperature": null, "unknown": {}, "stop": []}}),
        ] {
            assert_eq!(at(Route::Generate, &body), Ok((expected.clone(), false)), "{body}");
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
            (json!({"seed": 0}), 1.0),
            (json!({"repetition_penalty": 1.2}), 0.0),
        ] {
            assert_eq!(with(parameters.clone()).unwrap().sampling.temperature, temperature, "{parameters}");
        }
    }

    #[test]
    fn the_route_or_the_body_asks_for_a_stream() {
        for (route, body, stream) in [
            (Route::Generate, json!({"inputs": "x"}), false),
            (Route::Generate, json!({"inputs": "x", "stream": true}), true),
            (Route::Root, json!({"inputs": "x"}), false),
            (Route::Root, json!({"inputs": "x", "stream": true}), true),
            (Route::GenerateStream, json!({"inputs": "x"}), true),
            (Route::GenerateStream, json!({"inputs": "x", "stream": false}), true),
        ] {
            assert_eq!(at(route, &body).unwrap().1, stream, "{route:?} {body}");
        }
    }

    #[test]
    fn several_sequences_are_ranked() {
        let request = with(json!({"best_of": 3, "do_sample": true})).unwrap();
        assert_eq!((request.n, request.best_of, request.ranked), (3, 3, true));
        let fault = with(json!({"best_of": 2})).unwrap_err();
        assert_eq!(fault, "parameters.best_of: expected 1 without sampling, got 2");
        let body = json!({"inputs": "x", "parameters": {"best_of": 2, "do_sample": true}});
        let fault = at(Route::GenerateStream, &body).unwrap_err();
        assert_eq!(fault, "parameters.best_of: expected 1 in a stream, got 2");
    }

    #[test]
    fn grammars_have_a_type_and_a_value() {
        let read = |value: Value| with(json!({"grammar": value})).map(|request| request.sampling.grammar);
        let schema = Some(Grammar::JsonSchema("{\"type\":\"string\"}".into()));
        assert_eq!(read(json!({"type": "json", "value": {"type": "string"}})), Ok(schema.clone()));
        assert_eq!(read(json!({"type": "json_object", "value": {"type": "string"}})), Ok(schema.clone()));
        let named = json!({"type": "json_schema", "value": {"name": "n", "schema": {"type": "string"}}});
        assert_eq!(read(named), Ok(schema));
        assert_eq!(read(json!({"type": "regex", "value": "a+"})), Ok(Some(Grammar::Regex("a+".into()))));
        for (value, start) in [
            (json!("a"), "parameters.grammar: expected an object"),
            (json!({"value": "a"}), "parameters.grammar.type: is required"),
            (json!({"type": "regex"}), "parameters.grammar.value: is required"),
            (json!({"type": "regex", "value": 1}), "parameters.grammar.value: expected a regular expression"),
            (json!({"type": "ebnf", "value": "a"}), "parameters.grammar.type: expected json, json_schema or"),
            (json!({"type": "json", "value": 1}), "parameters.grammar.value: expected a JSON schema"),
            (json!({"type": "json_schema", "value": {}}), "parameters.grammar.value.schema: is required"),
        ] {
            let fault = read(value).unwrap_err();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }

    #[test]
    fn a_watermark_is_the_servers() {
        let config = Config::default();
        let sampling = with(json!({"watermark": true})).unwrap().sampling;
        assert_eq!(sampling.watermark, Some(sampling::watermark(&config)));
    }

    #[test]
    fn a_value_outside_its_range_is_a_fault_that_names_the_field() {
        for (field, values) in [
            ("adapter_id", vec![json!("a"), json!(1)]),
            ("best_of", vec![json!(0), json!(129), json!("1")]),
            ("decoder_input_details", vec![json!(1)]),
            ("details", vec![json!(1), json!("true")]),
            ("do_sample", vec![json!(0)]),
            ("frequency_penalty", vec![json!(-2.1), json!(2.1)]),
            ("max_new_tokens", vec![json!(0), json!(-1), json!(2_147_483_648_u64), json!(5.0)]),
            ("repetition_penalty", vec![json!(0), json!(1e-45), json!("1")]),
            ("return_full_text", vec![json!("no")]),
            ("seed", vec![json!(-1), json!(1.5), json!(1e20)]),
            ("stop", vec![json!(1), json!([1])]),
            ("temperature", vec![json!(0), json!(-1), json!(1e300)]),
            ("top_k", vec![json!(0), json!(-1)]),
            ("top_n_tokens", vec![json!(21), json!(-1)]),
            ("top_p", vec![json!(0), json!(1.1)]),
            ("truncate", vec![json!(0)]),
            ("typical_p", vec![json!(0), json!(1.1)]),
            ("watermark", vec![json!(0)]),
        ] {
            for value in values {
                let fault = with(json!({field: value})).unwrap_err();
                assert!(fault.starts_with(&format!("parameters.{field}")), "{fault}");
            }
        }
        for (body, start) in [
            (json!({}), "inputs: is required"),
            (json!({"inputs": ""}), "inputs: must not be empty"),
            (json!({"inputs": 1}), "inputs: expected a string or a list of parts"),
            (json!({"inputs": [{"type": "text", "text": ""}]}), "inputs[0].text: must not be empty"),
            (json!({"inputs": [{"type": "image_url"}]}), "inputs[0].type: this model takes text only"),
            (json!({"inputs": "x", "parameters": 1}), "parameters: expected an object"),
            (json!({"inputs": "x", "stream": "yes"}), "stream: "),
            (json!({"inputs": "x", "model": 1}), "model: "),
            (
                json!({"inputs": "x", "stream": true, "parameters": {"decoder_input_details": true}}),
                "parameters.decoder_input_details: is not allowed in a stream",
            ),
        ] {
            let fault = at(Route::Generate, &body).unwrap_err();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }
}
