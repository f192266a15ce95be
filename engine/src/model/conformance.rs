//! What every [`Model`] must keep, as checks that any implementation can be run through.
//!
//! A test calls [`check`] with a function that makes the model; each broken point of the contract panics with its
//! name. Everything is compared bit for bit.

use proto::TokenId;

use super::{ForwardError, Interrupt, KvMemory, Model};
use crate::batch::{Batch, BlockIndex, Chunk, Logits};

/// Runs a model through the whole contract. `make` is called for every check, so that none sees another's state.
///
/// The model needs room for 48 positions and at least 2 tokens in its vocabulary.
///
/// # Panics
/// When a point of the contract is broken.
pub fn check<M: Model>(make: impl Fn() -> M) {
    shapes_are_as_promised(make());
    chunks_do_not_matter(make());
    other_sequences_do_not_matter(make());
    where_blocks_lie_does_not_matter(make());
    later_slots_are_not_read(make());
    an_interrupted_step_may_run_again(make());
    kv_travels_by_export_and_import(make());
    a_copied_block_is_the_same_block(make());
    models_of_one_checkpoint_agree(make(), make());
}

/// Tokens per block in all checks but those that vary it.
const BLOCK_TOKENS: usize = 16;
/// Tokens of the sequence that is followed: two whole blocks and a partial one.
const LEN: usize = 41;

fn shapes_are_as_promised<M: Model>(model: M) {
    assert!(model.context_len() >= 48, "conformance needs 48 positions");
    assert!(model.vocab_size() >= 2, "conformance needs 2 tokens");
    let mut rig = Rig::new(model, 4, 5);
    let layout = rig.kv.layout();
    assert_eq!((layout.block_tokens, rig.kv.blocks()), (5, 4), "the arena is as asked");
    let tokens = rig.tokens(0);
    let sequence = Sequence { tokens: &tokens[..7], table: &[2, 0] };
    let none = rig.step(&[sequence.part(0, 4, Rows::None)]);
    assert!(none.data.is_empty(), "no rows were asked for");
    let some = rig.step(&[sequence.part(4, 7, Rows::All)]);
    assert_eq!(some.vocab, rig.model.vocab_size(), "vocabulary of the logits");
    assert_eq!(some.data.len(), 3 * some.vocab, "rows of the logits");
    assert!(some.data.iter().all(|x| !x.is_nan()), "logits are numbers");
}

fn chunks_do_not_matter<M: Model>(model: M) {
    let mut rig = Rig::new(model, 3, BLOCK_TOKENS);
    let (tokens, reference) = rig.reference();
    let sequence = Sequence { tokens: &tokens, table: &[0, 1, 2] };
    for sizes in [&[1][..], &[16], &[7, 1, 20], &[15, 2], &[40, 1]] {
        rig.clear();
        let mut rows = Vec::new();
        let mut sizes = sizes.iter().cycle();
        let mut first = 0;
        while first < LEN {
            let end = LEN.min(first + sizes.next().expect("a cycle has no end"));
            rows.extend(rig.step(&[sequence.part(first, end, Rows::All)]).data);
            first = end;
        }
        assert_same(&rows, &reference, "logits depend on the size of chunks");
    }
}

fn other_sequences_do_not_matter<M: Model>(model: M) {
    let mut rig = Rig::new(model, 12, BLOCK_TOKENS);
    let (tokens, reference) = rig.reference();
    rig.clear();
    let (others, longer) = (rig.tokens(1), rig.tokens(2));
    let sequence = Sequence { tokens: &tokens, table: &[5, 3, 9] };
    let other = Sequence { tokens: &others, table: &[0, 1, 2] };
    let third = Sequence { tokens: &longer, table: &[8, 7, 6] };
    let vocab = rig.model.vocab_size();
    // Prompt chunks and single tokens in the same steps, the followed sequence in another place each time.
    rig.step(&[third.part(0, 40, Rows::None)]);
    let first = rig.step(&[other.part(0, 17, Rows::None), sequence.part(0, 30, Rows::All)]);
    assert_same(&first.data, &reference[..30 * vocab], "logits depend on an earlier neighbour");
    let second = rig.step(&[
        sequence.part(30, 31, Rows::All),
        other.part(17, 33, Rows::None),
        third.part(40, 41, Rows::None),
    ]);
    assert_same(&second.data, &reference[30 * vocab..31 * vocab], "logits depend on a later neighbour");
    let third = rig.step(&[other.part(33, 41, Rows::Last), sequence.part(31, LEN, Rows::Last)]);
    assert_eq!(third.data.len(), 2 * vocab, "a row for each sequence");
    assert_same(third.row(1), &reference[(LEN - 1) * vocab..], "rows are not in the order asked for");
}

fn where_blocks_lie_does_not_matter<M: Model>(model: M) {
    let mut rig = Rig::new(model, 3, BLOCK_TOKENS);
    let (tokens, reference) = rig.reference();
    for block_tokens in [1, 5, 16, 64] {
        rig.kv = rig.model.new_kv(50, block_tokens).expect("room");
        let blocks = LEN.div_ceil(block_tokens) as BlockIndex;
        // 50 and 37 have no common factor: every block is another one.
        let table: Vec<BlockIndex> = (0..blocks).map(|i| (i * 37 + 11) % 50).collect();
        let sequence = Sequence { tokens: &tokens, table: &table };
        let mut rows = rig.step(&[sequence.part(0, 23, Rows::All)]).data;
        rows.extend(rig.step(&[sequence.part(23, LEN, Rows::All)]).data);
        assert_same(&rows, &reference, "logits depend on block size or placement");
    }
}

fn later_slots_are_not_read<M: Model>(model: M) {
    let mut rig = Rig::new(model, 6, BLOCK_TOKENS);
    let (tokens, reference) = rig.reference();
    // All bits set: not a number in any float format.
    let garbage = vec![0xFF; rig.kv.layout().block_bytes(BLOCK_TOKENS)];
    for block in 0..6 {
        rig.kv.import(block, 0, BLOCK_TOKENS, &garbage);
    }
    let sequence = Sequence { tokens: &tokens, table: &[4, 1, 2] };
    let mut rows = rig.step(&[sequence.part(0, 20, Rows::All)]).data;
    for first in 20..LEN {
        rows.extend(rig.step(&[sequence.part(first, first + 1, Rows::All)]).data);
    }
    assert_same(&rows, &reference, "a slot past the token's own position was read");
}

fn an_interrupted_step_may_run_again<M: Model>(model: M) {
    let mut rig = Rig::new(model, 3, BLOCK_TOKENS);
    let (tokens, reference) = rig.reference();
    rig.clear();
    let sequence = Sequence { tokens: &tokens, table: &[0, 1, 2] };
    let mut rows = rig.step(&[sequence.part(0, 18, Rows::All)]).data;
    let batch = batch(&[sequence.part(18, LEN, Rows::All)], BLOCK_TOKENS);
    let interrupt = Interrupt::default();
    interrupt.raise();
    let mut logits = Logits::default();
    let outcome = rig.model.forward(&batch, &mut rig.kv, &interrupt, &mut logits);
    assert_eq!(outcome, Err(ForwardError::Interrupted), "a raised interrupt stops the step");
    interrupt.clear();
    rig.model.forward(&batch, &mut rig.kv, &interrupt, &mut logits).expect("the step runs again");
    rows.extend(&logits.data);
    assert_same(&rows, &reference, "an interrupted step left something behind");
    rig.model.forward(&batch, &mut rig.kv, &interrupt, &mut logits).expect("and again");
    assert_same(&logits.data, &rows[rows.len() - logits.data.len()..], "KV writes are not idempotent");
}

fn kv_travels_by_export_and_import<M: Model>(model: M) {
    let mut rig = Rig::new(model, 3, BLOCK_TOKENS);
    let (tokens, reference) = rig.reference();
    let layout = rig.kv.layout();
    // The KV of all tokens but the last, out of blocks of 16.
    let mut slabs = Vec::new();
    for first in (0..LEN - 1).step_by(BLOCK_TOKENS) {
        let tokens = BLOCK_TOKENS.min(LEN - 1 - first);
        let mut bytes = Vec::new();
        rig.kv.export((first / BLOCK_TOKENS) as BlockIndex, 0, tokens, &mut bytes);
        assert_eq!(bytes.len(), layout.block_bytes(tokens), "exported bytes");
        slabs.push((first, tokens, bytes));
    }
    // Into blocks of 16 elsewhere, and into blocks of 32 that take two of them.
    for (block_tokens, table) in [(16, &[6, 2, 4][..]), (32, &[5, 3])] {
        let mut kv = rig.model.new_kv(8, block_tokens).expect("room");
        for (first, tokens, bytes) in &slabs {
            let (block, offset) = (table[first / block_tokens], first % block_tokens);
            kv.import(block, offset, *tokens, bytes);
            let mut back = Vec::new();
            kv.export(block, offset, *tokens, &mut back);
            assert_eq!(&back, bytes, "export is the inverse of import");
        }
        rig.kv = kv;
        let last = rig.step(&[Sequence { tokens: &tokens, table }.part(LEN - 1, LEN, Rows::All)]);
        let vocab = rig.model.vocab_size();
        assert_same(&last.data, &reference[(LEN - 1) * vocab..], "imported KV is not what was exported");
    }
}

fn a_copied_block_is_the_same_block<M: Model>(model: M) {
    let mut rig = Rig::new(model, 6, BLOCK_TOKENS);
    let (tokens, reference) = rig.reference();
    rig.kv.copy(2, 5);
    let others = rig.tokens(1);
    // Writing on in one of the two must not be seen in the other.
    let fork: Vec<TokenId> = tokens[..36].iter().chain(&others[36..]).copied().collect();
    rig.step(&[Sequence { tokens: &fork, table: &[0, 1, 5] }.part(36, LEN, Rows::None)]);
    let sequence = Sequence { tokens: &tokens, table: &[0, 1, 2] };
    let last = rig.step(&[sequence.part(LEN - 1, LEN, Rows::All)]);
    let vocab = rig.model.vocab_size();
    assert_same(&last.data, &reference[(LEN - 1) * vocab..], "a copy is not apart from its original");
    let copied = rig.step(&[Sequence { tokens: &tokens, table: &[0, 1, 5] }.part(36, LEN, Rows::All)]);
    assert_same(&copied.data, &reference[36 * vocab..], "a copy has not all of the block");
}

fn models_of_one_checkpoint_agree<M: Model>(model: M, other: M) {
    let (_, first) = Rig::new(model, 3, BLOCK_TOKENS).reference();
    let (_, second) = Rig::new(other, 3, BLOCK_TOKENS).reference();
    assert_same(&first, &second, "two models of one checkpoint differ");
}

fn assert_same(found: &[f32], expected: &[f32], complaint: &str) {
    assert_eq!(found.len(), expected.len(), "{complaint}: number of logits");
    let different = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits());
    if let Some(i) = different {
        panic!("{complaint}: element {i} of {}: expected {}, found {}", found.len(), expected[i], found[i]);
    }
}

/// A model and an arena.
struct Rig<M: Model> {
    model: M,
    kv: M::Kv,
}

impl<M: Model> Rig<M> {
    fn new(model: M, blocks: usize, block_tokens: usize) -> Self {
        let kv = model.new_kv(blocks, block_tokens).expect("room for an arena");
        Self { model, kv }
    }

    /// A fresh arena of the same size.
    fn clear(&mut self) {
        let (blocks, block_tokens) = (self.kv.blocks(), self.kv.layout().block_tokens);
        self.kv = self.model.new_kv(blocks, block_tokens).expect("room for an arena");
    }

    /// Tokens all over the vocabulary, another series for each `series`.
    fn tokens(&self, series: u64) -> Vec<TokenId> {
        let mut state = series.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % self.model.vocab_size() as u64) as TokenId
        };
        (0..LEN).map(|_| next()).collect()
    }

    /// A sequence and the logits of all its tokens, computed alone, in one chunk, in blocks 0, 1, 2.
    fn reference(&mut self) -> (Vec<TokenId>, Vec<f32>) {
        let tokens = self.tokens(0);
        let logits = self.step(&[Sequence { tokens: &tokens, table: &[0, 1, 2] }.part(0, LEN, Rows::All)]);
        (tokens, logits.data)
    }

    fn step(&mut self, parts: &[Part<'_>]) -> Logits {
        let batch = batch(parts, self.kv.layout().block_tokens);
        let mut logits = Logits::default();
        self.model
            .forward(&batch, &mut self.kv, &Interrupt::default(), &mut logits)
            .expect("forward on a sound batch");
        logits
    }
}

/// A sequence with all its tokens.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// The tokens at positions 0, 1, …
    pub tokens: &'a [TokenId],
    /// Entry i holds positions `i * block_tokens ..`.
    pub table: &'a [BlockIndex],
}

/// A chunk of a sequence: tokens `first..end`.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    sequence: Sequence<'a>,
    first: usize,
    end: usize,
    rows: Rows,
}

/// Which tokens of a chunk have their logits computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// None: an inner chunk of a prompt.
    None,
    /// The last token.
    Last,
    /// Every token.
    All,
}

impl<'a> Sequence<'a> {
    /// The chunk of tokens `first..end`.
    pub fn part(self, first: usize, end: usize, rows: Rows) -> Part<'a> {
        Part { sequence: self, first, end, rows }
    }
}

/// A step of these chunks, in blocks of `block_tokens` tokens.
pub fn batch(parts: &[Part<'_>], block_tokens: usize) -> Batch {
    let mut batch = Batch::default();
    for part in parts {
        let start = batch.tokens.len();
        for position in part.first..part.end {
            let row = batch.tokens.len() as u32;
            batch.tokens.push(part.sequence.tokens[position]);
            batch.positions.push(position as u32);
            let block = part.sequence.table[position / block_tokens] as usize;
            batch.slots.push((block * block_tokens + position % block_tokens) as u32);
            if part.rows == Rows::All || part.rows == Rows::Last && position + 1 == part.end {
                batch.logit_rows.push(row);
            }
        }
        let table = batch.block_tables.len();
        batch.block_tables.extend(part.sequence.table);
        let (tokens, block_table) = (start..batch.tokens.len(), table..batch.block_tables.len());
        batch.chunks.push(Chunk { tokens, block_table });
    }
    batch
}
