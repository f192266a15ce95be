//! What the pages say of the repository is so: the paths that they name are there, and so are the tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::process::{command, output};

/// What the last column of a table of tests is called.
const COLUMN: &str = "test";

/// The pages, from the root.
fn pages() -> Result<Vec<String>> {
    let listed = output(command("git", &["ls-files", "--cached", "--others", "--exclude-standard", "*.md"]))?;
    Ok(listed.lines().map(ToOwned::to_owned).collect())
}

/// Every path that a page names is there.
pub(super) fn paths(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    for page in pages()? {
        let text = fs::read_to_string(root.join(&page))?;
        let folder = Path::new(&page).parent().unwrap_or(Path::new(""));
        let quoted =
            quoted(&text).filter(|named| is_path(named)).map(|named| (named, root.join(folder_of(named))));
        let linked = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let linked = linked.map(|named| named.split('#').next().unwrap_or_default());
        let linked = linked.filter(|named| !named.is_empty() && !named.contains(':'));
        let linked = linked.map(|named| (named, root.join(folder).join(named)));
        for (named, path) in quoted.chain(linked) {
            if !path.exists() {
                findings.push(format!("{page}: names `{named}`, which is not there"));
            }
        }
    }
    Ok(())
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Whether a quoted word is a path of the repository.
fn is_path(named: &str) -> bool {
    let is_media_type = ["application/", "text/"].iter().any(|kind| named.starts_with(kind));
    // `target/` is made by building; what starts with a slash is a path of the API.
    let is_made = named.starts_with("target/") || named.starts_with('/');
    let is_word = !named.contains(|c: char| c.is_whitespace() || "{}<>[]()…:=,\"'|".contains(c));
    named.contains('/') && is_word && !is_media_type && !is_made
}

/// The path, or the folder of a path that stands for several files.
fn folder_of(named: &str) -> &Path {
    let path = Path::new(named);
    if named.contains('*') { path.parent().unwrap_or(path) } else { path }
}

/// Every test that a table of a page names is in one of the files that its section names.
pub(super) fn tests(root: &Path, sources: &[PathBuf], findings: &mut Vec<String>) -> Result<()> {
    let mut files: Vec<PathBuf> = sources.to_vec();
    let clients = "tests/clients/*.py";
    let clients =
        output(command("git", &["ls-files", "--cached", "--others", "--exclude-standard", clients]))?;
    files.extend(clients.lines().map(|line| root.join(line)));
    for page in pages()? {
        let text = fs::read_to_string(root.join(&page))?;
        for section in text.split("\n## ") {
            let names = named_tests(section);
            let homes: Vec<PathBuf> = homes(section).map(|named| root.join(named)).collect();
            let mut known = BTreeSet::new();
            for file in files.iter().filter(|file| homes.iter().any(|home| file.starts_with(home))) {
                known.extend(functions(&fs::read_to_string(file)?).map(ToOwned::to_owned));
            }
            let title = section.lines().next().unwrap_or_default();
            let missing: BTreeSet<_> = names.into_iter().filter(|name| !known.contains(*name)).collect();
            findings.extend(
                missing
                    .iter()
                    .map(|name| format!("{page}: {title}: no file named there has a test `{name}`")),
            );
        }
    }
    Ok(())
}

/// The files and folders with a section's tests: those that a paragraph beginning with `Tests:` names.
fn homes(section: &str) -> impl Iterator<Item = &str> {
    let paragraphs = section.split("\n\n").filter(|paragraph| paragraph.trim_start().starts_with("Tests: "));
    paragraphs.flat_map(quoted).filter(|named| is_path(named))
}

/// The names of the functions of a file in Rust or Python.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let line = line.trim_start();
        let line = line.strip_prefix("async ").unwrap_or(line);
        let rest = line.strip_prefix("fn ").or_else(|| line.strip_prefix("def "))?;
        rest.split_once('(').map(|(name, _)| name)
    })
}

/// The tests that the tables of a section name, in the last column of each row. A row without one is a finding too.
fn named_tests(section: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut in_table = false;
    for line in section.lines() {
        let Some(row) = line.strip_prefix('|').and_then(|row| row.trim_end().strip_suffix('|')) else {
            in_table = false;
            continue;
        };
        let cell = row.rsplit('|').next().unwrap_or_default().trim();
        if cell == COLUMN {
            in_table = true;
        } else if in_table && !cell.starts_with("---") {
            let count = names.len();
            names.extend(quoted(cell));
            if names.len() == count {
                names.push(row.trim());
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_from_what_else_is_quoted() {
        for path in ["docs/api.md", "gateway/src/dialect/", "engine/src/*.rs"] {
            assert!(is_path(path), "{path}");
        }
        for other in [
            "top_k",
            "/v2/health",
            "text/plain",
            "target/debug",
            "a / b",
            "/v2/{model}",
            "HF://a/b",
            "BATON_/x=",
        ] {
            assert!(!is_path(other), "{other}");
        }
        assert_eq!(folder_of("engine/src/*.rs"), Path::new("engine/src"));
    }

    #[test]
    fn a_table_names_its_tests_in_the_last_column() {
        let section = "A\n\n| field | test |\n|---|---|\n| `a` | `one`, `two` |\n| `b \\| c` | |\n\nText.\n\n\
                       | field | meaning |\n|---|---|\n| `d` | `three` |\n";
        assert_eq!(named_tests(section), ["one", "two", "`b \\| c` |"]);
    }

    #[test]
    fn a_section_says_where_its_tests_are() {
        let section = "A\n\nTests: `a/b.rs`, and\n`c/d`.\n\nSee `e/f.rs`.";
        assert_eq!(homes(section).collect::<Vec<_>>(), ["a/b.rs", "c/d"]);
    }

    #[test]
    fn functions_have_names_in_both_languages() {
        let text = "    async fn one() {\n    fn two(\ndef three(client):\n// a fn four()\n";
        assert_eq!(functions(text).collect::<Vec<_>>(), ["one", "two", "three"]);
    }
}
