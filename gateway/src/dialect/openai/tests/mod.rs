//! Chats, from a body to what is asked of the engine, and from the engine's text to the answer.

mod answers;
mod messages;
mod parameters;
mod tools;

use std::sync::Arc;

use serde_json::{Value, json};

use super::{ChatWriter, Setting, parse_chat};
use crate::Config;
use crate::config::Dialect;
use crate::dialect::Call;
use crate::domain::{Chat, Prompt, Request};
use crate::fault::Fault;
use crate::models::Model;

/// Knows of tools in Hermes' form.
const HERMES: &str = "{% if tools %}tools: {{ tools|tojson }} <tool_call>\n{% endif %}\
                      {% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}\
                      <{{ c.function.name }} {{ c.function.arguments|tojson }}>{% endfor %}{% endif %}\n{% endfor %}\
                      {% if add_generation_prompt %}assistant: {% endif %}";

/// A place to parse in.
struct Place {
    config: Config,
    model: Arc<Model>,
}

impl Place {
    /// A model without a notion of tools.
    fn plain() -> Self {
        Self { config: Config::default(), model: crate::dialect::tests::started("m", 1, None).model }
    }

    fn templated(template: &str, special: &[&str]) -> Self {
        let bundle = crate::bundle::byte_bundle_with(template, special);
        Self { config: Config::default(), model: crate::dialect::tests::model("m", &bundle) }
    }

    fn mlc() -> Self {
        let config = Config { dialect: Dialect::Mlc, ..Config::default() };
        Self { config, ..Self::plain() }
    }

    fn parse_bytes(&self, body: &[u8]) -> Result<Call<ChatWriter>, Fault> {
        parse_chat(body, &Setting { config: &self.config, model: &|_| Ok(self.model.clone()) })
    }

    fn call(&self, body: &Value) -> Result<Call<ChatWriter>, String> {
        self.parse_bytes(body.to_string().as_bytes()).map_err(|fault| fault.to_string())
    }

    fn read(&self, body: &Value) -> Result<Request, String> {
        self.call(body).map(|call| call.requests[0].clone())
    }

    /// A call with one message and these fields.
    fn with(&self, extra: Value) -> Result<Request, String> {
        self.read(&with(extra))
    }
}

/// A body with one message and these fields.
fn with(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn chat(request: &Request) -> &Chat {
    match &request.prompt {
        Prompt::Chat(chat) => chat,
        other => panic!("a chat expected, got {other:?}"),
    }
}

/// The functions of the API's own example, and one more.
fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Tells the weather", "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["location"],
        }}},
        {"type": "function", "function": {"name": "now"}},
    ])
}
