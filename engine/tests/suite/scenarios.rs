//! Scheduling as text. Every file of `tests/scenarios` is a list of commands; below each stands, indented, what it
//! gave. `UPDATE_EXPECT=1` writes the results anew.
//!
//! ```text
//! engine blocks=8 block_tokens=4 step=16 sequences=4 waiting=8 cache=on   first line; a new engine
//! submit a tokens=10 max=3 [like=b] [hold] [report]
//!                                             a sequence; `like` takes the prompt of another as far as it goes, `report`
//!                                             asks for the log-probabilities of the prompt
//! reserve a tokens=10 max=3                   a reservation
//! step [n]                                    n steps: tokens and sequences of the batch, and events
//! interrupt                                   a step that is interrupted
//! cancel a, release a                         end it
//! export a 4                                  what export of the block at token 4 gives
//! counts                                      blocks and sequences by state
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use engine::sim::SimModel;
use engine::{Engine, EngineConfig, EngineEvent, SequenceId, SequenceSpec, Until};
use expect_test::expect_file;
use proto::{Error, TokenId};

use crate::drive::{config, engine, prompt, spec};

struct Scenario {
    engine: Engine<SimModel>,
    names: BTreeMap<String, (SequenceId, Vec<TokenId>)>,
}

/// The `key=value` words of a command.
struct Options<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Options<'a> {
    fn of(words: &[&'a str]) -> Self {
        Self(words.iter().filter_map(|word| word.split_once('=')).collect())
    }

    fn number(&self, key: &str, default: usize) -> usize {
        self.0.get(key).map_or(default, |value| value.parse().expect("a number"))
    }
}

impl Scenario {
    fn new(words: &[&str]) -> Self {
        let options = Options::of(words);
        let config = EngineConfig {
            kv_blocks: options.number("blocks", 8),
            block_tokens: options.number("block_tokens", 4),
            step_tokens: options.number("step", 16),
            sequences_max: options.number("sequences", 4),
            waiting_max: options.number("waiting", 8),
            prefix_cache: options.0.get("cache") != Some(&"off"),
            ..config()
        };
        Self { engine: engine(config), names: BTreeMap::new() }
    }

    fn run(&mut self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[0] {
            "submit" => self.add(&words, |engine, spec| engine.submit(spec).map(|id| (id, String::new()))),
            "reserve" => self.add(&words, |engine, spec| {
                engine.reserve(spec).map(|reservation| (reservation.id, format!("skip {}", reservation.skip)))
            }),
            "step" => {
                let steps = words.get(1).map_or(1, |n| n.parse().expect("a number of steps"));
                (0..steps).map(|_| self.step()).collect::<Vec<_>>().join("\n")
            }
            "interrupt" => {
                self.engine.interrupt().raise();
                let report = self.step();
                self.engine.interrupt().clear();
                report
            }
            "cancel" => {
                self.engine.cancel(self.names[words[1]].0);
                String::new()
            }
            "release" => {
                self.engine.release(self.names[words[1]].0);
                String::new()
            }
            "export" => {
                let first = words[2].parse().expect("a token");
                match self.engine.export(self.names[words[1]].0, first) {
                    Ok(Some(block)) => format!("{} tokens from {}", block.tokens, block.first),
                    Ok(None) => "not sealed".to_owned(),
                    Err(error) => error.to_string(),
                }
            }
            "counts" => self.counts(),
            other => panic!("no such command: {other}"),
        }
    }

    fn add(
        &mut self,
        words: &[&str],
        how: impl Fn(&mut Engine<SimModel>, SequenceSpec) -> Result<(SequenceId, String), Error>,
    ) -> String {
        let (name, options) = (words[1], Options::of(words));
        let len = options.number("tokens", 1);
        let mut tokens = prompt(100 + self.names.len(), len);
        if let Some(other) = options.0.get("like") {
            let (_, theirs) = &self.names[*other];
            let shared = theirs.len().min(len);
            tokens[..shared].copy_from_slice(&theirs[..shared]);
        }
        let until = if words.contains(&"hold") { Until::FirstToken } else { Until::Finished };
        let mut spec = SequenceSpec { until, ..spec(tokens.clone(), options.number("max", 100)) };
        spec.sampling.prompt_logprobs = words.contains(&"report").then_some(0);
        match how(&mut self.engine, spec) {
            Ok((id, text)) => {
                self.names.insert(name.to_owned(), (id, tokens));
                text
            }
            Err(error) => error.to_string(),
        }
    }

    fn step(&mut self) -> String {
        if !self.engine.has_work() {
            return "no work".to_owned();
        }
        let report = self.engine.step();
        if report.interrupted {
            return "interrupted".to_owned();
        }
        let mut text = format!("batch: {} tokens of {}", report.batch_tokens, report.batch_sequences);
        for event in report.events {
            let name = self.names.iter().find(|(_, (id, _))| *id == event.id()).expect("a name").0;
            let event = match event {
                EngineEvent::Scheduled { cached, .. } => format!("scheduled, {cached} cached"),
                EngineEvent::Sealed { tokens, .. } => format!("sealed to {tokens}"),
                EngineEvent::Token { index, finish, prompt, .. } => {
                    let reported = prompt.map(|report| report.logprobs.len()).filter(|&tokens| tokens > 0);
                    let reported = reported.map_or(String::new(), |tokens| format!(", reports {tokens}"));
                    let finish = finish.map_or(String::new(), |finish| format!(", {finish:?}"));
                    format!("token {index}{reported}{finish}")
                }
                EngineEvent::Failed { error, .. } => error.to_string(),
            };
            write!(text, "; {name} {event}").expect("a string grows");
        }
        text
    }

    fn counts(&self) -> String {
        let (kv, sequences) = (self.engine.kv_counts(), self.engine.sequence_counts());
        format!(
            "blocks: {} free, {} cached, {} used ({} held)\nsequences: {} waiting, {} running, {} preempted, {} reserved, {} held",
            kv.free,
            kv.cached,
            kv.used,
            kv.held,
            sequences.waiting,
            sequences.running,
            sequences.preempted,
            sequences.reserved,
            sequences.held
        )
    }
}

/// Runs the commands of a file and gives the file as it should be.
fn replay(text: &str) -> String {
    let (mut out, mut scenario) = (String::new(), None);
    for line in text.lines().filter(|line| !line.starts_with("    ")) {
        out += line;
        out.push('\n');
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        if words[0] == "engine" {
            scenario = Some(Scenario::new(&words));
            continue;
        }
        let result = scenario.as_mut().expect("`engine` comes first").run(line);
        for line in result.lines() {
            writeln!(out, "    {line}").expect("a string grows");
        }
    }
    out
}

#[test]
fn scenarios_run_as_written() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
    let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 5, "scenarios are in {}", folder.display());
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        expect_file![&file].assert_eq(&replay(&text));
    }
}
