//! Rollouts, as the controllers of deployments and stateful sets do them.

use std::time::Duration;

use serde_json::Value;

use crate::manifests::name_of;
use crate::node::Node;

/// Starts all that the manifests ask for, and waits until it is ready.
pub(crate) fn deploy(node: &mut Node) {
    for workload in node.workloads() {
        for _ in 0..node.count(&workload) {
            node.start(&workload);
        }
    }
    node.wait("all pods are ready", |node| node.pods.iter().all(|pod| pod.ready.is_some()));
}

/// Replaces every pod of a workload, by its strategy. Returns when all of the old ones are gone.
pub(crate) fn roll(node: &mut Node, workload: &str) {
    let found =
        node.manifests.workloads().find(|known| name_of(known) == workload).expect("the workload").clone();
    let old: Vec<String> = node.of(workload).map(|pod| pod.name.clone()).collect();
    if found["kind"] == "StatefulSet" {
        roll_in_place(node, workload, &old);
    } else {
        roll_with_surge(node, workload, &found, old);
    }
}

/// From the last to the first: one goes, and comes again under its name.
fn roll_in_place(node: &mut Node, workload: &str, old: &[String]) {
    for name in old.iter().rev() {
        node.delete(name);
        node.wait("the old pod is gone", |node| node.pods.iter().all(|pod| pod.name != *name));
        assert_eq!(node.start(workload), *name);
        node.wait("the new pod is ready", |node| node.of(workload).all(|pod| pod.ready.is_some()));
    }
}

/// New ones as far as `maxSurge` lets more be there, old ones go as far as `maxUnavailable` lets fewer be available.
fn roll_with_surge(node: &mut Node, workload: &str, deployment: &Value, mut old: Vec<String>) {
    let rolling = &deployment["spec"]["strategy"]["rollingUpdate"];
    let bound = |field: &str| rolling[field].as_u64().expect("bounds of a rollout are numbers here") as usize;
    let (surge, away) = (bound("maxSurge"), bound("maxUnavailable"));
    let least = Duration::from_secs(deployment["spec"]["minReadySeconds"].as_u64().unwrap_or(0));
    let count = node.count(workload);
    let replaced = old.clone();
    node.wait(&format!("{workload} is rolled"), |node| {
        let there = node.of(workload).count();
        let new = there - old.len();
        if new < count && there < count + surge {
            node.start(workload);
        }
        let available = node.of(workload).filter(|pod| pod.is_available(least)).count();
        if !old.is_empty() && available > count - away {
            node.delete(&old.remove(0));
        }
        let is_new = old.is_empty() && available == count;
        is_new && node.pods.iter().all(|pod| !replaced.contains(&pod.name))
    });
}
