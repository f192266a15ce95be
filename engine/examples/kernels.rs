//! Compiles every CUDA kernel, and prints what each needs: `kernels ARCHITECTURE…`. Needs NVRTC, and no GPU.

use std::process::ExitCode;

use engine::backend::cuda::compile::Compiled;
use engine::backend::cuda::compile_all;

/// A kernel's needs for one architecture.
#[derive(Debug, Default, PartialEq)]
struct Needs {
    kernel: String,
    registers: u32,
    /// Bytes of static shared memory.
    shared: u32,
    /// Bytes of stack for what has no register, written and read.
    spilled: u32,
}

fn main() -> ExitCode {
    let mut spills = false;
    println!("| kernel | architecture | registers | shared, bytes | spilled, bytes |");
    println!("|---|---|---|---|---|");
    for arch in std::env::args().skip(1) {
        let all = match compile_all(&arch) {
            Ok(all) => all,
            Err(fault) => {
                eprintln!("{fault}");
                return ExitCode::FAILURE;
            }
        };
        for needs in all.iter().flat_map(needs) {
            let Needs { kernel, registers, shared, spilled } = needs;
            println!("| {kernel} | {arch} | {registers} | {shared} | {spilled} |");
            spills |= spilled > 0;
        }
    }
    if spills {
        eprintln!("a kernel spills: expected none to");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Reads the assembler's report: a line that names a kernel, one with its stack, one with all else.
fn needs(compiled: &Compiled) -> Vec<Needs> {
    let mut all: Vec<Needs> = Vec::new();
    for line in compiled.report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(Needs { kernel, ..Needs::default() });
        }
        let Some(needs) = all.last_mut() else { continue };
        let before = |unit: &str| number_before(line, unit);
        if line.contains("spill stores") {
            needs.spilled =
                before("bytes spill stores").unwrap_or(0) + before("bytes spill loads").unwrap_or(0);
        }
        if line.contains("Used ") {
            needs.registers = before("registers").unwrap_or(0);
            needs.shared = before("bytes smem").unwrap_or(0);
        }
    }
    all
}

/// The number before those words.
fn number_before(line: &str, words: &str) -> Option<u32> {
    let (before, _) = line.split_once(words)?;
    before.split_whitespace().last()?.parse().ok()
}
