//! The canonical layout of KV bytes between workers.
//!
//! A *slab* is one layer of one block: `[K|V][token][kv_head][head_dim]`, little-endian. A block on the wire is
//! its slabs in layer order. Tokens are the slowest index after K|V, so a block that holds n tokens is the same
//! bytes whatever the block size of either side, and block sizes may differ.

use serde::{Deserialize, Serialize};

/// Element type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// IEEE 754 binary16.
    F16,
    /// IEEE 754 binary32.
    F32,
}

impl KvDtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Shape of a worker's KV cache. All but `block_tokens` must be equal on both sides of a hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    /// Transformer layers.
    pub layers: usize,
    /// Key/value heads per layer.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Element type.
    pub dtype: KvDtype,
    /// Tokens per block on this side. Each side has its own.
    pub block_tokens: usize,
}

impl KvLayout {
    /// Bytes that one token's keys (or values) take in one layer: `kv_heads * head_dim * size`.
    pub fn row_bytes(&self) -> usize {
        self.kv_heads * self.head_dim * self.dtype.size()
    }

    /// Bytes of a slab that holds `tokens` tokens: K and V of one layer.
    pub fn slab_bytes(&self, tokens: usize) -> usize {
        2 * tokens * self.row_bytes()
    }

    /// Bytes of `tokens` tokens in all layers.
    pub fn block_bytes(&self, tokens: usize) -> usize {
        self.layers * self.slab_bytes(tokens)
    }

    /// Blocks that `tokens` tokens occupy, the last perhaps partly.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// The first field in which the two layouts cannot exchange KV, with both values; `None` when they can.
    pub fn mismatch(&self, other: &Self) -> Option<String> {
        let differs = |field: &str, ours: &dyn std::fmt::Debug, theirs: &dyn std::fmt::Debug| {
            Some(format!("{field}: {ours:?} here, {theirs:?} there"))
        };
        if self.layers != other.layers {
            return differs("layers", &self.layers, &other.layers);
        }
        if self.kv_heads != other.kv_heads {
            return differs("kv_heads", &self.kv_heads, &other.kv_heads);
        }
        if self.head_dim != other.head_dim {
            return differs("head_dim", &self.head_dim, &other.head_dim);
        }
        if self.dtype != other.dtype {
            return differs("kv_dtype", &self.dtype, &other.dtype);
        }
        None
    }
}
