//! Fields that several APIs have in the same form: what vLLM adds to sampling, and structured output.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use proto::{Grammar, LOGPROBS_MAX, SamplingParams, TokenId, Watermark};
use serde_json::{Value, json};

use super::fields::{Fields, Integers, shown, unexpected, unsigned};
use crate::Config;
use crate::domain::Stop;
use crate::fault::Fault;

/// Range of a bias, as most APIs have it.
const BIAS: RangeInclusive<f32> = -100.0..=100.0;
/// Most biases of a request.
const BIASES_MAX: usize = 4096;
/// Most choices that an output may be limited to.
const CHOICES_MAX: usize = 1024;

/// `min_p`, `logit_bias`, `allowed_token_ids`.
pub(crate) fn filters(fields: &mut Fields, sampling: &mut SamplingParams) -> Result<(), Fault> {
    sampling.min_p = fields.float("min_p", 0.0..=1.0)?.unwrap_or(0.0);
    sampling.logit_bias = logit_bias(fields)?;
    sampling.allowed_token_ids = token_ids(fields, "allowed_token_ids")?;
    Ok(())
}

/// `min_tokens`.
pub(crate) fn min_tokens(fields: &mut Fields, stop: &mut Stop) -> Result<(), Fault> {
    stop.min_tokens = fields.integer("min_tokens", 0..=i32::MAX as u64)?.unwrap_or(0) as usize;
    Ok(())
}

/// An object of token ids and biases.
fn logit_bias(fields: &mut Fields) -> Result<Vec<(TokenId, f32)>, Fault> {
    let path = fields.path("logit_bias");
    let object = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(object)) => object,
        Some(other) => return Err(unexpected(&path, "an object of token ids and numbers", &other)),
    };
    if object.len() > BIASES_MAX {
        return Err(Fault::field(
            path,
            format!("expected at most {BIASES_MAX} tokens, got {}", object.len()),
        ));
    }
    // Several spellings of one id are one id.
    let mut biases = BTreeMap::new();
    for (id, bias) in object {
        let token: TokenId =
            id.parse().map_err(|_| Fault::field(&path, format!("expected token ids, got {id:?}")))?;
        let number = bias.as_f64().map(|bias| bias as f32).filter(|bias| BIAS.contains(bias));
        let expected = format!("a number in [{}, {}]", BIAS.start(), BIAS.end());
        biases.insert(token, number.ok_or_else(|| unexpected(&format!("{path}.{id}"), &expected, &bias))?);
    }
    Ok(biases.into_iter().collect())
}

/// A list of token ids; empty when it is absent.
pub(crate) fn token_ids(fields: &mut Fields, name: &str) -> Result<Vec<TokenId>, Fault> {
    let path = fields.path(name);
    let ids = fields.list(name)?.unwrap_or_default();
    let ids = ids.iter().enumerate().map(|(index, value)| token_id(value, &format!("{path}[{index}]")));
    ids.collect()
}

/// A token id.
pub(crate) fn token_id(value: &Value, path: &str) -> Result<TokenId, Fault> {
    let id = unsigned(value, Integers::Strict).and_then(|id| TokenId::try_from(id).ok());
    id.ok_or_else(|| unexpected(path, "a token id", value))
}

/// A list of strings; empty when it is absent.
pub(crate) fn strings(fields: &mut Fields, name: &str) -> Result<Vec<String>, Fault> {
    let path = fields.path(name);
    each_string(fields.list(name)?.unwrap_or_default(), &path)
}

/// A string or a list of strings at `path`; empty when it is absent.
pub(crate) fn texts(value: Option<Value>, path: &str) -> Result<Vec<String>, Fault> {
    match value {
        None => Ok(Vec::new()),
        Some(Value::String(one)) => Ok(vec![one]),
        Some(Value::Array(list)) => each_string(list, path),
        Some(other) => Err(unexpected(path, "a string or a list of strings", &other)),
    }
}

fn each_string(list: Vec<Value>, path: &str) -> Result<Vec<String>, Fault> {
    let strings = list.into_iter().enumerate().map(|(index, value)| match value {
        Value::String(text) => Ok(text),
        other => Err(unexpected(&format!("{path}[{index}]"), "a string", &other)),
    });
    strings.collect()
}

/// `logprobs` as a count, up to the most that there are.
pub(crate) fn logprobs(fields: &mut Fields, name: &str) -> Result<Option<u32>, Fault> {
    Ok(fields.integer(name, 0..=u64::from(LOGPROBS_MAX))?.map(|count| count as u32))
}

/// The server's watermark.
pub(crate) fn watermark(config: &Config) -> Watermark {
    Watermark { key: config.watermark_key, gamma: config.watermark_gamma, delta: config.watermark_delta }
}

/// vLLM's `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`, `guided_json_object`, and the objects
/// `structured_outputs` and `guided_decoding` with the same without the prefix. At most one may be there. Options of
/// the engine behind are without meaning here.
pub(crate) fn structured(fields: &mut Fields) -> Result<Option<Grammar>, Fault> {
    let mut found = kinds(fields, "guided_")?;
    for name in ["guided_decoding_backend", "guided_whitespace_pattern"] {
        fields.string(name)?;
    }
    for name in ["structured_outputs", "guided_decoding"] {
        if let Some(mut object) = fields.object(name)? {
            found.append(&mut kinds(&mut object, "")?);
            object.finish(name);
        }
    }
    if found.len() > 1 {
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        return Err(Fault::field(
            &found[1].0,
            format!("expected one kind of structured output, got {}", names.join(", ")),
        ));
    }
    Ok(found.pop().map(|(_, grammar)| grammar))
}

/// The kinds of structured output that the fields with this prefix ask for, each with its path.
fn kinds(fields: &mut Fields, prefix: &str) -> Result<Vec<(String, Grammar)>, Fault> {
    let mut found = Vec::new();
    let name = |kind: &str| format!("{prefix}{kind}");
    if let Some(schema) = fields.take(&name("json")) {
        let path = fields.path(&name("json"));
        found.push((path.clone(), json_schema(schema, &path)?));
    }
    if fields.flag(&name("json_object"))?.unwrap_or(false) {
        found.push((fields.path(&name("json_object")), json_object()));
    }
    if let Some(regex) = fields.string(&name("regex"))? {
        found.push((fields.path(&name("regex")), Grammar::Regex(regex.into())));
    }
    if let Some(grammar) = fields.string(&name("grammar"))? {
        found.push((fields.path(&name("grammar")), Grammar::Lark(grammar.into())));
    }
    let path = fields.path(&name("choice"));
    let given = fields.has(&name("choice"));
    let choices = strings(fields, &name("choice"))?;
    if given {
        found.push((path.clone(), choice(&choices, &path)?));
    }
    Ok(found)
}

/// A schema as an object, or as its text.
pub(crate) fn json_schema(schema: Value, path: &str) -> Result<Grammar, Fault> {
    match schema {
        Value::Object(_) | Value::Bool(_) => Ok(Grammar::JsonSchema(schema.to_string().into())),
        Value::String(text) => match serde_json::from_str::<Value>(&text) {
            Ok(Value::Object(_) | Value::Bool(_)) => Ok(Grammar::JsonSchema(text.into())),
            Ok(other) => Err(unexpected(path, "a JSON schema", &other)),
            Err(error) => Err(Fault::field(path, format!("expected a JSON schema, got no JSON: {error}"))),
        },
        other => Err(Fault::field(path, format!("expected a JSON schema, got {}", shown(&other)))),
    }
}

/// Any JSON object.
pub(crate) fn json_object() -> Grammar {
    Grammar::JsonSchema(json!({"type": "object"}).to_string().into())
}

/// One of these texts.
pub(crate) fn choice(choices: &[String], path: &str) -> Result<Grammar, Fault> {
    if choices.is_empty() || choices.len() > CHOICES_MAX {
        return Err(Fault::field(path, format!("expected 1 to {CHOICES_MAX} texts, got {}", choices.len())));
    }
    if choices.iter().any(String::is_empty) {
        return Err(Fault::field(path, "expected texts of at least 1 character, got an empty one"));
    }
    let texts: Vec<String> = choices.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
    Ok(Grammar::Lark(Arc::from(format!("start: {}", texts.join(" | ")))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::parse(value.to_string().as_bytes(), Integers::Strict).unwrap()
    }

    #[test]
    fn biases_are_numbers_by_token() {
        let read = |value: Value| {
            let mut sampling = SamplingParams::default();
            filters(&mut fields(json!({"logit_bias": value})), &mut sampling)
                .map(|()| sampling.logit_bias)
                .map_err(|fault| fault.to_string())
        };
        assert_eq!(read(json!({"7042": -100, "3": 0.5})), Ok(vec![(3, 0.5), (7042, -100.0)]));
        assert_eq!(read(json!(null)), Ok(vec![]));
        for (value, start) in [
            (json!({"x": 1}), "logit_bias: expected token ids, got \"x\""),
            (json!({"-1": 1}), "logit_bias: expected token ids, got \"-1\""),
            (json!({"1": 101}), "logit_bias.1: expected a number in [-100, 100], got 101"),
            (json!({"1": "a"}), "logit_bias.1: expected a number"),
            (json!([1]), "logit_bias: expected an object"),
        ] {
            let fault = read(value).unwrap_err();
            assert!(fault.starts_with(start), "{fault}");
        }
    }

    #[test]
    fn structured_output_is_of_one_kind() {
        let read = |value: Value| structured(&mut fields(value)).map_err(|fault| fault.to_string());
        assert_eq!(read(json!({})), Ok(None));
        let schema = Some(Grammar::JsonSchema("{\"type\":\"string\"}".into()));
        assert_eq!(read(json!({"guided_json": {"type": "string"}})), Ok(schema.clone()));
        assert_eq!(read(json!({"guided_json": "{\"type\":\"string\"}"})), Ok(schema.clone()));
        assert_eq!(read(json!({"structured_outputs": {"json": {"type": "string"}}})), Ok(schema));
        assert_eq!(read(json!({"guided_regex": "a+"})), Ok(Some(Grammar::Regex("a+".into()))));
        let lark = Some(Grammar::Lark("start: \"a\\\"b\" | \"c\"".into()));
        assert_eq!(read(json!({"guided_choice": ["a\"b", "c"]})), Ok(lark));
        let fault = read(json!({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}})).unwrap_err();
        assert!(fault.starts_with("structured_outputs.choice: expected one kind"), "{fault}");
        for bad in [json!({"guided_choice": []}), json!({"guided_json": 5}), json!({"guided_json": "{"})] {
            assert!(read(bad).is_err());
        }
    }
}
