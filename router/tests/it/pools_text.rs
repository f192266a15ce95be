//! `testdata/pools.txt`: what pools are told, and what they make of it.

use expect_test::expect_file;
use proto::{Digest, Error, KvDtype, ModelDescription, WorkerEpoch};
use router::pools::{Change, ChangeKind, Placement, PlacementMode, Pools};

use crate::script::{self, Command};

#[derive(Default)]
struct Scene {
    pools: Pools,
    /// Placements that are still held, by name.
    held: Vec<Placement>,
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
                let members = names.iter().map(|name| (script::role(name), *name));
                self.pools.set_members(members).iter().map(shown).collect()
            }
            ["describe", names @ ..] => names.iter().flat_map(|name| self.describe(name, command)).collect(),
            ["lost", name] => {
                let error = Error::new(script::reason("WORKER_LOST"), "connection refused");
                self.pools.lost(name, error).iter().map(shown).collect()
            }
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

    fn place(&mut self, command: &Command<'_>) -> String {
        let mode: PlacementMode = command.get("mode").unwrap_or_default();
        let model = command.get("model").unwrap_or_else(|| "m".to_owned());
        let failed = command.list("failed").unwrap_or_default();
        let beside = command.get::<String>("beside").map(|place| script::placed(&place));
        match self.pools.place(&model, mode, &failed, beside.as_ref()) {
            Ok(placement) => {
                let prefill = placement.prefill.as_ref().map(|worker| format!("{} → ", worker.address));
                let line = format!("{}{}", prefill.unwrap_or_default(), placement.decode.address);
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

fn shown(change: &Change) -> String {
    let Change { address, role, kind } = change;
    let role = role.name();
    match kind {
        ChangeKind::Joined => format!("{role} {address} joined"),
        ChangeKind::Left => format!("{role} {address} left"),
        ChangeKind::Live(epoch) => format!("{role} {address} is live in epoch {}", epoch.0),
        ChangeKind::Restarted(epoch) => format!("{role} {address} was restarted: epoch {}", epoch.0),
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
