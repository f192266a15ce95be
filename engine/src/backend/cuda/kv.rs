//! KV blocks on the GPU: f16, block-major, the canonical layout within a block.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::CudaSlice;
use proto::{KvDtype, KvLayout};

use super::device::{Fault, Gpu};
use crate::batch::BlockIndex;
use crate::model::KvMemory;

/// An arena of KV blocks. A block is `[layer][K|V][token][kv_head][head_dim]` in f16.
///
/// A GPU that cannot copy any more has failed as a whole: then the functions of [`KvMemory`] panic, which ends the worker with
/// an error, rather than hand out bytes that nobody has written.
pub struct CudaKv {
    gpu: Arc<Gpu>,
    layout: KvLayout,
    blocks: usize,
    /// f16 as bits.
    data: CudaSlice<u16>,
}

impl CudaKv {
    /// `blocks` zeroed blocks.
    pub(super) fn new(gpu: Arc<Gpu>, layout: KvLayout, blocks: usize) -> Result<Self, Fault> {
        assert_eq!(layout.dtype, KvDtype::F16, "KV on the GPU is f16");
        let data = gpu.zeros(blocks * layout.block_bytes(layout.block_tokens) / 2)?;
        Ok(Self { gpu, layout, blocks, data })
    }

    pub(super) fn data(&self) -> &CudaSlice<u16> {
        &self.data
    }

    pub(super) fn data_mut(&mut self) -> &mut CudaSlice<u16> {
        &mut self.data
    }

    /// The elements of `tokens` tokens from `first` on in each plane of a block, in canonical order. A whole block is one
    /// run.
    fn runs(
        &self,
        block: BlockIndex,
        first: usize,
        tokens: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let KvLayout { layers, kv_heads, head_dim, block_tokens, .. } = self.layout;
        assert!(first + tokens <= block_tokens, "tokens {first}..{} of a block", first + tokens);
        let (row, planes) = (kv_heads * head_dim, layers * 2);
        let (run, runs) =
            if tokens == block_tokens { (planes * tokens * row, 1) } else { (tokens * row, planes) };
        let start = block as usize * planes * block_tokens * row + first * row;
        (0..runs).map(move |i| start + i * block_tokens * row..start + i * block_tokens * row + run)
    }
}

impl KvMemory for CudaKv {
    fn layout(&self) -> KvLayout {
        self.layout
    }

    fn blocks(&self) -> usize {
        self.blocks
    }

    fn export(&self, block: BlockIndex, first: usize, tokens: usize, out: &mut Vec<u8>) {
        let mut stored = vec![0_u16; self.layout.block_bytes(tokens) / 2];
        let mut rest = &mut stored[..];
        for run in self.runs(block, first, tokens).filter(|run| !run.is_empty()) {
            let (part, after) = rest.split_at_mut(run.len());
            self.gpu.stream.memcpy_dtoh(&self.data.slice(run), part).expect("the GPU gives KV out");
            rest = after;
        }
        self.gpu.stream.synchronize().expect("the GPU gives KV out");
        out.extend(stored.iter().flat_map(|bits| bits.to_le_bytes()));
    }

    fn import(&mut self, block: BlockIndex, first: usize, tokens: usize, slabs: &[u8]) {
        assert_eq!(slabs.len(), self.layout.block_bytes(tokens), "bytes of {tokens} tokens");
        let stored: Vec<u16> = slabs.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
        let mut rest = &stored[..];
        for run in self.runs(block, first, tokens).filter(|run| !run.is_empty()) {
            let (part, after) = rest.split_at(run.len());
            self.gpu.stream.memcpy_htod(part, &mut self.data.slice_mut(run)).expect("the GPU takes KV in");
            rest = after;
        }
        // The host's copy is gone when this returns.
        self.gpu.stream.synchronize().expect("the GPU takes KV in");
    }

    fn copy(&mut self, from: BlockIndex, to: BlockIndex) {
        let len = self.layout.block_bytes(self.layout.block_tokens) / 2;
        if from == to || len == 0 {
            return;
        }
        let (low, high) = (from.min(to) as usize, from.max(to) as usize);
        let (mut before, mut after) = self.data.split_at_mut(high * len);
        let (low, high) = (before.slice_mut(low * len..(low + 1) * len), after.slice_mut(..len));
        let (source, mut target) = if from < to { (low, high) } else { (high, low) };
        self.gpu.stream.memcpy_dtod(&source, &mut target).expect("the GPU copies KV");
    }
}
