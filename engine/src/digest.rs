//! The digest that binds a hand-off: which tokens, which bytes, which first token.

use proto::{Digest, HandoffId, TokenId};
use sha2::{Digest as _, Sha256};

/// Names this digest's encoding, so that no other hash of Baton's can be taken for it.
const DOMAIN: &[u8] = b"baton hand-off 1\0";

/// SHA-256 over everything a hand-off promises: its id, all token ids whose KV is handed over, the number of tokens
/// at the front that were not sent (as the owner rounded it), the checksum of every slab that was sent in
/// (first token, layer) order, and the token sampled from them. The owner computes it over what it sent, the
/// fetcher over what arrived.
pub fn handoff_digest(
    handoff: HandoffId,
    tokens: &[TokenId],
    skip: usize,
    checksums: impl Iterator<Item = u32>,
    first: TokenId,
) -> Digest {
    let mut hash = Sha256::new();
    hash.update(DOMAIN);
    hash.update(handoff.0);
    hash.update((tokens.len() as u64).to_le_bytes());
    for token in tokens {
        hash.update(token.to_le_bytes());
    }
    hash.update((skip as u64).to_le_bytes());
    let mut slabs = 0u64;
    for checksum in checksums {
        hash.update(checksum.to_le_bytes());
        slabs += 1;
    }
    // The count closes the only part of unknown length.
    hash.update(slabs.to_le_bytes());
    hash.update(first.to_le_bytes());
    Digest(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_counts() {
        let digest = |id: u8, tokens: &[TokenId], skip, sums: &[u32], first| {
            handoff_digest(HandoffId([id; 16]), tokens, skip, sums.iter().copied(), first)
        };
        let reference = digest(1, &[1, 2, 3], 0, &[10, 11], 7);
        assert_eq!(reference, digest(1, &[1, 2, 3], 0, &[10, 11], 7));
        let others = [
            digest(2, &[1, 2, 3], 0, &[10, 11], 7),
            digest(1, &[1, 2, 4], 0, &[10, 11], 7),
            digest(1, &[1, 2], 0, &[10, 11], 7),
            digest(1, &[1, 2, 3], 1, &[10, 11], 7),
            digest(1, &[1, 2, 3], 0, &[11, 10], 7),
            digest(1, &[1, 2, 3], 0, &[10], 7),
            digest(1, &[1, 2, 3], 0, &[10, 11], 8),
        ];
        for other in others {
            assert_ne!(reference, other);
        }
    }
}
