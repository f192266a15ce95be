//! The etcd server that the tests of discovery start: Debian's package, unpacked into the cache folder, not installed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::process::{command, root, run};

/// The package that has the server.
const PACKAGE: &str = "etcd-server";
/// Where the server lies in it.
const SERVER: &str = "usr/bin/etcd";

/// The cached server, fetched first if it is not there.
pub(crate) fn fetch() -> Result<PathBuf> {
    let folder = root().join(".cache/etcd");
    let server = folder.join("etcd");
    if server.exists() {
        return Ok(server);
    }
    eprintln!("fetching Debian's {PACKAGE}");
    let work = folder.join(format!("fetch-{}", std::process::id()));
    fs::create_dir_all(&work)?;
    let result = unpack(&work, &server);
    fs::remove_dir_all(&work)?;
    result.with_context(|| format!("fetching {PACKAGE}"))?;
    Ok(server)
}

/// Downloads the package, unpacks it, and moves the server to its place.
fn unpack(work: &Path, server: &Path) -> Result<()> {
    if download(work).is_err() {
        // A fresh machine has no lists of packages yet.
        run(command("apt-get", &["update", "--quiet"]))?;
        download(work)?;
    }
    let package = fs::read_dir(work)?.next().context("expected a package in the folder, found none")??.path();
    run(command("dpkg-deb", &["--extract", &package.to_string_lossy(), &work.to_string_lossy()]))?;
    fs::rename(work.join(SERVER), server).with_context(|| format!("expected {SERVER} in the package"))
}

fn download(work: &Path) -> Result<()> {
    // The folder is the caller's alone, and not that of the user whom apt fetches as.
    let mut apt = command("apt-get", &["--option", "APT::Sandbox::User=", "--quiet", "download", PACKAGE]);
    apt.current_dir(work);
    run(apt)
}
