//! A model that misbehaves once.

use engine::Engine;
use engine::batch::{Batch, Logits};
use engine::model::{ForwardError, Interrupt, KvMemory, Model};
use engine::sim::{SimConfig, SimKv, SimModel};

use crate::drive::config;

/// Misbehaves in one forward pass.
pub(crate) struct Faulty {
    inner: SimModel,
    /// Counts down; the fault happens at 0.
    until_fault: usize,
    fault: Fault,
}

#[derive(Clone, Copy)]
pub(crate) enum Fault {
    Device,
    ShortLogits,
    /// In the last row.
    NotANumber,
    /// The last byte of block 0 changes, whosever it is.
    Overwrites,
}

impl Model for Faulty {
    type Kv = SimKv;

    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn context_len(&self) -> usize {
        self.inner.context_len()
    }

    fn new_kv(&self, blocks: usize, block_tokens: usize) -> Result<SimKv, ForwardError> {
        self.inner.new_kv(blocks, block_tokens)
    }

    fn forward(
        &mut self,
        batch: &Batch,
        kv: &mut SimKv,
        interrupt: &Interrupt,
        logits: &mut Logits,
    ) -> Result<(), ForwardError> {
        self.inner.forward(batch, kv, interrupt, logits)?;
        let happens = self.until_fault == 0;
        self.until_fault = self.until_fault.wrapping_sub(1);
        match self.fault {
            _ if !happens => {}
            Fault::Device => return Err(ForwardError::Device("out of memory".to_owned())),
            Fault::ShortLogits => drop(logits.data.pop()),
            Fault::Overwrites => {
                let (tokens, mut slabs) = (kv.layout().block_tokens, Vec::new());
                kv.export(0, 0, tokens, &mut slabs);
                *slabs.last_mut().unwrap() ^= 1;
                kv.import(0, 0, tokens, &slabs);
            }
            Fault::NotANumber => *logits.data.last_mut().unwrap() = f32::NAN,
        }
        Ok(())
    }
}

pub(crate) fn faulty(fault: Fault, until_fault: usize) -> Engine<Faulty> {
    Engine::new(Faulty { inner: SimModel::new(SimConfig::default()), until_fault, fault }, config()).unwrap()
}
