//! The CUDA backend on a machine without a GPU: its host code unchanged, its kernels as fibers.
//!
//! The driver's stand-in and NVRTC are found by the system's loader, and what the stand-in is like is said in its
//! environment. So every case runs in a process of its own, which is this program again, once for each setting.
//!
//! Needs `cargo xtask cuda-stand-in`, and the default model.
#![expect(clippy::unwrap_used, reason = "what these functions unwrap is the test")]

mod cases;
mod faults;
mod planted;

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use cases::{CASES, WHOLE_MODEL};
use faults::FAULTS;
use planted::PLANTED;

/// The four orders in which fibers take turns.
const ORDERS: [&str; 4] = ["forward", "reverse", "random", "skew"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["--case", name] = words.as_slice() {
        return run_case(name);
    }
    let wanted: Vec<&str> = words.iter().copied().filter(|word| !word.starts_with("--")).collect();
    let mut tests = all_tests();
    tests.retain(|(name, _)| wanted.is_empty() || wanted.iter().any(|word| name.contains(word)));
    let failed = run_all(&tests);
    println!("{failed} of {} failed", tests.len());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What came of a test: more to say, or what was wrong.
type Outcome = Result<String, String>;

/// A test, in a process of its own.
type Test = Box<dyn Fn() -> Outcome + Sync>;

/// Every test with its name: each case in each order, then each fault.
fn all_tests() -> Vec<(String, Test)> {
    let mut tests: Vec<(String, Test)> = Vec::new();
    // What takes longest begins first.
    for (name, _) in CASES.into_iter().rev() {
        let orders = if name == WHOLE_MODEL { &ORDERS[3..] } else { &ORDERS };
        for &order in orders {
            let run = move || succeeds(&on_stand_in(name).env("STAND_IN_ORDER", order).output().unwrap());
            tests.push((format!("{name}, {order}"), Box::new(run)));
        }
    }
    for fault in &FAULTS {
        tests.push((fault.name.to_owned(), Box::new(|| fault.check())));
    }
    for fault in &PLANTED {
        tests.push((format!("planted: {}", fault.name), Box::new(|| fault.check())));
    }
    tests.push(("sanitized".to_owned(), Box::new(planted::sanitized)));
    tests
}

/// Runs them, as many at a time as there are cores; gives how many failed.
fn run_all(tests: &[(String, Test)]) -> usize {
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some((name, test)) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            let outcome = test();
            let seconds = start.elapsed().as_secs_f32();
            match outcome {
                Ok(more) => println!("test {name} ... ok, {seconds:.1} s {more}"),
                Err(message) => {
                    println!("test {name} ... FAILED, {seconds:.1} s\n{message}");
                    failed.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(work);
        }
    });
    failed.into_inner()
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
    on_stand_in_at(&stand_in(), case)
}

/// The same with a stand-in that lies in that folder.
fn on_stand_in_at(folder: &Path, case: &str) -> Command {
    let mut command = bare(case);
    command.env("LD_LIBRARY_PATH", format!("{}:{}", folder.display(), nvrtc().display()));
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
    root().join(".cache/cuda-nvrtc")
}

fn succeeds(output: &Output) -> Outcome {
    if output.status.success() {
        return Ok(String::new());
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr)))
}
