//! Launches `embed.cu`.

use cudarc::driver::PushKernelArg as _;

use super::compile::Source;
use super::device::{Doing as _, Fault};
use super::launch::grid;
use super::{Activations, Cuda, Matrix};

pub(super) const SOURCE: Source = Source { name: "embed", text: include_str!("embed.cu") };

impl Cuda {
    /// `out[t] = table[tokens[t]]` for the tokens that were uploaded.
    pub(super) fn run_embed(
        &self,
        table: &Matrix,
        tokens: usize,
        out: &mut Activations,
    ) -> Result<(), Fault> {
        out.resize(&self.gpu, tokens)?;
        let (cols, row_bytes) = (table.cols as u32, table.row_bytes as u64);
        let mut launch = self.gpu.stream.launch_builder(self.kernels.embed.of(table.dtype)?);
        launch.arg(&table.data).arg(&row_bytes).arg(self.tokens.get()).arg(&cols).arg(out.data_mut());
        let grid = grid((table.cols.div_ceil(128), tokens), (32, 4));
        // SAFETY: the arguments are the kernel's, tokens are below the table's rows, and `out` has a row for each.
        #[expect(unsafe_code, reason = "a launch")]
        unsafe { launch.launch(grid) }.doing("launching embed")?;
        Ok(())
    }
}
