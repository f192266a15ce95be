//! A request for inference, whichever way it came: names checked, tensors read, nothing interpreted yet.

use std::collections::BTreeMap;

use serde_json::Value;

use super::tensor::Tensor;
use crate::fault::Fault;

/// The only version of every model.
pub(crate) const VERSION: &str = "1";

/// Most input tensors, and most outputs that can be asked for.
pub(crate) const TENSORS_MAX: usize = 64;

/// Set by clients that want a stream's last response even where it has no tensors.
const EMPTY_FINAL: &str = "triton_enable_empty_final_response";

/// Where the elements of a registered region would be.
const SHARED_MEMORY: &str = "shared_memory_region";

/// A request for inference.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Inference {
    /// The client's name for it; empty when it gave none.
    pub(crate) id: String,
    /// Parameters, but for those that the protocol itself has.
    pub(crate) parameters: BTreeMap<String, Value>,
    /// Parameters of the protocol itself.
    pub(crate) reserved: Reserved,
    /// Input tensors, each name once.
    pub(crate) inputs: Vec<Tensor>,
    /// Outputs that are asked for, each name once; empty for those that the request implies.
    pub(crate) outputs: Vec<Wanted>,
}

/// An output that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Its name.
    pub(crate) name: String,
    /// As binary data, or not; as the request says when absent. Of no account where all data is binary.
    pub(crate) binary: Option<bool>,
}

/// Parameters of the protocol itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reserved {
    /// From 1, the most urgent; 0 for the default.
    pub(crate) priority: u64,
    /// Deadline in microseconds; `None` for the default.
    pub(crate) timeout_us: Option<u64>,
    /// All outputs as binary data, unless one says otherwise.
    pub(crate) binary_data_output: bool,
    /// A stream's last response is wanted even where it has no tensors.
    pub(crate) empty_final_response: bool,
}

impl Reserved {
    /// Takes the protocol's own parameters out of all of them. Those that it keeps for itself and that mean nothing
    /// here are faults.
    pub(crate) fn take(parameters: &mut BTreeMap<String, Value>) -> Result<Self, Fault> {
        check_sequence(parameters)?;
        if parameters.contains_key("headers") {
            return Err(reserved_fault("headers"));
        }
        let priority = unsigned(parameters, "priority")?.unwrap_or(0);
        let timeout_us = unsigned(parameters, "timeout")?.filter(|timeout| *timeout > 0);
        let binary_data_output = flag(parameters, "binary_data_output")?.unwrap_or(false);
        let empty_final_response = flag(parameters, EMPTY_FINAL)?.unwrap_or(false);
        if let Some(name) = parameters.keys().find(|name| name.starts_with("triton_")) {
            return Err(reserved_fault(name));
        }
        Ok(Self { priority, timeout_us, binary_data_output, empty_final_response })
    }
}

/// Which sequence a request belongs to says nothing here: a request brings all that it needs.
fn check_sequence(parameters: &mut BTreeMap<String, Value>) -> Result<(), Fault> {
    if let Some(id) = parameters.remove("sequence_id")
        && !(id.is_null() || id.is_string() || id.is_u64() || id.is_i64())
    {
        return Err(unexpected("sequence_id", "an integer or a string", &id));
    }
    flag(parameters, "sequence_start")?;
    flag(parameters, "sequence_end")?;
    Ok(())
}

fn reserved_fault(name: &str) -> Fault {
    let shown: String = name.chars().take(40).collect();
    let message =
        format!("the name is reserved; of those that start with triton_ only {EMPTY_FINAL} is known");
    Fault::field(format!("parameters.{shown}"), message)
}

fn unexpected(name: &str, expected: &str, value: &Value) -> Fault {
    crate::dialect::fields::unexpected(&format!("parameters.{name}"), expected, value)
}

fn flag(parameters: &mut BTreeMap<String, Value>, name: &str) -> Result<Option<bool>, Fault> {
    match parameters.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(flag)) => Ok(Some(flag)),
        Some(other) => Err(unexpected(name, "true or false", &other)),
    }
}

fn unsigned(parameters: &mut BTreeMap<String, Value>, name: &str) -> Result<Option<u64>, Fault> {
    match parameters.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            value.as_u64().map(Some).ok_or_else(|| unexpected(name, "an integer of at least 0", &value))
        }
    }
}

/// The version that a request names, where there is but one.
pub(crate) fn check_version(model: &str, version: &str) -> Result<(), Fault> {
    // -1 is the protocol's word for the latest.
    if matches!(version, "" | VERSION | "-1") {
        return Ok(());
    }
    let shown: String = version.chars().take(40).collect();
    Err(Fault::Model(format!("{model}/versions/{shown}")))
}

/// Checks that a tensor's elements are in the request.
pub(crate) fn check_not_shared<'a>(
    names: impl IntoIterator<Item = &'a String>,
    field: &str,
) -> Result<(), Fault> {
    if names.into_iter().any(|name| name == SHARED_MEMORY) {
        let message = "shared memory is not supported: tensors travel in the request";
        return Err(Fault::field(format!("{field}.parameters.{SHARED_MEMORY}"), message));
    }
    Ok(())
}

/// Checks that there are not too many tensors, and that no two have the same name.
pub(crate) fn check_names<'a>(names: impl Iterator<Item = &'a str>, field: &str) -> Result<(), Fault> {
    let mut seen = std::collections::HashSet::new();
    for (index, name) in names.enumerate() {
        if index == TENSORS_MAX {
            return Err(Fault::field(field, format!("expected at most {TENSORS_MAX} tensors, got more")));
        }
        if name.is_empty() {
            return Err(Fault::field(format!("{field}[{index}].name"), "must not be empty"));
        }
        if !seen.insert(name) {
            let shown: String = name.chars().take(40).collect();
            return Err(Fault::field(format!("{field}[{index}].name"), format!("{shown:?} is given twice")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn take(parameters: Value) -> Result<(Reserved, Vec<String>), String> {
        let Value::Object(map) = parameters else { panic!("an object") };
        let mut parameters: BTreeMap<_, _> = map.into_iter().collect();
        let reserved = Reserved::take(&mut parameters).map_err(|fault| fault.to_string())?;
        Ok((reserved, parameters.into_keys().collect()))
    }

    #[test]
    fn the_protocols_own_parameters_are_taken_and_others_left() {
        let (reserved, left) = take(json!({
            "priority": 2, "timeout": 1000, "binary_data_output": true, "sequence_id": 7, "sequence_start": true,
            "sequence_end": false, "triton_enable_empty_final_response": true, "temperature": 0.5
        }))
        .unwrap();
        let expected = Reserved {
            priority: 2,
            timeout_us: Some(1000),
            binary_data_output: true,
            empty_final_response: true,
        };
        assert_eq!((reserved, left), (expected, vec!["temperature".to_owned()]));
        assert_eq!(take(json!({"timeout": 0, "priority": null})).unwrap().0, Reserved::default());
    }

    #[test]
    fn reserved_names_and_wrong_types_are_faults() {
        for (parameters, start) in [
            (json!({"triton_x": 1}), "parameters.triton_x: the name is reserved"),
            (json!({"headers": "a"}), "parameters.headers: the name is reserved"),
            (json!({"priority": -1}), "parameters.priority: expected an integer of at least 0, got -1"),
            (json!({"priority": "1"}), "parameters.priority: "),
            (json!({"timeout": -5}), "parameters.timeout: "),
            (json!({"timeout": 1.5}), "parameters.timeout: "),
            (json!({"sequence_id": 1.5}), "parameters.sequence_id: expected an integer or a string"),
            (json!({"sequence_start": 1}), "parameters.sequence_start: expected true or false, got 1"),
            (json!({"binary_data_output": "yes"}), "parameters.binary_data_output: "),
            (
                json!({"triton_enable_empty_final_response": 1}),
                "parameters.triton_enable_empty_final_response: expected true or false",
            ),
        ] {
            let fault = take(parameters.clone()).unwrap_err();
            assert!(fault.starts_with(start), "{parameters}: {fault}");
        }
    }

    #[test]
    fn there_is_one_version() {
        for version in ["", "1", "-1"] {
            assert_eq!(check_version("m", version), Ok(()));
        }
        assert_eq!(check_version("m", "2"), Err(Fault::Model("m/versions/2".to_owned())));
    }

    #[test]
    fn names_stand_once() {
        assert_eq!(check_names(["a", "b"].into_iter(), "inputs"), Ok(()));
        let fault = check_names(["a", "b", "a"].into_iter(), "outputs").unwrap_err().to_string();
        assert_eq!(fault, "outputs[2].name: \"a\" is given twice");
        assert!(check_names([""].into_iter(), "inputs").is_err());
        let names: Vec<String> = (0..65).map(|n| n.to_string()).collect();
        assert!(check_names(names.iter().map(String::as_str), "inputs").is_err());
    }
}
