//! AVX2 with FMA and F16C, and AVX-512F.
#![expect(unsafe_code, reason = "intrinsics outside a function that names their feature")]

use std::arch::x86_64::*;
use std::mem::transmute;

use super::{Isa, Kernel, LANES, Lane, Line};

/// Proof that AVX-512F was detected (it implies AVX2, FMA and F16C).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

/// Proof that AVX2, FMA and F16C were detected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx512 {
    /// The token, where the machine has the features.
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && Avx2::detect().is_some()).then_some(Self(()))
    }

    /// Runs `kernel` in a function compiled with the features.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx2,fma,f16c")]
        fn with_features<K: Kernel>(isa: Avx512, kernel: K) -> K::Output {
            kernel.run(isa)
        }
        // SAFETY: a value of Avx512 exists only where the features were detected.
        unsafe { with_features(self, kernel) }
    }
}

impl Avx2 {
    /// The token, where the machine has the features.
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }

    /// Runs `kernel` in a function compiled with the features.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn with_features<K: Kernel>(isa: Avx2, kernel: K) -> K::Output {
            kernel.run(isa)
        }
        // SAFETY: a value of Avx2 exists only where the features were detected.
        unsafe { with_features(self, kernel) }
    }
}

/// Defines a method whose body is one expression of intrinsics.
macro_rules! intrinsics {
    ($(fn $name:ident($($arg:ident: $kind:ty),*) -> $out:ty { $body:expr })*) => {
        $(
            #[inline(always)]
            fn $name(self, $($arg: $kind),*) -> $out {
                // SAFETY: the token proves that the features are there; loads and stores stay in their arrays.
                unsafe { $body }
            }
        )*
    };
}

impl Isa for Avx512 {
    type V = __m512;

    const WIDE: bool = true;

    intrinsics! {
        fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn load(from: &Lane) -> __m512 { transmute::<Lane, __m512>(*from) }
        fn store(v: __m512, to: &mut Lane) -> () { *to = transmute::<__m512, Lane>(v) }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn load_f16(from: &[u16; LANES]) -> __m512 { _mm512_cvtph_ps(transmute::<[u16; LANES], __m256i>(*from)) }
        fn load_bf16(from: &[u16; LANES]) -> __m512 {{
            let halves = transmute::<[u16; LANES], __m256i>(*from);
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }}
        fn shift_exponent(v: __m512, n_bits: __m512) -> __m512 {
            _mm512_castsi512_ps(_mm512_add_epi32(
                _mm512_castps_si512(v),
                _mm512_slli_epi32::<23>(_mm512_castps_si512(n_bits)),
            ))
        }
        fn nibbles(line: &Line) -> [__m512; 8] {{
            // A permute reads the low four bits of each index: table look-up, mask and conversion in one.
            let digits = _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
            );
            let words = transmute::<Line, __m512i>(*line);
            [
                _mm512_permutexvar_ps(words, digits),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(words), digits),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(words), digits),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<12>(words), digits),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<16>(words), digits),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<20>(words), digits),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<24>(words), digits),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<28>(words), digits),
            ]
        }}
        fn bytes(line: &Line) -> [__m512; 4] {{
            let words = transmute::<Line, __m512i>(*line);
            [
                _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(words))),
                _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<16>(words))),
                _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<8>(words))),
                _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(words)),
            ]
        }}
        fn fold_each(v: [__m512; LANES]) -> __m512 { fold_each_avx512(&v) }
    }
}

/// Lanes 0 to 7, and 8 to 15.
type Pair = [__m256; 2];

impl Isa for Avx2 {
    type V = Pair;

    const WIDE: bool = false;

    intrinsics! {
        fn splat(x: f32) -> Pair { [_mm256_set1_ps(x); 2] }
        fn load(from: &Lane) -> Pair { transmute::<Lane, Pair>(*from) }
        fn store(v: Pair, to: &mut Lane) -> () { *to = transmute::<Pair, Lane>(v) }
        fn fma(a: Pair, b: Pair, c: Pair) -> Pair {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        fn add(a: Pair, b: Pair) -> Pair { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
        fn sub(a: Pair, b: Pair) -> Pair { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
        fn mul(a: Pair, b: Pair) -> Pair { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        fn div(a: Pair, b: Pair) -> Pair { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
        fn max(a: Pair, b: Pair) -> Pair { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
        fn min(a: Pair, b: Pair) -> Pair { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
        fn load_f16(from: &[u16; LANES]) -> Pair {{
            let [low, high] = transmute::<[u16; LANES], [__m128i; 2]>(*from);
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }}
        fn load_bf16(from: &[u16; LANES]) -> Pair {{
            let [low, high] = transmute::<[u16; LANES], [__m128i; 2]>(*from);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(low))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(high))),
            ]
        }}
        fn shift_exponent(v: Pair, n_bits: Pair) -> Pair {{
            let n = [_mm256_castps_si256(n_bits[0]), _mm256_castps_si256(n_bits[1])];
            let n = [_mm256_slli_epi32::<23>(n[0]), _mm256_slli_epi32::<23>(n[1])];
            [
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v[0]), n[0])),
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v[1]), n[1])),
            ]
        }}
        fn nibbles(line: &Line) -> [Pair; 8] {{
            let [low, high] = transmute::<Line, [__m256i; 2]>(*line);
            let mask = _mm256_set1_epi32(15);
            [
                digits(low, high, mask),
                digits(_mm256_srli_epi32::<4>(low), _mm256_srli_epi32::<4>(high), mask),
                digits(_mm256_srli_epi32::<8>(low), _mm256_srli_epi32::<8>(high), mask),
                digits(_mm256_srli_epi32::<12>(low), _mm256_srli_epi32::<12>(high), mask),
                digits(_mm256_srli_epi32::<16>(low), _mm256_srli_epi32::<16>(high), mask),
                digits(_mm256_srli_epi32::<20>(low), _mm256_srli_epi32::<20>(high), mask),
                digits(_mm256_srli_epi32::<24>(low), _mm256_srli_epi32::<24>(high), mask),
                digits(_mm256_srli_epi32::<28>(low), _mm256_srli_epi32::<28>(high), mask),
            ]
        }}
        fn bytes(line: &Line) -> [Pair; 4] {{
            let [low, high] = transmute::<Line, [__m256i; 2]>(*line);
            [
                top_bytes(_mm256_slli_epi32::<24>(low), _mm256_slli_epi32::<24>(high)),
                top_bytes(_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<16>(high)),
                top_bytes(_mm256_slli_epi32::<8>(low), _mm256_slli_epi32::<8>(high)),
                top_bytes(low, high),
            ]
        }}
        fn fold_each(v: [Pair; LANES]) -> Pair { fold_each_avx2(&v) }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn digits(low: __m256i, high: __m256i, mask: __m256i) -> Pair {
    [_mm256_cvtepi32_ps(_mm256_and_si256(low, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(high, mask))]
}

#[inline]
#[target_feature(enable = "avx2")]
fn top_bytes(low: __m256i, high: __m256i) -> Pair {
    [_mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(low)), _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(high))]
}

/// Each step halves the lanes per sum and doubles the sums per vector. The order in which vectors are paired puts
/// sum i into lane i at the end.
#[inline]
#[target_feature(enable = "avx512f")]
fn fold_each_avx512(v: &[__m512; LANES]) -> __m512 {
    let eights = |a: __m512, b: __m512| {
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b))
    };
    let fours = |i: usize| {
        let (a, b) = (eights(v[i], v[i + 4]), eights(v[i + 8], v[i + 12]));
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b))
    };
    let twos = |i: usize| {
        let (a, b) = (fours(i), fours(i + 1));
        _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xEE>(a, b))
    };
    let (a, b) = (twos(0), twos(2));
    _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xDD>(a, b))
}

/// As for AVX-512; the first halving is the sum of the two registers, and each half of the result is made of eight
/// of the vectors.
#[inline]
#[target_feature(enable = "avx2")]
fn fold_each_avx2(v: &[Pair; LANES]) -> Pair {
    let eights = |i: usize| _mm256_add_ps(v[i][0], v[i][1]);
    let fours = |i: usize| {
        let (a, b) = (eights(i), eights(i + 4));
        _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
    };
    let twos = |i: usize| {
        let (a, b) = (fours(i), fours(i + 1));
        _mm256_add_ps(_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b))
    };
    let ones = |i: usize| {
        let (a, b) = (twos(i), twos(i + 2));
        _mm256_add_ps(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xDD>(a, b))
    };
    [ones(0), ones(8)]
}
