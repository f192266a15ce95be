//! A worker that takes another role while its process goes on.

#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::time::Duration;

use engine::model::Interrupt;
use node::{Context, limits};
use proto::watch::{News, WatchEvent};
use proto::wire::worker_client::WorkerClient;
use proto::{
    Attempt, Error, FinishReason, Generation, Reason, RequestId, Role, Token, WorkerDescription, wire,
};
use tonic::Streaming;
use worker::core::{Action, CallId, Core, DecodeItem, Event, Gauges, Now, StepSize};
use worker::lives::{Life, Lives};
use worker::run::{self, RoleParts};
use worker::shell::{self, Handle, ShellConfig};
use worker::sim::Sim;
use worker::worker_service::Identity;
use worker::{Config, Source};

/// A core that holds what the last fence says: as many hand-offs as the attempt's number. What is asked of it in tokens it
/// gives at once: one.
#[derive(Default)]
struct Holding {
    leases: usize,
    draining: bool,
}

impl Core for Holding {
    fn on(&mut self, event: Event, _now: Now, out: &mut Vec<Action>) {
        match event {
            Event::Fence { attempt, .. } => self.leases = attempt.0 as usize,
            Event::Drain => self.draining = true,
            Event::Decode { call, .. } => {
                let token = Token { finish: Some(FinishReason::Length), ..Token::default() };
                out.push(Action::Decode { call, item: DecodeItem::Admitted { skipped_tokens: 0 } });
                out.push(Action::Decode { call, item: DecodeItem::Token(token) });
                out.push(Action::Close { call, error: None });
            }
            _ => {}
        }
    }

    fn step(&mut self, _clock: &dyn Fn() -> Now, _out: &mut Vec<Action>) -> Option<StepSize> {
        None
    }

    fn has_work(&self) -> bool {
        false
    }

    fn next_wake(&self) -> Option<Now> {
        None
    }

    fn gauges(&self) -> Gauges {
        Gauges { leases: self.leases, draining: self.draining, ..Gauges::default() }
    }

    fn interrupt(&self) -> Interrupt {
        Interrupt::default()
    }

    fn sole_prefill(&self) -> Option<CallId> {
        None
    }
}

fn parts(role: Role) -> RoleParts {
    RoleParts { role, core: |_, _| Box::new(Holding::default()), service: |services, _| services }
}

const BOTH: [Role; 2] = [Role::Decode, Role::Prefill];
const LONG: Duration = Duration::from_secs(20);

fn config() -> Config {
    Config {
        listen: "local:worker".into(),
        model: Source::Sim(Sim::default()),
        kv_blocks: Some(8),
        drain_notice_seconds: Duration::ZERO,
        ..Config::default()
    }
}

/// How one meets the worker of a test.
struct Met {
    client: WorkerClient<node::Channel>,
    context: Context,
}

impl Met {
    async fn describe(&self) -> WorkerDescription {
        let answer = self.client.clone().describe(wire::DescribeRequest {}).await.unwrap();
        answer.into_inner().try_into().unwrap()
    }

    async fn change(&self, role: Role) -> Result<(u64, bool), Error> {
        self.ask(wire::WorkerRole::from(role)).await
    }

    async fn ask(&self, role: wire::WorkerRole) -> Result<(u64, bool), Error> {
        let request = wire::ChangeRoleRequest { role: role.into() };
        let answer = self.client.clone().change_role(request).await.map_err(Error::from)?.into_inner();
        Ok((answer.epoch, answer.changed))
    }

    /// Lets the core hold so many hand-offs.
    async fn hold(&self, leases: u32) {
        let fence = wire::FenceRequest { request: "r".into(), attempt: leases };
        self.client.clone().fence(fence).await.unwrap();
    }

    async fn watch(&self) -> Streaming<wire::WatchEvent> {
        let request = wire::WatchRequest { blocks: true };
        self.client.clone().watch(request).await.unwrap().into_inner()
    }

    async fn until(&self, what: &str, holds: impl AsyncFn(&Self) -> bool) {
        let waits = async {
            while !holds(self).await {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(LONG, waits).await.expect(what);
    }

    fn obstacle(&self) -> Option<String> {
        self.context.readiness.obstacle()
    }
}

/// Runs a worker that may have those roles while `meet` lasts, and drains it then.
async fn with_worker(roles: &[Role], meet: impl AsyncFnOnce(Met)) -> Result<(), node::Error> {
    let context = Context::new("worker", Vec::new());
    let roles: Vec<RoleParts> = roles.iter().map(|role| parts(*role)).collect();
    let worker = run::run(&roles, config(), context.clone());
    let met = async {
        let client = limits!(WorkerClient::new(context.network.connect("local:worker")));
        let met = Met { client, context: context.clone() };
        met.until("it is ready", async |met| met.obstacle().is_none()).await;
        meet(met).await;
        context.shutdown.drain();
    };
    let both = async { tokio::join!(worker, met) };
    tokio::time::timeout(LONG, both).await.expect("the worker ends").0
}

/// The next that a watch says of drains, or its end.
async fn told(watch: &mut Streaming<wire::WatchEvent>) -> Option<(u64, bool)> {
    while let Some(event) = watch.message().await.unwrap() {
        let event: WatchEvent = event.try_into().unwrap();
        if let News::Load(load) = event.news {
            return Some((event.epoch.0, load.draining));
        }
    }
    None
}

#[tokio::test]
async fn a_worker_takes_the_other_role_in_another_life_and_comes_back() {
    let outcome = with_worker(&BOTH, async |met| {
        let first = met.describe().await;
        assert_eq!((first.role, first.draining), (Role::Decode, false));
        let mut watch = met.watch().await;
        assert_eq!(told(&mut watch).await, Some((first.epoch.0, false)));

        let (epoch, changed) = met.change(Role::Prefill).await.unwrap();
        let second = met.describe().await;
        assert!(changed && epoch != first.epoch.0);
        assert_eq!((second.role, second.draining, second.epoch.0), (Role::Prefill, false, epoch));
        assert_eq!((&second.model, second.layout), (&first.model, first.layout));
        assert_eq!(met.obstacle(), None);

        // Those who watched heard of the drain, and of nothing that comes after it.
        let mut heard = Vec::new();
        while let Some(told) = told(&mut watch).await {
            heard.push(told);
        }
        assert!(heard.iter().all(|(epoch, _)| *epoch == first.epoch.0), "{heard:?}");
        let mut watch = met.watch().await;
        assert_eq!(told(&mut watch).await, Some((epoch, false)));

        assert_eq!(met.change(Role::Prefill).await.unwrap(), (epoch, false), "it has the role already");
        assert_eq!(met.describe().await, second);

        let (third, changed) = met.change(Role::Decode).await.unwrap();
        assert!(changed && third != epoch && third != first.epoch.0);
        assert_eq!(met.describe().await.role, Role::Decode);
    })
    .await;
    outcome.unwrap();
}

#[tokio::test]
async fn a_life_ends_when_nothing_is_held_any_more_and_one_change_is_made_at_a_time() {
    let outcome = with_worker(&BOTH, async |met| {
        let first = met.describe().await;
        met.hold(1).await;
        let mut watch = met.watch().await;
        let drained = async {
            met.until("the drain is shown", async |met| met.describe().await.draining).await;
            let drains = async { while told(&mut watch).await != Some((first.epoch.0, true)) {} };
            tokio::time::timeout(LONG, drains).await.expect("who watches hears of the drain");
            let present = met.describe().await;
            assert_eq!((present.role, present.epoch), (Role::Decode, first.epoch), "it is what it was");
            assert_eq!(met.obstacle().unwrap(), "decode: drains, to become a prefill worker");
            for role in BOTH {
                let error = met.change(role).await.unwrap_err();
                assert_eq!(error.reason, Reason::QueueFull);
                assert_eq!(error.message, "a change to prefill is under way, ask again when it is over");
            }
            met.hold(0).await;
        };
        let (changed, ()) = tokio::join!(met.change(Role::Prefill), drained);
        assert!(changed.unwrap().1);
        assert_eq!(met.describe().await.role, Role::Prefill);
        assert_eq!(told(&mut watch).await, None, "the life that was watched is over");
    })
    .await;
    outcome.unwrap();
}

#[tokio::test]
async fn a_change_goes_on_when_whoever_asked_has_gone() {
    let outcome = with_worker(&BOTH, async |met| {
        met.hold(1).await;
        let asked = tokio::time::timeout(Duration::from_millis(100), met.change(Role::Prefill)).await;
        asked.expect_err("something is held");
        met.until("it drains", async |met| met.describe().await.draining).await;
        met.hold(0).await;
        met.until("it changes", async |met| met.describe().await.role == Role::Prefill).await;
        met.until("it is ready", async |met| met.obstacle().is_none()).await;
    })
    .await;
    outcome.unwrap();
}

#[tokio::test]
async fn a_shutdown_ends_a_change() {
    let outcome = with_worker(&BOTH, async |met| {
        met.hold(1).await;
        let drained = async {
            met.until("it drains", async |met| met.describe().await.draining).await;
            met.context.shutdown.drain();
        };
        let (changed, ()) = tokio::join!(met.change(Role::Prefill), drained);
        let error = changed.unwrap_err();
        assert_eq!(error.reason, Reason::WorkerLost);
        assert_eq!(error.message, "the worker shuts down, its role does not change any more");
        assert_eq!(met.change(Role::Prefill).await.unwrap_err(), error);
        // What is held is waited for, as in any drain.
        let present = met.describe().await;
        assert_eq!((present.role, present.draining), (Role::Decode, true));
        met.hold(0).await;
    })
    .await;
    outcome.unwrap();
}

#[tokio::test]
async fn what_a_worker_cannot_be_is_refused_by_name() {
    let outcome = with_worker(&[Role::Decode], async |met| {
        let before = met.describe().await;
        let error = met.change(Role::Prefill).await.unwrap_err();
        assert_eq!(error.reason, Reason::InvalidArgument);
        assert_eq!(error.message, "role: expected one of this worker's (decode), got prefill");
        let error = met.ask(wire::WorkerRole::Unspecified).await.unwrap_err();
        assert_eq!(error.message, "role: is neither prefill nor decode");
        let unknown = wire::ChangeRoleRequest { role: 7 };
        let error = Error::from(met.client.clone().change_role(unknown).await.unwrap_err());
        assert_eq!(error.message, "role: is neither prefill nor decode");
        assert_eq!(met.describe().await, before);
        assert_eq!(met.change(Role::Decode).await.unwrap(), (before.epoch.0, false));
    })
    .await;
    outcome.unwrap();
}

fn spawn(context: &Context) -> Handle {
    let config = ShellConfig {
        calls_max: 2,
        events_max: 4,
        changes_max: 8,
        fetch_window: 4,
        nice: 0,
        context_len: 64,
        vocabulary: None,
    };
    shell::spawn(Box::new(Holding::default()), config, context).unwrap()
}

#[tokio::test]
async fn a_shell_is_finished_when_its_calls_were_read_to_their_ends() {
    let shell = spawn(&Context::new("finishing", Vec::new()));
    let asked = Generation {
        request: RequestId("r".into()),
        attempt: Attempt(1),
        model: "m".into(),
        tokens: vec![1, 2, 3],
        generated: 0,
        sampling: proto::SamplingParams::default(),
        stop: proto::StopConditions { max_tokens: 1, ..Default::default() },
        time_left: LONG,
        probe: false,
        beside: None,
        session: None,
        priority: proto::Priority::default(),
    };
    let mut unread = shell.decode(asked.clone(), None).unwrap();
    let finishes = shell.finish();
    tokio::pin!(finishes);
    tokio::time::timeout(Duration::from_millis(50), &mut finishes).await.expect_err("nobody has read it");
    let mut items = 0;
    while let Some(item) = unread.next().await {
        item.unwrap();
        items += 1;
    }
    assert_eq!(items, 2);
    tokio::time::timeout(LONG, finishes).await.expect("it was read").unwrap();
    let refused = shell.decode(asked, None).err().unwrap();
    assert_eq!(refused.reason, Reason::WorkerLost, "{refused}");
    shell.stop().await.unwrap();
    assert_eq!(shell.finish().await.unwrap_err().reason, Reason::WorkerLost);
}

#[tokio::test]
async fn a_call_of_another_role_has_lost_its_worker() {
    let context = Context::new("only", Vec::new());
    let loaded = worker::load::load(&config(), Role::Prefill).unwrap();
    let identity = Identity {
        epoch: proto::WorkerEpoch(7),
        role: Role::Prefill,
        layout: loaded.engine.layout(),
        model: loaded.model,
        tokenizer: loaded.tokenizer,
    };
    let lives = Lives::only(Life::new("only", identity, spawn(&context)));
    assert_eq!(lives.present().identity.epoch.0, 7);
    assert!(lives.of(Role::Prefill).is_ok());
    let error = lives.of(Role::Decode).err().unwrap();
    assert_eq!(error.reason, Reason::WorkerLost, "another placement may succeed");
    assert_eq!(error.message, "expected a decode worker, this is a prefill worker now");
    // Nobody is there who would change it.
    assert_eq!(lives.change(Role::Decode).await.unwrap_err().reason, Reason::WorkerLost);
}
