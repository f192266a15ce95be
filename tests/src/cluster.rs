//! A cluster of real processes, each killed when dropped: on loopback, each on ports of its own, or [`apart`], each in a
//! network namespace of its own.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use crate::golden;
use crate::metrics::Metrics;
use crate::net::Net;

/// The model's public name in every test.
pub const MODEL: &str = "SmolLM2-135M-Instruct";

/// How long a process may take to load, or a phase to be reached.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// How long a scrape may take: a process that stands still gives none.
const SCRAPE_MAX: Duration = Duration::from_secs(5);

/// Which service a process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// `baton gateway`
    Gateway,
    /// `baton router`
    Router,
    /// `baton prefill-worker`
    Prefill,
    /// `baton decode-worker`
    Decode,
    /// `baton serve`: all of them in one process
    Serve,
}

impl Service {
    fn command(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Router => "router",
            Self::Prefill => "prefill-worker",
            Self::Decode => "decode-worker",
            Self::Serve => "serve",
        }
    }

    fn role(self) -> Option<&'static str> {
        match self {
            Self::Gateway | Self::Serve => None,
            Self::Router => Some("router"),
            Self::Prefill => Some("prefill"),
            Self::Decode => Some("decode"),
        }
    }
}

/// A process's name: its service and its number among those of that service.
pub type Name = (Service, usize);

/// Where one process is: that outlives it, so that it can be started again at its address.
#[derive(Clone, Copy, Debug)]
struct Ports {
    host: Ipv4Addr,
    listen: u16,
    grpc: u16,
    metrics: u16,
}

struct Process {
    child: Child,
    log: PathBuf,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How to start a cluster.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Variables of every process's environment.
    pub environment: Vec<(String, String)>,
    /// Further arguments of every gateway.
    pub gateway: Vec<String>,
    /// Further arguments of every router.
    pub router: Vec<String>,
    /// Further arguments of every worker.
    pub worker: Vec<String>,
    /// Further arguments of `baton serve`.
    pub serve: Vec<String>,
    /// What workers serve; the default model when empty.
    pub model: String,
    /// Where services find each other; a file of the cluster's own when empty.
    pub discovery: String,
    /// Further arguments of every service of a cluster.
    pub service: Vec<String>,
}

/// Processes, their ports, and the discovery file that names them.
pub struct Cluster {
    folder: tempfile::TempDir,
    settings: Settings,
    ports: BTreeMap<Name, Ports>,
    processes: BTreeMap<Name, Process>,
    http: reqwest::Client,
    /// Dropped after the processes: a namespace goes when nothing lives in it.
    net: Option<Net>,
}

/// Runs `work` on a cluster whose processes live in namespaces of their own, on a thread and a runtime that can reach
/// them. A panic of `work` goes on here, after everything was taken down.
///
/// # Panics
/// Without root or iproute2.
pub fn apart<F, T>(settings: Settings, work: impl FnOnce(Cluster) -> F + Send + 'static) -> T
where
    F: Future<Output = T>,
    T: Send + 'static,
{
    let thread = std::thread::spawn(move || {
        let net = Net::new();
        net.enter();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let mut cluster = Cluster::new(settings);
            cluster.net = Some(net);
            work(cluster).await
        })
    });
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Cluster {
    /// A cluster on loopback with no process yet.
    ///
    /// # Panics
    /// When the temporary folder cannot be made.
    pub fn new(settings: Settings) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let http = reqwest::Client::new();
        let (ports, processes) = (BTreeMap::new(), BTreeMap::new());
        let mut cluster = Self { folder, settings, ports, processes, http, net: None };
        cluster.write_members();
        cluster
    }

    /// True when its members stand in a file.
    pub fn is_listed(&self) -> bool {
        self.settings.discovery.is_empty()
    }

    /// The network of a cluster that is [`apart`].
    ///
    /// # Panics
    /// On loopback, which has none of its own.
    pub fn net(&self) -> &Net {
        self.net.as_ref().expect("the cluster is apart")
    }

    /// Starts a process, or starts it again at its old ports.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn(&mut self, name: Name) {
        self.spawn_with(name, &[]);
    }

    /// The same, with further arguments of this process alone.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn_with(&mut self, name: Name, arguments: &[&str]) {
        self.start(name, arguments, "");
    }

    /// The same, with a fail point armed from the first moment on; see [`Self::arm`].
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn_armed(&mut self, name: Name, point: &str) {
        self.start(name, &[], point);
    }

    fn start(&mut self, name: Name, arguments: &[&str], fail_points: &str) {
        let is_apart = self.net.is_some();
        let ports = *self
            .ports
            .entry(name)
            .or_insert_with(|| if is_apart { Ports::apart(name) } else { Ports::loopback() });
        if let Some(net) = &mut self.net {
            net.add(&host(name), ports.host);
        }
        self.write_members();
        let (service, index) = name;
        let log = self.folder.path().join(format!("{}-{index}.log", service.command()));
        let output = fs::File::create(&log).expect("a log file");
        let mut command = match &self.net {
            Some(net) => net.command(&host(name), &binary()),
            None => Command::new(binary()),
        };
        command.arg(service.command());
        command.stdin(Stdio::null()).stdout(output.try_clone().expect("a second handle")).stderr(output);
        if service != Service::Serve {
            command
                .args(["--listen", &ports.address(ports.listen)])
                .args(["--metrics-listen", &ports.address(ports.metrics)])
                .args(["--discovery", &self.discovery()])
                .args(&self.settings.service);
        }
        match service {
            Service::Serve => {
                command
                    .arg("--model")
                    .arg(golden::model())
                    .args(["--served-name", MODEL])
                    .args(["--port", &ports.listen.to_string()])
                    .args(["--grpc-port", &ports.grpc.to_string()])
                    .args(["--metrics-port", &ports.metrics.to_string()])
                    .args(&self.settings.serve);
            }
            Service::Gateway => {
                command.args(["--grpc-listen", &ports.address(ports.grpc)]);
                command.args(&self.settings.gateway);
            }
            Service::Router => {
                command.args(&self.settings.router);
            }
            Service::Prefill | Service::Decode => {
                if !arguments.contains(&"--model") {
                    let model = &self.settings.model;
                    let model = if model.is_empty() { golden::model() } else { model.into() };
                    command.arg("--model").arg(model);
                }
                if !arguments.contains(&"--served-name") {
                    command.args(["--served-name", MODEL]);
                }
                command.args(&self.settings.worker);
            }
        }
        command.args(arguments);
        // An old life's fail points and marks are not this one's.
        fs::write(self.fail_points_file(name), "").expect("the fail point file can be written");
        command.env("FAILPOINTS_FILE", self.fail_points_file(name)).env("FAILPOINTS", fail_points);
        command.envs(self.settings.environment.iter().cloned());
        let child = command.spawn().expect("the baton binary starts");
        self.processes.insert(name, Process { child, log });
    }

    /// Arms a fail point of a running process: `point=return` stops there for good, `point=return(2000)` for as many
    /// milliseconds, `point=off` lets it pass again.
    ///
    /// # Panics
    /// When the process does not take it in time.
    pub async fn arm(&self, name: Name, point: &str) {
        let file = self.fail_points_file(name);
        if fs::read_to_string(&file).is_ok_and(|armed| armed == point) {
            return;
        }
        let said = format!("fail point set: {point}");
        let before = self.count_log(name, &said);
        // A new file in the old one's place: half a line would be another point.
        let new = file.with_extension("new");
        fs::write(&new, point).expect("the fail point file can be written");
        fs::rename(new, file).expect("the fail point file can be replaced");
        let until = Instant::now() + PATIENCE;
        while self.count_log(name, &said) == before {
            assert!(Instant::now() < until, "{name:?} takes {point}; logs:\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// How often a process printed `text`.
    pub fn count_log(&self, name: Name, text: &str) -> usize {
        self.log(name).matches(text).count()
    }

    /// Kills a process without warning, as `kill -9` does.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self, name: Name) {
        assert!(self.processes.remove(&name).is_some(), "{name:?} runs");
    }

    /// Takes a process that was killed off the list that discovery has.
    pub fn forget(&mut self, name: Name) {
        self.ports.remove(&name);
        self.write_members();
    }

    /// Sends a signal to a process by name (`TERM`, `STOP`, `CONT`, …).
    ///
    /// # Panics
    /// When it does not run.
    pub fn signal(&self, name: Name, signal: &str) {
        let pid = self.processes[&name].child.id().to_string();
        let status = Command::new("kill").args([&format!("-{signal}"), &pid]).status().expect("kill");
        assert!(status.success(), "kill -{signal} {pid}");
    }

    /// Asks a worker to take a role, as `baton role` does, and waits for the answer.
    ///
    /// # Panics
    /// When the worker was never started, or the command cannot be.
    pub async fn role(&self, name: Name, role: &str, arguments: &[&str]) -> std::process::Output {
        let mut command = match &self.net {
            Some(net) => net.command(&host(name), &binary()),
            None => Command::new(binary()),
        };
        command.args(["role", role, "--worker", &self.address(name)]).args(arguments);
        let mut command = tokio::process::Command::from(command);
        command.kill_on_drop(true).output().await.expect("the baton binary starts")
    }

    /// The memory that a process has now, in KiB, as the kernel counts it.
    ///
    /// # Panics
    /// When it does not run.
    pub fn resident_kib(&self, name: Name) -> u64 {
        let pid = self.processes[&name].child.id();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
        line.trim().trim_end_matches(" kB").parse().expect("a number of kB")
    }

    /// Waits for a process to end by itself and gives its exit status.
    ///
    /// # Panics
    /// When it does not end in time.
    pub fn wait_exit(&mut self, name: Name, patience: Duration) -> std::process::ExitStatus {
        let until = Instant::now() + patience;
        let process = self.processes.get_mut(&name).expect("the process was started");
        loop {
            if let Some(status) = process.child.try_wait().expect("the child can be asked") {
                return status;
            }
            assert!(Instant::now() < until, "{name:?} ends within {patience:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The HTTP and gRPC addresses that clients use.
    pub fn gateway(&self) -> (String, String) {
        let front = self.front();
        (front.address(front.listen), front.address(front.grpc))
    }

    /// The same of one gateway of several.
    ///
    /// # Panics
    /// When it was not started.
    pub fn gateway_at(&self, name: Name) -> (String, String) {
        let ports = self.ports[&name];
        (ports.address(ports.listen), ports.address(ports.grpc))
    }

    /// The address that a process serves the cluster at.
    ///
    /// # Panics
    /// When it was not started.
    pub fn address(&self, name: Name) -> String {
        let ports = self.ports[&name];
        ports.address(ports.listen)
    }

    /// The gateway's HTTP port.
    pub fn http_port(&self) -> u16 {
        self.front().listen
    }

    /// The gateway's gRPC port.
    pub fn grpc_port(&self) -> u16 {
        self.front().grpc
    }

    /// The ports of the process that clients talk to.
    fn front(&self) -> Ports {
        let front =
            [(Service::Gateway, 0), (Service::Serve, 0)].into_iter().find_map(|name| self.ports.get(&name));
        *front.expect("a gateway was started")
    }

    /// The HTTP and gRPC ports of a process that was started.
    ///
    /// # Panics
    /// When it was not.
    pub fn ports(&self, name: Name) -> (u16, u16) {
        let ports = self.ports[&name];
        (ports.listen, ports.grpc)
    }

    /// The port at which a process that was started serves its metrics.
    ///
    /// # Panics
    /// When it was not.
    pub fn metrics_port(&self, name: Name) -> u16 {
        self.ports[&name].metrics
    }

    /// What a process printed.
    pub fn log(&self, name: Name) -> String {
        self.processes.get(&name).map(|p| fs::read_to_string(&p.log).unwrap_or_default()).unwrap_or_default()
    }

    /// Waits until the gateway answers that it is ready.
    ///
    /// # Panics
    /// When it does not in time; the message carries every log.
    pub async fn wait_ready(&self) {
        let url = format!("http://{}/v2/health/ready", self.gateway().0);
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            if let Ok(response) = self.http.get(&url).send().await
                && response.status().is_success()
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("the gateway is ready within {PATIENCE:?}; logs:\n{}", self.logs());
    }

    /// Waits until a process printed `text`.
    ///
    /// # Panics
    /// When it does not in time; the message carries every log.
    pub async fn wait_log(&self, name: Name, text: &str) {
        self.wait_log_times(name, text, 1).await;
    }

    /// The same, for a text that it is to print so many times.
    ///
    /// # Panics
    /// When it does not in time.
    pub async fn wait_log_times(&self, name: Name, text: &str, times: usize) {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            if self.log(name).matches(text).count() >= times {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{name:?} prints {text:?} {times} times within {PATIENCE:?}; logs:\n{}", self.logs());
    }

    /// A scrape of a process's metrics; empty when it does not answer.
    pub async fn metrics(&self, name: Name) -> Metrics {
        let ports = self.ports[&name];
        let request = self.http.get(format!("http://{}/metrics", ports.address(ports.metrics)));
        let Ok(response) = request.timeout(SCRAPE_MAX).send().await else { return Metrics::default() };
        Metrics::parse(&response.text().await.unwrap_or_default())
    }

    /// The port of a process for operators.
    pub fn operators_port(&self, name: Name) -> u16 {
        self.ports[&name].metrics
    }

    /// What a process answers to operators: status and body. `None` when it does not answer.
    pub async fn operators(&self, name: Name, path: &str) -> Option<(u16, String)> {
        let ports = self.ports[&name];
        let request = self.http.get(format!("http://{}{path}", ports.address(ports.metrics)));
        let response = request.timeout(SCRAPE_MAX).send().await.ok()?;
        Some((response.status().as_u16(), response.text().await.ok()?))
    }

    /// Waits until a process answers operators with that status, and gives the body.
    ///
    /// # Panics
    /// When it does not in time; the message carries the last answer and every log.
    pub async fn wait_operators(&self, name: Name, path: &str, status: u16) -> String {
        let until = Instant::now() + PATIENCE;
        let mut last = None;
        while Instant::now() < until {
            match self.operators(name, path).await {
                Some((now, body)) if now == status => return body,
                answer => last = answer,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{name:?} answers {path} with {status}, not {last:?}; logs:\n{}", self.logs());
    }

    /// The names of the running workers.
    pub fn workers(&self) -> Vec<Name> {
        let is_worker = |name: &&Name| matches!(name.0, Service::Prefill | Service::Decode);
        self.processes.keys().filter(is_worker).copied().collect()
    }

    /// The names of the running processes of a service.
    pub fn running(&self, service: Service) -> Vec<Name> {
        self.processes.keys().filter(|name| name.0 == service).copied().collect()
    }

    /// Every log, for a failure's message.
    pub fn logs(&self) -> String {
        let mut all = String::new();
        for (name, process) in &self.processes {
            let log = fs::read_to_string(&process.log).unwrap_or_default();
            let _ = writeln!(all, "── {name:?}\n{log}");
        }
        all
    }

    fn fail_points_file(&self, (service, index): Name) -> PathBuf {
        self.folder.path().join(format!("{}-{index}.failpoints", service.command()))
    }

    /// The value of `--discovery`.
    fn discovery(&self) -> String {
        if self.is_listed() {
            format!("fixed:{}", self.members_file().display())
        } else {
            self.settings.discovery.clone()
        }
    }

    fn members_file(&self) -> PathBuf {
        self.folder.path().join("members.toml")
    }

    /// Writes the discovery file anew: to a new file that takes the old one's place, so no reader sees half of it.
    fn write_members(&mut self) {
        let mut text = String::new();
        for ((service, _), ports) in &self.ports {
            if let Some(role) = service.role() {
                let address = ports.address(ports.listen);
                let _ = writeln!(text, "[[member]]\nrole = \"{role}\"\naddress = \"{address}\"");
            }
        }
        let new = self.folder.path().join("members.new");
        fs::write(&new, text).expect("the discovery file can be written");
        fs::rename(new, self.members_file()).expect("the discovery file can be replaced");
    }
}

impl Ports {
    /// Free ones.
    fn loopback() -> Self {
        let host = Ipv4Addr::LOCALHOST;
        Self { host, listen: free_port(), grpc: free_port(), metrics: free_port() }
    }

    /// Those of a host that the process has for itself.
    fn apart((service, index): Name) -> Self {
        let host = Ipv4Addr::new(10, 77, service as u8 + 1, index as u8 + 1);
        Self { host, listen: 9000, grpc: 9001, metrics: 9002 }
    }

    fn address(&self, port: u16) -> String {
        format!("{}:{port}", self.host)
    }
}

/// The name of a process's host.
pub fn host((service, index): Name) -> String {
    format!("{}{index}", service.command().replace("-worker", ""))
}

/// The binary under test: built with fail points by `cargo xtask test`.
///
/// # Panics
/// When it is not there.
pub fn binary() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    let target = test.ancestors().nth(3).expect("target/debug/deps/TEST");
    let binary = target.join("e2e/baton");
    assert!(
        binary.exists(),
        "no {}: `cargo xtask test` builds it (`cargo xtask e2e-binary` alone)",
        binary.display()
    );
    binary
}

/// A port below the range that outgoing connections draw from, not given out before by this process.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = 17_000 + (std::process::id() % 64) as u16 * 200;
    loop {
        let port = start + NEXT.fetch_add(1, Ordering::Relaxed) % 2_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
