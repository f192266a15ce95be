//! The commands that run in stages: `serve`, `test`, `ci`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::clients;
use crate::cuda;
use crate::debian::{self, Tool};
use crate::etcd;
use crate::faults;
use crate::fuzz;
use crate::model::{self, Name};
use crate::process::{command, root, run, target};
use crate::tidy;

/// Builds the release binary and becomes it, to serve the model that the first argument names, if it is one, or the
/// default model, fetched first.
pub(crate) fn serve(arguments: &[String]) -> Result<()> {
    use std::os::unix::process::CommandExt as _;

    let names_model =
        arguments.iter().any(|argument| argument == "--model" || argument.starts_with("--model="))
            || arguments.first().is_some_and(|argument| !argument.starts_with('-'));
    let default = if names_model { None } else { Some(model::fetch(Name::Smollm2)?) };
    eprintln!("building the release binary: minutes, the first time");
    run(command("cargo", &["build", "--release", "--locked", "--package", "baton"]))?;
    let binary = target().join("release/baton");
    let mut baton = command(&binary.to_string_lossy(), &["serve"]);
    if let Some(model) = default {
        // Its file may have another name in another cache.
        baton.arg(model).args(["--served-name", "SmolLM2-135M-Instruct"]);
    }
    baton.args(arguments);
    // `exec`, so that signals reach the server itself; it returns only on failure.
    Err(baton.exec()).with_context(|| format!("starting {}", binary.display()))
}

/// Simulates. The planner is optimised in every profile, so what the tests have built will do.
pub(crate) fn sim(arguments: &[String]) -> Result<()> {
    let mut sim =
        command("cargo", &["run", "--quiet", "--locked", "--package", "planner", "--example", "sim", "--"]);
    sim.args(arguments);
    run(sim)
}

/// Runs every test.
pub(crate) fn test() -> Result<()> {
    let mut stages = Stages::default();
    let result = test_stages(&mut stages);
    stages.print();
    result
}

/// Formatting and lints, then every test.
pub(crate) fn ci() -> Result<()> {
    let mut stages = Stages::default();
    let result = (|| {
        stages.run("format", || run(command("cargo", &["fmt", "--all", "--check"])))?;
        stages.run("lints", || {
            let lints = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
            run(command("cargo", &lints))
        })?;
        test_stages(&mut stages)
    })();
    stages.print();
    result
}

/// Builds the binary with fail points and puts it where no other build of it can take its place.
pub(crate) fn e2e_binary() -> Result<()> {
    // Any test target makes cargo choose features as it does for all tests, so that nothing is built twice.
    let build = ["build", "--locked", "--workspace", "--bin", "baton", "--test", "watermark"];
    run(command("cargo", &build))?;
    let folder = target().join("e2e");
    std::fs::create_dir_all(&folder)?;
    let new = folder.join("baton.new");
    std::fs::copy(target().join("debug/baton"), &new)?;
    std::fs::rename(new, folder.join("baton"))?;
    Ok(())
}

fn test_stages(stages: &mut Stages) -> Result<()> {
    stages.run("tidy", || tidy::check(&root()))?;
    stages.run("fetch models", || {
        model::fetch(Name::Smollm2)?;
        model::fetch(Name::Gemma3).map(drop)
    })?;
    stages.run("fetch clients", || clients::fetch().map(drop))?;
    stages.run("fetch etcd", || etcd::fetch().map(drop))?;
    stages.run("fetch kubectl and schemas", || clients::fetch_kubernetes().map(drop))?;
    stages.run("fetch what lays networks", faults::fetch)?;
    stages.run("fetch a browser and promtool", || {
        debian::fetch(&Tool::Chromium)?;
        debian::fetch(&Tool::Promtool).map(drop)
    })?;
    stages.run("build a stand-in for a GPU", || cuda::stand_in().map(drop))?;
    stages.run("build the binary, with fail points", e2e_binary)?;
    let workspace = ["test", "--workspace", "--locked"];
    stages.run("build the tests", || {
        let mut build = command("cargo", &workspace);
        build.arg("--no-run");
        run(build)
    })?;
    stages.run("CUDA kernels for every architecture", cuda::kernels)?;
    stages.run("tests", || {
        let mut tests = command("cargo", &workspace);
        // Every failure is worth knowing, not the first one alone.
        tests.arg("--no-fail-fast");
        run(tests)
    })?;
    stages.run("fuzz targets, a short run of each", || {
        fuzz::run(&fuzz::Plan { short: true, seconds: 0, only: None })
    })
}

/// Stages that ran, with how long each took.
#[derive(Default)]
struct Stages(Vec<(String, Duration, bool)>);

impl Stages {
    /// Runs a stage and remembers its duration.
    fn run(&mut self, name: &str, stage: impl FnOnce() -> Result<()>) -> Result<()> {
        eprintln!("── {name}");
        let start = Instant::now();
        let result = stage();
        self.0.push((name.to_owned(), start.elapsed(), result.is_ok()));
        result.with_context(|| name.to_owned())
    }

    /// Prints a line per stage.
    fn print(&self) {
        println!("\nstage                                       seconds");
        for (name, took, passed) in &self.0 {
            let mark = if *passed { "" } else { "  failed" };
            println!("{name:<42} {:>8.1}{mark}", took.as_secs_f64());
        }
        let total: Duration = self.0.iter().map(|(_, took, _)| *took).sum();
        println!("{:<42} {:>8.1}", "total", total.as_secs_f64());
    }
}
