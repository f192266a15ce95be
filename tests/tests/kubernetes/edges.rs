//! Network policies: exactly those may talk who must.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::manifests::{Manifests, containers, items, pairs, pod_of, selects};

/// Who calls whom, at which port: gateways ask routers and take the tokenizer from any worker, routers ask workers, decode
/// workers fetch KV from those that hold it.
const CALLS: [(&str, &str, u64); 7] = [
    ("gateway", "router", 9000),
    ("gateway", "prefill", 9100),
    ("gateway", "decode", 9100),
    ("router", "prefill", 9100),
    ("router", "decode", 9100),
    ("decode", "prefill", 9100),
    ("decode", "decode", 9100),
];
/// Who registers at etcd.
const REGISTERED: [&str; 4] = ["gateway", "router", "prefill", "decode"];

/// Somebody at one end of a connection.
#[derive(Clone, Copy)]
enum Peer<'a> {
    /// A pod of a workload.
    Pod(&'a Value),
    /// A pod of another namespace, which has this name, and its labels.
    Elsewhere(&'a str, &'a Value),
    /// An address outside of the cluster.
    World,
}

/// Every finding of one overlay.
pub(crate) fn check(manifests: &Manifests) -> Vec<String> {
    let pods: Vec<(&str, &Value)> = manifests
        .workloads()
        .map(|workload| (crate::manifests::name_of(workload), pod_of(workload)))
        .collect();
    let mut expected: BTreeSet<(String, String, u64)> = BTreeSet::new();
    let mut expect =
        |from: &str, to: &str, port: u64| expected.insert((from.to_owned(), to.to_owned(), port));
    for (from, to, port) in CALLS {
        expect(from, to, port);
    }
    if manifests.get("StatefulSet", "etcd").is_some() {
        for from in REGISTERED {
            expect(from, "etcd", 2379);
        }
        expect("etcd", "etcd", 2379);
        expect("etcd", "etcd", 2380);
    }
    for (to, pod) in &pods {
        for port in ports(pod) {
            // What everybody may reach, those in other namespaces may as well.
            if *to == "gateway" && ["http", "grpc"].contains(&port.0) {
                for from in ["world", "monitoring", "names"] {
                    expect(from, to, port.1);
                }
            }
            if port.0 == "metrics" {
                expect("monitoring", to, port.1);
            }
        }
    }
    for worker in ["prefill", "decode"] {
        expect(worker, "world", 443);
    }
    for (from, _) in &pods {
        expect(from, "names", 53);
    }
    let allowed = allowed(manifests, &pods);
    let missing =
        expected.difference(&allowed).map(|(from, to, port)| format!("{from} must reach {to}:{port}"));
    let beyond =
        allowed.difference(&expected).map(|(from, to, port)| format!("{from} need not reach {to}:{port}"));
    missing.chain(beyond).collect()
}

/// Every connection that the policies allow.
fn allowed(manifests: &Manifests, pods: &[(&str, &Value)]) -> BTreeSet<(String, String, u64)> {
    let names = serde_json::json!({"k8s-app": "kube-dns"});
    let nothing = serde_json::json!({});
    let mut ends: Vec<(&str, Peer<'_>)> = pods.iter().map(|(name, pod)| (*name, Peer::Pod(pod))).collect();
    ends.push(("monitoring", Peer::Elsewhere("monitoring", &nothing)));
    ends.push(("names", Peer::Elsewhere("kube-system", &names)));
    ends.push(("world", Peer::World));
    let all_ports: BTreeSet<u64> =
        pods.iter().flat_map(|(_, pod)| ports(pod)).map(|(_, port)| port).chain([53, 80, 443]).collect();
    let mut allowed = BTreeSet::new();
    for (from, source) in &ends {
        for (to, target) in &ends {
            for &port in &all_ports {
                let is_ours = matches!(source, Peer::Pod(_)) || matches!(target, Peer::Pod(_));
                let is_there = match target {
                    Peer::Pod(pod) => ports(pod).iter().any(|(_, known)| *known == port),
                    Peer::Elsewhere(namespace, _) => *namespace == "kube-system" && port == 53,
                    Peer::World => true,
                };
                if is_ours
                    && is_there
                    && may(manifests, *source, "egress", *target, port, *target)
                    && may(manifests, *target, "ingress", *source, port, *target)
                {
                    allowed.insert(((*from).to_owned(), (*to).to_owned(), port));
                }
            }
        }
    }
    allowed
}

/// Whether `of` may have a connection of that direction with `other`, at a port of `target`.
fn may(
    manifests: &Manifests,
    of: Peer<'_>,
    direction: &str,
    other: Peer<'_>,
    port: u64,
    target: Peer<'_>,
) -> bool {
    // Policies of this namespace say nothing of pods elsewhere.
    let Peer::Pod(pod) = of else { return true };
    let labels = &pod["metadata"]["labels"];
    let kind = if direction == "egress" { "Egress" } else { "Ingress" };
    let policies = manifests.of("NetworkPolicy").map(|policy| &policy["spec"]);
    let policies: Vec<_> = policies
        .filter(|policy| selects(&policy["podSelector"], labels))
        .filter(|policy| items(&policy["policyTypes"]).any(|known| known == kind))
        .collect();
    let side = if direction == "egress" { "to" } else { "from" };
    policies.is_empty()
        || policies.iter().flat_map(|policy| items(&policy[direction])).any(|rule| {
            let is_port = rule["ports"].is_null()
                || items(&rule["ports"]).any(|known| is_port(&known["port"], port, target));
            let is_peer = rule[side].is_null() || items(&rule[side]).any(|known| is_peer(known, other));
            is_port && is_peer
        })
}

fn is_port(rule: &Value, port: u64, target: Peer<'_>) -> bool {
    match (rule.as_str(), target) {
        (None, _) => rule.is_null() || *rule == port,
        (Some(name), Peer::Pod(pod)) => ports(pod).contains(&(name, port)),
        (Some(_), _) => false,
    }
}

fn is_peer(rule: &Value, peer: Peer<'_>) -> bool {
    let (namespace, pod) = (&rule["namespaceSelector"], &rule["podSelector"]);
    match peer {
        Peer::World => !rule["ipBlock"].is_null(),
        Peer::Pod(template) => {
            // A pod of the cluster has an address too, but at ports of its own none that a block here is meant for.
            namespace.is_null() && !pod.is_null() && selects(pod, &template["metadata"]["labels"])
        }
        Peer::Elsewhere(name, labels) => {
            let named = pairs(&namespace["matchLabels"])
                .all(|(key, value)| key == "kubernetes.io/metadata.name" && value == name);
            !namespace.is_null() && named && (pod.is_null() || selects(pod, labels))
        }
    }
}

/// Names and numbers of a pod's ports.
fn ports(pod: &Value) -> Vec<(&str, u64)> {
    let ports = containers(pod).into_iter().flat_map(|container| items(&container["ports"]));
    ports.filter_map(|port| Some((port["name"].as_str()?, port["containerPort"].as_u64()?))).collect()
}
