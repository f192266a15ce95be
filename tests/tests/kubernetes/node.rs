//! A node, and what a cluster does around it: services get the addresses of pods that are ready, names are told to all pods,
//! and both come a moment after what they tell of.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::manifests::{Manifests, items, name_of, selects};
use crate::pod::{Machine, Pod};

/// How long the cluster takes to tell of a change.
const LAG: Duration = Duration::from_millis(700);
/// How often what is due is looked for.
const TICK: Duration = Duration::from_millis(50);
/// Bytes of the file of names: it is always written as a whole, so that nobody reads half of it.
const HOSTS_BYTES: usize = 4096;
/// Longest that anything may take that a test waits for.
const PATIENCE: Duration = Duration::from_mins(2);

/// Addresses by service.
type Endpoints = BTreeMap<String, Vec<String>>;

/// Where clients find services.
pub(crate) type Published = Arc<Mutex<Endpoints>>;

/// A node with all pods.
pub(crate) struct Node {
    pub(crate) manifests: Manifests,
    machine: Machine,
    pub(crate) pods: Vec<Pod>,
    /// What pods that are gone left behind.
    pub(crate) gone: Vec<Pod>,
    made: u8,
    /// Names from outside of the cluster.
    outside: Vec<(String, String)>,
    network: u8,
    /// What is on its way to who asks.
    coming: VecDeque<(Instant, Endpoints)>,
    pub(crate) published: Published,
}

impl Node {
    /// A node without pods. Its addresses begin with 127 and the number of the network.
    pub(crate) fn new(
        manifests: Manifests,
        machine: Machine,
        network: u8,
        outside: Vec<(String, String)>,
    ) -> Self {
        fs::write(machine.hosts(), vec![b'\n'; HOSTS_BYTES]).expect("a file of names");
        let node = Self {
            manifests,
            machine,
            pods: Vec::new(),
            gone: Vec::new(),
            made: 0,
            outside,
            network,
            // Nobody is named at first: what the first look shows is news like any other.
            coming: VecDeque::from([(Instant::now(), Endpoints::new())]),
            published: Published::default(),
        };
        node.write_hosts(&Endpoints::new());
        node
    }

    /// Starts a pod of a workload; a stateful set's has the name of its place.
    pub(crate) fn start(&mut self, workload: &str) -> String {
        self.made += 1;
        let found = self.manifests.workloads().find(|known| name_of(known) == workload);
        let found = found.unwrap_or_else(|| panic!("a workload {workload}"));
        let name = match found["kind"].as_str() {
            Some("StatefulSet") => {
                let taken = |name: &String| self.pods.iter().any(|pod| pod.name == *name);
                let mut names = (0..).map(|index| format!("{workload}-{index}"));
                names.find(|name| !taken(name)).expect("there is always a place")
            }
            _ => format!("{workload}-{}", self.made),
        };
        let address = format!("127.{}.0.{}", self.network, self.made);
        self.pods.push(Pod::start(&self.machine, &self.manifests, found, (name.clone(), address)));
        name
    }

    /// Tells a pod to go.
    pub(crate) fn delete(&mut self, name: &str) {
        let pod = self.pods.iter_mut().find(|pod| pod.name == name && !pod.is_going());
        pod.unwrap_or_else(|| panic!("a pod {name}")).delete();
    }

    /// The pods of a workload that were not told to go.
    pub(crate) fn of<'a>(&'a self, workload: &'a str) -> impl Iterator<Item = &'a Pod> {
        self.pods.iter().filter(move |pod| pod.owner == workload && !pod.is_going())
    }

    /// Does what is due until that is so.
    pub(crate) fn wait(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            assert!(start.elapsed() < PATIENCE, "{what} within {PATIENCE:?}\n{}", self.logs());
            self.tick();
            std::thread::sleep(TICK);
        }
    }

    /// Does what is due.
    pub(crate) fn tick(&mut self) {
        for pod in &mut self.pods {
            pod.tick();
        }
        let gone = self.pods.extract_if(.., |pod| pod.is_gone());
        self.gone.extend(gone);
        let now = self.endpoints();
        if self.coming.back().map(|(_, last)| last) != Some(&now) {
            self.coming.push_back((Instant::now(), now));
        }
        while self.coming.len() > 1 && self.coming[1].0.elapsed() >= LAG {
            self.coming.pop_front();
            let endpoints = self.coming[0].1.clone();
            self.write_hosts(&endpoints);
            *self.published.lock().expect("nobody panics while it is held") = endpoints;
        }
    }

    /// The log of every pod, for a failure's message.
    pub(crate) fn logs(&self) -> String {
        let logs = self.gone.iter().chain(&self.pods).map(|pod| {
            let log = pod.log();
            let kept = log.len().saturating_sub(3000);
            format!("── {} {}\n{}", pod.name, pod.address, log.get(kept..).unwrap_or(&log))
        });
        logs.collect::<Vec<_>>().join("\n")
    }

    /// Which addresses each service stands for.
    fn endpoints(&self) -> Endpoints {
        let services = self.manifests.of("Service").map(|service| {
            let addresses = self.selected(service).map(|pod| pod.address.clone()).collect();
            (name_of(service).to_owned(), addresses)
        });
        services.collect()
    }

    fn selected<'a>(&'a self, service: &'a Value) -> impl Iterator<Item = &'a Pod> {
        let selector = json!({"matchLabels": service["spec"]["selector"]});
        let all = service["spec"]["publishNotReadyAddresses"] == true;
        self.pods.iter().filter(move |pod| {
            let is_told = all || pod.ready.is_some() && !pod.is_going();
            is_told && selects(&selector, &pod.template["metadata"]["labels"])
        })
    }

    /// Tells all pods the names: of services without an address of their own, of pods that have one, and from outside.
    fn write_hosts(&self, endpoints: &Endpoints) {
        let mut text = String::new();
        for (address, name) in &self.outside {
            let _ = writeln!(text, "{address} {name}");
        }
        for (service, addresses) in endpoints {
            for address in addresses {
                let _ = writeln!(text, "{address} {service}.baton.svc");
                let pod = self.pods.iter().find(|pod| pod.address == *address);
                if let Some(pod) = pod.filter(|pod| self.is_stateful(&pod.owner)) {
                    let _ = writeln!(text, "{address} {}.{service}.baton.svc", pod.name);
                }
            }
        }
        assert!(text.len() <= HOSTS_BYTES, "names fit into {HOSTS_BYTES} bytes");
        let padded = format!("{text:\n<HOSTS_BYTES$}");
        let file: File =
            OpenOptions::new().write(true).open(self.machine.hosts()).expect("the file of names");
        file.write_all_at(padded.as_bytes(), 0).expect("the file of names can be written");
    }

    fn is_stateful(&self, workload: &str) -> bool {
        self.manifests.get("StatefulSet", workload).is_some()
    }

    /// How many pods a workload shall have.
    pub(crate) fn count(&self, workload: &str) -> usize {
        let found = self.manifests.workloads().find(|known| name_of(known) == workload);
        found.and_then(|found| found["spec"]["replicas"].as_u64()).unwrap_or(1) as usize
    }

    /// The workloads, in the order in which a rollout takes them.
    pub(crate) fn workloads(&self) -> Vec<String> {
        let mut names: Vec<_> =
            self.manifests.workloads().map(|workload| name_of(workload).to_owned()).collect();
        names.sort();
        names
    }

    /// The port of a pod that has that name.
    pub(crate) fn port(pod: &Pod, name: &str) -> u64 {
        let containers = items(&pod.template["spec"]["containers"]);
        let mut ports = containers.flat_map(|container| items(&container["ports"]));
        let port = ports.find(|port| port["name"] == name).expect("a port of that name");
        port["containerPort"].as_u64().expect("a port has a number")
    }
}
