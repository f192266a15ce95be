//! Inference by tensors, over HTTP and over gRPC.

use std::collections::HashMap;

use baton_tests::cluster::MODEL;
use proto::wire::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use proto::wire::inference::infer_parameter::ParameterChoice;
use proto::wire::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use proto::wire::inference::{InferParameter, ModelInferRequest, ModelInferResponse};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Finish};
use crate::case::{Case, LOGPROBS};
use crate::dialect::Mode;
use crate::server::{Server, read};

/// What is asked for.
const OUTPUTS: [&str; 8] = [
    "text_output",
    "output_ids",
    "sequence_length",
    "finish_reason",
    "output_log_probs",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
];

/// A tensor's elements, as JSON has them.
type Tensors = HashMap<String, Vec<Value>>;

fn parameters(case: &Case) -> Map<String, Value> {
    let mut parameters = case.options();
    parameters.insert("max_tokens".into(), json!(case.max_tokens));
    parameters.insert("n".into(), json!(case.n));
    parameters.insert("logprobs".into(), json!(LOGPROBS));
    parameters.insert("exclude_input_in_output".into(), json!(true));
    parameters
}

/// The tensors that go in: name, type and elements.
fn inputs(case: &Case) -> Vec<(String, &'static str, Vec<Value>)> {
    let mut inputs = vec![("text_input".to_owned(), "BYTES", vec![json!(case.prompt)])];
    for (name, list) in case.lists() {
        let datatype = if name == "stop" { "BYTES" } else { "INT32" };
        inputs.push((name, datatype, list.as_array().expect("a list").clone()));
    }
    inputs
}

pub(crate) async fn http(server: &Server, case: &Case) -> Answer {
    let inputs: Vec<Value> = inputs(case)
        .into_iter()
        .map(|(name, datatype, data)| json!({ "name": name, "datatype": datatype, "shape": [data.len()], "data": data }))
        .collect();
    let outputs = OUTPUTS.map(|name| json!({ "name": name }));
    let body = json!({ "parameters": parameters(case), "inputs": inputs, "outputs": outputs });
    let answer = server.whole(&Server::model_path("infer"), &body).await;
    let tensors = answer["outputs"].as_array().expect("outputs").iter().map(|output| {
        (
            output["name"].as_str().expect("a name").to_owned(),
            output["data"].as_array().expect("data").clone(),
        )
    });
    gathered(case, vec![tensors.collect()])
}

pub(crate) async fn grpc(server: &Server, case: &Case, mode: Mode) -> Answer {
    let mut client = GrpcInferenceServiceClient::new(server.channel.clone());
    let request = request(case, mode);
    let responses = match mode {
        Mode::Whole => vec![client.model_infer(request).await.expect("a good request").into_inner()],
        Mode::Streamed => {
            let stream = client.model_stream_infer(futures::stream::iter([request])).await;
            let mut stream = stream.expect("a stream").into_inner();
            let mut responses = Vec::new();
            while let Some(response) = stream.message().await.expect("a whole stream") {
                assert_eq!(response.error_message, "");
                responses.push(response.infer_response.expect("a response"));
            }
            responses
        }
    };
    gathered(case, responses.iter().map(tensors).collect())
}

fn request(case: &Case, mode: Mode) -> ModelInferRequest {
    let mut parameters: HashMap<String, InferParameter> =
        parameters(case).iter().map(|(name, value)| (name.clone(), parameter(value))).collect();
    parameters.insert("stream".into(), parameter(&json!(mode == Mode::Streamed)));
    let inputs = inputs(case);
    let raw = |(_, datatype, elements): &(String, &str, Vec<Value>)| {
        let mut bytes = Vec::new();
        for element in elements {
            if *datatype == "BYTES" {
                let text = element.as_str().expect("a text");
                bytes.extend((text.len() as u32).to_le_bytes());
                bytes.extend(text.bytes());
            } else {
                bytes.extend((element.as_i64().expect("an integer") as i32).to_le_bytes());
            }
        }
        bytes.into()
    };
    ModelInferRequest {
        model_name: MODEL.into(),
        parameters,
        raw_input_contents: inputs.iter().map(raw).collect(),
        inputs: inputs
            .into_iter()
            .map(|(name, datatype, elements)| InferInputTensor {
                name,
                datatype: datatype.into(),
                shape: vec![elements.len() as i64],
                ..InferInputTensor::default()
            })
            .collect(),
        outputs: OUTPUTS
            .map(|name| InferRequestedOutputTensor { name: name.into(), parameters: HashMap::new() })
            .to_vec(),
        ..ModelInferRequest::default()
    }
}

fn parameter(value: &Value) -> InferParameter {
    let choice = match value {
        Value::Bool(flag) => ParameterChoice::BoolParam(*flag),
        Value::Number(number) => match number.as_i64() {
            Some(number) => ParameterChoice::Int64Param(number),
            None => ParameterChoice::DoubleParam(number.as_f64().expect("a number")),
        },
        other => panic!("no parameter of a case: {other}"),
    };
    InferParameter { parameter_choice: Some(choice) }
}

/// The tensors of a response, read out of their bytes.
fn tensors(response: &ModelInferResponse) -> Tensors {
    let outputs = response.outputs.iter().zip(&response.raw_output_contents);
    let tensors = outputs.map(|(output, raw)| {
        let words = raw.as_chunks::<4>().0.iter();
        let elements = match output.datatype.as_str() {
            "BYTES" => texts(raw),
            "FP32" => words.map(|word| json!(f32::from_le_bytes(*word))).collect(),
            "INT32" => words.map(|word| json!(i32::from_le_bytes(*word))).collect(),
            "UINT32" => words.map(|word| json!(u32::from_le_bytes(*word))).collect(),
            other => panic!("{}: {other}", output.name),
        };
        (output.name.clone(), elements)
    });
    tensors.collect()
}

fn texts(mut raw: &[u8]) -> Vec<Value> {
    let mut texts = Vec::new();
    while let Some((length, rest)) = raw.split_first_chunk::<4>() {
        let (text, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
        texts.push(json!(std::str::from_utf8(text).expect("whole characters")));
        raw = rest;
    }
    texts
}

/// The answer that all responses together give.
fn gathered(case: &Case, responses: Vec<Tensors>) -> Answer {
    let mut answer = Answer::of(case.n);
    let mut completion_tokens = 0;
    for mut tensors in responses {
        let mut take = |name: &str| tensors.remove(name).expect(name);
        let [texts, ids, lengths, reasons, logprobs, alternatives, prompt, counts] = OUTPUTS.map(&mut take);
        let row = ids.len() / case.n;
        for (index, output) in answer.outputs.iter_mut().enumerate() {
            let length = lengths[index].as_u64().expect("a length") as usize;
            let own = index * row..index * row + length;
            output.text.push_str(texts[index].as_str().expect("a text"));
            output.ids_mut().extend(ids[own.clone()].iter().map(|id| id.as_u64().expect("an id") as u32));
            output
                .logprobs_mut()
                .extend(logprobs[own].iter().map(|one| one.as_f64().expect("a number") as f32));
            let Value::Array(told) = read(alternatives[index].as_str().expect("JSON")) else {
                panic!("a list of alternatives")
            };
            output.alternatives.extend(told);
            // Told again in every response of the others.
            let reason = reasons[index].as_str().expect("a word");
            if reason != "None" && output.finish == Finish::Untold {
                output.finished(Finish::named(reason));
            }
            completion_tokens += counts[index].as_u64().expect("a count");
        }
        answer.prompt_tokens = prompt[0].as_u64();
    }
    answer.completion_tokens = Some(completion_tokens);
    answer
}
