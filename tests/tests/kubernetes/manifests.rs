//! Manifests as `kubectl` renders them, held to the schemas, and ways through them.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// Every overlay, and the base itself.
pub(crate) const OVERLAYS: [&str; 8] =
    ["base", "dns", "cpu-demo", "gpu", "shared-weights", "autoscale", "keda", "mtls"];

/// Kinds whose pods run for good.
const WORKLOADS: [&str; 2] = ["Deployment", "StatefulSet"];

/// What one overlay renders to.
#[derive(Debug)]
pub(crate) struct Manifests {
    pub(crate) objects: Vec<Value>,
}

impl Manifests {
    /// Renders the overlay and holds each object to its schema.
    pub(crate) fn render(overlay: &str) -> Self {
        let folder = root().join("deploy/kubernetes").join(match overlay {
            "base" => "base".to_owned(),
            overlay => format!("overlays/{overlay}"),
        });
        let text = output(Command::new(tool("kubectl")).arg("kustomize").arg(&folder), "");
        Self { objects: parse(&text, &["--validate"]) }
    }

    pub(crate) fn of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.objects.iter().filter(move |object| object["kind"] == kind)
    }

    pub(crate) fn get(&self, kind: &str, name: &str) -> Option<&Value> {
        self.objects.iter().find(|object| object["kind"] == kind && name_of(object) == name)
    }

    /// Deployments and stateful sets.
    pub(crate) fn workloads(&self) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter(|object| WORKLOADS.iter().any(|kind| object["kind"] == *kind))
    }

    /// A value of a config map.
    pub(crate) fn configured(&self, map: &str, key: &str) -> Option<&str> {
        self.get("ConfigMap", map)?["data"][key].as_str()
    }

    /// The config map whose name begins so: a digest of what it holds stands behind.
    pub(crate) fn options(&self) -> &Value {
        let is_it = |object: &&Value| name_of(object).starts_with("baton-");
        &self.of("ConfigMap").find(is_it).expect("options of every process")["data"]
    }
}

/// Parses YAML with the program that also holds it to schemas.
pub(crate) fn parse(text: &str, arguments: &[&str]) -> Vec<Value> {
    let script = root().join("tests/kubernetes/manifests.py");
    let json = output(Command::new(tool("python")).arg(script).args(arguments), text);
    serde_json::from_str(&json).expect("the program prints JSON")
}

/// The workspace's folder.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace").to_owned()
}

/// A program of the environment that `cargo xtask fetch-kubernetes` makes.
fn tool(name: &str) -> PathBuf {
    let tool = root().join(".cache/kubernetes/bin").join(name);
    assert!(
        tool.exists(),
        "no {}: `cargo xtask test` gets it (`cargo xtask fetch-kubernetes` alone)",
        tool.display()
    );
    tool
}

fn output(command: &mut Command, input: &str) -> String {
    let shown = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{shown}: {error}"));
    // Small enough for the pipe, or read while it is written.
    child.stdin.take().expect("it is piped").write_all(input.as_bytes()).expect("the program reads");
    let output = child.wait_with_output().expect("the program ends");
    assert!(output.status.success(), "{shown}\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

pub(crate) fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// The pod that a workload makes.
pub(crate) fn pod_of(workload: &Value) -> &Value {
    &workload["spec"]["template"]
}

/// All containers of a pod; those that run before the others come first.
pub(crate) fn containers(pod: &Value) -> Vec<&Value> {
    let spec = &pod["spec"];
    items(&spec["initContainers"]).chain(items(&spec["containers"])).collect()
}

/// The elements of a list; none where there is no list.
pub(crate) fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// Key and value of each pair of a map of texts.
pub(crate) fn pairs(map: &Value) -> impl Iterator<Item = (&str, &str)> {
    map.as_object().into_iter().flatten().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)))
}

/// True when a selector takes what has these labels.
pub(crate) fn selects(selector: &Value, labels: &Value) -> bool {
    let all = pairs(&selector["matchLabels"]).all(|(key, value)| labels[key] == value);
    let each = items(&selector["matchExpressions"]).all(|wanted| {
        let found = &labels[wanted["key"].as_str().unwrap_or_default()];
        let is_listed = items(&wanted["values"]).any(|value| value == found);
        match wanted["operator"].as_str() {
            Some("In") => is_listed,
            Some("NotIn") => !is_listed,
            Some("Exists") => !found.is_null(),
            Some("DoesNotExist") => found.is_null(),
            operator => panic!("a selector's operator: {operator:?}"),
        }
    });
    all && each
}
