//! Choosing workers: 1,000 of them, and a million blocks.

use std::hint::black_box;
use std::time::{Duration, Instant};

use proto::worker::PROTOCOL_VERSION;
use proto::{
    BlockHash, Digest, HashChain, KvDtype, KvLayout, ModelDescription, Role, TokenId, WorkerDescription,
    WorkerEpoch, WorkerLoad,
};
use router::cost::Observation;
use router::policy::Policy;
use router::pools::{NamedBlocks, PlacementMode, Pools, Wish};

/// Half of them prefill workers, half decode workers.
pub(crate) const WORKERS: usize = 1000;
/// Blocks that a worker alone has.
const OWN_BLOCKS: usize = 1000;
/// Beginnings that several workers have, such as system prompts.
const FAMILIES: usize = 200;
const FAMILY_BLOCKS: usize = 64;
/// Workers that have one.
const FAMILY_WORKERS: usize = 50;
/// Beginnings that all workers have.
const COMMON: usize = 4;
pub(crate) const BLOCK_TOKENS: usize = 16;
/// Blocks of a prompt.
const PROMPT_BLOCKS: [usize; 3] = [64, 128, 512];
const DECISIONS: usize = 60_000;

pub(crate) fn description(role: Role, epoch: u64) -> WorkerDescription {
    WorkerDescription {
        protocol: PROTOCOL_VERSION,
        epoch: WorkerEpoch(epoch),
        role,
        model: ModelDescription {
            name: "m".into(),
            fingerprint: Digest([7; 32]),
            tokenizer: Digest([8; 32]),
            context_len: 1 << 17,
            vocab_size: 1 << 16,
            numerics: "none".into(),
        },
        layout: KvLayout {
            layers: 30,
            kv_heads: 3,
            head_dim: 64,
            dtype: KvDtype::F16,
            block_tokens: BLOCK_TOKENS,
        },
        draining: false,
        blocks_total: 1 << 20,
        blocks_free: 1 << 19,
        sequences: 0,
    }
}

pub(crate) fn chain() -> HashChain {
    HashChain::new(Digest([7; 32]), BLOCK_TOKENS)
}

/// Tokens of a prompt: of a family for so many blocks, then its own.
fn tokens(family: usize, shared_blocks: usize, own: usize, blocks: usize) -> Vec<TokenId> {
    let token = |at: usize| {
        if at < shared_blocks * BLOCK_TOKENS { family as TokenId } else { (1 << 12) + own as TokenId }
    };
    (0..blocks * BLOCK_TOKENS).map(token).collect()
}

/// What only that worker has.
pub(crate) fn own_blocks(worker: usize, blocks: usize) -> Vec<BlockHash> {
    chain().of(&tokens(0, 0, worker, blocks))
}

fn pools() -> Pools {
    let name = |worker: usize| format!("10.0.{}.{}:9100", worker / 250, worker % 250);
    let role = |worker: usize| if worker.is_multiple_of(2) { Role::Prefill } else { Role::Decode };
    let mut pools = Pools::with_policy(Policy::Prefix, 1);
    let names: Vec<String> = (0..WORKERS).map(name).collect();
    pools.set_members(names.iter().enumerate().map(|(worker, name)| (role(worker), name.as_str())));
    for (worker, name) in names.iter().enumerate() {
        pools.described(name, description(role(worker), 1));
        let load = WorkerLoad {
            running: worker % 7,
            waiting_tokens: worker * 37 % 500,
            blocks_free: 1 << 19,
            blocks_total: 1 << 20,
            ..WorkerLoad::default()
        };
        pools.reported(name, WorkerEpoch(1), load);
    }
    for family in 0..FAMILIES {
        let blocks = chain().of(&tokens(family, FAMILY_BLOCKS, 0, FAMILY_BLOCKS));
        let holders = if family < COMMON { WORKERS } else { FAMILY_WORKERS };
        (0..holders).for_each(|at| pools.has_blocks(&names[(family * 31 + at) % WORKERS], &blocks));
    }
    for (worker, name) in names.iter().enumerate() {
        pools.has_blocks(name, &own_blocks(worker, OWN_BLOCKS));
    }
    // Placements that choose between one worker and two do so once something was seen: 0.2 ms for a token of a prompt, and
    // 1 ms and 20 µs a token for a hop.
    for tokens in (1..=20).map(|size| size * 100) {
        let us = |us: usize| Duration::from_micros(us as u64);
        pools.observe("m", Observation::Prefill { tokens, took: us(200 * tokens) });
        pools.observe("m", Observation::Hop { tokens, took: us(1000 + 20 * tokens) });
    }
    pools
}

/// Prompts of one kind.
struct Kind {
    name: &'static str,
    prompt: fn(usize, usize) -> Vec<TokenId>,
}

const KINDS: [Kind; 4] = [
    Kind { name: "nobody has any of it", prompt: |at, blocks| tokens(0, 0, 1_000_000 + at, blocks) },
    Kind {
        name: "a beginning that 50 have",
        prompt: |at, blocks| {
            tokens(COMMON + at % (FAMILIES - COMMON), FAMILY_BLOCKS.min(blocks), 2_000_000 + at, blocks)
        },
    },
    Kind {
        name: "a beginning that 1,000 have",
        prompt: |at, blocks| tokens(at % COMMON, FAMILY_BLOCKS.min(blocks), 2_000_000 + at, blocks),
    },
    Kind { name: "one has all of it", prompt: |at, blocks| tokens(0, 0, at % WORKERS, blocks) },
];

/// The ways of placing that are measured.
const MODES: [PlacementMode; 2] = [PlacementMode::Split, PlacementMode::Auto];

/// Measures and prints.
pub(crate) fn run() {
    let pools = pools();
    let index = pools.index();
    println!(
        "{WORKERS} workers, {} blocks known, {:.1} MiB of index",
        index.blocks(),
        index.bytes() as f64 / f64::from(1 << 20)
    );
    println!(
        "Times in µs: to hash a prompt, and of a decision (50, 99 and 99.9 of a hundred) with each placement."
    );
    println!("| prompt, tokens | who has it | hashing | split | p99 | p99.9 | auto | p99 | p99.9 |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut all = MODES.map(|_| Vec::new());
    for blocks in PROMPT_BLOCKS {
        for kind in &KINDS {
            let (named, hashing) = prompts(kind, blocks);
            let mut times = MODES.map(|mode| decide(&pools, &named, blocks * BLOCK_TOKENS, mode));
            let [split, auto] = times.each_mut().map(|times| quantiles(times));
            let tokens = blocks * BLOCK_TOKENS;
            println!("| {tokens} | {} | {:.1} | {split} | {auto} |", kind.name, micros(hashing));
            all.iter_mut().zip(&mut times).for_each(|(all, times)| all.append(times));
        }
    }
    let [split, auto] = all.each_mut().map(|times| quantiles(times));
    println!("| all | | | {split} | {auto} |");
}

/// Prompts with the names of their blocks, and the mean time to make those.
fn prompts(kind: &Kind, blocks: usize) -> (Vec<[NamedBlocks; 1]>, Duration) {
    let prompts: Vec<Vec<TokenId>> = (0..500).map(|at| (kind.prompt)(at * 7919, blocks)).collect();
    let start = Instant::now();
    let named: Vec<[NamedBlocks; 1]> =
        prompts.iter().map(|tokens| [NamedBlocks::of(chain(), tokens)]).collect();
    let hashing = start.elapsed() / prompts.len() as u32;
    (named, hashing)
}

/// The time of each decision.
fn decide(pools: &Pools, named: &[[NamedBlocks; 1]], tokens: usize, mode: PlacementMode) -> Vec<Duration> {
    let decide = |at: usize| {
        let blocks = &named[at % named.len()];
        let wish = Wish {
            model: "m",
            mode,
            failed: &[],
            beside: None,
            tokens,
            blocks,
            session: None,
            now: Duration::ZERO,
        };
        let start = Instant::now();
        let placement = black_box(pools.place(&wish)).expect("workers are there");
        let took = start.elapsed();
        drop(placement);
        took
    };
    (0..DECISIONS / KINDS.len() / PROMPT_BLOCKS.len()).map(decide).collect()
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn quantiles(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let at = |part: f64| micros(times[((times.len() - 1) as f64 * part) as usize]);
    format!("{:.1} | {:.1} | {:.1}", at(0.5), at(0.99), at(0.999))
}
