//! A request for inference into the one domain request.

use std::ops::Bound::{Excluded, Included};
use std::ops::RangeInclusive;
use std::time::Duration;

use proto::{Grammar, SamplingParams, TokenId};
use serde_json::Value;

use super::catalogue::{Meaning, OutputName, find_input};
use super::compose::Shape;
use super::inference::{Inference, Reserved, Wanted};
use super::options::{take, text_of};
use super::tensor::{Elements, Tensor};
use crate::Config;
use crate::dialect::fields::{Fields, unexpected};
use crate::dialect::sampling;
use crate::domain::{
    FieldNames, MaxTokens, Priority, Prompt, REPETITION_PENALTY_MIN, Request, Stop, Truncate,
};
use crate::fault::Fault;

const NAMES: FieldNames = FieldNames { prompt: "text_input", stop: "stop_words", ..FieldNames::PLAIN };

/// Range of counts: from 1 to the most of 32 bits with sign.
const COUNT: RangeInclusive<u64> = 1..=i32::MAX as u64;
/// Range of the number of sequences.
const SEQUENCES: RangeInclusive<u64> = 1..=128;

const MAX_TOKENS: usize = 20;

/// Outputs that are logits, or times within the engine, which nothing here tells of.
const UNTOLD: [&str; 3] = ["return_context_logits", "return_generation_logits", "return_perf_metrics"];

/// The request and the form of its answer.
pub(crate) fn convert(
    config: &Config,
    model: &str,
    mut inference: Inference,
) -> Result<(Request, Shape), Fault> {
    let mut fields = take(&mut inference)?;
    let Inference { id, reserved, inputs, outputs, .. } = inference;
    let (prompt, tokens_as) = prompt(&inputs)?;
    let mut request = Request::new(prompt, NAMES);
    request.model = Some(model.to_owned());
    request.max_tokens = MaxTokens::Clamp(max_tokens(&mut fields)?);
    request.sampling = sampling(config, &mut fields)?;
    request.seed = seed(&mut fields)?;
    request.stop = stop(&mut fields)?;
    request.bad_words = texts(&mut fields, "bad_words")?;
    request.skip_special_tokens = fields.flag("skip_special_tokens")?.unwrap_or(true);
    let truncate = fields.integer("truncate_prompt_tokens", COUNT)?;
    request.truncate = truncate.map(|count| Truncate::Last(count as usize));
    (request.priority, request.timeout) = schedule(&reserved);
    request.stoppable = Some(id).filter(|id| !id.is_empty());

    let stream = flag(&mut fields, &["stream", "streaming"])?;
    let exclude = fields.flag("exclude_input_in_output")?;
    if stream && exclude == Some(false) {
        let message = "expected true in a stream, which has no place for the input";
        return Err(fields.fault("exclude_input_in_output", message));
    }
    request.echo = !exclude.unwrap_or(stream);
    let temperature = request.sampling.temperature;
    (request.n, request.best_of) = sequences(&mut fields, temperature, stream)?;
    request.ranked = request.best_of > request.n;
    let shape = Shape {
        outputs: selected(&mut fields, tokens_as, request.n, &outputs)?,
        sequences: request.n,
        stream,
        pad_id: pad_id(&mut fields)?,
    };
    without_effect(&mut fields)?;
    fields.finish("infer");
    Ok((request, shape))
}

/// The prompt, and the output that repeats its form.
fn prompt(inputs: &[Tensor]) -> Result<(Prompt, OutputName), Fault> {
    let tensor = match inputs {
        [tensor] => tensor,
        [] => return Err(Fault::field("inputs", "expected text_input, or token ids as input0")),
        [first, second, ..] => {
            let message = format!("expected one prompt, got {} and {}", first.name, second.name);
            return Err(Fault::field("inputs", message));
        }
    };
    let is_text = find_input(&tensor.name).is_some_and(|input| input.meaning == Meaning::Text);
    if is_text {
        let text = text_of(tensor)?;
        if text.is_empty() {
            return Err(Fault::field("text_input", "must not be empty"));
        }
        return Ok((Prompt::Text(text), OutputName::TextOutput));
    }
    let rows_but_last = tensor.shape.iter().rev().skip(1);
    if rows_but_last.clone().any(|rows| *rows != 1) {
        let message = format!("expected a shape of [n] or [1, n], got {:?}", tensor.shape);
        return Err(Fault::field(&tensor.name, message));
    }
    let output = if tensor.name == "input_ids" { OutputName::OutputIds } else { OutputName::Output0 };
    Ok((Prompt::Tokens(token_ids(tensor)?), output))
}

fn token_ids(tensor: &Tensor) -> Result<Vec<TokenId>, Fault> {
    let fault = |got: String| Fault::field(&tensor.name, format!("expected token ids, got {got}"));
    let ids: Result<Vec<TokenId>, String> = match &tensor.elements {
        Elements::Unsigned(list) => {
            list.iter().map(|id| TokenId::try_from(*id).map_err(|_| id.to_string())).collect()
        }
        Elements::Signed(list) => {
            list.iter().map(|id| TokenId::try_from(*id).map_err(|_| id.to_string())).collect()
        }
        _ => Err(format!("elements of {}", tensor.datatype.name())),
    };
    let ids = ids.map_err(fault)?;
    if ids.is_empty() {
        return Err(Fault::field(&tensor.name, "must not be empty"));
    }
    Ok(ids)
}

/// The first of the names that is there decides; the others are checked all the same.
fn max_tokens(fields: &mut Fields) -> Result<usize, Fault> {
    let own = fields.integer("max_new_tokens", COUNT)?;
    let others = fields.integer("max_tokens", COUNT)?;
    Ok(own.or(others).map_or(MAX_TOKENS, |count| count as usize))
}

fn flag(fields: &mut Fields, names: &[&str]) -> Result<bool, Fault> {
    let mut set = false;
    for name in names {
        set |= fields.flag(name)?.unwrap_or(false);
    }
    Ok(set)
}

fn sampling(config: &Config, fields: &mut Fields) -> Result<SamplingParams, Fault> {
    let penalty = (Included(-2.0), Included(2.0));
    let do_sample = fields.flag("do_sample")?;
    let temperature = fields.float("temperature", (Included(0.0), Included(f32::MAX)))?;
    let given = ["top_k", "top_p", "min_p", "typical_p", "seed"].iter().any(|name| fields.has(name));
    // 0 and -1 are both said for "all of them".
    let top_k = fields.signed("top_k", -1..=i64::from(i32::MAX))?.filter(|k| *k > 0);
    let top_p = fields.float("top_p", (Excluded(0.0), Included(1.0)))?;
    let typical_p = fields.float("typical_p", (Excluded(0.0), Included(1.0)))?;
    let repetition = fields.float("repetition_penalty", REPETITION_PENALTY_MIN..=f32::MAX)?;
    let sampled = do_sample.unwrap_or(temperature.is_some() || given);
    let mut sampling = SamplingParams {
        temperature: if sampled { temperature.unwrap_or(1.0) } else { 0.0 },
        top_k: top_k.map(|k| k as u32),
        top_p: top_p.unwrap_or(1.0),
        typical_p: typical_p.unwrap_or(1.0),
        repetition_penalty: repetition.unwrap_or(1.0),
        presence_penalty: fields.float("presence_penalty", penalty)?.unwrap_or(0.0),
        frequency_penalty: fields.float("frequency_penalty", penalty)?.unwrap_or(0.0),
        watermark: fields.flag("watermark")?.unwrap_or(false).then(|| sampling::watermark(config)),
        grammar: grammar(fields)?,
        logprobs: sampling::logprobs(fields, "logprobs")?,
        ..SamplingParams::default()
    };
    sampling::filters(fields, &mut sampling)?;
    Ok(sampling)
}

/// Structured output, by the fields of either family.
fn grammar(fields: &mut Fields) -> Result<Option<Grammar>, Fault> {
    let kind = fields.string("guided_decoding_guide_type")?;
    let guide = fields.string("guided_decoding_guide")?;
    let of_fields = sampling::structured(fields)?;
    let path = "guided_decoding_guide";
    let grammar = match (kind.as_deref(), guide) {
        (None, None) => return Ok(of_fields),
        (None, Some(_)) => {
            return Err(Fault::field("guided_decoding_guide_type", "is required with a guide"));
        }
        (Some("json"), _) => sampling::json_object(),
        (Some(_), None) => return Err(Fault::field(path, "is required with a type")),
        (Some("json_schema"), Some(guide)) => sampling::json_schema(Value::String(guide), path)?,
        (Some("regex"), Some(guide)) => Grammar::Regex(guide.into()),
        (Some("lark"), Some(guide)) => Grammar::Lark(guide.into()),
        (Some(other), Some(_)) => {
            let expected = "json, json_schema, regex or lark";
            return Err(unexpected("guided_decoding_guide_type", expected, &Value::from(other)));
        }
    };
    if of_fields.is_some() {
        return Err(Fault::field(path, "expected one kind of structured output, got two"));
    }
    Ok(Some(grammar))
}

/// -1 is said for "any".
fn seed(fields: &mut Fields) -> Result<Option<u64>, Fault> {
    match fields.take("seed") {
        None => Ok(None),
        Some(value) if value.as_i64() == Some(-1) => Ok(None),
        Some(value) => value
            .as_u64()
            .map(Some)
            .ok_or_else(|| unexpected("seed", "an integer of at least 0, or -1 for any", &value)),
    }
}

fn stop(fields: &mut Fields) -> Result<Stop, Fault> {
    let mut strings = texts(fields, "stop_words")?;
    strings.append(&mut texts(fields, "stop")?);
    let mut token_ids = sampling::token_ids(fields, "stop_token_ids")?;
    // A negative id is said for none.
    let end_id = fields.signed("end_id", i64::from(i32::MIN)..=i64::from(u32::MAX))?;
    token_ids.extend(end_id.and_then(|id| TokenId::try_from(id).ok()));
    let mut stop = Stop {
        strings,
        token_ids,
        include: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        ..Stop::default()
    };
    sampling::min_tokens(fields, &mut stop)?;
    let min_length = fields.integer("min_length", 0..=i32::MAX as u64)?.unwrap_or(0) as usize;
    stop.min_tokens = stop.min_tokens.max(min_length);
    Ok(stop)
}

/// Texts as one string or a list; one that is empty stands for none, as it fills a tensor that has to be there.
fn texts(fields: &mut Fields, name: &str) -> Result<Vec<String>, Fault> {
    let mut list = sampling::texts(fields.take(name), name)?;
    if list.len() == 1 && list[0].is_empty() {
        list.clear();
    }
    Ok(list)
}

/// Priority and deadline, by the protocol's own parameters: a priority beyond the last level is the default.
fn schedule(reserved: &Reserved) -> (Priority, Option<Duration>) {
    let priority = match reserved.priority {
        level @ 1..=5 => Priority(level as u8),
        _ => Priority::default(),
    };
    (priority, reserved.timeout_us.map(Duration::from_micros))
}

/// How many sequences to answer with, and how many to generate.
fn sequences(fields: &mut Fields, temperature: f32, stream: bool) -> Result<(usize, usize), Fault> {
    let n = fields.integer("n", SEQUENCES)?;
    let returned = fields.integer("num_return_sequences", SEQUENCES)?;
    let n = n.or(returned).unwrap_or(1);
    let best_of = fields.integer("best_of", SEQUENCES)?.unwrap_or(n);
    if fields.integer("beam_width", COUNT)?.unwrap_or(1) > 1 {
        return Err(fields.fault("beam_width", "expected 1: there is no beam search"));
    }
    if best_of < n {
        return Err(fields.fault("best_of", format!("expected at least n, which is {n}, got {best_of}")));
    }
    if best_of > n && stream {
        return Err(fields.fault("best_of", format!("expected n in a stream, which is {n}, got {best_of}")));
    }
    if best_of > 1 && temperature == 0.0 {
        let name = if n > 1 { "n" } else { "best_of" };
        return Err(fields.fault(name, format!("expected 1 at a temperature of 0, got {best_of}")));
    }
    Ok((n as usize, best_of as usize))
}

/// The outputs that are asked for by name, or else those that the request implies.
fn selected(
    fields: &mut Fields,
    main: OutputName,
    sequences: usize,
    wanted: &[Wanted],
) -> Result<Vec<OutputName>, Fault> {
    let mut implied = vec![main];
    if main != OutputName::TextOutput && sequences > 1 {
        implied.push(OutputName::SequenceLength);
    }
    let choices: [(&str, &[OutputName]); 6] = [
        ("return_finish_reason", &[OutputName::FinishReason]),
        ("return_cumulative_logprob", &[OutputName::CumulativeLogprob]),
        ("return_logprobs", &[OutputName::Logprobs]),
        ("return_log_probs", &[OutputName::CumLogProbs, OutputName::OutputLogProbs]),
        ("return_num_input_tokens", &[OutputName::NumInputTokens]),
        ("return_num_output_tokens", &[OutputName::NumOutputTokens]),
    ];
    for (name, outputs) in choices {
        if fields.flag(name)?.unwrap_or(false) {
            implied.extend_from_slice(outputs);
        }
    }
    if wanted.is_empty() {
        return Ok(implied);
    }
    let by_name = wanted.iter().enumerate().map(|(index, wanted)| {
        OutputName::find(&wanted.name).ok_or_else(|| {
            let names = OutputName::ALL.map(OutputName::name).join(", ");
            let shown: String = wanted.name.chars().take(40).collect();
            Fault::field(format!("outputs[{index}].name"), format!("expected one of {names}, got {shown:?}"))
        })
    });
    by_name.collect()
}

fn pad_id(fields: &mut Fields) -> Result<u32, Fault> {
    let id = fields.signed("pad_id", i64::from(i32::MIN)..=i64::from(u32::MAX))?;
    Ok(id.and_then(|id| u32::try_from(id).ok()).unwrap_or(0))
}

/// Options that are checked and change nothing, or ask for what is not told.
fn without_effect(fields: &mut Fields) -> Result<(), Fault> {
    fields.integer("batch_size", COUNT)?;
    fields.float("length_penalty", f32::MIN..=f32::MAX)?;
    for name in UNTOLD {
        if fields.flag(name)?.unwrap_or(false) {
            return Err(fields.fault(name, "expected false: these are not told"));
        }
    }
    sampling::logprobs(fields, "prompt_logprobs")?;
    for name in ["detokenize", "spaces_between_special_tokens"] {
        fields.flag(name)?;
    }
    match fields.string("lora_name")? {
        None => Ok(()),
        Some(_) => Err(fields.fault("lora_name", "is not supported: no adapter is loaded")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::http_request;
    use super::*;

    fn body(options: &Value, inputs: Value) -> Value {
        json!({"id": "r", "inputs": inputs, "parameters": options})
    }

    fn text(options: &Value) -> Value {
        body(options, json!([{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hi"]}]))
    }

    fn read(body: &Value) -> Result<(Request, Shape), String> {
        http_request::parse(&body.to_string().into(), None)
            .and_then(|inference| convert(&Config::default(), "m", inference))
            .map_err(|fault| fault.to_string())
    }

    fn plain() -> Request {
        let mut request = Request::new(Prompt::Text("Hi".into()), NAMES);
        request.model = Some("m".into());
        request.max_tokens = MaxTokens::Clamp(MAX_TOKENS);
        request.stoppable = Some("r".into());
        request.echo = true;
        request
    }

    #[test]
    fn a_text_alone_is_a_greedy_request() {
        let (request, shape) = read(&text(&json!({}))).unwrap();
        assert_eq!(request, plain());
        let outputs = vec![OutputName::TextOutput];
        assert_eq!(shape, Shape { outputs, sequences: 1, stream: false, pad_id: 0 });
    }

    #[test]
    fn every_option_has_its_effect() {
        let options = json!({
            "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
            "typical_p": 0.8, "seed": 9, "repetition_penalty": 1.1, "presence_penalty": 0.5,
            "frequency_penalty": -0.5, "stop_words": ["a"], "stop": "b", "bad_words": ["c"],
            "stop_token_ids": [4], "end_id": 5, "ignore_eos": true, "skip_special_tokens": false,
            "include_stop_str_in_output": true, "watermark": true, "logprobs": 3, "n": 2, "best_of": 3,
            "truncate_prompt_tokens": 6, "logit_bias": {"7": 1.5}, "allowed_token_ids": [1, 2],
            "guided_decoding_guide_type": "regex", "guided_decoding_guide": "x+", "priority": 2, "timeout": 1000,
            "exclude_input_in_output": true, "length_penalty": 1.0, "beam_width": 1, "batch_size": 4,
            "unknown": {"a": 1}
        });
        let (request, shape) = read(&text(&options)).unwrap();
        let mut expected = plain();
        expected.max_tokens = MaxTokens::Clamp(7);
        expected.sampling = SamplingParams {
            temperature: 0.5,
            top_k: Some(3),
            top_p: 0.9,
            min_p: 0.1,
            typical_p: 0.8,
            repetition_penalty: 1.1,
            presence_penalty: 0.5,
            frequency_penalty: -0.5,
            logit_bias: vec![(7, 1.5)],
            allowed_token_ids: vec![1, 2],
            watermark: Some(sampling::watermark(&Config::default())),
            grammar: Some(Grammar::Regex("x+".into())),
            logprobs: Some(3),
            ..SamplingParams::default()
        };
        expected.seed = Some(9);
        expected.stop = Stop {
            strings: vec!["a".into(), "b".into()],
            token_ids: vec![4, 5],
            include: true,
            ignore_eos: true,
            min_tokens: 2,
        };
        expected.bad_words = vec!["c".into()];
        expected.skip_special_tokens = false;
        expected.truncate = Some(Truncate::Last(6));
        expected.priority = Priority(2);
        expected.timeout = Some(Duration::from_millis(1));
        (expected.n, expected.best_of, expected.ranked) = (2, 3, true);
        expected.echo = false;
        assert_eq!(request, expected);
        assert_eq!(shape.sequences, 2);
    }

    #[test]
    fn sampling_follows_do_sample_or_else_the_other_options() {
        for (options, temperature) in [
            (json!({"do_sample": true}), 1.0),
            (json!({"do_sample": false, "temperature": 0.5}), 0.0),
            (json!({"temperature": 0.5}), 0.5),
            (json!({"temperature": 0}), 0.0),
            (json!({"top_k": 3}), 1.0),
            (json!({"seed": 7}), 1.0),
            (json!({"repetition_penalty": 1.2}), 0.0),
        ] {
            assert_eq!(read(&text(&options)).unwrap().0.sampling.temperature, temperature, "{options}");
        }
    }

    #[test]
    fn aliases_mean_the_same() {
        let max = |options: Value| read(&text(&options)).unwrap().0.max_tokens;
        assert_eq!(max(json!({"max_tokens": 3})), MaxTokens::Clamp(3));
        assert_eq!(max(json!({"max_tokens": 3, "max_new_tokens": 5})), MaxTokens::Clamp(5));
        let (request, _) = read(&text(&json!({"num_return_sequences": 2, "temperature": 1}))).unwrap();
        assert_eq!((request.n, request.best_of), (2, 2));
        let (request, _) = read(&text(&json!({"top_k": -1, "seed": -1, "end_id": -1, "stop": ""}))).unwrap();
        assert_eq!((request.sampling.top_k, request.seed), (None, None));
        assert_eq!(request.stop, Stop::default());
        assert_eq!(read(&text(&json!({"min_length": 4}))).unwrap().0.stop.min_tokens, 4);
        assert_eq!(read(&text(&json!({"priority": 9}))).unwrap().0.priority, Priority(5));
    }

    #[test]
    fn tokens_come_as_they_are_and_go_the_same_way() {
        let tokens = |name: &str, datatype: &str, shape: Value, data: Value| {
            let inputs = json!([{"name": name, "datatype": datatype, "shape": shape, "data": data}]);
            read(&body(&json!({}), inputs))
        };
        let (request, shape) = tokens("input0", "UINT32", json!([1, 3]), json!([[5, 6, 7]])).unwrap();
        assert_eq!(request.prompt, Prompt::Tokens(vec![5, 6, 7]));
        assert_eq!(shape.outputs, [OutputName::Output0]);
        let (request, shape) = tokens("input_ids", "INT64", json!([2]), json!([5, 6])).unwrap();
        assert_eq!(request.prompt, Prompt::Tokens(vec![5, 6]));
        assert_eq!(shape.outputs, [OutputName::OutputIds]);
        for (shape, data, start) in [
            (json!([3, 1]), json!([5, 6, 7]), "input0: expected a shape of [n] or [1, n], got [3, 1]"),
            (json!([0]), json!([]), "input0: must not be empty"),
        ] {
            assert!(tokens("input0", "UINT32", shape, data).unwrap_err().starts_with(start));
        }
        let fault = tokens("input_ids", "INT32", json!([1]), json!([-1])).unwrap_err();
        assert_eq!(fault, "input_ids: expected token ids, got -1");
        let fault = tokens("input0", "FP32", json!([1]), json!([1])).unwrap_err();
        assert_eq!(fault, "input0: expected token ids, got elements of FP32");
        let fault = tokens("input0", "UINT64", json!([1]), json!([1_u64 << 32])).unwrap_err();
        assert_eq!(fault, "input0: expected token ids, got 4294967296");
    }

    #[test]
    fn outputs_are_those_asked_for_or_implied() {
        let options = json!({
            "return_finish_reason": true, "return_cumulative_logprob": true, "return_logprobs": true,
            "return_log_probs": true, "return_num_input_tokens": true, "return_num_output_tokens": true
        });
        let (_, shape) = read(&text(&options)).unwrap();
        let names: Vec<&str> = shape.outputs.iter().map(|output| output.name()).collect();
        assert_eq!(
            names,
            [
                "text_output",
                "finish_reason",
                "cumulative_logprob",
                "logprobs",
                "cum_log_probs",
                "output_log_probs",
                "num_input_tokens",
                "num_output_tokens"
            ]
        );
        let mut body = text(&options);
        body["outputs"] = json!([{"name": "output0"}, {"name": "text_output"}]);
        let (_, shape) = read(&body).unwrap();
        assert_eq!(shape.outputs, [OutputName::Output0, OutputName::TextOutput]);
        body["outputs"] = json!([{"name": "text"}]);
        assert!(
            read(&body).unwrap_err().starts_with("outputs[0].name: expected one of text_output, output0")
        );
    }

    #[test]
    fn streams_leave_the_input_out() {
        let (request, shape) = read(&text(&json!({"stream": true}))).unwrap();
        assert_eq!((request.echo, shape.stream), (false, true));
        let fault = read(&text(&json!({"stream": true, "exclude_input_in_output": false}))).unwrap_err();
        assert!(fault.starts_with("exclude_input_in_output: expected true in a stream"), "{fault}");
    }

    #[test]
    fn structured_output_comes_by_either_family() {
        let grammar = |options: Value| read(&text(&options)).map(|(request, _)| request.sampling.grammar);
        assert_eq!(grammar(json!({"guided_regex": "a"})), Ok(Some(Grammar::Regex("a".into()))));
        let schema = json!({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{}"});
        assert_eq!(grammar(schema), Ok(Some(Grammar::JsonSchema("{}".into()))));
        assert_eq!(grammar(json!({"guided_decoding_guide_type": "json"})), Ok(Some(sampling::json_object())));
        for (options, start) in [
            (json!({"guided_decoding_guide": "a"}), "guided_decoding_guide_type: is required"),
            (json!({"guided_decoding_guide_type": "regex"}), "guided_decoding_guide: is required"),
            (
                json!({"guided_decoding_guide_type": "ebnf", "guided_decoding_guide": "a"}),
                "guided_decoding_guide_type: expected json, json_schema, regex or lark, got \"ebnf\"",
            ),
            (
                json!({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a", "guided_regex": "a"}),
                "guided_decoding_guide: expected one kind",
            ),
        ] {
            assert!(grammar(options).unwrap_err().starts_with(start));
        }
    }

    #[test]
    fn a_value_outside_its_range_is_a_fault_that_names_the_option() {
        for (field, values) in [
            ("max_tokens", vec![json!(0), json!(-1), json!(5.0), json!(true), json!("5")]),
            ("max_new_tokens", vec![json!(0), json!(2_147_483_648_u64)]),
            ("min_tokens", vec![json!(-1), json!(1.5)]),
            ("temperature", vec![json!(-0.1), json!(1e300), json!("x")]),
            ("top_k", vec![json!(-2), json!(1.5)]),
            ("top_p", vec![json!(0), json!(1.1)]),
            ("min_p", vec![json!(-0.1), json!(1.1)]),
            ("typical_p", vec![json!(0), json!(1.1)]),
            ("seed", vec![json!(-2), json!(1.5), json!("a")]),
            ("repetition_penalty", vec![json!(0), json!(-1)]),
            ("presence_penalty", vec![json!(2.1)]),
            ("frequency_penalty", vec![json!(-2.1)]),
            ("stop_words", vec![json!(5), json!([5])]),
            ("stop", vec![json!(5)]),
            ("bad_words", vec![json!({})]),
            ("stop_token_ids", vec![json!([-1]), json!(["a"]), json!(1)]),
            ("ignore_eos", vec![json!(1)]),
            ("n", vec![json!(0), json!(129)]),
            ("beam_width", vec![json!(0), json!(2)]),
            ("logprobs", vec![json!(-1), json!(21)]),
            ("watermark", vec![json!("yes")]),
            ("stream", vec![json!(1)]),
            ("return_context_logits", vec![json!(true)]),
            ("return_perf_metrics", vec![json!(true)]),
            ("lora_name", vec![json!("a")]),
            ("do_sample", vec![json!(1)]),
            ("min_length", vec![json!(-1)]),
            ("end_id", vec![json!("a")]),
            ("include_stop_str_in_output", vec![json!(1)]),
            ("skip_special_tokens", vec![json!("no")]),
            ("truncate_prompt_tokens", vec![json!(0)]),
            ("logit_bias", vec![json!({"1": 101}), json!([])]),
            ("allowed_token_ids", vec![json!([-1])]),
            ("num_return_sequences", vec![json!(0), json!(129)]),
            ("best_of", vec![json!(0), json!(129)]),
            ("exclude_input_in_output", vec![json!(1)]),
            ("return_finish_reason", vec![json!(1)]),
            ("return_cumulative_logprob", vec![json!(1)]),
            ("return_logprobs", vec![json!(1)]),
            ("return_log_probs", vec![json!(1)]),
            ("return_num_input_tokens", vec![json!(1)]),
            ("return_num_output_tokens", vec![json!(1)]),
            ("pad_id", vec![json!("a")]),
            ("length_penalty", vec![json!("a")]),
            ("batch_size", vec![json!(0)]),
            ("prompt_logprobs", vec![json!(21)]),
            ("detokenize", vec![json!(1)]),
        ] {
            for value in values {
                let fault = read(&text(&json!({field: value}))).expect_err(field);
                assert!(fault.starts_with(field), "{field} = {value}: {fault}");
            }
        }
        for (options, start) in [
            (json!({"n": 2}), "n: expected 1 at a temperature of 0, got 2"),
            (json!({"best_of": 2}), "best_of: expected 1 at a temperature of 0, got 2"),
            (json!({"n": 3, "best_of": 2, "temperature": 1}), "best_of: expected at least n, which is 3"),
            (json!({"best_of": 2, "temperature": 1, "stream": true}), "best_of: expected n in a stream"),
        ] {
            assert!(read(&text(&options)).unwrap_err().starts_with(start), "{options}");
        }
    }

    #[test]
    fn a_prompt_is_one() {
        let empty = json!([{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [""]}]);
        assert_eq!(read(&body(&json!({}), empty)).unwrap_err(), "text_input: must not be empty");
        let fault = read(&body(&json!({}), json!([]))).unwrap_err();
        assert_eq!(fault, "inputs: expected text_input, or token ids as input0");
        let two = json!([
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]},
            {"name": "input0", "datatype": "UINT32", "shape": [1], "data": [1]}
        ]);
        let fault = read(&body(&json!({}), two)).unwrap_err();
        assert_eq!(fault, "inputs: expected one prompt, got text_input and input0");
        let list = json!([{"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}]);
        let fault = read(&body(&json!({}), list)).unwrap_err();
        assert_eq!(fault, "text_input: expected 1 element of BYTES, got 2 of BYTES");
    }
}
