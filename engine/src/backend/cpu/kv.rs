//! KV blocks in memory: f16, block-major, the canonical layout within a block.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use proto::{KvDtype, KvLayout};

use crate::batch::BlockIndex;
use crate::model::KvMemory;

/// An arena of KV blocks. A block is `[layer][K|V][token][kv_head][head_dim]` in f16.
pub struct CpuKv {
    layout: KvLayout,
    blocks: usize,
    data: Vec<f16>,
}

/// Keys or values of a layer.
#[derive(Clone, Copy)]
pub(super) struct Plane {
    layer: usize,
    values: bool,
}

impl Plane {
    pub(super) fn keys(layer: usize) -> Self {
        Self { layer, values: false }
    }

    pub(super) fn values(layer: usize) -> Self {
        Self { layer, values: true }
    }
}

impl CpuKv {
    /// `blocks` zeroed blocks of f16.
    pub(super) fn new(layout: KvLayout, blocks: usize) -> Self {
        assert_eq!(layout.dtype, KvDtype::F16, "KV on the CPU is f16");
        // As integers, whose zeros the allocator hands out without touching them.
        let data = vec![0_u16; blocks * layout.block_bytes(layout.block_tokens) / 2];
        Self { layout, blocks, data: data.reinterpret_into() }
    }

    /// Elements of one token's keys (or values) in one layer.
    fn row_len(&self) -> usize {
        self.layout.kv_heads * self.layout.head_dim
    }

    /// Where a token's row starts.
    fn row_start(&self, plane: Plane, block: usize, offset: usize) -> usize {
        let planes = block * self.layout.layers * 2 + plane.layer * 2 + usize::from(plane.values);
        (planes * self.layout.block_tokens + offset) * self.row_len()
    }

    /// Rounds all heads of one token to f16 into a slot. `row: [kv_heads * head_dim]`
    pub(super) fn store(&mut self, plane: Plane, slot: usize, row: &[f32]) {
        let start = self.row_start(plane, slot / self.layout.block_tokens, slot % self.layout.block_tokens);
        self.data[start..][..row.len()].convert_from_f32_slice(row);
    }

    /// One head of each token of a block from `offset` on. `[head_dim]` each
    #[inline(always)]
    pub(super) fn head(
        &self,
        plane: Plane,
        block: usize,
        offset: usize,
        head: usize,
    ) -> impl Iterator<Item = &[f16]> {
        let start = self.row_start(plane, block, offset);
        let end = self.row_start(plane, block, self.layout.block_tokens);
        let elements = head * self.layout.head_dim..(head + 1) * self.layout.head_dim;
        self.data[start..end].chunks_exact(self.row_len()).map(move |row| &row[elements.clone()])
    }

    /// The elements of `tokens` tokens from `first` on in each plane of a block, in canonical order.
    fn plane_ranges(
        &self,
        block: BlockIndex,
        first: usize,
        tokens: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        assert!(first + tokens <= self.layout.block_tokens, "tokens {first}..{} of a block", first + tokens);
        let (row, plane) = (self.row_len(), self.layout.block_tokens * self.row_len());
        let start = block as usize * self.layout.layers * 2 * plane + first * row;
        let planes = self.layout.layers * 2;
        (0..planes).map(move |i| start + i * plane..start + i * plane + tokens * row)
    }
}

impl KvMemory for CpuKv {
    fn layout(&self) -> KvLayout {
        self.layout
    }

    fn blocks(&self) -> usize {
        self.blocks
    }

    fn export(&self, block: BlockIndex, first: usize, tokens: usize, out: &mut Vec<u8>) {
        for range in self.plane_ranges(block, first, tokens) {
            if cfg!(target_endian = "little") {
                out.extend_from_slice(bytemuck::cast_slice(&self.data[range]));
            } else {
                out.extend(self.data[range].iter().flat_map(|x| x.to_le_bytes()));
            }
        }
    }

    fn import(&mut self, block: BlockIndex, first: usize, tokens: usize, slabs: &[u8]) {
        assert_eq!(slabs.len(), self.layout.block_bytes(tokens), "bytes of {tokens} tokens");
        let mut stored = slabs.as_chunks().0.iter();
        for range in self.plane_ranges(block, first, tokens) {
            for (to, from) in self.data[range].iter_mut().zip(&mut stored) {
                *to = f16::from_le_bytes(*from);
            }
        }
    }

    fn copy(&mut self, from: BlockIndex, to: BlockIndex) {
        let len = self.layout.block_bytes(self.layout.block_tokens) / 2;
        let start = from as usize * len;
        self.data.copy_within(start..start + len, to as usize * len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: KvLayout =
        KvLayout { layers: 2, kv_heads: 3, head_dim: 5, dtype: KvDtype::F16, block_tokens: 4 };

    /// An arena whose every element is another number.
    fn counted() -> CpuKv {
        let mut kv = CpuKv::new(LAYOUT, 6);
        for (i, x) in kv.data.iter_mut().enumerate() {
            *x = f16::from_bits(i as u16);
        }
        kv
    }

    #[test]
    fn a_slab_is_layer_then_k_v_then_token_then_head() {
        let mut kv = CpuKv::new(LAYOUT, 6);
        let (block, offset) = (4, 2);
        let mut row = [0.0; 15];
        row[2 * 5 + 3] = 1.0;
        kv.store(Plane::values(1), block * 4 + offset, &row);
        assert_eq!(kv.head(Plane::values(1), block, offset, 2).next().unwrap()[3], f16::ONE);
        let mut out = Vec::new();
        kv.export(4, 1, 3, &mut out);
        assert_eq!(out.len(), LAYOUT.block_bytes(3));
        // [layer 1][V][token 2 - 1][head 2][element 3]
        let at = LAYOUT.slab_bytes(3) + LAYOUT.slab_bytes(3) / 2 + LAYOUT.row_bytes() + (2 * 5 + 3) * 2;
        assert_eq!(out[at..at + 2], f16::ONE.to_le_bytes());
        assert_eq!(out.iter().filter(|byte| **byte != 0).count(), 1);
    }

    #[test]
    fn import_is_the_inverse_of_export_and_touches_nothing_else() {
        let kv = counted();
        for (first, tokens) in [(0, 4), (0, 1), (3, 1), (1, 2), (2, 0)] {
            let mut slabs = Vec::new();
            kv.export(2, first, tokens, &mut slabs);
            let mut other = CpuKv::new(LAYOUT, 6);
            other.import(5, first, tokens, &slabs);
            let mut back = Vec::new();
            other.export(5, first, tokens, &mut back);
            assert_eq!(back, slabs);
            let written = other.data.iter().filter(|x| x.to_bits() != 0).count();
            assert_eq!(written, slabs.len() / 2);
        }
    }

    #[test]
    fn copy_takes_a_whole_block() {
        let mut kv = counted();
        let before = kv.data.clone();
        kv.copy(1, 3);
        let len = kv.data.len() / 6;
        assert_eq!(kv.data[3 * len..4 * len], before[len..2 * len]);
        assert_eq!(kv.data[..3 * len], before[..3 * len]);
        assert_eq!(kv.data[4 * len..], before[4 * len..]);
    }

    #[test]
    #[should_panic(expected = "tokens 3..5 of a block")]
    fn a_range_past_the_block_is_refused() {
        counted().export(0, 3, 2, &mut Vec::new());
    }
}
