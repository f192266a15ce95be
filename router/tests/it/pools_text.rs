//! `testdata/pools.txt`: what pools are told, and what they make of it.

use std::time::Duration;

use expect_test::expect_file;
use proto::{Digest, Error, HashChain, KvDtype, ModelDescription, TokenId, WorkerEpoch, WorkerLoad};
use router::cost::Observation;
use router::follow::Effect;
use router::policy::name_hash;
use router::pools::{Change, ChangeKind, NamedBlocks, PlacedWorker, Placement, Pools, Wish, WorkerView};

use crate::script::{self, Command};

#[derive(Default)]
struct Scene {
    pools: Pools,
    /// Placements that are still held, by name.
    held: Vec<Placement>,
    now: Duration,
}

impl Scene {
    fn run(&mut self, command: &Command<'_>) -> Vec<String> {
        match command.words().as_slice() {
            ["new"] => {
                let policy = command.get("policy").unwrap_or_default();
                *self = Self {
                    pools: Pools::with_policy(policy, command.get("seed").unwrap_or(0)),
                    ..Self::default()
                };
                vec!["ok".into()]
            }
            ["members", names @ ..] => {
                // `d1` is listed for the role that its name says, `d1/prefill` for another.
                let members = names.iter().map(|name| match name.split_once('/') {
                    Some((name, role)) => (script::role(role), name),
                    None => (script::role(name), *name),
                });
                self.pools.set_members(members).iter().map(shown).collect()
            }
            ["describe", names @ ..] => names.iter().flat_map(|name| self.describe(name, command)).collect(),
            ["lost", name] => {
                let error = Error::new(script::reason("WORKER_LOST"), "connection refused");
                self.pools.lost(name, error).iter().map(shown).collect()
            }
            ["load", names @ ..] => {
                names.iter().for_each(|name| self.report(name, command));
                vec!["ok".into()]
            }
            ["has", name] => {
                let blocks = self.named(command, command.get("blocks").unwrap_or(0) * 16).blocks;
                self.pools.has_blocks(name, &blocks);
                vec![format!("{} blocks known", self.pools.index().blocks())]
            }
            ["forgets", name] => {
                self.pools.heard(name, &Effect::Forget);
                vec!["ok".into()]
            }
            ["seen"] => {
                let us = |key: &str, tokens: u64| {
                    Duration::from_micros(command.get::<u64>(key).unwrap_or(0) * tokens)
                };
                for tokens in [16, 32, 64, 128, 256, 512, 1024, 2048] {
                    let took = us("prefill_us", tokens as u64);
                    self.pools.observe("m", Observation::Prefill { tokens, took });
                    let took = us("hop_us", 1) + us("transfer_us", tokens as u64);
                    self.pools.observe("m", Observation::Hop { tokens, took });
                }
                if let Some(took) = command.get::<u64>("decode_ms").map(Duration::from_millis) {
                    (0..8).for_each(|_| self.pools.observe("m", Observation::Decode { took }));
                }
                vec!["ok".into()]
            }
            ["at", time] => {
                self.now = script::duration(time);
                vec!["ok".into()]
            }
            ["fails", name] => {
                let changed = self.pools.failed(name, self.now);
                vec![if changed { "its circuit opens" } else { "ok" }.into()]
            }
            ["does", name] => {
                let changed = self.pools.succeeded(name, self.now);
                vec![if changed { "its circuit closes" } else { "ok" }.into()]
            }
            ["expect"] => {
                let named = [self.named(command, command.get("tokens").unwrap_or(3))];
                let wish = Wish {
                    model: "m",
                    mode: command.get("mode").unwrap_or_default(),
                    failed: &[],
                    beside: None,
                    tokens: command.get("tokens").unwrap_or(3),
                    blocks: &named,
                    session: None,
                    now: self.now,
                };
                let shown = |expected: Option<Duration>| match expected {
                    Some(expected) => format!("{:.1} s", expected.as_secs_f64()),
                    None => "nothing is known".into(),
                };
                let (first_token, room) = (self.pools.first_token_in(&wish), self.pools.room_in(&wish));
                vec![format!("first token: {}, room: {}", shown(first_token), shown(room))]
            }
            ["views"] => self.pools.views().map(|view| viewed(&view)).collect(),
            ["place"] => vec![self.place(command)],
            ["release"] => {
                self.held.clear();
                vec!["ok".into()]
            }
            ["loads", names @ ..] => {
                names.iter().map(|name| format!("{name}: {}", self.pools.load(name))).collect()
            }
            ["states"] => {
                let counts = self.pools.counts();
                let shown = |((role, state), count): (&(proto::Role, router::pools::WorkerState), &usize)| {
                    format!("{} {}: {count}", role.name(), state.name())
                };
                counts.iter().map(shown).collect()
            }
            ["models"] => {
                let mode = command.get("mode").unwrap_or_default();
                let shown = |model: ModelDescription| format!("{}, {} tokens", model.name, model.context_len);
                self.pools.served_models(mode).into_iter().map(shown).collect()
            }
            ["addresses"] => self.pools.live_addresses(),
            words => panic!("no such command: {words:?}"),
        }
    }

    fn describe(&mut self, name: &str, command: &Command<'_>) -> Vec<String> {
        let mut description = script::description(name);
        let digest = |byte: u8| Digest([byte; 32]);
        if let Some(byte) = command.get("fingerprint") {
            description.model.fingerprint = digest(byte);
        }
        if let Some(byte) = command.get("tokenizer") {
            description.model.tokenizer = digest(byte);
        }
        if command.get::<String>("dtype").as_deref() == Some("f32") {
            description.layout.dtype = KvDtype::F32;
        }
        if let Some(role) = command.get::<String>("role") {
            description.role = script::role(&role);
        }
        description.layout.layers = command.get("layers").unwrap_or(description.layout.layers);
        description.layout.block_tokens =
            command.get("block_tokens").unwrap_or(description.layout.block_tokens);
        description.protocol = command.get("protocol").unwrap_or(description.protocol);
        description.epoch = WorkerEpoch(command.get("epoch").unwrap_or(1));
        description.model.context_len = command.get("context").unwrap_or(description.model.context_len);
        description.draining = command.get("draining").unwrap_or(false);
        description.model.name = command.get("model").unwrap_or(description.model.name);
        self.pools.described(name, description).iter().map(shown).collect()
    }

    /// The blocks of a prompt of that name, cut at so many tokens.
    fn named(&self, command: &Command<'_>, tokens: usize) -> NamedBlocks {
        let prompt = name_hash(&command.get::<String>("prompt").unwrap_or_default()) as TokenId;
        let tokens: Vec<TokenId> = (0..tokens).map(|at| prompt.wrapping_add(at as TokenId)).collect();
        let chain = self.pools.chains("m").first().cloned();
        NamedBlocks::of(chain.unwrap_or_else(|| HashChain::new(Digest::default(), 16)), &tokens)
    }

    fn report(&mut self, name: &str, command: &Command<'_>) {
        let load = WorkerLoad {
            waiting: command.get("waiting").unwrap_or(0),
            running: command.get("running").unwrap_or(0),
            waiting_tokens: command.get("waiting_tokens").unwrap_or(0),
            running_tokens: command.get("running_tokens").unwrap_or(0),
            blocks_free: command.get("free").unwrap_or(100),
            blocks_total: 100,
            draining: false,
        };
        self.pools.reported(name, WorkerEpoch(command.get("epoch").unwrap_or(1)), load);
    }

    fn place(&mut self, command: &Command<'_>) -> String {
        let mode = command.get("mode").unwrap_or_default();
        let model = command.get("model").unwrap_or_else(|| "m".to_owned());
        let failed = command.list("failed").unwrap_or_default();
        let beside = command.get::<String>("beside").map(|place| script::placed(&place));
        let session = command.get::<String>("session");
        let tokens = command.get("tokens").unwrap_or(3);
        let named = [self.named(command, tokens)];
        let wish = Wish {
            model: &model,
            mode,
            failed: &failed,
            beside: beside.as_ref(),
            tokens,
            blocks: &named,
            session: session.as_deref(),
            now: self.now,
        };
        match self.pools.place(&wish) {
            Ok(placement) => {
                let at = |worker: &PlacedWorker| match worker.cached_tokens {
                    0 => worker.address.clone(),
                    cached => format!("{} ({cached} cached)", worker.address),
                };
                let prefill = placement.prefill.as_ref().map(|worker| format!("{} → ", at(worker)));
                let line = format!("{}{}", prefill.unwrap_or_default(), at(&placement.decode));
                self.held.push(placement);
                line
            }
            Err(unplaceable) => {
                let settled = if unplaceable.settled { ", for good" } else { "" };
                format!("{}{settled}: {}", unplaceable.error.reason, unplaceable.error.message)
            }
        }
    }
}

fn viewed(view: &WorkerView) -> String {
    let WorkerLoad { waiting, running, waiting_tokens, running_tokens, blocks_free, blocks_total, .. } =
        view.load;
    let reported = if view.is_reported { "" } else { ", by what was placed" };
    format!(
        "{} {} {} {}: {waiting} wait ({waiting_tokens} tokens), {running} run ({running_tokens} tokens), \
         {blocks_free} of {blocks_total} blocks free{reported}",
        view.role.name(),
        view.address,
        view.model.as_deref().unwrap_or("?"),
        view.state.name(),
    )
}

fn shown(change: &Change) -> String {
    let Change { address, role, kind } = change;
    let role = role.name();
    match kind {
        ChangeKind::Joined => format!("{role} {address} joined"),
        ChangeKind::Left => format!("{role} {address} left"),
        ChangeKind::Live(epoch) => format!("{role} {address} is live in epoch {}", epoch.0),
        ChangeKind::Restarted(epoch) => format!("{role} {address} was restarted: epoch {}", epoch.0),
        ChangeKind::Turned { from } => format!("{role} {address} was a {} worker before", from.name()),
        ChangeKind::Draining => format!("{role} {address} drains"),
        ChangeKind::Absent(error) => format!("{role} {address} does not answer yet: {}", error.message),
        ChangeKind::Lost(error) => format!("{role} {address} is lost: {}", error.message),
        ChangeKind::Refused(error) => format!("{role} {address} is refused: {error}"),
    }
}

#[test]
fn pools() {
    replayed(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/pools.txt"));
}

#[test]
fn policies() {
    replayed(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/policies.txt"));
}

fn replayed(path: &str) {
    let text = std::fs::read_to_string(path).expect("the scenario file");
    let mut scene = Scene::default();
    let fresh = script::replay(&text, |command| scene.run(command));
    expect_file![path].assert_eq(&fresh);
}
