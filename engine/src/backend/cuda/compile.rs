//! Kernels from source: compiled by NVRTC for the GPU at hand when they are first needed, and kept for later
//! runs.

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::{result, sys};
use sha2::{Digest, Sha256};

use super::device::Fault;

/// Keeps compiled kernels between runs: how and where is no matter of the engine's.
pub trait CodeStore: Send + Sync {
    /// What was kept under that name, whole.
    fn get(&self, name: &str) -> Option<Vec<u8>>;

    /// Keeps it, if it can: what is not kept costs time, nothing else.
    fn put(&self, name: &str, code: &[u8]);
}

/// A file of kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// Its name, without `.cu`.
    pub(super) name: &'static str,
    /// What is in it.
    pub(super) text: &'static str,
}

/// What stands before every source.
const PRELUDE: [&str; 2] = [include_str!("compat.cuh"), include_str!("weights.cuh")];

/// How kernels are compiled. Products and sums are contracted only where the source says so: results are the same on
/// every architecture, and close to the CPU's.
const OPTIONS: [&str; 3] = ["--std=c++17", "--fmad=false", "--device-as-default-execution-space"];

/// A kernel file's machine code, and what the compiler said of it: registers, shared memory and spills of each kernel.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The kernel file's name, without `.cu`.
    pub name: &'static str,
    /// The cubin.
    pub code: Vec<u8>,
    /// The assembler's report; empty when the code came from the disk.
    pub report: String,
}

/// The compiler's version, major and minor.
///
/// # Errors
/// [`Fault::NoCompiler`]
pub fn compiler_version() -> Result<(i32, i32), Fault> {
    // SAFETY: the library runs no code of its own that could be unsound when it is loaded.
    #[expect(unsafe_code, reason = "loads a library")]
    if !unsafe { sys::is_culib_present() } {
        return Err(Fault::NoCompiler);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two numbers.
    #[expect(unsafe_code, reason = "cudarc has no wrapper")]
    let outcome = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    outcome.result().map_err(|_| Fault::NoCompiler)?;
    Ok((major, minor))
}

impl Source {
    /// Everything that the compiler sees.
    fn whole(&self) -> String {
        let mut text = PRELUDE.concat();
        text.push_str(self.text);
        text
    }

    /// Compiles it for `arch`, such as `sm_90`, or takes what an earlier call has left in `store`.
    pub(super) fn compile(&self, arch: &str, store: Option<&dyn CodeStore>) -> Result<Compiled, Fault> {
        let name = self.kept_as(arch, compiler_version()?);
        if let Some(code) = store.and_then(|store| store.get(&name)) {
            return Ok(Compiled { name: self.name, code, report: String::new() });
        }
        let (code, report) = self.run_compiler(arch)?;
        if let Some(store) = store {
            store.put(&name, &code);
        }
        Ok(Compiled { name: self.name, code, report })
    }

    /// Names its code for that architecture by that compiler after all that it depends on.
    fn kept_as(&self, arch: &str, (major, minor): (i32, i32)) -> String {
        let mut hash = Sha256::new();
        for part in [&self.whole(), arch, &OPTIONS.join(" "), &format!("{major}.{minor}")] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let digest = hash.finalize();
        let name: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{}-{arch}-{name}.cubin", self.name)
    }

    fn run_compiler(&self, arch: &str) -> Result<(Vec<u8>, String), Fault> {
        let fault = |log: String| Fault::Compile { kernel: self.name, arch: arch.to_owned(), log };
        let text = CString::new(self.whole()).map_err(|_| fault("a zero byte in the source".to_owned()))?;
        let name = CString::new(format!("{}.cu", self.name)).map_err(|error| fault(error.to_string()))?;
        let program =
            Program(result::create_program(&text, Some(&name)).map_err(|error| fault(error.to_string()))?);
        let mut options = OPTIONS.map(ToOwned::to_owned).to_vec();
        options.push(format!("--gpu-architecture={arch}"));
        options.push("--ptxas-options=-v".to_owned());
        // SAFETY: the program was created above and is destroyed at the end of this function.
        #[expect(unsafe_code, reason = "the compiler's own interface")]
        let outcome = unsafe { result::compile_program(program.0, &options) };
        let report = program.log();
        match outcome {
            Ok(()) => Ok((program.code().map_err(|error| fault(error.to_string()))?, report)),
            Err(error) => Err(fault(format!("{error}\n{report}"))),
        }
    }
}

/// A program that is destroyed with this.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created by `create_program`, and this is its only owner.
        #[expect(unsafe_code, reason = "the compiler's own interface")]
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

impl Program {
    /// What the compiler said.
    fn log(&self) -> String {
        // SAFETY: the program is alive.
        #[expect(unsafe_code, reason = "the compiler's own interface")]
        let log = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.iter().map(|char| *char as u8).collect();
        CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// The cubin.
    fn code(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut len = 0;
        // SAFETY: the program is alive, and the second call writes as many bytes as the first said.
        #[expect(unsafe_code, reason = "cudarc has no wrapper")]
        unsafe {
            sys::nvrtcGetCUBINSize(self.0, &raw mut len).result()?;
            let mut code = vec![0_u8; len];
            sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast::<c_char>()).result()?;
            Ok(code)
        }
    }
}
