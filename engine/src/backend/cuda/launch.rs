//! Kernels, loaded: each file of them beside this one has its launchers in the file of the same name.

use std::sync::Arc;

use checkpoint::TensorType;
use cudarc::driver::{CudaFunction, CudaModule, LaunchConfig};
use cudarc::nvrtc::Ptx;

use super::compile::{CodeStore, Compiled, Source};
use super::device::{Doing as _, Fault, Gpu};
use super::{attention, compile, embed, matmul, rms_norm, rope, rows};

/// Every file of kernels.
pub(super) const SOURCES: [Source; 6] =
    [embed::SOURCE, rms_norm::SOURCE, matmul::SOURCE, rope::SOURCE, attention::SOURCE, rows::SOURCE];

/// Every kernel.
pub(super) struct Kernels {
    pub(super) embed: PerFormat,
    pub(super) rms_norm: CudaFunction,
    /// For one token.
    pub(super) matmul_1: PerFormat,
    /// For several.
    pub(super) matmul_8: PerFormat,
    pub(super) rope_and_store: CudaFunction,
    pub(super) attention: CudaFunction,
    pub(super) gate_silu: CudaFunction,
    pub(super) add: CudaFunction,
    pub(super) select_rows: CudaFunction,
}

impl Kernels {
    /// Compiles and loads all of them.
    pub(super) fn load(gpu: &Gpu, store: Option<&dyn CodeStore>) -> Result<Self, Fault> {
        let (compiler, _) = compile::compiler_version()?;
        if gpu.driver < compiler * 1000 {
            // Machine code of a later major version is not taken.
            return Err(Fault::OldDriver { driver: gpu.driver, needed: format!("{compiler}.0") });
        }
        let (major, minor) = gpu.capability;
        let arch = format!("sm_{major}{minor}");
        let load = |source: Source| -> Result<Module, Fault> {
            let Compiled { code, .. } = source.compile(&arch, store)?;
            let module = gpu.stream.context().load_module(Ptx::from_binary(code));
            Ok(Module(module.doing("loading kernels")?))
        };
        let rows = load(rows::SOURCE)?;
        let matmul = load(matmul::SOURCE)?;
        Ok(Self {
            embed: load(embed::SOURCE)?.per_format("embed")?,
            rms_norm: load(rms_norm::SOURCE)?.function("rms_norm")?,
            matmul_1: matmul.per_format("matmul_1")?,
            matmul_8: matmul.per_format("matmul_8")?,
            rope_and_store: load(rope::SOURCE)?.function("rope_and_store")?,
            attention: load(attention::SOURCE)?.function("attention")?,
            gate_silu: rows.function("gate_silu")?,
            add: rows.function("add")?,
            select_rows: rows.function("select_rows")?,
        })
    }
}

/// A file of kernels on the GPU.
struct Module(Arc<CudaModule>);

impl Module {
    fn function(&self, name: &str) -> Result<CudaFunction, Fault> {
        self.0.load_function(name).doing("looking a kernel up")
    }

    fn per_format(&self, name: &str) -> Result<PerFormat, Fault> {
        let mut functions = Vec::with_capacity(FORMATS.len());
        for format in FORMATS {
            functions.push((format, self.function(&format!("{name}_{}", format.name()))?));
        }
        Ok(PerFormat(functions))
    }
}

/// The formats of weights that kernels read.
const FORMATS: [TensorType; 6] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q8_0,
];

/// A kernel for each format of weights.
pub(super) struct PerFormat(Vec<(TensorType, CudaFunction)>);

impl PerFormat {
    /// That of a format.
    pub(super) fn of(&self, format: TensorType) -> Result<&CudaFunction, Fault> {
        let found = self.0.iter().find(|(known, _)| *known == format);
        found.map(|(_, function)| function).ok_or_else(|| Fault::Driver {
            doing: "looking a kernel up",
            said: format!("no kernel reads {}", format.name()),
        })
    }
}

/// A grid of so many blocks by x and y, of so many threads by x and y each.
pub(super) fn grid(blocks: (usize, usize), threads: (u32, u32)) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks.0 as u32, blocks.1 as u32, 1),
        block_dim: (threads.0, threads.1, 1),
        shared_mem_bytes: 0,
    }
}
