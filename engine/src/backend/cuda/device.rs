//! A GPU, and why there is none.
//!
//! The driver and the compiler of kernels are loaded when they are first asked for. cudarc panics where a library or a
//! function of it is missing, so each is looked for before it is used, and a panic on the way is a fault like any other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr, DriverError, ValidAsZeroBits, sys};

use crate::model::ForwardError;

/// The oldest GPUs that the kernels are written for: Ampere, compute capability 8.0.
pub const CAPABILITY_MIN: (i32, i32) = (8, 0);

/// Why a GPU cannot be used, or has stopped to be of use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// There is no driver.
    #[error("no NVIDIA driver on this machine (libcuda.so.1): install one, or use --device cpu")]
    NoDriver,
    /// The driver lacks something.
    #[error(
        "the NVIDIA driver is too old: it speaks CUDA {}.{} and {needed} is needed; update it, or use --device cpu",
        driver / 1000,
        driver % 1000 / 10
    )]
    OldDriver {
        /// What it speaks: a thousand times the major number and ten times the minor one.
        driver: i32,
        /// What it is to speak.
        needed: String,
    },
    /// The driver sees no GPU.
    #[error(
        "the NVIDIA driver finds no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi, or use --device cpu"
    )]
    NoDevice,
    /// There is none of that number.
    #[error("cuda:{number} is not there: this machine has {count}, numbered from 0")]
    NoSuchDevice {
        /// What was asked for.
        number: usize,
        /// How many there are.
        count: usize,
    },
    /// The GPU is older than the kernels.
    #[error("{name} has compute capability {}.{}, and 8.0 is needed: use --device cpu", capability.0, capability.1)]
    OldDevice {
        /// The GPU's.
        name: String,
        /// Of the GPU.
        capability: (i32, i32),
    },
    /// There is no compiler of kernels.
    #[error(
        "no NVRTC on this machine (libnvrtc.so.13): install CUDA's runtime compiler (the Python package nvidia-cuda-nvrtc \
         has it, for LD_LIBRARY_PATH), or use --device cpu"
    )]
    NoCompiler,
    /// A kernel did not compile.
    #[error(
        "kernel {kernel} does not compile for {arch}: update CUDA's runtime compiler, or use --device cpu; it says: {log}"
    )]
    Compile {
        /// The kernel's file.
        kernel: &'static str,
        /// What it was compiled for.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// No room on the device.
    #[error("out of GPU memory: {wanted} more bytes were asked for and {free} are free")]
    OutOfMemory {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes free.
        free: usize,
    },
    /// The driver refused.
    #[error("{doing}: {said}")]
    Driver {
        /// What it was asked to do.
        doing: &'static str,
        /// What it said.
        said: String,
    },
}

impl From<Fault> for ForwardError {
    fn from(fault: Fault) -> Self {
        // A driver that refuses one thing refuses all that follows.
        if matches!(fault, Fault::Driver { .. }) {
            Self::Lost(fault.to_string())
        } else {
            Self::Device(fault.to_string())
        }
    }
}

/// Says what was going on when the driver refused.
pub(super) trait Doing<T> {
    /// The same with a fault that says so.
    fn doing(self, doing: &'static str) -> Result<T, Fault>;
}

impl<T> Doing<T> for Result<T, DriverError> {
    fn doing(self, doing: &'static str) -> Result<T, Fault> {
        self.map_err(|error| Fault::Driver { doing, said: said(error) })
    }
}

fn said(error: DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| text.ok()?.to_str().ok().map(str::to_owned);
    match (text(error.error_name()), text(error.error_string())) {
        (Some(name), Some(words)) => format!("{words} ({name})"),
        _ => format!("error {}", error.0 as u32),
    }
}

/// A GPU with the stream that everything runs on, in order.
pub(super) struct Gpu {
    pub(super) stream: Arc<CudaStream>,
    /// As the driver calls it.
    pub(super) name: String,
    /// Major and minor.
    pub(super) capability: (i32, i32),
    /// The newest CUDA that the driver speaks.
    pub(super) driver: i32,
    /// Bytes of memory that were free when it was opened.
    pub(super) free_at_first: usize,
}

/// How many there are; none without a driver.
pub(super) fn count() -> usize {
    let ask = || {
        cudarc::driver::result::init().ok()?;
        usize::try_from(CudaContext::device_count().ok()?).ok()
    };
    if has_driver() { catch_unwind(AssertUnwindSafe(ask)).ok().flatten().unwrap_or(0) } else { 0 }
}

fn has_driver() -> bool {
    // SAFETY: the driver's library runs no code of its own that could be unsound when it is loaded.
    #[expect(unsafe_code, reason = "loads a library")]
    unsafe {
        sys::is_culib_present()
    }
}

impl Gpu {
    /// The GPU of that number.
    pub(super) fn open(number: usize) -> Result<Self, Fault> {
        if !has_driver() {
            return Err(Fault::NoDriver);
        }
        // A driver from before a function was added has no such symbol, on which cudarc panics.
        catch_unwind(AssertUnwindSafe(|| Self::open_with_driver(number))).unwrap_or_else(|_| {
            Err(Fault::OldDriver { driver: driver_version().unwrap_or(0), needed: "12.0".to_owned() })
        })
    }

    fn open_with_driver(number: usize) -> Result<Self, Fault> {
        if let Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) = cudarc::driver::result::init() {
            return Err(Fault::NoDevice);
        }
        let count = CudaContext::device_count().doing("counting GPUs")? as usize;
        if count == 0 {
            return Err(Fault::NoDevice);
        }
        if number >= count {
            return Err(Fault::NoSuchDevice { number, count });
        }
        let context = CudaContext::new(number).doing("opening the GPU")?;
        let name = context.name().doing("asking the GPU for its name")?;
        let capability = context.compute_capability().doing("asking the GPU what it can")?;
        if capability < CAPABILITY_MIN {
            return Err(Fault::OldDevice { name, capability });
        }
        let stream = context.new_stream().doing("making a stream")?;
        // Everything is on one stream, in order: events between its own operations would tell it nothing.
        // SAFETY: nothing of this context is used on another stream.
        #[expect(unsafe_code, reason = "one stream needs no events")]
        unsafe {
            context.disable_event_tracking();
        }
        let driver = driver_version().ok_or(Fault::NoDriver)?;
        let (free_at_first, _) = context.mem_get_info().doing("asking for free memory")?;
        Ok(Self { stream, name, capability, driver, free_at_first })
    }

    /// Bytes free and in all.
    pub(super) fn memory(&self) -> Result<(usize, usize), Fault> {
        self.stream.context().mem_get_info().doing("asking for free memory")
    }

    /// Memory of whatever was there.
    pub(super) fn alloc<T: DeviceRepr>(&self, len: usize) -> Result<CudaSlice<T>, Fault> {
        // SAFETY: whoever asks writes before anybody reads.
        #[expect(unsafe_code, reason = "memory that is not set")]
        let slice = unsafe { self.stream.alloc(len.max(1)) };
        slice.map_err(|error| self.no_room(error, len * size_of::<T>()))
    }

    /// Memory of zeros.
    pub(super) fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>, Fault> {
        let zeros = self.stream.alloc_zeros(len.max(1));
        zeros.map_err(|error| self.no_room(error, len * size_of::<T>()))
    }

    /// Memory with those contents.
    pub(super) fn upload<T: DeviceRepr>(&self, data: &[T]) -> Result<CudaSlice<T>, Fault> {
        let mut slice = self.alloc(data.len())?;
        if !data.is_empty() {
            self.stream.memcpy_htod(data, &mut slice).doing("copying to the GPU")?;
        }
        Ok(slice)
    }

    fn no_room(&self, error: DriverError, wanted: usize) -> Fault {
        match error {
            DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                Fault::OutOfMemory { wanted, free: self.memory().map_or(0, |(free, _)| free) }
            }
            other => Fault::Driver { doing: "allocating on the GPU", said: said(other) },
        }
    }
}

/// The newest CUDA that the driver speaks: a thousand times the major number and ten times the minor one.
fn driver_version() -> Option<i32> {
    let mut version = 0;
    // SAFETY: the driver is there, and writes one number.
    #[expect(unsafe_code, reason = "cudarc has no wrapper")]
    let result = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    (result == CUresult::CUDA_SUCCESS).then_some(version)
}

/// Device memory that grows, and is written from its beginning.
pub(super) struct Buffer<T>(Option<CudaSlice<T>>);

impl<T> Default for Buffer<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: DeviceRepr> Buffer<T> {
    /// Room for `len` elements; contents are whatever was there.
    pub(super) fn reserve(&mut self, gpu: &Gpu, len: usize) -> Result<&mut CudaSlice<T>, Fault> {
        if self.0.as_ref().is_none_or(|slice| slice.len() < len) {
            // The old one goes first: both together may be more than there is.
            self.0 = None;
            self.0 = Some(gpu.alloc(len.next_power_of_two())?);
        }
        Ok(self.0.as_mut().expect("was just put there"))
    }

    /// Overwrites it from the beginning.
    pub(super) fn write(&mut self, gpu: &Gpu, data: &[T]) -> Result<(), Fault> {
        let slice = self.reserve(gpu, data.len())?;
        if data.is_empty() {
            return Ok(());
        }
        gpu.stream.memcpy_htod(data, &mut slice.slice_mut(..data.len())).doing("copying to the GPU")
    }

    /// What it holds.
    ///
    /// # Panics
    /// When nothing was reserved yet.
    pub(super) fn get(&self) -> &CudaSlice<T> {
        self.0.as_ref().expect("something was written")
    }

    /// What it holds, to be written to.
    ///
    /// # Panics
    /// When nothing was reserved yet.
    pub(super) fn get_mut(&mut self) -> &mut CudaSlice<T> {
        self.0.as_mut().expect("something was reserved")
    }

    /// Elements that it has room for.
    pub(super) fn capacity(&self) -> usize {
        self.0.as_ref().map_or(0, CudaSlice::len)
    }
}
