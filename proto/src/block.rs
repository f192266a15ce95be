//! The hash chain that names KV blocks by content.
//!
//! The KV of a block depends on every token up to the block's end, so a block's hash covers the hash before it and
//! the block's own tokens. The chain is seeded by the model's fingerprint: equal hashes mean equal KV. The engine names
//! its blocks so, and a router those of a prompt, which is how it knows who has them.

use sha2::{Digest as _, Sha256};

use crate::{Digest, TokenId};

/// SHA-256 cut to 128 bits: at that width equal means identical, also for whoever can choose the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

/// Makes the hashes of the blocks of one model, cut at one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashChain {
    seed: Digest,
    block_tokens: usize,
}

impl HashChain {
    /// The chain of the model of that fingerprint, in blocks of that many tokens, at least 1.
    pub fn new(seed: Digest, block_tokens: usize) -> Self {
        Self { seed, block_tokens }
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Appends to `hashes`, which are those of the first blocks of `tokens`, the hashes of the other full blocks.
    pub fn extend(&self, tokens: &[TokenId], hashes: &mut Vec<BlockHash>) {
        for block in tokens.chunks_exact(self.block_tokens).skip(hashes.len()) {
            let mut hash = Sha256::new();
            match hashes.last() {
                Some(before) => hash.update(before.0),
                None => hash.update(self.seed.0),
            }
            for token in block {
                hash.update(token.to_le_bytes());
            }
            let [cut @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _]: [u8; 32] = hash.finalize().into();
            hashes.push(BlockHash(cut));
        }
    }

    /// The hashes of the full blocks of `tokens`.
    pub fn of(&self, tokens: &[TokenId]) -> Vec<BlockHash> {
        let mut hashes = Vec::with_capacity(tokens.len() / self.block_tokens);
        self.extend(tokens, &mut hashes);
        hashes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_covers_all_tokens_before_it() {
        let chain = HashChain::new(Digest([7; 32]), 4);
        let a = chain.of(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(a.len(), 2, "the partial block has no hash");
        let b = chain.of(&[1, 2, 3, 9, 5, 6, 7, 8]);
        assert!(a[0] != b[0] && a[1] != b[1]);
        let c = chain.of(&[1, 2, 3, 4, 5, 6, 7, 9]);
        assert!(a[0] == c[0] && a[1] != c[1]);
        assert_ne!(a, HashChain::new(Digest([8; 32]), 4).of(&[1, 2, 3, 4, 5, 6, 7, 8]));
    }

    #[test]
    fn extending_equals_hashing_at_once() {
        let chain = HashChain::new(Digest([7; 32]), 2);
        let tokens = [1, 2, 3, 4, 5, 6, 7];
        let mut hashes = Vec::new();
        for len in 0..=tokens.len() {
            chain.extend(&tokens[..len], &mut hashes);
        }
        assert_eq!(hashes, chain.of(&tokens));
    }
}
