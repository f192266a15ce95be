//! The request body of `/v1/chat/completions`.

use std::ops::Bound::Included;

use proto::{SamplingParams, TokenId};
use serde_json::{Value, json};

use super::ChatWriter;
use crate::dialect::fields::{Fields, Integers, shown, unexpected, unsigned};
use crate::dialect::{Call, parts};
use crate::domain::{Chat, FieldNames, MaxTokens, Prompt, REPETITION_PENALTY_MIN, Request, Stop};
use crate::fault::Fault;

const ROUTE: &str = "/v1/chat/completions";

/// Most stop strings.
const STOP_MAX: usize = 4;

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Reads a call.
pub(crate) fn parse(body: &[u8]) -> Result<Call<ChatWriter>, Fault> {
    let mut fields = Fields::parse(body, Integers::Whole)?;
    let messages = messages(&fields.require("messages")?)?;
    let model = fields.string("model")?;
    let (max_tokens, max_tokens_field) = max_tokens(&mut fields)?;
    let sampling = sampling(&mut fields)?;
    let seed = fields.signed("seed", i64::MIN..=i64::MAX)?.map(i64::cast_unsigned);
    let stop = stop(&mut fields)?;
    let stream = fields.flag("stream")?.unwrap_or(false);
    let include_usage = include_usage(&mut fields, stream)?;
    refuse_what_is_not_served(&mut fields)?;
    fields.finish(ROUTE);

    let names = FieldNames { prompt: "messages", max_tokens: max_tokens_field, ..FieldNames::PLAIN };
    let mut request = Request::new(Prompt::Chat(Box::new(Chat { messages, ..Chat::default() })), names);
    request.model = model;
    request.sampling = sampling;
    request.seed = seed;
    request.max_tokens = max_tokens;
    request.stop = stop;
    Ok(Call { requests: vec![request], writer: ChatWriter::new(include_usage), stream })
}

fn messages(value: &Value) -> Result<Vec<Value>, Fault> {
    let Value::Array(list) = value else {
        return Err(unexpected("messages", "a list of messages", value));
    };
    if list.is_empty() {
        return Err(Fault::field("messages", "expected at least 1 message, got none"));
    }
    list.iter()
        .enumerate()
        .map(|(index, value)| message(value.clone(), &format!("messages[{index}]")))
        .collect()
}

fn message(value: Value, path: &str) -> Result<Value, Fault> {
    let mut fields = Fields::of(value, path, Integers::Whole)?;
    let role = fields.string("role")?.ok_or_else(|| fields.fault("role", "is required"))?;
    if !ROLES.contains(&role.as_str()) {
        return Err(fields.fault("role", format!("expected one of {}, got {role:?}", ROLES.join(", "))));
    }
    if fields.list("tool_calls")?.is_some_and(|calls| !calls.is_empty()) {
        return Err(fields.fault("tool_calls", "is not supported yet"));
    }
    let content = match fields.take("content") {
        Some(content) => parts::text_or_parts(content, &fields.path("content"))?,
        // An assistant that only refused or called a tool said nothing.
        None if role == "assistant" => String::new(),
        None => return Err(fields.fault("content", "is required")),
    };
    let name = fields.string("name")?;
    fields.take("tool_call_id");
    fields.finish(ROUTE);
    // Templates know the older word.
    let role = if role == "developer" { "system".to_owned() } else { role };
    let mut message = json!({"role": role, "content": content});
    if let Some(name) = name {
        message["name"] = name.into();
    }
    Ok(message)
}

/// The most tokens, and the field that said so: the newer name wins.
fn max_tokens(fields: &mut Fields) -> Result<(MaxTokens, &'static str), Fault> {
    let range = 1..=i32::MAX as u64;
    let old = fields.integer("max_tokens", range.clone())?;
    let new = fields.integer("max_completion_tokens", range)?;
    Ok(match (new, old) {
        (Some(count), _) => (MaxTokens::Exact(count as usize), "max_completion_tokens"),
        (None, Some(count)) => (MaxTokens::Exact(count as usize), "max_tokens"),
        (None, None) => (MaxTokens::Fill, "max_tokens"),
    })
}

fn sampling(fields: &mut Fields) -> Result<SamplingParams, Fault> {
    let penalty = (Included(-2.0), Included(2.0));
    // Zero keeps the most likely token alone, and so does any number too small to tell from it.
    let top_p = fields.float("top_p", (Included(0.0), Included(1.0)))?.unwrap_or(1.0);
    let top_k = fields.signed("top_k", -1..=i64::from(i32::MAX))?;
    Ok(SamplingParams {
        temperature: fields.float("temperature", (Included(0.0), Included(2.0)))?.unwrap_or(1.0),
        top_k: top_k.filter(|k| *k > 0).map(|k| k as u32),
        top_p: top_p.max(f32::MIN_POSITIVE),
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
        Some(Value::Array(list)) if list.len() > STOP_MAX => {
            return Err(Fault::field(
                "stop",
                format!("expected at most {STOP_MAX} strings, got {}", list.len()),
            ));
        }
        Some(Value::Array(list)) => stop_list(&list)?,
        Some(other) => return Err(unexpected("stop", "a string or a list of strings", &other)),
    };
    let ids = fields.list("stop_token_ids")?.unwrap_or_default();
    let ids = ids.iter().enumerate().map(|(index, value)| {
        let id = unsigned(value, Integers::Whole).and_then(|id| TokenId::try_from(id).ok());
        id.ok_or_else(|| unexpected(&format!("stop_token_ids[{index}]"), "a token id", value))
    });
    Ok(Stop {
        strings,
        token_ids: ids.collect::<Result<_, _>>()?,
        include: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        ..Stop::default()
    })
}

fn stop_list(list: &[Value]) -> Result<Vec<String>, Fault> {
    let strings = list.iter().enumerate().map(|(index, value)| match value {
        Value::String(text) => Ok(text.clone()),
        other => Err(unexpected(&format!("stop[{index}]"), "a string", other)),
    });
    strings.collect()
}

fn include_usage(fields: &mut Fields, stream: bool) -> Result<bool, Fault> {
    let Some(mut options) = fields.object("stream_options")? else { return Ok(false) };
    if !stream {
        return Err(Fault::field("stream_options", "is allowed only when stream is true"));
    }
    let include = options.flag("include_usage")?.unwrap_or(false);
    options.finish(ROUTE);
    Ok(include)
}

/// Fields that would change the answer and are not served yet: better a fault than an answer to another question.
fn refuse_what_is_not_served(fields: &mut Fields) -> Result<(), Fault> {
    if let Some(n) = fields.integer("n", 1..=128)?
        && n > 1
    {
        return Err(fields.fault("n", format!("more than 1 choice is not supported yet, got {n}")));
    }
    if fields.flag("logprobs")?.unwrap_or(false) {
        return Err(fields.fault("logprobs", "true is not supported yet"));
    }
    if fields.integer("top_logprobs", 0..=20)?.is_some_and(|count| count > 0) {
        return Err(fields.fault("top_logprobs", "more than 0 is not supported yet"));
    }
    for name in ["tools", "functions"] {
        if fields.list(name)?.is_some_and(|list| !list.is_empty()) {
            return Err(fields.fault(name, "is not supported yet"));
        }
    }
    match fields.take("logit_bias") {
        Some(Value::Object(bias)) if bias.is_empty() => {}
        None => {}
        Some(_) => return Err(fields.fault("logit_bias", "is not supported yet")),
    }
    if let Some(mut format) = fields.object("response_format")? {
        let kind = format.require("type")?;
        if kind != "text" {
            return Err(format.fault("type", format!("only \"text\" is supported yet, got {}", shown(&kind))));
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

    fn with(extra: Value) -> Result<Request, String> {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        read(&body)
    }

    fn said(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    #[test]
    fn a_chat_is_messages_of_strings_or_text_parts() {
        let request = read(&json!({"model": "m", "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": "ann"},
            {"role": "assistant", "content": null},
        ]}))
        .unwrap();
        assert_eq!(request.model.as_deref(), Some("m"));
        let mut named = said("user", "Hello");
        named["name"] = json!("ann");
        let messages = vec![said("system", "Be brief."), named, said("assistant", "")];
        assert_eq!(request.prompt, Prompt::Chat(Box::new(Chat { messages, ..Chat::default() })));
    }

    #[test]
    fn defaults_sample_at_temperature_one_until_the_context_ends() {
        let request =
            with(json!({"temperature": null, "stop": null, "tools": [], "logprobs": false, "n": 1})).unwrap();
        assert_eq!(request.sampling, SamplingParams { temperature: 1.0, ..SamplingParams::default() });
        assert_eq!(request.max_tokens, MaxTokens::Fill);
        assert_eq!((request.seed, request.stop.clone()), (None, Stop::default()));
    }

    #[test]
    fn fields_are_read() {
        let request = with(json!({
            "max_tokens": 5.0, "temperature": 0.5, "top_p": 0.9, "seed": -1, "stop": ["a", "b"],
            "presence_penalty": 1, "frequency_penalty": -1, "top_k": 7, "repetition_penalty": 1.5,
            "ignore_eos": true, "stop_token_ids": [3], "user": "u", "metadata": {"a": "b"}
        }))
        .unwrap();
        assert_eq!(
            request.sampling,
            SamplingParams {
                temperature: 0.5,
                top_k: Some(7),
                top_p: 0.9,
                repetition_penalty: 1.5,
                presence_penalty: 1.0,
                frequency_penalty: -1.0,
                ..SamplingParams::default()
            }
        );
        assert_eq!(request.seed, Some(u64::MAX));
        assert_eq!(request.max_tokens, MaxTokens::Exact(5));
        let stop = Stop {
            strings: vec!["a".into(), "b".into()],
            token_ids: vec![3],
            include: false,
            ignore_eos: true,
            ..Stop::default()
        };
        assert_eq!(request.stop, stop);
        let both = with(json!({"max_tokens": 5, "max_completion_tokens": 6})).unwrap();
        assert_eq!((both.max_tokens, both.names.max_tokens), (MaxTokens::Exact(6), "max_completion_tokens"));
        assert_eq!(with(json!({"top_k": -1})).unwrap().sampling.top_k, None);
        assert!(with(json!({"top_p": 0})).unwrap().sampling.top_p > 0.0);
    }

    #[test]
    fn a_seed_has_64_bits_with_sign_to_the_last_digit() {
        let seed = |digits: &str| {
            let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], "seed": {digits}}}"#);
            parse(body.as_bytes()).map(|call| call.requests[0].seed).map_err(|fault| fault.to_string())
        };
        for (digits, expected) in [
            ("-9223372036854775808", 1 << 63),
            ("9223372036854775807", i64::MAX.cast_unsigned()),
            ("0", 0),
            ("5.0", 5),
        ] {
            assert_eq!(seed(digits), Ok(Some(expected)), "{digits}");
        }
        for digits in
            ["-9223372036854775809", "9223372036854775808", "18446744073709551616", "1e19", "-1e300"]
        {
            let fault = seed(digits).unwrap_err();
            assert!(fault.starts_with("seed: expected an integer in [-9223372036854775808, "), "{fault}");
        }
    }

    #[test]
    fn a_fault_names_its_field() {
        let message = |message: Value| json!({"messages": [message]});
        for (body, start) in [
            (json!({}), "messages: is required"),
            (json!({"messages": []}), "messages: expected at least 1 message"),
            (json!({"messages": "hi"}), "messages: expected a list of messages"),
            (message(json!("hi")), "messages[0]: expected an object"),
            (message(json!({"content": "x"})), "messages[0].role: is required"),
            (message(json!({"role": "robot", "content": "x"})), "messages[0].role: expected one of"),
            (message(json!({"role": "user"})), "messages[0].content: is required"),
            (message(json!({"role": "user", "content": 5})), "messages[0].content: expected a string or"),
            (
                message(json!({"role": "user", "content": [
                    {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]})),
                "messages[0].content[1].type: this model takes text only, got a part of type \"image_url\"",
            ),
            (
                message(json!({"role": "user", "content": [{"type": "input_audio"}]})),
                "messages[0].content[0].type: this model takes text only",
            ),
            (message(json!({"role": "assistant", "tool_calls": [{}]})), "messages[0].tool_calls: is not"),
        ] {
            let fault = read(&body).unwrap_err();
            assert!(fault.starts_with(start), "{body}: {fault}");
        }
        for (extra, start) in [
            (json!({"max_tokens": 0}), "max_tokens: expected an integer"),
            (json!({"max_completion_tokens": -1}), "max_completion_tokens: expected"),
            (json!({"temperature": 2.1}), "temperature: "),
            (json!({"temperature": true}), "temperature: "),
            (json!({"top_p": 1.1}), "top_p: "),
            (json!({"presence_penalty": 3}), "presence_penalty: "),
            (json!({"frequency_penalty": -3}), "frequency_penalty: "),
            (json!({"repetition_penalty": 0}), "repetition_penalty: "),
            (json!({"top_k": -2}), "top_k: "),
            (
                json!({"seed": "x"}),
                "seed: expected an integer in [-9223372036854775808, 9223372036854775807]",
            ),
            (json!({"seed": 1_u64 << 63}), "seed: expected an integer"),
            (
                json!({"repetition_penalty": 1e-45}),
                "repetition_penalty: expected a number of at least 1.1754944e-38",
            ),
            (json!({"repetition_penalty": 1e-40}), "repetition_penalty: "),
            (json!({"temperature": 1e39}), "temperature: "),
            (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop: expected at most 4 strings, got 5"),
            (json!({"stop": [1]}), "stop[0]: expected a string"),
            (json!({"stop_token_ids": [-1]}), "stop_token_ids[0]: expected a token id"),
            (json!({"stream": 1}), "stream: expected true or false"),
            (json!({"stream_options": {"include_usage": true}}), "stream_options: is allowed only"),
            (json!({"n": 2}), "n: more than 1 choice"),
            (json!({"n": 0}), "n: expected an integer in [1, 128]"),
            (json!({"logprobs": true}), "logprobs: true is not supported yet"),
            (json!({"top_logprobs": 2}), "top_logprobs: more than 0"),
            (json!({"tools": [{}]}), "tools: is not supported yet"),
            (json!({"logit_bias": {"1": 2}}), "logit_bias: is not supported yet"),
            (json!({"response_format": {"type": "json_object"}}), "response_format.type: only"),
        ] {
            let fault = with(extra.clone()).unwrap_err();
            assert!(fault.starts_with(start), "{extra}: {fault}");
        }
    }
}
