//! Child processes, and what they have used.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

/// How long a process may take to open its port.
const PATIENCE: Duration = Duration::from_secs(30);

/// A process that is killed when this is dropped.
pub(crate) struct Process(Child);

impl Process {
    /// Starts a program; what it says on its standard error is shown.
    pub(crate) fn spawn(program: &str, arguments: &[String], environment: &[(&str, &str)]) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(arguments).envs(environment.iter().copied()).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(Self(command.spawn().with_context(|| format!("starting {program}"))?))
    }

    /// User and system time of all its threads so far, those that ended included.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id()))?;
        // The name before may have blanks; it ends at the last bracket. Fields 14 and 15 of proc_pid_stat(5).
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let field = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok());
        let (Some(user), Some(system)) = (field(11), field(12)) else { bail!("no times in {stat:?}") };
        let ticks = user + system;
        Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
    }

    /// Bytes of memory that it has in RAM.
    pub(crate) fn resident_bytes(&self) -> Result<usize> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<usize>()? << 10)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An address of this machine that nobody listens on now.
pub(crate) fn free_address() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

/// Waits until somebody listens there.
pub(crate) async fn wait_for(address: &str) -> Result<()> {
    let listening = async {
        while tokio::net::TcpStream::connect(address).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, listening).await.with_context(|| format!("nobody listens on {address}"))
}
