//! Benchmarks: figures side by side from one run, since machines differ and neighbours are noisy.

use anyhow::Result;

use crate::faults;
use crate::model;
use crate::process::{command, run as run_to_end, target};
use crate::stages;

/// A benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Name {
    /// Prefill and decode rates of the CPU backend on the default model, by threads
    Engine,
    /// CPU and memory that a gateway spends on requests and streams, beside a bare server of the same events
    Gateway,
    /// Time until everything is free when a client leaves, and until a dead peer is known as such
    Freeing,
    /// Time that grammars take: the vocabulary, compiling each schema of the corpus, and each mask
    Grammar,
    /// Time to choose among a thousand workers with a million KV blocks, and what an idle router takes that they talk to
    Routing,
    /// Time to the first token and cached tokens of routing by what is cached, beside round robin
    Prefix,
}

/// Runs the benchmark and prints its figures.
pub(crate) fn run(name: Name) -> Result<()> {
    match name {
        Name::Engine => {
            let model = model::fetch(model::Name::Smollm2)?;
            let cores = std::thread::available_parallelism()?.get();
            for threads in [1, cores] {
                println!("── {threads} of {cores} cores");
                let example =
                    ["run", "--release", "--locked", "--package", "engine", "--example", "speed", "--"];
                let mut speed = command("cargo", &example);
                speed.arg(&model).arg(threads.to_string());
                run_to_end(speed)?;
            }
            Ok(())
        }
        Name::Gateway => {
            // In one build, so that both are made of the same parts.
            let mut build = command("cargo", &["build", "--profile", "dist", "--locked"]);
            build.args(["--package", "baton", "--package", "gateway", "--bin", "baton", "--example", "cost"]);
            run_to_end(build)?;
            let built = target().join("dist");
            let mut cost = command(&built.join("examples/cost").to_string_lossy(), &[]);
            cost.arg(built.join("baton"));
            run_to_end(cost)
        }
        Name::Freeing => faults::test("freeing", &["--disconnects=400".to_owned()]),
        Name::Grammar => {
            let model = model::fetch(model::Name::Smollm2)?;
            let example = [
                "run",
                "--release",
                "--locked",
                "--package",
                "checkpoint",
                "--example",
                "grammar_costs",
                "--",
            ];
            let mut costs = command("cargo", &example);
            costs.arg(&model).arg("tests/schemas/schemas.json");
            run_to_end(costs)
        }
        Name::Routing => {
            let example = ["run", "--release", "--locked", "--package", "router", "--example", "routing"];
            run_to_end(command("cargo", &example))
        }
        Name::Prefix => {
            model::fetch(model::Name::Smollm2)?;
            stages::e2e_binary()?;
            let test = ["test", "--locked", "--workspace", "--test", "prefix", "--", "--nocapture"];
            run_to_end(command("cargo", &test))
        }
    }
}
