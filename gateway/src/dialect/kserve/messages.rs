//! Requests and responses as protobuf messages.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use proto::wire::inference::infer_parameter::ParameterChoice;
use proto::wire::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use proto::wire::inference::model_infer_response::InferOutputTensor;
use proto::wire::inference::{InferParameter, ModelInferRequest, ModelInferResponse};
use serde_json::{Number, Value};

use super::inference::{Inference, Reserved, VERSION, Wanted, check_names, check_not_shared};
use super::tensor::{Datatype, Output, Tensor, element_count};
use super::{binary, contents};
use crate::fault::Fault;

/// Says of a response whether it is the last of its request.
const FINAL: &str = "triton_final_response";

/// Reads a message. Model and version are the caller's to look at.
pub(crate) fn read(message: ModelInferRequest) -> Result<Inference, Fault> {
    let mut parameters = parameters(message.parameters, "parameters")?;
    let reserved = Reserved::take(&mut parameters)?;
    check_names(message.inputs.iter().map(|input| input.name.as_str()), "inputs")?;
    check_names(message.outputs.iter().map(|output| output.name.as_str()), "outputs")?;
    let raw = raw_contents(message.raw_input_contents, message.inputs.len())?;
    let inputs = message.inputs.into_iter().zip(raw).enumerate();
    let inputs = inputs.map(|(index, (input, raw))| tensor(input, raw, &format!("inputs[{index}]")));
    let outputs = message.outputs.into_iter().enumerate();
    Ok(Inference {
        id: message.id,
        parameters,
        reserved,
        inputs: inputs.collect::<Result<_, _>>()?,
        outputs: outputs.map(|(index, output)| wanted(output, index)).collect::<Result<_, _>>()?,
    })
}

/// For each input its raw elements, or for none of them.
fn raw_contents(raw: Vec<Bytes>, inputs: usize) -> Result<Vec<Option<Bytes>>, Fault> {
    if raw.is_empty() {
        return Ok(vec![None; inputs]);
    }
    if raw.len() != inputs {
        let message = format!("expected one for each of {inputs} inputs, got {}", raw.len());
        return Err(Fault::field("raw_input_contents", message));
    }
    Ok(raw.into_iter().map(Some).collect())
}

fn tensor(input: InferInputTensor, raw: Option<Bytes>, path: &str) -> Result<Tensor, Fault> {
    check_not_shared(input.parameters.keys(), path)?;
    let datatype = Datatype::from_name(&input.datatype, &format!("{path}.datatype"))?;
    let (shape, count) = element_count(&input.shape, &format!("{path}.shape"))?;
    let at = format!("{path}.contents");
    let elements = match (raw, input.contents) {
        (Some(raw), None) => binary::decode(&raw, datatype, count, &format!("{path}.raw_input_contents"))?,
        (None, Some(contents)) => contents::decode(contents, datatype, count, &at)?,
        (None, None) => {
            let message = "is required, or raw_input_contents for every input";
            return Err(Fault::field(at, message));
        }
        (Some(_), Some(_)) => {
            return Err(Fault::field(at, "must not stand beside raw_input_contents"));
        }
    };
    Ok(Tensor { name: input.name, datatype, shape, elements })
}

fn wanted(output: InferRequestedOutputTensor, index: usize) -> Result<Wanted, Fault> {
    let path = format!("outputs[{index}]");
    check_not_shared(output.parameters.keys(), &path)?;
    let classes = format!("{path}.parameters.classification");
    let classification =
        parameters(output.parameters, &format!("{path}.parameters"))?.remove("classification");
    if classification.is_some_and(|classes| classes != 0) {
        return Err(Fault::field(classes, "is not supported: the outputs are no classes"));
    }
    Ok(Wanted { name: output.name, binary: None })
}

/// Parameters as the values that they are.
fn parameters(
    parameters: HashMap<String, InferParameter>,
    path: &str,
) -> Result<BTreeMap<String, Value>, Fault> {
    let read = parameters.into_iter().map(|(name, parameter)| {
        let fault = |message: &str| {
            let shown: String = name.chars().take(40).collect();
            Fault::field(format!("{path}.{shown}"), message)
        };
        let value = match parameter.parameter_choice {
            Some(ParameterChoice::BoolParam(flag)) => Value::Bool(flag),
            Some(ParameterChoice::Int64Param(number)) => Value::from(number),
            Some(ParameterChoice::Uint64Param(number)) => Value::from(number),
            Some(ParameterChoice::StringParam(text)) => Value::from(text),
            Some(ParameterChoice::DoubleParam(number)) => Number::from_f64(number)
                .map(Value::Number)
                .ok_or_else(|| fault("expected a finite number"))?,
            None => return Err(fault("expected a value")),
        };
        Ok((name, value))
    });
    read.collect()
}

/// What is the same in every response to a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Head {
    /// The request's name, as the client gave it.
    pub(crate) id: String,
    /// The model that answers.
    pub(crate) model: String,
}

impl Head {
    /// The only response of a request.
    pub(crate) fn whole(&self, outputs: &[Output]) -> ModelInferResponse {
        self.response(outputs, HashMap::new())
    }

    /// One of several responses.
    pub(crate) fn part(&self, outputs: &[Output], last: bool) -> ModelInferResponse {
        let last = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(last)) };
        self.response(outputs, HashMap::from([(FINAL.to_owned(), last)]))
    }

    fn response(
        &self,
        outputs: &[Output],
        parameters: HashMap<String, InferParameter>,
    ) -> ModelInferResponse {
        let tensors = outputs.iter().map(|output| InferOutputTensor {
            name: output.name.to_owned(),
            datatype: output.datatype.name().to_owned(),
            shape: output.shape.iter().map(|size| *size as i64).collect(),
            parameters: HashMap::new(),
            contents: None,
        });
        let raw = outputs.iter().map(|output| binary::encode(&output.elements, output.datatype).into());
        ModelInferResponse {
            model_name: self.model.clone(),
            model_version: VERSION.to_owned(),
            id: self.id.clone(),
            parameters,
            outputs: tensors.collect(),
            raw_output_contents: raw.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::wire::inference::InferTensorContents;

    use super::super::tensor::Elements;
    use super::*;

    fn input(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
        InferInputTensor {
            name: name.into(),
            datatype: datatype.into(),
            shape: shape.to_vec(),
            ..InferInputTensor::default()
        }
    }

    fn with_contents(contents: Option<InferTensorContents>) -> ModelInferRequest {
        let input = InferInputTensor { contents, ..input("input0", "UINT32", &[2]) };
        ModelInferRequest { inputs: vec![input], ..ModelInferRequest::default() }
    }

    fn ids() -> Option<InferTensorContents> {
        Some(InferTensorContents { uint_contents: vec![1, 2], ..InferTensorContents::default() })
    }

    fn parameter(choice: ParameterChoice) -> InferParameter {
        InferParameter { parameter_choice: Some(choice) }
    }

    #[test]
    fn raw_and_typed_contents_give_the_same_tensors() {
        let typed = read(with_contents(ids())).unwrap();
        let raw = ModelInferRequest {
            raw_input_contents: vec![Bytes::from_static(b"\x01\0\0\0\x02\0\0\0")],
            ..with_contents(None)
        };
        assert_eq!(read(raw).unwrap(), typed);
        assert_eq!(typed.inputs[0].elements, Elements::Unsigned(vec![1, 2]));
    }

    #[test]
    fn parameters_keep_their_types() {
        let mut message = with_contents(ids());
        message.parameters = HashMap::from([
            ("a".into(), parameter(ParameterChoice::BoolParam(true))),
            ("b".into(), parameter(ParameterChoice::Int64Param(-5))),
            ("c".into(), parameter(ParameterChoice::Uint64Param(u64::MAX))),
            ("d".into(), parameter(ParameterChoice::StringParam("x".into()))),
            ("e".into(), parameter(ParameterChoice::DoubleParam(0.5))),
            ("timeout".into(), parameter(ParameterChoice::Int64Param(7))),
            ("priority".into(), parameter(ParameterChoice::Uint64Param(2))),
        ]);
        let inference = read(message).unwrap();
        let expected = serde_json::json!({"a": true, "b": -5, "c": u64::MAX, "d": "x", "e": 0.5});
        assert_eq!(serde_json::to_value(&inference.parameters).unwrap(), expected);
        assert_eq!((inference.reserved.timeout_us, inference.reserved.priority), (Some(7), 2));
    }

    #[test]
    fn a_fault_names_its_field() {
        let changed = |change: fn(&mut ModelInferRequest)| {
            let mut message = with_contents(ids());
            change(&mut message);
            read(message).unwrap_err().to_string()
        };
        for (fault, start) in [
            (
                changed(|m| m.raw_input_contents = vec![Bytes::new()]),
                "inputs[0].contents: must not stand beside raw_input_contents",
            ),
            (
                changed(|m| m.raw_input_contents = vec![Bytes::new(), Bytes::new()]),
                "raw_input_contents: expected one for each of 1 inputs, got 2",
            ),
            (changed(|m| m.inputs[0].contents = None), "inputs[0].contents: is required"),
            (changed(|m| m.inputs[0].datatype = "X".into()), "inputs[0].datatype: expected one of BOOL"),
            (changed(|m| m.inputs[0].shape = vec![-1]), "inputs[0].shape: expected dimensions of at least 0"),
            (
                changed(|m| m.inputs[0].shape = vec![3]),
                "inputs[0].contents: expected 3 elements by the shape",
            ),
            (changed(|m| m.inputs.push(m.inputs[0].clone())), "inputs[1].name: \"input0\" is given twice"),
            (
                changed(|m| m.outputs = vec![InferRequestedOutputTensor::default()]),
                "outputs[0].name: must not be empty",
            ),
            (
                changed(|m| drop(m.parameters.insert("x".into(), InferParameter::default()))),
                "parameters.x: expected a value",
            ),
            (
                changed(|m| {
                    let nan = parameter(ParameterChoice::DoubleParam(f64::NAN));
                    m.parameters.insert("x".into(), nan);
                }),
                "parameters.x: expected a finite number",
            ),
            (
                changed(|m| {
                    let region = parameter(ParameterChoice::StringParam("r".into()));
                    m.inputs[0].parameters.insert("shared_memory_region".into(), region);
                }),
                "inputs[0].parameters.shared_memory_region: shared memory is not supported",
            ),
        ] {
            assert!(fault.starts_with(start), "{start}: {fault}");
        }
    }

    #[test]
    fn responses_have_raw_contents_for_every_output() {
        let head = Head { id: "a".into(), model: "m".into() };
        let outputs = [
            Output::texts("text_output", vec!["hi".into()]),
            Output::list("num_input_tokens", Datatype::Uint32, Elements::Unsigned(vec![3])),
        ];
        let response = head.part(&outputs, true);
        assert_eq!((response.id.as_str(), response.model_version.as_str()), ("a", "1"));
        assert_eq!(response.raw_output_contents, [&b"\x02\0\0\0hi"[..], &b"\x03\0\0\0"[..]]);
        assert_eq!(response.outputs[1].shape, [1]);
        assert_eq!(response.parameters[FINAL], parameter(ParameterChoice::BoolParam(true)));
        assert!(head.whole(&outputs).parameters.is_empty());
    }
}
