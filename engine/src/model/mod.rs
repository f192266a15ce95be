//! The model seam: what the engine asks of anything that turns tokens into logits.

pub mod conformance;
pub mod decoder;
pub mod rope;
pub mod samples;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proto::KvLayout;

use crate::batch::{Batch, BlockIndex, Logits};

/// Turns a batch into logits, reading and writing KV on the way.
///
/// The contract, which [`conformance`] checks on every implementation:
/// - `forward` writes the K and V of every token of the batch into its slot before any token of the same
///   sequence at a later position reads it, and reads only positions up to each token's own.
/// - Logits of a row depend on the sequence's tokens and positions alone, never on the rest of the batch, on how
///   the sequence was cut into chunks, or on the number of threads.
/// - After an [interrupted](ForwardError::Interrupted) forward the same batch may be run again: KV writes are idempotent.
pub trait Model: Send + 'static {
    /// Where this model keeps keys and values.
    type Kv: KvMemory;

    /// Vocabulary size.
    fn vocab_size(&self) -> usize;

    /// Most positions a sequence may have.
    fn context_len(&self) -> usize;

    /// An arena of `blocks` KV blocks of `block_tokens` tokens each. Fails when the device has no room for them.
    fn new_kv(&self, blocks: usize, block_tokens: usize) -> Result<Self::Kv, ForwardError>;

    /// Computes the batch. `logits.data` is resized to `[logit_rows, vocab]`.
    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut Self::Kv,
        interrupt: &Interrupt,
        logits: &mut Logits,
    ) -> Result<(), ForwardError>;
}

/// KV blocks as memory: block-major, so that a block is one contiguous run in the canonical layout of
/// [`proto::kv`]. Which block is whose is not known here.
pub trait KvMemory: Send + 'static {
    /// Shape of the arena.
    fn layout(&self) -> KvLayout;

    /// Blocks in the arena.
    fn blocks(&self) -> usize;

    /// Appends tokens `first..first + tokens` of `block` to `out` as canonical slabs, layer after layer:
    /// `[layer][K|V][tokens][kv_head][head_dim]`, `layout.block_bytes(tokens)` bytes in all.
    fn export(&self, block: BlockIndex, first: usize, tokens: usize, out: &mut Vec<u8>);

    /// Writes canonical slabs of `tokens` tokens into `block` from offset `first` on. The inverse of `export`.
    ///
    /// # Panics
    /// When `slabs` is not `layout.block_bytes(tokens)` bytes long or the tokens do not fit the block.
    fn import(&mut self, block: BlockIndex, first: usize, tokens: usize, slabs: &[u8]);

    /// Copies the whole of block `from` over block `to`.
    fn copy(&mut self, from: BlockIndex, to: BlockIndex);
}

/// A flag that asks the running step to stop at the next layer border, so that a cancelled long chunk does not
/// delay anybody. Cheap to clone; set from any thread.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Asks the running step, or the next one, to stop.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// True when a stop was asked for and not yet cleared.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Forgets the request; called between steps by the engine's owner.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Why a forward pass gave no logits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// [`Interrupt`] was raised; nothing is lost, the batch may run again.
    #[error("interrupted between layers")]
    Interrupted,
    /// The device could not do this; the engine fails every sequence of the batch, and may go on.
    #[error("device: {0}")]
    Device(String),
    /// The device has failed as a whole, and whatever is asked of it next fails too: the engine ends.
    #[error("device: {0}")]
    Lost(String),
}
