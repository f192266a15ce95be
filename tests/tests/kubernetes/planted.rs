//! Faults that are planted into good manifests, each of which must be found.

use serde_json::{Value, json};

use crate::manifests::{Manifests, name_of};
use crate::{binary, edges, rules};

/// Where the first container of a workload is.
const CONTAINER: &str = "/spec/template/spec/containers/0";

/// A fault: of which object, at which place, what stands there then, and what must be found.
type Fault = (&'static str, &'static str, String, Value, &'static str);

fn faults() -> Vec<Fault> {
    let pod = |place: &str| format!("/spec/template/spec/{place}");
    let container = |place: &str| format!("{CONTAINER}/{place}");
    vec![
        (
            "Service",
            "gateway",
            "/spec/selector".into(),
            json!({"app.kubernetes.io/name": "batton"}),
            "leads to the pods of 0 workloads",
        ),
        ("Service", "router", "/spec/ports/0/port".into(), json!(9001), "its port \"grpc\" leads to none"),
        (
            "Service",
            "prefill",
            "/spec/ports/0/targetPort".into(),
            json!("http"),
            "its port \"grpc\" leads to none",
        ),
        ("NetworkPolicy", "gateway", "/spec/egress".into(), json!([]), "gateway must reach router:9000"),
        (
            "NetworkPolicy",
            "prefill",
            "/spec/ingress".into(),
            json!([{}]),
            "monitoring need not reach prefill:9100",
        ),
        ("NetworkPolicy", "decode", "/spec/ingress".into(), json!([{}]), "world need not reach decode:9102"),
        ("NetworkPolicy", "names", "/spec/egress".into(), json!([]), "gateway must reach names:53"),
        ("PodDisruptionBudget", "decode", "/spec/maxUnavailable".into(), json!(0), "lets no pod go"),
        (
            "Deployment",
            "decode",
            pod("terminationGracePeriodSeconds"),
            json!(600),
            "which preStop, drain and stop take",
        ),
        ("Deployment", "decode", pod("automountServiceAccountToken"), json!(true), "it mounts no token"),
        ("Deployment", "router", pod("enableServiceLinks"), json!(true), "services set no variables"),
        ("Deployment", "router", pod("securityContext/runAsUser"), json!(0), "it runs as nobody special"),
        ("Deployment", "prefill", pod("volumes"), json!([]), "names the volume models, which is not there"),
        (
            "Deployment",
            "prefill",
            "/spec/strategy/rollingUpdate/maxSurge".into(),
            json!(0),
            "a rollout can go on",
        ),
        ("Deployment", "gateway", container("image"), json!("baton:latest"), "has an image of a version"),
        (
            "Deployment",
            "gateway",
            container("args/1"),
            json!("--lisen=0.0.0.0:8000"),
            "unexpected argument '--lisen'",
        ),
        (
            "Deployment",
            "decode",
            container("env/1/name"),
            json!("BATON_ADVERTIZE"),
            "advertize is no option of it",
        ),
        (
            "Deployment",
            "decode",
            container("env/3"),
            json!({"name": "BATON_THREADS", "value": "3"}),
            "3 threads on 4 cores",
        ),
        (
            "Deployment",
            "gateway",
            container("securityContext/capabilities"),
            json!({}),
            "has no capabilities",
        ),
        (
            "Deployment",
            "gateway",
            container("readinessProbe/httpGet/port"),
            json!("http"),
            "asks the port metrics",
        ),
        (
            "Deployment",
            "gateway",
            container("envFrom/0/configMapRef/name"),
            json!("batton"),
            "names batton, which is not",
        ),
        (
            "Deployment",
            "gateway",
            container("args/1"),
            json!("--x=router.baton.svc:9001"),
            "told of router.baton.svc:9001",
        ),
    ]
}

/// Every fault that nothing found.
pub(crate) fn missed(manifests: &Manifests) -> Vec<String> {
    let mut missed = Vec::new();
    for (kind, name, place, value, expected) in faults() {
        let mut faulty = Manifests { objects: manifests.objects.clone() };
        let object =
            faulty.objects.iter_mut().find(|object| object["kind"] == kind && name_of(object) == name);
        let known = object.and_then(|object| object.pointer_mut(&place));
        *known.unwrap_or_else(|| panic!("{kind} {name} has {place}")) = value.clone();
        let mut found = [rules::check(&faulty), edges::check(&faulty)].concat();
        // A config map that is not there leaves nothing to start anything with.
        if !found.iter().any(|finding| finding.contains(expected)) && !place.contains("configMapRef") {
            found.extend(binary::check(&faulty));
        }
        if !found.iter().any(|finding| finding.contains(expected)) {
            missed.push(format!("{kind} {name}: {place} = {value}: expected {expected:?}, found {found:?}"));
        }
    }
    missed
}
