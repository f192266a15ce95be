//! The options of a request, from wherever they may come: its parameters, tensors of one element by their names, and
//! one JSON object as text.

use serde_json::{Map, Value};

use super::catalogue::{INPUTS, Meaning, find_input};
use super::compose::only_text;
use super::inference::Inference;
use super::tensor::{Elements, Tensor};
use crate::dialect::fields::{Fields, Integers};
use crate::fault::Fault;

/// Has options as a JSON object.
const SAMPLING_PARAMETERS: &str = "sampling_parameters";

/// Options that are texts, whatever the text looks like. All others may be numbers within quotes where they come in
/// the object of [`SAMPLING_PARAMETERS`].
const TEXTS: [&str; 7] = [
    "stop",
    "stop_words",
    "bad_words",
    "guided_decoding_guide",
    "guided_json",
    "guided_regex",
    "guided_grammar",
];

/// Inputs that ask for what a model of text does not do, each with the reason.
const REFUSED: [(&str, &str); 12] = [
    ("image", ONLY_TEXT),
    ("audio", ONLY_TEXT),
    ("video", ONLY_TEXT),
    ("decoder_text_input", "this model has no encoder"),
    ("embedding_request", "this model does not embed"),
    ("prompt_embedding_table", "prompts are text or token ids"),
    ("prompt_vocab_size", "prompts are text or token ids"),
    ("embedding_bias_words", "biases are given by token id, as logit_bias"),
    ("embedding_bias_weights", "biases are given by token id, as logit_bias"),
    ("lora_task_id", NO_ADAPTER),
    ("lora_weights", NO_ADAPTER),
    ("lora_config", NO_ADAPTER),
];
const ONLY_TEXT: &str = "this model takes text only";
const NO_ADAPTER: &str = "no adapter is loaded";

/// Takes the options out of a request. What is left of its inputs is the prompt.
pub(crate) fn take(inference: &mut Inference) -> Result<Fields, Fault> {
    let mut options = Options::default();
    for (name, value) in std::mem::take(&mut inference.parameters) {
        if name == SAMPLING_PARAMETERS {
            let text = value.as_str().ok_or_else(|| {
                crate::dialect::fields::unexpected(SAMPLING_PARAMETERS, "JSON as a string", &value)
            })?;
            options.add_object(text)?;
        } else {
            options.add(name, value)?;
        }
    }
    let mut prompts = Vec::new();
    for tensor in std::mem::take(&mut inference.inputs) {
        match find_input(&tensor.name).map(|input| input.meaning) {
            Some(Meaning::Text | Meaning::Tokens) => prompts.push(tensor),
            Some(Meaning::List) => {
                let value = list(&tensor)?;
                options.add(tensor.name, value)?;
            }
            Some(Meaning::Option) if tensor.name == SAMPLING_PARAMETERS => {
                let value = scalar(&tensor)?;
                let text = value.as_str().ok_or_else(|| {
                    Fault::field(SAMPLING_PARAMETERS, "expected a tensor of BYTES with JSON in it")
                })?;
                options.add_object(text)?;
            }
            // Any option may be sent as a tensor, also one that the catalogue has not.
            Some(Meaning::Option) | None => {
                check_known(&tensor)?;
                let value = scalar(&tensor)?;
                options.add(tensor.name, value)?;
            }
        }
    }
    inference.inputs = prompts;
    Ok(Fields::new(options.values, Integers::Strict))
}

#[derive(Default)]
struct Options {
    values: Map<String, Value>,
}

impl Options {
    fn add(&mut self, name: String, value: Value) -> Result<(), Fault> {
        check_supported(&name)?;
        if value.is_null() {
            return Ok(());
        }
        if self.values.contains_key(&name) {
            let message = "is given twice; expected it as a parameter, as a tensor or in sampling_parameters";
            return Err(Fault::field(shown_name(&name), message));
        }
        self.values.insert(name, value);
        Ok(())
    }

    fn add_object(&mut self, text: &str) -> Result<(), Fault> {
        let object = match serde_json::from_str(text) {
            Ok(Value::Object(object)) => object,
            Ok(_) => return Err(Fault::field(SAMPLING_PARAMETERS, "expected a JSON object as text")),
            Err(error) => {
                let message = format!("expected a JSON object as text: {error}");
                return Err(Fault::field(SAMPLING_PARAMETERS, message));
            }
        };
        for (name, value) in object {
            let value = if TEXTS.contains(&name.as_str()) { value } else { unquoted(value) };
            self.add(name, value)?;
        }
        Ok(())
    }
}

/// A number, true, false or null within quotes as what it is; anything else as it was.
fn unquoted(value: Value) -> Value {
    let Value::String(text) = &value else { return value };
    // Some clients write it with a capital.
    let read = match text.as_str() {
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        text => serde_json::from_str::<Value>(text)
            .ok()
            .filter(|read| read.is_number() || read.is_boolean() || read.is_null()),
    };
    read.unwrap_or(value)
}

/// Refuses what a model of text does not do.
fn check_supported(name: &str) -> Result<(), Fault> {
    match REFUSED.iter().find(|(refused, _)| *refused == name) {
        Some((_, why)) => Err(Fault::field(name, format!("is not supported: {why}"))),
        None => Ok(()),
    }
}

fn shown_name(name: &str) -> String {
    name.chars().take(40).collect()
}

/// An unknown tensor of several elements is no option, and not left out without a word.
fn check_known(tensor: &Tensor) -> Result<(), Fault> {
    check_supported(&tensor.name)?;
    if tensor.elements.len() == 1 {
        return Ok(());
    }
    if find_input(&tensor.name).is_some() {
        return Err(not_one(tensor));
    }
    let names: Vec<&str> = INPUTS.iter().map(|input| input.name).collect();
    let shown = shown_name(&tensor.name);
    Err(Fault::field("inputs", format!("expected tensors of {}, got {shown:?}", names.join(", "))))
}

fn not_one(tensor: &Tensor) -> Fault {
    Fault::field(shown_name(&tensor.name), format!("expected 1 element, got {}", tensor.elements.len()))
}

/// The value of a tensor of one element.
fn scalar(tensor: &Tensor) -> Result<Value, Fault> {
    if tensor.elements.len() != 1 {
        return Err(not_one(tensor));
    }
    match list(tensor)? {
        Value::Array(mut list) => Ok(list.pop().unwrap_or(Value::Null)),
        other => Ok(other),
    }
}

/// The values of a tensor's elements.
fn list(tensor: &Tensor) -> Result<Value, Fault> {
    let field = || shown_name(&tensor.name);
    let values = match &tensor.elements {
        Elements::Bools(list) => list.iter().map(|flag| Value::Bool(*flag)).collect(),
        Elements::Unsigned(list) => list.iter().map(|number| Value::from(*number)).collect(),
        Elements::Signed(list) => list.iter().map(|number| Value::from(*number)).collect(),
        Elements::Floats(list) => {
            let number = |number: &f64| {
                serde_json::Number::from_f64(*number)
                    .map(Value::Number)
                    .ok_or_else(|| Fault::field(field(), format!("expected finite numbers, got {number}")))
            };
            list.iter().map(number).collect::<Result<_, _>>()?
        }
        Elements::Bytes(list) => {
            let text = |bytes: &bytes::Bytes| {
                std::str::from_utf8(bytes)
                    .map(Value::from)
                    .map_err(|_| Fault::field(field(), "expected text in UTF-8"))
            };
            list.iter().map(text).collect::<Result<_, _>>()?
        }
    };
    Ok(Value::Array(values))
}

/// The text of a tensor of one.
pub(crate) fn text_of(tensor: &Tensor) -> Result<String, Fault> {
    let bytes = only_text(&tensor.elements).ok_or_else(|| {
        let message = format!(
            "expected 1 element of BYTES, got {} of {}",
            tensor.elements.len(),
            tensor.datatype.name()
        );
        Fault::field(shown_name(&tensor.name), message)
    })?;
    let text = std::str::from_utf8(bytes);
    text.map(ToOwned::to_owned).map_err(|_| Fault::field(shown_name(&tensor.name), "expected text in UTF-8"))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::json;

    use super::super::tensor::Datatype;
    use super::*;

    fn tensor(name: &str, datatype: Datatype, elements: Elements) -> Tensor {
        Tensor { name: name.to_owned(), datatype, shape: vec![elements.len()], elements }
    }

    fn bytes(name: &str, texts: &[&'static str]) -> Tensor {
        let list = texts.iter().map(|text| Bytes::from_static(text.as_bytes())).collect();
        tensor(name, Datatype::Bytes, Elements::Bytes(list))
    }

    fn taken(parameters: Value, inputs: Vec<Tensor>) -> Result<Value, String> {
        let Value::Object(map) = parameters else { panic!("an object") };
        let mut inference =
            Inference { parameters: map.into_iter().collect(), inputs, ..Inference::default() };
        let mut fields = take(&mut inference).map_err(|fault| fault.to_string())?;
        let mut object = Map::new();
        for name in ["temperature", "top_k", "stream", "stop", "stop_words", "n", "seed", "other"] {
            if let Some(value) = fields.take(name) {
                object.insert(name.to_owned(), value);
            }
        }
        Ok(Value::Object(object))
    }

    #[test]
    fn options_come_by_three_ways() {
        let inputs = vec![
            bytes("text_input", &["x"]),
            tensor("top_k", Datatype::Int32, Elements::Signed(vec![5])),
            tensor("stream", Datatype::Bool, Elements::Bools(vec![true])),
            bytes("stop_words", &["a", "b"]),
            bytes(SAMPLING_PARAMETERS, &["{\"n\": \"2\", \"stop\": \"5\", \"seed\": \"None\"}"]),
            bytes("other", &["word"]),
        ];
        assert_eq!(
            taken(json!({"temperature": 0.5, "seed": null}), inputs),
            Ok(json!({
                "temperature": 0.5, "top_k": 5, "stream": true, "stop": "5", "stop_words": ["a", "b"], "n": 2,
                "seed": "None", "other": "word"
            }))
        );
        let as_parameter =
            json!({"sampling_parameters": "{\"temperature\": \"0.25\", \"stream\": \"True\"}"});
        assert_eq!(taken(as_parameter, vec![]), Ok(json!({"temperature": 0.25, "stream": true})));
    }

    #[test]
    fn what_is_no_option_is_a_fault() {
        let ids = |name: &str| tensor(name, Datatype::Int32, Elements::Signed(vec![1, 2]));
        for (parameters, inputs, start) in [
            (
                json!({"top_k": 1}),
                vec![tensor("top_k", Datatype::Int32, Elements::Signed(vec![1]))],
                "top_k: is given twice",
            ),
            (json!({}), vec![ids("top_k")], "top_k: expected 1 element, got 2"),
            (json!({}), vec![ids("what")], "inputs: expected tensors of text_input, input0, "),
            (json!({}), vec![bytes("image", &["a", "b"])], "image: is not supported"),
            (json!({}), vec![bytes("image", &["a"])], "image: is not supported: this model takes text only"),
            (json!({"lora_task_id": 1}), vec![], "lora_task_id: is not supported: no adapter"),
            (
                json!({}),
                vec![bytes(SAMPLING_PARAMETERS, &["[]"])],
                "sampling_parameters: expected a JSON object",
            ),
            (
                json!({}),
                vec![bytes(SAMPLING_PARAMETERS, &["{"])],
                "sampling_parameters: expected a JSON object",
            ),
            (json!({"sampling_parameters": 5}), vec![], "sampling_parameters: expected JSON as a string"),
            (
                json!({}),
                vec![tensor("temperature", Datatype::Fp32, Elements::Floats(vec![f64::NAN]))],
                "temperature: expected finite numbers, got NaN",
            ),
            (
                json!({}),
                vec![tensor("x", Datatype::Bytes, Elements::Bytes(vec![Bytes::from_static(b"\xff")]))],
                "x: expected text in UTF-8",
            ),
        ] {
            let fault = taken(parameters, inputs).unwrap_err();
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }
}
