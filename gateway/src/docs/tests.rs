//! What is described is what is read, field by field.

use std::collections::BTreeSet;

use serde_json::Value;

use super::*;
use crate::Config;
use crate::dialect::fields::{self, Fields, Integers};
use crate::dialect::tests::started;
use crate::dialect::{kserve as kserve_dialect, mindie_tokens, openai, tgi, triton, vllm};

fn document() -> Value {
    serde_json::from_slice(&DOCUMENT).unwrap()
}

/// What a reference stands for.
fn resolved<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(path) => document.pointer(path.trim_start_matches('#')).unwrap(),
        None => schema,
    }
}

/// The names of a body's fields.
fn described(document: &Value, schema: &Value) -> BTreeSet<String> {
    let schema = resolved(document, schema);
    let own = schema["properties"].as_object().into_iter().flat_map(|fields| fields.keys().cloned());
    let parts = schema["allOf"].as_array().into_iter().flatten();
    own.chain(parts.flat_map(|part| described(document, part))).collect()
}

/// The fields of a body; of one of several forms those of the form of that name.
fn of_body(document: &Value, path: &str, form: Option<&str>) -> BTreeSet<String> {
    let body = match form {
        Some(form) => &document["components"]["schemas"][form],
        None => &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"],
    };
    let names = described(document, body);
    assert!(!names.is_empty(), "{path}");
    names
}

#[test]
fn every_field_that_is_read_is_described_and_the_other_way_round() {
    let document = document();
    let config = Config::default();
    let check = |path: &str, form: Option<&str>, parse: &dyn Fn()| {
        fields::asked::start();
        parse();
        let read = fields::asked::names();
        let described = of_body(&document, path, form);
        assert_eq!(described.difference(&read).collect::<Vec<_>>(), Vec::<&String>::new(), "{path}");
        let missing: Vec<&String> = read
            .difference(&described)
            .filter(|name| !openai::WITHOUT_EFFECT.contains(&name.as_str()))
            .collect();
        assert_eq!(missing, Vec::<&String>::new(), "{path}");
    };
    let fields = |body: &str| Fields::parse(body.as_bytes(), Integers::Strict).unwrap();
    check("/generate", Some("VllmRequest"), &|| {
        drop(vllm::parse(&config, fields(r#"{"prompt":"x"}"#)).unwrap());
    });
    check("/v1/completions", None, &|| {
        drop(openai::parse_completion(br#"{"prompt":"x"}"#).unwrap());
    });
    let model = started("m", 1, None).model;
    let setting = openai::Setting { config: &config, model: &|_| Ok(model.clone()) };
    check("/tokenize", None, &|| {
        for body in [r#"{"prompt":"x"}"#, r#"{"messages":[{"role":"user","content":"x"}]}"#] {
            openai::tokenized(body.as_bytes(), &setting).unwrap();
        }
    });
    check("/detokenize", None, &|| drop(openai::detokenized(br#"{"tokens":[1]}"#, &setting).unwrap()));
    check("/v1/tokenizer", None, &|| drop(mindie_tokens::parse(br#"{"inputs":"x"}"#).unwrap()));

    // Parameters are fields within an object of the body.
    let within = |path: &str, parameters: &str, parse: &dyn Fn()| {
        fields::asked::start();
        parse();
        let read = fields::asked::names();
        let inner = described(&document, &document["components"]["schemas"][parameters]);
        let both: BTreeSet<String> = of_body(&document, path, None).union(&inner).cloned().collect();
        assert_eq!(both, read, "{path}");
    };
    within("/v2/models/{model}/generate", "TritonParameters", &|| {
        let envelope = triton::Envelope { model: "m", stream: false, recompute: false };
        drop(triton::parse(&config, envelope, br#"{"text_input":"x"}"#).unwrap());
    });
    for path in ["/", "/generate_stream"] {
        within(path, "TgiParameters", &|| {
            drop(tgi::parse(&config, tgi::Route::Root, fields(r#"{"inputs":"x"}"#)).unwrap());
        });
    }
    let tgi = of_body(&document, "/generate", Some("TgiRequest"));
    assert_eq!(tgi, of_body(&document, "/", None));
}

#[test]
fn every_option_of_infer_is_described_and_the_other_way_round() {
    let document = document();
    fields::asked::start();
    let body = br#"{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":["x"]}]}"#;
    let inference = kserve_dialect::http_request::parse(&Bytes::from_static(body), None).unwrap();
    drop(kserve_dialect::request::convert(&Config::default(), "m", inference).unwrap());
    let mut read = fields::asked::names();
    // Taken before the options are, by the protocol and as an object of them.
    for name in ["priority", "timeout", "binary_data_output", "sampling_parameters"] {
        assert!(read.insert(name.to_owned()), "{name}");
    }
    // Refused, or of another family that has a description of its own.
    let told = |name: &String| {
        let other = name.starts_with("guided_") && !name.starts_with("guided_decoding_guide");
        let refused =
            ["return_context_logits", "return_generation_logits", "return_perf_metrics", "lora_name"];
        let without_effect = ["detokenize", "spaces_between_special_tokens", "structured_outputs"];
        !(other || refused.contains(&name.as_str()) || without_effect.contains(&name.as_str()))
    };
    let read: BTreeSet<String> = read.into_iter().filter(told).collect();
    assert_eq!(described(&document, &document["components"]["schemas"]["InferParameters"]), read);
}

#[test]
fn the_description_names_every_status() {
    let document = document();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for operation in methods.as_object().unwrap().values() {
            let statuses = operation["responses"].as_object().unwrap();
            assert!(statuses.contains_key("200"), "{path}");
            assert!(!statuses.contains_key("500"), "{path}");
        }
    }
}
