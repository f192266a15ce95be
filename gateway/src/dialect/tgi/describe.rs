//! The answer of `/info`: what of TGI's and `MindIE`'s fields has a meaning here, and null for the rest.

use proto::LOGPROBS_MAX;
use serde::Serialize;

use super::request::BEST_OF;
use crate::Config;
use crate::admit::STOP_STRINGS_MAX;
use crate::dialect::json;
use crate::models::Model;

const PIPELINE: &str = "text-generation";

/// Of the first model, as TGI has it, and of all in `models`, as `MindIE` has it.
#[derive(Serialize)]
struct Description<'a> {
    model_id: &'a str,
    /// The digest of the model's files.
    model_sha: String,
    model_dtype: Option<&'a str>,
    model_device_type: Option<&'a str>,
    model_pipeline_tag: &'a str,
    max_concurrent_requests: usize,
    max_best_of: u64,
    max_stop_sequences: usize,
    max_top_n_tokens: u32,
    max_input_tokens: usize,
    /// The same under its older name.
    max_input_length: usize,
    max_total_tokens: usize,
    max_batch_total_tokens: Option<usize>,
    max_waiting_tokens: Option<usize>,
    waiting_served_ratio: Option<f32>,
    validation_workers: Option<usize>,
    /// Prompts of one request.
    max_client_batch_size: usize,
    models: Vec<ModelDescription<'a>>,
    version: &'a str,
    sha: Option<&'a str>,
    docker_label: Option<&'a str>,
}

#[derive(Serialize)]
struct ModelDescription<'a> {
    model_device_type: Option<&'a str>,
    model_dtype: Option<&'a str>,
    model_id: &'a str,
    model_pipeline_tag: &'a str,
    model_sha: String,
    max_total_tokens: usize,
}

/// Tokens of a sequence, and of a prompt that leaves room for one.
fn limits(model: &Model, config: &Config) -> (usize, usize) {
    let total = config.max_seq_len.unwrap_or(usize::MAX).min(model.description.context_len);
    (total, config.input_tokens_max().unwrap_or(usize::MAX).min(total.saturating_sub(1)))
}

/// Describes the models, the first of which stands for the server; `None` without any.
pub(crate) fn described(models: &[std::sync::Arc<Model>], config: &Config) -> Option<String> {
    let first = models.first()?;
    let (max_total_tokens, max_input_tokens) = limits(first, config);
    let each = models.iter().map(|model| ModelDescription {
        model_device_type: None,
        model_dtype: None,
        model_id: &model.description.name,
        model_pipeline_tag: PIPELINE,
        model_sha: model.description.fingerprint.to_string(),
        max_total_tokens: limits(model, config).0,
    });
    Some(json(&Description {
        model_id: &first.description.name,
        model_sha: first.description.fingerprint.to_string(),
        model_dtype: None,
        model_device_type: None,
        model_pipeline_tag: PIPELINE,
        max_concurrent_requests: config.requests_max,
        max_best_of: *BEST_OF.end(),
        max_stop_sequences: STOP_STRINGS_MAX,
        max_top_n_tokens: LOGPROBS_MAX,
        max_input_tokens,
        max_input_length: max_input_tokens,
        max_total_tokens,
        max_batch_total_tokens: None,
        max_waiting_tokens: None,
        waiting_served_ratio: None,
        validation_workers: None,
        max_client_batch_size: 1,
        models: each.collect(),
        version: env!("CARGO_PKG_VERSION"),
        sha: None,
        docker_label: None,
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::dialect::tests::started;

    #[test]
    fn what_is_known_is_told_and_the_rest_is_null() {
        let models = [started("a", 1, None).model, started("b", 1, None).model];
        let config = Config { max_seq_len: Some(50), max_input_token_len: Some(40), ..Config::default() };
        let told: Value = serde_json::from_str(&described(&models, &config).unwrap()).unwrap();
        for (field, value) in [
            ("model_id", Value::from("a")),
            ("model_sha", Value::from("ab".repeat(32))),
            ("max_input_tokens", Value::from(40)),
            ("max_input_length", Value::from(40)),
            ("max_total_tokens", Value::from(50)),
            ("max_concurrent_requests", Value::from(1000)),
            ("max_best_of", Value::from(128)),
            ("max_stop_sequences", Value::from(1024)),
            ("version", Value::from(env!("CARGO_PKG_VERSION"))),
            ("docker_label", Value::Null),
        ] {
            assert_eq!(told[field], value, "{field}");
        }
        assert_eq!(told["models"][1]["model_id"], "b");
        assert_eq!(told["models"][1]["max_total_tokens"], 50);
        let told: Value = serde_json::from_str(&described(&models, &Config::default()).unwrap()).unwrap();
        assert_eq!(
            (&told["max_input_tokens"], &told["max_total_tokens"]),
            (&Value::from(63), &Value::from(64))
        );
        assert_eq!(described(&[], &config), None);
    }
}
