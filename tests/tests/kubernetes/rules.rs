//! What a schema cannot say: that names, selectors, ports and times of a whole fit together.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::manifests::{Manifests, containers, items, name_of, pairs, parse, pod_of, root, selects};

/// What a process takes to stop once its drain is over, seconds.
const STOP_SECONDS: f64 = 5.0;

/// Every finding of one overlay.
pub(crate) fn check(manifests: &Manifests) -> Vec<String> {
    let mut found = Vec::new();
    for workload in manifests.workloads() {
        workload_holds(manifests, workload, &mut found);
        for container in containers(pod_of(workload)) {
            let what = format!("{}, container {}", name_of(workload), container["name"]);
            secure(container, &what, &mut found);
            references(manifests, container, &what, &mut found);
            hosts(manifests, container, &what, &mut found);
        }
    }
    for service in manifests.of("Service") {
        service_leads_somewhere(manifests, service, &mut found);
    }
    for budget in manifests.of("PodDisruptionBudget") {
        budget_lets_pods_go(manifests, budget, &mut found);
    }
    for object in &manifests.objects {
        let is_of_namespace = object["metadata"]["namespace"] == "baton";
        if !is_of_namespace && object["kind"] != "Namespace" {
            found.push(format!("{} {} lies in no namespace", object["kind"], name_of(object)));
        }
    }
    found
}

fn workload_holds(manifests: &Manifests, workload: &Value, found: &mut Vec<String>) {
    let (name, pod) = (name_of(workload), pod_of(workload));
    let (labels, spec) = (&pod["metadata"]["labels"], &pod["spec"]);
    let mut must = |holds: bool, what: &str| {
        if !holds {
            found.push(format!("{name}: {what}"));
        }
    };
    must(selects(&workload["spec"]["selector"], labels), "its selector takes its own pods");
    let mut others = manifests.workloads().filter(|other| name_of(other) != name).map(pod_of);
    let is_alone = others.all(|other| !selects(&workload["spec"]["selector"], &other["metadata"]["labels"]));
    must(is_alone, "its selector takes no other's pods");
    let budgets =
        manifests.of("PodDisruptionBudget").filter(|budget| selects(&budget["spec"]["selector"], labels));
    must(budgets.count() == 1, "one budget bounds its disruptions");
    if let Some(service) = workload["spec"]["serviceName"].as_str() {
        must(manifests.get("Service", service).is_some(), "its service is there");
    }
    let account = spec["serviceAccountName"].as_str().and_then(|name| manifests.get("ServiceAccount", name));
    must(
        account.is_some_and(|account| account["automountServiceAccountToken"] == false),
        "its account has no token",
    );
    must(spec["automountServiceAccountToken"] == false, "it mounts no token");
    // The variables of a service called `baton` would be BATON_PORT and the like.
    must(spec["enableServiceLinks"] == false, "services set no variables");
    let security = &spec["securityContext"];
    must(
        security["runAsNonRoot"] == true && security["runAsUser"].as_u64() > Some(0),
        "it runs as nobody special",
    );
    must(security["seccompProfile"]["type"] == "RuntimeDefault", "its calls of the system are filtered");
    for constraint in items(&spec["topologySpreadConstraints"]) {
        must(selects(&constraint["labelSelector"], labels), "it is spread among its own pods");
    }
    let rolling = &workload["spec"]["strategy"]["rollingUpdate"];
    if workload["kind"] == "Deployment" {
        let moves = rolling["maxSurge"].as_u64() > Some(0) || rolling["maxUnavailable"].as_u64() > Some(0);
        must(moves, "a rollout can go on");
    }
    for container in items(&spec["containers"]) {
        let ports: Vec<_> = items(&container["ports"]).map(|port| &port["name"]).collect();
        for probe in ["livenessProbe", "readinessProbe"] {
            let port = &container[probe]["httpGet"]["port"];
            must(port == "metrics" && ports.contains(&port), &format!("its {probe} asks the port metrics"));
        }
        let sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"].as_f64();
        let grace = spec["terminationGracePeriodSeconds"].as_f64().unwrap_or(30.0);
        if container["image"].as_str().is_some_and(|image| image.starts_with("baton:")) {
            let drain: f64 =
                manifests.options()["BATON_GRACE"].as_str().unwrap_or("30").parse().expect("seconds");
            let needs = sleep.unwrap_or_default() + drain + STOP_SECONDS;
            must(sleep >= Some(2.0), "the cluster has time to learn that it goes");
            must(
                grace > needs,
                &format!("{grace} s are more than {needs} s, which preStop, drain and stop take"),
            );
        }
    }
}

/// The strictest of the pod security standards, and what a scheduler needs to know.
fn secure(container: &Value, what: &str, found: &mut Vec<String>) {
    let security = &container["securityContext"];
    let rules = [
        (security["allowPrivilegeEscalation"] == false, "gets no privileges"),
        (security["readOnlyRootFilesystem"] == true, "cannot write to its image"),
        (security["capabilities"] == json!({"drop": ["ALL"]}), "has no capabilities"),
        (container["resources"]["requests"]["cpu"].is_string(), "asks for a share of the CPU"),
        (container["resources"]["requests"]["memory"].is_string(), "asks for memory"),
        (container["resources"]["limits"]["memory"].is_string(), "has a limit of memory"),
        (
            container["image"]
                .as_str()
                .is_some_and(|image| image.contains(':') && !image.ends_with(":latest")),
            "has an image of a version",
        ),
    ];
    found.extend(rules.iter().filter(|(holds, _)| !holds).map(|(_, rule)| format!("{what}: {rule}")));
}

/// Config maps, secrets and volumes that a container names.
fn references(manifests: &Manifests, container: &Value, what: &str, found: &mut Vec<String>) {
    let mut must = |holds: bool, name: &str| {
        if !holds {
            found.push(format!("{what}: names {name}, which is not there"));
        }
    };
    for from in items(&container["envFrom"]) {
        let name = from["configMapRef"]["name"].as_str().unwrap_or_default();
        must(manifests.get("ConfigMap", name).is_some(), name);
    }
    for variable in items(&container["env"]) {
        let (map, secret) =
            (&variable["valueFrom"]["configMapKeyRef"], &variable["valueFrom"]["secretKeyRef"]);
        if let (Some(name), Some(key)) = (map["name"].as_str(), map["key"].as_str()) {
            must(
                map["optional"] == true || manifests.configured(name, key).is_some(),
                &format!("{key} of {name}"),
            );
        }
        if let Some(name) = secret["name"].as_str() {
            must(secret["optional"] == true, &format!("the secret {name}"));
        }
    }
    let owner = manifests
        .workloads()
        .find(|workload| containers(pod_of(workload)).iter().any(|other| std::ptr::eq(*other, container)))
        .expect("a container is somebody's");
    let volumes = &pod_of(owner)["spec"]["volumes"];
    let claimed = &owner["spec"]["volumeClaimTemplates"];
    for mount in items(&container["volumeMounts"]) {
        let name = mount["name"].as_str().unwrap_or_default();
        let is_claimed = items(claimed).any(|claim| name_of(claim) == name);
        must(
            is_claimed || items(volumes).any(|volume| volume["name"] == name),
            &format!("the volume {name}"),
        );
    }
    for volume in items(volumes) {
        if let Some(claim) = volume["persistentVolumeClaim"]["claimName"].as_str() {
            must(manifests.get("PersistentVolumeClaim", claim).is_some(), claim);
        }
        if let Some(secret) = volume["secret"]["secretName"].as_str() {
            let is_issued = manifests.of("Certificate").any(|issued| issued["spec"]["secretName"] == secret);
            must(is_issued, &format!("the secret {secret}"));
        }
    }
}

/// Every `HOST.baton.svc:PORT` that a container is told of is a service with that port, or a pod of one.
fn hosts(manifests: &Manifests, container: &Value, what: &str, found: &mut Vec<String>) {
    let maps = items(&container["envFrom"]).filter_map(|from| from["configMapRef"]["name"].as_str());
    let mapped = maps.filter_map(|name| manifests.get("ConfigMap", name)).flat_map(|map| pairs(&map["data"]));
    let said = items(&container["args"]).chain(items(&container["command"])).filter_map(Value::as_str);
    let set = items(&container["env"]).filter_map(|variable| variable["value"].as_str());
    for text in said.chain(set).chain(mapped.map(|(_, value)| value)) {
        for (before, after) in splits(text, ".baton.svc:") {
            let host = before.rsplit(['/', '=', ',', ':']).next().unwrap_or_default();
            let port: u64 =
                after.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default().parse().unwrap_or(0);
            let (pod, service) =
                host.split_once('.').map_or((None, host), |(pod, service)| (Some(pod), service));
            let known = manifests.get("Service", service);
            let has_port =
                |service: &Value| items(&service["spec"]["ports"]).any(|known| known["port"] == port);
            let has_pod = pod.is_none_or(|pod| pod.starts_with("$(") || is_pod_of(manifests, pod, service));
            if !known.is_some_and(has_port) || !has_pod {
                found.push(format!("{what}: is told of {host}.baton.svc:{port}, which is not there"));
            }
        }
    }
}

/// Text before and after each place where `middle` stands.
fn splits<'a>(text: &'a str, middle: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    text.match_indices(middle).map(move |(at, _)| (&text[..at], &text[at + middle.len()..]))
}

/// True when a stateful set of that service makes a pod of that name.
fn is_pod_of(manifests: &Manifests, pod: &str, service: &str) -> bool {
    manifests.of("StatefulSet").filter(|set| set["spec"]["serviceName"] == service).any(|set| {
        let count = set["spec"]["replicas"].as_u64().unwrap_or(1);
        (0..count).any(|index| pod == format!("{}-{index}", name_of(set)))
    })
}

fn service_leads_somewhere(manifests: &Manifests, service: &Value, found: &mut Vec<String>) {
    let name = name_of(service);
    let selector = json!({"matchLabels": service["spec"]["selector"]});
    let pods: Vec<_> = manifests
        .workloads()
        .map(pod_of)
        .filter(|pod| selects(&selector, &pod["metadata"]["labels"]))
        .collect();
    if pods.len() != 1 {
        found.push(format!("service {name}: leads to the pods of {} workloads, not of one", pods.len()));
    }
    for (pod, port) in
        pods.iter().flat_map(|pod| items(&service["spec"]["ports"]).map(move |port| (pod, port)))
    {
        let mut known = containers(pod).into_iter().flat_map(|container| items(&container["ports"]));
        let target = known.find(|known| known["name"] == port["targetPort"]);
        let is_same = target.is_some_and(|target| target["containerPort"] == port["port"]);
        // A name without an address of its own stands for pods, at whose own ports they are called.
        if target.is_none() || service["spec"]["clusterIP"] == "None" && !is_same {
            found.push(format!("service {name}: its port {} leads to none of the same number", port["name"]));
        }
    }
}

fn budget_lets_pods_go(manifests: &Manifests, budget: &Value, found: &mut Vec<String>) {
    let spec = &budget["spec"];
    let bounded: Vec<_> = manifests
        .workloads()
        .filter(|workload| selects(&spec["selector"], &pod_of(workload)["metadata"]["labels"]))
        .collect();
    let lets_go = |workload: &&Value| {
        // Where something else scales, there are two at least.
        let count = workload["spec"]["replicas"].as_u64().unwrap_or(2);
        let away = spec["maxUnavailable"].as_u64();
        away.unwrap_or_else(|| count.saturating_sub(spec["minAvailable"].as_u64().unwrap_or(count))) > 0
    };
    if bounded.len() != 1 || !bounded.iter().all(lets_go) {
        found.push(format!("budget {}: lets no pod go, or bounds none", name_of(budget)));
    }
}

/// Scalers of both kinds scale what is there, by metrics that somebody makes of series that Baton has.
pub(crate) fn scalers(autoscale: &Manifests, keda: &Manifests) -> Vec<String> {
    let mut found = Vec::new();
    let made = adapter_rules();
    let names: BTreeSet<&str> = made.iter().filter_map(|rule| rule["name"]["as"].as_str()).collect();
    for (manifests, kind) in [(autoscale, "HorizontalPodAutoscaler"), (keda, "ScaledObject")] {
        let mut scaled = BTreeSet::new();
        for scaler in manifests.of(kind) {
            let target = scaler["spec"]["scaleTargetRef"]["name"].as_str().unwrap_or_default();
            let deployment = manifests.get("Deployment", target);
            if deployment.is_none_or(|deployment| !deployment["spec"]["replicas"].is_null()) {
                found.push(format!("{kind} {target}: the deployment is not there, or sets its own number"));
            }
            scaled.insert(target);
            for metric in items(&scaler["spec"]["metrics"]) {
                let name = metric["pods"]["metric"]["name"].as_str().unwrap_or_default();
                if !names.contains(name) {
                    found.push(format!("{kind} {target}: nobody makes {name}"));
                }
            }
        }
        let pools = BTreeSet::from(["gateway", "router", "prefill", "decode"]);
        if scaled != pools {
            found.push(format!("{kind}: scales {scaled:?}, not each of {pools:?}"));
        }
    }
    let asked = autoscale.of("HorizontalPodAutoscaler").flat_map(|scaler| items(&scaler["spec"]["metrics"]));
    let used: BTreeSet<&str> = asked.filter_map(|metric| metric["pods"]["metric"]["name"].as_str()).collect();
    found.extend(names.difference(&used).map(|name| format!("{name} is made and nobody asks for it")));
    found
}

/// What the chart of prometheus-adapter is told to make.
pub(crate) fn adapter_rules() -> Vec<Value> {
    let file = root().join("deploy/kubernetes/overlays/autoscale/adapter-values.yaml");
    let text = std::fs::read_to_string(file).expect("the adapter's values");
    items(&parse(&text, &[])[0]["rules"]["custom"]).cloned().collect()
}

/// Every series of Baton that a scaler reads.
pub(crate) fn series(autoscale: &Manifests, keda: &Manifests) -> BTreeSet<String> {
    let rules = adapter_rules();
    let of_rules = rules.iter().filter_map(|rule| rule["metricsQuery"].as_str());
    let triggers = keda.of("ScaledObject").flat_map(|scaler| items(&scaler["spec"]["triggers"]));
    let of_triggers = triggers.filter_map(|trigger| trigger["metadata"]["query"].as_str());
    assert!(autoscale.of("HorizontalPodAutoscaler").count() > 0, "there is something to scale");
    of_rules.chain(of_triggers).flat_map(series_of).collect()
}

fn series_of(query: &str) -> Vec<String> {
    let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("baton_")).map(str::to_owned).collect()
}
