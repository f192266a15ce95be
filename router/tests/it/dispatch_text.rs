//! `testdata/dispatch/*.txt`: events of a dispatch, and its actions.

use std::time::Duration;

use expect_test::expect_file;
use proto::{
    Attempt, Digest, Error, FinishReason, Generation, Handoff, HandoffId, KvDtype, KvLayout, Priority,
    SamplingParams, StopConditions, Token, WorkerEpoch,
};
use router::dispatch::{Action, Dispatch, DispatchConfig, Emission, Event};
use router::pools::Pools;

use crate::script::{self, Command};

/// A dispatch, its pools and its clock.
struct Scene {
    pools: Pools,
    dispatch: Option<Dispatch>,
    config: DispatchConfig,
    now: Duration,
    wake: Option<Duration>,
    asked: Generation,
    /// The attempt that events are about unless they say another.
    attempt: u32,
    /// The index that the next token has unless it says another.
    index: usize,
}

impl Scene {
    fn new() -> Self {
        Self {
            pools: Pools::new(),
            dispatch: None,
            config: DispatchConfig::default(),
            now: Duration::ZERO,
            wake: None,
            asked: generation(&Command::parse("")),
            attempt: 0,
            index: 0,
        }
    }

    fn run(&mut self, command: &Command<'_>) -> Vec<String> {
        match command.words().as_slice() {
            ["workers", names @ ..] => {
                *self = Self::new();
                self.configure(command);
                self.pools.set_members(names.iter().map(|name| (script::role(name), *name)));
                for name in names {
                    self.pools.described(name, script::description(name));
                }
                vec!["ok".into()]
            }
            ["start"] => {
                self.asked = generation(command);
                self.attempt = self.asked.attempt.0;
                self.index = self.asked.generated;
                self.dispatch = Some(Dispatch::new(self.asked.clone(), self.config));
                self.feed(Event::Start)
            }
            ["lost", name] => {
                self.pools.lost(name, Error::new(script::reason("WORKER_LOST"), "connection refused"));
                self.feed(Event::PoolsChanged)
            }
            ["live", name] => {
                self.pools.described(name, script::description(name));
                self.feed(Event::PoolsChanged)
            }
            ["draining", name] => {
                let mut description = script::description(name);
                description.draining = true;
                self.pools.described(name, description);
                self.feed(Event::PoolsChanged)
            }
            ["join", name] => {
                let mut names: Vec<String> = self.pools.live_addresses();
                names.push((*name).to_owned());
                self.pools.set_members(names.iter().map(|name| (script::role(name), name.as_str())));
                self.pools.described(name, script::description(name));
                self.feed(Event::PoolsChanged)
            }
            ["after", time] => {
                self.now += script::duration(time);
                if self.wake.is_some_and(|wake| wake <= self.now) {
                    self.feed(Event::Tick)
                } else {
                    Vec::new()
                }
            }
            ["client", "gone"] => self.feed(Event::ClientGone),
            ["tick"] => self.feed(Event::Tick),
            _ => {
                let event = self.call_event(command);
                self.feed(event)
            }
        }
    }

    fn configure(&mut self, command: &Command<'_>) {
        let config = &mut self.config;
        config.placement = command.get("placement").unwrap_or(config.placement);
        config.attempts_max = command.get("attempts_max").unwrap_or(config.attempts_max);
        config.early_tokens_max = command.get("early_tokens_max").unwrap_or(config.early_tokens_max);
        config.retry_window = command.duration("retry_window").unwrap_or(config.retry_window);
    }

    fn call_event(&mut self, command: &Command<'_>) -> Event {
        let attempt = Attempt(command.get("attempt").unwrap_or(self.attempt));
        let error = |name: &str| Some(Error::new(script::reason(name), "as scripted"));
        match command.words().as_slice() {
            ["issued"] => Event::PrefillIssued { attempt, handoff: self.handoff(command, attempt) },
            ["done", id] => Event::PrefillDone { attempt, token: self.token(id, command) },
            ["prefill", "ends"] => Event::PrefillEnded { attempt, error: None },
            ["prefill", "fails", reason] => Event::PrefillEnded { attempt, error: error(reason) },
            ["admitted"] => Event::DecodeAdmitted { attempt },
            ["token", id] => Event::DecodeToken { attempt, token: self.token(id, command) },
            ["moved"] => Event::DecodeMoved { attempt, handoff: self.given_away(command, attempt) },
            ["decode", "ends"] => Event::DecodeEnded { attempt, error: None },
            ["decode", "fails", reason] => Event::DecodeEnded { attempt, error: error(reason) },
            words => panic!("no such command: {words:?}"),
        }
    }

    fn handoff(&self, command: &Command<'_>, attempt: Attempt) -> Handoff {
        let so_far = self.dispatch.as_ref().expect("start comes first").generation();
        Handoff {
            owner: "p".into(),
            epoch: WorkerEpoch(1),
            request: so_far.request.clone(),
            attempt: Attempt(command.get("of_attempt").unwrap_or(attempt.0)),
            id: HandoffId([7; 16]),
            fingerprint: Digest([0xaa; 32]),
            layout: KvLayout { layers: 2, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 },
            tokens: command.get("tokens").unwrap_or(so_far.tokens.len()),
        }
    }

    /// What a decode worker holds: all tokens but the last.
    fn given_away(&self, command: &Command<'_>, attempt: Attempt) -> Handoff {
        let so_far = self.dispatch.as_ref().expect("start comes first").generation();
        let tokens = command.get("tokens").unwrap_or(so_far.tokens.len() - 1);
        Handoff { owner: "d".into(), tokens, ..self.handoff(command, attempt) }
    }

    fn token(&mut self, id: &str, command: &Command<'_>) -> Token {
        let index = command.get("index").unwrap_or(self.index);
        self.index = index + 1;
        let finish = command.get::<String>("finish").map(|word| match word.as_str() {
            "eos" => FinishReason::Eos,
            "stop" => FinishReason::StopToken,
            "length" => FinishReason::Length,
            _ => panic!("{word}: no such finish reason"),
        });
        let id = id.parse().expect("a token id");
        Token {
            index,
            id,
            logprob: -0.5,
            batch_size: 1,
            queue_wait: Duration::ZERO,
            finish,
            ..Token::default()
        }
    }

    fn feed(&mut self, event: Event) -> Vec<String> {
        let Some(dispatch) = &mut self.dispatch else { return Vec::new() };
        let mut out = Vec::new();
        dispatch.on(event, &self.pools, self.now, &mut out);
        out.iter().map(|action| self.show(action)).collect()
    }

    fn show(&mut self, action: &Action) -> String {
        match action {
            Action::StartPrefill { worker, generation } => {
                self.follow(generation);
                format!("start prefill {worker}: {}", shown(generation))
            }
            Action::StartDecode { worker, generation, handoff } => {
                if handoff.is_none() {
                    self.follow(generation);
                }
                let how = if handoff.is_some() { "with the hand-off" } else { "without a hand-off" };
                format!("start decode {worker} {how}: {}", shown(generation))
            }
            Action::DropPrefill => "drop prefill".into(),
            Action::DropDecode => "drop decode".into(),
            Action::Fence { worker, attempt, .. } => format!("fence {worker} below attempt {}", attempt.0),
            Action::Move { worker, attempt, .. } => format!("ask {worker} for attempt {}", attempt.0),
            Action::Moved { from, to, outcome } => {
                let to = to.as_ref().map_or_else(|| "nobody".to_owned(), Clone::clone);
                let outcome = outcome.as_ref().map_or_else(ToString::to_string, |()| "done".into());
                format!("move from {from} to {to}: {outcome}")
            }
            Action::Retry { failed, cause } => format!("retry after attempt {}: {cause}", failed.0),
            Action::Emit(Emission::Placed(placed)) => {
                let prefill = placed.prefill.as_ref().map(|prefill| format!("{prefill} → "));
                format!("placed {}{}", prefill.unwrap_or_default(), placed.decode)
            }
            Action::Emit(Emission::Token(token)) => {
                let finish = token.finish.map(|finish| format!(", {finish:?}")).unwrap_or_default();
                format!("token {} is {}{finish}", token.index, token.id)
            }
            Action::Finish(Ok(())) => "finish".into(),
            Action::Finish(Err(error)) => format!("finish {}: {}", error.reason, error.message),
            Action::WakeAt(at) => {
                self.wake = Some(*at);
                format!("wake at {at:?}")
            }
        }
    }

    /// Scripted workers go on where the new attempt starts.
    fn follow(&mut self, generation: &Generation) {
        self.attempt = generation.attempt.0;
        self.index = generation.generated;
    }
}

fn shown(generation: &Generation) -> String {
    let Generation { attempt, tokens, generated, time_left, .. } = generation;
    format!("attempt {}, {tokens:?}, {generated} generated, {time_left:?} left", attempt.0)
}

fn generation(command: &Command<'_>) -> Generation {
    Generation {
        request: "r".into(),
        attempt: Attempt(command.get("attempt").unwrap_or(0)),
        model: command.get("model").unwrap_or_else(|| "m".into()),
        tokens: command.list("tokens").unwrap_or_else(|| vec![1, 2, 3]),
        generated: command.get("generated").unwrap_or(0),
        sampling: SamplingParams::default(),
        stop: StopConditions {
            max_tokens: command.get("max").unwrap_or(8),
            eos_ids: command.list("eos").unwrap_or_default(),
            stop_token_ids: vec![],
            min_tokens: 0,
        },
        time_left: command.duration("time").unwrap_or(Duration::from_mins(1)),
        probe: false,
        beside: command.get::<String>("beside").map(|place| script::placed(&place)),
        session: command.get("session"),
        priority: Priority::default(),
    }
}

fn check(file: &str) {
    let path = format!("{}/testdata/dispatch/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the scenario file");
    let mut scene = Scene::new();
    let fresh = script::replay(&text, |command| scene.run(command));
    expect_file![path].assert_eq(&fresh);
}

#[test]
fn the_way_of_a_request() {
    check("way.txt");
}

#[test]
fn failures_of_prefill() {
    check("prefill_fails.txt");
}

#[test]
fn failures_of_decode() {
    check("decode_fails.txt");
}

#[test]
fn sequences_that_move() {
    check("moving.txt");
}

#[test]
fn workers_that_break_the_protocol() {
    check("broken.txt");
}

#[test]
fn waiting_and_giving_up() {
    check("waiting.txt");
}

#[test]
fn deadlines_and_clients_that_leave() {
    check("endings.txt");
}
