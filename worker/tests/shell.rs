//! The shell around a core that follows a script: order, ends, bounds, drops and panics.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use engine::model::Interrupt;
use node::Context;
use proto::{
    Attempt, Digest, Error, FinishReason, Generation, Handoff, HandoffId, KvDtype, KvLayout, Priority,
    Reason, RequestId, Token, WorkerEpoch,
};
use worker::core::{Action, CallId, Core, DecodeItem, Event, FetchItem, Gauges, Now, StepSize};
use worker::shell::{self, Handle, ShellConfig};

type OnEvent = Box<dyn FnMut(&Event, &mut Vec<Action>) + Send>;
type OnStep = Box<dyn FnMut(&Interrupt, &mut Vec<Action>) -> StepSize + Send>;

/// A core that does what a test says, and writes down what it was told.
struct Script {
    on_event: OnEvent,
    /// Taken for one step, after an event.
    on_step: Option<OnStep>,
    armed: bool,
    told: Arc<Mutex<Vec<Event>>>,
    interrupt: Interrupt,
    sole_prefill: Option<CallId>,
    wake_at: Option<Now>,
}

impl Script {
    fn new(on_event: impl FnMut(&Event, &mut Vec<Action>) + Send + 'static) -> Self {
        Self {
            on_event: Box::new(on_event),
            on_step: None,
            armed: false,
            told: Arc::default(),
            interrupt: Interrupt::default(),
            sole_prefill: None,
            wake_at: None,
        }
    }
}

impl Core for Script {
    fn on(&mut self, event: Event, _now: Now, out: &mut Vec<Action>) {
        self.told.lock().expect("no test panicked").push(event.clone());
        if matches!(event, Event::Tick) {
            self.wake_at = None;
        }
        if let Event::Prefill { call, .. } = event {
            self.sole_prefill = Some(call);
            self.armed = self.on_step.is_some();
        }
        (self.on_event)(&event, out);
    }

    fn step(&mut self, _clock: &dyn Fn() -> Now, out: &mut Vec<Action>) -> Option<StepSize> {
        self.armed = false;
        let step = self.on_step.as_mut()?;
        Some(step(&self.interrupt, out))
    }

    fn has_work(&self) -> bool {
        self.armed
    }

    fn next_wake(&self) -> Option<Now> {
        self.wake_at
    }

    fn gauges(&self) -> Gauges {
        Gauges { leases: self.told.lock().expect("no test panicked").len(), ..Gauges::default() }
    }

    fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }

    fn sole_prefill(&self) -> Option<CallId> {
        self.sole_prefill
    }
}

const WINDOW: usize = 4;

fn start(script: Script, calls_max: usize) -> Handle {
    let config = ShellConfig {
        calls_max,
        events_max: 16,
        changes_max: 8,
        fetch_window: WINDOW,
        nice: 0,
        context_len: 64,
        vocabulary: None,
    };
    shell::spawn(Box::new(script), config, &Context::new("scripted", Vec::new())).expect("a thread")
}

fn generation(max_tokens: usize) -> Generation {
    Generation {
        request: RequestId("r".into()),
        attempt: Attempt(1),
        model: "m".into(),
        tokens: vec![1, 2, 3],
        generated: 0,
        sampling: proto::SamplingParams::default(),
        stop: proto::StopConditions { max_tokens, ..Default::default() },
        time_left: Duration::from_secs(10),
        probe: false,
        beside: None,
        session: None,
        priority: Priority::default(),
    }
}

fn handoff() -> Handoff {
    Handoff {
        owner: "local:nobody".into(),
        epoch: WorkerEpoch(1),
        request: RequestId("r".into()),
        attempt: Attempt(1),
        id: HandoffId([1; 16]),
        fingerprint: Digest::default(),
        layout: KvLayout { layers: 1, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 },
        tokens: 3,
    }
}

fn token(index: usize, finish: Option<FinishReason>) -> DecodeItem {
    DecodeItem::Token(Token {
        index,
        id: index as u32,
        logprob: 0.0,
        batch_size: 1,
        queue_wait: Duration::ZERO,
        finish,
        ..Token::default()
    })
}

/// Waits until what the core was told satisfies the condition.
async fn told(told: &Mutex<Vec<Event>>, what: &str, condition: impl Fn(&[Event]) -> bool) {
    let start = Instant::now();
    while !condition(&told.lock().expect("no test panicked")) {
        assert!(start.elapsed() < Duration::from_secs(10), "core never told: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn was_dropped(events: &[Event]) -> bool {
    events.iter().any(|event| matches!(event, Event::Dropped { .. }))
}

#[tokio::test]
async fn items_keep_their_order_and_the_stream_ends_once() {
    let handle = start(
        Script::new(|event, out| {
            let Event::Decode { call, .. } = *event else { return };
            out.push(Action::Decode { call, item: DecodeItem::Admitted { skipped_tokens: 0 } });
            for index in 0..3 {
                let finish = (index == 2).then_some(FinishReason::Length);
                out.push(Action::Decode { call, item: token(index, finish) });
            }
            out.push(Action::Close { call, error: None });
        }),
        4,
    );
    let mut stream = handle.decode(generation(3), None).unwrap();
    assert_eq!(stream.next().await, Some(Ok(DecodeItem::Admitted { skipped_tokens: 0 })));
    for index in 0..3 {
        let finish = (index == 2).then_some(FinishReason::Length);
        assert_eq!(stream.next().await, Some(Ok(token(index, finish))));
    }
    assert_eq!(stream.next().await, None);
    assert_eq!(stream.next().await, None);
    handle.stop().await.unwrap();
}

#[tokio::test]
async fn an_error_is_the_last_word() {
    let refusal = Error::new(Reason::OutOfBlocks, "3 blocks needed, 1 free");
    let error = refusal.clone();
    let handle = start(
        Script::new(move |event, out| {
            if let Event::Decode { call, .. } = *event {
                out.push(Action::Close { call, error: Some(error.clone()) });
            }
        }),
        4,
    );
    let mut stream = handle.decode(generation(3), None).unwrap();
    assert_eq!(stream.next().await, Some(Err(refusal)));
    assert_eq!(stream.next().await, None);
    handle.stop().await.unwrap();
}

#[tokio::test]
async fn a_stream_that_breaks_its_contract_becomes_an_error() {
    let handle = start(
        Script::new(|event, out| {
            let Event::Decode { call, .. } = *event else { return };
            out.push(Action::Decode { call, item: token(0, Some(FinishReason::Eos)) });
            out.push(Action::Decode { call, item: token(1, None) });
        }),
        4,
    );
    let mut stream = handle.decode(generation(9), None).unwrap();
    assert!(stream.next().await.unwrap().is_ok());
    assert_eq!(stream.next().await.unwrap().unwrap_err().reason, Reason::Internal);
    assert_eq!(stream.next().await, None);

    let handle = start(
        Script::new(|event, out| {
            if let Event::Decode { call, .. } = *event {
                out.push(Action::Close { call, error: None });
            }
        }),
        4,
    );
    let mut stream = handle.decode(generation(9), None).unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap_err().reason, Reason::Internal);
    assert_eq!(stream.next().await, None);
}

#[tokio::test]
async fn dropping_a_stream_tells_the_core_and_frees_its_place() {
    let script = Script::new(|_, _| {});
    let told_events = Arc::clone(&script.told);
    let handle = start(script, 1);
    let stream = handle.decode(generation(3), None).unwrap();
    let full = handle.decode(generation(3), None).err().unwrap();
    assert_eq!(full.reason, Reason::QueueFull);
    drop(stream);
    told(&told_events, "dropped", was_dropped).await;
    // The ids of opening and drop are the same.
    let ids: Vec<_> = told_events
        .lock()
        .unwrap()
        .iter()
        .filter_map(|event| match event {
            Event::Decode { call, .. } | Event::Dropped { call } => Some(*call),
            _ => None,
        })
        .collect();
    assert_eq!(ids.len(), 2);
    assert_eq!(ids[0], ids[1]);
    assert_eq!(ids[0].0 % 2, 0, "the shell draws even ids");
    assert!(handle.decode(generation(3), None).is_ok());
    handle.stop().await.unwrap();
}

#[tokio::test]
async fn dropping_the_prefill_that_fills_the_step_stops_the_step() {
    let mut script = Script::new(|_, _| {});
    let told_events = Arc::clone(&script.told);
    let steps = Arc::new(AtomicUsize::new(0));
    let (started, outcome) = (Arc::clone(&steps), Arc::new(Mutex::new(None)));
    let stopped = Arc::clone(&outcome);
    script.on_step = Some(Box::new(move |interrupt, _| {
        started.fetch_add(1, Ordering::SeqCst);
        let start = Instant::now();
        while !interrupt.is_raised() && start.elapsed() < Duration::from_secs(10) {
            std::thread::yield_now();
        }
        *stopped.lock().unwrap() = Some(interrupt.is_raised());
        StepSize { tokens: 0, sequences: 0 }
    }));
    let handle = start(script, 4);
    let stream = handle.prefill(generation(3)).unwrap();
    while steps.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Another call's drop does not stop it.
    drop(handle.decode(generation(3), None).unwrap());
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(*outcome.lock().unwrap(), None);
    drop(stream);
    told(&told_events, "dropped", was_dropped).await;
    assert_eq!(*outcome.lock().unwrap(), Some(true));
    handle.stop().await.unwrap();
}

/// Sends numbered blocks as credit allows, then the end.
fn sender_of_blocks(blocks: usize, sent: Arc<AtomicUsize>) -> Script {
    let mut credit = 0;
    Script::new(move |event, out| {
        let Event::FetchCredit { call, items } = *event else { return };
        credit += items;
        while credit > 0 && sent.load(Ordering::SeqCst) <= blocks {
            credit -= 1;
            let first = sent.fetch_add(1, Ordering::SeqCst);
            if first == blocks {
                let item = FetchItem::End { first_token: 7, digest: Digest::default() };
                out.push(Action::Fetch { call, item });
                out.push(Action::Close { call, error: None });
                return;
            }
            let block = engine::KvBlock { first, tokens: 1, slabs: vec![0; 4], checksums: vec![0] };
            out.push(Action::Fetch { call, item: FetchItem::Block(block) });
        }
    })
}

#[tokio::test]
async fn a_fetch_flows_by_credit() {
    let sent = Arc::new(AtomicUsize::new(0));
    let handle = start(sender_of_blocks(100, Arc::clone(&sent)), 4);
    let mut stream = handle.fetch(handoff(), 0).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(sent.load(Ordering::SeqCst), WINDOW, "nobody has taken an item");
    for first in 0..100 {
        match stream.next().await {
            Some(Ok(FetchItem::Block(block))) => assert_eq!(block.first, first),
            other => panic!("block {first} expected, {other:?} came"),
        }
        assert!(sent.load(Ordering::SeqCst) <= first + 1 + WINDOW);
    }
    assert!(matches!(stream.next().await, Some(Ok(FetchItem::End { first_token: 7, .. }))));
    assert!(stream.next().await.is_none());
    handle.stop().await.unwrap();
}

#[tokio::test]
async fn more_items_than_a_call_can_carry_end_it() {
    let script = Script::new(|event, out| {
        let Event::Decode { call, .. } = *event else { return };
        out.extend((0..100).map(|index| Action::Decode { call, item: token(index, None) }));
    });
    let told_events = Arc::clone(&script.told);
    let handle = start(script, 4);
    let mut stream = handle.decode(generation(3), None).unwrap();
    told(&told_events, "dropped", was_dropped).await;
    let mut items = 0;
    let error = loop {
        match stream.next().await {
            Some(Ok(_)) => items += 1,
            Some(Err(error)) => break error,
            None => panic!("the stream ended well"),
        }
    };
    assert_eq!((items, error.reason), (4, Reason::Internal));
    handle.stop().await.unwrap();
}

#[tokio::test]
async fn a_panic_of_the_core_ends_every_call_and_is_reported() {
    let handle =
        start(Script::new(|event, _| assert!(!matches!(event, Event::Fence { .. }), "no fences here")), 4);
    let mut open = handle.decode(generation(3), None).unwrap();
    let mut fetch = handle.fetch(handoff(), 0).await.unwrap();
    let renewal = {
        let handle = handle.clone();
        async move { handle.renew(handoff()).await }
    };
    let (renewed, fenced) = tokio::join!(renewal, handle.fence(RequestId("r".into()), Attempt(2)));
    fenced.unwrap();
    assert_eq!(renewed.unwrap_err().reason, Reason::Internal);
    let error = open.next().await.unwrap().unwrap_err();
    assert_eq!(error.reason, Reason::Internal);
    assert!(error.message.contains("no fences here"), "{error}");
    assert_eq!(fetch.next().await.unwrap().unwrap_err().reason, Reason::Internal);
    assert_eq!(handle.ended().await.unwrap_err().reason, Reason::Internal);
    assert_eq!(handle.decode(generation(3), None).err().unwrap().reason, Reason::WorkerLost);
}

#[tokio::test]
async fn stopping_ends_open_calls() {
    let handle = start(Script::new(|_, _| {}), 4);
    let mut stream = handle.decode(generation(3), None).unwrap();
    handle.stop().await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap_err().reason, Reason::WorkerLost);
    assert_eq!(handle.stop().await, Ok(()), "a second stop is no fault");
}

#[tokio::test]
async fn time_passes_and_numbers_change_without_traffic() {
    let mut script = Script::new(|_, _| {});
    script.wake_at = Some(Duration::from_millis(30));
    let told_events = Arc::clone(&script.told);
    let handle = start(script, 4);
    let mut shown = handle.watch();
    told(&told_events, "tick", |events| matches!(events, [Event::Tick])).await;
    let after = shown.wait_for(|shown| shown.gauges.leases == 1).await.unwrap();
    assert!(!after.is_idle);
}

#[tokio::test]
async fn an_event_that_asks_for_nothing_is_shown_too() {
    let script = Script::new(|_, _| {});
    let handle = start(script, 4);
    let mut shown = handle.watch();
    for attempt in 1..=20 {
        handle.fence(RequestId("r".into()), Attempt(attempt)).await.unwrap();
    }
    let all = shown.wait_for(|shown| shown.gauges.leases == 20);
    tokio::time::timeout(Duration::from_secs(10), all).await.expect("shown in time").unwrap();
    handle.stop().await.unwrap();
}
