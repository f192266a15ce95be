//! The schemas, and the validator that judges what comes of them.

use std::fs;
use std::sync::Arc;

use baton_tests::golden;
use serde::Deserialize;
use serde_json::Value;

/// A schema, and a question whose answer has its form.
#[derive(Debug, Deserialize)]
pub(crate) struct Case {
    /// Unique.
    pub(crate) name: String,
    /// What the user says.
    pub(crate) ask: String,
    pub(crate) schema: Value,
    /// One of those that are asked many times.
    #[serde(default)]
    pub(crate) often: bool,
}

/// All of them, in the order of the file.
pub(crate) fn read() -> Vec<Arc<Case>> {
    let path = golden::root().join("tests/schemas/schemas.json");
    let text = fs::read_to_string(&path).expect("the schemas are part of the repository");
    serde_json::from_str(&text).expect("they are JSON, and have these fields")
}

impl Case {
    /// Why a text is no instance of the schema, if it is none.
    pub(crate) fn fault(&self, text: &str) -> Option<String> {
        let value: Value = match serde_json::from_str(text) {
            Ok(value) => value,
            Err(fault) => return Some(format!("no JSON: {fault}")),
        };
        let validator = jsonschema::options().should_validate_formats(true).build(&self.schema);
        let validator = validator.expect("the schema is one");
        let faults: Vec<String> = validator.iter_errors(&value).map(|fault| fault.to_string()).collect();
        (!faults.is_empty()).then(|| faults.join("; "))
    }
}
