//! Tools that the tests run and nobody has to install: Debian's packages, unpacked into the cache folder.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::process::{command, root, run};

/// A tool.
pub(crate) enum Tool {
    /// A browser without a window.
    Chromium,
    /// Checks Prometheus's rules.
    Promtool,
}

impl Tool {
    fn package(&self) -> &'static str {
        match self {
            Self::Chromium => "chromium-headless-shell",
            Self::Promtool => "prometheus",
        }
    }

    /// What is run, in the tool's folder.
    fn program(&self) -> &'static str {
        match self {
            Self::Chromium => "run",
            Self::Promtool => "usr/bin/promtool",
        }
    }
}

/// The tool, fetched first if it is not there.
pub(crate) fn fetch(tool: &Tool) -> Result<PathBuf> {
    let folder = root().join(".cache/debian").join(tool.package());
    let program = folder.join(tool.program());
    if program.exists() {
        return Ok(program);
    }
    eprintln!("fetching Debian's {}", tool.package());
    let work = folder.with_extension(format!("{}", std::process::id()));
    let result = unpack(tool, &work);
    if result.is_ok() {
        // Half a tool of an earlier try is never taken for a whole one.
        let _ = fs::remove_dir_all(&folder);
        fs::rename(&work, &folder)?;
    } else {
        fs::remove_dir_all(&work)?;
    }
    result.with_context(|| format!("fetching {}", tool.package()))?;
    Ok(program)
}

fn unpack(tool: &Tool, work: &Path) -> Result<()> {
    let archives = work.join("archives");
    fs::create_dir_all(archives.join("partial"))?;
    if download(tool, &archives).is_err() {
        // A fresh machine has no lists of packages yet.
        run(command("apt-get", &["update", "--quiet"]))?;
        download(tool, &archives)?;
    }
    for entry in fs::read_dir(&archives)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run(command("dpkg-deb", &["--extract", &path.to_string_lossy(), &work.to_string_lossy()]))?;
        }
    }
    fs::remove_dir_all(&archives)?;
    if let Tool::Chromium = tool {
        fs::write(work.join("run"), RUN)?;
        fs::set_permissions(work.join("run"), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// Runs the browser with the libraries that were unpacked beside it.
const RUN: &str = "#!/bin/sh\n\
here=$(dirname \"$0\")\n\
for folder in \"$here\"/usr/lib/*-linux-gnu \"$here\"/usr/lib/*-linux-gnu/pulseaudio; do\n\
  LD_LIBRARY_PATH=$folder:$LD_LIBRARY_PATH\n\
done\n\
export LD_LIBRARY_PATH\n\
exec \"$here/usr/lib/chromium/chromium-headless-shell\" \"$@\"\n";

/// Downloads the package; with it, for the browser, the packages that it depends on and this machine does not have.
fn download(tool: &Tool, archives: &Path) -> Result<()> {
    let cache = format!("Dir::Cache::archives={}", archives.display());
    // The folder is the caller's alone, and not that of the user whom apt fetches as.
    let mut apt = command("apt-get", &["--option", "APT::Sandbox::User=", "--option", &cache, "--quiet"]);
    match tool {
        Tool::Chromium => apt.args(["install", "--download-only", "--yes", "--no-install-recommends"]),
        Tool::Promtool => apt.current_dir(archives).arg("download"),
    };
    apt.arg(tool.package());
    run(apt)
}
