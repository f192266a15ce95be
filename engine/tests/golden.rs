//! The decoder on the CPU against an independent float32 forward pass of the same checkpoint.
//!
//! Needs the default model: `cargo xtask fetch-model`.
#![expect(clippy::unwrap_used, reason = "what these functions unwrap is the test")]

use std::path::Path;

use checkpoint::Checkpoint;
use engine::backend::cpu::{self, Cpu, CpuOptions};
use engine::batch::Logits;
use engine::model::conformance::{Part, Rows, Sequence, batch};
use engine::model::decoder::Decoder;
use engine::model::{Interrupt, KvMemory, Model};
use serde::Deserialize;

const BLOCK_TOKENS: usize = 16;

/// `testdata/smollm2-visible.json`.
#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: String,
    prompt_ids: Vec<u32>,
    /// Ids and log-probabilities after the prompt.
    last_top20: Vec<(u32, f64)>,
    /// The reference's greedy continuation.
    greedy_ids: Vec<u32>,
    /// How far, in log-probability, the best token was ahead of the second best.
    greedy_gap: Vec<f64>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../testdata/smollm2-visible.json")).unwrap()
}

fn checkpoint() -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models/SmolLM2-135M-Instruct.gguf");
    Checkpoint::open(&path).expect("the default model, which `cargo xtask fetch-model` puts there")
}

fn decoder(checkpoint: &Checkpoint, threads: usize) -> Decoder<Cpu> {
    cpu::load(checkpoint, CpuOptions { threads, on_thread_start: None }).unwrap()
}

fn step<K: KvMemory, M: Model<Kv = K>>(model: &mut M, kv: &mut K, parts: &[Part<'_>]) -> Logits {
    let mut logits = Logits::default();
    let batch = batch(parts, kv.layout().block_tokens);
    model.forward(&batch, kv, &Interrupt::default(), &mut logits).unwrap();
    logits
}

#[test]
fn continuations_and_distributions_are_the_references() {
    let mut model = decoder(&checkpoint(), 2);
    let mut worst: f64 = 0.0;
    for case in golden().cases {
        let tokens = [case.prompt_ids.clone(), case.greedy_ids.clone()].concat();
        let blocks = tokens.len().div_ceil(BLOCK_TOKENS);
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let mut kv = model.new_kv(blocks, BLOCK_TOKENS).unwrap();
        let sequence = Sequence { tokens: &tokens, table: &table };

        let prompt_len = case.prompt_ids.len();
        let mut logits = step(&mut model, &mut kv, &[sequence.part(0, prompt_len, Rows::Last)]);
        let divergence = divergence(logits.row(0), &case.last_top20);
        println!("{:?}: KL {divergence:.2e}", case.prompt);
        assert!(divergence <= 0.001, "{:?}: KL {divergence}", case.prompt);
        worst = worst.max(divergence);

        for (i, (expected, gap)) in case.greedy_ids.iter().zip(&case.greedy_gap).enumerate() {
            let best = argmax(logits.row(0));
            assert!(
                best == *expected || *gap < 0.02,
                "{:?}, token {i}: expected {expected} (ahead by {gap}), found {best}",
                case.prompt
            );
            let at = prompt_len + i;
            logits = step(&mut model, &mut kv, &[sequence.part(at, at + 1, Rows::Last)]);
        }
    }
    println!("worst KL {worst:.2e}");
}

#[test]
fn results_are_the_same_bits_however_they_are_computed() {
    let checkpoint = checkpoint();
    let cases = golden().cases;
    let prompts: Vec<Vec<u32>> =
        cases.iter().map(|case| [&case.prompt_ids[..], &case.greedy_ids[..]].concat()).collect();
    // The longest crosses a border between key splits.
    let long: Vec<u32> = prompts.iter().flatten().copied().cycle().take(300).collect();
    let sequences: Vec<&[u32]> = prompts.iter().take(3).map(Vec::as_slice).chain([long.as_slice()]).collect();

    let mut model = decoder(&checkpoint, 1);
    let alone: Vec<Logits> =
        sequences.iter().map(|tokens| in_chunks(&mut model, &[tokens], 512).remove(0)).collect();
    for threads in [1, 2, 3] {
        let mut model = decoder(&checkpoint, threads);
        for chunk in [16, 512] {
            let together = in_chunks(&mut model, &sequences, chunk);
            for (i, (found, expected)) in together.iter().zip(&alone).enumerate() {
                assert_same(found, expected, &format!("sequence {i}, {threads} threads, chunks of {chunk}"));
            }
        }
        let together = in_chunks(&mut model, &sequences[1..], 1);
        for (i, (found, expected)) in together.iter().zip(&alone[1..]).enumerate() {
            assert_same(found, expected, &format!("sequence {i}, {threads} threads, token by token"));
        }
    }
}

/// Logits after the last token of each sequence, all run together in chunks, over blocks in a mixed order.
fn in_chunks(model: &mut Decoder<Cpu>, sequences: &[&[u32]], chunk: usize) -> Vec<Logits> {
    let blocks = sequences.iter().map(|tokens| tokens.len().div_ceil(BLOCK_TOKENS)).sum::<usize>();
    // A stride without a common factor visits every block once.
    let stride = (blocks / 2..=blocks).find(|stride| gcd(*stride, blocks) == 1).unwrap();
    let mut order = (0..blocks).map(|i| (i * stride % blocks) as u32);
    let tables: Vec<Vec<u32>> = sequences
        .iter()
        .map(|tokens| order.by_ref().take(tokens.len().div_ceil(BLOCK_TOKENS)).collect())
        .collect();
    let mut kv = model.new_kv(blocks, BLOCK_TOKENS).unwrap();
    let mut last: Vec<Logits> = sequences.iter().map(|_| Logits::default()).collect();
    let longest = sequences.iter().map(|tokens| tokens.len()).max().unwrap();
    for first in (0..longest).step_by(chunk) {
        let live = (0..sequences.len()).filter(|i| first < sequences[*i].len());
        let live: Vec<usize> = live.collect();
        let parts: Vec<Part<'_>> = live
            .iter()
            .map(|i| {
                let tokens = sequences[*i];
                let end = tokens.len().min(first + chunk);
                let rows = if end == tokens.len() { Rows::Last } else { Rows::None };
                Sequence { tokens, table: &tables[*i] }.part(first, end, rows)
            })
            .collect();
        let logits = step(model, &mut kv, &parts);
        let ended = live.iter().filter(|i| first + chunk >= sequences[**i].len());
        for (row, i) in ended.enumerate() {
            last[*i] = Logits { vocab: logits.vocab, data: logits.row(row).to_vec() };
        }
    }
    last
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn assert_same(found: &Logits, expected: &Logits, what: &str) {
    assert_eq!(found.data.len(), expected.data.len(), "{what}");
    for (i, (found, expected)) in found.data.iter().zip(&expected.data).enumerate() {
        assert_eq!(found.to_bits(), expected.to_bits(), "{what}: token {i}: {found} and {expected}");
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// KL(reference ‖ logits) over 21 bins: the reference's top 20, and all other tokens together.
fn divergence(logits: &[f32], top: &[(u32, f64)]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponential = |logit: f32| f64::from(logit - max).exp();
    let sum: f64 = logits.iter().map(|logit| exponential(*logit)).sum();
    let (mut divergence, mut rest, mut rest_here) = (0.0, 1.0, 1.0);
    for (token, log_probability) in top {
        let (p, q) = (log_probability.exp(), exponential(logits[*token as usize]) / sum);
        divergence += p * (p / q).ln();
        rest -= p;
        rest_here -= q;
    }
    divergence + rest * (rest / rest_here).ln()
}
