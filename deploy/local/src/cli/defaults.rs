//! Defaults in the help, from the configurations that have them.

use clap::CommandFactory as _;
use serde::Serialize;
use serde_json::{Map, Value};

use super::Cli;
use crate::options::{ClusterConfig, ProcessConfig, ServeOptions};

/// Options of a process that make sense only where it serves.
pub(crate) const OF_SERVERS: [&str; 5] =
    ["enable_tracing", "otlp_endpoint", "otlp_sampling", "grace", "debug_pages"];

/// The command line, with the default of each option in its help.
pub(crate) fn command() -> clap::Command {
    Cli::command().mut_subcommands(|subcommand| {
        let defaults = defaults(subcommand.get_name());
        subcommand.mut_args(|arg| match defaults.get(arg.get_id().as_str()).and_then(shown) {
            Some(default) => {
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                arg.help(format!("{help} [default: {default}]"))
            }
            None => arg,
        })
    })
}

/// The default of every field that a command reads, by name.
pub(crate) fn defaults(command: &str) -> Map<String, Value> {
    let mut fields = fields(&ProcessConfig::default());
    // Where two configurations of a process have a field of the same name, the first one's default is shown.
    let mut add = |more: Map<String, Value>| {
        for (name, value) in more {
            fields.entry(name).or_insert(value);
        }
    };
    match command {
        "serve" => {
            add(self::fields(&ServeOptions::default()));
            add(self::fields(&gateway::Config::default()));
            add(self::fields(&router::Config::default()));
            add(self::fields(&worker::Config::default()));
        }
        "gateway" => add(self::fields(&gateway::Config::default())),
        "router" => add(self::fields(&router::Config::default())),
        "fetch" => add(self::fields(&crate::fetch::Config::default())),
        "role" => add(self::fields(&crate::role::Config::default())),
        "prefill-worker" | "decode-worker" => add(self::fields(&worker::Config::default())),
        // What plans reads no configuration.
        _ => return Map::new(),
    }
    if matches!(command, "fetch" | "role") {
        fields.retain(|name, _| !OF_SERVERS.contains(&name.as_str()));
    } else if command != "serve" {
        add(self::fields(&ClusterConfig::default()));
    }
    // The binary insists on being told.
    fields.remove("model");
    fields
}

fn fields(config: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(config) {
        Ok(Value::Object(fields)) => fields,
        _ => unreachable!("a configuration is a set of named fields"),
    }
}

/// A default as help shows it; `None` where there is nothing to show.
pub(crate) fn shown(default: &Value) -> Option<String> {
    match default {
        Value::Null | Value::Bool(false) => None,
        Value::Array(list) if list.is_empty() => None,
        Value::String(text) if text.trim().is_empty() => Some(format!("{text:?}")),
        Value::String(text) => Some(text.clone()),
        // 30 and not 30.0: nobody types that.
        Value::Number(number) => Some(number.to_string().trim_end_matches(".0").to_owned()),
        other => Some(other.to_string()),
    }
}
