//! A model without arithmetic, for tests of everything above the model.
//!
//! Its KV bytes are a hash of the token, its place, and *all KV bytes of earlier positions as they are read back*;
//! its logits are a hash of the KV bytes of all positions. So one block that is wrong, stale, missing or out of
//! place gives other tokens, which [`SimModel::reference`], computed without any arena, shows.

use checkpoint::grammar::{Mask, Matcher};
use proto::mix::WEYL;
use proto::{KvDtype, KvLayout, SamplingParams, StopConditions, TokenId};

use crate::batch::{Batch, BlockIndex, Logits};
use crate::grammar;
use crate::model::{ForwardError, Interrupt, KvMemory, Model};
use crate::sampling::{History, Rules, Sampler};

/// Shape of a [`SimModel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimConfig {
    /// Layers.
    pub layers: usize,
    /// KV heads per layer.
    pub kv_heads: usize,
    /// Elements per head, of type f16 whose bits mean nothing.
    pub head_dim: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Most positions of a sequence.
    pub context_len: usize,
}

impl Default for SimConfig {
    /// The smallest shape that still has layers to mix up: 32 bytes of KV per token.
    fn default() -> Self {
        Self { layers: 2, kv_heads: 1, head_dim: 4, vocab: 256, context_len: 1024 }
    }
}

impl SimConfig {
    fn layout(&self, block_tokens: usize) -> KvLayout {
        KvLayout {
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            dtype: KvDtype::F16,
            block_tokens,
        }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct SimModel {
    config: SimConfig,
    /// One row of KV, while it is written.
    row: Vec<u8>,
}

impl SimModel {
    /// A model of that shape.
    pub fn new(config: SimConfig) -> Self {
        Self { config, row: Vec::new() }
    }

    /// The tokens that a correct engine generates after the prompt `tokens`, the one that ends it included.
    ///
    /// # Panics
    /// When `tokens` is empty or does not fit the context, or when the rules leave no token to choose.
    pub fn reference(
        config: SimConfig,
        tokens: &[TokenId],
        sampling: &SamplingParams,
        stop: &StopConditions,
    ) -> Vec<TokenId> {
        Self::reference_under(config, tokens, sampling, stop, None)
    }

    /// The same for an output that a grammar bounds, of which `follower` has seen nothing yet.
    ///
    /// # Panics
    /// As [`reference`](Self::reference), and when the follower fails.
    pub fn reference_under(
        config: SimConfig,
        tokens: &[TokenId],
        sampling: &SamplingParams,
        stop: &StopConditions,
        mut follower: Option<Matcher>,
    ) -> Vec<TokenId> {
        let mut mask = Mask::default();
        let (prompt_len, mut tokens) = (tokens.len(), tokens.to_vec());
        let row_bytes = config.layout(1).row_bytes();
        let (mut state, mut known, mut row) = (Trace::START, 0, Vec::new());
        let (mut logits, mut sampler) = (Vec::new(), Sampler::new(config.vocab));
        loop {
            for (position, &token) in tokens.iter().enumerate().skip(known) {
                let before = state;
                for half in 0..2 * config.layers {
                    before.row(token, position, half, row_bytes, &mut row);
                    state.read(&row);
                }
            }
            known = tokens.len();
            logits.clear();
            state.logits(config.vocab, &mut logits);
            let history = History { tokens: &tokens, generated: known - prompt_len, position: known };
            if let Some(follower) = &mut follower {
                follower.allowed(&mut mask).expect("the grammar lets something come");
            }
            let rules = Rules { sampling, stop, allowed: follower.as_ref().map(|_| mask.words()) };
            let choice =
                sampler.choose(&logits, history, rules).expect("logits are finite, rules leave a token");
            tokens.push(choice.token);
            let end = follower.as_mut().and_then(|follower| {
                grammar::accept(follower, choice.token).expect("what was allowed is accepted")
            });
            let ends = end.is_some()
                || stop.eos_ids.contains(&choice.token)
                || stop.stop_token_ids.contains(&choice.token)
                || tokens.len() - prompt_len >= stop.max_tokens
                || tokens.len() >= config.context_len;
            if ends {
                return tokens.split_off(prompt_len);
            }
        }
    }
}

impl Model for SimModel {
    type Kv = SimKv;

    fn vocab_size(&self) -> usize {
        self.config.vocab
    }

    fn context_len(&self) -> usize {
        self.config.context_len
    }

    fn new_kv(&self, blocks: usize, block_tokens: usize) -> Result<SimKv, ForwardError> {
        let layout = self.config.layout(block_tokens);
        Ok(SimKv { layout, bytes: vec![0; blocks * layout.block_bytes(block_tokens)] })
    }

    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut SimKv,
        interrupt: &Interrupt,
        logits: &mut Logits,
    ) -> Result<(), ForwardError> {
        logits.vocab = self.config.vocab;
        logits.data.clear();
        let (halves, row_bytes) = (2 * self.config.layers, kv.layout.row_bytes());
        for chunk in &batch.chunks {
            if interrupt.is_raised() {
                return Err(ForwardError::Interrupted);
            }
            let table = &batch.block_tables[chunk.block_table.clone()];
            let mut state = Trace::START;
            for position in 0..batch.positions.get(chunk.tokens.start).map_or(0, |&p| p as usize) {
                kv.read_position(table, position, &mut state);
            }
            for index in chunk.tokens.clone() {
                let position = batch.positions[index] as usize;
                for half in 0..halves {
                    state.row(batch.tokens[index], position, half, row_bytes, &mut self.row);
                    kv.slot_row_mut(batch.slots[index] as usize, half).copy_from_slice(&self.row);
                }
                kv.read_position(table, position, &mut state);
                if batch.logit_rows.binary_search(&(index as u32)).is_ok() {
                    state.logits(self.config.vocab, &mut logits.data);
                }
            }
        }
        Ok(())
    }
}

/// The KV arena of a [`SimModel`]: blocks in the canonical layout, one after another.
#[derive(Clone, Debug)]
pub struct SimKv {
    layout: KvLayout,
    /// `[blocks][layers][K|V][block_tokens][row_bytes]`
    bytes: Vec<u8>,
}

impl SimKv {
    /// Where the row of one token in one half (K or V of a layer) of a block begins.
    fn row_start(&self, block: usize, half: usize, offset: usize) -> usize {
        let size = self.layout.block_tokens;
        ((block * 2 * self.layout.layers + half) * size + offset) * self.layout.row_bytes()
    }

    fn slot_row_mut(&mut self, slot: usize, half: usize) -> &mut [u8] {
        let size = self.layout.block_tokens;
        let start = self.row_start(slot / size, half, slot % size);
        &mut self.bytes[start..start + self.layout.row_bytes()]
    }

    /// Takes all KV of a position into `state`, through the block table.
    fn read_position(&self, table: &[BlockIndex], position: usize, state: &mut Trace) {
        let size = self.layout.block_tokens;
        let block = table[position / size] as usize;
        for half in 0..2 * self.layout.layers {
            let start = self.row_start(block, half, position % size);
            state.read(&self.bytes[start..start + self.layout.row_bytes()]);
        }
    }
}

impl KvMemory for SimKv {
    fn layout(&self) -> KvLayout {
        self.layout
    }

    fn blocks(&self) -> usize {
        self.bytes.len() / self.layout.block_bytes(self.layout.block_tokens)
    }

    fn export(&self, block: BlockIndex, first: usize, tokens: usize, out: &mut Vec<u8>) {
        assert!(first + tokens <= self.layout.block_tokens, "tokens within the block");
        for half in 0..2 * self.layout.layers {
            let start = self.row_start(block as usize, half, first);
            out.extend_from_slice(&self.bytes[start..start + tokens * self.layout.row_bytes()]);
        }
    }

    fn import(&mut self, block: BlockIndex, first: usize, tokens: usize, slabs: &[u8]) {
        assert!(first + tokens <= self.layout.block_tokens, "tokens within the block");
        assert_eq!(slabs.len(), self.layout.block_bytes(tokens), "bytes of the slabs");
        for (half, rows) in slabs.chunks_exact(tokens * self.layout.row_bytes()).enumerate() {
            let start = self.row_start(block as usize, half, first);
            self.bytes[start..start + rows.len()].copy_from_slice(rows);
        }
    }

    fn copy(&mut self, from: BlockIndex, to: BlockIndex) {
        let bytes = self.layout.block_bytes(self.layout.block_tokens);
        let start = from as usize * bytes;
        self.bytes.copy_within(start..start + bytes, to as usize * bytes);
    }
}

/// A running hash of KV bytes.
#[derive(Clone, Copy, Debug)]
struct Trace(u64);

impl Trace {
    const START: Self = Self(0x5EED);

    fn read(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            self.0 = mix(self.0, u64::from_le_bytes(padded));
        }
    }

    /// The KV bytes of a token after what has been read: row `half` of K or V of a layer.
    fn row(self, token: TokenId, position: usize, half: usize, bytes: usize, out: &mut Vec<u8>) {
        let key = mix(mix(self.0, u64::from(token) << 32 | position as u64), half as u64);
        out.clear();
        out.extend((0..bytes.div_ceil(8) as u64).flat_map(|word| mix(key, word).to_le_bytes()));
        out.truncate(bytes);
    }

    /// Appends the logits after what has been read: finite, in [-8, 8).
    fn logits(self, vocab: usize, out: &mut Vec<f32>) {
        let unit = 1.0 / (1u32 << 24) as f32;
        out.extend((0..vocab as u64).map(|id| (mix(self.0, id) >> 40) as f32 * unit * 16.0 - 8.0));
    }
}

/// Two words into one.
fn mix(a: u64, b: u64) -> u64 {
    proto::mix::mix(a.rotate_left(23) ^ b.wrapping_add(WEYL).wrapping_mul(0xD134_2543_DE82_EF95))
}
