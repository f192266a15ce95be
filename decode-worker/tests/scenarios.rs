//! The decode worker's core against the scenarios in `testdata`.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use decode_worker::core::DecodeCore;
use engine::sim::SimModel;
use engine::{Engine, EngineEvent, SequenceSpec, Until};
use proto::{Digest, Error, Handoff, HandoffId, Reason, TokenId, WorkerEpoch};
use worker::core::{Action, CallId, Core, Event, FetchItem};
use worker::sending::{Sending, Source};

#[path = "../../worker/tests/scenario/mod.rs"]
mod scenario;

use scenario::{Command, Stage, core_config, duration, engine};

/// A prefill worker's half, as far as a fetch needs it.
struct Owner {
    engine: Engine<SimModel>,
    source: Source,
}

impl Owner {
    /// Computes a prompt and holds its KV.
    fn new(command: &Command<'_>, id: HandoffId) -> (Self, Handoff) {
        let generation = command.generation(0);
        let mut engine = engine(command);
        let tokens: std::sync::Arc<[TokenId]> = generation.tokens.as_slice().into();
        let handoff = Handoff {
            owner: "there:1".to_owned(),
            epoch: WorkerEpoch(7),
            request: generation.request,
            attempt: generation.attempt,
            id,
            fingerprint: Digest([1; 32]),
            layout: engine.layout(),
            tokens: tokens.len(),
        };
        let spec = SequenceSpec {
            tokens: generation.tokens,
            generated: generation.generated,
            sampling: generation.sampling,
            stop: generation.stop,
            until: Until::FirstToken,
        };
        let sequence = engine.submit(spec).expect("a sequence that fits");
        let mut first_token = None;
        while engine.has_work() {
            for event in engine.step().events {
                if let EngineEvent::Token { token, .. } = event {
                    first_token = Some(token);
                }
            }
        }
        let source = Source { sequence, handoff: id, tokens, first_token };
        (Self { engine, source }, handoff)
    }

    /// Everything that a fetch gets.
    fn items(&self, skip: usize) -> VecDeque<FetchItem> {
        let mut sending =
            Sending::new(CallId(0), self.source.clone(), skip, self.engine.layout().block_tokens);
        sending.add_credit(usize::MAX);
        let mut actions = Vec::new();
        sending.pump(&self.engine, &mut actions).expect("a held sequence");
        let item = |action| match action {
            Action::Fetch { item, .. } => item,
            other => panic!("an item expected, {other:?} came"),
        };
        actions.into_iter().map(item).collect()
    }
}

#[derive(Default)]
struct Script {
    stage: Option<Stage<DecodeCore<SimModel>>>,
    owners: BTreeMap<HandoffId, Owner>,
    /// Items on their way, by fetch.
    fetches: BTreeMap<CallId, VecDeque<FetchItem>>,
    /// The last item that arrived.
    last: Option<FetchItem>,
}

impl Script {
    fn perform(&mut self, command: &Command<'_>) -> String {
        if command.verb == "worker" {
            let mut fresh = Stage::new(DecodeCore::new(engine(command), core_config(command)));
            if let Some(before) = self.stage.take() {
                (fresh.now, fresh.handoffs) = (before.now, before.handoffs);
            }
            self.stage = Some(fresh);
        }
        let mut actions = Vec::new();
        self.command(command, &mut actions);
        for action in &actions {
            if let Action::StartFetch { call, handoff, skip, .. } = action {
                let items = self.owners.get(&handoff.id).map(|owner| owner.items(*skip));
                self.fetches.insert(*call, items.unwrap_or_default());
            }
        }
        let stage = self.stage.as_mut().expect("a worker");
        let check = stage.core.engine().check();
        stage.show(actions, check)
    }

    fn command(&mut self, command: &Command<'_>, out: &mut Vec<Action>) {
        let stage = self.stage.as_mut().expect("a worker first");
        let now = stage.now;
        match command.verb {
            "worker" => {}
            "owner" => {
                let id = HandoffId([stage.handoffs.len() as u8 + 1; 16]);
                let (owner, handoff) = Owner::new(command, id);
                stage.handoffs.push(handoff);
                self.owners.insert(id, owner);
            }
            "lose" => {
                self.fetches.get_mut(&command.call(0)).expect("a fetch").pop_front().expect("an item");
            }
            "arrive" => {
                let call = command.call(0);
                let mut item =
                    self.fetches.get_mut(&call).expect("a fetch").pop_front().expect("an item on its way");
                change(&mut item, command);
                self.last = Some(item.clone());
                stage.core.on(Event::Fetched { call, item }, now, out);
            }
            "rest" => {
                let call = command.call(0);
                for item in self.fetches.remove(&call).expect("a fetch") {
                    stage.core.on(Event::Fetched { call, item }, now, out);
                }
            }
            "again" => {
                let item = self.last.clone().expect("an item that arrived");
                stage.core.on(Event::Fetched { call: command.call(0), item }, now, out);
            }
            "fail" => {
                let event = Event::FetchFailed { call: command.call(0), error: reason(command.word(1)) };
                stage.core.on(event, now, out);
            }
            "answer" => {
                let result = match command.word(1) {
                    "ok" => Ok(duration("10s")),
                    name => Err(reason(name)),
                };
                stage.core.on(Event::RenewAnswered { call: command.call(0), result }, now, out);
            }
            verb => assert!(stage.run(command, out), "unknown command {verb}"),
        }
    }
}

/// A reason by its stable name.
fn reason(name: &str) -> Error {
    Error::new(Reason::from_name(name).expect("the name of a reason"), "said the peer")
}

/// Damages an item as the command says.
fn change(item: &mut FetchItem, command: &Command<'_>) {
    match item {
        FetchItem::Header { skip, tokens, layout } => {
            *skip = command.number("skip").unwrap_or(*skip);
            *tokens = command.number("announce").unwrap_or(*tokens);
            layout.kv_heads = command.number("heads").unwrap_or(layout.kv_heads);
        }
        FetchItem::Block(block) => {
            if let Some(byte) = command.number("flip") {
                block.slabs[byte] ^= 1;
            }
            if let Some(len) = command.number("cut") {
                block.slabs.truncate(len);
            }
            if let Some(layers) = command.number("layers") {
                block.checksums.truncate(layers);
            }
            block.tokens = command.number("claim").unwrap_or(block.tokens);
        }
        FetchItem::End { first_token, digest } => {
            *first_token = command.number("first_token").map_or(*first_token, |token| token as TokenId);
            if let Some(byte) = command.number("digest") {
                *digest = Digest([byte as u8; 32]);
            }
        }
    }
}

fn check(name: &str) {
    let mut script = Script::default();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name);
    scenario::check(&path, |command| script.perform(command));
}

#[test]
fn hand_off() {
    check("hand_off.txt");
}

#[test]
fn proof() {
    check("proof.txt");
}

#[test]
fn admission() {
    check("admission.txt");
}

#[test]
fn cancel() {
    check("cancel.txt");
}

#[test]
fn renewal() {
    check("renewal.txt");
}

#[test]
fn fused() {
    check("fused.txt");
}

#[test]
fn moving() {
    check("moving.txt");
}

/// A planted bug that no scenario sees would be none.
#[cfg(feature = "planted")]
mod planted {
    use worker::planted::{Bug, engine_bugs, with};

    use super::{Script, scenario};

    fn outcome(script: &str) -> String {
        scenario::outcome(script, Script::default, Script::perform)
    }

    fn check(bug: Bug, script: &str) {
        assert_ne!(outcome(script), with(bug, || outcome(script)), "{bug:?}");
    }

    fn check_engine(bug: engine_bugs::Bug, script: &str) {
        assert_ne!(outcome(script), engine_bugs::with(bug, || outcome(script)), "{bug:?}");
    }

    const WORKER: &str = "> worker blocks=16 block=4 step=8\n> owner a.0 tokens=10\n";
    const DECODE: &str = "> decode 2 a.0 tokens=10 time=5s from=H1\n";

    #[test]
    fn each_changes_what_a_worker_does() {
        let other_fills_it = "> owner b.0 tokens=56\n> decode 4 b.0 tokens=56 from=H2\n";
        check(Bug::ReleaseIgnoredOnReject, &format!("{WORKER}{other_fills_it}{DECODE}"));
        check(Bug::TokenBeforeProof, &format!("{WORKER}{DECODE}> rest 1"));
        check(Bug::DeadlineNotCheckedInTransfer, &format!("{WORKER}{DECODE}> wait 5s"));
        let moved = format!("{WORKER}> decode 2 a.0 tokens=10 from=H1\n> rest 1\n> step\n> move a.0\n");
        check(Bug::MovedTokenBefore, &format!("{moved}> fetch 4 H2\n> credit 4 9"));
        check(Bug::MovedWithoutLease, &format!("{moved}> wait 10s"));
        check(Bug::FenceSparesMoved, &format!("{moved}> fence a.1"));
        check(Bug::IdleWhileHolding, &moved);
    }

    #[test]
    fn each_of_the_engine_lets_something_through() {
        use engine_bugs::Bug as EngineBug;
        let flipped = format!("{WORKER}{DECODE}> arrive 1\n> arrive 1 flip=3\n> rest 1\n> run");
        check_engine(EngineBug::ImportWithoutChecksum, &flipped);
        let lies = "> arrive 1\n> arrive 1\n> arrive 1\n> arrive 1\n> arrive 1 digest=5\n> run";
        check_engine(EngineBug::ActivateWithoutProof, &format!("{WORKER}{DECODE}{lies}"));
        let unproven = format!("{WORKER}{DECODE}> arrive 1\n> arrive 1\n> drop 2");
        check_engine(EngineBug::CacheBeforeProof, &unproven);
    }
}
