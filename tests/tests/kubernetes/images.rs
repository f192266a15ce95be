//! The files that images are made by: what they copy is there, what they start is what the workspace builds, and they run
//! as nobody special.

use std::fs;

use crate::manifests::{Manifests, containers, pod_of, root};

/// Every such file, and what ends the tag of its image.
const FILES: [(&str, &str); 2] = [("Dockerfile", ""), ("Dockerfile.cuda", "-cuda")];
/// Instructions that there are.
const KNOWN: [&str; 17] = [
    "ADD",
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "ONBUILD",
    "RUN",
    "SHELL",
    "STOPSIGNAL",
    "USER",
    "VOLUME",
    "WORKDIR",
];

/// One stage of a file: its base, its name, and its instructions, each with what it says.
#[derive(Debug, Default)]
struct Stage {
    base: String,
    name: String,
    lines: Vec<(String, String)>,
}

impl Stage {
    fn all<'a>(&'a self, instruction: &'a str) -> impl Iterator<Item = &'a str> {
        self.lines.iter().filter(move |(known, _)| known == instruction).map(|(_, text)| text.as_str())
    }

    fn last(&self, instruction: &str) -> Option<&str> {
        let (_, text) = self.lines.iter().rfind(|(known, _)| known == instruction)?;
        Some(text)
    }
}

/// The program that the image starts, where it lies in the image.
pub(crate) fn entry_point() -> String {
    let stages = stages(FILES[0].0);
    let last = stages.last().expect("a file has stages");
    let words: Vec<String> =
        serde_json::from_str(last.last("ENTRYPOINT").expect("an entry point")).expect("a list");
    assert_eq!(words.len(), 1, "the entry point is a program alone, and arguments follow it");
    words.into_iter().next().unwrap_or_default()
}

/// Every finding.
pub(crate) fn check(manifests: &Manifests) -> Vec<String> {
    let mut found = Vec::new();
    for (file, _) in FILES {
        found.extend(of_file(file).into_iter().map(|finding| format!("{file}: {finding}")));
    }
    let version = setting("Cargo.toml", "version");
    let tags: Vec<String> = FILES.iter().map(|(_, ending)| format!("baton:{version}{ending}")).collect();
    for workload in manifests.workloads() {
        for container in containers(pod_of(workload)) {
            let image = container["image"].as_str().unwrap_or_default();
            if !image.contains('/') && !tags.iter().any(|tag| tag == image) {
                found.push(format!("{image} is none of the images {tags:?}"));
            }
        }
    }
    let ignored = fs::read_to_string(root().join(".dockerignore")).unwrap_or_default();
    for folder in ["target", ".cache", ".git"] {
        if !ignored.lines().any(|line| line.trim_matches('/') == folder) {
            found.push(format!(".dockerignore: {folder} would be sent to every build"));
        }
    }
    found
}

fn of_file(file: &str) -> Vec<String> {
    let mut found = Vec::new();
    let stages = stages(file);
    let mut must = |holds: bool, what: String| {
        if !holds {
            found.push(what);
        }
    };
    let wanted = setting("Cargo.toml", "rust-version");
    let bin = setting("deploy/local/Cargo.toml", "name");
    for (index, stage) in stages.iter().enumerate() {
        let is_stage = stages[..index].iter().any(|before| before.name == stage.base);
        let (image, tag) = stage.base.rsplit_once(':').unwrap_or((&stage.base, ""));
        must(is_stage || !tag.is_empty() && tag != "latest", format!("{} has no tag", stage.base));
        if image == "rust" {
            must(
                tag.starts_with(&wanted),
                format!("{} is not of Rust {wanted}, which the workspace wants", stage.base),
            );
        }
        for (instruction, text) in &stage.lines {
            must(KNOWN.contains(&instruction.as_str()), format!("{instruction} is no instruction"));
            must(instruction != "ADD", "files are copied, not added".to_owned());
            must(!(instruction == "RUN" && text.contains("sudo")), "sudo".to_owned());
            if ["ENTRYPOINT", "CMD"].contains(&instruction.as_str()) {
                let is_list = serde_json::from_str::<Vec<String>>(text).is_ok();
                must(
                    is_list,
                    format!("{instruction} {text} would be run by a shell, which no signal passes"),
                );
            }
        }
        for copy in stage.all("COPY") {
            let from = copy.split_whitespace().find_map(|word| word.strip_prefix("--from="));
            let paths: Vec<&str> = copy.split_whitespace().filter(|word| !word.starts_with("--")).collect();
            for source in paths.iter().take(paths.len() - 1) {
                let is_there = match from {
                    None => root().join(source).exists(),
                    Some(name) => {
                        stages[..index].iter().any(|before| before.name == name && makes(before, source))
                    }
                };
                must(is_there, format!("copies {source}, which is not there"));
            }
        }
    }
    let last = stages.last().expect("a file has stages");
    let user = last.last("USER").unwrap_or_default();
    let is_nobody = user.split(':').all(|id| id.parse::<u32>().is_ok_and(|id| id > 0));
    must(is_nobody, format!("runs as {user:?}, not as a number that is nobody special"));
    let entry: Vec<String> =
        last.last("ENTRYPOINT").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let entry = entry.first().cloned().unwrap_or_default();
    let copied = last.all("COPY").filter_map(|copy| copy.split_whitespace().last()).any(|to| to == entry);
    must(copied, format!("starts {entry:?}, which nothing was copied to"));
    must(entry.rsplit('/').next() == Some(&bin), format!("starts {entry:?}, and the binary is {bin}"));
    for label in ["title", "description", "licenses", "version"] {
        let name = format!("org.opencontainers.image.{label}=");
        must(last.all("LABEL").any(|labels| labels.contains(&name)), format!("has no label {name}"));
    }
    found
}

/// Whether a stage of a build makes a file: it is copied out of what cargo builds by a profile that there is.
fn makes(stage: &Stage, path: &str) -> bool {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("the workspace's manifest");
    stage.all("RUN").any(|run| {
        let word_after =
            |flag: &str| run.split_whitespace().skip_while(|word| *word != flag).nth(1).unwrap_or_default();
        let profile = word_after("--profile");
        let bin = setting("deploy/local/Cargo.toml", "name");
        let is_built = word_after("--package") == bin && manifest.contains(&format!("[profile.{profile}]"));
        is_built && run.contains("--locked") && run.contains(&format!("cp target/{profile}/{bin} {path}"))
    })
}

/// The first value of that name in a manifest.
fn setting(file: &str, name: &str) -> String {
    let text = fs::read_to_string(root().join(file)).expect("a manifest");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix('='));
    line.unwrap_or_else(|| panic!("{name} in {file}")).trim().trim_matches('"').to_owned()
}

fn stages(file: &str) -> Vec<Stage> {
    let text =
        fs::read_to_string(root().join("deploy/docker").join(file)).expect("a file that an image is made by");
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let joined = lines.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    let mut stages: Vec<Stage> = Vec::new();
    for line in joined.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (instruction, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        if instruction == "FROM" {
            let words: Vec<&str> = rest.split_whitespace().collect();
            let name = words.iter().skip_while(|word| !word.eq_ignore_ascii_case("as")).nth(1);
            let name = name.map(ToString::to_string).unwrap_or_default();
            stages.push(Stage { base: words[0].to_owned(), name, lines: Vec::new() });
        } else if let Some(stage) = stages.last_mut() {
            stage.lines.push((instruction.to_owned(), rest.trim().to_owned()));
        }
    }
    stages
}
