//! docs/configuration.md, made from what the command line and the configurations really have.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use expect_test::expect_file;

use crate::cli::{self, shown_default};
use crate::overrides;

/// The commands, each with its name in the table.
const COMMANDS: [(&str, &str); 7] = [
    ("serve", "serve"),
    ("gateway", "gateway"),
    ("router", "router"),
    ("prefill-worker", "workers"),
    ("decode-worker", "workers"),
    ("fetch", "fetch"),
    ("role", "role"),
];

/// Arguments that are no options of a file.
const NO_OPTIONS: [&str; 5] = ["config", "print_config", "word", "help", "version"];

/// Options that are no field of a configuration, but become others: see [`crate::mlc`].
const TRANSLATED: [&str; 6] =
    ["overrides", "prefix_cache_mode", "prefill_mode", "model_lib", "additional_models", "speculative_mode"];

/// Options that `baton serve` reads and does not follow: its ports decide, and its services need no addresses.
const NOT_OF_SERVE: [&str; 4] = ["listen", "grpc_listen", "advertise", "drain_notice_seconds"];

/// Options whose names are MLC-LLM's, too.
const OF_MLC: [&str; 14] = [
    "device",
    "mode",
    "overrides",
    "prefix_cache_mode",
    "prefill_mode",
    "model_lib",
    "additional_models",
    "speculative_mode",
    "enable_tracing",
    "host",
    "port",
    "api_key",
    "allow_credentials",
    "gpu_memory_utilization",
];

/// One option, in every command that has it.
struct Row {
    name: String,
    heading: String,
    commands: Vec<&'static str>,
    default: String,
    meaning: String,
}

impl Row {
    fn new(argument: &clap::Arg, defaults: &serde_json::Map<String, serde_json::Value>) -> Self {
        let name = argument.get_id().as_str();
        let help = argument.get_help().expect("every option has a meaning").to_string();
        let (meaning, in_words) = match help.split_once(" [default: ") {
            Some((meaning, default)) => (meaning.to_owned(), default.strip_suffix(']')),
            None => (help.clone(), None),
        };
        let default = match defaults.get(name).and_then(shown_default) {
            Some(default) => format!("`{default}`"),
            None if defaults.get(name).is_some_and(serde_json::Value::is_boolean) => "`false`".to_owned(),
            None => in_words.unwrap_or("none").to_owned(),
        };
        let heading = argument.get_help_heading().unwrap_or("Options").to_owned();
        Self { name: name.to_owned(), heading, commands: Vec::new(), default, meaning }
    }

    /// True when the two are the same option of two commands.
    fn is(&self, other: &Self) -> bool {
        (&self.name, &self.default, &self.meaning) == (&other.name, &other.default, &other.meaning)
    }
}

/// Every option, in the order of the help.
fn rows() -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let command = cli::command();
    for (subcommand, label) in COMMANDS {
        let defaults = cli::defaults(subcommand);
        let arguments = command.find_subcommand(subcommand).expect("a command").get_arguments();
        for argument in arguments.filter(|argument| !NO_OPTIONS.contains(&argument.get_id().as_str())) {
            let row = Row::new(argument, &defaults);
            match rows.iter_mut().find(|known| known.is(&row)) {
                Some(known) if known.commands.contains(&label) => {}
                Some(known) => known.commands.push(label),
                None => rows.push(Row { commands: vec![label], ..row }),
            }
        }
    }
    rows
}

/// The names that other servers have for an option.
fn elsewhere(name: &str) -> String {
    let mut names: Vec<String> =
        OF_MLC.iter().filter(|known| **known == name).map(|_| "MLC-LLM".into()).collect();
    for (alias, _) in aliases().filter(|(_, field)| *field == name) {
        let is_mindie = alias.chars().any(char::is_uppercase);
        names.push(format!("{} `{alias}`", if is_mindie { "MindIE" } else { "MLC-LLM" }));
    }
    names.join(", ")
}

fn aliases() -> impl Iterator<Item = (&'static str, &'static str)> {
    gateway::Config::ALIASES.iter().chain(worker::Config::ALIASES).copied()
}

const PREFACE: &str = "\
# Configuration

Every option below is a flag of the command line (`--grpc-port 9001`), an environment variable
(`BATON_GRPC_PORT=9001`) and a key of a TOML file (`grpc_port = 9001`) that `--config FILE` or `BATON_CONFIG` names. The
command line wins over the environment, the environment over the file, and the file over the default. A key that the
file has and no option is refused by name. `--print-config` prints all options as they are set, as such a file, and
ends; keys of clients and of the watermark are not printed.

Where another server's name stands beside an option, it can be used in its place: MindIE's in the file and as a flag
(`maxSeqLen = 2560`, `--maxSeqLen 2560`), MLC-LLM's in the file and, where it is an engine option, in `--overrides`.
\"MLC-LLM\" alone means that the option has the same name and meaning there. A flag that is true or false is true when it
stands alone: `--triton-strict`, or `--triton-strict=false`.

This page is made from the code: `UPDATE_EXPECT=1 cargo test -p baton --lib reference`.
";

const MODES: &str = "
## Modes

`--mode` sets the sizes of each worker where they are not set, by MLC-LLM's rules. FIT is the number of tokens whose KV
the memory for KV holds.

| mode | `sequences_max` | tokens of KV | `step_tokens` |
|---|---|---|---|
| `local` | 4 | min(FIT, context, 8192) | min(128, tokens of KV, context) |
| `interactive` | 1 | min(FIT, context) | min(128, tokens of KV, context) |
| `server` | 64 | min(FIT, `sequences_max` × context) | 128 |
| none | 64 | eight contexts, as far as they fit | 128 |

With `--dialect mlc` the mode is `local` unless another one is named. With a mode, `baton serve` lets no more requests run
than its decode workers take sequences; the others wait.
";

/// The whole page.
fn page() -> String {
    let mut page = PREFACE.to_owned();
    let mut headings: Vec<String> = Vec::new();
    let mut tables: BTreeMap<String, String> = BTreeMap::new();
    for row in rows() {
        if !headings.contains(&row.heading) {
            headings.push(row.heading.clone());
        }
        let cells = [
            format!("`{}`", row.name),
            row.commands.join(", "),
            elsewhere(&row.name),
            row.default,
            row.meaning,
        ];
        let cells = cells.map(|cell| cell.replace('|', "\\|").replace('\n', " "));
        let table = tables.entry(row.heading).or_default();
        let _ = writeln!(table, "| {} |", cells.join(" | "));
    }
    for heading in headings {
        let _ = write!(
            page,
            "\n## {heading}\n\n| option | of | elsewhere | default | meaning |\n|---|---|---|---|---|\n{}",
            tables[&heading]
        );
    }
    page.push_str(MODES);
    page.push_str("\n## Keys of `--overrides`\n\n| key | what it does here |\n|---|---|\n");
    for key in &overrides::KEYS {
        let _ = writeln!(page, "| `{}` | {} |", key.name, key.meaning);
    }
    page
}

#[test]
fn the_page_is_what_the_code_says() {
    expect_file!["../../../docs/configuration.md"].assert_eq(&page());
}

#[test]
fn every_field_of_a_configuration_is_a_flag_and_every_flag_a_field() {
    for (subcommand, _) in COMMANDS {
        let defaults = cli::defaults(subcommand);
        let command = cli::command();
        let command = command.find_subcommand(subcommand).unwrap();
        let flags: Vec<&str> = command.get_arguments().map(|argument| argument.get_id().as_str()).collect();
        for field in defaults.keys() {
            let is_unused = subcommand == "serve" && NOT_OF_SERVE.contains(&field.as_str());
            assert_eq!(!is_unused, flags.contains(&field.as_str()), "{field} of {subcommand}");
        }
        let further = ["model", "models_dir"];
        for flag in flags.iter().filter(|flag| !NO_OPTIONS.contains(flag) && !TRANSLATED.contains(flag)) {
            assert!(defaults.contains_key(*flag) || further.contains(flag), "--{flag} of {subcommand}");
        }
    }
}

#[test]
fn every_name_of_another_server_is_one_of_an_option() {
    let rows = rows();
    let is_option = |name: &str| rows.iter().any(|row| row.name == name);
    for name in OF_MLC.iter().copied().chain(aliases().map(|(_, field)| field)) {
        assert!(is_option(name), "{name}");
    }
    for (alias, _) in aliases() {
        assert!(!is_option(alias), "{alias} is a second name");
    }
}
