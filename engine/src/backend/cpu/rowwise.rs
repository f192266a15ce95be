//! Operations on each token's row alone: norm, gate, sum, rotation.

use super::isa::{Isa, Kernel, LANES, Lane, exp};
use crate::backend::Activation;
use checkpoint::RopePairing;

/// `out = x / sqrt(mean(x^2) + eps) * weight`
pub(super) struct RmsNorm<'a> {
    pub(super) x: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
    pub(super) out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (lanes, rest) = self.x.as_chunks::<LANES>();
        let mut squares = isa.splat(0.0);
        for x in lanes {
            let x = isa.load(x);
            squares = isa.fma(x, x, squares);
        }
        if !rest.is_empty() {
            let x = isa.load(&padded(rest));
            squares = isa.fma(x, x, squares);
        }
        let mean = isa.fold(squares) / self.x.len() as f32;
        let scale = 1.0 / (mean + self.eps).sqrt();
        for ((out, x), weight) in self.out.iter_mut().zip(self.x).zip(self.weight) {
            *out = x * scale * weight;
        }
    }
}

/// `x = activation(x) * up`
pub(super) struct Gate<'a> {
    pub(super) activation: Activation,
    pub(super) x: &'a mut [f32],
    pub(super) up: &'a [f32],
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (lanes, rest) = self.x.as_chunks_mut::<LANES>();
        let (up_lanes, up_rest) = self.up.as_chunks::<LANES>();
        for (lane, up) in lanes.iter_mut().zip(up_lanes) {
            let x = isa.load(lane);
            isa.store(isa.mul(activate(isa, self.activation, x), isa.load(up)), lane);
        }
        if !rest.is_empty() {
            let x = isa.load(&padded(rest));
            let mut product = [0.0; LANES];
            isa.store(isa.mul(activate(isa, self.activation, x), isa.load(&padded(up_rest))), &mut product);
            rest.copy_from_slice(&product[..rest.len()]);
        }
    }
}

#[inline(always)]
fn activate<S: Isa>(isa: S, activation: Activation, x: S::V) -> S::V {
    match activation {
        Activation::Silu => {
            let one = isa.splat(1.0);
            isa.div(x, isa.add(one, exp(isa, isa.sub(isa.splat(0.0), x))))
        }
    }
}

#[inline(always)]
fn padded(rest: &[f32]) -> Lane {
    let mut lane = [0.0; LANES];
    lane[..rest.len()].copy_from_slice(rest);
    lane
}

/// Turns each head of a row. `turns` holds the cosine and the sine of each pair's angle.
pub(super) fn rotate(row: &mut [f32], head_dim: usize, pairing: RopePairing, turns: &[[f32; 2]]) {
    for head in row.chunks_exact_mut(head_dim) {
        match pairing {
            RopePairing::Adjacent => {
                for ([a, b], turn) in head.as_chunks_mut().0.iter_mut().zip(turns) {
                    (*a, *b) = turned(*a, *b, *turn);
                }
            }
            RopePairing::Halves => {
                let (first, second) = head.split_at_mut(turns.len());
                for ((a, b), turn) in first.iter_mut().zip(second).zip(turns) {
                    (*a, *b) = turned(*a, *b, *turn);
                }
            }
        }
    }
}

/// Rounded after each operation, on every machine: Rust never contracts.
#[inline(always)]
fn turned(a: f32, b: f32, [cos, sin]: [f32; 2]) -> (f32, f32) {
    (a * cos - b * sin, a * sin + b * cos)
}
