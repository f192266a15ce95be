//! What the server and its models are, as messages and as JSON.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use proto::wire::inference as wire;
use proto::wire::inference::model_metadata_response::TensorMetadata;
use serde_json::{Value, json};

use super::catalogue::{INPUTS, Input, Meaning, OutputName};
use super::inference::VERSION;
use super::tensor::Datatype;
use crate::models::Model;
use crate::statistics::{Counted, ModelStatistics};

/// Name of the server, and of what runs its models.
const NAME: &str = "baton";

/// Extensions of the protocol that this server has.
const EXTENSIONS: [&str; 7] = [
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
];

/// A model in the list of all.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub(crate) name: String,
    /// It can be used.
    pub(crate) ready: bool,
}

/// What the server is.
pub(crate) fn server() -> wire::ServerMetadataResponse {
    wire::ServerMetadataResponse {
        name: NAME.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        extensions: EXTENSIONS.map(ToOwned::to_owned).to_vec(),
    }
}

/// The same as JSON.
pub(crate) fn server_json() -> Bytes {
    let wire::ServerMetadataResponse { name, version, extensions } = server();
    body(&json!({"name": name, "version": version, "extensions": extensions}))
}

/// What a model takes and gives.
pub(crate) fn metadata(model: &Model) -> wire::ModelMetadataResponse {
    let tensor = |name: &str, datatype: Datatype, dims: &[i64]| TensorMetadata {
        name: name.to_owned(),
        datatype: datatype.name().to_owned(),
        shape: dims.to_vec(),
    };
    wire::ModelMetadataResponse {
        name: model.description.name.clone(),
        versions: vec![VERSION.to_owned()],
        platform: NAME.to_owned(),
        inputs: INPUTS.iter().map(|input| tensor(input.name, input.datatype, input.dims)).collect(),
        outputs: OutputName::ALL
            .map(|output| tensor(output.name(), output.datatype(), output.dims()))
            .to_vec(),
    }
}

/// The same as JSON.
pub(crate) fn metadata_json(model: &Model) -> Bytes {
    let wire::ModelMetadataResponse { name, versions, platform, inputs, outputs } = metadata(model);
    let tensors = |list: Vec<TensorMetadata>| -> Vec<Value> {
        let tensor = |tensor: TensorMetadata| json!({"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape});
        list.into_iter().map(tensor).collect()
    };
    body(&json!({
        "name": name, "versions": versions, "platform": platform,
        "inputs": tensors(inputs), "outputs": tensors(outputs)
    }))
}

/// A model's configuration.
pub(crate) fn config(model: &Model) -> wire::ModelConfig {
    let input = |input: &Input| wire::ModelInput {
        name: input.name.to_owned(),
        data_type: data_type(input.datatype).into(),
        dims: input.dims.to_vec(),
        // Tokens can stand in its place, but what reads configurations looks for the input that there must be.
        optional: input.meaning != Meaning::Text,
    };
    let output = |output: OutputName| wire::ModelOutput {
        name: output.name().to_owned(),
        data_type: data_type(output.datatype()).into(),
        dims: output.dims().to_vec(),
    };
    let latest = wire::model_version_policy::Latest { num_versions: 1 };
    let policy = wire::model_version_policy::PolicyChoice::Latest(latest);
    let parameters = [
        ("context_len", model.description.context_len.to_string()),
        ("vocab_size", model.description.vocab_size.to_string()),
    ];
    let parameter =
        |(name, value): (&str, String)| (name.to_owned(), wire::ModelParameter { string_value: value });
    wire::ModelConfig {
        name: model.description.name.clone(),
        platform: NAME.to_owned(),
        version_policy: Some(wire::ModelVersionPolicy { policy_choice: Some(policy) }),
        max_batch_size: 0,
        input: INPUTS.iter().map(input).collect(),
        output: OutputName::ALL.map(output).to_vec(),
        parameters: HashMap::from(parameters.map(parameter)),
        backend: NAME.to_owned(),
        model_transaction_policy: Some(wire::ModelTransactionPolicy { decoupled: true }),
    }
}

/// The same as JSON.
pub(crate) fn config_json(model: &Model) -> Bytes {
    let config = config(model);
    let inputs: Vec<Value> = config
        .input
        .iter()
        .map(|input| {
            let (data_type, dims) = (input.data_type().as_str_name(), &input.dims);
            json!({"name": input.name, "data_type": data_type, "dims": dims, "optional": input.optional})
        })
        .collect();
    let outputs: Vec<Value> = config
        .output
        .iter()
        .map(|output| {
            json!({"name": output.name, "data_type": output.data_type().as_str_name(), "dims": output.dims})
        })
        .collect();
    let parameters: serde_json::Map<String, Value> = config
        .parameters
        .iter()
        .map(|(name, value)| (name.clone(), json!({"string_value": value.string_value})))
        .collect();
    body(&json!({
        "name": config.name, "platform": config.platform, "backend": config.backend,
        "version_policy": {"latest": {"num_versions": 1}}, "max_batch_size": config.max_batch_size,
        "input": inputs, "output": outputs, "parameters": parameters,
        "model_transaction_policy": {"decoupled": true}
    }))
}

fn data_type(datatype: Datatype) -> wire::DataType {
    match datatype {
        Datatype::Bool => wire::DataType::TypeBool,
        Datatype::Uint8 => wire::DataType::TypeUint8,
        Datatype::Uint16 => wire::DataType::TypeUint16,
        Datatype::Uint32 => wire::DataType::TypeUint32,
        Datatype::Uint64 => wire::DataType::TypeUint64,
        Datatype::Int8 => wire::DataType::TypeInt8,
        Datatype::Int16 => wire::DataType::TypeInt16,
        Datatype::Int32 => wire::DataType::TypeInt32,
        Datatype::Int64 => wire::DataType::TypeInt64,
        Datatype::Fp16 => wire::DataType::TypeFp16,
        Datatype::Fp32 => wire::DataType::TypeFp32,
        Datatype::Fp64 => wire::DataType::TypeFp64,
        Datatype::Bf16 => wire::DataType::TypeBf16,
        Datatype::Bytes => wire::DataType::TypeString,
    }
}

/// What models have served.
pub(crate) fn statistics(models: &[(String, ModelStatistics)]) -> wire::ModelStatisticsResponse {
    let model_stats = models.iter().map(|(name, model)| {
        let (input, infer) = (duration(model.input), duration(model.infer));
        // Turning tokens into text is done token by token while the model runs.
        let output = duration(Counted { count: model.success.count, time: Duration::ZERO });
        let batch = wire::InferBatchStatistics {
            batch_size: 1,
            compute_input: Some(input),
            compute_infer: Some(infer),
            compute_output: Some(output),
        };
        wire::ModelStatistics {
            name: name.clone(),
            version: VERSION.to_owned(),
            last_inference: model.last_arrival_ms,
            inference_count: model.success.count,
            execution_count: model.success.count,
            inference_stats: Some(wire::InferStatistics {
                success: Some(duration(model.success)),
                fail: Some(duration(model.fail)),
                queue: Some(duration(model.queue)),
                compute_input: Some(input),
                compute_infer: Some(infer),
                compute_output: Some(output),
                cache_hit: Some(wire::StatisticDuration::default()),
                cache_miss: Some(wire::StatisticDuration::default()),
            }),
            batch_stats: if model.success.count > 0 { vec![batch] } else { Vec::new() },
        }
    });
    wire::ModelStatisticsResponse { model_stats: model_stats.collect() }
}

fn duration(counted: Counted) -> wire::StatisticDuration {
    let ns = u64::try_from(counted.time.as_nanos()).unwrap_or(u64::MAX);
    wire::StatisticDuration { count: counted.count, ns }
}

/// The same as JSON.
pub(crate) fn statistics_json(models: &[(String, ModelStatistics)]) -> Bytes {
    let duration = |duration: Option<wire::StatisticDuration>| {
        let duration = duration.unwrap_or_default();
        json!({"count": duration.count, "ns": duration.ns})
    };
    let models: Vec<Value> = statistics(models)
        .model_stats
        .into_iter()
        .map(|model| {
            let stats = model.inference_stats.unwrap_or_default();
            let batches: Vec<Value> = model
                .batch_stats
                .into_iter()
                .map(|batch| {
                    json!({
                        "batch_size": batch.batch_size, "compute_input": duration(batch.compute_input),
                        "compute_infer": duration(batch.compute_infer),
                        "compute_output": duration(batch.compute_output)
                    })
                })
                .collect();
            json!({
                "name": model.name, "version": model.version, "last_inference": model.last_inference,
                "inference_count": model.inference_count, "execution_count": model.execution_count,
                "inference_stats": {
                    "success": duration(stats.success), "fail": duration(stats.fail),
                    "queue": duration(stats.queue), "compute_input": duration(stats.compute_input),
                    "compute_infer": duration(stats.compute_infer),
                    "compute_output": duration(stats.compute_output),
                    "cache_hit": duration(stats.cache_hit), "cache_miss": duration(stats.cache_miss)
                },
                "batch_stats": batches
            })
        })
        .collect();
    body(&json!({"model_stats": models}))
}

/// The models there are; those alone that can be used, if so asked.
pub(crate) fn index(models: &[Listed], ready_only: bool) -> wire::RepositoryIndexResponse {
    let shown = models.iter().filter(|model| model.ready || !ready_only);
    let models = shown.map(|model| wire::repository_index_response::ModelIndex {
        name: model.name.clone(),
        version: VERSION.to_owned(),
        state: if model.ready { "READY" } else { "UNAVAILABLE" }.to_owned(),
        reason: if model.ready { "" } else { "no worker can take a request now" }.to_owned(),
    });
    wire::RepositoryIndexResponse { models: models.collect() }
}

/// The same as JSON.
pub(crate) fn index_json(models: &[Listed], ready_only: bool) -> Bytes {
    let models: Vec<Value> = index(models, ready_only)
        .models
        .into_iter()
        .map(|model| {
            json!({
                "name": model.name, "version": model.version, "state": model.state, "reason": model.reason
            })
        })
        .collect();
    body(&Value::Array(models))
}

fn body(value: &Value) -> Bytes {
    crate::dialect::json(value).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::started;

    fn parsed(body: &Bytes) -> Value {
        serde_json::from_slice(body).unwrap()
    }

    #[test]
    fn metadata_and_configuration_name_the_same_tensors() {
        let model = started("m", 1, None).model;
        let (metadata, config) = (parsed(&metadata_json(&model)), parsed(&config_json(&model)));
        assert_eq!((&metadata["name"], &metadata["versions"]), (&json!("m"), &json!(["1"])));
        let text = json!({"name": "text_input", "datatype": "BYTES", "shape": [1]});
        assert_eq!(metadata["inputs"][0], text);
        assert_eq!(metadata["inputs"][1], json!({"name": "input0", "datatype": "UINT32", "shape": [-1]}));
        assert_eq!(
            config["input"][0],
            json!({"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": false})
        );
        for (key, other) in [("inputs", "input"), ("outputs", "output")] {
            let names = |list: &Value| -> Vec<Value> {
                list.as_array().unwrap().iter().map(|tensor| tensor["name"].clone()).collect()
            };
            assert_eq!(names(&metadata[key]), names(&config[other]));
        }
        assert_eq!(config["max_batch_size"], 0);
        assert_eq!(config["parameters"]["context_len"]["string_value"], "64");
    }

    #[test]
    fn statistics_are_told_as_they_are() {
        let second = |count| Counted { count, time: Duration::from_secs(1) };
        let model = ModelStatistics { success: second(3), fail: second(1), ..ModelStatistics::default() };
        let told = parsed(&statistics_json(&[("m".to_owned(), model)]));
        let told = &told["model_stats"][0];
        assert_eq!((&told["inference_count"], &told["execution_count"]), (&json!(3), &json!(3)));
        assert_eq!(told["inference_stats"]["success"], json!({"count": 3, "ns": 1_000_000_000}));
        assert_eq!(told["inference_stats"]["fail"]["count"], 1);
        assert_eq!(told["batch_stats"][0]["batch_size"], 1);
        let none = parsed(&statistics_json(&[("m".to_owned(), ModelStatistics::default())]));
        assert_eq!(none["model_stats"][0]["batch_stats"], json!([]));
    }

    #[test]
    fn the_index_may_leave_out_what_cannot_be_used() {
        let listed = |name: &str, ready| Listed { name: name.to_owned(), ready };
        let models = [listed("a", true), listed("b", false)];
        assert_eq!(
            parsed(&index_json(&models, false)),
            json!([
                {"name": "a", "version": "1", "state": "READY", "reason": ""},
                {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "no worker can take a request now"}
            ])
        );
        assert_eq!(index(&models, true).models.len(), 1);
    }
}
