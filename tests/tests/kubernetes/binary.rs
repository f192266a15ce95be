//! That the binary takes what the manifests give it: every flag, and every variable as an option that it has.

use std::collections::BTreeMap;
use std::process::Command;

use baton_tests::cluster::binary;
use serde_json::Value;

use crate::manifests::{Manifests, containers, name_of, pod_of};
use crate::pod::{self, Filled};

/// Every finding of one overlay.
pub(crate) fn check(manifests: &Manifests) -> Vec<String> {
    let mut found = Vec::new();
    for workload in manifests.workloads() {
        for container in containers(pod_of(workload)) {
            if container["image"].as_str().is_some_and(|image| image.starts_with("baton:")) {
                let what = format!("{}, container {}", name_of(workload), container["name"]);
                let filled = pod::fill(manifests, container, "baton-pod", "10.1.2.3");
                found.extend(
                    taken(manifests, container, filled)
                        .into_iter()
                        .map(|finding| format!("{what}: {finding}")),
                );
            }
        }
    }
    found
}

fn taken(manifests: &Manifests, container: &Value, mut filled: Filled) -> Vec<String> {
    let models = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(models.path().join("model.gguf"), "").expect("a file that stands for a model");
    for text in &mut filled.arguments {
        *text = text.replace("--model=/models", &format!("--model={}", models.path().display()));
    }
    let output = print_config(&filled);
    let mut found = Vec::new();
    let set: Vec<String> = filled
        .variables
        .keys()
        .filter_map(|name| name.strip_prefix("BATON_").map(str::to_lowercase))
        .chain(
            filled
                .arguments
                .iter()
                .filter_map(|text| Some(text.strip_prefix("--")?.split('=').next()?.replace('-', "_"))),
        )
        .filter(|option| option != "model")
        .collect();
    for option in set {
        if !output.contains_key(&option) {
            found.push(format!("{option} is no option of it: {output:?}"));
        }
    }
    // A request that may go on longer than a drain would be cut by it.
    let drain: f64 =
        manifests.options()["BATON_GRACE"].as_str().unwrap_or_default().parse().expect("seconds");
    if let Some(longest) = output.get("timeout_seconds").and_then(|text| text.parse::<f64>().ok())
        && longest >= drain
    {
        found.push(format!("a drain of {drain} s cuts requests of up to {longest} s"));
    }
    let asked: u64 = container["resources"]["limits"]["cpu"]
        .as_str()
        .map_or(0, |cores| cores.parse().expect("whole cores"));
    if let Some(threads) = output.get("threads").filter(|_| asked > 0)
        && threads != &asked.to_string()
    {
        found.push(format!("{threads} threads on {asked} cores"));
    }
    found
}

/// The options that the binary prints, or the one line by which it refuses.
fn print_config(filled: &Filled) -> BTreeMap<String, String> {
    let output = Command::new(binary())
        .args(&filled.arguments)
        .arg("--print-config")
        .env_clear()
        .envs(&filled.variables)
        .output()
        .expect("the binary starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let line = |line: &str| {
        let option = line.trim_start_matches("# ");
        let (name, value) = option.split_once(" = ").unwrap_or((option.trim_end_matches(": not shown"), ""));
        (name.to_owned(), value.trim_matches('"').to_owned())
    };
    let mut options: BTreeMap<_, _> = text.lines().rev().map(line).collect();
    if !output.status.success() {
        let refusal = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        options.insert(refusal, String::new());
    }
    options
}
