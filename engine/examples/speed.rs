//! How fast the CPU backend is: `speed MODEL [THREADS [PROMPT_TOKENS [DECODE_TOKENS [BATCH]]]]`.
//!
//! Prints one line each for prefill (chunks of 512), decode (BATCH sequences, one token each per step), and the choice
//! of a token from logits.

use std::path::Path;
use std::time::Instant;

use checkpoint::Checkpoint;
use engine::backend::cpu::{self, CpuOptions};
use engine::batch::Logits;
use engine::model::conformance::{Part, Rows, Sequence, batch};
use engine::model::{Interrupt, Model};
use engine::sampling::{History, Rules, Sampler};
use proto::{SamplingParams, StopConditions};

const BLOCK_TOKENS: usize = 16;
const CHUNK: usize = 512;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: speed MODEL [THREADS [PROMPT [DECODE [BATCH]]]]")?;
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse::<usize>());
    let (threads, prompt, decode, sequences) = (number(2)?, number(512)?, number(64)?, number(1)?);

    let start = Instant::now();
    let checkpoint = Checkpoint::open(Path::new(&path))?;
    let mut model = cpu::load(&checkpoint, CpuOptions { threads, on_thread_start: None })?;
    println!("load: {:.2} s", start.elapsed().as_secs_f64());

    let len = prompt + decode;
    let blocks = len.div_ceil(BLOCK_TOKENS);
    let mut kv = model.new_kv(blocks * sequences, BLOCK_TOKENS)?;
    let vocab = model.vocab_size() as u32;
    let tokens: Vec<u32> = (0..len as u32).map(|i| i * 7919 % vocab).collect();
    let tables: Vec<Vec<u32>> =
        (0..sequences).map(|i| (i * blocks..(i + 1) * blocks).map(|block| block as u32).collect()).collect();
    let mut logits = Logits::default();
    let mut step = |parts: &[Part<'_>]| {
        model.forward(&batch(parts, BLOCK_TOKENS), &mut kv, &Interrupt::default(), &mut logits)
    };

    let start = Instant::now();
    for table in &tables {
        for first in (0..prompt).step_by(CHUNK) {
            let end = prompt.min(first + CHUNK);
            let rows = if end == prompt { Rows::Last } else { Rows::None };
            step(&[Sequence { tokens: &tokens, table }.part(first, end, rows)])?;
        }
    }
    report("prefill", prompt * sequences, start);

    let start = Instant::now();
    for position in prompt..len {
        let parts: Vec<_> = tables
            .iter()
            .map(|table| Sequence { tokens: &tokens, table }.part(position, position + 1, Rows::Last))
            .collect();
        step(&parts)?;
    }
    report("decode", decode * sequences, start);
    choices(logits.row(0))
}

/// Times choosing a token in several ways.
fn choices(logits: &[f32]) -> Result<(), Box<dyn std::error::Error>> {
    const TIMES: usize = 200;
    let greedy = SamplingParams::default();
    let warm = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let ways = [
        ("greedy", greedy.clone()),
        ("greedy, 20 alternatives", SamplingParams { logprobs: Some(20), ..greedy }),
        ("sampled", warm.clone()),
        ("sampled, top-k 40, top-p 0.9", SamplingParams { top_k: Some(40), top_p: 0.9, ..warm.clone() }),
        ("sampled, top-p 0.9", SamplingParams { top_p: 0.9, ..warm }),
    ];
    let (mut sampler, stop) = (Sampler::new(logits.len()), StopConditions::default());
    for (name, sampling) in ways {
        let start = Instant::now();
        for position in 0..TIMES {
            let history = History { tokens: &[0], generated: 0, position };
            sampler.choose(logits, history, Rules { sampling: &sampling, stop: &stop, allowed: None })?;
        }
        let milliseconds = start.elapsed().as_secs_f64() * 1e3 / TIMES as f64;
        println!("choice, {name}: {milliseconds:.3} ms");
    }
    Ok(())
}

fn report(what: &str, tokens: usize, start: Instant) {
    let seconds = start.elapsed().as_secs_f64();
    println!("{what}: {tokens} tokens in {seconds:.3} s, {:.1} tokens/s", tokens as f64 / seconds);
}
