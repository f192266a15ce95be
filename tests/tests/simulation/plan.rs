//! What a seed decides before a schedule starts: the cluster, the requests, and the faults.

use std::time::Duration;

use engine::EngineConfig;
use proto::{SamplingParams, StopConditions, TokenId};
use router::pools::PlacementMode;

use crate::oracle::{MODEL, Oracle};
use crate::rng::Rng;
use crate::table::{Fault, Phase};

/// One schedule.
pub(crate) struct Plan {
    pub(crate) routers: usize,
    pub(crate) prefills: usize,
    pub(crate) decodes: usize,
    pub(crate) placement: PlacementMode,
    pub(crate) prefill_engine: EngineConfig,
    pub(crate) decode_engine: EngineConfig,
    /// Most time that a message takes when nothing is wrong.
    pub(crate) latency: Duration,
    /// Time that an engine step takes.
    pub(crate) step: Duration,
    /// Items of a fetch that may be under way.
    pub(crate) window: usize,
    pub(crate) requests: Vec<PlannedRequest>,
    pub(crate) faults: Vec<PlannedFault>,
}

/// A request that a client will make.
pub(crate) struct PlannedRequest {
    pub(crate) at: Duration,
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) sampling: SamplingParams,
    pub(crate) stop: StopConditions,
    pub(crate) time_left: Duration,
    /// The request whose prompt it shares, and beside which it wants to be placed.
    pub(crate) sibling: Option<usize>,
    pub(crate) oracle: Oracle,
}

/// A fault that strikes when a request has entered a phase for the `nth` time, `after` that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedFault {
    pub(crate) fault: Fault,
    pub(crate) request: usize,
    pub(crate) phase: Phase,
    pub(crate) nth: usize,
    pub(crate) after: Duration,
}

/// Long enough for every request that is not meant to run out of time.
pub(crate) const PATIENT: Duration = Duration::from_mins(1);

impl Plan {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        // Blocks can only be overwritten unnoticed while nothing but a fetch reads them: neither a prefix cache nor
        // the rest of a prompt.
        let is_stray = rng.percent(8);
        let requests = Self::draw_requests(rng);
        let most_tokens = requests
            .iter()
            .map(|request| request.prompt.len() + request.stop.max_tokens)
            .max()
            .unwrap_or(0)
            .max(16);
        let mut prefill_engine = Self::draw_engine(rng, most_tokens);
        let decode_engine = Self::draw_engine(rng, most_tokens);
        if is_stray {
            (prefill_engine.prefix_cache, prefill_engine.step_tokens, prefill_engine.kv_blocks) =
                (false, 512, 256);
        }
        let latency = rng.millis(1, 8);
        let step = rng.millis(1, 20);
        let count = if rng.percent(10) { 0 } else { rng.between(1, 4) };
        let mut faults: Vec<_> =
            (0..count).map(|_| Self::draw_fault(rng, requests.len(), latency + step, is_stray)).collect();
        // Nothing moves by itself: what is to strike a request that moves needs a drain before.
        let moving: Vec<_> = faults.iter().filter(|fault| fault.phase == Phase::Moving).copied().collect();
        let is_moving = !moving.is_empty() || rng.percent(10);
        for PlannedFault { request, .. } in moving {
            let (fault, phase, nth, after) = (Fault::DecodeDrain, Phase::Decoding, 1, Duration::ZERO);
            faults.push(PlannedFault { fault, request, phase, nth, after });
        }
        Self {
            routers: rng.between(1, 2),
            prefills: rng.between(1, 3),
            decodes: if is_moving { rng.between(2, 3) } else { rng.between(1, 3) },
            placement: rng.pick(&[
                PlacementMode::Auto,
                PlacementMode::Auto,
                PlacementMode::Split,
                PlacementMode::Split,
                PlacementMode::Split,
                PlacementMode::Fused,
            ]),
            prefill_engine,
            decode_engine,
            latency,
            step,
            window: rng.pick(&[1, 2, 8]),
            requests,
            faults,
        }
    }

    fn draw_requests(rng: &mut Rng) -> Vec<PlannedRequest> {
        let base: Vec<TokenId> = (0..40).map(|_| rng.below(MODEL.vocab) as TokenId).collect();
        let count = rng.pick(&[1, 1, 2, 2, 3, 4]);
        let mut requests: Vec<PlannedRequest> = Vec::new();
        for index in 0..count {
            let request = PlannedRequest::draw(rng, &base);
            let leader = (index > 0 && rng.percent(25)).then(|| rng.below(index));
            requests.push(match leader {
                Some(leader) => request.beside(leader, &requests[leader]),
                None => request,
            });
        }
        requests
    }

    /// A request without sampling, for a cluster that is whole.
    pub(crate) fn last_request(prompt: Vec<TokenId>) -> PlannedRequest {
        let sampling = SamplingParams::default();
        let stop = StopConditions { max_tokens: 3, ..StopConditions::default() };
        let oracle = Oracle::new(&prompt, &sampling, &stop);
        PlannedRequest {
            at: Duration::ZERO,
            prompt,
            sampling,
            stop,
            time_left: PATIENT,
            sibling: None,
            oracle,
        }
    }

    fn draw_engine(rng: &mut Rng, most_tokens: usize) -> EngineConfig {
        let block_tokens = rng.pick(&[2, 4, 4, 8]);
        let step_tokens = rng.pick(&[4, 8, 16, 64]);
        let least = most_tokens.div_ceil(block_tokens) + 1;
        EngineConfig {
            kv_blocks: if rng.percent(40) { least + rng.below(3) } else { 4 * least },
            block_tokens,
            step_tokens,
            sequences_max: rng.between(1, 4),
            waiting_max: rng.pick(&[1, 4, 16]),
            prefix_seed: crate::workers::FINGERPRINT,
            prefix_cache: rng.percent(75),
        }
    }

    fn draw_fault(rng: &mut Rng, requests: usize, unit: Duration, is_stray: bool) -> PlannedFault {
        let fault = if is_stray && rng.percent(60) {
            Fault::StrayWrite
        } else {
            loop {
                let fault = rng.pick(&Fault::ALL);
                // A deadline is a property of its request, and stray writes need a schedule of their own.
                if !matches!(fault, Fault::Deadline | Fault::StrayWrite) {
                    break fault;
                }
            }
        };
        PlannedFault {
            fault,
            request: rng.below(requests),
            phase: rng.pick(&Phase::ALL),
            nth: rng.pick(&[1, 1, 1, 2]),
            after: if rng.percent(40) { Duration::ZERO } else { unit.mul_f64(rng.below(200) as f64 / 100.0) },
        }
    }
}

impl PlannedRequest {
    /// A request whose prompt may begin like those of others.
    pub(crate) fn draw(rng: &mut Rng, base: &[TokenId]) -> Self {
        let len = if rng.percent(35) { 8 * rng.between(1, 5) } else { rng.between(1, 40) };
        let shared = if rng.percent(70) { rng.between(0, len) } else { 0 };
        let mut prompt = base[..shared].to_vec();
        prompt.extend((shared..len).map(|_| rng.below(MODEL.vocab) as TokenId));
        let sampling = if rng.percent(50) {
            SamplingParams::default()
        } else {
            SamplingParams { temperature: 0.8, seed: rng.next(), ..SamplingParams::default() }
        };
        let max_tokens = if rng.percent(15) { 1 } else { rng.between(2, 10) };
        let mut stop = StopConditions { max_tokens, ..StopConditions::default() };
        let mut oracle = Oracle::new(&prompt, &sampling, &stop);
        if rng.percent(25) {
            stop.eos_ids = vec![rng.pick(&oracle.reference)];
            oracle = Oracle::new(&prompt, &sampling, &stop);
        }
        let time_left = if rng.percent(30) { rng.millis(20, 1500) } else { PATIENT };
        Self { at: rng.millis(0, 150), prompt, sampling, stop, time_left, sibling: None, oracle }
    }

    /// Another continuation of the prompt of request `leader`, a little later.
    fn beside(self, leader: usize, of: &Self) -> Self {
        let prompt = of.prompt.clone();
        let sampling = SamplingParams { sequence: of.sampling.sequence + 1, ..of.sampling.clone() };
        let oracle = Oracle::new(&prompt, &sampling, &self.stop);
        Self { at: of.at + self.at / 4, prompt, sampling, sibling: Some(leader), oracle, ..self }
    }
}
