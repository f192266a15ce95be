//! CUDA without a GPU: the compiler of kernels, and a driver that stands in, for tests.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::clients;
use crate::process::{command, root, run, target};

/// The architectures that kernels are compiled for in tests: Ampere to Blackwell.
const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100"];

/// Fetches NVRTC, unless it is there, and gives its folder, by a link where tests look too.
pub(crate) fn nvrtc() -> Result<PathBuf> {
    let environment = clients::environment("cuda", "tests/cuda/requirements.txt")?;
    let python = std::fs::read_dir(environment.join("lib"))?.next();
    let python = python.context("expected a folder of Python's packages, found none")??;
    let cache = root().join(".cache");
    let (link, new) = (cache.join("cuda-nvrtc"), cache.join("cuda-nvrtc.new"));
    let _ = std::fs::remove_file(&new);
    // From where the link lies, so that it stays right wherever the folder is moved to.
    let libraries = Path::new("cuda/lib").join(python.file_name()).join("site-packages/nvidia/cu13/lib");
    std::os::unix::fs::symlink(libraries, &new)?;
    std::fs::rename(new, &link)?;
    Ok(link)
}

/// Builds the driver that stands in for a GPU's, with every kernel in it, and gives its folder.
pub(crate) fn stand_in() -> Result<PathBuf> {
    nvrtc()?;
    let folder = root().join(".cache/cuda-stand-in");
    std::fs::create_dir_all(&folder)?;
    let (library, new) = (folder.join("libcuda.so.1"), folder.join("libcuda.so.1.new"));
    let mut compile = command("g++", &["-O3", "-Wall", "-Wextra", "-Werror", "@tests/cuda/options", "-o"]);
    compile.arg(&new);
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
