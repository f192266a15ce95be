//! Launches `matmul.cu`.

use cudarc::driver::{CudaSlice, PushKernelArg as _};

use super::compile::Source;
use super::device::{Doing as _, Fault};
use super::launch::grid;
use super::{Activations, Cuda, Matrix};

pub(super) const SOURCE: Source = Source { name: "matmul", text: include_str!("matmul.cu") };

/// Tokens that a block of threads takes at once, where there are several.
const TOKENS: usize = 8;

impl Cuda {
    /// See the kernel.
    pub(super) fn run_matmul(
        &self,
        x: &Activations,
        weights: &Matrix,
        bias: Option<&CudaSlice<f32>>,
        out: &mut Activations,
    ) -> Result<(), Fault> {
        let tokens = x.tokens;
        out.resize(&self.gpu, tokens)?;
        let (kernels, per_block) =
            if tokens == 1 { (&self.kernels.matmul_1, 1) } else { (&self.kernels.matmul_8, TOKENS) };
        let (rows, cols, count) = (weights.rows as u32, weights.cols as u32, tokens as u32);
        let (row_bytes, no_bias) = (weights.row_bytes as u64, 0_u64);
        let mut launch = self.gpu.stream.launch_builder(kernels.of(weights.dtype)?);
        launch.arg(&weights.data).arg(&row_bytes).arg(x.data());
        match bias {
            Some(bias) => launch.arg(bias),
            None => launch.arg(&no_bias),
        };
        launch.arg(&rows).arg(&cols).arg(&count).arg(out.data_mut());
        let grid = grid((weights.rows.div_ceil(4), tokens.div_ceil(per_block)), (32, 4));
        // SAFETY: the arguments are the kernel's; `x` has `tokens` rows of `cols`, `out` as many of `rows`, `bias` is one.
        #[expect(unsafe_code, reason = "a launch")]
        unsafe { launch.launch(grid) }.doing("launching matmul")?;
        Ok(())
    }
}
