//! Scenarios as text. A line that starts with `> ` is a command, the indented lines below it are what came of it,
//! and every other line is prose. `UPDATE_EXPECT=1 cargo test -p router` writes what came into the files.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use proto::{
    Attempt, Digest, KvDtype, KvLayout, ModelDescription, Placed, Reason, Role, WorkerDescription,
    WorkerEpoch, worker::PROTOCOL_VERSION,
};

/// The words of a command: first the plain ones, then `key=value`.
pub(crate) struct Command<'a> {
    line: &'a str,
}

impl<'a> Command<'a> {
    /// A command of that line.
    pub(crate) fn parse(line: &'a str) -> Self {
        Self { line }
    }

    /// The plain words.
    pub(crate) fn words(&self) -> Vec<&'a str> {
        self.line.split_whitespace().filter(|word| !word.contains('=')).collect()
    }

    /// The value of a key.
    pub(crate) fn get<T: FromStr<Err: Display>>(&self, key: &str) -> Option<T> {
        let pairs = self.line.split_whitespace().filter_map(|word| word.split_once('='));
        let value = pairs.filter(|(name, _)| *name == key).map(|(_, value)| value).next()?;
        Some(value.parse().unwrap_or_else(|error| panic!("{}: {key}: {error}", self.line)))
    }

    /// The value of a key, as a list with commas.
    pub(crate) fn list<T: FromStr<Err: Display>>(&self, key: &str) -> Option<Vec<T>> {
        let value: String = self.get(key)?;
        let parse = |item: &str| item.parse().unwrap_or_else(|error| panic!("{}: {key}: {error}", self.line));
        Some(value.split(',').filter(|item| !item.is_empty()).map(parse).collect())
    }

    /// The value of a key, as a time.
    pub(crate) fn duration(&self, key: &str) -> Option<Duration> {
        self.get::<String>(key).map(|value| duration(&value))
    }
}

/// A time like `20ms` or `1.5s`.
pub(crate) fn duration(word: &str) -> Duration {
    let (number, unit) = match word.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (word.strip_suffix('s').unwrap_or_else(|| panic!("{word}: expected ms or s")), 1.0),
    };
    Duration::from_secs_f64(number.parse::<f64>().expect("a number before the unit") * unit)
}

/// The reason of that name.
pub(crate) fn reason(name: &str) -> Reason {
    Reason::from_name(name).unwrap_or_else(|| panic!("{name}: no such reason"))
}

/// Runs the commands of a file; gives the file as it should be.
pub(crate) fn replay(text: &str, mut command: impl FnMut(&Command<'_>) -> Vec<String>) -> String {
    let mut fresh = String::new();
    for line in text.lines().filter(|line| !line.starts_with("    ")) {
        fresh.push_str(line);
        fresh.push('\n');
        if let Some(line) = line.strip_prefix("> ") {
            let mut came = command(&Command { line });
            if came.is_empty() {
                came.push("(nothing)".into());
            }
            for line in came {
                fresh.extend(["    ", &line, "\n"]);
            }
        }
    }
    fresh
}

/// The role that a worker's name says: `p…` is prefill, `d…` is decode, anything else a router.
pub(crate) fn role(name: &str) -> Role {
    match name.as_bytes().first() {
        Some(b'p') => Role::Prefill,
        Some(b'd') => Role::Decode,
        _ => Role::Router,
    }
}

/// A placement like `p1,d1`, or `d1` where it is fused.
pub(crate) fn placed(workers: &str) -> Placed {
    let (prefill, decode) = match workers.split_once(',') {
        Some((prefill, decode)) => (Some(prefill.to_owned()), decode),
        None => (None, workers),
    };
    Placed { attempt: Attempt(0), prefill, decode: decode.to_owned() }
}

/// A worker of the model `m`.
pub(crate) fn description(name: &str) -> WorkerDescription {
    WorkerDescription {
        protocol: PROTOCOL_VERSION,
        epoch: WorkerEpoch(1),
        role: role(name),
        model: ModelDescription {
            name: "m".into(),
            fingerprint: Digest([0xaa; 32]),
            tokenizer: Digest([0x77; 32]),
            context_len: 64,
            vocab_size: 100,
            numerics: "cpu".into(),
        },
        layout: KvLayout { layers: 2, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 },
        draining: false,
        blocks_total: 8,
        blocks_free: 8,
        sequences: 0,
    }
}
