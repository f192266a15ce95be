//! Rules of the house that a compiler does not check. Each finding is a line: where, and what was expected.

mod pages;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::process::{command, output};

/// Which crates of the workspace each crate may depend on: the import table of ARCHITECTURE.md. Test-only
/// dependencies are free.
const MAY_IMPORT: [(&str, &[&str]); 15] = [
    ("proto", &[]),
    ("checkpoint", &["proto"]),
    ("node", &["proto"]),
    ("engine", &["proto", "checkpoint"]),
    ("worker", &["proto", "checkpoint", "engine", "node"]),
    ("prefill-worker", &["proto", "checkpoint", "engine", "node", "worker"]),
    ("decode-worker", &["proto", "checkpoint", "engine", "node", "worker"]),
    ("router", &["proto", "node"]),
    ("gateway", &["proto", "checkpoint", "node"]),
    (
        "baton",
        &["proto", "node", "worker", "prefill-worker", "decode-worker", "router", "gateway", "planner"],
    ),
    ("planner", &["proto", "router"]),
    ("baton-tests", &["proto"]),
    ("baton-fuzz", &["proto", "checkpoint", "gateway"]),
    ("xtask", &[]),
    ("protoc", &[]),
];

/// Crates that must never be linked, directly or not: by whom, whom, and why.
const NEVER_LINKS: [(&str, &[&str], &str); 4] = [
    ("engine", &["tonic", "prost", "tokio", "node", "hyper"], "the engine never awaits or opens a socket"),
    ("checkpoint", &["tonic", "prost", "tokio", "node"], "reading a model needs no network"),
    ("router", &["engine", "checkpoint", "worker"], "the router sees token ids, never models or KV"),
    ("gateway", &["engine", "worker", "router"], "the gateway sees text, never models or KV"),
];

/// Module names that say nothing.
const EMPTY_NAMES: [&str; 6] = ["utils", "util", "common", "helpers", "helper", "misc"];

/// The only places where `unsafe` may stand.
const UNSAFE_HOMES: [&str; 2] = ["engine/src/backend/", "checkpoint/src/map.rs"];

/// Words that the sources of a folder may not have, and why.
const FORBIDDEN_WORDS: [(&str, &[&str], &str); 2] = [
    (
        "engine/src/",
        &["std::time", "std::net", "std::env", "std::fs", "async "],
        "the engine has no clock, no socket, no environment, and never awaits",
    ),
    ("worker/src/", &["checkpoint::Text", "render_chat"], "only the gateway handles text"),
];

/// Longest a file may be, tests included.
const LINES_MAX: usize = 900;

/// Checks every rule; an error lists every finding.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut findings = Vec::new();
    imports(&mut findings)?;
    links(&mut findings)?;
    let sources = sources(root)?;
    for path in &sources {
        source(root, path, &mut findings)?;
    }
    dead_files(root, &sources, &mut findings)?;
    protos(root, &mut findings)?;
    kernels(root, &mut findings)?;
    pages::paths(root, &mut findings)?;
    pages::tests(root, &sources, &mut findings)?;
    if findings.is_empty() {
        println!("tidy: {} source files, nothing found", sources.len());
        return Ok(());
    }
    bail!("tidy found:\n{}", findings.join("\n"));
}

/// The import table, from the manifests.
fn imports(findings: &mut Vec<String>) -> Result<()> {
    let metadata = command("cargo", &["metadata", "--format-version", "1", "--no-deps", "--locked"]);
    let metadata: serde_json::Value = serde_json::from_str(&output(metadata)?)?;
    let none = Vec::new();
    let packages = metadata["packages"].as_array().unwrap_or(&none);
    let table: BTreeMap<_, _> = MAY_IMPORT.into_iter().collect();
    let names: BTreeSet<_> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(allowed) = table.get(name) else {
            findings.push(format!("{name}: not in the import table of xtask/src/tidy.rs"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap_or(&none) {
            let import = dependency["name"].as_str().unwrap_or_default();
            let test_only = dependency["kind"].as_str() == Some("dev");
            if names.contains(import) && !test_only && !allowed.contains(&import) {
                findings.push(format!("{name}: may not import {import}"));
            }
        }
    }
    Ok(())
}

/// What a crate links in the end, from `cargo tree`.
fn links(findings: &mut Vec<String>) -> Result<()> {
    for (package, never, why) in NEVER_LINKS {
        let arguments = ["tree", "--locked", "--package", package, "--edges", "normal", "--prefix", "none"];
        let tree = output(command("cargo", &arguments))?;
        let linked: BTreeSet<_> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
        for name in never.iter().filter(|name| linked.contains(*name)) {
            findings.push(format!("{package}: links {name}, but {why}"));
        }
    }
    Ok(())
}

/// Every Rust source file of the workspace.
fn sources(root: &Path) -> Result<Vec<PathBuf>> {
    let listed = output(command("git", &["ls-files", "--cached", "--others", "--exclude-standard", "*.rs"]))?;
    let mut paths: Vec<_> = listed.lines().map(|line| root.join(line)).filter(|path| path.exists()).collect();
    paths.sort();
    Ok(paths)
}

/// Rules of one file.
fn source(root: &Path, path: &Path, findings: &mut Vec<String>) -> Result<()> {
    let text = fs::read_to_string(path)?;
    let shown = path.strip_prefix(root)?.to_string_lossy().into_owned();
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    if EMPTY_NAMES.contains(&stem.as_str()) {
        findings.push(format!("{shown}: name the module after what it does"));
    }
    let lines = text.lines().count();
    if lines > LINES_MAX {
        findings
            .push(format!("{shown}: {lines} lines; look for the second idea in it (at most {LINES_MAX})"));
    }
    if !text.starts_with("//!") {
        findings.push(format!("{shown}: does not start with a `//!` comment that says what it is for"));
    }
    for (folder, words, why) in FORBIDDEN_WORDS {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let found = words.iter().find(|word| shown.starts_with(folder) && code.contains(*word));
        if let Some(word) = found {
            findings.push(format!("{shown}: has `{word}`, but {why}"));
        }
    }
    let unsafe_block = concat!("unsafe", " {");
    let at_home = UNSAFE_HOMES.iter().any(|home| shown.starts_with(home));
    if text.contains(unsafe_block) && !at_home {
        findings.push(format!("{shown}: unsafe outside {UNSAFE_HOMES:?}"));
    }
    Ok(())
}

/// Every file of kernels says what it computes and on which grid, has its launcher beside it, and is in the tests' stand-in.
fn kernels(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let stand_in = fs::read_to_string(root.join("tests/cuda/stand_in.cpp"))?;
    for entry in fs::read_dir(root.join("engine/src/backend/cuda"))? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        let (shown, text) = (path.strip_prefix(root)?.display(), fs::read_to_string(&path)?);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let launcher = fs::read_to_string(path.with_extension("rs")).unwrap_or_default();
        if !launcher.contains(&format!("include_str!(\"{name}\")")) {
            findings.push(format!("{shown}: no launcher beside it that includes it"));
        }
        if !text.starts_with("//") || !text.contains("Grid: ") {
            findings.push(format!("{shown}: does not begin with what it computes, on which `Grid: `"));
        }
        if !stand_in.contains(&format!("#include \"{name}\"")) {
            findings.push(format!("{shown}: not in tests/cuda/stand_in.cpp, so that no test runs it"));
        }
    }
    Ok(())
}

/// Every file of a `src` folder is somebody's module.
fn dead_files(root: &Path, sources: &[PathBuf], findings: &mut Vec<String>) -> Result<()> {
    for path in sources {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let Some(folder) = path.parent() else { continue };
        let inside_src = path.components().any(|part| part.as_os_str() == "src");
        if !inside_src || matches!(stem.as_str(), "lib" | "main") {
            continue;
        }
        // `a/b/mod.rs` is declared in `a`; `a/b.rs` in `a` as well.
        let (name, folder) = match (stem.as_str(), folder.parent()) {
            ("mod", Some(parent)) => {
                (folder.file_name().unwrap_or_default().to_string_lossy().into_owned(), parent)
            }
            _ => (stem, folder),
        };
        let folder_file = folder.with_extension("rs");
        let parents = [folder.join("mod.rs"), folder.join("lib.rs"), folder.join("main.rs"), folder_file];
        let declaration = format!("mod {name};");
        let declared = parents
            .iter()
            .any(|parent| fs::read_to_string(parent).is_ok_and(|text| text.contains(&declaration)));
        if !declared {
            findings
                .push(format!("{}: no parent declares `{declaration}`", path.strip_prefix(root)?.display()));
        }
    }
    Ok(())
}

/// Every field, value and call of a `.proto` file has a comment.
fn protos(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let listed =
        output(command("git", &["ls-files", "--cached", "--others", "--exclude-standard", "*.proto"]))?;
    for shown in listed.lines() {
        let text = fs::read_to_string(root.join(shown))?;
        let mut before = "";
        for (number, line) in text.lines().map(str::trim).enumerate() {
            let field = line.ends_with(';') && line.contains(" = ") && !line.starts_with("syntax");
            let named = field
                || ["message ", "enum ", "service ", "rpc ", "oneof "]
                    .iter()
                    .any(|word| line.starts_with(word));
            if named && !before.starts_with("//") {
                findings
                    .push(format!("{shown}:{}: needs a comment above it, with its unit: {line}", number + 1));
            }
            before = line;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_house_is_tidy() {
        check(&crate::process::root()).expect("the rules of the house hold");
    }
}
