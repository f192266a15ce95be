//! Two decode workers and a sequence that moves between them: wherever it is interrupted, and however often, it goes on as
//! if nobody had touched it, by its KV alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use checkpoint::grammar::GrammarEnv;
use decode_worker::core::DecodeCore;
use engine::sim::{SimConfig, SimModel};
use engine::{Engine, EngineConfig};
use proto::{
    Attempt, Digest, Generation, Grammar, Handoff, ModelDescription, Priority, SamplingParams,
    StopConditions, Token, TokenId, WorkerEpoch,
};
use worker::core::{Action, CallId, Core, DecodeItem, Event, Moves, Now};
use worker::core_config::{CoreConfig, HandoffIds};

const MODEL: SimConfig = SimConfig { layers: 2, kv_heads: 1, head_dim: 4, vocab: 256, context_len: 256 };
/// Ends an output under a grammar.
const EOS: TokenId = 0;

/// Shared, with what it has compiled.
static VOCABULARY: LazyLock<Arc<GrammarEnv>> =
    LazyLock::new(|| Arc::new(GrammarEnv::of_bytes(MODEL.vocab, EOS).expect("a vocabulary of bytes")));

fn core(address: &str, epoch: u64, block_tokens: usize, prefix_cache: bool) -> DecodeCore<SimModel> {
    let config = EngineConfig {
        kv_blocks: 128,
        block_tokens,
        step_tokens: 8,
        prefix_seed: Digest([1; 32]),
        prefix_cache,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(SimModel::new(MODEL), config).expect("a valid configuration");
    engine.set_vocabulary(Arc::clone(&VOCABULARY));
    let model = ModelDescription {
        name: "sim".to_owned(),
        fingerprint: Digest([1; 32]),
        tokenizer: Digest([2; 32]),
        context_len: MODEL.context_len,
        vocab_size: MODEL.vocab,
        numerics: "sim".to_owned(),
    };
    let mut config = CoreConfig::new(address, WorkerEpoch(epoch), model);
    config.handoff_ids = HandoffIds::Seeded(epoch);
    DecodeCore::new(engine, config)
}

fn generation(tokens: Vec<TokenId>, sampling: SamplingParams, max_tokens: usize) -> Generation {
    Generation {
        request: "r".into(),
        attempt: Attempt::default(),
        model: "sim".to_owned(),
        tokens,
        generated: 0,
        sampling,
        stop: StopConditions { max_tokens, eos_ids: vec![EOS], ..StopConditions::default() },
        time_left: Duration::from_mins(1),
        probe: false,
        beside: None,
        session: None,
        priority: Priority::default(),
    }
}

/// Two decode workers and a router that moves its one sequence from one to the other.
struct Pair {
    cores: [DecodeCore<SimModel>; 2],
    /// Where the sequence is.
    at: usize,
    asked: Generation,
    tokens: Vec<Token>,
    /// Fetches as the fetching worker names them, to how the owner does.
    fetches: BTreeMap<CallId, CallId>,
    next_call: u64,
    computed: [usize; 2],
    is_over: bool,
}

impl Pair {
    fn start(cores: [DecodeCore<SimModel>; 2], asked: Generation) -> Self {
        let (tokens, fetches) = (Vec::new(), BTreeMap::new());
        let mut pair =
            Self { cores, at: 0, asked, tokens, fetches, next_call: 0, computed: [0; 2], is_over: false };
        pair.decode(None);
        pair
    }

    fn draw(&mut self) -> CallId {
        self.next_call += 2;
        CallId(self.next_call)
    }

    fn decode(&mut self, handoff: Option<Handoff>) {
        let mut generation = self.asked.clone();
        generation.tokens.extend(self.tokens.iter().map(|token| token.id));
        generation.generated = self.tokens.len();
        if handoff.is_some() {
            generation.tokens.pop();
            generation.generated -= 1;
        }
        let call = self.draw();
        self.tell(self.at, Event::Decode { call, generation, handoff });
    }

    /// Gives a worker an event, and everything that follows from it to whom it concerns.
    fn tell(&mut self, to: usize, event: Event) {
        let mut events = VecDeque::from([(to, event)]);
        while let Some((to, event)) = events.pop_front() {
            let mut actions = Vec::new();
            self.cores[to].on(event, Now::ZERO, &mut actions);
            self.carry_out(to, actions, &mut events);
        }
    }

    fn carry_out(&mut self, by: usize, actions: Vec<Action>, events: &mut VecDeque<(usize, Event)>) {
        let other = 1 - by;
        for action in actions {
            match action {
                Action::Decode { item: DecodeItem::Token(token), .. } => {
                    assert_eq!(token.index, self.tokens.len(), "no gap, no repetition");
                    self.is_over = token.finish.is_some();
                    self.tokens.push(token);
                }
                Action::Decode { item: DecodeItem::Moved { handoff }, .. } => {
                    self.at = other;
                    self.decode(Some(handoff));
                }
                Action::StartFetch { call, handoff, skip, .. } => {
                    let served = self.draw();
                    self.fetches.insert(served, call);
                    events.push_back((other, Event::Fetch { call: served, handoff, skip }));
                    events.push_back((other, Event::FetchCredit { call: served, items: 1000 }));
                }
                Action::Fetch { call, item } => {
                    let call = self.fetches[&call];
                    events.push_back((other, Event::Fetched { call, item }));
                }
                Action::Release { handoff } => events.push_back((other, Event::Release { handoff })),
                Action::Close { error, .. } => assert_eq!(error, None),
                Action::Decode { item: DecodeItem::Admitted { .. }, .. } | Action::Renew { .. } => {}
                other => panic!("{other:?} is nothing that a decode worker does here"),
            }
        }
    }

    /// One step where the sequence is.
    fn step(&mut self) {
        let (mut actions, mut events, at) = (Vec::new(), VecDeque::new(), self.at);
        let size = self.cores[at].step(&|| Now::ZERO, &mut actions).expect("work");
        self.computed[at] += size.tokens;
        self.carry_out(at, actions, &mut events);
        assert!(events.is_empty(), "a step opens no call");
    }

    fn move_away(&mut self) {
        let Generation { request, attempt, .. } = self.asked.clone();
        self.tell(self.at, Event::Move { request, attempt });
    }

    fn check(&self) {
        for core in &self.cores {
            core.engine().check().expect("block accounting");
            assert!(core.is_idle(), "{:?}", core.gauges());
            assert_eq!((core.gauges().blocks.used, core.gauges().orphaned_blocks), (0, 0));
        }
    }
}

fn cases() -> Vec<SamplingParams> {
    let seeded = SamplingParams {
        temperature: 0.8,
        seed: 7,
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        frequency_penalty: 0.2,
        logprobs: Some(3),
        ..SamplingParams::default()
    };
    let schema = r#"{"type":"object","properties":{"a":{"type":"string","minLength":9,"maxLength":12}},"required":["a"]}"#;
    let grammar = Some(Grammar::JsonSchema(schema.into()));
    vec![
        SamplingParams::default(),
        SamplingParams { grammar: grammar.clone(), ..SamplingParams::default() },
        SamplingParams { grammar, ..seeded.clone() },
        seeded,
    ]
}

/// What one worker gives that nobody interrupts.
fn undisturbed(asked: &Generation) -> Vec<Token> {
    let cores = [core("a:1", 1, 4, true), core("b:1", 2, 4, true)];
    let mut alone = Pair::start(cores, asked.clone());
    while !alone.is_over {
        alone.step();
    }
    alone.tokens
}

/// A token without what depends on the batch and the clock.
fn shown(token: &Token) -> Token {
    Token { queue_wait: Duration::ZERO, batch_size: 0, ..token.clone() }
}

#[test]
fn a_sequence_goes_on_the_same_wherever_it_is_interrupted() {
    for sampling in cases() {
        let asked = generation((10..31).collect(), sampling, 24);
        let expected: Vec<_> = undisturbed(&asked).iter().map(shown).collect();
        for (blocks, cached) in [((4, 4), true), ((4, 16), false), ((16, 4), true), ((8, 2), false)] {
            for place in 1..expected.len() {
                let cores = [core("a:1", 1, blocks.0, cached), core("b:1", 2, blocks.1, cached)];
                let mut pair = Pair::start(cores, asked.clone());
                while !pair.is_over {
                    if pair.tokens.len() == place && pair.at == 0 {
                        pair.move_away();
                    }
                    pair.step();
                }
                assert_eq!(pair.tokens.iter().map(shown).collect::<Vec<_>>(), expected, "{place} {blocks:?}");
                assert_eq!(
                    pair.computed[1],
                    expected.len() - place,
                    "what was computed is not computed again"
                );
                assert_eq!(pair.cores[0].gauges().moves, Moves { taken: 1, lost: 0 });
                pair.check();
            }
        }
    }
}

#[test]
fn it_may_move_after_every_token_and_come_back() {
    for sampling in cases() {
        let asked = generation((10..31).collect(), sampling, 24);
        let expected: Vec<_> = undisturbed(&asked).iter().map(shown).collect();
        let mut pair = Pair::start([core("a:1", 1, 4, true), core("b:1", 2, 8, true)], asked);
        while !pair.is_over {
            if !pair.tokens.is_empty() {
                pair.move_away();
            }
            pair.step();
        }
        assert_eq!(pair.tokens.iter().map(shown).collect::<Vec<_>>(), expected);
        let taken = pair.cores.iter().map(|core| core.gauges().moves.taken).sum::<u64>();
        assert_eq!(taken as usize, expected.len() - 1);
        pair.check();
    }
}
