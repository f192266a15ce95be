//! A prefill core and a decode core, connected directly: what the two generate together is what one sequence
//! computed alone would be, token for token.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use decode_worker::core::DecodeCore;
use engine::sim::{SimConfig, SimModel};
use engine::{Engine, EngineConfig};
use prefill_worker::core::PrefillCore;
use proto::{
    Attempt, Digest, Error, Generation, ModelDescription, Priority, SamplingParams, StopConditions, Token,
    TokenId, WorkerEpoch,
};
use worker::core::{Action, CallId, Core, DecodeItem, Event, FetchItem, Now, PrefillItem};
use worker::core_config::{CoreConfig, HandoffIds};

const MODEL: SimConfig = SimConfig { layers: 2, kv_heads: 1, head_dim: 4, vocab: 256, context_len: 1024 };

fn engine(blocks: usize, block_tokens: usize) -> Engine<SimModel> {
    let config = EngineConfig {
        kv_blocks: blocks,
        block_tokens,
        step_tokens: 8,
        sequences_max: 16,
        waiting_max: 16,
        prefix_seed: Digest([1; 32]),
        prefix_cache: true,
    };
    Engine::new(SimModel::new(MODEL), config).expect("a valid configuration")
}

fn config(address: &str, epoch: u64) -> CoreConfig {
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
    config
}

/// What became of a request.
#[derive(Debug, Default)]
struct Outcome {
    tokens: Vec<Token>,
    /// Tokens that decode had already.
    skipped: usize,
    /// Why calls ended, if not well.
    errors: Vec<Error>,
    blocks: usize,
}

impl Outcome {
    fn ids(&self) -> Vec<TokenId> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

/// Two workers and their router, which places every request on both.
struct Pair {
    prefill: PrefillCore<SimModel>,
    decode: DecodeCore<SimModel>,
    now: Now,
    next_call: u64,
    /// Requests by their calls, on either side.
    requests: BTreeMap<CallId, usize>,
    generations: Vec<Generation>,
    outcomes: Vec<Outcome>,
    /// Fetches by the call that decode opened, and by the one that prefill sees.
    fetches: BTreeMap<CallId, (CallId, usize)>,
    served: BTreeMap<CallId, CallId>,
    to_prefill: VecDeque<Event>,
    to_decode: VecDeque<Event>,
}

impl Pair {
    fn new(prefill_block: usize, decode_block: usize) -> Self {
        Self {
            prefill: PrefillCore::new(engine(128, prefill_block), config("prefill:1", 1)),
            decode: DecodeCore::new(engine(128, decode_block), config("decode:1", 2)),
            now: Now::ZERO,
            next_call: 0,
            requests: BTreeMap::new(),
            generations: Vec::new(),
            outcomes: Vec::new(),
            fetches: BTreeMap::new(),
            served: BTreeMap::new(),
            to_prefill: VecDeque::new(),
            to_decode: VecDeque::new(),
        }
    }

    fn draw(&mut self) -> CallId {
        self.next_call += 2;
        CallId(self.next_call)
    }

    fn submit(&mut self, generation: Generation) -> usize {
        let (call, request) = (self.draw(), self.outcomes.len());
        self.requests.insert(call, request);
        self.generations.push(generation.clone());
        self.outcomes.push(Outcome::default());
        self.to_prefill.push_back(Event::Prefill { call, generation });
        request
    }

    /// Lets both workers go on until nothing is left to do.
    fn settle(&mut self) {
        loop {
            self.now += Duration::from_millis(1);
            let mut actions = Vec::new();
            let event = self.to_prefill.pop_front();
            let mut idle = event.is_none();
            if let Some(event) = event {
                self.prefill.on(event, self.now, &mut actions);
            }
            idle &= self.prefill.step(&|| self.now, &mut actions).is_none();
            self.carry_out(actions);
            let mut actions = Vec::new();
            let event = self.to_decode.pop_front();
            idle &= event.is_none();
            if let Some(event) = event {
                self.decode.on(event, self.now, &mut actions);
            }
            idle &= self.decode.step(&|| self.now, &mut actions).is_none();
            self.carry_out(actions);
            self.prefill.engine().check().expect("block accounting");
            self.decode.engine().check().expect("block accounting");
            assert_eq!(self.prefill.gauges().orphaned_blocks, 0);
            assert_eq!(self.decode.gauges().orphaned_blocks, 0);
            if idle {
                break;
            }
        }
        assert!(self.prefill.is_idle() && self.decode.is_idle(), "nothing is left");
        assert_eq!((self.prefill.gauges().blocks.used, self.decode.gauges().blocks.used), (0, 0));
    }

    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Prefill { call, item: PrefillItem::Issued { handoff, .. } } => {
                    let request = self.requests[&call];
                    let generation = self.generations[request].clone();
                    let call = self.draw();
                    self.requests.insert(call, request);
                    self.to_decode.push_back(Event::Decode { call, generation, handoff: Some(handoff) });
                }
                Action::Prefill { call, item: PrefillItem::Done { token, .. } } => {
                    let request = self.requests[&call];
                    if token.finish.is_some() {
                        let calls = self.requests.iter().filter(|&(&c, &r)| r == request && c != call);
                        let decode = calls.map(|(&call, _)| call).next().expect("a decode call");
                        self.to_decode.push_back(Event::Dropped { call: decode });
                    }
                    self.outcomes[request].tokens.push(token);
                }
                Action::Decode { call, item } => {
                    let outcome = &mut self.outcomes[self.requests[&call]];
                    match item {
                        DecodeItem::Admitted { skipped_tokens } => outcome.skipped = skipped_tokens,
                        DecodeItem::Token(token) => outcome.tokens.push(token),
                        DecodeItem::Moved { .. } => panic!("nobody asked for that"),
                    }
                }
                Action::StartFetch { call, handoff, skip, .. } => {
                    // A decode worker names its calls by odd numbers: which request it is for, the reference tells.
                    let request = self.generations.iter().position(|g| g.request == handoff.request);
                    let request = request.expect("a request that was submitted");
                    let served = self.draw();
                    self.fetches.insert(call, (served, request));
                    self.served.insert(served, call);
                    self.to_prefill.push_back(Event::Fetch { call: served, handoff, skip });
                    self.to_prefill.push_back(Event::FetchCredit { call: served, items: 2 });
                }
                Action::Fetch { call, item } => {
                    let fetch = self.served[&call];
                    if let FetchItem::Block(_) = item {
                        self.outcomes[self.fetches[&fetch].1].blocks += 1;
                    }
                    self.to_decode.push_back(Event::Fetched { call: fetch, item });
                    self.to_prefill.push_back(Event::FetchCredit { call, items: 1 });
                }
                Action::DropFetch { call } => {
                    self.to_prefill.push_back(Event::Dropped { call: self.fetches[&call].0 });
                }
                Action::Renew { call, handoff } => self.to_prefill.push_back(Event::Renew { call, handoff }),
                Action::Renewed { call, result } => {
                    self.to_decode.push_back(Event::RenewAnswered { call, result });
                }
                Action::Release { handoff } => self.to_prefill.push_back(Event::Release { handoff }),
                Action::Close { call, error } => self.closed(call, error),
            }
        }
    }

    fn closed(&mut self, call: CallId, error: Option<Error>) {
        let Some(error) = error else { return };
        if let Some(&fetch) = self.served.get(&call) {
            self.to_decode.push_back(Event::FetchFailed { call: fetch, error });
        } else {
            self.outcomes[self.requests[&call]].errors.push(error);
        }
    }
}

fn generation(name: &str, tokens: Vec<TokenId>, max_tokens: usize) -> Generation {
    Generation {
        request: name.into(),
        attempt: Attempt(0),
        model: "sim".to_owned(),
        tokens,
        generated: 0,
        sampling: SamplingParams::default(),
        stop: StopConditions { max_tokens, ..StopConditions::default() },
        time_left: Duration::from_mins(1),
        probe: false,
        beside: None,
        session: None,
        priority: Priority::default(),
    }
}

fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
    (0..len as u32).map(|i| (seed * 97 + i * 31 + (i >> 3)) % 256).collect()
}

fn reference(generation: &Generation) -> Vec<TokenId> {
    SimModel::reference(MODEL, &generation.tokens, &generation.sampling, &generation.stop)
}

/// Runs the requests together and checks each against the reference.
fn check(pair: &mut Pair, generations: &[Generation]) -> Vec<usize> {
    let requests: Vec<_> = generations.iter().map(|generation| pair.submit(generation.clone())).collect();
    pair.settle();
    for (&request, generation) in requests.iter().zip(generations) {
        let outcome = &pair.outcomes[request];
        assert_eq!(outcome.errors, [], "{generation:?}");
        assert_eq!(outcome.ids(), reference(generation), "{generation:?}");
        for (index, token) in outcome.tokens.iter().enumerate() {
            assert_eq!(token.index, index);
            assert_eq!(token.finish.is_some(), index + 1 == outcome.tokens.len());
        }
    }
    requests
}

#[test]
fn split_is_the_reference_for_every_prompt_length_and_block_size() {
    for (prefill_block, decode_block) in [(4, 4), (4, 8), (8, 4), (16, 3), (3, 5), (1, 16)] {
        for len in 1..=33 {
            let mut pair = Pair::new(prefill_block, decode_block);
            check(&mut pair, &[generation("a", prompt(1, len), 6)]);
            assert_eq!(pair.outcomes[0].blocks, len.div_ceil(prefill_block));
        }
    }
}

#[test]
fn what_decode_has_is_not_sent_again() {
    for (prefill_block, decode_block) in [(4, 4), (4, 8), (8, 4), (16, 3), (3, 5)] {
        for (first, second) in [(33, 33), (32, 32), (20, 33), (33, 20), (16, 17)] {
            let mut pair = Pair::new(prefill_block, decode_block);
            check(&mut pair, &[generation("a", prompt(1, first), 6)]);
            let again = check(&mut pair, &[generation("b", prompt(1, second), 6)])[0];
            let outcome = &pair.outcomes[again];
            let shared = first.min(second) / decode_block * decode_block;
            assert!(outcome.skipped >= shared, "{} of {shared} tokens skipped", outcome.skipped);
            let rounded = outcome.skipped / prefill_block * prefill_block;
            assert_eq!(outcome.blocks, (second - rounded).div_ceil(prefill_block));
        }
    }
}

#[test]
fn many_at_once_are_each_their_own() {
    let mut pair = Pair::new(4, 8);
    let generations: Vec<_> = (0..10)
        .map(|i| {
            let mut generation =
                generation(&format!("r{i}"), prompt(i % 3, 5 + 3 * i as usize), 4 + i as usize);
            if i % 2 == 1 {
                generation.sampling =
                    SamplingParams { temperature: 0.8, seed: u64::from(i), ..SamplingParams::default() };
            }
            generation
        })
        .collect();
    check(&mut pair, &generations);
}

#[test]
fn a_first_token_that_finishes_is_the_only_one() {
    let mut pair = Pair::new(4, 4);
    check(&mut pair, &[generation("length", prompt(1, 9), 1)]);
    let mut stops = generation("eos", prompt(2, 12), 9);
    stops.stop.eos_ids = vec![reference(&stops)[0]];
    check(&mut pair, &[stops]);
    let mut stops = generation("stop", prompt(3, 12), 9);
    stops.stop.stop_token_ids = vec![reference(&stops)[0]];
    check(&mut pair, &[stops]);
}

#[test]
fn a_later_attempt_goes_on_where_the_tokens_end() {
    let whole = generation("a", prompt(4, 13), 9);
    let expected = reference(&whole);
    for generated in 0..expected.len() {
        let mut pair = Pair::new(4, 8);
        let mut rest = whole.clone();
        rest.attempt = Attempt(generated as u32);
        rest.tokens.extend_from_slice(&expected[..generated]);
        rest.generated = generated;
        let request = pair.submit(rest);
        pair.settle();
        assert_eq!(pair.outcomes[request].ids(), expected[generated..]);
        assert_eq!(pair.outcomes[request].tokens[0].index, generated);
    }
}

#[test]
fn siblings_are_what_each_would_be_alone() {
    for (prefill_block, decode_block) in [(4, 4), (4, 8), (16, 3), (3, 5)] {
        for len in [1, 7, 8, 9, 30] {
            let mut pair = Pair::new(prefill_block, decode_block);
            let siblings: Vec<_> = (0..8)
                .map(|sequence| {
                    let mut sibling = generation(&format!("s{sequence}"), prompt(2, len), 9);
                    sibling.sampling =
                        SamplingParams { temperature: 1.0, seed: 5, sequence, ..SamplingParams::default() };
                    sibling
                })
                .collect();
            check(&mut pair, &siblings);
            let different: BTreeSet<_> = pair.outcomes.iter().map(Outcome::ids).collect();
            assert!(different.len() > 4, "the index of the sequence decides");
        }
    }
}

#[test]
fn alternatives_and_the_prompts_report_pass_through() {
    let mut wanted = generation("a", prompt(3, 21), 5);
    wanted.sampling.logprobs = Some(3);
    wanted.sampling.prompt_logprobs = Some(2);
    let mut pair = Pair::new(4, 8);
    check(&mut pair, &[generation("cold", prompt(3, 21), 5)]);
    check(&mut pair, &[generation("warm", prompt(3, 21), 5), wanted]);
    let [cold, warm, told] = pair.outcomes.as_slice() else { panic!("three requests") };
    for (outcome, cached, reported) in [(cold, 0, 0), (warm, 20, 0), (told, 0, 20)] {
        let reports: Vec<_> = outcome.tokens.iter().map(|token| token.prompt.as_deref()).collect();
        assert!(reports[1..].iter().all(Option::is_none), "decode has computed nothing of the prompt");
        let report = reports[0].expect("the first token of a placement has it");
        assert_eq!((report.cached_tokens, report.logprobs.len()), (cached, reported));
    }
    let report = told.tokens[0].prompt.as_ref().expect("a report");
    assert!(report.logprobs.iter().zip(&prompt(3, 21)[1..]).all(|(of, token)| of.token.id == *token));
    assert!(report.logprobs.iter().all(|of| of.top.len() == 2));
    assert!(warm.tokens.iter().all(|token| token.top.is_empty()));
    for token in &told.tokens {
        // It is greedy.
        assert_eq!((token.top.len(), token.top[0].id), (3, token.id));
    }
}

#[test]
fn a_fused_placement_reports_on_the_prompt_too() {
    let mut decode = DecodeCore::new(engine(64, 4), config("decode:1", 2));
    let (call, now) = (CallId(2), Now::ZERO);
    let mut fused = generation("a", prompt(3, 21), 4);
    fused.sampling.logprobs = Some(1);
    fused.sampling.prompt_logprobs = Some(0);
    let mut actions = Vec::new();
    decode.on(Event::Decode { call, generation: fused.clone(), handoff: None }, now, &mut actions);
    while decode.step(&|| now, &mut actions).is_some() {}
    let tokens: Vec<_> = actions
        .into_iter()
        .filter_map(|action| match action {
            Action::Decode { item: DecodeItem::Token(token), .. } => Some(token),
            _ => None,
        })
        .collect();
    assert_eq!(tokens.iter().map(|token| token.id).collect::<Vec<_>>(), reference(&fused));
    assert!(tokens.iter().all(|token| token.top.len() == 1));
    let reported: Vec<_> =
        tokens.iter().map(|token| token.prompt.as_ref().map(|report| report.logprobs.len())).collect();
    assert_eq!(reported, [Some(20), None, None, None]);
}
