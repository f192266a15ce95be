//! Drives engines the way a worker does.

use std::collections::BTreeMap;

use engine::digest::handoff_digest;
use engine::model::Model;
use engine::sim::{SimConfig, SimModel};
use engine::{Engine, EngineConfig, EngineEvent, Reservation, SequenceId, SequenceSpec, Until};
use proto::{Digest, Error, FinishReason, HandoffId, PromptReport, SamplingParams, StopConditions, TokenId};

pub(crate) const HANDOFF: HandoffId = HandoffId([9; 16]);

pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        kv_blocks: 64,
        block_tokens: 4,
        step_tokens: 16,
        sequences_max: 8,
        waiting_max: 32,
        prefix_seed: Digest([1; 32]),
        prefix_cache: true,
    }
}

pub(crate) fn engine(config: EngineConfig) -> Engine<SimModel> {
    Engine::new(SimModel::new(SimConfig::default()), config).unwrap()
}

/// A prompt that differs from other `salt`s from its first token on.
pub(crate) fn prompt(salt: usize, len: usize) -> Vec<TokenId> {
    (0..len).map(|i| ((i * 7 + salt * 31 + i * i * 3) % 256) as TokenId).collect()
}

pub(crate) fn spec(tokens: Vec<TokenId>, max_tokens: usize) -> SequenceSpec {
    SequenceSpec {
        tokens,
        generated: 0,
        sampling: SamplingParams::default(),
        stop: StopConditions { max_tokens, ..StopConditions::default() },
        until: Until::Finished,
    }
}

pub(crate) fn seeded(tokens: Vec<TokenId>, max_tokens: usize, seed: u64) -> SequenceSpec {
    let sampling = SamplingParams {
        temperature: 0.8,
        top_k: Some(40),
        top_p: 0.9,
        repetition_penalty: 1.1,
        presence_penalty: 0.3,
        frequency_penalty: 0.2,
        seed,
        ..SamplingParams::default()
    };
    SequenceSpec { sampling, ..spec(tokens, max_tokens) }
}

pub(crate) fn reference(spec: &SequenceSpec) -> Vec<TokenId> {
    SimModel::reference(SimConfig::default(), &spec.tokens, &spec.sampling, &spec.stop)
}

/// What became of sequences.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) tokens: BTreeMap<SequenceId, Vec<TokenId>>,
    pub(crate) finished: BTreeMap<SequenceId, FinishReason>,
    pub(crate) failed: BTreeMap<SequenceId, Error>,
    pub(crate) cached: BTreeMap<SequenceId, usize>,
    pub(crate) prompts: BTreeMap<SequenceId, PromptReport>,
    pub(crate) steps: usize,
    pub(crate) preempted_max: usize,
}

impl Outcome {
    /// Takes in an event, and checks that events of a sequence come in order and end with one.
    pub(crate) fn take(&mut self, event: EngineEvent) {
        let id = event.id();
        assert!(
            !self.failed.contains_key(&id) && !self.finished.contains_key(&id),
            "after the end: {event:?}"
        );
        match event {
            EngineEvent::Scheduled { id, cached } => {
                assert_eq!(self.cached.insert(id, cached), None, "scheduled twice");
            }
            EngineEvent::Sealed { .. } => {}
            EngineEvent::Token { id, index, token, logprob, prompt, finish, .. } => {
                assert!(logprob <= 0.0);
                if let Some(report) = prompt {
                    assert_eq!(self.cached.get(&id), Some(&report.cached_tokens));
                    assert_eq!(self.prompts.insert(id, *report), None, "reported twice");
                }
                let tokens = self.tokens.entry(id).or_default();
                let _ = index;
                tokens.push(token);
                if let Some(finish) = finish {
                    self.finished.insert(id, finish);
                }
            }
            EngineEvent::Failed { id, error } => {
                self.failed.insert(id, error);
            }
        }
    }
}

/// Steps until there is no work.
pub(crate) fn run<M: Model>(engine: &mut Engine<M>) -> Outcome {
    let mut outcome = Outcome::default();
    while engine.has_work() {
        let report = engine.step();
        assert!(!report.interrupted);
        outcome.steps += 1;
        assert!(outcome.steps < 100_000, "the engine makes no end");
        outcome.preempted_max = outcome.preempted_max.max(engine.sequence_counts().preempted);
        report.events.into_iter().for_each(|event| outcome.take(event));
    }
    outcome
}

/// Prefills `spec` on `engine` until it is held.
pub(crate) fn prefill(engine: &mut Engine<SimModel>, spec: &SequenceSpec) -> (SequenceId, TokenId) {
    let id = engine.submit(SequenceSpec { until: Until::FirstToken, ..spec.clone() }).unwrap();
    let outcome = run(engine);
    (id, outcome.tokens[&id][0])
}

/// Fetches the KV that `to` lacks, and starts decoding there.
pub(crate) fn hand_over(
    (from, held): (&Engine<SimModel>, SequenceId),
    (to, reservation): (&mut Engine<SimModel>, Reservation),
    tokens: &[TokenId],
    first: TokenId,
) -> Result<(), Error> {
    let block = from.layout().block_tokens;
    let skip = reservation.skip / block * block;
    let mut checksums = Vec::new();
    for start in (skip..tokens.len()).step_by(block) {
        let sent = from.export(held, start)?.expect("held KV is sealed");
        checksums.extend_from_slice(&sent.checksums);
        to.import(reservation.id, &sent)?;
    }
    let digest = handoff_digest(HANDOFF, tokens, skip, checksums.into_iter(), first);
    to.activate(reservation.id, HANDOFF, first, digest).map(drop)
}

/// Prefills on one engine, decodes on the other, and gives all tokens.
pub(crate) fn split(
    from: &mut Engine<SimModel>,
    to: &mut Engine<SimModel>,
    spec: &SequenceSpec,
) -> Vec<TokenId> {
    let (held, first) = prefill(from, spec);
    let reservation = to.reserve(spec.clone()).unwrap();
    hand_over((from, held), (to, reservation), &spec.tokens, first).unwrap();
    from.release(held);
    let mut tokens = vec![first];
    tokens.extend(&run(to).tokens[&reservation.id]);
    tokens
}
