//! A real etcd, on loopback unless told otherwise, killed when dropped.

use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::certificates::Certificates;
use crate::cluster::free_port;
use crate::golden::root;

/// How long the server may take to start.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server with data of its own. Its ports outlive it, so that it can be started again at its address.
pub struct Etcd {
    folder: tempfile::TempDir,
    /// Counts the data folders: one for each time that everything was forgotten.
    generation: u32,
    host: String,
    port: u16,
    peer_port: u16,
    tls: Option<Certificates>,
    child: Option<Child>,
}

impl Etcd {
    /// A server that runs.
    ///
    /// # Panics
    /// When it was not fetched, or does not start.
    pub fn start() -> Self {
        let mut etcd = Self::stopped();
        etcd.run();
        etcd
    }

    /// A server that has an address and does not run yet.
    ///
    /// # Panics
    /// When there is no temporary folder.
    pub fn stopped() -> Self {
        Self::of("127.0.0.1", free_port(), free_port())
    }

    /// A server that runs at this address, one of those of the namespace that the thread is in. Its peers, of which there
    /// are none, use the next port.
    ///
    /// # Panics
    /// When it was not fetched, or does not start.
    pub fn start_at(host: &str, port: u16) -> Self {
        let mut etcd = Self::of(host, port, port + 1);
        etcd.run();
        etcd
    }

    fn of(host: &str, port: u16, peer_port: u16) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let host = host.to_owned();
        Self { folder, generation: 0, host, port, peer_port, tls: None, child: None }
    }

    /// A server that runs, speaks TLS as `server`, and asks clients for a certificate.
    ///
    /// # Panics
    /// When it was not fetched, or does not start.
    pub fn start_secured() -> Self {
        let mut etcd = Self::stopped();
        etcd.tls = Some(Certificates::generate());
        etcd.run();
        etcd
    }

    /// The certificates of a secured server and its clients.
    ///
    /// # Panics
    /// When it is not secured.
    pub fn certificates(&self) -> &Certificates {
        self.tls.as_ref().expect("the server is secured")
    }

    /// `http://HOST:PORT`, or `https`.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address())
    }

    /// `host:port`.
    pub fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// Starts it, with the data that it has.
    ///
    /// # Panics
    /// When it was not fetched, runs already, or does not start.
    pub fn run(&mut self) {
        assert!(self.child.is_none(), "etcd does not run");
        let data = self.folder.path().join(format!("data-{}", self.generation));
        let log = fs::File::options().create(true).append(true).open(self.log_file()).expect("a log file");
        let (client, peer) = (self.url(), format!("http://{}:{}", self.host, self.peer_port));
        let mut command = Command::new(binary());
        command.arg("--data-dir").arg(data).args(["--name", "etcd"]);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("etcd={peer}")]);
        // The shortest lease is as long as elections may take: a second, with these.
        command.args(["--heartbeat-interval", "20", "--election-timeout", "400"]);
        if let Some(tls) = &self.tls {
            command.arg("--cert-file").arg(tls.path("server.pem"));
            command.arg("--key-file").arg(tls.path("server.key.pem"));
            command.arg("--trusted-ca-file").arg(tls.path("ca.pem")).arg("--client-cert-auth");
        }
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a second handle")).stderr(log);
        self.child = Some(command.spawn().expect("etcd starts"));
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect(self.address()).is_err() {
            let log = fs::read_to_string(self.log_file()).unwrap_or_default();
            assert!(Instant::now() < until, "etcd listens within {PATIENCE:?}; log:\n{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills it without warning.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("etcd runs");
        child.kill().and_then(|()| child.wait()).expect("etcd can be killed");
    }

    /// Lets it forget everything: it starts with no data.
    ///
    /// # Panics
    /// When it runs.
    pub fn forget(&mut self) {
        assert!(self.child.is_none(), "etcd does not run");
        self.generation += 1;
    }

    /// Sends it a signal by name, such as `STOP` and `CONT`.
    ///
    /// # Panics
    /// When it does not run.
    pub fn signal(&self, signal: &str) {
        let pid = self.child.as_ref().expect("etcd runs").id().to_string();
        let status = Command::new("kill").args([&format!("-{signal}"), &pid]).status().expect("kill");
        assert!(status.success(), "kill -{signal} {pid}");
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The server that `cargo xtask fetch-etcd` fetches.
fn binary() -> PathBuf {
    let path = root().join(".cache/etcd/etcd");
    assert!(path.exists(), "no {}: run `cargo xtask fetch-etcd` first", path.display());
    path
}
