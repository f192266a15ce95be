//! NVIDIA GPUs: the same operations as the CPU backend, as CUDA kernels, through a driver that is loaded at run time.
//!
//! Weights stay in the checkpoint's formats on the GPU, activations are f32, KV is f16. Every kernel's `.cu` stands beside
//! the file that launches it; NVRTC compiles them for the GPU at hand ([`compile`]). Nothing here is needed to build or to
//! run on a CPU.
//!
//! Results do not depend on batch or chunk: each kernel adds up in an order that only the widths of its rows set. They are
//! close to the CPU's, not the same bits; [`NUMERICS`] says which they are.
//!
//! All work is on one stream, in order. The host waits for it where it reads logits or KV.

mod attention;
pub mod compile;
mod device;
mod embed;
mod kv;
mod launch;
mod matmul;
mod rms_norm;
mod rope;
mod rows;

use std::sync::Arc;

use checkpoint::{Checkpoint, Tensor, TensorType};
use cudarc::driver::CudaSlice;
use proto::{KvLayout, TokenId};

pub use device::{CAPABILITY_MIN, Fault};
pub use kv::CudaKv;

use self::attention::HEAD_DIM_MAX;
use self::compile::{CodeStore, Compiled};
use self::device::{Buffer, Doing as _, Gpu};
use self::launch::{Kernels, SOURCES};
use self::rope::Turns;
use super::{Activation, Backend, LayerStep, Outcome, Product, Qkv};
use crate::batch::Batch;
use crate::model::ForwardError;
use crate::model::decoder::{Decoder, LoadError};
use crate::model::rope::Rope;

/// Names the order of operations. Streams continue bit for bit between workers of the same id.
pub const NUMERICS: &str = "cuda-f32-v1";

/// GPUs that this machine has and its driver sees; none without a driver.
pub fn devices() -> usize {
    device::count()
}

/// Which GPU, and where its kernels are kept.
#[derive(Clone, Default)]
pub struct CudaOptions {
    /// The GPU's number, from 0.
    pub number: usize,
    /// Keeps compiled kernels; without it they are compiled each time.
    pub store: Option<Arc<dyn CodeStore>>,
}

/// A decoder on a GPU with the weights of `checkpoint`.
///
/// # Errors
/// When there is no room, or the checkpoint cannot be read.
pub fn load(checkpoint: &Checkpoint, gpu: Cuda) -> Result<Decoder<Cuda>, LoadError> {
    Decoder::load(gpu, checkpoint.config()?, checkpoint)
}

/// Compiles every kernel for an architecture such as `sm_90`, without a GPU.
///
/// # Errors
/// When there is no compiler, or a kernel does not compile.
pub fn compile_all(arch: &str) -> Result<Vec<Compiled>, Fault> {
    SOURCES.iter().map(|source| source.compile(arch, None)).collect()
}

/// A GPU as a [`Backend`].
pub struct Cuda {
    gpu: Arc<Gpu>,
    kernels: Kernels,
    turns: Turns,
    staged: Staged,
    /// Tokens of the present step.
    tokens: Buffer<u32>,
    /// Rows that are selected.
    rows: Buffer<u32>,
}

/// The batch that the present step is of, on the GPU.
#[derive(Default)]
struct Staged {
    /// What was uploaded.
    batch: Option<Batch>,
    positions: Buffer<u32>,
    slots: Buffer<u32>,
    /// Where each token's block table starts in `blocks`.
    tables: Buffer<u32>,
    blocks: Buffer<u32>,
}

/// f32 rows on the GPU.
pub struct Activations {
    width: usize,
    tokens: usize,
    data: Buffer<f32>,
}

/// A weight matrix as the checkpoint stores it.
pub struct Matrix {
    dtype: TensorType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    data: CudaSlice<u8>,
}

impl Cuda {
    /// Opens a GPU and loads the kernels.
    ///
    /// # Errors
    /// See [`Fault`].
    pub fn new(options: &CudaOptions) -> Result<Self, ForwardError> {
        let gpu = Arc::new(Gpu::open(options.number)?);
        let kernels = Kernels::load(&gpu, options.store.as_deref())?;
        Ok(Self {
            gpu,
            kernels,
            turns: Turns::default(),
            staged: Staged::default(),
            tokens: Buffer::default(),
            rows: Buffer::default(),
        })
    }

    /// The GPU's name, as its driver has it.
    pub fn device_name(&self) -> &str {
        &self.gpu.name
    }

    /// Bytes of its memory that KV may take, of a `share` of all that it has, from 0 to 1: what is left of the share after
    /// all that was taken since it was opened, as far as it is free.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn room(&self, share: f64) -> Result<u64, ForwardError> {
        let (free, total) = self.gpu.memory()?;
        let taken = self.gpu.free_at_first.saturating_sub(free);
        let of_share = (total as f64 * share) as usize;
        Ok(of_share.saturating_sub(taken).min(free) as u64)
    }

    /// Has the batch on the GPU. Every layer of a step asks for the same.
    fn stage(&mut self, batch: &Batch) -> Result<(), Fault> {
        if self.staged.batch.as_ref() == Some(batch) {
            return Ok(());
        }
        let staged = &mut self.staged;
        staged.batch = None;
        let mut tables = vec![0; batch.len()];
        for chunk in &batch.chunks {
            tables[chunk.tokens.clone()].fill(chunk.block_table.start as u32);
        }
        staged.positions.write(&self.gpu, &batch.positions)?;
        staged.slots.write(&self.gpu, &batch.slots)?;
        staged.tables.write(&self.gpu, &tables)?;
        staged.blocks.write(&self.gpu, &batch.block_tables)?;
        staged.batch = Some(batch.clone());
        Ok(())
    }
}

impl Activations {
    /// Sets the number of tokens; contents are whatever was there.
    fn resize(&mut self, gpu: &Gpu, tokens: usize) -> Result<(), Fault> {
        self.data.reserve(gpu, tokens * self.width)?;
        self.tokens = tokens;
        Ok(())
    }

    fn data(&self) -> &CudaSlice<f32> {
        self.data.get()
    }

    fn data_mut(&mut self) -> &mut CudaSlice<f32> {
        self.data.get_mut()
    }
}

impl Backend for Cuda {
    type Matrix = Matrix;
    type Vector = CudaSlice<f32>;
    type Activations = Activations;
    type Kv = CudaKv;

    fn matrix(&mut self, tensor: &Tensor<'_>) -> Result<Matrix, ForwardError> {
        let Tensor { dtype, rows, cols, bytes, .. } = *tensor;
        let row_bytes = cols / dtype.block_len() * dtype.block_bytes();
        Ok(Matrix { dtype, rows, cols, row_bytes, data: self.gpu.upload(bytes)? })
    }

    fn vector(&mut self, tensor: &Tensor<'_>) -> Result<CudaSlice<f32>, ForwardError> {
        Ok(self.gpu.upload(&tensor.to_f32())?)
    }

    fn activations(&self, width: usize) -> Activations {
        Activations { width, tokens: 0, data: Buffer::default() }
    }

    fn reserve(&mut self, activations: &mut Activations, tokens: usize) -> Outcome {
        activations.data.reserve(&self.gpu, tokens * activations.width)?;
        Ok(())
    }

    fn reserve_step(&mut self, rope: &Rope, tokens: usize, blocks: usize) -> Outcome {
        let Self { gpu, turns, staged, tokens: token_ids, rows, .. } = self;
        turns.follow(gpu, rope)?;
        for buffer in [token_ids, rows, &mut staged.positions, &mut staged.slots, &mut staged.tables] {
            buffer.reserve(gpu, tokens)?;
        }
        staged.blocks.reserve(gpu, blocks)?;
        Ok(())
    }

    fn kv(&self, layout: KvLayout, blocks: usize) -> Result<CudaKv, ForwardError> {
        if layout.head_dim > HEAD_DIM_MAX {
            let message = format!("head_dim: at most {HEAD_DIM_MAX} on a GPU, found {}", layout.head_dim);
            return Err(ForwardError::Device(message));
        }
        Ok(CudaKv::new(Arc::clone(&self.gpu), layout, blocks)?)
    }

    fn embed(&mut self, table: &Matrix, tokens: &[TokenId], out: &mut Activations) -> Outcome {
        self.tokens.write(&self.gpu, tokens)?;
        Ok(self.run_embed(table, tokens.len(), out)?)
    }

    fn rms_norm(
        &mut self,
        x: &Activations,
        weight: &CudaSlice<f32>,
        eps: f32,
        out: &mut Activations,
    ) -> Outcome {
        Ok(self.run_rms_norm(x, weight, eps, out)?)
    }

    fn matmul(&mut self, x: &Activations, products: &mut [Product<'_, Self>]) -> Outcome {
        for Product { linear, out } in products {
            self.run_matmul(x, &linear.weight, linear.bias.as_ref(), out)?;
        }
        Ok(())
    }

    fn rope_and_store(
        &mut self,
        step: LayerStep<'_>,
        rope: &Rope,
        qkv: &mut Qkv<Self>,
        kv: &mut CudaKv,
    ) -> Outcome {
        self.stage(step.batch)?;
        Ok(self.run_rope_and_store(step.layer, rope, qkv, kv)?)
    }

    fn attention(
        &mut self,
        step: LayerStep<'_>,
        q: &Activations,
        kv: &CudaKv,
        out: &mut Activations,
    ) -> Outcome {
        self.stage(step.batch)?;
        Ok(self.run_attention(step.layer, q, kv, out)?)
    }

    fn gate(&mut self, activation: Activation, gate: &mut Activations, up: &Activations) -> Outcome {
        let function = match activation {
            Activation::Silu => &self.kernels.gate_silu,
        };
        Ok(self.run_elements(function, gate, up)?)
    }

    fn add(&mut self, x: &mut Activations, delta: &Activations) -> Outcome {
        Ok(self.run_elements(&self.kernels.add, x, delta)?)
    }

    fn select(&mut self, x: &Activations, rows: &[u32], out: &mut Activations) -> Outcome {
        self.rows.write(&self.gpu, rows)?;
        Ok(self.run_select(x, self.rows.get(), rows.len(), out)?)
    }

    fn read(&mut self, x: &Activations, out: &mut Vec<f32>) -> Outcome {
        let elements = x.tokens * x.width;
        out.clear();
        out.resize(elements, f32::NAN);
        if elements > 0 {
            let stream = &self.gpu.stream;
            stream.memcpy_dtoh(&x.data().slice(..elements), out).doing("reading from the GPU")?;
            stream.synchronize().doing("waiting for the GPU")?;
        }
        Ok(())
    }
}
