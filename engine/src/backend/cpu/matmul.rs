//! Products of quantised weights and f32 activations.
//!
//! Every output is one chain of fused multiply-adds over ascending columns, whatever the number of tokens, so a
//! token's result is the same alone and in any batch. Threads share rows, never columns. A single token is
//! multiplied while panels are decoded; for several, a group of panels is decoded once into scratch and multiplied
//! by tiles of tokens, a tile's accumulators in registers.

use super::disjoint::Disjoint;
use super::isa::{InstructionSet, Isa, Kernel, LANES, Lane};
use super::panels::{BLOCK, Block, Format, OCTET, OCTETS, Panels, with_format};
use super::pool::Pool;
use super::scratch::{Lanes, MemberScratch};
use crate::backend::Outcome;

/// Panels multiplied together: with [`token_tile`], what the registers hold.
const fn panel_group(wide: bool) -> usize {
    if wide { 2 } else { 1 }
}

/// Tokens multiplied together.
pub(super) const fn token_tile(wide: bool) -> usize {
    if wide { 12 } else { 6 }
}

/// Activations in tiles of tokens, interleaved: `[tile][depth][tokens of the tile]`. Kept between products, so that
/// its memory is reused.
#[derive(Default)]
pub(super) struct TokenTiles {
    tokens: usize,
    depth: usize,
    /// Tokens of every tile but the last.
    tile: usize,
    data: Vec<f32>,
}

impl TokenTiles {
    /// Packs `x: [tokens, cols]` for weights of `depth >= cols` columns; columns between are zeros.
    pub(super) fn pack(&mut self, pool: &mut Pool, x: &[f32], shape: TileShape) -> Outcome {
        let TileShape { cols, depth, tile } = shape;
        self.tokens = x.len() / cols;
        (self.depth, self.tile) = (depth, tile);
        self.data.clear();
        self.data.resize(self.tokens * depth, 0.0);
        pool.each_chunk(&mut self.data, tile * depth, |_, i, packed| {
            let width = packed.len() / depth;
            for (t, row) in x[i * tile * cols..].chunks_exact(cols).take(width).enumerate() {
                for (packed, x) in packed.chunks_exact_mut(width).zip(row) {
                    packed[t] = *x;
                }
            }
        })
    }

    /// First token, number of tokens and packed values of each tile.
    #[inline(always)]
    fn tiles(&self) -> impl Iterator<Item = (usize, usize, &[f32])> {
        (0..self.tokens).step_by(self.tile).map(|first| {
            let width = self.tile.min(self.tokens - first);
            (first, width, &self.data[first * self.depth..][..width * self.depth])
        })
    }
}

/// How activations are cut into tiles.
#[derive(Clone, Copy)]
pub(super) struct TileShape {
    /// Width of the activations.
    pub(super) cols: usize,
    /// Width with padding.
    pub(super) depth: usize,
    /// Tokens of a tile.
    pub(super) tile: usize,
}

/// One product of a call.
pub(super) struct Output<'a> {
    pub(super) weights: &'a Panels,
    pub(super) bias: Option<&'a [f32]>,
    /// `[tokens, weights.rows]`
    pub(super) out: Disjoint<'a, f32>,
}

/// Runs all products of the same input.
pub(super) fn matmul(
    set: InstructionSet,
    pool: &mut Pool,
    scratch: &MemberScratch,
    x: &TokenTiles,
    outputs: &[Output<'_>],
) -> Outcome {
    let group = panel_group(set.is_wide());
    let groups = |output: &Output<'_>| output.weights.panels().div_ceil(group);
    pool.run(outputs.iter().map(groups).sum(), &|member, item| {
        let mut item = item;
        for output in outputs {
            if item < groups(output) {
                let scratch = &mut scratch.lock(member).panels;
                return set.run(PanelGroup { output, first: item * group, x, scratch });
            }
            item -= groups(output);
        }
    })
}

/// A few panels times all tokens.
struct PanelGroup<'a> {
    output: &'a Output<'a>,
    /// The first panel of the group.
    first: usize,
    x: &'a TokenTiles,
    scratch: &'a mut Lanes,
}

impl Kernel for PanelGroup<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let panels = self.output.weights.panels() - self.first;
        if S::WIDE && panels >= panel_group(true) {
            self.group::<S, { panel_group(true) }>(isa);
        } else {
            self.group::<S, 1>(isa);
        }
    }
}

impl PanelGroup<'_> {
    #[inline(always)]
    fn group<S: Isa, const P: usize>(mut self, isa: S) {
        if self.x.tokens == 1 {
            let sums = with_format!(self.output.weights.dtype, F => self.one_token::<S, F, P>(isa));
            self.write(isa, 0, &sums);
        } else {
            self.tiles::<S, P>(isa);
        }
    }

    /// Decodes and multiplies in one pass over the panels.
    #[inline(always)]
    fn one_token<S: Isa, F: Format, const P: usize>(&self, isa: S) -> [S::V; P] {
        let mut sums = [isa.splat(0.0); P];
        for (i, x) in self.x.data.as_chunks::<BLOCK>().0.iter().enumerate() {
            let blocks = self.blocks::<F, P>(i);
            let mut scales = [[isa.splat(0.0); 2]; P];
            for p in 0..P {
                scales[p] = blocks[p].scale::<S, F>(isa);
            }
            for (octet, x) in x.as_chunks::<OCTET>().0.iter().enumerate() {
                for p in 0..P {
                    let weights = blocks[p].octet::<S, F>(isa, scales[p], octet);
                    for k in 0..OCTET {
                        sums[p] = isa.fma(weights[k], isa.splat(x[k]), sums[p]);
                    }
                }
            }
        }
        sums
    }

    /// Block `i` of each panel of the group.
    #[inline(always)]
    fn blocks<F: Format, const P: usize>(&self, i: usize) -> [Block<'_>; P] {
        let mut blocks = [self.output.weights.block::<F>(self.first, i); P];
        for (p, block) in blocks.iter_mut().enumerate() {
            *block = self.output.weights.block::<F>(self.first + p, i);
        }
        blocks
    }

    /// Decodes the panels, then multiplies them by each tile of tokens.
    #[inline(always)]
    fn tiles<S: Isa, const P: usize>(&mut self, isa: S) {
        let mut decoded = std::mem::take(self.scratch);
        decoded.resize(self.x.depth * P);
        for p in 0..P {
            let to = Decoded { out: &mut decoded[p..], stride: P };
            decode(isa, self.output.weights, self.first + p, to);
        }
        let weights = &decoded.as_chunks::<P>().0[..self.x.depth];
        for (first, width, x) in self.x.tiles() {
            macro_rules! tile {
                ($($tokens:literal)*) => {
                    match width {
                        $($tokens => self.tile::<S, P, $tokens>(isa, weights, x, first),)*
                        _ => unreachable!("tiles of {width} tokens"),
                    }
                };
            }
            tile!(1 2 3 4 5 6 7 8 9 10 11 12);
        }
        *self.scratch = decoded;
    }

    #[inline(always)]
    fn tile<S: Isa, const P: usize, const T: usize>(
        &self,
        isa: S,
        weights: &[[Lane; P]],
        x: &[f32],
        first: usize,
    ) {
        if T > token_tile(S::WIDE) {
            unreachable!("tiles of {T} tokens need more registers");
        }
        let mut sums = [[isa.splat(0.0); P]; T];
        for (weights, x) in weights.iter().zip(x.as_chunks::<T>().0) {
            let mut w = [isa.splat(0.0); P];
            for p in 0..P {
                w[p] = isa.load(&weights[p]);
            }
            for t in 0..T {
                let x = isa.splat(x[t]);
                for p in 0..P {
                    sums[t][p] = isa.fma(w[p], x, sums[t][p]);
                }
            }
        }
        for (t, sums) in sums.iter().enumerate() {
            self.write(isa, first + t, sums);
        }
    }

    /// Adds the bias and writes the group's rows of token `token`.
    #[inline(always)]
    #[expect(unsafe_code, reason = "groups write stripes of the same rows")]
    fn write<S: Isa, const P: usize>(&self, isa: S, token: usize, sums: &[S::V; P]) {
        let Output { weights, bias, out } = self.output;
        for (p, sums) in sums.iter().enumerate() {
            let row = (self.first + p) * LANES;
            let rows = LANES.min(weights.rows - row);
            let mut lanes = [0.0; LANES];
            isa.store(*sums, &mut lanes);
            if let Some(bias) = bias {
                for (lane, bias) in lanes.iter_mut().zip(&bias[row..][..rows]) {
                    *lane += bias;
                }
            }
            let start = token * weights.rows + row;
            // SAFETY: this group alone writes these rows, and it writes each token once.
            let out = unsafe { out.part(start..start + rows) };
            out.copy_from_slice(&lanes[..rows]);
        }
    }
}

/// Where a decoded panel goes: column k to `out[k * stride]`.
struct Decoded<'a> {
    out: &'a mut [Lane],
    stride: usize,
}

#[inline(always)]
fn decode<S: Isa>(isa: S, weights: &Panels, panel: usize, to: Decoded<'_>) {
    with_format!(weights.dtype, F => decode_as::<S, F>(isa, weights, panel, to));
}

#[inline(always)]
fn decode_as<S: Isa, F: Format>(isa: S, weights: &Panels, panel: usize, to: Decoded<'_>) {
    let Decoded { out, stride } = to;
    for (i, out) in (0..weights.depth() / BLOCK).zip(out.chunks_mut(BLOCK * stride)) {
        let block = weights.block::<F>(panel, i);
        let scale = block.scale::<S, F>(isa);
        for octet in 0..OCTETS {
            let values = block.octet::<S, F>(isa, scale, octet);
            for (k, value) in values.iter().enumerate() {
                isa.store(*value, &mut out[(octet * OCTET + k) * stride]);
            }
        }
    }
}

/// One row of a matrix, decoded: an embedding.
pub(super) struct Row<'a> {
    pub(super) weights: &'a Panels,
    pub(super) index: usize,
    /// Room for a decoded panel.
    pub(super) scratch: &'a mut Lanes,
    /// `[cols]`
    pub(super) out: &'a mut [f32],
}

impl Kernel for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self { weights, index, scratch, out } = self;
        scratch.resize(weights.depth());
        decode(isa, weights, index / LANES, Decoded { out: scratch, stride: 1 });
        for (out, lanes) in out.iter_mut().zip(scratch.iter()) {
            *out = lanes[index % LANES];
        }
    }
}
