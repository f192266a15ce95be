//! Parameters and their ranges.

use proto::{Grammar, SamplingParams};

use super::*;
use crate::domain::{MaxTokens, Priority, Stop, Tail, Truncate};

#[test]
fn defaults_sample_at_temperature_one_until_the_context_ends() {
    let request = Place::plain()
        .with(json!({"temperature": null, "stop": null, "tools": [], "logprobs": false, "n": 1}))
        .unwrap();
    assert_eq!(request.sampling, SamplingParams { temperature: 1.0, ..SamplingParams::default() });
    assert_eq!(request.max_tokens, MaxTokens::Fill);
    assert_eq!((request.seed, request.stop.clone()), (None, Stop::default()));
    assert_eq!((request.n, request.best_of, request.skip_special_tokens), (1, 1, true));
}

#[test]
fn fields_are_read() {
    let place = Place::plain();
    let request = place
        .with(json!({
            "max_tokens": 50.0, "temperature": 0.5, "top_p": 0.9, "seed": -1, "stop": ["a", "b", "c", "d", "e"],
            "presence_penalty": 1, "frequency_penalty": -1, "top_k": 7, "repetition_penalty": 1.5, "min_p": 0.25,
            "ignore_eos": true, "stop_token_ids": [3], "include_stop_str_in_output": true, "min_tokens": 2,
            "logit_bias": {"5": -100}, "allowed_token_ids": [5, 6], "bad_words": ["x"], "n": 3, "priority": 2,
            "truncate_prompt_tokens": 9, "skip_special_tokens": false, "user": "u", "metadata": {"a": "b"},
            "logprobs": true, "top_logprobs": 4, "prompt_logprobs": 1, "store": true, "service_tier": "auto",
        }))
        .unwrap();
    let sampling = SamplingParams {
        temperature: 0.5,
        top_k: Some(7),
        top_p: 0.9,
        min_p: 0.25,
        repetition_penalty: 1.5,
        presence_penalty: 1.0,
        frequency_penalty: -1.0,
        logit_bias: vec![(5, -100.0)],
        allowed_token_ids: vec![5, 6],
        logprobs: Some(4),
        prompt_logprobs: Some(1),
        ..SamplingParams::default()
    };
    assert_eq!(request.sampling, sampling);
    assert_eq!(request.seed, Some(u64::MAX));
    assert_eq!(request.max_tokens, MaxTokens::Exact(50));
    let stop = Stop {
        strings: ["a", "b", "c", "d", "e"].map(ToOwned::to_owned).to_vec(),
        token_ids: vec![3],
        include: true,
        ignore_eos: true,
        min_tokens: 2,
    };
    assert_eq!(request.stop, stop);
    assert_eq!((request.n, request.best_of, request.priority), (3, 3, Priority(2)));
    assert_eq!(request.truncate, Some(Truncate::Last(9)));
    assert_eq!(request.session.as_deref(), Some("u"));
    assert_eq!(place.with(json!({"user": 5})).unwrap().session, None);
    assert_eq!((request.bad_words, request.skip_special_tokens), (vec!["x".to_owned()], false));
    let both = place.with(json!({"max_tokens": 5, "max_completion_tokens": 6})).unwrap();
    assert_eq!((both.max_tokens, both.names.max_tokens), (MaxTokens::Exact(6), "max_completion_tokens"));
    for off in [-1, 0] {
        assert_eq!(place.with(json!({"top_k": off})).unwrap().sampling.top_k, None);
    }
    assert!(place.with(json!({"top_p": 0})).unwrap().sampling.top_p > 0.0);
    assert_eq!(place.with(json!({"stop": "a"})).unwrap().stop.strings, ["a"]);
    assert_eq!(place.with(json!({"logprobs": true})).unwrap().sampling.logprobs, Some(0));
    assert_eq!(place.with(json!({"temperature": 0, "n": 2})).unwrap().n, 2);
}

#[test]
fn a_seed_has_64_bits_with_sign_to_the_last_digit() {
    let place = Place::plain();
    let seed = |digits: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], "seed": {digits}}}"#);
        place
            .parse_bytes(body.as_bytes())
            .map(|call| call.requests[0].seed)
            .map_err(|fault| fault.to_string())
    };
    for (digits, expected) in [
        ("-9223372036854775808", 1 << 63),
        ("9223372036854775807", i64::MAX.cast_unsigned()),
        ("0", 0),
        ("5.0", 5),
    ] {
        assert_eq!(seed(digits), Ok(Some(expected)), "{digits}");
    }
    for digits in ["-9223372036854775809", "9223372036854775808", "18446744073709551616", "1e19", "-1e300"] {
        let fault = seed(digits).unwrap_err();
        assert!(fault.starts_with("seed: expected an integer in [-9223372036854775808, "), "{fault}");
    }
}

#[test]
fn a_fault_names_its_field() {
    let place = Place::plain();
    for (extra, start) in [
        (json!({"max_tokens": 0}), "max_tokens: expected an integer"),
        (json!({"max_completion_tokens": -1}), "max_completion_tokens: expected"),
        (json!({"temperature": 2.1}), "temperature: "),
        (json!({"temperature": true}), "temperature: "),
        (json!({"temperature": 1e39}), "temperature: "),
        (json!({"top_p": 1.1}), "top_p: "),
        (json!({"min_p": -0.1}), "min_p: "),
        (json!({"presence_penalty": 3}), "presence_penalty: "),
        (json!({"frequency_penalty": -3}), "frequency_penalty: "),
        (json!({"repetition_penalty": 0}), "repetition_penalty: "),
        (
            json!({"repetition_penalty": 1e-45}),
            "repetition_penalty: expected a number of at least 1.1754944e-38",
        ),
        (json!({"repetition_penalty": 1e-40}), "repetition_penalty: "),
        (json!({"top_k": -2}), "top_k: "),
        (json!({"seed": "x"}), "seed: expected an integer in [-9223372036854775808, 9223372036854775807]"),
        (json!({"seed": 1_u64 << 63}), "seed: expected an integer"),
        (json!({"stop": [1]}), "stop[0]: expected a string"),
        (json!({"stop": 1}), "stop: expected a string or a list"),
        (json!({"stop_token_ids": [-1]}), "stop_token_ids[0]: expected a token id"),
        (json!({"stream": 1}), "stream: expected true or false"),
        (
            json!({"stream_options": {"include_usage": true}}),
            "stream_options: is allowed only when stream is true",
        ),
        (json!({"n": 0}), "n: expected an integer in [1, 128]"),
        (json!({"n": 129}), "n: expected an integer in [1, 128]"),
        (json!({"top_logprobs": 2}), "top_logprobs: is allowed only when logprobs is true"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs: expected an integer in [0, 20]"),
        (json!({"logprobs": 3}), "logprobs: expected true or false"),
        (
            json!({"prompt_logprobs": 1, "stream": true}),
            "prompt_logprobs: is not allowed when stream is true",
        ),
        (json!({"logit_bias": {"1": 101}}), "logit_bias.1: expected a number in [-100, 100]"),
        (json!({"priority": 6}), "priority: expected an integer in [1, 5]"),
        (json!({"use_beam_search": true}), "use_beam_search: true is not supported"),
        (
            json!({"modalities": ["text", "audio"]}),
            "modalities: this model answers in text only, got \"audio\"",
        ),
        (json!({"reasoning_effort": 1}), "reasoning_effort: expected a string"),
        (json!({"chat_template": "x"}), "chat_template: is not taken from requests here"),
        (json!({"chat_template_kwargs": []}), "chat_template_kwargs: expected an object"),
        (
            json!({"add_generation_prompt": true, "continue_final_message": true}),
            "continue_final_message: is not allowed when add_generation_prompt is true",
        ),
        (json!({"response_format": {}}), "response_format.type: is required"),
        (
            json!({"response_format": {"type": "xml"}}),
            "response_format.type: expected \"text\", \"json_object\"",
        ),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema: is required"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
            "response_format.json_schema.name: is required",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}),
            "response_format.json_schema.name: expected 1 to 64 of",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}}),
            "response_format.json_schema.schema: expected a JSON schema, got 5",
        ),
        (
            json!({"response_format": {"type": "json_object", "schema": "{"}}),
            "response_format.schema: expected a JSON schema, got no JSON",
        ),
        (
            json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}),
            "response_format: expected one kind of structured output",
        ),
    ] {
        let fault = place.with(extra.clone()).unwrap_err();
        assert!(fault.starts_with(start), "{extra}: {fault}");
    }
}

#[test]
fn what_is_of_another_type_is_a_fault() {
    let place = Place::plain();
    let flags = [
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "return_tokens_as_token_ids",
        "return_token_ids",
        "echo",
        "add_generation_prompt",
        "continue_final_message",
        "include_reasoning",
        "use_beam_search",
        "parallel_tool_calls",
    ];
    for flag in flags {
        let fault = place.with(json!({flag: 1})).unwrap_err();
        assert!(fault.starts_with(&format!("{flag}: expected true or false")), "{flag}: {fault}");
    }
    for list in ["bad_words", "allowed_token_ids", "stop_token_ids", "documents", "tools", "functions"] {
        let fault = place.with(json!({list: "x"})).unwrap_err();
        assert!(fault.starts_with(&format!("{list}: expected a list")), "{list}: {fault}");
    }
    for (field, value) in [
        ("model", json!(5)),
        ("min_tokens", json!(-1)),
        ("truncate_prompt_tokens", json!(0)),
        ("prompt_logprobs", json!(21)),
        ("stream_options", json!(1)),
        ("debug_config", json!(1)),
        ("logit_bias", json!([])),
        ("response_format", json!("json")),
    ] {
        let fault = place.with(json!({field: value, "stream": true})).unwrap_err();
        assert!(fault.starts_with(&format!("{field}: expected ")), "{field}: {fault}");
    }
    let fault = place.with(json!({"stream": true, "stream_options": {"include_usage": 1}})).unwrap_err();
    assert!(fault.starts_with("stream_options.include_usage: expected true or false"), "{fault}");
}

#[test]
fn a_format_becomes_a_grammar() {
    let place = Place::plain();
    let grammar = |extra: Value| {
        let request = place.with(extra).unwrap();
        (request.sampling.grammar, request.names.grammar)
    };
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let json_schema = Some(Grammar::JsonSchema(schema.to_string().into()));
    let strict =
        json!({"type": "json_schema", "json_schema": {"name": "a", "strict": true, "schema": schema}});
    assert_eq!(grammar(json!({"response_format": strict})), (json_schema.clone(), "response_format"));
    let mlc = json!({"type": "json_object", "schema": schema.to_string()});
    assert_eq!(grammar(json!({"response_format": mlc})).0, json_schema);
    let object = Some(Grammar::JsonSchema("{\"type\":\"object\"}".into()));
    assert_eq!(grammar(json!({"response_format": {"type": "json_object"}})).0, object);
    assert_eq!(grammar(json!({"response_format": {"type": "text"}})).0, None);
    let regex = (Some(Grammar::Regex("a+".into())), "structured_outputs");
    assert_eq!(grammar(json!({"guided_regex": "a+"})), regex);
    assert_eq!(grammar(json!({"structured_outputs": {"regex": "a+"}})), regex);
}

#[test]
fn a_chat_is_rendered_as_asked() {
    let mut place = Place::plain();
    let tail = |extra: Value| chat(&place.with(extra).unwrap()).tail;
    assert_eq!(tail(json!({})), Tail::Assistant);
    assert_eq!(tail(json!({"add_generation_prompt": false})), Tail::Nothing);
    assert_eq!(tail(json!({"add_generation_prompt": false, "continue_final_message": true})), Tail::Continue);
    let request =
        place.with(json!({"chat_template_kwargs": {"a": 1}, "documents": [{"text": "x"}]})).unwrap();
    assert_eq!(
        Value::Object(chat(&request).variables.clone()),
        json!({"documents": [{"text": "x"}], "a": 1})
    );
    place.config.request_chat_template = true;
    let request = place.with(json!({"chat_template": "x"})).unwrap();
    assert_eq!(chat(&request).template.as_deref(), Some("x"));
    let long = "x".repeat(65_537);
    let fault = place.with(json!({"chat_template": long})).unwrap_err();
    assert!(fault.starts_with("chat_template: expected at most 65536 characters"), "{fault}");
}

#[test]
fn effort_is_told_to_templates_that_ask() {
    let variables = |template: &str, extra: Value| {
        let request = Place::templated(template, &[]).with(extra).unwrap();
        Value::Object(chat(&request).variables.clone())
    };
    let effort = json!({"reasoning_effort": "none"});
    assert_eq!(variables("x", effort.clone()), json!({}));
    assert_eq!(variables("{{ reasoning_effort }}", effort.clone()), json!({"reasoning_effort": "none"}));
    assert_eq!(variables("{{ enable_thinking }}", effort.clone()), json!({"enable_thinking": false}));
    let told = json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(variables("{{ enable_thinking }}", told), json!({"enable_thinking": true}));
}

#[test]
fn mlc_ends_where_the_context_ends_and_may_ignore_every_end() {
    let request = Place::mlc()
        .with(json!({"max_tokens": 9, "stop": "a", "debug_config": {"ignore_eos": true}}))
        .unwrap();
    assert_eq!(request.max_tokens, MaxTokens::Clamp(9));
    assert_eq!(request.stop, Stop { ignore_eos: true, ..Stop::default() });
    let request = Place::plain().with(json!({"stop": "a", "debug_config": {"ignore_eos": true}})).unwrap();
    assert_eq!((request.stop.strings.len(), request.stop.ignore_eos), (1, false));
}

#[test]
fn an_unknown_model_is_a_fault_of_its_own() {
    let config = Config::default();
    let setting =
        Setting { config: &config, model: &|name| Err(Fault::Model(name.unwrap_or_default().to_owned())) };
    let body = with(json!({"model": "x"})).to_string();
    assert_eq!(parse_chat(body.as_bytes(), &setting).err(), Some(Fault::Model("x".to_owned())));
}
