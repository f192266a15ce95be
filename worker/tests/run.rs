//! A worker's life from start to end.

use std::time::Duration;

use engine::model::Interrupt;
use node::{Context, limits};
use proto::wire::worker_client::WorkerClient;
use proto::{Reason, Role, wire};
use worker::core::{Action, CallId, Core, Event, Gauges, Now, StepSize};
use worker::run::{self, RoleParts};
use worker::sim::Sim;
use worker::{Config, Source};

/// A core that panics at a fence.
struct Fragile;

impl Core for Fragile {
    fn on(&mut self, event: Event, _now: Now, _out: &mut Vec<Action>) {
        assert!(!matches!(event, Event::Fence { .. }), "no fences here");
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
        Gauges::default()
    }

    fn interrupt(&self) -> Interrupt {
        Interrupt::default()
    }

    fn sole_prefill(&self) -> Option<CallId> {
        None
    }
}

fn parts() -> RoleParts {
    RoleParts { role: Role::Decode, core: |_, _| Box::new(Fragile), service: |services, _| services }
}

fn config() -> Config {
    Config {
        listen: "local:worker".into(),
        model: Source::Sim(Sim::default()),
        kv_blocks: Some(8),
        ..Config::default()
    }
}

async fn serving(context: &Context) -> WorkerClient<node::Channel> {
    let mut client = limits!(WorkerClient::new(context.network.connect("local:worker")));
    while client.describe(wire::DescribeRequest {}).await.is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    client
}

const LONG: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_panic_of_the_engine_ends_the_process() {
    let context = Context::new("fragile", Vec::new());
    let roles = [parts()];
    let worker = run::run(&roles, config(), context.clone());
    let fence = async {
        let fence = wire::FenceRequest { request: "r".into(), attempt: 1 };
        serving(&context).await.fence(fence).await.unwrap();
    };
    let (outcome, ()) = tokio::time::timeout(LONG, async { tokio::join!(worker, fence) }).await.unwrap();
    let Err(node::Error::Service(error)) = outcome else { panic!("a fault expected, {outcome:?} came") };
    assert_eq!(error.reason, Reason::Internal);
    assert!(error.message.contains("no fences here"), "{error}");
    assert!(context.shutdown.is_stopped());
}

#[tokio::test]
async fn a_drain_ends_an_idle_worker_well() {
    let context = Context::new("idle", Vec::new());
    let roles = [parts()];
    let worker = run::run(&roles, config(), context.clone());
    let drain = async {
        serving(&context).await;
        context.shutdown.drain();
    };
    let (outcome, ()) = tokio::time::timeout(LONG, async { tokio::join!(worker, drain) }).await.unwrap();
    outcome.unwrap();
}

#[tokio::test]
async fn options_without_a_valid_value_are_named() {
    let refused = async |config: Config| {
        let context = Context::new("refused", Vec::new());
        run::run(&[parts()], config, context).await.unwrap_err().to_string()
    };
    assert!(refused(Config { listen: "nowhere".into(), ..config() }).await.starts_with("listen: "));
    assert!(refused(Config { fetch_window: 0, ..config() }).await.starts_with("fetch_window: "));
    assert!(refused(Config { kv_blocks: Some(0), ..config() }).await.starts_with("kv_blocks: "));
    let missing = Config { model: "/nowhere/model.gguf".parse().unwrap(), ..config() };
    assert!(refused(missing).await.starts_with("model /nowhere/model.gguf: "));
}
