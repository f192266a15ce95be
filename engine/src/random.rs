//! The random number of a token: a pure function of where the token is, so that a sequence continued elsewhere, or
//! computed again, or beside others, draws the same.
//!
//! Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): a
//! counter-based generator, ten rounds of multiply and exchange keyed by a Weyl sequence.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The generator's 128 bits at a counter, under a key.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [c0, c1, c2, c3] = counter;
        let a = u64::from(MULTIPLIERS[0]) * u64::from(c0);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(c2);
        let high = |product: u64| (product >> 32) as u32;
        counter = [high(b) ^ c1 ^ key[0], b as u32, high(a) ^ c3 ^ key[1], a as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// A number in [0, 1), with 53 random bits, for the token at `position` of sequence `sequence` of a request.
pub(crate) fn uniform(seed: u64, sequence: u32, position: u64) -> f64 {
    let counter = [position as u32, (position >> 32) as u32, sequence, 0];
    let [low, high, ..] = philox(counter, [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(high) << 32 | u64::from(low);
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with the authors' implementation (Random123, `kat_vectors`).
    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn numbers_are_uniform() {
        let mut bins = [0u32; 16];
        for position in 0..16_000 {
            bins[(uniform(42, 0, position) * 16.0) as usize] += 1;
        }
        let chi_square: f64 = bins.iter().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
        // 99.9 % of 15 degrees of freedom.
        assert!(chi_square < 37.7, "chi square {chi_square}");
    }

    #[test]
    fn every_part_of_the_place_counts() {
        let reference = uniform(1, 0, 5);
        assert_eq!(reference, uniform(1, 0, 5));
        for other in [uniform(2, 0, 5), uniform(1, 1, 5), uniform(1, 0, 6), uniform(1 << 32, 0, 5)] {
            assert_ne!(reference, other);
        }
    }
}
