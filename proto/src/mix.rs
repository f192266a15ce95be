//! Numbers without a visible pattern: `SplitMix64` (Steele, Lea and Flood, *Fast Splittable Pseudorandom Number
//! Generators*, OOPSLA 2014). The n-th number of a seed is `mix(seed + n * WEYL)`, wrapping. Nothing secret hangs on it.

/// What the state grows by: the odd number nearest to 2^64 divided by the golden ratio.
pub const WEYL: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser: a bijection in which each bit of the input changes half of the output's.
pub const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_reference() {
        // The first three of the seed 1234567, as the authors' own program prints them.
        let of = |n: u64| mix(1_234_567_u64.wrapping_add(WEYL.wrapping_mul(n)));
        assert_eq!(
            [of(1), of(2), of(3)],
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }
}
