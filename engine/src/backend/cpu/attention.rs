//! Attention over paged KV: one rule for prefill chunks and decode.
//!
//! The keys of a sequence are cut into splits of 256 at absolute positions. In each split: scores (lanes over the
//! head's elements, folded), the exact maximum, e^(score - maximum), their sum, and the weighted sum of values
//! (lanes over the head's elements, keys ascending). Splits are then combined in ascending order. So a token's
//! result depends on its own position alone. Keys past a token's position are left out by index.
//!
//! The rows of a task are the query heads that share a key/value head, for a few tokens of a chunk: keys and values
//! are widened once for all of them.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::disjoint::Disjoint;
use super::isa::{InstructionSet, Isa, Kernel, LANES, Lane, exp};
use super::kv::{CpuKv, Plane};
use super::pool::Pool;
use super::scratch::{Lanes, MemberScratch};
use crate::backend::{LayerStep, Outcome};
use crate::batch::BlockIndex;
use crate::model::KvMemory;

/// Keys of a split.
const SPLIT: usize = 256;
/// Tokens of a task.
const TOKENS: usize = 16;

/// Queries and where their results go, both `[tokens, heads * head_dim]`.
pub(super) struct Heads<'a> {
    pub(super) q: &'a [f32],
    pub(super) out: &'a mut [f32],
    /// Elements of a token's row.
    pub(super) width: usize,
}

/// Room for one task.
#[derive(Default)]
pub(super) struct AttentionScratch {
    /// Sixteen keys interleaved, so that they are scored together. `[SPLIT / LANES][dims][LANES]`
    keys: Lanes,
    /// `[SPLIT][dims]`
    values: Lanes,
    /// `[rows][dims]`
    queries: Lanes,
    /// Scores, then e^(score - maximum). `[rows][SPLIT / LANES]`
    weights: Lanes,
    /// Weighted sums of a split's values. `[rows][dims]`
    split: Lanes,
    /// The same over all splits so far. `[rows][dims]`
    total: Lanes,
    /// Over all splits so far. `[rows]`
    softmax: Vec<Softmax>,
}

/// Maximum of the scores, and sum of e^(score - maximum).
#[derive(Clone, Copy, Default)]
struct Softmax {
    max: f32,
    sum: f32,
}

/// Runs attention of one layer for the whole batch.
pub(super) fn attention(
    set: InstructionSet,
    pool: &mut Pool,
    scratch: &MemberScratch,
    step: LayerStep<'_>,
    (heads, kv): (Heads<'_>, &CpuKv),
) -> Outcome {
    let Heads { q, out, width } = heads;
    let kv_heads = kv.layout().kv_heads;
    let mut tiles = Vec::new();
    for chunk in &step.batch.chunks {
        let table = &step.batch.block_tables[chunk.block_table.clone()];
        for first in chunk.tokens.clone().step_by(TOKENS) {
            tiles.push((first..chunk.tokens.end.min(first + TOKENS), table));
        }
    }
    let out = Disjoint::new(out);
    pool.run(tiles.len() * kv_heads, &|member, item| {
        let (tokens, table) = &tiles[item / kv_heads];
        let task = Task {
            positions: &step.batch.positions[tokens.clone()],
            tokens: tokens.clone(),
            table,
            layer: step.layer,
            kv_head: item % kv_heads,
            q,
            out: &out,
            width,
            kv,
            scratch: &mut scratch.lock(member).attention,
        };
        set.run(task);
    })
}

/// Some tokens of one chunk, and the query heads of one key/value head. Row r is token `r / group`, head
/// `r % group` of the group.
struct Task<'a> {
    tokens: Range<usize>,
    /// `[tokens]`
    positions: &'a [u32],
    table: &'a [BlockIndex],
    layer: usize,
    kv_head: usize,
    q: &'a [f32],
    out: &'a Disjoint<'a, f32>,
    width: usize,
    kv: &'a CpuKv,
    scratch: &'a mut AttentionScratch,
}

impl Kernel for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self, isa: S) {
        let shape = Shape::of(&self);
        self.start(shape);
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        let last = self.positions.iter().max().map_or(0, |last| *last as usize);
        for split in 0..=last / SPLIT {
            let first = split * SPLIT;
            self.widen(isa, shape, first, SPLIT.min(last + 1 - first));
            for row in 0..shape.rows {
                let visible = self.visible(shape, row, first);
                if visible > 0 {
                    let softmax = self.softmax(isa, shape, row, (visible, scale));
                    // The values' sums need only the weights; the maxima and sums are combined below.
                    self.scratch.split[row * shape.dims..][..shape.dims].fill([0.0; LANES]);
                    self.scratch.softmax[shape.rows + row] = softmax;
                }
            }
            self.weigh_values(isa, shape, first);
            for row in 0..shape.rows {
                if self.visible(shape, row, first) > 0 {
                    self.combine(isa, shape, row, split == 0);
                }
            }
        }
        self.finish(isa, shape);
    }
}

/// Sizes of a task.
#[derive(Clone, Copy)]
struct Shape {
    head_dim: usize,
    /// Vectors of a head, the last padded with zeros.
    dims: usize,
    /// Query heads per key/value head.
    group: usize,
    rows: usize,
}

impl Shape {
    #[inline(always)]
    fn of(task: &Task<'_>) -> Self {
        let layout = task.kv.layout();
        let group = task.width / layout.head_dim / layout.kv_heads;
        Self {
            head_dim: layout.head_dim,
            dims: layout.head_dim.div_ceil(LANES),
            group,
            rows: task.tokens.len() * group,
        }
    }
}

impl Task<'_> {
    /// Sizes the scratch and takes the queries.
    #[inline(always)]
    fn start(&mut self, shape: Shape) {
        let scratch = &mut *self.scratch;
        let rows = shape.rows;
        scratch.keys.resize(SPLIT * shape.dims);
        scratch.values.resize(SPLIT * shape.dims);
        scratch.weights.resize(rows * (SPLIT / LANES));
        scratch.split.resize(rows * shape.dims);
        scratch.total.resize(rows * shape.dims);
        // The second half is the current split's.
        scratch.softmax.resize(2 * rows, Softmax::default());
        scratch.queries.resize(rows * shape.dims);
        scratch.queries.fill([0.0; LANES]);
        for (row, query) in scratch.queries.chunks_exact_mut(shape.dims).enumerate() {
            let start = (self.tokens.start + row / shape.group) * self.width
                + (self.kv_head * shape.group + row % shape.group) * shape.head_dim;
            query.as_flattened_mut()[..shape.head_dim].copy_from_slice(&self.q[start..][..shape.head_dim]);
        }
    }

    /// Keys of the split from position `first` on that a row may read.
    #[inline(always)]
    fn visible(&self, shape: Shape, row: usize, first: usize) -> usize {
        let end = self.positions[row / shape.group] as usize + 1;
        end.saturating_sub(first).min(SPLIT)
    }

    /// Gathers keys and values of `count` positions from `first` on and widens them to f32.
    #[inline(always)]
    fn widen<S: Isa>(&mut self, isa: S, shape: Shape, first: usize, count: usize) {
        let block_tokens = self.kv.layout().block_tokens;
        let AttentionScratch { keys, values, .. } = &mut *self.scratch;
        let mut position = first;
        while position < first + count {
            let (block, offset) = (self.table[position / block_tokens] as usize, position % block_tokens);
            let run = (block_tokens - offset).min(first + count - position);
            let stored_keys = self.kv.head(Plane::keys(self.layer), block, offset, self.kv_head);
            let stored_values = self.kv.head(Plane::values(self.layer), block, offset, self.kv_head);
            for (key, (k, v)) in (position - first..).zip(stored_keys.zip(stored_values).take(run)) {
                let at = key / LANES * LANES * shape.dims + key % LANES;
                widen_head(isa, k, keys[at..].iter_mut().step_by(LANES));
                widen_head(isa, v, values[key * shape.dims..].iter_mut());
            }
            position += run;
        }
    }

    /// Turns the scores of a row into weights e^(score - maximum), zero where there is no visible key.
    #[inline(always)]
    fn softmax<S: Isa>(
        &mut self,
        isa: S,
        shape: Shape,
        row: usize,
        (visible, scale): (usize, f32),
    ) -> Softmax {
        let AttentionScratch { keys, queries, weights, .. } = &mut *self.scratch;
        let query = &queries[row * shape.dims..][..shape.dims];
        let weights = &mut weights[row * (SPLIT / LANES)..][..visible.div_ceil(LANES)];
        let mut max = isa.splat(f32::NEG_INFINITY);
        for (keys, weights) in keys.chunks_exact(LANES * shape.dims).zip(weights.iter_mut()) {
            let scores = isa.mul(scores(isa, query, keys), isa.splat(scale));
            isa.store(scores, weights);
        }
        mask(weights, visible, f32::NEG_INFINITY);
        for weights in weights.iter() {
            max = isa.max(isa.load(weights), max);
        }
        let mut lanes = [0.0; LANES];
        isa.store(max, &mut lanes);
        let max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
        for weights in weights.iter_mut() {
            let shifted = isa.sub(isa.load(weights), isa.splat(max));
            isa.store(exp(isa, shifted), weights);
        }
        mask(weights, visible, 0.0);
        let mut sum = isa.splat(0.0);
        for weights in weights.iter() {
            sum = isa.add(sum, isa.load(weights));
        }
        Softmax { max, sum: isa.fold(sum) }
    }

    /// Adds up the split's values by their weights, for all rows: several rows at once over the keys that all of
    /// them see, then each alone over the rest.
    #[inline(always)]
    fn weigh_values<S: Isa>(&mut self, isa: S, shape: Shape, first: usize) {
        /// Rows at once; with four vectors of elements each, what the registers hold.
        const ROWS: usize = 4;
        let mut row = 0;
        while row < shape.rows {
            let rows = row..row + ROWS;
            let shared = if S::WIDE && rows.end <= shape.rows {
                rows.map(|row| self.visible(shape, row, first)).min().unwrap_or(0)
            } else {
                0
            };
            if shared > 0 {
                self.weigh_rows::<S, ROWS>(isa, shape, row, 0..shared);
                for row in row..row + ROWS {
                    let visible = self.visible(shape, row, first);
                    self.weigh_rows::<S, 1>(isa, shape, row, shared..visible);
                }
                row += ROWS;
            } else {
                let visible = self.visible(shape, row, first);
                self.weigh_rows::<S, 1>(isa, shape, row, 0..visible);
                row += 1;
            }
        }
    }

    /// Adds the values of some keys to the sums of rows `row .. row + R`.
    #[inline(always)]
    fn weigh_rows<S: Isa, const R: usize>(&mut self, isa: S, shape: Shape, row: usize, keys: Range<usize>) {
        if keys.is_empty() {
            return;
        }
        let mut dim = 0;
        while dim + 4 <= shape.dims {
            self.weigh::<S, R, 4>(isa, shape, (row, dim), keys.clone());
            dim += 4;
        }
        while dim < shape.dims {
            self.weigh::<S, R, 1>(isa, shape, (row, dim), keys.clone());
            dim += 1;
        }
    }

    /// The same for vectors `dim .. dim + D` of the elements, in registers.
    #[inline(always)]
    fn weigh<S: Isa, const R: usize, const D: usize>(
        &mut self,
        isa: S,
        shape: Shape,
        (row, dim): (usize, usize),
        keys: Range<usize>,
    ) {
        let AttentionScratch { values, weights, split, .. } = &mut *self.scratch;
        let mut sums = [[isa.splat(0.0); D]; R];
        let mut rows = [&[][..]; R];
        for r in 0..R {
            for d in 0..D {
                sums[r][d] = isa.load(&split[(row + r) * shape.dims + dim + d]);
            }
            let weights = weights[(row + r) * (SPLIT / LANES)..][..SPLIT / LANES].as_flattened();
            rows[r] = &weights[keys.clone()];
        }
        let values = values[keys.start * shape.dims..].chunks_exact(shape.dims);
        for (key, values) in values.take(keys.len()).enumerate() {
            let values: &[Lane; D] = values[dim..].first_chunk().expect("D vectors from dim on");
            let mut v = [isa.splat(0.0); D];
            for d in 0..D {
                v[d] = isa.load(&values[d]);
            }
            for r in 0..R {
                let weight = isa.splat(rows[r][key]);
                for d in 0..D {
                    sums[r][d] = isa.fma(weight, v[d], sums[r][d]);
                }
            }
        }
        for r in 0..R {
            for d in 0..D {
                isa.store(sums[r][d], &mut split[(row + r) * shape.dims + dim + d]);
            }
        }
    }

    /// Joins a row's current split to the splits before it.
    #[inline(always)]
    fn combine<S: Isa>(&mut self, isa: S, shape: Shape, row: usize, is_first: bool) {
        let AttentionScratch { split, total, softmax, .. } = &mut *self.scratch;
        let split = &split[row * shape.dims..][..shape.dims];
        let total = &mut total[row * shape.dims..][..shape.dims];
        let (so_far, current) = (softmax[row], softmax[shape.rows + row]);
        if is_first {
            total.copy_from_slice(split);
            softmax[row] = current;
            return;
        }
        let max = if current.max > so_far.max { current.max } else { so_far.max };
        let mut factors = [0.0; LANES];
        (factors[0], factors[1]) = (so_far.max - max, current.max - max);
        let factors = exp(isa, isa.load(&factors));
        let mut lanes = [0.0; LANES];
        isa.store(factors, &mut lanes);
        let [old, new, ..] = lanes;
        softmax[row] = Softmax { max, sum: current.sum.mul_add(new, so_far.sum * old) };
        for (total, split) in total.iter_mut().zip(split) {
            let scaled = isa.mul(isa.load(total), isa.splat(old));
            isa.store(isa.fma(isa.load(split), isa.splat(new), scaled), total);
        }
    }

    /// Divides by the sums and writes the results.
    #[inline(always)]
    #[expect(unsafe_code, reason = "tasks write parts of the same rows")]
    fn finish<S: Isa>(&mut self, isa: S, shape: Shape) {
        for row in 0..shape.rows {
            let sum = isa.splat(self.scratch.softmax[row].sum);
            let total = &mut self.scratch.total[row * shape.dims..][..shape.dims];
            for lane in total.iter_mut() {
                isa.store(isa.div(isa.load(lane), sum), lane);
            }
            let start = (self.tokens.start + row / shape.group) * self.width
                + (self.kv_head * shape.group + row % shape.group) * shape.head_dim;
            // SAFETY: this task alone writes these heads of these tokens, each once.
            let out = unsafe { self.out.part(start..start + shape.head_dim) };
            out.copy_from_slice(&total.as_flattened()[..shape.head_dim]);
        }
    }
}

/// `q · k` of sixteen keys `[dims][LANES]`: element i in lane i mod 16, ascending, lanes folded.
#[inline(always)]
fn scores<S: Isa>(isa: S, query: &[Lane], keys: &[Lane]) -> S::V {
    let mut sums = [isa.splat(0.0); LANES];
    for (q, keys) in query.iter().zip(keys.as_chunks::<LANES>().0) {
        let q = isa.load(q);
        for (sum, key) in sums.iter_mut().zip(keys) {
            *sum = isa.fma(q, isa.load(key), *sum);
        }
    }
    isa.fold_each(sums)
}

/// One head's halves to f32; the padding of the last vector is zeros.
#[inline(always)]
fn widen_head<'a, S: Isa>(isa: S, stored: &[f16], mut head: impl Iterator<Item = &'a mut Lane>) {
    let (whole, rest) = stored.reinterpret_cast().as_chunks();
    for (halves, lane) in whole.iter().zip(&mut head) {
        isa.store(isa.load_f16(halves), lane);
    }
    if let (false, Some(lane)) = (rest.is_empty(), head.next()) {
        let mut halves = [0; LANES];
        halves[..rest.len()].copy_from_slice(rest);
        isa.store(isa.load_f16(&halves), lane);
    }
}

/// Sets what lies past the first `visible` elements.
#[inline(always)]
fn mask(lanes: &mut [Lane], visible: usize, value: f32) {
    lanes.as_flattened_mut()[visible..].fill(value);
}
