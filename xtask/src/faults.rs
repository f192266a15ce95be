//! The tests of faults in networks of their own: what they need of the system, and the commands that run one alone.

use std::process::Stdio;

use anyhow::{Result, bail};

use crate::etcd;
use crate::model::{self, Name};
use crate::process::{command, run};
use crate::stages;

/// Programs that lay networks and start processes in them, each with Debian's package.
const PROGRAMS: [(&str, &str); 2] = [("ip", "iproute2"), ("nsenter", "util-linux")];

/// Installs those programs unless they are there.
pub(crate) fn fetch() -> Result<()> {
    for (program, package) in PROGRAMS {
        if is_there(program) {
            continue;
        }
        eprintln!("installing {package}, which has {program}");
        let install = ["install", "--yes", "--no-install-recommends", package];
        if run(command("apt-get", &install)).is_err() {
            // Lists of packages that are missing or old.
            run(command("apt-get", &["update"]))?;
            run(command("apt-get", &install))?;
        }
        if !is_there(program) {
            bail!("{program}: expected in the path after installing {package}");
        }
    }
    Ok(())
}

fn is_there(program: &str) -> bool {
    let mut version = command(program, &["-V"]);
    version.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Runs the soak for so long, with so many streams, and with a seed of its own or that one.
pub(crate) fn soak(minutes: f64, streams: usize, seed: Option<u64>) -> Result<()> {
    model::fetch(Name::Smollm2)?;
    let mut arguments = vec![format!("--minutes={minutes}"), format!("--streams={streams}")];
    arguments.extend(seed.map(|seed| format!("--seed={seed}")));
    test("soak", &arguments)
}

/// Builds what they start, and runs one of these tests with arguments of its own.
pub(crate) fn test(name: &str, arguments: &[String]) -> Result<()> {
    fetch()?;
    etcd::fetch()?;
    stages::e2e_binary()?;
    // With the features of all crates, as the command that runs every test builds it.
    let mut test = command("cargo", &["test", "--locked", "--workspace", "--test", name, "--"]);
    test.args(arguments);
    run(test)
}
