//! The answer of `/infer`: JSON, and behind it the elements of the outputs that are asked for as binary data.

use bytes::Bytes;
use serde::Serialize;

use super::binary;
use super::inference::{VERSION, Wanted};
use super::json_data::Flat;
use super::tensor::Output;
use crate::dialect::json;

/// Which outputs go out as binary data.
#[derive(Clone, Debug, Default)]
pub(crate) struct Encoding {
    /// All of them, unless they say otherwise.
    pub(crate) binary: bool,
    /// What single outputs say.
    pub(crate) outputs: Vec<Wanted>,
}

impl Encoding {
    fn is_binary(&self, name: &str) -> bool {
        let own = self.outputs.iter().find(|wanted| wanted.name == name);
        own.and_then(|wanted| wanted.binary).unwrap_or(self.binary)
    }
}

/// A body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    /// How many of the bytes are JSON, where others follow.
    pub(crate) json_len: Option<usize>,
}

/// Field order is part of the format.
#[derive(Serialize)]
struct Response<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    model_name: &'a str,
    model_version: &'a str,
    outputs: Vec<TensorBody<'a>>,
}

#[derive(Serialize)]
struct TensorBody<'a> {
    name: &'a str,
    datatype: &'a str,
    shape: &'a [usize],
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<BinarySize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Flat<'a>>,
}

#[derive(Serialize)]
struct BinarySize {
    binary_data_size: usize,
}

/// Writes a body.
pub(crate) fn write(id: Option<&str>, model: &str, outputs: &[Output], encoding: &Encoding) -> Body {
    let raw: Vec<Option<Vec<u8>>> = outputs
        .iter()
        .map(|output| {
            encoding.is_binary(output.name).then(|| binary::encode(&output.elements, output.datatype))
        })
        .collect();
    let tensors = outputs.iter().zip(&raw).map(|(output, raw)| TensorBody {
        name: output.name,
        datatype: output.datatype.name(),
        shape: &output.shape,
        parameters: raw.as_ref().map(|raw| BinarySize { binary_data_size: raw.len() }),
        data: raw.is_none().then_some(Flat(&output.elements, output.datatype)),
    });
    let response = Response { id, model_name: model, model_version: VERSION, outputs: tensors.collect() };
    let mut bytes = json(&response).into_bytes();
    let json_len = raw.iter().any(Option::is_some).then_some(bytes.len());
    for raw in raw.iter().flatten() {
        bytes.extend_from_slice(raw);
    }
    Body { bytes: bytes.into(), json_len }
}

#[cfg(test)]
mod tests {
    use super::super::tensor::{Datatype, Elements};
    use super::*;

    fn outputs() -> Vec<Output> {
        vec![
            Output::texts("text_output", vec!["hé\u{2028}".into()]),
            Output {
                name: "output0",
                datatype: Datatype::Uint32,
                shape: vec![1, 2],
                elements: Elements::Unsigned(vec![7, 258]),
            },
            Output::list("cum_log_probs", Datatype::Fp32, Elements::Floats(vec![f64::from(-0.1_f32)])),
        ]
    }

    #[test]
    fn json_has_the_documented_form() {
        let body = write(Some("a"), "m", &outputs(), &Encoding::default());
        assert_eq!(body.json_len, None);
        assert_eq!(
            body.bytes,
            "{\"id\":\"a\",\"model_name\":\"m\",\"model_version\":\"1\",\"outputs\":[\
             {\"name\":\"text_output\",\"datatype\":\"BYTES\",\"shape\":[1],\"data\":[\"hé\\u2028\"]},\
             {\"name\":\"output0\",\"datatype\":\"UINT32\",\"shape\":[1,2],\"data\":[7,258]},\
             {\"name\":\"cum_log_probs\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[-0.1]}]}"
        );
        let body = write(None, "m", &[], &Encoding::default());
        assert_eq!(body.bytes, "{\"model_name\":\"m\",\"model_version\":\"1\",\"outputs\":[]}");
    }

    #[test]
    fn binary_data_follows_in_the_order_of_the_outputs() {
        let wanted = |name: &str, binary| Wanted { name: name.into(), binary };
        let encoding = Encoding { binary: true, outputs: vec![wanted("cum_log_probs", Some(false))] };
        let body = write(None, "m", &outputs(), &encoding);
        let json = "{\"model_name\":\"m\",\"model_version\":\"1\",\"outputs\":[\
             {\"name\":\"text_output\",\"datatype\":\"BYTES\",\"shape\":[1],\"parameters\":{\"binary_data_size\":10}},\
             {\"name\":\"output0\",\"datatype\":\"UINT32\",\"shape\":[1,2],\"parameters\":{\"binary_data_size\":8}},\
             {\"name\":\"cum_log_probs\",\"datatype\":\"FP32\",\"shape\":[1],\"data\":[-0.1]}]}";
        assert_eq!(body.json_len, Some(json.len()));
        let mut expected = json.as_bytes().to_vec();
        expected.extend_from_slice(b"\x06\0\0\0h\xc3\xa9\xe2\x80\xa8\x07\0\0\0\x02\x01\0\0");
        assert_eq!(body.bytes, expected);
        let encoding = Encoding { binary: false, outputs: vec![wanted("output0", Some(true))] };
        let body = write(None, "m", &outputs(), &encoding);
        assert!(body.bytes.ends_with(b"\x07\0\0\0\x02\x01\0\0"));
        assert_eq!(body.json_len, Some(body.bytes.len() - 8));
    }
}
