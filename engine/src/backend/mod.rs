//! The device seam: the dozen operations a decoder is made of, each one launch.
//!
//! Operations are as large as a device can fuse them, not tensor algebra: a backend chooses its own layouts for
//! weights, activations and KV, and never tells. `cpu` is the reference that every other backend is held against.

pub mod cpu;
pub mod cuda;

use checkpoint::Tensor;
use proto::{KvLayout, TokenId};

use crate::batch::Batch;
use crate::model::rope::Rope;
use crate::model::{ForwardError, KvMemory};

/// What an operation gives back; its results are in the arguments.
pub type Outcome = Result<(), ForwardError>;

/// A device that can run a decoder.
///
/// Results of one row of activations never depend on the other rows of a call.
pub trait Backend: Sized + Send + 'static {
    /// A weight matrix `[rows, cols]` on the device, stored as the checkpoint stores it, in the device's own order.
    type Matrix: Send;
    /// An f32 vector on the device: a norm's weights, a bias.
    type Vector: Send;
    /// f32 activations `[tokens, width]`; `width` is fixed, an operation sets `tokens` of what it writes.
    type Activations: Send;
    /// Where keys and values are kept.
    type Kv: KvMemory;

    /// Takes a weight matrix over.
    fn matrix(&mut self, tensor: &Tensor<'_>) -> Result<Self::Matrix, ForwardError>;

    /// Takes a vector over: all elements of the tensor, row after row.
    fn vector(&mut self, tensor: &Tensor<'_>) -> Result<Self::Vector, ForwardError>;

    /// Room for activations of that width, no tokens yet.
    fn activations(&self, width: usize) -> Self::Activations;

    /// Takes the memory for activations of that many tokens now, where a device has none to spare later.
    fn reserve(&mut self, _activations: &mut Self::Activations, _tokens: usize) -> Outcome {
        Ok(())
    }

    /// The same for what else a step of `tokens` tokens needs, over block tables of `blocks` entries together, up to the
    /// position that `rope` has reached.
    fn reserve_step(&mut self, _rope: &Rope, _tokens: usize, _blocks: usize) -> Outcome {
        Ok(())
    }

    /// An arena of `blocks` zeroed blocks. Fails when there is no room for them.
    fn kv(&self, layout: KvLayout, blocks: usize) -> Result<Self::Kv, ForwardError>;

    /// `out[t] = table[tokens[t]]`. Every token is below the table's rows.
    fn embed(&mut self, table: &Self::Matrix, tokens: &[TokenId], out: &mut Self::Activations) -> Outcome;

    /// `out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight`, element by element.
    fn rms_norm(
        &mut self,
        x: &Self::Activations,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Activations,
    ) -> Outcome;

    /// `out[t] = weight · x[t] + bias` for each product; they share their input.
    fn matmul(&mut self, x: &Self::Activations, products: &mut [Product<'_, Self>]) -> Outcome;

    /// Turns queries and keys by their positions, then stores keys and values of `step.layer` in the batch's slots.
    fn rope_and_store(
        &mut self,
        step: LayerStep<'_>,
        rope: &Rope,
        qkv: &mut Qkv<Self>,
        kv: &mut Self::Kv,
    ) -> Outcome;

    /// Causal attention of each token over its own sequence in `kv`, positions 0 up to its own. Query head h reads
    /// key/value head `h / (heads / kv_heads)`. `q`, `out`: `[tokens, heads * head_dim]`.
    fn attention(
        &mut self,
        step: LayerStep<'_>,
        q: &Self::Activations,
        kv: &Self::Kv,
        out: &mut Self::Activations,
    ) -> Outcome;

    /// `gate = activation(gate) * up`, element by element.
    fn gate(
        &mut self,
        activation: Activation,
        gate: &mut Self::Activations,
        up: &Self::Activations,
    ) -> Outcome;

    /// `x = x + delta`, element by element.
    fn add(&mut self, x: &mut Self::Activations, delta: &Self::Activations) -> Outcome;

    /// `out[i] = x[rows[i]]`.
    fn select(&mut self, x: &Self::Activations, rows: &[u32], out: &mut Self::Activations) -> Outcome;

    /// Copies activations to the host, row after row; `out` is resized to `tokens * width`.
    fn read(&mut self, x: &Self::Activations, out: &mut Vec<f32>) -> Outcome;
}

/// A weight matrix and its bias.
pub struct Linear<B: Backend> {
    /// `[out, in]`
    pub weight: B::Matrix,
    /// `[out]`
    pub bias: Option<B::Vector>,
}

/// One of the products of a [`Backend::matmul`].
pub struct Product<'a, B: Backend> {
    /// What the input is multiplied by.
    pub linear: &'a Linear<B>,
    /// `[tokens, linear.out]`
    pub out: &'a mut B::Activations,
}

/// Queries, keys and values of a step.
pub struct Qkv<B: Backend> {
    /// `[tokens, heads * head_dim]`
    pub q: B::Activations,
    /// `[tokens, kv_heads * head_dim]`
    pub k: B::Activations,
    /// `[tokens, kv_heads * head_dim]`
    pub v: B::Activations,
}

/// One layer of one step.
#[derive(Clone, Copy)]
pub struct LayerStep<'a> {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// The step's tokens, positions, slots and block tables.
    pub batch: &'a Batch,
}

/// The non-linearity of a gated feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`
    Silu,
}
