//! Sixteen float lanes on whatever vector unit the machine has.
//!
//! A kernel is written once, over [`Isa`], and instantiated once per instruction set. Every operation here is
//! either exact or rounded once, as IEEE 754 says, so all instruction sets give the same bits. A token such as
//! [`Avx512`](x86::Avx512) exists only where its features were detected; that is what makes its methods safe.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use portable::Portable;

/// Lanes of a vector, and output rows of a weight panel.
pub(crate) const LANES: usize = 16;

/// Sixteen f32, as they lie in memory.
pub(crate) type Lane = [f32; LANES];

/// Sixteen packed 32-bit words of quantised weights: one cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u32; LANES]);

/// The operations kernels are made of. Every method is `inline(always)` into a function that has the features.
pub(crate) trait Isa: Copy + Send + Sync + 'static {
    /// Sixteen f32 in registers.
    type V: Copy;

    /// True when sixteen lanes are one register and there are 32 of them; it sets the tile sizes.
    const WIDE: bool;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Loads sixteen floats.
    fn load(self, from: &Lane) -> Self::V;
    /// Stores sixteen floats.
    fn store(self, v: Self::V, to: &mut Lane);
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// The greater of `a` and `b`; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The lesser of `a` and `b`; `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Widens sixteen IEEE halves.
    fn load_f16(self, from: &[u16; LANES]) -> Self::V;
    /// Widens sixteen bfloat16.
    fn load_bf16(self, from: &[u16; LANES]) -> Self::V;
    /// The eight unsigned nibbles of each word, lowest first.
    fn nibbles(self, words: &Line) -> [Self::V; 8];
    /// The four signed bytes of each word, lowest first.
    fn bytes(self, words: &Line) -> [Self::V; 4];
    /// `v * 2^n`, where n is the integer in the low mantissa bits of `n_bits`; neither end may overflow.
    fn shift_exponent(self, v: Self::V, n_bits: Self::V) -> Self::V;

    /// Sum over lanes, folded 8, 4, 2, 1: lane i takes lane i + 8, then i + 4, …
    #[inline(always)]
    fn fold(self, v: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }

    /// Folds sixteen vectors at once; lane i of the result is `fold(v[i])`, the same bits.
    #[inline(always)]
    fn fold_each(self, v: [Self::V; LANES]) -> Self::V {
        let mut sums = [0.0; LANES];
        for (sum, v) in sums.iter_mut().zip(v) {
            *sum = self.fold(v);
        }
        self.load(&sums)
    }
}

/// Work that is instantiated per instruction set.
pub(crate) trait Kernel {
    /// What it gives back.
    type Output;
    /// The body; mark every implementation `#[inline(always)]`, or it is compiled without the features.
    fn run<S: Isa>(self, isa: S) -> Self::Output;
}

/// An instruction set this machine has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum InstructionSet {
    /// Plain Rust; on aarch64 the compiler makes NEON of it.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl InstructionSet {
    /// The fastest that this machine has.
    pub(crate) fn detect() -> Self {
        Self::available().pop().expect("the portable set is always available")
    }

    /// All that this machine has, slowest first.
    pub(crate) fn available() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "only x86 has others to add"))]
        let mut sets = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(x86::Avx2::detect().map(Self::Avx2));
            sets.extend(x86::Avx512::detect().map(Self::Avx512));
        }
        sets
    }

    /// [`Isa::WIDE`] of the set.
    pub(crate) fn is_wide(self) -> bool {
        struct Wide;
        impl Kernel for Wide {
            type Output = bool;
            #[inline(always)]
            fn run<S: Isa>(self, _isa: S) -> bool {
                S::WIDE
            }
        }
        self.run(Wide)
    }

    /// Runs `kernel` compiled for this instruction set.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Portable => kernel.run(Portable),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(isa) => isa.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(isa) => isa.run(kernel),
        }
    }
}

/// e^x, with x held to -87.3 … 88.3, where the result is a normal float. Within 2 units in the last place.
///
/// Cody and Waite's reduction x = n ln 2 + r, then a degree-6 polynomial in r (near-minimax on ±ln 2 / 2).
#[inline(always)]
pub(crate) fn exp<S: Isa>(isa: S, x: S::V) -> S::V {
    /// 1.5 * 2^23: adding it rounds to an integer, which is then the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts; the first has trailing zeros, so that n times it is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const POLYNOMIAL: [f32; 5] = [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

    let x = isa.min(isa.max(x, isa.splat(-87.3)), isa.splat(88.3));
    let n_bits = isa.fma(x, isa.splat(std::f32::consts::LOG2_E), isa.splat(ROUND));
    let n = isa.sub(n_bits, isa.splat(ROUND));
    let r = isa.fma(n, isa.splat(-LN2_HIGH), x);
    let r = isa.fma(n, isa.splat(-LN2_LOW), r);
    let mut p = isa.splat(1.987_569_1e-4);
    for coefficient in POLYNOMIAL {
        p = isa.fma(p, r, isa.splat(coefficient));
    }
    let p = isa.fma(isa.mul(p, r), r, r);
    isa.shift_exponent(isa.add(p, isa.splat(1.0)), n_bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exp<'a>(&'a [f32]);

    impl Kernel for Exp<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<S: Isa>(self, isa: S) -> Vec<f32> {
            let mut out = Vec::new();
            for lane in self.0.as_chunks().0 {
                let mut y = [0.0; LANES];
                isa.store(exp(isa, isa.load(lane)), &mut y);
                out.extend(y);
            }
            out
        }
    }

    #[test]
    fn exp_is_close_to_the_real_one_and_the_same_on_every_set() {
        let x: Vec<f32> =
            (0..32_000).map(|i| (i as f32 - 16_000.0) / 190.0).chain([-1e9, f32::NEG_INFINITY]).collect();
        let x = &x[..x.len() / LANES * LANES];
        let reference = InstructionSet::Portable.run(Exp(x));
        for (x, y) in x.iter().zip(&reference) {
            let exact = f64::from(*x).exp();
            let error = (f64::from(*y) - exact).abs() / exact;
            assert!(error < 2e-7, "exp({x}) = {y}, exactly {exact}");
        }
        for set in InstructionSet::available() {
            assert_eq!(bits(&set.run(Exp(x))), bits(&reference), "{set:?}");
        }
    }

    #[test]
    fn exp_saturates() {
        let mut x = [0.0; LANES];
        x[0] = -1e9;
        x[1] = f32::NEG_INFINITY;
        x[2] = 1e9;
        for set in InstructionSet::available() {
            let y = set.run(Exp(&x));
            assert!(
                y[0] > 0.0 && y[0] < 2e-38 && y[1] == y[0] && y[2] > 1e38 && y[2].is_finite(),
                "{set:?} {y:?}"
            );
            assert_eq!(y[3], 1.0);
        }
    }

    struct Primitives<'a> {
        floats: &'a [Lane; LANES],
        words: Line,
        halves: [u16; LANES],
    }

    impl Kernel for Primitives<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<S: Isa>(self, isa: S) -> Vec<f32> {
            let mut v = [isa.splat(0.0); LANES];
            for (v, lane) in v.iter_mut().zip(self.floats) {
                *v = isa.load(lane);
            }
            let mut results = vec![isa.fold_each(v), isa.load_f16(&self.halves), isa.load_bf16(&self.halves)];
            results.extend([
                isa.max(v[0], v[1]),
                isa.min(v[0], v[1]),
                isa.div(v[2], v[3]),
                isa.fma(v[4], v[5], v[6]),
            ]);
            results.extend(isa.nibbles(&self.words));
            results.extend(isa.bytes(&self.words));
            let mut out = vec![0.0; results.len() * LANES];
            for (v, lane) in results.into_iter().zip(out.as_chunks_mut().0) {
                isa.store(v, lane);
            }
            out.push(isa.fold(v[7]));
            out
        }
    }

    #[test]
    fn primitives_agree_on_every_set() {
        let mut seed = 1_u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed ^ (seed >> 15)
        };
        let floats: [Lane; LANES] =
            std::array::from_fn(|_| std::array::from_fn(|_| next() as f32 / 1e9 - 2.0));
        let words = Line(std::array::from_fn(|_| next()));
        // Finite halves of both signs, denormals among them.
        let halves = std::array::from_fn(|i| if i < 3 { i as u16 } else { (next() as u16) & 0xBBFF });
        let primitives = |set: InstructionSet| set.run(Primitives { floats: &floats, words, halves });
        let reference = primitives(InstructionSet::Portable);
        for (i, lane) in floats.iter().enumerate() {
            let exact: f64 = lane.iter().map(|x| f64::from(*x)).sum();
            assert!((f64::from(reference[i]) - exact).abs() < 1e-5);
        }
        assert_eq!(reference[7 * LANES], (words.0[0] & 15) as f32);
        assert_eq!(reference[18 * LANES], f32::from((words.0[0] >> 24) as i8));
        for set in InstructionSet::available() {
            assert_eq!(bits(&primitives(set)), bits(&reference), "{set:?}");
        }
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }
}
