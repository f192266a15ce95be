//! Compiles every CUDA kernel, and prints what each needs: `kernels ARCHITECTURE…`. Needs NVRTC, and no GPU.

use std::collections::BTreeMap;
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
    let archs: Vec<String> = std::env::args().skip(1).collect();
    // By kernel, of each architecture.
    let mut table: BTreeMap<String, Vec<Needs>> = BTreeMap::new();
    for arch in &archs {
        match compile_all(arch) {
            Ok(all) => {
                for needs in all.iter().flat_map(needs) {
                    table.entry(needs.kernel.clone()).or_default().push(needs);
                }
            }
            Err(fault) => {
                eprintln!("{fault}");
                return ExitCode::FAILURE;
            }
        }
    }
    println!("Registers of a thread, bytes of static shared memory of a block, bytes spilled:");
    println!("| kernel | {} |", archs.join(" | "));
    println!("|---|{}", "---|".repeat(archs.len()));
    for (kernel, all) in &table {
        let cells =
            all.iter().map(|needs| format!("{}, {}, {}", needs.registers, needs.shared, needs.spilled));
        println!("| {kernel} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
    let spills = |all: &[Needs]| all.iter().any(|needs| needs.spilled > 0);
    let wrong = |(kernel, all): (&String, &Vec<Needs>)| {
        (spills(all) || all.len() != archs.len()).then(|| kernel.to_owned())
    };
    let wrong: Vec<String> = table.iter().filter_map(wrong).collect();
    if wrong.is_empty() && !table.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("expected every kernel for every architecture and none to spill, found {wrong:?}");
    ExitCode::FAILURE
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
