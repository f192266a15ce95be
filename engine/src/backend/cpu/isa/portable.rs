//! Plain Rust: what every machine can run, and the definition of what the other sets must give.

use half::{bf16, f16};

use super::{Isa, LANES, Lane, Line};

/// No vector unit is assumed. On aarch64, whose base has NEON with FMA, the compiler vectorises these loops.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

#[inline(always)]
fn zip(a: Lane, b: Lane, f: impl Fn(f32, f32) -> f32) -> Lane {
    let mut out = [0.0; LANES];
    for (out, (a, b)) in out.iter_mut().zip(a.into_iter().zip(b)) {
        *out = f(a, b);
    }
    out
}

#[inline(always)]
fn words(words: &Line, f: impl Fn(u32) -> f32) -> Lane {
    let mut out = [0.0; LANES];
    for (out, word) in out.iter_mut().zip(words.0) {
        *out = f(word);
    }
    out
}

impl Isa for Portable {
    type V = Lane;

    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Lane {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, from: &Lane) -> Lane {
        *from
    }

    #[inline(always)]
    fn store(self, v: Lane, to: &mut Lane) {
        *to = v;
    }

    #[inline(always)]
    fn fma(self, a: Lane, b: Lane, c: Lane) -> Lane {
        let mut out = c;
        for (out, (a, b)) in out.iter_mut().zip(a.into_iter().zip(b)) {
            *out = a.mul_add(b, *out);
        }
        out
    }

    #[inline(always)]
    fn add(self, a: Lane, b: Lane) -> Lane {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Lane, b: Lane) -> Lane {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Lane, b: Lane) -> Lane {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Lane, b: Lane) -> Lane {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn max(self, a: Lane, b: Lane) -> Lane {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Lane, b: Lane) -> Lane {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> Lane {
        from.map(|bits| f16::from_bits(bits).to_f32_const())
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; LANES]) -> Lane {
        from.map(|bits| bf16::from_bits(bits).to_f32_const())
    }

    #[inline(always)]
    fn nibbles(self, line: &Line) -> [Lane; 8] {
        std::array::from_fn(|i| words(line, |word| ((word >> (4 * i)) & 15) as f32))
    }

    #[inline(always)]
    fn bytes(self, line: &Line) -> [Lane; 4] {
        std::array::from_fn(|i| words(line, |word| f32::from((word >> (8 * i)) as i8)))
    }

    #[inline(always)]
    fn shift_exponent(self, v: Lane, n_bits: Lane) -> Lane {
        zip(v, n_bits, |v, n| f32::from_bits(v.to_bits().wrapping_add(n.to_bits() << 23)))
    }
}
