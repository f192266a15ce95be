//! The body of `/infer`: JSON, and behind it the elements of those tensors that say so, as binary data.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use super::inference::{Inference, Reserved, TENSORS_MAX, Wanted, check_names, check_not_shared};
use super::tensor::{Datatype, Elements, RANK_MAX, Tensor, element_count};
use super::{binary, json_data};
use crate::dialect::fields::unexpected;
use crate::fault::Fault;

/// Says how many bytes of the body are JSON; the others are binary data.
pub(crate) const HEADER_LENGTH: &str = "inference-header-content-length";

/// Says how many bytes of binary data a tensor has.
const BINARY_SIZE: &str = "binary_data_size";

/// What is expected of an object.
const EACH_ONCE: &str = "an object with each field once";

/// Reads a body, given the header [`HEADER_LENGTH`] if there is one.
pub(crate) fn parse(body: &Bytes, header: Option<&[u8]>) -> Result<Inference, Fault> {
    let json_len = match header {
        None => None,
        Some(value) => Some(json_length(value, body.len())?),
    };
    if json_len == Some(0) {
        return Ok(raw(body));
    }
    let (json, binary) = match json_len {
        Some(length) => (body.slice(..length), Some(body.slice(length..))),
        None => (body.clone(), None),
    };
    let read: Body<'_> =
        object(&json).map_err(|error| Fault::Body(format!("expected a JSON object: {error}")))?;
    let mut parameters = match read.parameters {
        Some(raw) => field::<Distinct>(raw, "parameters", EACH_ONCE)?.0,
        None => BTreeMap::new(),
    };
    let reserved = Reserved::take(&mut parameters)?;
    let id = read.id.map(|raw| field(raw, "id", "a string")).transpose()?.unwrap_or_default();
    let mut rest = Rest { bytes: binary, at: 0 };
    Ok(Inference {
        id,
        parameters,
        reserved,
        inputs: inputs(read.inputs, &mut rest)?,
        outputs: outputs(read.outputs)?,
    })
}

/// A body that is nothing but the one text to continue.
fn raw(body: &Bytes) -> Inference {
    let text = Tensor {
        name: "text_input".to_owned(),
        datatype: Datatype::Bytes,
        shape: vec![1],
        elements: Elements::Bytes(vec![body.clone()]),
    };
    Inference { inputs: vec![text], ..Inference::default() }
}

fn json_length(value: &[u8], body_len: usize) -> Result<usize, Fault> {
    let text = std::str::from_utf8(value).unwrap_or_default().trim();
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<usize>() {
        Ok(length) if digits && length <= body_len => Ok(length),
        _ => {
            let shown: String = String::from_utf8_lossy(value).chars().take(40).collect();
            let message = format!("expected at most the {body_len} bytes of the body, got {shown:?}");
            Err(Fault::field(HEADER_LENGTH, message))
        }
    }
}

/// The fields of a body, each to be read on its own so that a fault names it.
#[derive(serde::Deserialize)]
struct Body<'a> {
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    parameters: Option<&'a RawValue>,
    #[serde(borrow, default)]
    inputs: Option<&'a RawValue>,
    #[serde(borrow, default)]
    outputs: Option<&'a RawValue>,
}

/// The fields of a tensor.
#[derive(serde::Deserialize)]
struct TensorBody<'a> {
    #[serde(borrow, default)]
    name: Option<&'a RawValue>,
    #[serde(borrow, default)]
    datatype: Option<&'a RawValue>,
    #[serde(borrow, default)]
    shape: Option<&'a RawValue>,
    #[serde(borrow, default)]
    parameters: Option<&'a RawValue>,
    #[serde(borrow, default)]
    data: Option<&'a RawValue>,
}

/// Reads the fields of an object; a list is none, in whatever order its items stand.
fn object<'a, T: Deserialize<'a>>(json: &'a [u8]) -> serde_json::Result<T> {
    if json.trim_ascii_start().starts_with(b"[") {
        return Err(serde::de::Error::custom("got a list"));
    }
    serde_json::from_slice(json)
}

/// Reads a tensor's fields.
fn tensor<'a>(raw: &'a RawValue, path: &str) -> Result<TensorBody<'a>, Fault> {
    object(raw.get().as_bytes()).map_err(|error| {
        let text = error.to_string();
        let message = text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message);
        Fault::field(path, format!("expected {EACH_ONCE}: {message}"))
    })
}

/// Reads a field, or says what was expected of it.
fn field<'a, T: Deserialize<'a>>(raw: &'a RawValue, path: &str, expected: &str) -> Result<T, Fault> {
    serde_json::from_str(raw.get()).map_err(|_| {
        // Only what is short is read again to be shown.
        let value = if raw.get().len() <= 200 { serde_json::from_str(raw.get()).ok() } else { None };
        match value {
            Some(value) => unexpected(path, expected, &value),
            None => Fault::field(path, format!("expected {expected}")),
        }
    })
}

fn required<'a, T: Deserialize<'a>>(
    raw: Option<&'a RawValue>,
    path: &str,
    expected: &str,
) -> Result<T, Fault> {
    field(raw.ok_or_else(|| Fault::field(path, "is required"))?, path, expected)
}

fn inputs(raw: Option<&RawValue>, rest: &mut Rest) -> Result<Vec<Tensor>, Fault> {
    let Some(raw) = raw else { return Err(Fault::field("inputs", "is required")) };
    let list = field::<Bounded<&RawValue, TENSORS_MAX>>(raw, "inputs", "a list of at most 64 tensors")?.0;
    let mut tensors = Vec::with_capacity(list.len());
    for (index, raw) in list.into_iter().enumerate() {
        let path = format!("inputs[{index}]");
        tensors.push(input(tensor(raw, &path)?, &path, rest)?);
    }
    rest.finish()?;
    check_names(tensors.iter().map(|tensor| tensor.name.as_str()), "inputs")?;
    Ok(tensors)
}

fn input(body: TensorBody<'_>, path: &str, rest: &mut Rest) -> Result<Tensor, Fault> {
    let name = required::<String>(body.name, &format!("{path}.name"), "a string")?;
    let datatype = required::<String>(body.datatype, &format!("{path}.datatype"), "a string")?;
    let datatype = Datatype::from_name(&datatype, &format!("{path}.datatype"))?;
    let at = format!("{path}.shape");
    let dimensions = required::<Bounded<i64, RANK_MAX>>(body.shape, &at, "a list of at most 16 integers")?;
    let (shape, count) = element_count(&dimensions.0, &at)?;
    let parameters = tensor_parameters(body.parameters, path)?;
    let size = binary_size(&parameters, path)?;
    let data_path = format!("{path}.data");
    let elements = match (body.data, size) {
        (Some(data), None) => json_data::decode(data, datatype, &shape, count, &data_path)?,
        (None, Some(size)) => {
            let path = format!("{path}.parameters.{BINARY_SIZE}");
            binary::decode(&rest.take(size, &path)?, datatype, count, &path)?
        }
        (Some(_), Some(_)) => {
            return Err(Fault::field(data_path, format!("must not stand beside parameters.{BINARY_SIZE}")));
        }
        (None, None) => return Err(Fault::field(data_path, "is required")),
    };
    Ok(Tensor { name, datatype, shape, elements })
}

fn tensor_parameters(raw: Option<&RawValue>, path: &str) -> Result<BTreeMap<String, Value>, Fault> {
    let Some(raw) = raw else { return Ok(BTreeMap::new()) };
    let parameters = field::<Distinct>(raw, &format!("{path}.parameters"), EACH_ONCE)?.0;
    check_not_shared(parameters.keys(), path)?;
    Ok(parameters)
}

fn binary_size(parameters: &BTreeMap<String, Value>, path: &str) -> Result<Option<usize>, Fault> {
    match parameters.get(BINARY_SIZE) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
            let path = format!("{path}.parameters.{BINARY_SIZE}");
            size.map(Some).ok_or_else(|| unexpected(&path, "an integer of at least 0", value))
        }
    }
}

fn outputs(raw: Option<&RawValue>) -> Result<Vec<Wanted>, Fault> {
    let Some(raw) = raw else { return Ok(Vec::new()) };
    let list = field::<Bounded<&RawValue, TENSORS_MAX>>(raw, "outputs", "a list of at most 64 tensors")?.0;
    let mut outputs = Vec::with_capacity(list.len());
    for (index, raw) in list.into_iter().enumerate() {
        let path = format!("outputs[{index}]");
        let body = tensor(raw, &path)?;
        let name = required::<String>(body.name, &format!("{path}.name"), "a string")?;
        let parameters = tensor_parameters(body.parameters, &path)?;
        let classes = format!("{path}.parameters.classification");
        if parameters.get("classification").is_some_and(|classes| classes.as_u64() != Some(0)) {
            return Err(Fault::field(classes, "is not supported: the outputs are no classes"));
        }
        let binary = match parameters.get("binary_data") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(binary)) => Some(*binary),
            Some(other) => {
                let path = format!("{path}.parameters.binary_data");
                return Err(unexpected(&path, "true or false", other));
            }
        };
        outputs.push(Wanted { name, binary });
    }
    check_names(outputs.iter().map(|wanted| wanted.name.as_str()), "outputs")?;
    Ok(outputs)
}

/// Binary data that no tensor has taken yet; none where the whole body is JSON.
struct Rest {
    bytes: Option<Bytes>,
    at: usize,
}

impl Rest {
    fn take(&mut self, size: usize, path: &str) -> Result<Bytes, Fault> {
        let Some(bytes) = &self.bytes else {
            return Err(Fault::field(path, format!("needs the header {HEADER_LENGTH}")));
        };
        let left = bytes.len() - self.at;
        if size > left {
            return Err(Fault::field(path, format!("expected at most the {left} bytes left, got {size}")));
        }
        self.at += size;
        Ok(bytes.slice(self.at - size..self.at))
    }

    fn finish(&self) -> Result<(), Fault> {
        let left = self.bytes.as_ref().map_or(0, |bytes| bytes.len() - self.at);
        if left == 0 {
            return Ok(());
        }
        Err(Fault::Body(format!("expected nothing behind the tensors' binary data, got {left} bytes")))
    }
}

/// An object with no field twice.
struct Distinct(BTreeMap<String, Value>);

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Distinct;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EACH_ONCE)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Distinct, A::Error> {
                let mut distinct = BTreeMap::new();
                while let Some((name, value)) = fields.next_entry::<String, Value>()? {
                    if distinct.insert(name, value).is_some() {
                        return Err(serde::de::Error::custom("a field is given twice"));
                    }
                }
                Ok(Distinct(distinct))
            }
        }

        deserializer.deserialize_map(Fields)
    }
}

/// A list of at most so many items; reading stops at the next.
struct Bounded<T, const MAX: usize>(Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Bounded<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T, const MAX: usize>(std::marker::PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for List<T, MAX> {
            type Value = Bounded<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX}")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = items.next_element()? {
                    if list.len() == MAX {
                        return Err(serde::de::Error::invalid_length(MAX + 1, &self));
                    }
                    list.push(item);
                }
                Ok(Bounded(list))
            }
        }

        deserializer.deserialize_seq(List(std::marker::PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value) -> Result<Inference, String> {
        parse(&body.to_string().into(), None).map_err(|fault| fault.to_string())
    }

    fn text(data: &Value) -> Value {
        json!({"name": "text_input", "datatype": "BYTES", "shape": [1], "data": data})
    }

    fn with_binary(body: &Value, binary: &[u8]) -> (Bytes, Vec<u8>) {
        let mut bytes = body.to_string().into_bytes();
        let header = bytes.len().to_string().into_bytes();
        bytes.extend_from_slice(binary);
        (bytes.into(), header)
    }

    #[test]
    fn json_and_binary_data_give_the_same_tensors() {
        let body = json!({
            "id": "a", "parameters": {"temperature": 0.5, "timeout": 9},
            "inputs": [text(&json!(["hi"])), {"name": "n", "datatype": "UINT32", "shape": [2], "data": [1, 2]}],
            "outputs": [{"name": "text_output", "parameters": {"binary_data": false}}]
        });
        let expected = read(&body).unwrap();
        assert_eq!((expected.id.as_str(), expected.reserved.timeout_us), ("a", Some(9)));
        assert_eq!(expected.parameters["temperature"], 0.5);
        assert_eq!(expected.outputs, [Wanted { name: "text_output".into(), binary: Some(false) }]);
        let mut binary = body.clone();
        binary["inputs"] = json!([
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
            {"name": "n", "datatype": "UINT32", "shape": [2], "parameters": {"binary_data_size": 8}}
        ]);
        let (bytes, header) = with_binary(&binary, b"\x02\0\0\0hi\x01\0\0\0\x02\0\0\0");
        assert_eq!(parse(&bytes, Some(&header)), Ok(expected));
    }

    #[test]
    fn a_header_of_zero_makes_the_body_the_text() {
        let inference = parse(&Bytes::from_static(b"hello"), Some(b"0")).unwrap();
        assert_eq!(inference.inputs[0].name, "text_input");
        assert_eq!(inference.inputs[0].elements, Elements::Bytes(vec![Bytes::from_static(b"hello")]));
    }

    #[test]
    fn headers_are_held_against_the_body() {
        let body = Bytes::from_static(b"{}");
        for header in ["3", "-1", "x", "", "+2", "99999999999999999999999", "1 1"] {
            let fault = parse(&body, Some(header.as_bytes())).unwrap_err().to_string();
            assert!(
                fault.starts_with("inference-header-content-length: expected at most the 2 bytes"),
                "{header}: {fault}"
            );
        }
        assert!(
            parse(&body, Some(b"1")).unwrap_err().to_string().starts_with("body: expected a JSON object")
        );
    }

    #[test]
    fn a_fault_names_its_field() {
        let tensor = |change: Value| {
            let mut tensor = text(&json!(["x"]));
            for (key, value) in change.as_object().unwrap() {
                tensor[key] = value.clone();
            }
            json!({"inputs": [tensor]})
        };
        for (body, start) in [
            (json!([]), "body: expected a JSON object"),
            (json!({}), "inputs: is required"),
            (json!({"inputs": {}}), "inputs: expected a list of at most 64 tensors, got an object"),
            (json!({"inputs": vec![text(&json!(["x"])); 65]}), "inputs: expected a list of at most 64"),
            (json!({"inputs": [5]}), "inputs[0]: expected an object with each field once: invalid type"),
            (json!({"inputs": [[]]}), "inputs[0]: expected an object with each field once: got a list"),
            (json!({"id": 5, "inputs": [text(&json!(["x"]))]}), "id: expected a string, got 5"),
            (
                json!({"parameters": [], "inputs": []}),
                "parameters: expected an object with each field once, got a list of 0",
            ),
            (tensor(json!({"name": null})), "inputs[0].name: is required"),
            (tensor(json!({"name": 7})), "inputs[0].name: expected a string, got 7"),
            (tensor(json!({"datatype": "TEXT"})), "inputs[0].datatype: expected one of "),
            (tensor(json!({"shape": null})), "inputs[0].shape: is required"),
            (tensor(json!({"shape": [-1]})), "inputs[0].shape: expected dimensions of at least 0"),
            (tensor(json!({"shape": [1.5]})), "inputs[0].shape: expected a list of at most 16 integers"),
            (tensor(json!({"shape": vec![1; 17]})), "inputs[0].shape: expected a list of at most 16"),
            (tensor(json!({"shape": [1_u64 << 40, 1_u64 << 40]})), "inputs[0].shape: expected fewer"),
            (tensor(json!({"shape": [2]})), "inputs[0].data: expected 2 elements by the shape, got 1"),
            (tensor(json!({"data": null})), "inputs[0].data: is required"),
            (tensor(json!({"data": [5]})), "inputs[0].data: expected a string for BYTES, got 5"),
            (
                tensor(json!({"parameters": {"binary_data_size": 5}})),
                "inputs[0].data: must not stand beside parameters.binary_data_size",
            ),
            (
                tensor(json!({"data": null, "parameters": {"binary_data_size": 5}})),
                "inputs[0].parameters.binary_data_size: needs the header",
            ),
            (
                tensor(json!({"data": null, "parameters": {"binary_data_size": -5}})),
                "inputs[0].parameters.binary_data_size: expected an integer of at least 0, got -5",
            ),
            (
                tensor(json!({"data": null, "parameters": {"shared_memory_region": "r"}})),
                "inputs[0].parameters.shared_memory_region: shared memory is not supported",
            ),
            (
                json!({"inputs": [text(&json!(["x"])), text(&json!(["x"]))]}),
                "inputs[1].name: \"text_input\" is given twice",
            ),
            (
                json!({"inputs": [], "outputs": [{"name": "a"}, {"name": "a"}]}),
                "outputs[1].name: \"a\" is given twice",
            ),
            (
                json!({"inputs": [], "outputs": [{"name": "a", "parameters": {"classification": 3}}]}),
                "outputs[0].parameters.classification: is not supported",
            ),
        ] {
            let fault = read(&body).expect_err(&body.to_string());
            assert!(fault.starts_with(start), "{body}: {fault}");
        }
        let twice = Bytes::from_static(b"{\"inputs\":[],\"inputs\":[]}");
        assert!(parse(&twice, None).unwrap_err().to_string().contains("duplicate field"));
        let twice = Bytes::from_static(b"{\"inputs\":[],\"parameters\":{\"a\":1,\"a\":1}}");
        let fault = parse(&twice, None).unwrap_err().to_string();
        assert!(fault.starts_with("parameters: expected an object with each field once"), "{fault}");
        let deep = Bytes::from(format!("{{\"inputs\":{}", "[".repeat(10_000)));
        assert!(parse(&deep, None).is_err());
        let deep = Bytes::from(format!("{{\"inputs\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000)));
        assert!(parse(&deep, None).is_err());
    }

    #[test]
    fn binary_data_is_taken_to_its_end_and_no_further() {
        let body = json!({"inputs": [
            {"name": "n", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}}
        ]});
        let (bytes, header) = with_binary(&body, &[1, 2]);
        assert!(parse(&bytes, Some(&header)).is_ok());
        let (bytes, header) = with_binary(&body, &[1]);
        let fault = parse(&bytes, Some(&header)).unwrap_err().to_string();
        assert_eq!(fault, "inputs[0].parameters.binary_data_size: expected at most the 1 bytes left, got 2");
        let (bytes, header) = with_binary(&body, &[1, 2, 3]);
        let fault = parse(&bytes, Some(&header)).unwrap_err().to_string();
        assert_eq!(fault, "body: expected nothing behind the tensors' binary data, got 1 bytes");
    }
}
