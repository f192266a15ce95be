//! Both cores under random events, in any order and at any time: whatever happens, each call ends exactly once, blocks
//! add up, and nothing is left one lease after the last event.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use decode_worker::core::DecodeCore;
use engine::sim::{SimConfig, SimModel};
use engine::{Engine, EngineConfig};
use expect_test::expect;
use prefill_worker::core::PrefillCore;
use proto::{
    Attempt, Digest, Error, Generation, Handoff, HandoffId, ModelDescription, Priority, Reason,
    SamplingParams, StopConditions, WorkerEpoch,
};
use worker::core::{Action, CallId, Core, DecodeItem, Event, FetchItem, Now, PrefillItem};
use worker::core_config::{CoreConfig, HandoffIds};

const SEEDS: u64 = 300;
const EVENTS: usize = 200;

/// Random numbers, the same for the same seed.
struct Dice(HandoffIds);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        let HandoffId(bytes) = self.0.draw();
        usize::from(u16::from_le_bytes([bytes[0], bytes[1]])) % bound
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        if from.is_empty() { None } else { from.get(self.below(from.len())) }
    }
}

/// What must hold for the calls at one core.
#[derive(Default)]
struct Ledger {
    open: BTreeSet<CallId>,
    over: BTreeSet<CallId>,
    fetches: BTreeSet<CallId>,
    /// What was done at all: a check that nothing came to is none.
    done: BTreeSet<&'static str>,
}

impl Ledger {
    fn check(&mut self, action: &Action) {
        self.done.insert(kind(action));
        match action {
            Action::Prefill { call, .. } | Action::Decode { call, .. } | Action::Fetch { call, .. } => {
                assert!(self.open.contains(call), "an item on a call that is not open: {action:?}");
            }
            Action::Close { call, .. } | Action::Renewed { call, .. } => {
                assert!(self.open.remove(call), "a second end: {action:?}");
                self.over.insert(*call);
            }
            Action::StartFetch { call, .. } => assert!(call.0 % 2 == 1 && self.fetches.insert(*call)),
            // It may have ended at the same instant.
            Action::DropFetch { call } => {
                self.fetches.remove(call);
            }
            Action::Renew { call, .. } => assert!(self.fetches.contains(call), "over: {action:?}"),
            Action::Release { .. } => {}
        }
    }
}

fn kind(action: &Action) -> &'static str {
    match action {
        Action::Prefill { item: PrefillItem::Issued { .. }, .. } => "issued",
        Action::Prefill { item: PrefillItem::Done { .. }, .. } => "done",
        Action::Decode { item: DecodeItem::Admitted { .. }, .. } => "admitted",
        Action::Decode { item: DecodeItem::Token(_), .. } => "token",
        Action::Decode { item: DecodeItem::Moved { .. }, .. } => "moved",
        Action::Fetch { item: FetchItem::Header { .. }, .. } => "header",
        Action::Fetch { item: FetchItem::Block(_), .. } => "block",
        Action::Fetch { item: FetchItem::End { .. }, .. } => "end",
        Action::Close { error: None, .. } => "closed",
        Action::Close { error: Some(error), .. } => error.reason.name(),
        Action::Renewed { result: Ok(_), .. } => "renewed",
        Action::Renewed { result: Err(_), .. } => "not renewed",
        Action::StartFetch { .. } => "fetch started",
        Action::DropFetch { .. } => "fetch given up",
        Action::Renew { .. } => "renewal",
        Action::Release { .. } => "release",
    }
}

struct World<C> {
    core: C,
    dice: Dice,
    now: Now,
    ledger: Ledger,
    next_call: u64,
    handoffs: Vec<Handoff>,
    /// Items of fetches that a core served, to be fed to one that fetches.
    items: BTreeMap<CallId, VecDeque<FetchItem>>,
}

impl<C: Core> World<C> {
    fn new(core: C, seed: u64, handoffs: Vec<Handoff>) -> Self {
        let dice = Dice(HandoffIds::Seeded(seed));
        let (ledger, items) = (Ledger::default(), BTreeMap::new());
        Self { core, dice, now: Now::ZERO, ledger, next_call: 0, handoffs, items }
    }

    fn open(&mut self) -> CallId {
        self.next_call += 2;
        self.ledger.open.insert(CallId(self.next_call));
        CallId(self.next_call)
    }

    fn generation(&mut self) -> Generation {
        let tokens = (0..=self.dice.below(20) as u32).map(|i| i * 7 % 256).collect();
        Generation {
            request: ["a", "b", "c"][self.dice.below(3)].into(),
            attempt: Attempt(self.dice.below(4) as u32),
            model: "sim".to_owned(),
            tokens,
            generated: 0,
            sampling: SamplingParams::default(),
            stop: StopConditions { max_tokens: 1 + self.dice.below(6), ..StopConditions::default() },
            time_left: Duration::from_secs(1 + self.dice.below(20) as u64),
            probe: false,
            beside: None,
            session: None,
            priority: Priority::default(),
        }
    }

    /// A known reference, sometimes forged.
    fn handoff(&mut self) -> Option<Handoff> {
        let mut handoff = self.dice.pick(&self.handoffs)?.clone();
        match self.dice.below(8) {
            0 => handoff.id = HandoffId([9; 16]),
            1 => handoff.epoch = WorkerEpoch(77),
            2 => handoff.attempt = handoff.attempt.next(),
            _ => {}
        }
        Some(handoff)
    }

    /// Any call there is or was.
    fn any_call(&mut self) -> Option<CallId> {
        let calls: Vec<_> = self.ledger.open.iter().chain(&self.ledger.over).copied().collect();
        self.dice.pick(&calls).copied()
    }

    fn event(&mut self) -> Option<Event> {
        let fetches: Vec<_> = self.ledger.fetches.iter().copied().collect();
        Some(match self.dice.below(12) {
            0 => Event::Prefill { generation: self.generation(), call: self.open() },
            1 => Event::Decode { generation: self.generation(), handoff: None, call: self.open() },
            2 => {
                let (handoff, mut generation) = (self.handoff()?, self.generation());
                generation.request = handoff.request.clone();
                generation.attempt = handoff.attempt;
                generation.tokens = (0..handoff.tokens as u32).map(|i| i * 7 % 256).collect();
                Event::Decode { generation, handoff: Some(handoff), call: self.open() }
            }
            3 => {
                let (handoff, skip) = (self.handoff()?, self.dice.below(24));
                Event::Fetch { handoff, skip, call: self.open() }
            }
            4 | 5 => Event::FetchCredit { call: self.any_call()?, items: self.dice.below(4) },
            6 => Event::Renew { handoff: self.handoff()?, call: self.open() },
            7 if self.dice.below(3) == 0 => Event::Move {
                request: ["a", "b", "c"][self.dice.below(3)].into(),
                attempt: Attempt(self.dice.below(4) as u32),
            },
            7 if self.dice.below(2) == 0 => Event::Release { handoff: self.handoff()? },
            7 => Event::Fence {
                request: ["a", "b", "c"][self.dice.below(3)].into(),
                attempt: Attempt(self.dice.below(4) as u32),
            },
            8 => {
                let call = self.any_call()?;
                self.ledger.open.remove(&call);
                self.ledger.over.insert(call);
                Event::Dropped { call }
            }
            9 => {
                let call = *self.dice.pick(&fetches)?;
                self.ledger.fetches.remove(&call);
                Event::FetchFailed { call, error: Error::new(Reason::WorkerLost, "lost") }
            }
            10 => {
                let call = *self.dice.pick(&fetches)?;
                let item = self.items.get_mut(&call)?.pop_front()?;
                if matches!(item, FetchItem::End { .. }) {
                    self.ledger.fetches.remove(&call);
                }
                Event::Fetched { call, item }
            }
            _ => {
                let (call, refused) = (*self.dice.pick(&fetches)?, self.dice.below(4) == 0);
                let refusal = Error::new(Reason::StaleAttempt, "refused");
                let result = if refused { Err(refusal) } else { Ok(Duration::from_secs(10)) };
                Event::RenewAnswered { call, result }
            }
        })
    }

    /// Checks what was done, and keeps references for later. Returns the fetches that were started.
    fn take(&mut self, actions: Vec<Action>) -> Vec<(CallId, Handoff, usize)> {
        let mut started = Vec::new();
        for action in actions {
            self.ledger.check(&action);
            match action {
                Action::Prefill { item: PrefillItem::Issued { handoff, .. }, .. }
                | Action::Decode { item: DecodeItem::Moved { handoff }, .. } => {
                    self.handoffs.push(handoff);
                }
                Action::StartFetch { call, handoff, skip, .. } => started.push((call, handoff, skip)),
                _ => {}
            }
        }
        let gauges = self.core.gauges();
        let blocks = gauges.blocks;
        assert_eq!(gauges.orphaned_blocks, 0);
        assert_eq!(blocks.free + blocks.cached + blocks.used, blocks.total);
        started
    }

    fn wake(&mut self, end: Now) {
        while let Some(wake) = self.core.next_wake().filter(|&wake| wake <= end) {
            self.now = self.now.max(wake);
            let mut actions = Vec::new();
            self.core.on(Event::Tick, self.now, &mut actions);
            self.take(actions);
            assert!(self.core.next_wake().is_none_or(|next| next > self.now), "a wake that stays due");
        }
        self.now = end;
    }

    fn play(&mut self, mut serve: impl FnMut(&Handoff, usize) -> VecDeque<FetchItem>) {
        for _ in 0..EVENTS {
            let mut actions = Vec::new();
            match self.dice.below(4) {
                0 => drop(self.core.step(&|| self.now, &mut actions)),
                1 => {
                    let time = Duration::from_millis(self.dice.below(1500) as u64);
                    // Woken in time, or late.
                    if self.dice.below(2) == 0 {
                        self.wake(self.now + time);
                    } else {
                        self.now += time;
                    }
                }
                _ => {
                    if let Some(event) = self.event() {
                        self.core.on(event, self.now, &mut actions);
                    }
                }
            }
            for (call, handoff, skip) in self.take(actions) {
                self.items.insert(call, serve(&handoff, skip));
            }
        }
        self.settle();
    }

    /// Nobody says anything any more: computation ends, leases and deadlines run out.
    fn settle(&mut self) {
        loop {
            let mut actions = Vec::new();
            let stepped = self.core.step(&|| self.now, &mut actions).is_some();
            self.take(actions);
            if !stepped {
                break;
            }
        }
        self.wake(self.now + Duration::from_secs(10) + Duration::from_secs(20));
        assert!(self.core.is_idle(), "{:?}", self.core.gauges());
        assert_eq!((self.core.gauges().blocks.used, self.core.next_wake()), (0, None));
        assert!(self.ledger.open.is_empty(), "calls without an end: {:?}", self.ledger.open);
    }
}

fn engine() -> Engine<SimModel> {
    let config = EngineConfig {
        kv_blocks: 24,
        block_tokens: 4,
        step_tokens: 8,
        sequences_max: 4,
        waiting_max: 4,
        ..EngineConfig::default()
    };
    Engine::new(SimModel::new(SimConfig::default()), config).expect("a valid configuration")
}

fn config(seed: u64) -> CoreConfig {
    let model = ModelDescription {
        name: "sim".to_owned(),
        fingerprint: Digest([1; 32]),
        tokenizer: Digest([2; 32]),
        context_len: SimConfig::default().context_len,
        vocab_size: SimConfig::default().vocab,
        numerics: "sim".to_owned(),
    };
    let mut config = CoreConfig::new("here:1", WorkerEpoch(1), model);
    config.handoff_ids = HandoffIds::Seeded(seed);
    config
}

#[test]
fn a_prefill_worker_keeps_its_promises() {
    let mut done = BTreeSet::new();
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut world = World::new(PrefillCore::new(engine(), config(seed)), seed, Vec::new());
        world.play(|_, _| VecDeque::new());
        world.core.engine().check().expect("block accounting");
        done.append(&mut world.ledger.done);
    }
    expect!["CANCELLED, DEADLINE, INVALID_ARGUMENT, LEASE_EXPIRED, STALE_ATTEMPT, STALE_EPOCH, TRUNCATED, UNKNOWN_HANDOFF, block, closed, done, end, header, issued, not renewed, renewed"].assert_eq(&Vec::from_iter(done).join(", "));
}

#[test]
fn a_decode_worker_keeps_its_promises() {
    let mut done = BTreeSet::new();
    for seed in 0..SEEDS {
        println!("seed {seed}");
        // An owner that does nothing wrong, and whose items come when the dice say so.
        let mut owner = World::new(PrefillCore::new(engine(), config(seed)), seed, Vec::new());
        for attempt in 0..3 {
            let mut generation = owner.generation();
            (generation.request, generation.attempt) = ("a".into(), Attempt(attempt));
            generation.request = ["a", "b", "c"][attempt as usize].into();
            let (call, mut actions) = (owner.open(), Vec::new());
            owner.core.on(Event::Prefill { call, generation }, Now::ZERO, &mut actions);
            while owner.core.step(&|| Now::ZERO, &mut actions).is_some() {}
            owner.take(actions);
        }
        let core = DecodeCore::new(engine(), config(seed));
        let mut world = World::new(core, seed, owner.handoffs.clone());
        world.play(|handoff, skip| {
            let (call, mut actions) = (owner.open(), Vec::new());
            owner.core.on(Event::Fetch { call, handoff: handoff.clone(), skip }, Now::ZERO, &mut actions);
            owner.core.on(Event::FetchCredit { call, items: 100 }, Now::ZERO, &mut actions);
            let item = |action| if let Action::Fetch { item, .. } = action { Some(item) } else { None };
            actions.into_iter().filter_map(item).collect()
        });
        world.core.engine().check().expect("block accounting");
        done.append(&mut world.ledger.done);
    }
    expect!["DEADLINE, INVALID_ARGUMENT, LEASE_EXPIRED, QUEUE_FULL, STALE_ATTEMPT, STALE_EPOCH, UNKNOWN_HANDOFF, WORKER_LOST, admitted, closed, fetch given up, fetch started, moved, not renewed, release, renewal, renewed, token"].assert_eq(&Vec::from_iter(done).join(", "));
}
