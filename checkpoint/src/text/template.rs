//! Chat templates: Jinja as the `transformers` library sets it up.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error as TemplateError, ErrorKind, Value};
use serde_json::Map;

use super::json;
use crate::Error;

/// Steps a rendering may take: hundreds for each message, so enough for very long chats, and an end to endless loops.
const FUEL: u64 = 20_000_000;

const NAME: &str = "chat";

/// A compiled template.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    pub(super) fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.set_fuel(Some(FUEL));
        environment
            .add_template_owned(NAME, without_generation_blocks(source))
            .map_err(|error| error.to_string())?;
        Ok(Self { environment, bos_token: bos_token.to_owned(), eos_token: eos_token.to_owned() })
    }

    pub(super) fn render(
        &self,
        messages: &serde_json::Value,
        extra: &serde_json::Value,
    ) -> Result<String, Error> {
        if !messages.is_array() {
            return Err(Error::Template("messages: expected an array".to_owned()));
        }
        let extra = match extra {
            serde_json::Value::Object(extra) => extra,
            serde_json::Value::Null => &Map::new(),
            _ => return Err(Error::Template("extra variables: expected an object".to_owned())),
        };
        let mut context = Map::new();
        context.insert("bos_token".to_owned(), self.bos_token.as_str().into());
        context.insert("eos_token".to_owned(), self.eos_token.as_str().into());
        context.extend(extra.iter().map(|(key, value)| (key.clone(), value.clone())));
        context.insert("messages".to_owned(), messages.clone());
        let template = self.environment.get_template(NAME).map_err(fault)?;
        template.render(Value::from(Serde(&context))).map_err(fault)
    }
}

fn fault(error: TemplateError) -> Error {
    Error::Template(error.to_string())
}

/// How a template says that it cannot take a chat.
fn raise_exception(message: String) -> Result<Value, TemplateError> {
    Err(TemplateError::new(ErrorKind::InvalidOperation, message))
}

/// Today, in UTC so that every gateway says the same.
fn strftime_now(format: String) -> Result<String, TemplateError> {
    let now = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
    jiff::fmt::strtime::format(&format, &now)
        .map_err(|error| TemplateError::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// Templates may mark an assistant's text with `{% generation %}`, which matters in training alone and which Jinja
/// does not know: the marks become a condition that always holds.
fn without_generation_blocks(source: &str) -> String {
    let mut rewritten = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, from_tag) = rest.split_at(start);
        rewritten.push_str(before);
        // Behind the opening: the two share a sign in `{%}`, which opens a tag and closes none.
        let Some(len) = from_tag[2..].find("%}") else {
            rest = from_tag;
            break;
        };
        let (inside, after) = (&from_tag[2..2 + len], &from_tag[2 + len + 2..]);
        let word = inside.trim_matches(|c: char| matches!(c, '-' | '+') || c.is_whitespace());
        rewritten.push_str("{%");
        match word {
            "generation" => rewritten.push_str(&inside.replace(word, "if true")),
            "endgeneration" => rewritten.push_str(&inside.replace(word, "endif")),
            _ => rewritten.push_str(inside),
        }
        rewritten.push_str("%}");
        rest = after;
    }
    rewritten.push_str(rest);
    rewritten
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, extra: serde_json::Value) -> Result<String, String> {
        let template = ChatTemplate::new(source, "<s>", "</s>")?;
        let messages =
            json!([{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello"}]);
        template.render(&messages, &extra).map_err(|error| error.to_string())
    }

    #[test]
    fn blocks_are_trimmed_as_transformers_does() {
        let source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}: {{ m['content'].strip() }}\n    {% endfor %}\nend";
        assert_eq!(render(source, json!({})).unwrap(), "<s>\nuser: Hi\nassistant: Hello\nend");
    }

    #[test]
    fn extra_variables_are_seen_and_messages_cannot_be_replaced() {
        let source =
            "{% if add_generation_prompt %}{{ messages | length }}{{ name }}{{ eos_token }}{% endif %}";
        let extra = json!({"add_generation_prompt": true, "name": "x", "messages": []});
        assert_eq!(render(source, extra).unwrap(), "2x</s>");
        assert_eq!(render(source, json!(null)).unwrap(), "");
        assert!(render(source, json!([])).unwrap_err().contains("expected an object"));
    }

    #[test]
    fn a_template_can_refuse() {
        let error = render("{{ raise_exception('roles must alternate') }}", json!({})).unwrap_err();
        assert!(error.contains("roles must alternate"), "{error}");
    }

    #[test]
    fn an_endless_template_runs_out_of_fuel() {
        let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        let error = render(loops, json!({})).unwrap_err();
        assert!(error.contains("fuel"), "{error}");
    }

    #[test]
    fn generation_blocks_become_plain() {
        let source = "a {%- generation -%} b {% endgeneration %} {% if x %}{% endif %}{% cut";
        let expected = "a {%- if true -%} b {% endif %} {% if x %}{% endif %}{% cut";
        assert_eq!(without_generation_blocks(source), expected);
        let source = "{% for m in messages %}{% generation %}{{ m.role[0] }}{% endgeneration %}{% endfor %}";
        assert_eq!(render(source, json!({})).unwrap(), "ua");
    }

    #[test]
    fn a_tag_that_is_no_tag_is_left_to_the_compiler() {
        for source in ["{%}", "{%} } endfor %}", "a {%}%} b", "{%%}", "{%"] {
            assert_eq!(without_generation_blocks(source), source);
            assert!(ChatTemplate::new(source, "", "").is_err(), "{source}");
        }
    }

    #[test]
    fn dates_follow_the_format_and_a_bad_one_is_an_error() {
        let year = render("{{ strftime_now('%Y') }}", json!({})).unwrap();
        assert!(year.len() == 4 && year.as_str() >= "2024", "{year}");
        assert!(render("{{ strftime_now('%!') }}", json!({})).is_err());
    }
}
