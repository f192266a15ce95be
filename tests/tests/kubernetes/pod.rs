//! A pod as a kubelet runs it: init containers, then containers, each with its own root that it cannot write to, as nobody
//! special, with its volumes, variables and probes; in the end preStop, SIGTERM, and SIGKILL after the grace period.
//!
//! Of what the manifests say, one thing is changed: all pods share this machine's network, so `0.0.0.0` is the pod's own
//! address of 127.0.0.0/8 in what they listen at.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::manifests::{Manifests, items, pairs};

/// What starts a container: sees to its root, and becomes its process, in a mount namespace of its own.
const START: &str = r#"
set -eu
root=$1 binary=$2 binds=$3
shift 3
mount -t tmpfs -o size=1m,mode=755 tmpfs "$root"
mkdir -p "$root/usr/local/bin" "$root/usr/lib" "$root/etc/ssl/certs" "$root/proc" "$root/dev"
mount --rbind /usr/lib "$root/usr/lib"
for folder in lib lib64; do
  if [ -d "/usr/$folder" ]; then
    mkdir -p "$root/usr/$folder"
    mountpoint -q "$root/usr/$folder" || mount --rbind "/usr/$folder" "$root/usr/$folder"
  fi
  ln -s "usr/$folder" "$root/$folder"
done
mount --rbind /proc "$root/proc"
touch "$root/etc/hosts" "$root/etc/ssl/certs/ca-certificates.crt" "$root$binary"
echo 'hosts: files' > "$root/etc/nsswitch.conf"
echo 'multi on' > "$root/etc/host.conf"
for device in null urandom; do touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
mount --bind "$HOSTS" "$root/etc/hosts"
mount --bind "$AUTHORITIES" "$root/etc/ssl/certs/ca-certificates.crt"
mount --bind "$IMAGE_BINARY" "$root$binary"
IFS=';'
for bind in $binds; do
  from=${bind%%=*} rest=${bind#*=}
  at=${rest%=*} mode=${rest##*=}
  mkdir -p "$root$at"
  mount --bind "$from" "$root$at"
  mount -o "remount,bind,$mode" "$root$at"
done
unset IFS
mount -o remount,ro "$root"
user=$RUN_AS
unset IMAGE_BINARY HOSTS AUTHORITIES RUN_AS
exec setpriv --no-new-privs chroot --userspec="$user:$user" --groups="$user" "$root" "$@"
"#;

/// What a container is started with, filled in as a kubelet does.
#[derive(Clone, Debug, Default)]
pub(crate) struct Filled {
    pub(crate) command: Vec<String>,
    pub(crate) arguments: Vec<String>,
    pub(crate) variables: BTreeMap<String, String>,
}

/// Fills in what a container names: config maps, its pod's name and address, its own resources, and `$(NAME)`.
pub(crate) fn fill(manifests: &Manifests, container: &Value, pod: &str, address: &str) -> Filled {
    let mut variables = BTreeMap::new();
    for from in items(&container["envFrom"]) {
        let name = from["configMapRef"]["name"].as_str().unwrap_or_default();
        let map = manifests.get("ConfigMap", name).unwrap_or_else(|| panic!("no config map {name}"));
        variables.extend(pairs(&map["data"]).map(|(key, value)| (key.to_owned(), value.to_owned())));
    }
    for variable in items(&container["env"]) {
        let name = variable["name"].as_str().expect("a variable has a name");
        let from = &variable["valueFrom"];
        let map = &from["configMapKeyRef"];
        let value = match (variable["value"].as_str(), from["fieldRef"]["fieldPath"].as_str()) {
            (Some(value), _) => Some(expand(value, &variables)),
            (None, Some("status.podIP")) => Some(address.to_owned()),
            (None, Some("metadata.name")) => Some(pod.to_owned()),
            (None, Some(path)) => panic!("a field that is not known: {path}"),
            (None, None) if map.is_object() => {
                let (map, key) =
                    (map["name"].as_str().unwrap_or_default(), map["key"].as_str().unwrap_or_default());
                manifests.configured(map, key).map(str::to_owned)
            }
            (None, None) if from["resourceFieldRef"]["resource"] == "limits.cpu" => {
                container["resources"]["limits"]["cpu"].as_str().map(str::to_owned)
            }
            // A secret that may be missing.
            (None, None) => None,
        };
        variables.extend(value.map(|value| (name.to_owned(), value)));
    }
    let all =
        |list: &Value| items(list).filter_map(Value::as_str).map(|text| expand(text, &variables)).collect();
    Filled { command: all(&container["command"]), arguments: all(&container["args"]), variables }
}

fn expand(text: &str, variables: &BTreeMap<String, String>) -> String {
    variables.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("$({name})"), value))
}

/// What all pods of a node share.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// Where pods have their folders.
    pub(crate) folder: PathBuf,
    /// The authorities that images trust, as a PEM file.
    pub(crate) authorities: PathBuf,
    /// By what an image's name begins with: the program that it holds here, where it lies in the image, and whether it is
    /// what the image starts by itself.
    pub(crate) images: Vec<(&'static str, PathBuf, String)>,
}

impl Machine {
    /// The file of names and addresses that every pod has.
    pub(crate) fn hosts(&self) -> PathBuf {
        self.folder.join("hosts")
    }
}

/// How far a pod is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Its init container of that number runs.
    Init(usize),
    /// Its containers run.
    Running,
    /// It was told to go, at that time; SIGTERM was sent, or preStop is under way.
    Going { since: Instant, told: bool },
    /// Nothing of it is left.
    Gone,
}

/// How a probe is due, and what came of the last ones.
#[derive(Clone, Debug, Default)]
struct Probe {
    asked: Option<Instant>,
    failures: u64,
}

/// A pod.
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) owner: String,
    /// The template that it was made of.
    pub(crate) template: Value,
    phase: Phase,
    /// Since when it has been ready without a break.
    pub(crate) ready: Option<Instant>,
    machine: Machine,
    /// What each container is started with.
    filled: Vec<(Value, Filled)>,
    /// Where each volume is.
    volumes: BTreeMap<String, PathBuf>,
    child: Option<Child>,
    readiness: Probe,
    liveness: Probe,
    /// How it ended.
    pub(crate) ended: Option<ExitStatus>,
    /// When SIGTERM was sent.
    pub(crate) told: Option<Instant>,
    /// True when its grace period was over before it had ended.
    pub(crate) killed: bool,
}

impl Pod {
    /// Starts a pod of a workload's template. Claims are volumes that outlive it.
    pub(crate) fn start(
        machine: &Machine,
        manifests: &Manifests,
        workload: &Value,
        (name, address): (String, String),
    ) -> Self {
        let template = workload["spec"]["template"].clone();
        let folder = machine.folder.join(&name).join(&address);
        let spec = &template["spec"];
        let owner: u32 = spec["securityContext"]["fsGroup"].as_u64().unwrap_or(0) as u32;
        let make = |folder: PathBuf| {
            fs::create_dir_all(&folder).expect("a volume's folder");
            std::os::unix::fs::chown(&folder, Some(owner), Some(owner)).expect("this runs as root");
            folder
        };
        let own = items(&spec["volumes"]).map(|volume| {
            let name = volume["name"].as_str().expect("a volume has a name");
            assert!(volume["emptyDir"].is_object(), "a kind of volume that this node has: {volume}");
            (name.to_owned(), make(folder.join("volumes").join(name)))
        });
        let claimed = items(&workload["spec"]["volumeClaimTemplates"]).map(|claim| {
            let volume = claim["metadata"]["name"].as_str().expect("a claim has a name");
            (volume.to_owned(), make(machine.folder.join("claims").join(format!("{volume}-{name}"))))
        });
        let volumes = own.chain(claimed).collect();
        let filled = |list: &Value| -> Vec<_> {
            items(list)
                .map(|container| (container.clone(), fill(manifests, container, &name, &address)))
                .collect()
        };
        let mut all = filled(&spec["initContainers"]);
        let inits = all.len();
        all.extend(filled(&spec["containers"]));
        assert_eq!(all.len(), inits + 1, "{name}: pods have one container here");
        let mut pod = Self {
            phase: if inits > 0 { Phase::Init(0) } else { Phase::Running },
            owner: workload["metadata"]["name"].as_str().expect("a workload has a name").to_owned(),
            name,
            address,
            template,
            ready: None,
            machine: machine.clone(),
            filled: all,
            volumes,
            child: None,
            readiness: Probe::default(),
            liveness: Probe::default(),
            ended: None,
            told: None,
            killed: false,
        };
        pod.run(0);
        pod
    }

    /// True when it was told to go.
    pub(crate) fn is_going(&self) -> bool {
        matches!(self.phase, Phase::Going { .. } | Phase::Gone)
    }

    /// True when nothing of it is left.
    pub(crate) fn is_gone(&self) -> bool {
        self.phase == Phase::Gone
    }

    /// True when it has been ready for so long.
    pub(crate) fn is_available(&self, least: Duration) -> bool {
        self.ready.is_some_and(|since| since.elapsed() >= least) && !self.is_going()
    }

    /// Tells it to go.
    pub(crate) fn delete(&mut self) {
        assert_eq!(self.phase, Phase::Running, "{}: a pod that runs is told to go", self.name);
        self.phase = Phase::Going { since: Instant::now(), told: false };
    }

    /// What its containers printed.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    fn log_file(&self) -> PathBuf {
        self.machine.folder.join(&self.name).join(format!("{}.log", self.address))
    }

    /// Does what is due.
    pub(crate) fn tick(&mut self) {
        let ended = self.child.as_mut().and_then(|child| child.try_wait().expect("a child can be asked"));
        match (self.phase, ended) {
            (Phase::Init(index), Some(status)) => {
                assert!(
                    status.success(),
                    "{}: its init container ended with {status}: {}",
                    self.name,
                    self.log()
                );
                let inits = self.filled.len() - 1;
                self.phase = if index + 1 < inits { Phase::Init(index + 1) } else { Phase::Running };
                self.run(index + 1);
            }
            (Phase::Running, Some(status)) => panic!("{} ended with {status}: {}", self.name, self.log()),
            (Phase::Running, None) => self.probe(),
            (Phase::Going { .. }, Some(status)) => {
                (self.phase, self.ended, self.ready) = (Phase::Gone, Some(status), None);
            }
            (Phase::Going { since, told }, None) => self.go(since, told),
            (Phase::Init(_) | Phase::Gone, _) => {}
        }
    }

    fn go(&mut self, since: Instant, told: bool) {
        let (container, _) = self.filled.last().expect("a pod has a container");
        let sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"].as_f64().unwrap_or_default();
        let grace = self.template["spec"]["terminationGracePeriodSeconds"].as_f64().unwrap_or(30.0);
        if !told && since.elapsed().as_secs_f64() >= sleep {
            self.signal("TERM");
            self.told = Some(Instant::now());
            self.phase = Phase::Going { since, told: true };
        }
        if since.elapsed().as_secs_f64() >= grace && !self.killed {
            self.signal("KILL");
            self.killed = true;
        }
        self.probe();
    }

    fn signal(&self, name: &str) {
        let child = self.child.as_ref().expect("a pod that runs has a process").id().to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &child]).status().expect("kill");
        assert!(status.success(), "kill -{name} {child}");
    }

    /// Starts a container.
    fn run(&mut self, index: usize) {
        let (container, filled) = &self.filled[index];
        let name = container["name"].as_str().expect("a container has a name");
        let image = container["image"].as_str().expect("a container has an image");
        let known = self.machine.images.iter().find(|(prefix, ..)| image.starts_with(prefix));
        let (_, program, place) = known.unwrap_or_else(|| panic!("{image} is an image that this node has"));
        let root = self.machine.folder.join(&self.name).join(&self.address).join(name);
        fs::create_dir_all(&root).expect("a folder for the root");
        let mounts = items(&container["volumeMounts"]).map(|mount| {
            let volume = &self.volumes[mount["name"].as_str().unwrap_or_default()];
            let mode = if mount["readOnly"] == true { "ro" } else { "rw" };
            format!("{}={}={mode}", volume.display(), mount["mountPath"].as_str().unwrap_or_default())
        });
        let binds = mounts.collect::<Vec<_>>().join(";");
        let here = |text: &String| text.replace("0.0.0.0", &self.address);
        let command =
            if filled.command.is_empty() { std::slice::from_ref(place) } else { &filled.command[..] };
        let log = File::options().create(true).append(true).open(self.log_file()).expect("a log file");
        let mut start = Command::new("unshare");
        start.args(["--mount", "sh", "-c", START, "sh"]).arg(&root).args([place, &binds]);
        start.args(command.iter().chain(&filled.arguments).map(here));
        start.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        start.envs(filled.variables.iter().map(|(name, value)| (name, here(value))));
        let user = &self.template["spec"]["securityContext"]["runAsUser"];
        start.env("IMAGE_BINARY", program).env("HOSTS", self.machine.hosts()).env("RUN_AS", user.to_string());
        start.env("AUTHORITIES", &self.machine.authorities);
        start.stdin(Stdio::null()).stdout(log.try_clone().expect("a second handle")).stderr(log);
        self.child = Some(start.spawn().expect("unshare, of util-linux, starts"));
    }

    /// Asks what is due, as a kubelet does.
    fn probe(&mut self) {
        let (container, _) = self.filled.last().expect("a pod has a container");
        let container = container.clone();
        if let Some(is_well) = self.readiness.ask(&container, "readinessProbe", &self.address) {
            self.ready = if is_well { self.ready.or(Some(Instant::now())) } else { None };
        }
        let is_alive = self.liveness.ask(&container, "livenessProbe", &self.address);
        // Its process may be about to end when it was told to.
        assert!(
            is_alive != Some(false) || self.is_going(),
            "{}: it would be restarted: {}",
            self.name,
            self.log()
        );
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Probe {
    /// Asks when it is due: whether all is well, where the last answers decide it.
    fn ask(&mut self, container: &Value, kind: &str, address: &str) -> Option<bool> {
        let probe = &container[kind];
        let seconds = |field: &str, default: f64| probe[field].as_f64().unwrap_or(default);
        let period = Duration::from_secs_f64(seconds("periodSeconds", 10.0));
        if self.asked.is_some_and(|asked| asked.elapsed() < period) {
            return None;
        }
        self.asked = Some(Instant::now());
        let port = &probe["httpGet"]["port"];
        let named = items(&container["ports"]).find(|known| known["name"] == *port);
        let port = named.map_or(port, |known| &known["containerPort"]);
        let path = probe["httpGet"]["path"].as_str().unwrap_or("/");
        let longest = Duration::from_secs_f64(seconds("timeoutSeconds", 1.0));
        if get(&format!("{address}:{port}"), path, longest).is_some_and(|status| (200..400).contains(&status))
        {
            self.failures = 0;
            return Some(true);
        }
        self.failures += 1;
        (self.failures >= seconds("failureThreshold", 3.0) as u64).then_some(false)
    }
}

/// The status of an answer.
fn get(address: &str, path: &str, longest: Duration) -> Option<u16> {
    use std::io::{Read as _, Write as _};
    let mut socket = std::net::TcpStream::connect_timeout(&address.parse().ok()?, longest).ok()?;
    socket.set_read_timeout(Some(longest)).ok()?;
    write!(socket, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").ok()?;
    let mut head = [0; 12];
    socket.read_exact(&mut head).ok()?;
    std::str::from_utf8(&head[9..]).ok()?.parse().ok()
}
