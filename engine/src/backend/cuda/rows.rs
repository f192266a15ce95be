//! Launches `rows.cu`.

use cudarc::driver::{CudaFunction, CudaSlice, PushKernelArg as _};

use super::compile::Source;
use super::device::{Doing as _, Fault};
use super::launch::grid;
use super::{Activations, Cuda};

pub(super) const SOURCE: Source = Source { name: "rows", text: include_str!("rows.cu") };

impl Cuda {
    /// `x[i] = f(x[i], other[i])` by one of the kernels that do that.
    pub(super) fn run_elements(
        &self,
        function: &CudaFunction,
        x: &mut Activations,
        other: &Activations,
    ) -> Result<(), Fault> {
        let elements = x.tokens * x.width;
        let count = elements as u64;
        let mut launch = self.gpu.stream.launch_builder(function);
        launch.arg(x.data_mut()).arg(other.data()).arg(&count);
        // SAFETY: the arguments are the kernel's, and both have that many elements.
        #[expect(unsafe_code, reason = "a launch")]
        unsafe { launch.launch(grid((elements.div_ceil(256), 1), (256, 1))) }
            .doing("launching on elements")?;
        Ok(())
    }

    /// `out[i] = x[rows[i]]`
    pub(super) fn run_select(
        &self,
        x: &Activations,
        rows: &CudaSlice<u32>,
        count: usize,
        out: &mut Activations,
    ) -> Result<(), Fault> {
        out.resize(&self.gpu, count)?;
        let width = x.width as u32;
        let mut launch = self.gpu.stream.launch_builder(&self.kernels.select_rows);
        launch.arg(x.data()).arg(rows).arg(&width).arg(out.data_mut());
        // SAFETY: the arguments are the kernel's, rows are those of `x`, and `out` has `count`.
        #[expect(unsafe_code, reason = "a launch")]
        unsafe { launch.launch(grid((x.width.div_ceil(256), count), (256, 1))) }
            .doing("launching select_rows")?;
        Ok(())
    }
}
