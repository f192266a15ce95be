//! What is missing or breaks, and what is said of it.

use std::process::Command;

use engine::backend::cuda::Cuda;
use engine::batch::Logits;
use engine::model::conformance::{Rows, Sequence, batch};
use engine::model::decoder::Decoder;
use engine::model::samples::{FORMATS, RandomWeights, small};
use engine::model::{Interrupt, Model};

use crate::cases::options;
use crate::{Outcome, bare, on_stand_in, stand_in};

/// Something that is wrong, and what must be said.
pub(crate) struct Fault {
    /// In words.
    pub(crate) name: &'static str,
    /// What is done.
    case: &'static str,
    /// How the machine is.
    machine: fn(&mut Command),
    /// With which libraries.
    libraries: Libraries,
    /// What must be printed.
    says: &'static str,
}

enum Libraries {
    None,
    DriverOnly,
    All,
}

const OPEN: &str = "open";
const FORWARD: &str = "forward";

/// Every fault.
pub(crate) const FAULTS: [Fault; 11] = [
    Fault {
        name: "no driver",
        case: OPEN,
        machine: |_| {},
        libraries: Libraries::None,
        says: "device: no NVIDIA driver on this machine (libcuda.so.1): install one, or use --device cpu",
    },
    Fault {
        name: "no compiler",
        case: OPEN,
        machine: |_| {},
        libraries: Libraries::DriverOnly,
        says: "device: no NVRTC on this machine (libnvrtc.so.13): install CUDA's runtime compiler",
    },
    Fault {
        name: "no gpu",
        case: OPEN,
        machine: |command| _ = command.env("STAND_IN_DEVICES", "0"),
        libraries: Libraries::All,
        says: "device: the NVIDIA driver finds no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi, or use --device cpu",
    },
    Fault {
        name: "no gpu of that number",
        case: "open the third",
        machine: |command| _ = command.env("STAND_IN_DEVICES", "2"),
        libraries: Libraries::All,
        says: "device: cuda:2 is not there: this machine has 2, numbered from 0",
    },
    Fault {
        name: "an old gpu",
        case: OPEN,
        machine: |command| _ = command.env("STAND_IN_CAPABILITY", "75"),
        libraries: Libraries::All,
        says: "device: stand-in for a GPU has compute capability 7.5, and 8.0 is needed: use --device cpu",
    },
    Fault {
        name: "a gpu that the compiler does not know",
        case: OPEN,
        machine: |command| _ = command.env("STAND_IN_CAPABILITY", "199"),
        libraries: Libraries::All,
        says: "device: kernel rows does not compile for sm_199: update CUDA's runtime compiler, or use --device cpu; it says: ",
    },
    Fault {
        name: "an old driver",
        case: OPEN,
        machine: |command| _ = command.env("STAND_IN_DRIVER", "12040"),
        libraries: Libraries::All,
        says: "device: the NVIDIA driver is too old: it speaks CUDA 12.4 and 13.0 is needed; update it, or use --device cpu",
    },
    Fault {
        name: "no room for weights",
        case: FORWARD,
        machine: |command| _ = command.env("STAND_IN_FAIL", "cuMemAlloc:3"),
        libraries: Libraries::All,
        says: "device: out of GPU memory: ",
    },
    Fault {
        name: "no room for kv",
        case: "a large arena",
        machine: |command| _ = command.env("STAND_IN_MEMORY_MIB", "64"),
        libraries: Libraries::All,
        says: "device: out of GPU memory: 134217728 more bytes were asked for and ",
    },
    Fault {
        name: "a launch that fails",
        case: FORWARD,
        machine: |command| _ = command.env("STAND_IN_FAIL", "cuLaunchKernel:6"),
        libraries: Libraries::All,
        says: "device: launching attention: unspecified launch failure (CUDA_ERROR_LAUNCH_FAILED)",
    },
    Fault {
        name: "a gpu that is lost",
        case: FORWARD,
        machine: |command| _ = command.env("STAND_IN_FAIL", "cuStreamSynchronize"),
        libraries: Libraries::All,
        says: "device: waiting for the GPU: unspecified launch failure (CUDA_ERROR_LAUNCH_FAILED)",
    },
];

impl Fault {
    /// Has it happen in a process of its own.
    pub(crate) fn check(&self) -> Outcome {
        let mut command = match self.libraries {
            Libraries::None => bare(self.case),
            Libraries::DriverOnly => {
                let mut command = bare(self.case);
                command.env("LD_LIBRARY_PATH", stand_in());
                command
            }
            Libraries::All => on_stand_in(self.case),
        };
        (self.machine)(&mut command);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        // An exit, not a signal: an error that was handed on, not a panic.
        let is_error = output.status.code() == Some(1);
        if is_error && said.lines().any(|line| line.starts_with(self.says)) {
            return Ok(String::new());
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        Err(format!("expected an error {:?}, got {} and\n{said}{stderr}", self.says, output.status))
    }
}

/// Does what one of them asks for; gives what is said of it.
pub(crate) fn run(case: &str) -> Result<(), String> {
    let open = |number| Cuda::new(&options(number)).map_err(|error| error.to_string());
    let model = || {
        let weights = RandomWeights::new(&small(), FORMATS[0]);
        Decoder::load(open(0)?, small(), &weights).map_err(|error| error.to_string())
    };
    match case {
        OPEN => open(0).map(drop),
        "open the third" => open(2).map(drop),
        "a large arena" => {
            // 64 layers' planes of 16 tokens with 2 heads of 16 in f16: 4 KiB a block.
            model()?.new_kv(1 << 15, 16).map(drop).map_err(|error| error.to_string())
        }
        FORWARD => {
            let mut model = model()?;
            let mut kv = model.new_kv(1, 16).map_err(|error| error.to_string())?;
            let part = Sequence { tokens: &[1, 2, 3], table: &[0] }.part(0, 3, Rows::Last);
            let mut logits = Logits::default();
            let step = model.forward(&batch(&[part], 16), &mut kv, &Interrupt::default(), &mut logits);
            step.map_err(|error| error.to_string())
        }
        other => Err(format!("no such case: {other}")),
    }
}
