//! Work on KV bytes in the canonical layout: checksums at seal, and parts of a run of tokens.

use std::ops::Range;

use proto::KvLayout;

use crate::batch::BlockIndex;
use crate::model::KvMemory;

/// CRC32C of each slab of `slabs`, which hold `tokens` tokens. `[layers]`
pub(crate) fn checksums(layout: &KvLayout, tokens: usize, slabs: &[u8]) -> impl Iterator<Item = u32> {
    slabs.chunks_exact(layout.slab_bytes(tokens)).map(crc32c::crc32c)
}

/// Reads the first `tokens` tokens of a block and takes their checksums, as they are in memory now. `scratch` is
/// overwritten. `[layers]`
pub(crate) fn read<'a>(
    kv: &impl KvMemory,
    block: BlockIndex,
    tokens: usize,
    scratch: &'a mut Vec<u8>,
) -> impl Iterator<Item = u32> + 'a {
    scratch.clear();
    kv.export(block, 0, tokens, scratch);
    scratch.chunks_exact(kv.layout().slab_bytes(tokens)).map(crc32c::crc32c)
}

/// Overwrites `out` with the slabs of the tokens `part` out of `slabs`, which hold `tokens` tokens.
pub(crate) fn cut(layout: &KvLayout, slabs: &[u8], tokens: usize, part: Range<usize>, out: &mut Vec<u8>) {
    let row = layout.row_bytes();
    out.clear();
    // Tokens are the slowest index after K|V: a part is one run in each half of each slab.
    for half in slabs.chunks_exact(tokens * row) {
        out.extend_from_slice(&half[part.start * row..part.end * row]);
    }
}

#[cfg(test)]
mod tests {
    use proto::KvDtype;

    use super::*;

    #[test]
    fn a_part_keeps_layers_and_halves_apart() {
        let layout = KvLayout { layers: 2, kv_heads: 1, head_dim: 1, dtype: KvDtype::F16, block_tokens: 4 };
        // Two bytes per row: the half it is in (layer, K or V) and its token.
        let slabs: Vec<u8> = (0..4).flat_map(|half| (0..3).flat_map(move |token| [half, token])).collect();
        let mut out = Vec::new();
        cut(&layout, &slabs, 3, 1..3, &mut out);
        assert_eq!(out, [0, 1, 0, 2, 1, 1, 1, 2, 2, 1, 2, 2, 3, 1, 3, 2]);
        assert_eq!(checksums(&layout, 3, &slabs).count(), 2);
    }
}
