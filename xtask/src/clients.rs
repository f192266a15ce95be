//! Python programs that the tests run: each kind in a virtual environment of its own in the cache folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::process::{command, root, run};

/// Installs the clients that the end-to-end tests run, unless they are there, and gives the folder of their environment.
pub(crate) fn fetch() -> Result<PathBuf> {
    environment("clients", "tests/clients/requirements.txt")
}

/// The same for what the tests of the Kubernetes manifests run: kubectl, and the schemas.
pub(crate) fn fetch_kubernetes() -> Result<PathBuf> {
    environment("kubernetes", "tests/kubernetes/requirements.txt")
}

/// Installs a list of packages, every one with its version.
pub(crate) fn environment(name: &str, requirements: &str) -> Result<PathBuf> {
    let folder = root().join(".cache").join(name);
    let wanted = fs::read(root().join(requirements)).with_context(|| requirements.to_owned())?;
    // Copied when all else is there: half an environment is never taken for a whole one, nor an old one for a new.
    let installed = folder.join("requirements.txt");
    if fs::read(&installed).is_ok_and(|installed| installed == wanted) {
        return Ok(folder);
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    if let Some(cache) = folder.parent() {
        fs::create_dir_all(cache)?;
    }
    eprintln!("installing what {requirements} lists: about a minute");
    install(&folder, requirements)?;
    let new = folder.join("requirements.new");
    fs::write(&new, &wanted)?;
    fs::rename(new, installed)?;
    Ok(folder)
}

/// Makes the environment with this machine's own pip: distributions that part pip from Python lack the one inside.
fn install(folder: &Path, requirements: &str) -> Result<()> {
    let folder = folder.to_string_lossy();
    run(command("python3", &["-m", "venv", "--without-pip", &folder]))?;
    let python = format!("{folder}/bin/python");
    let mut pip = command("python3", &["-m", "pip", "--python", &python, "install"]);
    // The list is closed, so nothing is left to resolve; modules are compiled when first imported, if ever.
    pip.args(["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--retries", "5"]);
    pip.args(["--requirement", requirements]);
    run(pip)
}
