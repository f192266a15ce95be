//! A tool, as a client describes it.

use serde_json::{Map, Value, json};

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name: 1 to 64 letters, digits, underscores and dashes.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// The JSON schema of its arguments, which are an object.
    pub parameters: Map<String, Value>,
    /// The arguments must be valid to the letter, even when the model calls of its own accord.
    pub strict: bool,
}

impl Tool {
    /// Reads the schema of a function's arguments; without one it takes none.
    ///
    /// # Errors
    /// When it is no schema of an object: what was expected.
    pub fn parameters(schema: Option<Value>) -> Result<Map<String, Value>, &'static str> {
        let Some(schema) = schema else {
            let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
            return Self::parameters(Some(none));
        };
        let Value::Object(mut schema) = schema else { return Err("a JSON schema of an object") };
        match schema.get("type") {
            // A schema that is empty, or says what it means by a reference.
            None | Some(Value::Null) => {
                schema.insert("type".to_owned(), json!("object"));
                Ok(schema)
            }
            Some(kind) if kind == "object" => Ok(schema),
            Some(_) => Err("a JSON schema of type \"object\""),
        }
    }

    /// The function in the form that chat templates read.
    pub fn described(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), json!(self.name));
        if let Some(description) = &self.description {
            function.insert("description".to_owned(), json!(description));
        }
        function.insert("parameters".to_owned(), Value::Object(self.parameters.clone()));
        json!({"type": "function", "function": function})
    }
}
