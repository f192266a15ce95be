//! Operations against plain f64 arithmetic, and the decoder's contract under knobs that no small checkpoint has. Every
//! instruction set of this machine takes part and must give the same bits.

use checkpoint::{ModelConfig, RopePairing, RopeScaling, TensorType};
use half::f16;
use proto::KvDtype;

use super::*;
use crate::backend::Linear;
use crate::batch::Batch;
use crate::model::conformance::{self, Rows, Sequence};
use crate::model::samples::{FORMATS, RandomWeights, Series, configs, small};
use crate::model::{Interrupt, Model};

fn backends() -> Vec<(String, Cpu)> {
    let mut backends = Vec::new();
    for set in InstructionSet::available() {
        for threads in [1, 3] {
            let options = CpuOptions { threads, on_thread_start: None };
            let cpu = Cpu::with_instruction_set(options, set).unwrap();
            backends.push((format!("{set:?}, {threads} threads"), cpu));
        }
    }
    backends
}

/// Runs `operation` on every backend; all must give the same bits, which come back.
fn on_all(operation: impl Fn(&mut Cpu) -> Vec<f32>) -> Vec<f32> {
    let mut results = backends().into_iter().map(|(name, mut cpu)| (name, operation(&mut cpu)));
    let (first_name, first) = results.next().unwrap();
    for (name, result) in results {
        assert_eq!(result.len(), first.len());
        for (i, (a, b)) in result.iter().zip(&first).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "element {i}: {a} on {name}, {b} on {first_name}");
        }
    }
    first
}

fn activations(width: usize, data: &[f32]) -> Activations {
    Activations { width, data: data.to_vec() }
}

fn assert_close(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs();
        assert!(error <= tolerance, "{what}, element {i}: expected {expected}, found {found}");
    }
}

#[test]
fn products_are_right_for_every_format_and_odd_sizes() {
    let mut series = Series(1);
    for dtype in FORMATS {
        for (rows, blocks) in [(1, 1), (17, 3), (37, 2), (64, 1)] {
            // Unquantised rows need not be whole blocks.
            let cols = if dtype.block_len() == 1 { blocks * 32 - 5 } else { blocks * 32 };
            let bytes = series.tensor(dtype, rows * cols, 1.0);
            let tensor = Tensor { name: "weights", dtype, rows, cols, bytes: &bytes };
            let bias = series.floats(rows);
            let weights = tensor.to_f32();
            for tokens in [1, 2, 7, 12, 13, 30] {
                let x = series.floats(tokens * cols);
                let product = |cpu: &mut Cpu| {
                    let mut linear = Linear { weight: cpu.matrix(&tensor).unwrap(), bias: None };
                    let (mut plain, mut biased) = (cpu.activations(rows), cpu.activations(rows));
                    let x = activations(cols, &x);
                    cpu.matmul(&x, &mut [Product { linear: &linear, out: &mut plain }]).unwrap();
                    linear.bias = Some(bias.clone());
                    cpu.matmul(&x, &mut [Product { linear: &linear, out: &mut biased }]).unwrap();
                    [plain.data, biased.data].concat()
                };
                let found = on_all(product);
                let mut expected = Vec::new();
                for bias in [vec![0.0; rows], bias.clone()] {
                    for x in x.chunks(cols) {
                        for (weights, bias) in weights.chunks(cols).zip(&bias) {
                            let terms = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                            expected.push(terms.sum::<f64>() + f64::from(*bias));
                        }
                    }
                }
                assert_close(&found, &expected, 1e-4, &format!("{dtype:?} {rows}x{cols}, {tokens} tokens"));
            }
        }
    }
}

#[test]
fn a_token_of_a_product_is_the_same_alone() {
    let mut series = Series(2);
    let (rows, cols) = (50, 96);
    for dtype in FORMATS {
        let bytes = series.tensor(dtype, rows * cols, 1.0);
        let tensor = Tensor { name: "weights", dtype, rows, cols, bytes: &bytes };
        let x = series.floats(29 * cols);
        let product = |cpu: &mut Cpu, x: &[f32]| {
            let linear = Linear { weight: cpu.matrix(&tensor).unwrap(), bias: None };
            let mut out = cpu.activations(rows);
            cpu.matmul(&activations(cols, x), &mut [Product { linear: &linear, out: &mut out }]).unwrap();
            out.data
        };
        let together = on_all(|cpu| product(cpu, &x));
        let alone = on_all(|cpu| x.chunks(cols).flat_map(|x| product(cpu, x)).collect());
        assert_eq!(together, alone, "{dtype:?}");
    }
}

#[test]
fn embeddings_are_rows_of_the_matrix() {
    let mut series = Series(3);
    for dtype in FORMATS {
        let (rows, cols) = (45, 64);
        let bytes = series.tensor(dtype, rows * cols, 1.0);
        let tensor = Tensor { name: "token_embd.weight", dtype, rows, cols, bytes: &bytes };
        let tokens: Vec<u32> = (0..rows as u32).rev().chain([7, 7, 44]).collect();
        let found = on_all(|cpu| {
            let table = cpu.matrix(&tensor).unwrap();
            let mut out = cpu.activations(cols);
            cpu.embed(&table, &tokens, &mut out).unwrap();
            out.data
        });
        let table = tensor.to_f32();
        let expected: Vec<f32> =
            tokens.iter().flat_map(|token| table[*token as usize * cols..][..cols].to_vec()).collect();
        assert_eq!(found, expected, "{dtype:?}");
    }
}

#[test]
fn norms_gates_and_sums_are_right() {
    let mut series = Series(4);
    for width in [1, 15, 16, 50, 576] {
        for tokens in [1, 3, 20] {
            let x: Vec<f32> = series.floats(tokens * width).iter().map(|x| x * 30.0).collect();
            let (weight, y) = (series.floats(width), series.floats(tokens * width));
            let found = on_all(|cpu| {
                let x = activations(width, &x);
                let mut normed = cpu.activations(width);
                cpu.rms_norm(&x, &weight, 1e-5, &mut normed).unwrap();
                let (mut gated, mut sum) = (activations(width, &x.data), activations(width, &x.data));
                cpu.gate(Activation::Silu, &mut gated, &activations(width, &y)).unwrap();
                cpu.add(&mut sum, &activations(width, &y)).unwrap();
                [normed.data, gated.data, sum.data].concat()
            });
            let wide = |x: &f32| f64::from(*x);
            let mut expected = Vec::new();
            for x in x.chunks(width) {
                let mean = x.iter().map(|x| wide(x) * wide(x)).sum::<f64>() / width as f64;
                let scale = 1.0 / (mean + 1e-5).sqrt();
                expected.extend(x.iter().zip(&weight).map(|(x, weight)| wide(x) * scale * wide(weight)));
            }
            expected.extend(x.iter().zip(&y).map(|(x, y)| wide(x) / (1.0 + (-wide(x)).exp()) * wide(y)));
            expected.extend(x.iter().zip(&y).map(|(x, y)| wide(x) + wide(y)));
            assert_close(&found, &expected, 2e-5, &format!("width {width}, {tokens} tokens"));
        }
    }
}

/// One sequence's keys and values in an arena, and a batch of queries at given positions.
struct AttentionCase {
    layout: KvLayout,
    heads: usize,
    len: usize,
    table: Vec<u32>,
    /// `[len][kv_heads * head_dim]`
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl AttentionCase {
    fn new(series: &mut Series, heads: usize, layout: KvLayout, len: usize) -> Self {
        let row = layout.kv_heads * layout.head_dim;
        let blocks = layout.blocks_for(len) as u32;
        Self {
            layout,
            heads,
            len,
            table: (0..blocks).rev().collect(),
            keys: series.floats(len * row).iter().map(|x| x * 3.0).collect(),
            values: series.floats(len * row),
        }
    }

    fn arena(&self, cpu: &Cpu, layer: usize) -> CpuKv {
        let mut kv = cpu.kv(self.layout, self.table.len()).unwrap();
        let row = self.layout.kv_heads * self.layout.head_dim;
        for position in 0..self.len {
            let block = self.table[position / self.layout.block_tokens] as usize;
            let slot = block * self.layout.block_tokens + position % self.layout.block_tokens;
            kv.store(Plane::keys(layer), slot, &self.keys[position * row..][..row]);
            kv.store(Plane::values(layer), slot, &self.values[position * row..][..row]);
        }
        kv
    }

    /// Attention of one query in f64, over keys and values as stored.
    fn naive(&self, q: &[f32], position: usize) -> Vec<f64> {
        let (head_dim, row) = (self.layout.head_dim, self.layout.kv_heads * self.layout.head_dim);
        let stored = |x: f32| f16::from_f32(x).to_f64();
        let mut out = Vec::new();
        for (head, q) in q.chunks(head_dim).enumerate() {
            let at = head / (self.heads / self.layout.kv_heads) * head_dim;
            let scores: Vec<f64> = (0..=position)
                .map(|key| {
                    let keys = &self.keys[key * row + at..][..head_dim];
                    let dot = q.iter().zip(keys).map(|(q, k)| f64::from(*q) * stored(*k)).sum::<f64>();
                    dot / (head_dim as f64).sqrt()
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..head_dim).map(|i| {
                let value = |key: usize| stored(self.values[key * row + at + i]);
                weights.iter().enumerate().map(|(key, weight)| weight * value(key)).sum::<f64>() / sum
            }));
        }
        out
    }
}

#[test]
fn attention_is_right_over_paged_keys_and_several_splits() {
    let mut series = Series(5);
    for (heads, kv_heads, head_dim, block_tokens, len) in [
        (1, 1, 8, 16, 5),
        (4, 2, 24, 5, 40),
        (9, 3, 64, 16, 300),
        (6, 1, 80, 7, 600),
        (2, 2, 128, 16, 257),
        (8, 1, 32, 256, 256),
    ] {
        let layout = KvLayout { layers: 2, kv_heads, head_dim, dtype: KvDtype::F16, block_tokens };
        let case = AttentionCase::new(&mut series, heads, layout, len);
        let width = heads * head_dim;
        let q = series.floats(len * width);
        // The whole sequence as a chunk, and each of its tokens alone.
        let (tokens, table) = (&vec![0; len], &case.table);
        let whole = Sequence { tokens, table }.part(0, len, Rows::None);
        let whole = conformance::batch(&[whole], block_tokens);
        let attend = |cpu: &mut Cpu, batch: &Batch, q: &[f32]| {
            let kv = case.arena(cpu, 1);
            let mut out = cpu.activations(width);
            let step = LayerStep { layer: 1, batch };
            cpu.attention(step, &activations(width, q), &kv, &mut out).unwrap();
            out.data
        };
        let found = on_all(|cpu| attend(cpu, &whole, &q));
        for position in [0, len / 2, 255.min(len - 1), len - 1] {
            let q = &q[position * width..][..width];
            let single = Sequence { tokens, table }.part(position, position + 1, Rows::None);
            let single = conformance::batch(&[single], block_tokens);
            let alone = on_all(|cpu| attend(cpu, &single, q));
            assert_eq!(
                alone,
                found[position * width..][..width],
                "alone and in a chunk, position {position}"
            );
            let what = format!("{heads} heads, {kv_heads} kv heads of {head_dim}, position {position}");
            assert_close(&alone, &case.naive(q, position), 1e-5, &what);
        }
    }
}

fn decoder(config: &ModelConfig, dtype: TensorType, cpu: Cpu) -> Decoder<Cpu> {
    Decoder::load(cpu, config.clone(), &RandomWeights::new(config, dtype)).unwrap()
}

#[test]
fn the_decoder_keeps_the_contract_of_the_model_seam() {
    for (config, dtype) in configs() {
        for threads in [1, 2] {
            let options = CpuOptions { threads, on_thread_start: None };
            conformance::check(|| decoder(&config, dtype, Cpu::new(options.clone()).unwrap()));
        }
    }
}

fn logits(model: &mut Decoder<Cpu>, tokens: &[u32]) -> Vec<f32> {
    let table = [0, 1, 2, 3];
    let part = Sequence { tokens, table: &table }.part(0, tokens.len(), Rows::All);
    let batch = conformance::batch(&[part], 16);
    let (mut kv, mut logits) = (model.new_kv(4, 16).unwrap(), crate::batch::Logits::default());
    model.forward(&batch, &mut kv, &Interrupt::default(), &mut logits).unwrap();
    logits.data
}

#[test]
fn every_instruction_set_and_thread_count_gives_the_same_logits() {
    let tokens: Vec<u32> = (0..50).map(|i| i * 31 % 70).collect();
    for (config, dtype) in configs() {
        let mut all = backends()
            .into_iter()
            .map(|(name, cpu)| (name, logits(&mut decoder(&config, dtype, cpu), &tokens)));
        let (_, first) = all.next().unwrap();
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (name, logits) in all {
            assert_eq!(bits(&logits), bits(&first), "{dtype:?} on {name}");
        }
    }
}

#[test]
fn every_knob_changes_the_logits() {
    let tokens: Vec<u32> = (0..20).map(|i| i * 31 % 70).collect();
    let base = ModelConfig { attention_bias: true, ffn_bias: true, attention_output_bias: true, ..small() };
    let weights = RandomWeights::new(&base, TensorType::F32);
    let run = |config: ModelConfig, weights: &RandomWeights| {
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        logits(&mut Decoder::load(cpu, config, weights).unwrap(), &tokens)
    };
    let reference = run(base.clone(), &weights);
    for config in [
        ModelConfig { rms_eps: 1e-2, ..base.clone() },
        ModelConfig { rope_base: 1e5, ..base.clone() },
        ModelConfig { rope_dim: 8, ..base.clone() },
        ModelConfig { rope_pairing: RopePairing::Halves, ..base.clone() },
        ModelConfig { rope_scaling: RopeScaling::Linear { factor: 2.0 }, ..base.clone() },
        ModelConfig { layers: 1, ..base.clone() },
    ] {
        assert_ne!(run(config.clone(), &weights), reference, "{config:?}");
    }
    for bias in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
        let mut without = RandomWeights::new(&base, TensorType::F32);
        without.0.remove(&format!("blk.1.{bias}.bias")).unwrap();
        // A bias of the keys that is the same for all positions still turns with them, so it matters too.
        assert_ne!(run(base.clone(), &without), reference, "{bias}");
    }
}

#[test]
fn rope_turns_a_pair_by_its_position() {
    let (head_dim, positions) = (4, [0_u32, 1, 7]);
    for (pairing, pair) in [(RopePairing::Adjacent, [2, 3]), (RopePairing::Halves, [1, 3])] {
        let mut rope = Rope::new(10_000.0, head_dim, pairing, &[]);
        rope.reach(8);
        let mut row = vec![0.0; head_dim];
        row[pair[0]] = 1.0;
        for position in positions {
            let mut turned = row.clone();
            rowwise::rotate(&mut turned, head_dim, pairing, rope.turns(position as usize));
            // Pair 1 of 2: base^(-2 / 4) = 1/100 radian per position.
            let angle = f64::from(position) / 100.0;
            assert_eq!(turned[pair[0]], angle.cos() as f32, "{pairing:?}");
            assert_eq!(turned[pair[1]], angle.sin() as f32, "{pairing:?}");
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let config = small();
    let cpu = || Cpu::new(CpuOptions::default()).unwrap();
    let mut weights = RandomWeights::new(&config, TensorType::F32);
    let wider = ModelConfig { ffn: 128, ..config.clone() };
    let error = Decoder::load(cpu(), wider, &weights).err().unwrap();
    assert_eq!(error.to_string(), "tensor blk.0.ffn_gate.weight: expected shape [128, 64], found [96, 64]");
    let mut model = Decoder::load(cpu(), config.clone(), &weights).unwrap();
    let mut kv = model.new_kv(4, 16).unwrap();
    let mut forward = |tokens: &[u32], first: usize| {
        let part = Sequence { tokens, table: &[0, 1, 2, 3, 3] }.part(first, tokens.len(), Rows::None);
        let batch = conformance::batch(&[part], 16);
        let mut logits = crate::batch::Logits::default();
        model.forward(&batch, &mut kv, &Interrupt::default(), &mut logits)
    };
    assert_eq!(
        forward(&[1, 70], 0),
        Err(ForwardError::Device("token id: expected below 70, found 70".into()))
    );
    assert_eq!(
        forward(&[1; 65], 63),
        Err(ForwardError::Device("position: expected below 64, found 64".into()))
    );
    assert_eq!(forward(&[1; 64], 63), Ok(()));
    weights.0.remove("blk.1.attn_v.weight");
    let error = Decoder::load(cpu(), config, &weights).err().unwrap();
    assert_eq!(error.to_string(), "tensor blk.1.attn_v.weight: missing");
}
