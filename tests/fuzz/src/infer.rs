//! Whatever tensors come, as JSON, as binary data or as a message, they are refused with a fault of the request or ask
//! for something that can be served, and the answer's tensors have as many elements as their shapes say.

use bytes::Bytes;
use gateway::fuzzing::{Inferred, Refused, Script, take_infer, take_infer_message};
use prost::Message;
use proto::wire::inference::{ModelInferRequest, ModelInferResponse};
use serde_json::{Value, json};

use crate::{front, json, model, pieces};

/// Longest refusal, bytes: it may show what came, and never all of it.
const REFUSAL_BYTES_MAX: usize = 2048;

/// Names of the fields, one a line; a name with dots is a field within objects.
const NAMES: &str = include_str!("../fields/infer.txt");

fn script() -> Script {
    Script { model: model::model().clone(), says: vec![pieces::short()], fails_at: None }
}

/// A body, and perhaps the header that says how much of it is JSON: what follows the last brace is not.
pub fn infer(data: &[u8]) {
    let required = json!({
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]
    });
    let body = Bytes::from(json::body(data, &required, NAMES));
    let json_len = body.iter().rposition(|byte| *byte == b'}').map_or(0, |last| last + 1);
    let header = (json_len < body.len()).then(|| json_len.to_string());
    check(take_infer(&body, header.as_deref().map(str::as_bytes), &script()));
}

/// A message.
pub fn infer_message(data: &[u8]) {
    let Ok(message) = ModelInferRequest::decode(data) else { return };
    check(take_infer_message(message, &script()));
}

fn check(outcome: Result<Inferred, Refused>) {
    match outcome {
        Ok(inferred) => served(&inferred),
        Err(refusal) => refused(&refusal),
    }
}

fn refused(refusal: &Refused) {
    front::refused_by_mindie(refusal);
    assert!(refusal.body.len() <= REFUSAL_BYTES_MAX, "a refusal of {} bytes", refusal.body.len());
}

fn served(inferred: &Inferred) {
    front::in_range(&inferred.request);
    match &inferred.admitted {
        Ok(generation) => front::fits(&inferred.request, generation),
        Err(refusal) => refused(refusal),
    }
    body_fits(inferred);
    inferred.parts.iter().for_each(response_fits);
    let last = inferred.parts.last().expect("a script has a piece");
    assert!(last.parameters.contains_key("triton_final_response"));
}

/// JSON to where the header says, then as many bytes as the outputs say.
fn body_fits(inferred: &Inferred) {
    let (json, binary) = inferred.whole.split_at(inferred.json_len.unwrap_or(inferred.whole.len()));
    let answer: Value = serde_json::from_slice(json).expect("an answer is JSON");
    let mut expected = 0;
    for output in answer["outputs"].as_array().expect("an answer has outputs") {
        let shape = output["shape"].as_array().expect("an output has a shape");
        let count: u64 = shape.iter().map(|size| size.as_u64().expect("a size")).product();
        match output["parameters"]["binary_data_size"].as_u64() {
            Some(size) => expected += size,
            None => assert_eq!(output["data"].as_array().expect("data").len() as u64, count),
        }
    }
    assert_eq!(binary.len() as u64, expected);
}

fn response_fits(response: &ModelInferResponse) {
    assert_eq!(response.outputs.len(), response.raw_output_contents.len());
    for (output, raw) in response.outputs.iter().zip(&response.raw_output_contents) {
        let count: i64 = output.shape.iter().product();
        let size = match output.datatype.as_str() {
            "BYTES" => continue,
            "UINT32" | "INT32" | "FP32" => 4,
            other => panic!("an output of {other}"),
        };
        assert_eq!(raw.len() as i64, count * size, "{}", output.name);
    }
}
