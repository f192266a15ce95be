//! The request body of `generate` and `generate_stream`.

use std::ops::Bound::{Excluded, Included};
use std::time::Duration;

use proto::SamplingParams;
use serde_json::Value;
use uuid::Uuid;

use super::TritonWriter;
use super::response::{Earlier, Shape};
use crate::Config;
use crate::dialect::fields::{Fields, Integers, unexpected, unsigned};
use crate::dialect::mindie::{COUNT, Choosing, check_id, prompt_text, seed};
use crate::dialect::{Call, sampling};
use crate::domain::{FieldNames, MaxTokens, Priority, Prompt, REPETITION_PENALTY_MIN, Request, Stop};
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
pub(crate) fn parse(
    config: &Config,
    envelope: Envelope<'_>,
    body: &[u8],
) -> Result<Call<TritonWriter>, Fault> {
    let mut fields = Fields::parse(body, Integers::Strict)?;
    let id = fields.string("id")?;
    if let Some(id) = &id {
        check_id(id, "id")?;
    }
    let prompt = prompt(fields.require("text_input")?, envelope.recompute)?;
    // LiteLLM says it again; the path decides.
    fields.flag("stream")?;
    let inner = match fields.object("parameters")? {
        Some(parameters) => parameters,
        None => Fields::of(Value::Object(serde_json::Map::default()), "parameters", Integers::Strict)?,
    };
    let parameters = Parameters::read(Places { inner, outer: fields }, config)?;

    let earlier = parameters.earlier(&prompt)?;
    let mut request = Request::new(prompt, NAMES);
    request.model = Some(envelope.model.to_owned());
    request.sampling = parameters.sampling;
    request.seed = parameters.seed;
    request.max_tokens = MaxTokens::Clamp(parameters.max_new_tokens);
    request.timeout = parameters.timeout;
    request.priority = parameters.priority;
    request.stop = parameters.stop;
    request.bad_words = parameters.bad_words;
    request.stoppable.clone_from(&id);
    let shape = Shape {
        id: id.unwrap_or_else(|| Uuid::new_v4().simple().to_string()),
        details: parameters.details,
        full_text: config.full_text_enabled,
        report_costs: config.report_costs,
    };
    Ok(Call { requests: vec![request], writer: TritonWriter::new(shape, earlier), stream: envelope.stream })
}

/// Where parameters stand: in the object `parameters`, or beside it, as the clients of TensorRT-LLM send them. What is
/// in the object counts.
struct Places {
    inner: Fields,
    outer: Fields,
}

impl Places {
    /// Where the field of this name stands.
    fn of(&mut self, name: &str) -> &mut Fields {
        if !self.inner.has(name) && self.outer.has(name) { &mut self.outer } else { &mut self.inner }
    }

    /// The first of several names that is there; the others are read as well, and so checked, by nobody.
    fn named(&mut self, names: &[&'static str]) -> &'static str {
        let there = names.iter().find(|name| self.inner.has(name) || self.outer.has(name));
        there.or(names.first()).copied().unwrap_or_default()
    }

    fn finish(self) {
        self.inner.finish("generate");
        self.outer.finish("generate");
    }
}

fn prompt(value: Value, recompute: bool) -> Result<Prompt, Fault> {
    let text = prompt_text(value, "text_input")?;
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

/// What `parameters` say.
struct Parameters {
    details: bool,
    max_new_tokens: usize,
    sampling: SamplingParams,
    seed: Option<u64>,
    timeout: Option<Duration>,
    priority: Priority,
    stop: Stop,
    bad_words: Vec<String>,
    first_token_cost: Option<u64>,
    decode_time: Option<Vec<u64>>,
}

impl Parameters {
    fn read(mut from: Places, config: &Config) -> Result<Self, Fault> {
        let details = from.of("details").flag("details")?.unwrap_or(false);
        let name = from.named(&["max_new_tokens", "max_tokens"]);
        let max_new_tokens = from.of(name).integer(name, COUNT)?.unwrap_or(MAX_NEW_TOKENS) as usize;
        let name = from.named(&["seed", "random_seed"]);
        let seed = seed(from.of(name), name)?;
        let sampling = sampling(&mut from, seed.is_some(), config)?;
        from.of("batch_size").integer("batch_size", COUNT)?;
        let priority = from.of("priority").integer("priority", 1..=5)?;
        let timeout = from.of("timeout").integer("timeout", 1..=3600)?.map(Duration::from_secs);
        let first_token_cost = from.of("firstTokenCost").integer("firstTokenCost", 0..=u64::MAX)?;
        let decode_time = decode_time(from.of("decodeTime"))?;
        let stop = stop(&mut from)?;
        let bad_words = texts(from.of("bad_words"), "bad_words")?;
        from.finish();
        Ok(Self {
            details,
            max_new_tokens,
            sampling,
            seed,
            timeout,
            priority: priority.map_or_else(Priority::default, |priority| Priority(priority as u8)),
            stop,
            bad_words,
            first_token_cost,
            decode_time,
        })
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

/// How to choose tokens.
fn sampling(from: &mut Places, seeded: bool, config: &Config) -> Result<SamplingParams, Fault> {
    let penalty = (Included(-2.0), Included(2.0));
    let do_sample = from.of("do_sample").flag("do_sample")?;
    let repetition_penalty =
        from.of("repetition_penalty").float("repetition_penalty", REPETITION_PENALTY_MIN..=f32::MAX)?;
    let temperature = from.of("temperature").float("temperature", (Excluded(1e-6), Included(f32::MAX)))?;
    let top_k = from.of("top_k").integer("top_k", COUNT)?;
    let top_p = from.of("top_p").float("top_p", (Excluded(1e-6), Included(1.0)))?;
    let typical_p = from.of("typical_p").float("typical_p", (Excluded(0.0), Included(1.0)))?;
    let watermark = from.of("watermark").flag("watermark")?.unwrap_or(false);
    let choosing = Choosing { do_sample, seeded, temperature, top_k, top_p, typical_p };
    Ok(SamplingParams {
        repetition_penalty: repetition_penalty.unwrap_or(1.0),
        presence_penalty: from.of("presence_penalty").float("presence_penalty", penalty)?.unwrap_or(0.0),
        frequency_penalty: from.of("frequency_penalty").float("frequency_penalty", penalty)?.unwrap_or(0.0),
        watermark: watermark.then(|| sampling::watermark(config)),
        ..choosing.params()
    })
}

/// `stop` (or `stop_words`), `stop_token_ids`, `ignore_eos`, `min_tokens` (or `min_length`): beyond the reference's
/// table, as the clients of other servers of this protocol send them.
fn stop(from: &mut Places) -> Result<Stop, Fault> {
    let name = from.named(&["stop", "stop_words"]);
    let strings = texts(from.of(name), name)?;
    let name = from.named(&["min_tokens", "min_length"]);
    let min_tokens = from.of(name).integer(name, 0..=*COUNT.end())?.unwrap_or(0) as usize;
    Ok(Stop {
        strings,
        token_ids: sampling::token_ids(from.of("stop_token_ids"), "stop_token_ids")?,
        include: from.of("include_stop_str_in_output").flag("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: from.of("ignore_eos").flag("ignore_eos")?.unwrap_or(false),
        min_tokens,
    })
}

/// A string, or a list of strings. TensorRT-LLM's clients send an empty one for none.
fn texts(fields: &mut Fields, name: &str) -> Result<Vec<String>, Fault> {
    let path = fields.path(name);
    sampling::texts(fields.take(name).filter(|value| *value != ""), &path)
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
        parse(&Config::default(), envelope, body.to_string().as_bytes())
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
            typical_p: 0.5,
            repetition_penalty: 1.1,
            ..SamplingParams::default()
        };
        expected.stoppable = Some("a123".into());
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
            ("watermark", vec![json!(1), json!("true")]),
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
    fn parameters_may_stand_beside_the_text_under_other_servers_names() {
        let body = json!({"text_input": "x", "stream": true, "max_tokens": 7, "temperature": 0.5, "stop_words": ["a"],
            "bad_words": "b", "min_length": 3, "random_seed": 9, "presence_penalty": 0.25, "accumulate_tokens": true});
        let request = read(ENVELOPE, &body).unwrap();
        assert_eq!((request.max_tokens, request.seed), (MaxTokens::Clamp(7), Some(9)));
        assert_eq!((request.sampling.temperature, request.sampling.presence_penalty), (0.5, 0.25));
        assert_eq!((request.stop.strings.as_slice(), request.stop.min_tokens), (&["a".to_owned()][..], 3));
        assert_eq!(request.bad_words, ["b"]);
        let both =
            json!({"text_input": "x", "max_tokens": 7, "parameters": {"max_new_tokens": 5, "stop": ["c"]}});
        let request = read(ENVELOPE, &both).unwrap();
        assert_eq!((request.max_tokens, request.stop.strings), (MaxTokens::Clamp(5), vec!["c".to_owned()]));
        let twice = json!({"text_input": "x", "top_k": 0, "parameters": {"top_k": 4}});
        assert_eq!(read(ENVELOPE, &twice).unwrap().sampling.top_k, Some(4));
        let fault = read(ENVELOPE, &json!({"text_input": "x", "max_tokens": 0})).unwrap_err();
        assert!(fault.starts_with("max_tokens: expected an integer"), "{fault}");
    }

    #[test]
    fn what_other_servers_add_is_taken_and_checked() {
        let added = json!({"stop": "a", "stop_token_ids": [7], "include_stop_str_in_output": true, "ignore_eos": true,
            "min_tokens": 2, "bad_words": ["b"], "presence_penalty": 2, "frequency_penalty": -2});
        let request = with(added).unwrap();
        let expected = Stop {
            strings: vec!["a".into()],
            token_ids: vec![7],
            include: true,
            ignore_eos: true,
            min_tokens: 2,
        };
        assert_eq!((request.stop, request.bad_words), (expected, vec!["b".to_owned()]));
        assert_eq!((request.sampling.presence_penalty, request.sampling.frequency_penalty), (2.0, -2.0));
        assert_eq!(with(json!({"stop": "", "bad_words": ""})).unwrap().stop, Stop::default());
        for (field, value) in [
            ("stop", json!(5)),
            ("stop", json!([5])),
            ("stop_words", json!({})),
            ("stop_token_ids", json!(5)),
            ("stop_token_ids", json!([-1])),
            ("include_stop_str_in_output", json!(1)),
            ("ignore_eos", json!("true")),
            ("min_tokens", json!(-1)),
            ("min_length", json!(1.5)),
            ("bad_words", json!([1])),
            ("presence_penalty", json!(2.1)),
            ("frequency_penalty", json!(-2.1)),
            ("max_tokens", json!(0)),
            ("random_seed", json!(0)),
        ] {
            let fault = with(json!({field: value})).expect_err(field);
            assert!(fault.starts_with(&format!("parameters.{field}")), "{field} = {value}: {fault}");
            let fault = read(ENVELOPE, &json!({"text_input": "x", field: value})).expect_err(field);
            assert!(fault.starts_with(field), "{field} = {value}: {fault}");
        }
        let fault = read(ENVELOPE, &json!({"text_input": "x", "stream": 1})).unwrap_err();
        assert!(fault.starts_with("stream: expected true or false"), "{fault}");
    }

    #[test]
    fn priority_and_timeout_are_taken_and_have_defaults() {
        let request = with(json!({"priority": 1, "timeout": 3600})).unwrap();
        assert_eq!((request.priority, request.timeout), (Priority(1), Some(Duration::from_hours(1))));
        let request = with(json!({})).unwrap();
        assert_eq!(request.priority, Priority(5));
        assert_eq!(request.deadline(Config::default().timeout), Duration::from_mins(10));
    }

    #[test]
    fn a_watermark_is_the_servers() {
        let config = Config { watermark_key: 42, ..Config::default() };
        let body = json!({"text_input": "x", "parameters": {"watermark": true}}).to_string();
        let call = parse(&config, ENVELOPE, body.as_bytes()).unwrap();
        assert_eq!(call.requests[0].sampling.watermark.unwrap().key, 42);
        assert_eq!(with(json!({"watermark": false})).unwrap().sampling.watermark, None);
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
