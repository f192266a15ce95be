//! What a sequence can take over of KV that is here already: whole blocks by reference, and the beginning of the block
//! after them as a copy, since a block with room in it has one writer.
//!
//! The prefix cache names full blocks by content. What it has no name for is found in living sequences: the same prompt
//! computed a second time (one of `n` continuations, a fork) shares all that the first has computed, to the token.

use proto::TokenId;

use super::Scheduler;
use crate::batch::BlockIndex;
use crate::sequence::Sequence;

/// KV that a sequence starts with.
#[derive(Debug, Default)]
pub(super) struct Prefix {
    /// Full blocks, to be shared.
    pub(super) shared: Vec<BlockIndex>,
    /// A block of which the first tokens are to be copied.
    pub(super) tail: Option<BlockIndex>,
    /// Tokens in all.
    pub(super) tokens: usize,
}

/// A block to be copied over another before the next step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockCopy {
    pub(crate) from: BlockIndex,
    pub(crate) to: BlockIndex,
}

impl Scheduler {
    /// What is here of the first `tokens` tokens of a sequence. Nothing when there is no prefix cache.
    pub(super) fn prefix(&self, sequence: &Sequence, tokens: usize) -> Prefix {
        if self.chain.is_none() {
            return Prefix::default();
        }
        let size = self.config.block_tokens;
        let tokens = tokens.min(sequence.reusable());
        let full = (tokens / size).min(sequence.hashes.len());
        let mut shared = self.pool.find(&sequence.hashes[..full]);
        let start = shared.len() * size;
        if start == tokens {
            return Prefix { shared, tail: None, tokens };
        }
        // The next block is known as a whole, and only a part of it is wanted.
        let next = sequence.hashes.get(full..=full).filter(|_| shared.len() == full);
        if let Some(&[tail]) = next.map(|next| self.pool.find(next)).as_deref() {
            return Prefix { shared, tail: Some(tail), tokens };
        }
        let wanted = Wanted { sequence, start, size, tokens };
        let living = self.sequences.values().map(|other| (wanted.computed_by(other), other));
        // Of equals the oldest, which is no different but always the same.
        let Some((end, other)) = living.rev().max_by_key(|(end, _)| *end).filter(|(end, _)| *end > start)
        else {
            return Prefix { shared, tail: None, tokens: start };
        };
        shared.extend_from_slice(&other.blocks[start / size..end / size]);
        let tail = (!end.is_multiple_of(size)).then(|| other.blocks[end / size]);
        Prefix { shared, tail, tokens: end }
    }

    /// Copies that the KV memory has to make, in order, before anything else is written to it.
    pub(crate) fn take_copies(&mut self) -> Vec<BlockCopy> {
        std::mem::take(&mut self.copies)
    }
}

/// The KV that is looked for: of tokens `start..tokens` of a sequence, where `start` is a border of blocks.
struct Wanted<'a> {
    sequence: &'a Sequence,
    start: usize,
    size: usize,
    tokens: usize,
}

impl Wanted<'_> {
    /// The token up to which another sequence has it; `start` when it has nothing of it.
    fn computed_by(&self, other: &Sequence) -> usize {
        let end = self.tokens.min(other.computed);
        let before = (self.start / self.size).checked_sub(1);
        let hash = |sequence: &Sequence| before.and_then(|block| sequence.hashes.get(block).copied());
        if end <= self.start || hash(other) != hash(self.sequence) {
            return self.start;
        }
        let wanted: &[TokenId] = &self.sequence.spec.tokens[self.start..end];
        let same = wanted.iter().zip(&other.spec.tokens[self.start..]).take_while(|(a, b)| a == b).count();
        self.start + same
    }
}
