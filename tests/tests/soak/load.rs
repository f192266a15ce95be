//! The streams of a soak, and what became of each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_tests::client::{Answer, Ask, Client};
use baton_tests::{cluster, golden};
use engine::sim::{SimConfig, SimModel};
use proto::{SamplingParams, StopConditions};

use crate::chaos::Random;

/// The simulated model.
pub(crate) const MODEL: &str = "sim:vocab=4096,context_len=2048,step_us=4000,prefill_token_us=50";
const SHAPE: SimConfig = SimConfig { layers: 2, kv_heads: 1, head_dim: 4, vocab: 4096, context_len: 2048 };

/// The name under which the real model is served; the simulated one has the cluster's.
pub(crate) const REAL: &str = "real";

/// Tokens that the real model is asked for, and its prompts.
const REAL_TOKENS: usize = 16;
const REAL_PROMPTS: usize = 6;

/// Time that a request has. A machine with other things to do may need all of it.
const TIME: Duration = Duration::from_mins(1);

/// A request that is not over by then hangs.
const HUNG: Duration = Duration::from_secs(75);

/// One request in so many is left before its end.
const LEAVES: u64 = 8;

/// Pause after an error, as a client of good manners makes.
const PAUSE: Duration = Duration::from_millis(200);

/// Where to ask, and what the real model answers undisturbed.
pub(crate) struct Load {
    gateways: Vec<String>,
    real: Vec<(Vec<u32>, Vec<u32>)>,
    seed: u64,
}

/// What became of the requests.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    right: usize,
    real: usize,
    left: usize,
    tokens: usize,
    /// By what they said.
    errors: BTreeMap<String, usize>,
    wrong: Vec<String>,
    hung: Vec<String>,
}

impl Load {
    /// Asks the real model for its answers before anything is disturbed.
    pub(crate) async fn prepare(gateways: Vec<String>, seed: u64) -> Self {
        let client = Client::at(&gateways[0]);
        let mut cases = golden::cases();
        cases.sort_by_key(|case| case.prompt_ids.len());
        let mut real = Vec::new();
        for case in cases.into_iter().take(REAL_PROMPTS) {
            let ask = of_real(&case.prompt_ids);
            let mut answer = client.ask(&ask).await;
            let until = Instant::now() + cluster::PATIENCE;
            while answer.error.as_ref().is_some_and(|error| error.contains("not served")) {
                // Its workers still load it.
                assert!(Instant::now() < until, "the real model is served");
                tokio::time::sleep(PAUSE).await;
                answer = client.ask(&ask).await;
            }
            assert_eq!((answer.error, answer.tokens.len()), (None, REAL_TOKENS), "undisturbed");
            real.push((case.prompt_ids, answer.tokens));
        }
        Self { gateways, real, seed }
    }

    /// Asks, and asks again, until it is over.
    pub(crate) async fn stream(&self, number: u64, is_real: bool, over: &AtomicBool) -> Outcome {
        let mut random = Random::new(self.seed ^ (number + 1).wrapping_mul(0x9E37_79B9));
        let mut outcome = Outcome::default();
        while !over.load(Ordering::Relaxed) {
            let (ask, expected) = if is_real { self.real(&mut random) } else { simulated(&mut random) };
            let gateway = &self.gateways[random.below(self.gateways.len() as u64) as usize];
            let leaves = (random.below(LEAVES) == 0).then(|| Duration::from_millis(random.below(400)));
            let watched = Client::at(gateway).watch(ask.clone());
            if let Some(after) = leaves {
                tokio::time::sleep(after).await;
                if !watched.is_over() {
                    drop(watched);
                    outcome.left += 1;
                    continue;
                }
            }
            let Ok(answer) = tokio::time::timeout(HUNG, watched.answer()).await else {
                outcome.hung.push(format!(
                    "{} tokens from {} of {gateway}",
                    ask.max_tokens,
                    ask.prompt.len()
                ));
                continue;
            };
            let is_error = answer.error.is_some();
            outcome.judge(&answer, &ask, &expected, is_real);
            if is_error {
                tokio::time::sleep(PAUSE).await;
            }
        }
        outcome
    }

    fn real(&self, random: &mut Random) -> (Ask, Vec<u32>) {
        let (prompt, expected) = &self.real[random.below(self.real.len() as u64) as usize];
        (of_real(prompt), expected.clone())
    }
}

/// A request to the real model.
fn of_real(prompt: &[u32]) -> Ask {
    Ask { model: Some(REAL.to_owned()), timeout: Some(TIME), ..Ask::greedy(prompt, REAL_TOKENS) }
}

/// A request to the simulated model: prompts of all lengths, whole blocks among them, of which some begin alike.
fn simulated(random: &mut Random) -> (Ask, Vec<u32>) {
    let len = match random.below(3) {
        0 => 16 * (1 + random.below(16)),
        _ => 1 + random.below(320),
    };
    let (family, own) = (random.below(8), random.below(1 << 32));
    let token = |index: u64| {
        let of = if index < len / 2 { family } else { own };
        (of.wrapping_mul(31).wrapping_add(index * 17) % SHAPE.vocab as u64) as u32
    };
    let prompt: Vec<u32> = (0..len).map(token).collect();
    let max_tokens = 1 + random.below(64) as usize;
    let sampling = SamplingParams { temperature: 0.8, seed: own, ..SamplingParams::default() };
    let stop = StopConditions { max_tokens, ..StopConditions::default() };
    let expected = SimModel::reference(SHAPE, &prompt, &sampling, &stop);
    let model = Some(cluster::MODEL.to_owned());
    let ask = Ask { sampling, model, timeout: Some(TIME), ..Ask::greedy(&prompt, max_tokens) };
    (ask, expected)
}

impl Outcome {
    fn judge(&mut self, answer: &Answer, ask: &Ask, expected: &[u32], is_real: bool) {
        self.tokens += answer.tokens.len();
        let is_prefix = expected.starts_with(&answer.tokens);
        match &answer.error {
            None if answer.finished && answer.tokens == expected => {
                self.right += 1;
                self.real += usize::from(is_real);
            }
            Some(error) if is_prefix && !answer.finished => {
                // Addresses and numbers differ from one to the next.
                let kind: String = error.chars().filter(|c| !c.is_ascii_digit()).take(60).collect();
                *self.errors.entry(kind).or_default() += 1;
            }
            _ => self.wrong.push(format!(
                "{} tokens from {}: {:?} in place of {expected:?}, {:?}",
                ask.max_tokens,
                ask.prompt.len(),
                answer.tokens,
                answer.error
            )),
        }
    }

    /// Takes another stream's in.
    pub(crate) fn add(&mut self, other: Self) {
        self.right += other.right;
        self.real += other.real;
        self.left += other.left;
        self.tokens += other.tokens;
        for (kind, count) in other.errors {
            *self.errors.entry(kind).or_default() += count;
        }
        self.wrong.extend(other.wrong);
        self.hung.extend(other.hung);
    }

    /// True when nothing was wrong, nothing hung, and there was something to judge.
    pub(crate) fn is_well(&self) -> bool {
        self.wrong.is_empty() && self.hung.is_empty() && self.real > 0 && self.right > self.real
    }

    pub(crate) fn print(&self) {
        let Self { right, real, left, tokens, errors, wrong, hung } = self;
        println!("\n| requests | |\n|---|---|");
        println!("| right | {right}, of them by the real engine {real} |");
        println!("| tokens | {tokens} |");
        println!("| left by their clients | {left} |");
        println!("| wrong | {} |", wrong.len());
        println!("| hung | {} |", hung.len());
        for (kind, count) in errors {
            println!("| honest error: {kind}… | {count} |");
        }
        wrong.iter().take(5).for_each(|wrong| println!("wrong: {wrong}"));
        hung.iter().take(5).for_each(|hung| println!("hung: {hung}"));
    }
}
