//! The whole router over a network, against scripted workers.

use std::sync::Arc;
use std::time::Duration;

use node::{Context, Listener, Member};
use proto::watch::News;
use proto::{
    Attempt, BlockHash, Digest, Error, FinishReason, Generation, HashChain, Placed, Priority, Reason, Role,
    SamplingParams, StopConditions, Token, TokenId, WorkerLoad, wire,
};
use router::{Config, PlacementMode, Policy};
use tokio::sync::watch;
use tonic::Streaming;
use wire::router_client::RouterClient;

use crate::fake::{Behaviour, Came, Fake, next_token, role};

const PROMPT: [TokenId; 3] = [1, 2, 3];

/// A router with its workers, in one process.
struct Cluster {
    context: Context,
    client: RouterClient<node::Channel>,
    members: watch::Sender<Arc<[Member]>>,
    router: tokio::task::JoinHandle<Result<(), node::Error>>,
}

fn config() -> Config {
    Config {
        listen: "local:router".into(),
        placement: PlacementMode::Split,
        retry_window: Duration::from_secs(3),
        describe_every: Duration::from_millis(100),
        ..Config::default()
    }
}

#[expect(clippy::disallowed_methods, reason = "the test is the owner of the router's task")]
async fn start(config: Config, fakes: &[&Fake]) -> Cluster {
    let mut context = Context::new("router", Vec::new());
    let mut members = vec![Member { role: Role::Router, address: "local:router".into() }];
    for (index, fake) in fakes.iter().enumerate() {
        let address = fake.serve(Listener::Local(format!("worker-{index}")), &context).await;
        members.push(Member { role: role(fake), address });
    }
    let (sender, receiver) = watch::channel(members.into());
    context.members = receiver;
    let router = tokio::spawn(router::run(config, context.clone()));
    let client = node::limits!(RouterClient::new(context.network.connect("local:router")));
    let mut cluster = Cluster { context, client, members: sender, router };
    cluster.until_up().await;
    cluster
}

impl Cluster {
    async fn until_up(&mut self) {
        for _ in 0..200 {
            if self.client.list_models(wire::ListModelsRequest {}).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("the router does not come up");
    }

    async fn route(&mut self, generation: Generation) -> Result<Streaming<wire::RouteEvent>, Error> {
        let request = wire::RouteRequest { generation: Some(generation.into()) };
        Ok(self.client.route(request).await?.into_inner())
    }

    /// Routes and collects the whole answer.
    async fn answer(&mut self, generation: Generation) -> Answer {
        match self.route(generation).await {
            Ok(stream) => collect(stream).await,
            Err(error) => Answer { placed: vec![], tokens: vec![], end: Err(error) },
        }
    }
}

#[derive(Debug)]
struct Answer {
    placed: Vec<Placed>,
    tokens: Vec<Token>,
    end: Result<(), Error>,
}

impl Answer {
    /// Every token is right, and the last is marked.
    fn is_right(&self, max_tokens: usize) {
        self.end.as_ref().unwrap();
        let mut tokens = PROMPT.to_vec();
        for (index, token) in self.tokens.iter().enumerate() {
            assert_eq!((token.index, token.id), (index, next_token(&tokens)), "{self:?}");
            tokens.push(token.id);
        }
        assert_eq!(self.tokens.len(), max_tokens);
        assert_eq!(self.tokens.last().and_then(|token| token.finish), Some(FinishReason::Length));
    }

    fn reason(&self) -> Reason {
        self.end.as_ref().unwrap_err().reason
    }
}

async fn collect(mut stream: Streaming<wire::RouteEvent>) -> Answer {
    use wire::route_event::Event;
    let mut answer = Answer { placed: vec![], tokens: vec![], end: Ok(()) };
    loop {
        match stream.message().await {
            Ok(Some(item)) => match item.event.unwrap() {
                Event::Placed(placed) => answer.placed.push(placed.try_into().unwrap()),
                Event::Token(token) => answer.tokens.push(token.try_into().unwrap()),
            },
            Ok(None) => return answer,
            Err(status) => {
                answer.end = Err(status.into());
                return answer;
            }
        }
    }
}

fn generation(max_tokens: usize) -> Generation {
    Generation {
        request: "r-1".into(),
        attempt: Attempt(0),
        model: "m".into(),
        tokens: PROMPT.to_vec(),
        generated: 0,
        sampling: SamplingParams::default(),
        stop: StopConditions { max_tokens, eos_ids: vec![], stop_token_ids: vec![], min_tokens: 0 },
        time_left: Duration::from_secs(20),
        probe: false,
        beside: None,
        session: None,
        priority: Priority::default(),
    }
}

#[tokio::test]
async fn split_and_fused_give_the_same_tokens() {
    let (prefill, decode) = (Fake::new("p"), Fake::new("d"));
    let mut cluster = start(config(), &[&prefill, &decode]).await;
    let answer = cluster.answer(generation(6)).await;
    answer.is_right(6);
    assert_eq!(answer.placed.len(), 1);
    assert_eq!(answer.placed[0].prefill.as_deref(), Some("local:worker-0"));
    assert_eq!(decode.came(), [Came::Call { attempt: 0, generated: 0, handoff: true }]);

    let fused = Config { placement: PlacementMode::Fused, ..config() };
    let mut cluster = start(fused, &[&Fake::new("p"), &Fake::new("d")]).await;
    let answer = cluster.answer(generation(6)).await;
    answer.is_right(6);
    assert_eq!(answer.placed[0].prefill, None);
}

#[tokio::test]
async fn auto_is_fused_without_a_prefill_worker() {
    let auto = Config { placement: PlacementMode::Auto, ..config() };
    let mut cluster = start(auto, &[&Fake::new("d")]).await;
    let answer = cluster.answer(generation(3)).await;
    answer.is_right(3);
    assert_eq!(answer.placed[0].prefill, None);
}

#[tokio::test]
async fn a_first_token_that_is_the_last_drops_decode() {
    let (prefill, decode) = (Fake::new("p"), Fake::new("d"));
    decode.will([Behaviour::HangAfter(1)]);
    let mut cluster = start(config(), &[&prefill, &decode]).await;
    cluster.answer(generation(1)).await.is_right(1);
    if !decode.came().is_empty() {
        decode.wait_for(Came::Dropped { attempt: 0 }).await;
    }
}

#[tokio::test]
async fn every_failure_of_a_worker_is_replayed() {
    let failures = [
        Behaviour::Refuse(Reason::OutOfBlocks),
        Behaviour::FailAfter(0, Reason::WorkerLost),
        Behaviour::FailAfter(1, Reason::ChecksumMismatch),
        Behaviour::FailAfter(3, Reason::LeaseExpired),
        Behaviour::EndAfter(1),
        Behaviour::EndAfter(4),
        Behaviour::PanicAfter(0),
        Behaviour::PanicAfter(3),
    ];
    for failure in failures {
        for failing in ["p", "d"] {
            let (prefill, decode) = (Fake::new("p"), Fake::new("d"));
            let fake = if failing == "p" { &prefill } else { &decode };
            fake.will([failure]);
            let mut cluster = start(config(), &[&prefill, &decode]).await;
            let answer = cluster.answer(generation(6)).await;
            answer.is_right(6);
            // A prefill that says both its items has done its part, whatever comes after.
            let noticed = failing == "d"
                || !matches!(
                    failure,
                    Behaviour::FailAfter(3, _) | Behaviour::EndAfter(4) | Behaviour::PanicAfter(3)
                );
            assert_eq!(answer.placed.len(), if noticed { 2 } else { 1 }, "{failing} {failure:?}");
            if noticed {
                fake.wait_for(Came::Fence { attempt: 1 }).await;
                let attempts: Vec<u32> = answer.placed.iter().map(|placed| placed.attempt.0).collect();
                assert_eq!(attempts, [0, 1]);
            }
        }
    }
}

#[tokio::test]
async fn a_spare_worker_takes_over() {
    let (prefill, first, spare) = (Fake::new("p"), Fake::new("d1"), Fake::new("d2"));
    first.will([Behaviour::FailAfter(3, Reason::WorkerLost)]);
    let mut cluster = start(config(), &[&prefill, &first, &spare]).await;
    let answer = cluster.answer(generation(8)).await;
    answer.is_right(8);
    let decodes: Vec<&str> = answer.placed.iter().map(|placed| placed.decode.as_str()).collect();
    assert_eq!(decodes, ["local:worker-1", "local:worker-2"]);
    assert_eq!(spare.came(), [Came::Call { attempt: 1, generated: 3, handoff: true }]);
}

#[tokio::test]
async fn a_worker_that_dies_is_waited_for_until_it_is_back() {
    let prefill = Fake::new("p");
    let mut cluster = start(config(), &[&prefill]).await;
    // The decode worker is a process of its own, on TCP.
    let decode = Fake::new("d");
    let first_life = Context::new("decode", Vec::new());
    let address = decode.serve(Listener::Tcp("127.0.0.1:0".into()), &first_life).await;
    let mut members: Vec<Member> = cluster.members.borrow().to_vec();
    members.push(Member { role: Role::Decode, address: address.clone() });
    cluster.members.send_replace(members.into());

    decode.will([Behaviour::HangAfter(4)]);
    let mut stream = cluster.route(generation(8)).await.unwrap();
    for _ in 0..5 {
        stream.message().await.unwrap().unwrap();
    }
    first_life.shutdown.stop();
    first_life.tasks.wait().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    decode.restarted();
    let second_life = Context::new("decode", Vec::new());
    decode.serve(Listener::Tcp(address), &second_life).await;

    let rest = collect(stream).await;
    rest.end.as_ref().unwrap();
    let last = rest.tokens.last().unwrap();
    assert_eq!((last.index, last.finish), (7, Some(FinishReason::Length)));
    assert_eq!(rest.placed.len(), 1, "one replay, no attempt was wasted on a dead worker: {rest:?}");
    let came = Came::Call { attempt: 1, generated: 4, handoff: true };
    assert!(decode.came().contains(&came), "{:?}", decode.came());
    second_life.shutdown.stop();
}

#[tokio::test]
async fn without_a_worker_the_error_names_who_is_missing() {
    let short = Config { retry_window: Duration::from_millis(300), ..config() };
    let mut cluster = start(short, &[&Fake::new("p")]).await;
    let answer = cluster.answer(generation(3)).await;
    assert_eq!(answer.reason(), Reason::WorkerLost);
    assert_eq!(answer.end.unwrap_err().message, "no decode worker for model m is known");
}

#[tokio::test]
async fn a_mismatch_is_refused_by_name() {
    let (prefill, decode) = (Fake::new("p"), Fake::new("d"));
    decode.describe(|description| description.model.fingerprint = Digest([1; 32]));
    let mut cluster = start(config(), &[&prefill, &decode]).await;
    let answer = cluster.answer(generation(3)).await;
    assert_eq!(answer.reason(), Reason::FingerprintMismatch);
    let message = answer.end.unwrap_err().message;
    assert!(message.contains("checkpoint fingerprint") && message.contains("refused"), "{message}");
    let models = cluster.client.list_models(wire::ListModelsRequest {}).await.unwrap().into_inner();
    assert!(models.models.is_empty());
    assert_eq!(models.workers.len(), 1);
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_calls_along() {
    let (prefill, decode) = (Fake::new("p"), Fake::new("d"));
    prefill.will([Behaviour::HangAfter(1)]);
    decode.will([Behaviour::HangAfter(1)]);
    let mut cluster = start(config(), &[&prefill, &decode]).await;
    let stream = cluster.route(generation(4)).await.unwrap();
    decode.wait_for(Came::Call { attempt: 0, generated: 0, handoff: true }).await;
    drop(stream);
    prefill.wait_for(Came::Dropped { attempt: 0 }).await;
    decode.wait_for(Came::Dropped { attempt: 0 }).await;
}

#[tokio::test]
async fn the_deadline_ends_both_calls() {
    let (prefill, decode) = (Fake::new("p"), Fake::new("d"));
    decode.will([Behaviour::HangAfter(2)]);
    let mut cluster = start(config(), &[&prefill, &decode]).await;
    let asked = Generation { time_left: Duration::from_millis(300), ..generation(5) };
    let answer = cluster.answer(asked).await;
    assert_eq!(answer.reason(), Reason::Deadline);
    assert_eq!(answer.tokens.len(), 2);
    decode.wait_for(Came::Dropped { attempt: 0 }).await;
}

#[tokio::test]
async fn one_request_too_many_is_refused() {
    let decode = Fake::new("d");
    decode.will([Behaviour::HangAfter(1)]);
    let one = Config { placement: PlacementMode::Fused, requests_max: 1, queue_max: Some(0), ..config() };
    let mut cluster = start(one, &[&decode]).await;
    let first = cluster.route(generation(4)).await.unwrap();
    decode.wait_for(Came::Call { attempt: 0, generated: 0, handoff: false }).await;
    assert_eq!(cluster.answer(generation(4)).await.reason(), Reason::QueueFull);
    drop(first);
    decode.wait_for(Came::Dropped { attempt: 0 }).await;
    // The place is free as soon as the request has seen that its client left.
    for _ in 0..100 {
        match cluster.answer(generation(4)).await {
            answer if answer.end.is_ok() => return answer.is_right(4),
            _ => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
    panic!("the place was never given back");
}

#[tokio::test]
async fn requests_wait_by_priority_and_deadline_and_what_goes_on_comes_first() {
    let decode = Fake::new("d");
    decode.will([Behaviour::HangAfter(1)]);
    let one = Config { placement: PlacementMode::Fused, requests_max: 1, queue_max: Some(5), ..config() };
    let mut cluster = start(one, &[&decode]).await;
    let first = cluster.route(generation(4)).await.unwrap();
    decode.wait_for(Came::Call { attempt: 0, generated: 0, handoff: false }).await;
    // They are told apart by their attempts.
    let waiting = |attempt, priority, seconds, generated| Generation {
        attempt: Attempt(attempt),
        priority: Priority(priority),
        time_left: Duration::from_secs(seconds),
        generated,
        ..generation(4)
    };
    let asked = [waiting(1, 5, 10, 0), waiting(2, 2, 30, 0), waiting(3, 2, 20, 0), waiting(4, 5, 30, 1)];
    let mut streams = Vec::new();
    for asked in asked {
        let request = format!("waits-{}", asked.attempt.0).as_str().into();
        streams.push(cluster.route(Generation { request, ..asked }).await.unwrap());
    }
    let hurried = Generation { time_left: Duration::from_millis(50), ..waiting(5, 1, 0, 0) };
    let answer = cluster.answer(hurried).await;
    assert_eq!((answer.reason(), answer.placed.len()), (Reason::Deadline, 0), "{answer:?}");
    drop(first);
    for mut stream in streams {
        while stream.message().await.unwrap().is_some() {}
    }
    let called = |came: Came| match came {
        Came::Call { attempt, .. } if attempt > 0 => Some(attempt),
        _ => None,
    };
    let order: Vec<_> = decode.came().into_iter().filter_map(called).collect();
    assert_eq!(order, [4, 3, 2, 1]);
}

#[tokio::test]
async fn what_cannot_be_asked_is_refused_by_the_name_of_its_field() {
    let mut cluster = start(config(), &[&Fake::new("p"), &Fake::new("d")]).await;
    let answer = cluster.answer(Generation { tokens: vec![], ..generation(4) }).await;
    assert_eq!(answer.end.unwrap_err(), Error::invalid("tokens", "must not be empty"));
    let answer = cluster.answer(Generation { model: "other".into(), ..generation(4) }).await;
    assert_eq!(answer.reason(), Reason::ModelNotFound);
}

#[tokio::test]
async fn a_draining_router_finishes_what_it_has() {
    let (prefill, decode) = (Fake::new("p"), Fake::new("d"));
    let mut cluster = start(config(), &[&prefill, &decode]).await;
    let mut stream = cluster.route(generation(40)).await.unwrap();
    for _ in 0..4 {
        stream.message().await.unwrap().unwrap();
    }
    cluster.context.shutdown.drain();
    assert_eq!(cluster.answer(generation(4)).await.reason(), Reason::WorkerLost);
    let rest = collect(stream).await;
    rest.end.as_ref().unwrap();
    assert_eq!(rest.tokens.last().unwrap().index, 39);
    cluster.router.await.unwrap().unwrap();
}

#[tokio::test]
async fn metrics_move() {
    node::metrics::install().unwrap();
    let (prefill, decode) = (Fake::new("p"), Fake::new("d"));
    decode.will([Behaviour::FailAfter(2, Reason::StaleEpoch), Behaviour::HangAfter(2)]);
    let mut cluster = start(config(), &[&prefill, &decode]).await;
    let asked = Generation { probe: true, ..generation(8) };
    let mut stream = cluster.route(asked).await.unwrap();
    decode.wait_for(Came::Call { attempt: 1, generated: 2, handoff: true }).await;
    while let Some(item) = stream.message().await.unwrap() {
        if matches!(item.event.unwrap(), wire::route_event::Event::Token(token) if token.index == 3) {
            break;
        }
    }
    let running = node::metrics::render().unwrap();
    let value = |text: &str, metric: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(metric));
        line.unwrap_or_else(|| panic!("no {metric} in {text}")).trim().parse().unwrap()
    };
    assert!(value(&running, r#"baton_router_requests{state="decoding"}"#) >= 1.0);
    assert!(value(&running, r#"baton_router_retries_total{cause="STALE_EPOCH",probe="true"}"#) >= 1.0);
    assert!(value(&running, r#"baton_router_placements_total{kind="split",probe="true"}"#) >= 2.0);
    assert!(running.contains(r#"baton_router_workers{role="decode",state="live"}"#));
    drop(stream);
    let cancelled = r#"baton_router_requests_total{outcome="CANCELLED",probe="true"}"#;
    for _ in 0..200 {
        let text = node::metrics::render().unwrap();
        if text.contains(cancelled) {
            // No other test sends probes.
            assert_eq!(value(&text, cancelled), 1.0);
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the cancelled probe was not counted");
}

/// The prefill worker that requests with that prompt go to, once it is that one.
async fn until_placed_on(cluster: &mut Cluster, tokens: &[TokenId], worker: &str) {
    let mut last = None;
    for _ in 0..200 {
        let answer = cluster.answer(Generation { tokens: tokens.to_vec(), ..generation(2) }).await;
        assert_eq!(answer.end, Ok(()));
        last = answer.placed[0].prefill.clone();
        if last.as_deref() == Some(worker) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("placed on {last:?}, not on {worker}");
}

#[tokio::test]
async fn requests_go_where_their_beginning_is_and_the_load_allows() {
    node::metrics::install().unwrap();
    let fakes = [Fake::new("p1"), Fake::new("p2"), Fake::new("d")];
    let tokens: Vec<TokenId> = (0..40).collect();
    let blocks = HashChain::new(Digest([0xaa; 32]), 16).of(&tokens);
    let known = |blocks: &[BlockHash]| News::Known { chunk: 0, last: true, blocks: blocks.to_vec() };
    let load = |waiting_tokens| {
        News::Load(WorkerLoad { waiting_tokens, blocks_free: 8, blocks_total: 8, ..WorkerLoad::default() })
    };
    for fake in &fakes {
        fake.tell(1, load(0));
        fake.tell(1, known(&[]));
    }
    // What is asked rarely will not be what tells.
    let config = Config { policy: Policy::Prefix, describe_every: Duration::from_mins(1), ..config() };
    let mut cluster = start(config, &[&fakes[0], &fakes[1], &fakes[2]]).await;
    fakes[1].tell(1, News::Stored(blocks.clone()));
    until_placed_on(&mut cluster, &tokens, "local:worker-1").await;
    for number in 2..5 {
        // What was placed since counts as waiting until the worker says what it really has.
        fakes[1].tell(number, load(0));
        until_placed_on(&mut cluster, &tokens, "local:worker-1").await;
    }
    fakes[1].tell(9, load(2000));
    until_placed_on(&mut cluster, &tokens, "local:worker-0").await;
    fakes[1].tell(10, load(0));
    until_placed_on(&mut cluster, &tokens, "local:worker-1").await;
    fakes[1].tell(3, News::Removed(blocks.clone()));
    fakes[0].tell(1, News::Stored(blocks.clone()));
    until_placed_on(&mut cluster, &tokens, "local:worker-0").await;

    // Something is missing, so it is asked for all that there is, and says the same again and the rest.
    fakes[1].tell(99, News::Stored(blocks.clone()));
    let resyncs = |text: &str| {
        let line =
            text.lines().find_map(|line| line.strip_prefix("baton_router_resyncs_total{cause=\"gap\"} "));
        line.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0)
    };
    let mut text = String::new();
    for _ in 0..200 {
        text = node::metrics::render().unwrap();
        if resyncs(&text) > 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(resyncs(&text) > 0, "{text}");
    assert!(text.contains("baton_router_prefix_index_blocks"), "{text}");
}

#[tokio::test]
async fn a_drain_that_a_watch_tells_is_known_at_once() {
    let (first, second, decode) = (Fake::new("p1"), Fake::new("p2"), Fake::new("d"));
    for fake in [&first, &second, &decode] {
        fake.tell(1, News::Load(WorkerLoad::default()));
    }
    let config = Config { describe_every: Duration::from_mins(1), ..config() };
    let mut cluster = start(config, &[&first, &second, &decode]).await;
    until_placed_on(&mut cluster, &PROMPT, "local:worker-0").await;
    until_placed_on(&mut cluster, &PROMPT, "local:worker-1").await;
    first.describe(|description| description.draining = true);
    first.tell(2, News::Load(WorkerLoad { draining: true, ..WorkerLoad::default() }));
    let mut calls = first.came().len();
    let mut quiet = 0;
    for _ in 0..400 {
        if quiet == 6 {
            return;
        }
        until_placed_on(&mut cluster, &PROMPT, "local:worker-1").await;
        let now = first.came().len();
        quiet = if now == calls { quiet + 1 } else { 0 };
        calls = now;
    }
    panic!("a worker that drains gets requests");
}

/// The list says one role and the worker another: it is what it says, before and after the list follows.
#[tokio::test]
async fn a_worker_is_what_it_says_that_it_is() {
    let (prefill, turns, decode) = (Fake::new("p1"), Fake::new("d1"), Fake::new("d2"));
    let mut cluster = start(config(), &[&prefill, &turns, &decode]).await;
    cluster.answer(generation(4)).await.is_right(4);
    turns.restarted();
    turns.describe(|description| description.role = Role::Prefill);
    let used = async |cluster: &mut Cluster| {
        for _ in 0..100 {
            let answer = cluster.answer(generation(4)).await;
            answer.is_right(4);
            let placed = answer.placed.last().unwrap();
            if placed.prefill.as_deref() == Some("local:worker-1") {
                assert_eq!(placed.decode, "local:worker-2");
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("nothing is placed on it in its new role");
    };
    used(&mut cluster).await;
    let mut members: Vec<Member> = cluster.members.borrow().to_vec();
    for member in members.iter_mut().filter(|member| member.address == "local:worker-1") {
        member.role = Role::Prefill;
    }
    cluster.members.send_replace(members.into());
    used(&mut cluster).await;
    // Nobody decodes where prefills are served: the last decode worker goes, and requests wait in vain.
    decode.describe(|description| description.draining = true);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(cluster.answer(generation(4)).await.reason(), Reason::WorkerLost);
}
