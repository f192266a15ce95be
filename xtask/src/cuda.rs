//! CUDA without a GPU: the compiler of kernels, and a driver that stands in, for tests.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::clients;
use crate::process::{command, root, run, target};

/// The architectures that kernels are compiled for in tests: Ampere to Blackwell.
const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100"];

/// Fetches NVRTC, unless it is there, and gives its folder.
pub(crate) fn nvrtc() -> Result<PathBuf> {
    let lib = clients::environment("cuda", "tests/cuda/requirements.txt")?.join("lib");
    let python =
        std::fs::read_dir(&lib)?.next().context("expected a folder of Python's packages, found none")??;
    Ok(python.path().join("site-packages/nvidia/cu13/lib"))
}

/// Builds the driver that stands in for a GPU's, with every kernel in it, and gives its folder.
pub(crate) fn stand_in() -> Result<PathBuf> {
    nvrtc()?;
    let folder = root().join(".cache/cuda-stand-in");
    std::fs::create_dir_all(&folder)?;
    let (library, new) = (folder.join("libcuda.so.1"), folder.join("libcuda.so.1.new"));
    let mut compile = command(
        "g++",
        &[
            "-std=c++17",
            "-O3",
            "-march=native",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-Wall",
        ],
    );
    compile.args(["-Wextra", "-Werror", "-I", "tests/cuda", "-I", "engine/src/backend/cuda"]);
    compile.args(["tests/cuda/stand_in.cpp", "-Wl,-soname,libcuda.so.1", "-o"]).arg(&new);
    run(compile)?;
    std::fs::rename(new, library)?;
    Ok(folder)
}

/// Compiles every kernel for every architecture, and prints what each needs.
pub(crate) fn kernels() -> Result<()> {
    // With features as for all tests, so that nothing is built twice.
    run(command("cargo", &["build", "--locked", "--workspace", "--example", "kernels"]))?;
    let example = target().join("debug/examples/kernels");
    let mut print = command(&example.to_string_lossy(), &ARCHITECTURES);
    print.env("LD_LIBRARY_PATH", nvrtc()?);
    run(print)
}
