//! What a correct cluster answers, and the KV it hands over, computed without a cluster.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::batch::{Batch, Chunk, Logits};
use engine::model::{ForwardError, Interrupt, KvMemory, Model};
use engine::sim::{SimConfig, SimKv, SimModel};
use proto::{SamplingParams, StopConditions, TokenId};

/// The model of every schedule.
pub(crate) const MODEL: SimConfig =
    SimConfig { layers: 2, kv_heads: 1, head_dim: 4, vocab: 32, context_len: 64 };

/// The truth about one request.
pub(crate) struct Oracle {
    /// All tokens that the client is to get.
    pub(crate) reference: Vec<TokenId>,
    prompt_len: usize,
    kv: SimKv,
}

impl Oracle {
    pub(crate) fn new(prompt: &[TokenId], sampling: &SamplingParams, stop: &StopConditions) -> Self {
        let reference = SimModel::reference(MODEL, prompt, sampling, stop);
        let tokens: Vec<TokenId> = prompt.iter().chain(&reference).copied().collect();
        let len = tokens.len();
        let batch = Batch {
            tokens,
            positions: (0..len as u32).collect(),
            slots: (0..len as u32).collect(),
            block_tables: vec![0],
            chunks: vec![Chunk { tokens: 0..len, block_table: 0..1 }],
            logit_rows: Vec::new(),
        };
        let mut model = SimModel::new(MODEL);
        // One block that holds everything, so that any run of tokens is one export.
        let mut kv = model.new_kv(1, len).expect("the simulated model has room");
        model
            .forward(&batch, &mut kv, &Interrupt::default(), &mut Logits::default())
            .expect("nobody interrupts the oracle");
        Self { reference, prompt_len: prompt.len(), kv }
    }

    /// The KV of a run of tokens, in the canonical layout.
    pub(crate) fn slabs(&self, first: usize, tokens: usize) -> Vec<u8> {
        let mut slabs = Vec::new();
        if first + tokens <= self.prompt_len + self.reference.len() {
            self.kv.export(0, first, tokens, &mut slabs);
        }
        slabs
    }
}

/// The checksums that belong to those slabs.
pub(crate) fn checksums(slabs: &[u8]) -> Vec<u32> {
    slabs.chunks_exact((slabs.len() / MODEL.layers).max(1)).map(crc32c::crc32c).collect()
}

/// The simulated model on a device that, when told so, writes once over all blocks that its batch does not use.
#[derive(Clone, Debug)]
pub(crate) struct StrayModel {
    model: SimModel,
    armed: Arc<AtomicBool>,
}

impl StrayModel {
    pub(crate) fn new(armed: Arc<AtomicBool>) -> Self {
        Self { model: SimModel::new(MODEL), armed }
    }
}

impl Model for StrayModel {
    type Kv = SimKv;

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn context_len(&self) -> usize {
        self.model.context_len()
    }

    fn new_kv(&self, blocks: usize, block_tokens: usize) -> Result<SimKv, ForwardError> {
        self.model.new_kv(blocks, block_tokens)
    }

    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut SimKv,
        interrupt: &Interrupt,
        logits: &mut Logits,
    ) -> Result<(), ForwardError> {
        if self.armed.swap(false, Ordering::Relaxed) {
            let (tokens, mut bytes) = (kv.layout().block_tokens, Vec::new());
            for block in (0..kv.blocks() as u32).filter(|block| !batch.block_tables.contains(block)) {
                bytes.clear();
                kv.export(block, 0, tokens, &mut bytes);
                for byte in &mut bytes {
                    *byte ^= 0x5A;
                }
                kv.import(block, 0, tokens, &bytes);
            }
        }
        self.model.forward(batch, kv, interrupt, logits)
    }
}
