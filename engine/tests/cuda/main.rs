//! The CUDA backend on a machine without a GPU: its host code unchanged, its kernels as fibers.
//!
//! The driver's stand-in and NVRTC are found by the system's loader, and what the stand-in is like is said in its
//! environment. So every case runs in a process of its own, which is this program again, once for each setting.
//!
//! Needs `cargo xtask cuda-stand-in`, and the default model.
#![expect(clippy::unwrap_used, reason = "what these functions unwrap is the test")]

mod cases;
mod faults;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use cases::CASES;
use faults::FAULTS;

/// The four orders in which fibers take turns.
const ORDERS: [&str; 4] = ["forward", "reverse", "random", "skew"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["--case", name] = words.as_slice() {
        return run_case(name);
    }
    let wanted: Vec<&str> = words.iter().copied().filter(|word| !word.starts_with("--")).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|word| name.contains(word));
    let mut failed = 0;
    let mut judge = |name: &str, outcome: Result<(), String>| match outcome {
        Ok(()) => println!("test {name} ... ok"),
        Err(message) => {
            println!("test {name} ... FAILED\n{message}");
            failed += 1;
        }
    };
    for (name, _) in CASES {
        for order in ORDERS {
            let full = format!("{name}, {order}");
            if is_wanted(&full) {
                judge(&full, succeeds(&on_stand_in(name).env("STAND_IN_ORDER", order).output().unwrap()));
            }
        }
    }
    for fault in FAULTS {
        if is_wanted(fault.name) {
            judge(fault.name, fault.check());
        }
    }
    println!("{failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// In the process of a case: runs it.
fn run_case(name: &str) -> ExitCode {
    let case = CASES.iter().find(|(known, _)| *known == name);
    if let Some((_, run)) = case {
        run();
        return ExitCode::SUCCESS;
    }
    match faults::run(name) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            println!("{message}");
            ExitCode::FAILURE
        }
    }
}

/// This program again, for one case, with nothing that stands in.
fn bare(case: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--case", case]).env_remove("LD_LIBRARY_PATH");
    command
}

/// The same with the driver's stand-in and NVRTC.
fn on_stand_in(case: &str) -> Command {
    let mut command = bare(case);
    command.env("LD_LIBRARY_PATH", format!("{}:{}", stand_in().display(), nvrtc().display()));
    command
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The folder with libcuda.so.1.
fn stand_in() -> PathBuf {
    root().join(".cache/cuda-stand-in")
}

/// The folder with libnvrtc.so.13.
fn nvrtc() -> PathBuf {
    let lib = root().join(".cache/cuda/lib");
    let python = std::fs::read_dir(&lib).expect("NVRTC, which `cargo xtask cuda-stand-in` fetches");
    let python = python.map(|entry| entry.unwrap().path()).next().unwrap();
    python.join("site-packages/nvidia/cu13/lib")
}

fn succeeds(output: &Output) -> Result<(), String> {
    if output.status.success() {
        return Ok(());
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr)))
}
