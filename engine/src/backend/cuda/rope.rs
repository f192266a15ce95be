//! Launches `rope.cu`.

use checkpoint::RopePairing;
use cudarc::driver::PushKernelArg as _;

use super::compile::Source;
use super::device::{Buffer, Doing as _, Fault, Gpu};
use super::launch::grid;
use super::{Cuda, CudaKv};
use crate::backend::Qkv;
use crate::model::KvMemory as _;
use crate::model::rope::Rope;

pub(super) const SOURCE: Source = Source { name: "rope", text: include_str!("rope.cu") };

/// The turns of all positions so far, as they are on the GPU.
#[derive(Default)]
pub(super) struct Turns {
    /// Cosine and sine. `[positions, pairs, 2]`
    data: Buffer<f32>,
    /// Elements that are there.
    len: usize,
}

impl Turns {
    /// Has every position that `rope` has reached. Those that were there already stay: they do not change.
    pub(super) fn follow(&mut self, gpu: &Gpu, rope: &Rope) -> Result<(), Fault> {
        let all = rope.all_turns().as_flattened();
        if all.len() > self.data.capacity() {
            self.data.write(gpu, all)?;
        } else if all.len() > self.len {
            let mut rest = self.data.reserve(gpu, all.len())?.slice_mut(self.len..all.len());
            gpu.stream.memcpy_htod(&all[self.len..], &mut rest).doing("copying to the GPU")?;
        }
        self.len = all.len();
        Ok(())
    }
}

impl Cuda {
    /// See the kernel. The batch is the one that was uploaded.
    pub(super) fn run_rope_and_store(
        &mut self,
        layer: usize,
        rope: &Rope,
        qkv: &mut Qkv<Self>,
        kv: &mut CudaKv,
    ) -> Result<(), Fault> {
        self.turns.follow(&self.gpu, rope)?;
        let layout = kv.layout();
        let numbers = [
            qkv.q.width / layout.head_dim,
            layout.kv_heads,
            layout.head_dim,
            rope.pairs(),
            usize::from(rope.pairing == RopePairing::Halves),
            layer,
            layout.layers,
            layout.block_tokens,
        ];
        let numbers = numbers.map(|number| number as u32);
        let tokens = qkv.q.tokens;
        let mut launch = self.gpu.stream.launch_builder(&self.kernels.rope_and_store);
        launch.arg(qkv.q.data_mut()).arg(qkv.k.data_mut()).arg(qkv.v.data());
        launch.arg(self.turns.data.get()).arg(self.staged.positions.get()).arg(self.staged.slots.get());
        launch.arg(kv.data_mut());
        for number in &numbers {
            launch.arg(number);
        }
        // SAFETY: the arguments are the kernel's; every position was reached, and every slot is one of the arena.
        #[expect(unsafe_code, reason = "a launch")]
        unsafe { launch.launch(grid((tokens, 1), (128, 1))) }.doing("launching rope_and_store")?;
        Ok(())
    }
}
