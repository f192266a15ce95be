//! Launches `rms_norm.cu`.

use cudarc::driver::{CudaSlice, PushKernelArg as _};

use super::compile::Source;
use super::device::{Doing as _, Fault};
use super::launch::grid;
use super::{Activations, Cuda};

pub(super) const SOURCE: Source = Source { name: "rms_norm", text: include_str!("rms_norm.cu") };

impl Cuda {
    /// See the kernel.
    pub(super) fn run_rms_norm(
        &self,
        x: &Activations,
        weight: &CudaSlice<f32>,
        eps: f32,
        out: &mut Activations,
    ) -> Result<(), Fault> {
        let tokens = x.tokens;
        out.resize(&self.gpu, tokens)?;
        let width = x.width as u32;
        let mut launch = self.gpu.stream.launch_builder(&self.kernels.rms_norm);
        launch.arg(x.data()).arg(weight).arg(&eps).arg(&width).arg(out.data_mut());
        // SAFETY: the arguments are the kernel's; `x` and `out` have `tokens` rows of `width`, and `weight` is one.
        #[expect(unsafe_code, reason = "a launch")]
        unsafe { launch.launch(grid((tokens, 1), (256, 1))) }.doing("launching rms_norm")?;
        Ok(())
    }
}
