//! What must hold of the CUDA backend, whatever it runs on.

use std::path::PathBuf;
use std::sync::Arc;

use checkpoint::{Checkpoint, ModelConfig, RopePairing, TensorType};
use engine::backend::cpu::{Cpu, CpuOptions};
use engine::backend::cuda::compile::CodeStore;
use engine::backend::cuda::{Cuda, CudaOptions};
use engine::batch::Logits;
use engine::model::conformance::{self, Part, Rows, Sequence, batch};
use engine::model::decoder::{Decoder, WeightSource};
use engine::model::samples::{FORMATS, RandomWeights, configs, small};
use engine::model::{Interrupt, KvMemory, Model};

use crate::root;

/// Every case with its name.
pub(crate) const CASES: [(&str, fn()); 7] = [
    (SHORT, short),
    ("the contract of the model seam", contract),
    ("close to the cpu in every format", every_format),
    ("kv goes from one to the other", kv_between),
    ("three layers of a real model", three_layers),
    ("a sequence past a split of keys", long_sequence),
    (WHOLE_MODEL, whole_model),
];

/// What the default model goes on from.
const PROMPT: [u32; 5] = [504, 3575, 282, 4649, 314];

/// The case that planted faults are looked for by.
pub(crate) const SHORT: &str = "a short run of every kernel";

/// The case that takes long: it runs in one order alone, since the others have run three layers of the same.
pub(crate) const WHOLE_MODEL: &str = "the whole model over a hand-off";

/// Keeps compiled kernels between cases, each of which is a process.
struct Kept(PathBuf);

impl CodeStore for Kept {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.join(name)).ok()
    }

    fn put(&self, name: &str, code: &[u8]) {
        checkpoint::keep(&self.0.join(name), code).unwrap();
    }
}

/// The GPU of that number.
pub(crate) fn options(number: usize) -> CudaOptions {
    CudaOptions { number, store: Some(Arc::new(Kept(root().join(".cache/cuda-kernels")))) }
}

fn gpu() -> Cuda {
    Cuda::new(&options(0)).unwrap()
}

fn processor() -> Cpu {
    Cpu::new(CpuOptions { threads: 1, on_thread_start: None }).unwrap()
}

fn contract() {
    // Of these two every kernel has a part, and between them heads and widths that divide nothing.
    for index in [0, 2] {
        let (config, format) = configs().remove(index);
        let weights = RandomWeights::new(&config, format);
        conformance::check(|| Decoder::load(gpu(), config.clone(), &weights).unwrap());
    }
}

/// Logits of a model, a step for each part, and the arena.
fn run<M: Model>(model: &mut M, blocks: usize, parts: &[Part<'_>]) -> (Vec<f32>, M::Kv) {
    let mut kv = model.new_kv(blocks, 16).unwrap();
    let (mut all, mut logits) = (Vec::new(), Logits::default());
    for part in parts {
        model.forward(&batch(&[*part], 16), &mut kv, &Interrupt::default(), &mut logits).unwrap();
        all.extend_from_slice(&logits.data);
    }
    (all, kv)
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(error <= 2e-4 * largest, "{what}, element {i}: expected {expected}, found {found}");
    }
}

/// Both backends with the same weights.
fn both(config: &ModelConfig, source: &impl WeightSource) -> (Decoder<Cuda>, Decoder<Cpu>) {
    let on_gpu = Decoder::load(gpu(), config.clone(), source).unwrap();
    (on_gpu, Decoder::load(processor(), config.clone(), source).unwrap())
}

/// Those steps of a model of random weights, on both.
fn check_steps(config: &ModelConfig, format: TensorType, blocks: usize, parts: &[Part<'_>]) {
    let (mut on_gpu, mut on_cpu) = both(config, &RandomWeights::new(config, format));
    let (found, _) = run(&mut on_gpu, blocks, parts);
    let (expected, _) = run(&mut on_cpu, blocks, parts);
    assert_close(&found, &expected, &format!("{format:?}, {config:?}"));
}

fn every_format() {
    let tokens: Vec<u32> = (0..37).map(|i| i * 31 % 70).collect();
    let sequence = Sequence { tokens: &tokens, table: &[2, 0, 1] };
    let parts =
        [sequence.part(0, 20, Rows::All), sequence.part(20, 21, Rows::All), sequence.part(21, 37, Rows::All)];
    let every = FORMATS.map(|format| (small(), format)).into_iter().chain(configs());
    for (config, format) in every {
        check_steps(&config, format, 3, &parts);
    }
}

/// Every kernel, in the least that shows what it does: more than one block, layer, head of a key and run of a row, a last run
/// that is not whole, a step of one token, and rows that are not the first.
fn short() {
    let wide = ModelConfig {
        hidden: 320,
        ffn: 100,
        heads: 5,
        kv_heads: 1,
        head_dim: 64,
        rope_dim: 64,
        vocab_size: 33,
        rope_pairing: RopePairing::Halves,
        ..small()
    };
    let one_layer = |(config, format)| (ModelConfig { layers: 1, ..config }, format);
    let narrow = configs().into_iter().skip(1).map(one_layer);
    let mut all = vec![(small(), TensorType::Q4_1), one_layer((wide, TensorType::F32))];
    all.extend(narrow);
    let tokens: Vec<u32> = (0..19).map(|i| i * 31 % 33).collect();
    let sequence = Sequence { tokens: &tokens, table: &[1, 0] };
    let parts = [sequence.part(0, 18, Rows::Last), sequence.part(18, 19, Rows::Last)];
    for (config, format) in all {
        check_steps(&config, format, 2, &parts);
    }
    long_sequence();
}

fn kv_between() {
    let (config, format) = configs().remove(2);
    let (mut on_gpu, mut on_cpu) = both(&config, &RandomWeights::new(&config, format));
    let tokens: Vec<u32> = (0..30).map(|i| i * 17 % 70).collect();
    let sequence = Sequence { tokens: &tokens, table: &[1, 0] };
    let parts = [sequence.part(0, 29, Rows::None)];
    let last = [sequence.part(29, 30, Rows::All)];
    let (_, gpu_kv) = run(&mut on_gpu, 2, &parts);
    let (_, cpu_kv) = run(&mut on_cpu, 2, &parts);
    let (expected, _) = run(&mut on_cpu, 2, &[sequence.part(0, 29, Rows::None), last[0]]);
    let found = continued(&mut on_cpu, &gpu_kv, last[0]);
    assert_close(&found, &expected, "computed on the GPU, decoded on the CPU");
    let found = continued(&mut on_gpu, &cpu_kv, last[0]);
    assert_close(&found, &expected, "computed on the CPU, decoded on the GPU");
}

/// Logits of a last part after KV that came from elsewhere: a whole block and 13 tokens of another.
fn continued<M: Model>(model: &mut M, from: &impl KvMemory, last: Part<'_>) -> Vec<f32> {
    let mut kv = model.new_kv(2, 16).unwrap();
    for (block, tokens) in [(1, 16), (0, 13)] {
        let mut slabs = Vec::new();
        from.export(block, 0, tokens, &mut slabs);
        kv.import(block, 0, tokens, &slabs);
    }
    let mut logits = Logits::default();
    model.forward(&batch(&[last], 16), &mut kv, &Interrupt::default(), &mut logits).unwrap();
    logits.data
}

fn three_layers() {
    let checkpoint = Checkpoint::open(&default_model()).unwrap();
    let config = ModelConfig { layers: 3, ..checkpoint.config().unwrap() };
    let (mut on_gpu, mut on_cpu) = both(&config, &checkpoint);
    assert_eq!(greedy(&mut on_gpu, 4), greedy(&mut on_cpu, 4));
}

/// A greedy continuation of the prompt.
fn greedy<M: Model>(model: &mut M, count: usize) -> Vec<u32> {
    let (first, kv) = prefilled(model);
    decoded(model, &kv, first, count)
}

/// Eight tokens of the default model, with the prompt's KV computed on one and taken over by the other, or by another GPU.
fn whole_model() {
    let checkpoint = Checkpoint::open(&default_model()).unwrap();
    let (mut on_gpu, mut on_cpu) = both(&checkpoint.config().unwrap(), &checkpoint);
    let (first_of_cpu, from_cpu) = prefilled(&mut on_cpu);
    let (first_of_gpu, from_gpu) = prefilled(&mut on_gpu);
    assert_eq!(first_of_gpu, first_of_cpu);
    let expected = decoded(&mut on_cpu, &from_cpu, first_of_cpu, 8);
    assert_eq!(expected.len(), 8);
    assert_eq!(decoded(&mut on_cpu, &from_gpu, first_of_gpu, 8), expected, "from the GPU to the CPU");
    assert_eq!(decoded(&mut on_gpu, &from_cpu, first_of_cpu, 8), expected, "from the CPU to the GPU");
    assert_eq!(decoded(&mut on_gpu, &from_gpu, first_of_gpu, 8), expected, "from the GPU to another");
}

/// The first token after the prompt, and the prompt's KV as canonical slabs.
fn prefilled<M: Model>(model: &mut M) -> (u32, Vec<u8>) {
    let part = Sequence { tokens: &PROMPT, table: &[0] }.part(0, PROMPT.len(), Rows::Last);
    let (logits, kv) = run(model, 1, &[part]);
    let mut slabs = Vec::new();
    kv.export(0, 0, PROMPT.len(), &mut slabs);
    (best(&logits), slabs)
}

/// So many tokens, of which the first is known, over the prompt's KV from elsewhere.
fn decoded<M: Model>(model: &mut M, slabs: &[u8], first: u32, count: usize) -> Vec<u32> {
    let mut kv = model.new_kv(1, 16).unwrap();
    kv.import(0, 0, PROMPT.len(), slabs);
    let mut tokens = [&PROMPT[..], &[first]].concat();
    let mut logits = Logits::default();
    while tokens.len() < PROMPT.len() + count {
        let part = Sequence { tokens: &tokens, table: &[0] }.part(tokens.len() - 1, tokens.len(), Rows::Last);
        model.forward(&batch(&[part], 16), &mut kv, &Interrupt::default(), &mut logits).unwrap();
        tokens.push(best(&logits.data));
    }
    tokens.split_off(PROMPT.len())
}

/// The token of the greatest logit.
fn best(logits: &[f32]) -> u32 {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32
}

fn default_model() -> PathBuf {
    let path = root().join(".cache/models/SmolLM2-135M-Instruct.gguf");
    assert!(path.exists(), "no {}: `cargo xtask fetch-model` puts it there", path.display());
    path
}

fn long_sequence() {
    let config = ModelConfig { layers: 1, context_len: 600, ..small() };
    let (mut on_gpu, mut on_cpu) = both(&config, &RandomWeights::new(&config, FORMATS[0]));
    let tokens: Vec<u32> = (0..530).map(|i| i * 13 % 70).collect();
    let table: Vec<u32> = (0..34).rev().collect();
    let sequence = Sequence { tokens: &tokens, table: &table };
    let parts = [sequence.part(0, 528, Rows::None), sequence.part(528, 530, Rows::All)];
    // What the first part leaves is the same to the eye, so that only the last tokens need to be computed by fibers.
    let (expected, kv) = run(&mut on_cpu, 34, &parts);
    let slabs: Vec<_> = (0..34_u32)
        .map(|block| {
            let mut out = Vec::new();
            kv.export(block, 0, 16, &mut out);
            out
        })
        .collect();
    let mut kv = on_gpu.new_kv(34, 16).unwrap();
    for (block, bytes) in slabs.iter().enumerate() {
        kv.import(block as u32, 0, 16, bytes);
    }
    let mut logits = Logits::default();
    on_gpu.forward(&batch(&[parts[1]], 16), &mut kv, &Interrupt::default(), &mut logits).unwrap();
    assert_close(&logits.data, &expected, "past two splits of keys");
}
