//! Scenarios: text files that read like a specification and are run against a worker's core.
//!
//! Prose stands at the margin, a command after `> `, and what the core did is indented by four spaces below it. The
//! indented part is what the test checks; `UPDATE_EXPECT=1` writes it anew. After each command the state is shown if
//! it changed, and block accounting and orphans are checked.
//!
//! Both workers' tests take this file in by its path.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use engine::sim::{SimConfig, SimModel};
use engine::{Engine, EngineConfig};
use proto::{
    Attempt, Digest, FinishReason, Generation, Handoff, HandoffId, ModelDescription, Priority, RequestId,
    SamplingParams, StopConditions, Token, TokenId, WorkerEpoch,
};
use worker::core::{Action, CallId, Core, DecodeItem, Event, FetchItem, Now, PrefillItem};
use worker::core_config::{CoreConfig, HandoffIds};

/// A command: a verb, what it is about, and `key=value` pairs.
pub(crate) struct Command<'a> {
    pub(crate) verb: &'a str,
    words: Vec<&'a str>,
    pairs: BTreeMap<&'a str, &'a str>,
}

impl<'a> Command<'a> {
    fn parse(line: &'a str) -> Self {
        let mut words = line.split_whitespace();
        let verb = words.next().expect("a verb");
        let (pairs, words): (Vec<_>, Vec<_>) = words.partition(|word| word.contains('='));
        let pairs = pairs.into_iter().filter_map(|pair| pair.split_once('=')).collect();
        Self { verb, words, pairs }
    }

    pub(crate) fn word(&self, index: usize) -> &'a str {
        self.words.get(index).unwrap_or_else(|| panic!("{}: word {index} is missing", self.verb))
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a str> {
        self.pairs.get(key).copied()
    }

    pub(crate) fn number(&self, key: &str) -> Option<usize> {
        self.get(key).map(|value| value.parse().unwrap_or_else(|_| panic!("{key}: {value} is no number")))
    }

    pub(crate) fn call(&self, index: usize) -> CallId {
        CallId(self.word(index).parse().expect("the number of a call"))
    }

    /// A request and its attempt: `a.2`.
    pub(crate) fn attempt(&self, index: usize) -> (RequestId, Attempt) {
        let (request, attempt) = self.word(index).split_once('.').expect("request.attempt");
        (request.into(), Attempt(attempt.parse().expect("the number of an attempt")))
    }

    /// The sequence that a call asks for: `a.0 tokens=10 max=4 text=other time=60s`.
    pub(crate) fn generation(&self, index: usize) -> Generation {
        let (request, attempt) = self.attempt(index);
        let text = self.get("text").unwrap_or(&request.0).to_owned();
        Generation {
            request,
            attempt,
            model: self.get("model").unwrap_or("sim").to_owned(),
            tokens: text_tokens(&text, self.number("tokens").unwrap_or(10)),
            generated: self.number("generated").unwrap_or(0),
            sampling: SamplingParams {
                top_k: self.number("top_k").map(|k| k as u32),
                ..SamplingParams::default()
            },
            stop: StopConditions { max_tokens: self.number("max").unwrap_or(8), ..StopConditions::default() },
            time_left: self.get("time").map_or(Duration::from_mins(1), duration),
            probe: false,
            beside: None,
            session: None,
            priority: Priority::default(),
        }
    }

    /// The reference `known`, changed as the command says.
    pub(crate) fn forge(&self, known: &Handoff) -> Handoff {
        let mut handoff = known.clone();
        for (&key, &value) in &self.pairs {
            match key {
                "id" => handoff.id = HandoffId([value.parse().expect("a byte"); 16]),
                "epoch" => handoff.epoch = WorkerEpoch(value.parse().expect("an epoch")),
                "request" => handoff.request = value.into(),
                "attempt" => handoff.attempt = Attempt(value.parse().expect("an attempt")),
                "fingerprint" => handoff.fingerprint = Digest([value.parse().expect("a byte"); 32]),
                "heads" => handoff.layout.kv_heads = value.parse().expect("a number"),
                "hold_tokens" => handoff.tokens = value.parse().expect("a number"),
                _ => {}
            }
        }
        handoff
    }
}

/// `10s` or `250ms`.
pub(crate) fn duration(text: &str) -> Duration {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).expect("a unit"));
    let number = number.parse().expect("a number");
    match unit {
        "s" => Duration::from_secs(number),
        "ms" => Duration::from_millis(number),
        _ => panic!("{text}: s or ms expected"),
    }
}

/// Token ids that depend on the text's name alone, so that equal names share prefixes.
pub(crate) fn text_tokens(name: &str, len: usize) -> Vec<TokenId> {
    let seed = name.bytes().fold(7u32, |seed, byte| seed.wrapping_mul(31).wrapping_add(u32::from(byte)));
    let mix = |i: u32| (seed.wrapping_mul(0x9E37_79B1) ^ i).wrapping_mul(0x85EB_CA6B).rotate_left(9);
    (0..len as u32).map(|i| mix(i) % 256).collect()
}

/// An engine over the simulated model: `blocks=16 block=4 step=8 waiting=2 sequences=4 cache=off heads=1`.
pub(crate) fn engine(command: &Command<'_>) -> Engine<SimModel> {
    let number = |key, default| command.number(key).unwrap_or(default);
    let model = SimConfig { kv_heads: number("heads", 1), ..SimConfig::default() };
    let config = EngineConfig {
        kv_blocks: number("blocks", 16),
        block_tokens: number("block", 4),
        step_tokens: number("step", 8),
        sequences_max: number("sequences", 4),
        waiting_max: number("waiting", 2),
        prefix_seed: Digest([1; 32]),
        prefix_cache: command.get("cache") != Some("off"),
    };
    Engine::new(SimModel::new(model), config).expect("a valid configuration")
}

/// `address=p:1 epoch=1 fingerprint=1`.
pub(crate) fn core_config(command: &Command<'_>) -> CoreConfig {
    let model = ModelDescription {
        name: "sim".to_owned(),
        fingerprint: Digest([command.number("fingerprint").unwrap_or(1) as u8; 32]),
        tokenizer: Digest([2; 32]),
        context_len: SimConfig::default().context_len,
        vocab_size: SimConfig::default().vocab,
        numerics: "sim".to_owned(),
    };
    let epoch = WorkerEpoch(command.number("epoch").unwrap_or(1) as u64);
    let mut config = CoreConfig::new(command.get("address").unwrap_or("here:1"), epoch, model);
    // The same ids in every life: only the epoch tells references apart.
    config.handoff_ids = HandoffIds::Seeded(1);
    config
}

/// A core under test, with what the script knows of it.
pub(crate) struct Stage<C> {
    pub(crate) core: C,
    pub(crate) now: Now,
    /// References by the name that the script shows: H1, H2 ...
    pub(crate) handoffs: Vec<Handoff>,
    state: String,
}

impl<C: Core> Stage<C> {
    pub(crate) fn new(core: C) -> Self {
        Self { core, now: Now::ZERO, handoffs: Vec::new(), state: String::new() }
    }

    /// The reference called `H1`, `H2` ..., changed as the command says.
    pub(crate) fn handoff(&self, command: &Command<'_>, index: usize) -> Handoff {
        command.forge(self.named(command.word(index)))
    }

    fn named(&self, name: &str) -> &Handoff {
        let number: usize = name.strip_prefix('H').and_then(|n| n.parse().ok()).expect("H and a number");
        &self.handoffs[number - 1]
    }

    /// Carries out the commands that both workers know; false when it is none of them.
    pub(crate) fn run(&mut self, command: &Command<'_>, out: &mut Vec<Action>) -> bool {
        let event = match command.verb {
            "prefill" => Event::Prefill { call: command.call(0), generation: command.generation(1) },
            "decode" => {
                let handoff = command.get("from").map(|name| command.forge(self.named(name)));
                Event::Decode { call: command.call(0), generation: command.generation(1), handoff }
            }
            "fetch" => {
                let skip = command.number("skip").unwrap_or(0);
                Event::Fetch { call: command.call(0), handoff: self.handoff(command, 1), skip }
            }
            "credit" => {
                let items = command.word(1).parse().expect("a number of items");
                Event::FetchCredit { call: command.call(0), items }
            }
            "renew" => Event::Renew { call: command.call(0), handoff: self.handoff(command, 1) },
            "release" => Event::Release { handoff: self.handoff(command, 0) },
            "fence" => {
                let (request, attempt) = command.attempt(0);
                Event::Fence { request, attempt }
            }
            "move" => {
                let (request, attempt) = command.attempt(0);
                Event::Move { request, attempt }
            }
            "drop" => Event::Dropped { call: command.call(0) },
            "drain" => Event::Drain,
            "step" => {
                self.core.step(&|| self.now, out);
                return true;
            }
            "interrupted" => {
                self.core.interrupt().raise();
                self.core.step(&|| self.now, out);
                return true;
            }
            "run" => {
                while self.core.step(&|| self.now, out).is_some() {}
                return true;
            }
            "wait" => {
                self.wait(duration(command.word(0)), out);
                return true;
            }
            // Time passes and nobody is there to notice.
            "sleep" => {
                self.now += duration(command.word(0));
                return true;
            }
            _ => return false,
        };
        self.core.on(event, self.now, out);
        true
    }

    /// Lets time pass with no traffic: nothing happens but the wakes that the core asked for.
    fn wait(&mut self, time: Duration, out: &mut Vec<Action>) {
        let end = self.now + time;
        while let Some(wake) = self.core.next_wake().filter(|&wake| wake <= end) {
            self.now = self.now.max(wake);
            self.core.on(Event::Tick, self.now, out);
            assert!(
                self.core.next_wake().is_none_or(|next| next > self.now),
                "a wake that was served is over"
            );
        }
        self.now = end;
    }

    /// What the core did, and its state if that changed.
    pub(crate) fn show(&mut self, actions: Vec<Action>, check: Result<(), String>) -> String {
        let mut shown = String::new();
        for action in actions {
            let line = self.show_action(action);
            writeln!(shown, "    {line}").expect("a string");
        }
        check.expect("block accounting");
        let gauges = self.core.gauges();
        assert_eq!(gauges.orphaned_blocks, 0, "orphans after:\n{shown}");
        let (blocks, sequences) = (gauges.blocks, gauges.sequences);
        assert_eq!(blocks.free + blocks.cached + blocks.used, blocks.total);
        let state = format!(
            "    [blocks: {} used, {} cached; sequences: {} waiting, {} running, {} reserved, {} held; {} leases{}]\n",
            blocks.used,
            blocks.cached,
            sequences.waiting + sequences.preempted,
            sequences.running,
            sequences.reserved,
            sequences.held,
            gauges.leases,
            if self.core.is_idle() { "; idle" } else { "" }
        );
        if state != self.state {
            shown.push_str(&state);
            self.state = state;
        }
        shown
    }

    /// The name of a reference.
    fn name(&self, handoff: &Handoff) -> String {
        let exact = self.handoffs.iter().position(|known| known == handoff);
        let similar = || self.handoffs.iter().position(|known| known.id == handoff.id);
        match (exact, exact.or_else(similar)) {
            (Some(index), _) => format!("H{}", index + 1),
            (None, Some(index)) => format!("what was made of H{}", index + 1),
            (None, None) => "an unknown reference".to_owned(),
        }
    }

    fn show_action(&mut self, action: Action) -> String {
        match action {
            Action::Prefill { call, item: PrefillItem::Issued { handoff, cached_tokens, queue_wait } } => {
                self.handoffs.push(handoff.clone());
                format!(
                    "{}: issued H{} for {} tokens of {}.{}, {cached_tokens} cached, waited {queue_wait:?}",
                    call.0,
                    self.handoffs.len(),
                    handoff.tokens,
                    handoff.request,
                    handoff.attempt.0
                )
            }
            Action::Prefill { call, item: PrefillItem::Done { token, prefill } } => {
                format!("{}: done after {prefill:?}: {}", call.0, show_token(&token))
            }
            Action::Decode { call, item: DecodeItem::Admitted { skipped_tokens } } => {
                format!("{}: admitted, {skipped_tokens} tokens skipped", call.0)
            }
            Action::Decode { call, item: DecodeItem::Moved { handoff } } => {
                self.handoffs.push(handoff.clone());
                format!(
                    "{}: moved: H{} for {} tokens of {}.{}",
                    call.0,
                    self.handoffs.len(),
                    handoff.tokens,
                    handoff.request,
                    handoff.attempt.0
                )
            }
            Action::Decode { call, item: DecodeItem::Token(token) } => {
                format!("{}: {}", call.0, show_token(&token))
            }
            Action::Fetch { call, item } => format!("{}: {}", call.0, show_item(&item)),
            Action::Close { call, error: None } => format!("{}: closed", call.0),
            Action::Close { call, error: Some(error) } => format!("{}: closed: {error}", call.0),
            Action::Renewed { call, result: Ok(ttl) } => format!("{}: renewed for {ttl:?}", call.0),
            Action::Renewed { call, result: Err(error) } => format!("{}: not renewed: {error}", call.0),
            Action::StartFetch { call, handoff, skip, time_left } => {
                let name = self.name(&handoff);
                format!("fetch {} of {name} from token {skip} on, within {time_left:?}", call.0)
            }
            Action::DropFetch { call } => format!("give up fetch {}", call.0),
            Action::Renew { call, handoff } => format!("renew {} for fetch {}", self.name(&handoff), call.0),
            Action::Release { handoff } => format!("release {}", self.name(&handoff)),
        }
    }
}

fn show_token(token: &Token) -> String {
    let finish = match token.finish {
        None => "",
        Some(FinishReason::Eos) => ", the last (eos)",
        Some(FinishReason::StopToken) => ", the last (stop token)",
        Some(FinishReason::Length) => ", the last (length)",
        Some(FinishReason::Grammar) => ", the last (grammar)",
    };
    format!(
        "token {} is {}, batch {}, waited {:?}{finish}",
        token.index, token.id, token.batch_size, token.queue_wait
    )
}

fn show_item(item: &FetchItem) -> String {
    match item {
        FetchItem::Header { skip, tokens, layout } => {
            format!("header: {tokens} tokens, from {skip} on, in blocks of {}", layout.block_tokens)
        }
        FetchItem::Block(block) => format!("kv of tokens {}..{}", block.first, block.first + block.tokens),
        FetchItem::End { first_token, .. } => format!("end: first token {first_token}"),
    }
}

/// Runs a scenario: `perform` carries out a command and returns what to show. Returns the scenario with what was
/// shown in it.
pub(crate) fn play(script: &str, mut perform: impl FnMut(&Command<'_>) -> String) -> String {
    let mut shown = String::new();
    for line in script.lines().filter(|line| !line.starts_with("    ")) {
        writeln!(shown, "{line}").expect("a string");
        if let Some(command) = line.strip_prefix("> ") {
            shown.push_str(&perform(&Command::parse(command)));
        }
    }
    shown
}

/// Runs a scenario file, which must come out as it is.
pub(crate) fn check(path: &Path, perform: impl FnMut(&Command<'_>) -> String) {
    let script = std::fs::read_to_string(path).expect("a scenario file");
    expect_test::expect_file![path].assert_eq(&play(&script, perform));
}

/// What comes of the scenario `script`, which starts in a world made by `new`. A failed check counts as well.
#[cfg(feature = "planted")]
pub(crate) fn outcome<W>(
    script: &str,
    new: fn() -> W,
    perform: fn(&mut W, &Command<'_>) -> String,
) -> String {
    let run = std::panic::AssertUnwindSafe(|| {
        let mut world = new();
        play(script, |command| perform(&mut world, command))
    });
    std::panic::catch_unwind(run).unwrap_or_else(|_| "a check failed".to_owned())
}
