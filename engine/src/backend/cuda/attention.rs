//! Launches `attention.cu`.

use cudarc::driver::PushKernelArg as _;

use super::compile::Source;
use super::device::{Doing as _, Fault};
use super::launch::grid;
use super::{Activations, Cuda, CudaKv};
use crate::model::KvMemory as _;

pub(super) const SOURCE: Source = Source { name: "attention", text: include_str!("attention.cu") };

/// Longest head that the kernel has room for.
pub(super) const HEAD_DIM_MAX: usize = 256;

impl Cuda {
    /// See the kernel. The batch is the one that was uploaded.
    pub(super) fn run_attention(
        &self,
        layer: usize,
        q: &Activations,
        kv: &CudaKv,
        out: &mut Activations,
    ) -> Result<(), Fault> {
        let tokens = q.tokens;
        out.resize(&self.gpu, tokens)?;
        let layout = kv.layout();
        let heads = q.width / layout.head_dim;
        let scale = 1.0 / (layout.head_dim as f32).sqrt();
        let numbers = [heads, layout.kv_heads, layout.head_dim, layer, layout.layers, layout.block_tokens];
        let numbers = numbers.map(|number| number as u32);
        let mut launch = self.gpu.stream.launch_builder(&self.kernels.attention);
        launch.arg(q.data()).arg(kv.data());
        launch.arg(self.staged.positions.get()).arg(self.staged.tables.get()).arg(self.staged.blocks.get());
        launch.arg(&scale);
        for number in &numbers {
            launch.arg(number);
        }
        launch.arg(out.data_mut());
        // SAFETY: the arguments are the kernel's; block tables reach every position, and name blocks of the arena.
        #[expect(unsafe_code, reason = "a launch")]
        unsafe { launch.launch(grid((heads, tokens), (128, 1))) }.doing("launching attention")?;
        Ok(())
    }
}
