//! A gateway, a router and two workers, each a process.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::process::{Process, free_address};

/// How long the cluster may take to be ready.
const PATIENCE: Duration = Duration::from_mins(1);

/// Limits above every load that is put on, as each process takes those that it knows.
const LIMITS: [(&str, &str); 6] = [
    ("BATON_REQUESTS_MAX", "2048"),
    ("BATON_SEQUENCES_MAX", "1024"),
    ("BATON_WAITING_MAX", "2048"),
    ("BATON_CALLS_MAX", "4096"),
    ("BATON_EVENTS_MAX", "131072"),
    ("BATON_KV_BLOCKS", "131072"),
];

/// How long steps of the simulated model take at least, microseconds.
pub(crate) struct Pace {
    /// Of the worker that decodes.
    decode_step_us: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { decode_step_us: 10_000 }
    }
}

impl Pace {
    /// Next to no token; and yet the two of a readiness probe come in time.
    pub(crate) fn standstill() -> Self {
        Self { decode_step_us: 4_000_000 }
    }
}

/// The running processes.
pub(crate) struct Cluster {
    pub(crate) gateway: Process,
    address: String,
    _others: Vec<Process>,
    _folder: tempfile::TempDir,
}

impl Cluster {
    /// Starts all and waits until a request would be answered.
    pub(crate) async fn start(baton: &str, pace: Pace) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let (router, prefill, decode) = (free_address()?, free_address()?, free_address()?);
        let mut members = String::new();
        for (role, address) in [("router", &router), ("prefill", &prefill), ("decode", &decode)] {
            writeln!(members, "[[member]]\nrole = \"{role}\"\naddress = \"{address}\"")?;
        }
        let discovery = folder.path().join("members.toml");
        std::fs::write(&discovery, members)?;
        let (address, grpc) = (free_address()?, free_address()?);
        let common = ["--log", "error", "--discovery", &format!("fixed:{}", discovery.display())]
            .map(ToOwned::to_owned);
        let start = |command: &str, own: &[&str]| {
            let own = own.iter().map(|&word| word.to_owned());
            let arguments: Vec<String> =
                std::iter::once(command.to_owned()).chain(own).chain(common.clone()).collect();
            Process::spawn(baton, &arguments, &LIMITS)
        };
        let model = |step_us: u64| format!("sim:vocab=4096,context_len=2048,step_us={step_us}");
        let others = vec![
            start("router", &["--listen", &router])?,
            start("prefill-worker", &["--listen", &prefill, "--model", &model(0), "--served-name", "sim"])?,
            start(
                "decode-worker",
                &["--listen", &decode, "--model", &model(pace.decode_step_us), "--served-name", "sim"],
            )?,
        ];
        let gateway = start("gateway", &["--listen", &address, "--grpc-listen", &grpc])?;
        wait_ready(&address).await?;
        Ok(Self { gateway, address, _others: others, _folder: folder })
    }

    /// Where the gateway serves HTTP.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }
}

async fn wait_ready(address: &str) -> Result<()> {
    let client = reqwest::Client::new();
    let url = format!("http://{address}/v2/models/sim/ready");
    let ready = async {
        // Both: the model is known, and a request would be placed.
        for url in [format!("http://{address}/v2/health/ready"), url] {
            while !client.get(&url).send().await.is_ok_and(|response| !response.status().is_server_error()) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    if tokio::time::timeout(PATIENCE, ready).await.is_err() {
        bail!("the gateway is not ready within {} s", PATIENCE.as_secs());
    }
    Ok(())
}
