//! The reference backend: f32 arithmetic on the CPU over weights that stay quantised, KV in f16.
//!
//! Clear and right first: other backends are held against it. Its results do not depend on batch, chunk or number
//! of threads, which the order of operations in every kernel guarantees:
//!
//! - a product (`matmul`) is one chain of fused multiply-adds, columns ascending, rows in lanes; threads share
//!   rows, never columns;
//! - a sum over a row (norms, q · k, weights of attention) puts element i into lane i mod 16, ascending, and folds
//!   the lanes 8, 4, 2, 1;
//! - `attention` splits keys at absolute positions and reads them as stored, also inside the chunk that wrote them;
//! - e^x, sine and cosine are our own.
//!
//! All instruction sets (`isa`) give the same bits.

mod attention;
mod disjoint;
pub(crate) mod isa;
mod kv;
mod matmul;
mod panels;
mod pool;
mod rowwise;
mod scratch;
#[cfg(test)]
mod tests;

use checkpoint::{Checkpoint, Tensor};
use proto::{KvLayout, TokenId};

pub use kv::CpuKv;
pub use pool::ThreadStartHook;

use self::attention::Heads;
use self::disjoint::Disjoint;
use self::isa::InstructionSet;
use self::kv::Plane;
use self::matmul::{Output, TileShape, TokenTiles, token_tile};
use self::panels::Panels;
use self::pool::Pool;
use self::rowwise::{Gate, RmsNorm};
use self::scratch::MemberScratch;
use super::{Activation, Backend, LayerStep, Outcome, Product, Qkv};
use crate::model::decoder::{Decoder, LoadError};
use crate::model::rope::Rope;
use crate::model::{ForwardError, KvMemory};

/// Names the order of operations above. Streams continue bit for bit between workers of the same id.
pub const NUMERICS: &str = "f32-fma-v1";

/// Rows that a thread takes at once in operations on rows alone.
const ROWS: usize = 8;

/// How the CPU backend runs.
#[derive(Clone, Default)]
pub struct CpuOptions {
    /// Members of the thread pool, the caller's own thread included; 0 counts as 1.
    pub threads: usize,
    /// Runs first on every thread that the pool starts.
    pub on_thread_start: Option<ThreadStartHook>,
}

/// A decoder on the CPU with the weights of `checkpoint`.
pub fn load(checkpoint: &Checkpoint, options: CpuOptions) -> Result<Decoder<Cpu>, LoadError> {
    Decoder::load(Cpu::new(options)?, checkpoint.config()?, checkpoint)
}

/// The CPU as a [`Backend`].
pub struct Cpu {
    set: InstructionSet,
    pool: Pool,
    scratch: MemberScratch,
    tiles: TokenTiles,
}

/// f32 rows in host memory.
pub struct Activations {
    width: usize,
    /// `[tokens, width]`
    data: Vec<f32>,
}

/// A weight matrix.
pub struct Matrix(Panels);

impl Cpu {
    /// Starts the thread pool. Fails when the system gives no threads.
    pub fn new(options: CpuOptions) -> Result<Self, ForwardError> {
        Self::with_instruction_set(options, InstructionSet::detect())
    }

    fn with_instruction_set(options: CpuOptions, set: InstructionSet) -> Result<Self, ForwardError> {
        let pool = Pool::new(options.threads.max(1), options.on_thread_start)
            .map_err(|error| ForwardError::Device(format!("thread pool: {error}")))?;
        let scratch = MemberScratch::new(pool.members());
        Ok(Self { set, pool, scratch, tiles: TokenTiles::default() })
    }
}

impl Activations {
    /// Sets the number of tokens; contents are whatever was there.
    fn resize(&mut self, tokens: usize) {
        self.data.resize(tokens * self.width, 0.0);
    }

    fn tokens(&self) -> usize {
        self.data.len() / self.width
    }
}

impl Backend for Cpu {
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Activations = Activations;
    type Kv = CpuKv;

    fn matrix(&mut self, tensor: &Tensor<'_>) -> Result<Matrix, ForwardError> {
        Ok(Matrix(Panels::pack(tensor)))
    }

    fn vector(&mut self, tensor: &Tensor<'_>) -> Result<Vec<f32>, ForwardError> {
        Ok(tensor.to_f32())
    }

    fn activations(&self, width: usize) -> Activations {
        Activations { width, data: Vec::new() }
    }

    fn kv(&self, layout: KvLayout, blocks: usize) -> Result<CpuKv, ForwardError> {
        Ok(CpuKv::new(layout, blocks))
    }

    fn embed(&mut self, table: &Matrix, tokens: &[TokenId], out: &mut Activations) -> Outcome {
        out.resize(tokens.len());
        let (set, scratch) = (self.set, &self.scratch);
        let width = out.width;
        self.pool.each_chunk(&mut out.data, width, |member, token, out| {
            let scratch = &mut scratch.lock(member).panels;
            set.run(matmul::Row { weights: &table.0, index: tokens[token] as usize, scratch, out });
        })
    }

    fn rms_norm(&mut self, x: &Activations, weight: &Vec<f32>, eps: f32, out: &mut Activations) -> Outcome {
        out.resize(x.tokens());
        let set = self.set;
        self.pool.each_chunk(&mut out.data, ROWS * x.width, |_, i, out| {
            let rows = x.data[i * ROWS * x.width..].chunks_exact(x.width);
            for (x, out) in rows.zip(out.chunks_exact_mut(x.width)) {
                set.run(RmsNorm { x, weight, eps, out });
            }
        })
    }

    fn matmul(&mut self, x: &Activations, products: &mut [Product<'_, Self>]) -> Outcome {
        let Some(depth) = products.first().map(|product| product.linear.weight.0.depth()) else {
            return Ok(());
        };
        let tokens = x.tokens();
        let shape = TileShape { cols: x.width, depth, tile: token_tile(self.set.is_wide()) };
        self.tiles.pack(&mut self.pool, &x.data, shape)?;
        let outputs = products.iter_mut().map(|product| {
            product.out.resize(tokens);
            Output {
                weights: &product.linear.weight.0,
                bias: product.linear.bias.as_deref(),
                out: Disjoint::new(&mut product.out.data),
            }
        });
        let outputs: Vec<_> = outputs.collect();
        matmul::matmul(self.set, &mut self.pool, &self.scratch, &self.tiles, &outputs)
    }

    fn rope_and_store(
        &mut self,
        step: LayerStep<'_>,
        rope: &Rope,
        qkv: &mut Qkv<Self>,
        kv: &mut CpuKv,
    ) -> Outcome {
        let positions = &step.batch.positions;
        let head_dim = kv.layout().head_dim;
        for x in [&mut qkv.q, &mut qkv.k] {
            let width = x.width;
            self.pool.each_chunk(&mut x.data, ROWS * width, |_, i, rows| {
                for (row, position) in rows.chunks_exact_mut(width).zip(&positions[i * ROWS..]) {
                    rowwise::rotate(row, head_dim, rope.pairing, rope.turns(*position as usize));
                }
            })?;
        }
        let rows = qkv.k.data.chunks_exact(qkv.k.width).zip(qkv.v.data.chunks_exact(qkv.v.width));
        for ((k, v), slot) in rows.zip(&step.batch.slots) {
            kv.store(Plane::keys(step.layer), *slot as usize, k);
            kv.store(Plane::values(step.layer), *slot as usize, v);
        }
        Ok(())
    }

    fn attention(
        &mut self,
        step: LayerStep<'_>,
        q: &Activations,
        kv: &CpuKv,
        out: &mut Activations,
    ) -> Outcome {
        out.resize(q.tokens());
        let heads = Heads { q: &q.data, out: &mut out.data, width: q.width };
        attention::attention(self.set, &mut self.pool, &self.scratch, step, (heads, kv))
    }

    fn gate(&mut self, activation: Activation, gate: &mut Activations, up: &Activations) -> Outcome {
        let set = self.set;
        self.pool.each_chunk(&mut gate.data, ROWS * up.width, |_, i, gate| {
            let up = &up.data[i * ROWS * up.width..][..gate.len()];
            set.run(Gate { activation, x: gate, up });
        })
    }

    fn add(&mut self, x: &mut Activations, delta: &Activations) -> Outcome {
        self.pool.each_chunk(&mut x.data, ROWS * delta.width, |_, i, x| {
            for (x, delta) in x.iter_mut().zip(&delta.data[i * ROWS * delta.width..]) {
                *x += delta;
            }
        })
    }

    fn select(&mut self, x: &Activations, rows: &[u32], out: &mut Activations) -> Outcome {
        out.data.clear();
        for row in rows {
            out.data.extend_from_slice(&x.data[*row as usize * x.width..][..x.width]);
        }
        Ok(())
    }

    fn read(&mut self, x: &Activations, out: &mut Vec<f32>) -> Outcome {
        out.clear();
        out.extend_from_slice(&x.data);
        Ok(())
    }
}
