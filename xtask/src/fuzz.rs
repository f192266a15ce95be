//! The fuzz targets, built on stable Rust and run by libFuzzer.
//!
//! The workspace's own crates are compiled through `tests/fuzz/instrument.sh`, which adds the coverage counters; crates
//! of others come from the build of the tests. What is found lands in `target/fuzz/artifacts`, with the command that
//! shows it again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, bail};

use crate::process::{command, root, run as run_to_end, target};

/// Inputs that a short run gives each target. It counts them, not seconds, so that what is tried does not depend on how
/// fast the machine is: a tree that passed passes again, and new findings are left to long runs.
const SHORT_INPUTS: u64 = 20_000;

/// Longest that a short run of a target may take, seconds.
const SHORT_SECONDS_MAX: u64 = 120;

/// Longest input, bytes.
const INPUT_BYTES_MAX: usize = 4096;

/// How long to fuzz what.
pub(crate) struct Plan {
    /// The same few inputs each time, from the committed corpus alone.
    pub(crate) short: bool,
    /// Seconds for each target otherwise.
    pub(crate) seconds: u64,
    /// This target and no other.
    pub(crate) only: Option<String>,
}

/// Builds the targets and runs them, as many at a time as there are cores.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let targets = chosen(plan.only.as_deref())?;
    build(&targets)?;
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    let workers = std::thread::available_parallelism()?.get().min(targets.len());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(name) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = one(name, plan) {
                        eprintln!("{name}: {error:#}");
                        failed.lock().expect("no thread panics with it").push(name.as_str());
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no thread panicked with it");
    if failed.is_empty() {
        return Ok(());
    }
    bail!("findings in {}", failed.join(", "));
}

/// The targets to run: one for each file of the folder.
fn chosen(only: Option<&str>) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(home().join("targets"))? {
        let path = entry?.path();
        names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    names.sort();
    match only {
        None => Ok(names),
        Some(name) if names.iter().any(|known| known == name) => Ok(vec![name.to_owned()]),
        Some(name) => bail!("no target {name}; there are {}", names.join(", ")),
    }
}

fn home() -> PathBuf {
    root().join("tests/fuzz")
}

fn build(targets: &[String]) -> Result<()> {
    let mut build = command("cargo", &["build", "--locked", "--package", "baton-fuzz"]);
    for name in targets {
        build.args(["--bin", name]);
    }
    build.env("RUSTC_WORKSPACE_WRAPPER", home().join("instrument.sh"));
    run_to_end(build)
}

/// Runs one target and prints one line about it, or all that it said if it found something.
fn one(name: &str, plan: &Plan) -> Result<()> {
    let work = target().join("fuzz");
    let artifacts = work.join("artifacts");
    let found = work.join(if plan.short { "short" } else { "corpus" }).join(name);
    if plan.short && found.exists() {
        fs::remove_dir_all(&found)?;
    }
    fs::create_dir_all(&found)?;
    fs::create_dir_all(&artifacts)?;
    let seconds = if plan.short { SHORT_SECONDS_MAX } else { plan.seconds };
    // -1 is no limit.
    let inputs = if plan.short { SHORT_INPUTS.to_string() } else { "-1".to_owned() };
    let binary = target().join("debug").join(name);
    let mut fuzzer = Command::new(&binary);
    fuzzer
        .arg(format!("-runs={inputs}"))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={INPUT_BYTES_MAX}"))
        .arg(format!("-artifact_prefix={}/{name}-", artifacts.display()))
        .args(["-timeout=20", "-rss_limit_mb=2048", "-seed=1", "-print_final_stats=0"])
        // New inputs go to the first folder; the second is only read.
        .args([&found, &home().join("corpus").join(name)])
        .env("RUST_BACKTRACE", "1")
        .stdin(Stdio::null());
    let output = fuzzer.output().with_context(|| format!("starting {}", binary.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        println!("{name:<16} {}", summary(&said).unwrap_or("ran"));
        return Ok(());
    }
    eprintln!("{said}");
    let artifact =
        artifact(&said).map_or_else(String::new, |path| format!("; again: {} {path}", binary.display()));
    bail!("{}{artifact}", output.status)
}

/// What libFuzzer says in the end: inputs tried, edges and features of the code that they covered.
fn summary(said: &str) -> Option<&str> {
    said.lines().rev().find(|line| line.starts_with('#') && line.contains("DONE")).map(str::trim)
}

/// The file that holds the input that failed.
fn artifact(said: &str) -> Option<&str> {
    let path = said.lines().find_map(|line| line.split_once("Test unit written to "))?.1.trim();
    Path::new(path).is_file().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_built_and_has_a_corpus() {
        let manifest = fs::read_to_string(home().join("Cargo.toml")).expect("the manifest");
        let names = chosen(None).expect("the targets");
        assert!(!names.is_empty());
        for name in names {
            assert!(manifest.contains(&format!("path = \"targets/{name}.rs\"")), "{name} is no binary");
            assert!(home().join("corpus").join(&name).is_dir(), "{name} has no corpus");
        }
        assert!(chosen(Some("no_such")).is_err());
    }

    #[test]
    fn the_last_line_and_the_failing_input_are_read() {
        assert_eq!(summary("#1 NEW\n#9\tDONE   cov: 7\nDone 9 runs\n"), Some("#9\tDONE   cov: 7"));
        assert_eq!(artifact("x; Test unit written to /no/such/file\n"), None);
    }
}
