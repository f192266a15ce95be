//! `--print-config`: the options as they are set, as a file that sets them so again.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;
use serde_json::Value;

/// Such a file in the making.
pub(crate) struct Effective {
    text: String,
    /// Options that are written, and how.
    written: BTreeMap<String, String>,
}

impl Effective {
    /// A file without options.
    pub(crate) fn new() -> Self {
        Self {
            text: "# Options as they are set. What is behind a # is not: it has no value of its own, or its value \
                   is not shown.\n"
                .to_owned(),
            written: BTreeMap::new(),
        }
    }

    /// Adds the options of one configuration.
    pub(crate) fn section(&mut self, title: &str, config: &impl Serialize) {
        self.section_without(title, config, &[]);
    }

    /// The same, but for options that do not count.
    pub(crate) fn section_without(&mut self, title: &str, config: &impl Serialize, unused: &[&str]) {
        let Ok(Value::Object(options)) = serde_json::to_value(config) else {
            unreachable!("a configuration is a set of named fields")
        };
        let _ = writeln!(self.text, "\n# {title}");
        for (name, value) in options.iter().filter(|(name, _)| !unused.contains(&name.as_str())) {
            self.option(name, value);
        }
    }

    fn option(&mut self, name: &str, value: &Value) {
        let line = if gateway::Config::SECRETS.contains(&name) {
            format!("# {name}: not shown")
        } else {
            // TOML has no null, and no integer beyond 63 bits.
            match toml::Value::try_from(value) {
                Ok(value) => format!("{name} = {value}"),
                Err(_) => format!("# {name}"),
            }
        };
        // A file has each option once; where two services read it with different defaults, the second is told.
        let line = match self.written.get(name) {
            None => line,
            Some(before) if *before == line => return,
            Some(_) => format!("# {line}"),
        };
        self.text.push_str(&line);
        self.text.push('\n');
        self.written.entry(name.to_owned()).or_insert(line);
    }

    /// The file.
    pub(crate) fn text(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn options_are_written_once_and_secrets_never() {
        let mut shown = Effective::new();
        shown.section(
            "a",
            &json!({"port": 1, "name": null, "list": ["x"], "api_key": ["k"], "requests_max": 5}),
        );
        shown.section_without(
            "b",
            &json!({"port": 1, "requests_max": 6, "listen": "x", "part": 0.5}),
            &["listen"],
        );
        let text = shown.text();
        let (_, options) = text.split_once("\n\n").unwrap();
        assert_eq!(
            options,
            "# a\nport = 1\n# name\nlist = [\"x\"]\n# api_key: not shown\nrequests_max = 5\n\n\
             # b\n# requests_max = 6\npart = 0.5\n"
        );
    }
}
