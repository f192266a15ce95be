//! The narrow waist between scheduling and computing: one step's work as a flat, complete, immutable value.
//!
//! Preparing a batch and running it are separate. Whoever runs it needs nothing else: not the sequences, not the
//! scheduler, not the block pool.

use std::ops::Range;

use proto::TokenId;

/// Index of a KV block in its arena.
pub type BlockIndex = u32;

/// One step: the tokens of several sequences, concatenated.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Batch {
    /// Token ids of all chunks, one after another. `[tokens]`
    pub tokens: Vec<TokenId>,
    /// Absolute position of each token in its sequence, from 0. `[tokens]`
    pub positions: Vec<u32>,
    /// Where each token's K and V are written: `block * block_tokens + offset`. `[tokens]`
    pub slots: Vec<u32>,
    /// Block tables of all chunks, one after another; entry i of a sequence's table holds positions
    /// `i * block_tokens ..`. `[sum of table lengths]`
    pub block_tables: Vec<BlockIndex>,
    /// One chunk per sequence. `[sequences]`
    pub chunks: Vec<Chunk>,
    /// Index into `tokens` of each token whose logits are wanted, ascending. `[rows]`
    pub logit_rows: Vec<u32>,
}

/// The part of a batch that belongs to one sequence. A decode step is a chunk of one token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The chunk's tokens in [`Batch::tokens`].
    pub tokens: Range<usize>,
    /// The sequence's block table in [`Batch::block_tables`]. Long enough for every position up to the chunk's last.
    pub block_table: Range<usize>,
}

impl Batch {
    /// Number of tokens in the step.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// True when there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// What a forward pass leaves behind: one row of the vocabulary per entry of [`Batch::logit_rows`].
#[derive(Clone, Debug, Default)]
pub struct Logits {
    /// Vocabulary size.
    pub vocab: usize,
    /// `[rows, vocab]`
    pub data: Vec<f32>,
}

impl Logits {
    /// The logits of row `row`. `[vocab]`
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.vocab..][..self.vocab]
    }
}
