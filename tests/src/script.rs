//! Python scripts that drive the server with clients of other makers: pytest files in `tests/clients`.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use crate::cluster::MODEL;
use crate::golden::root;

/// What a script talks to, and what else it is told.
#[derive(Clone, Debug)]
pub struct Server {
    /// Base URL of HTTP, without a slash at the end.
    pub http: String,
    /// `host:port` of gRPC.
    pub grpc: String,
    /// Further variables of the script's environment.
    pub variables: Vec<(&'static str, String)>,
}

impl Server {
    /// A server on loopback without TLS.
    pub fn plain(http_port: u16, grpc_port: u16) -> Self {
        let http = format!("http://127.0.0.1:{http_port}");
        Self { http, grpc: format!("127.0.0.1:{grpc_port}"), variables: Vec::new() }
    }
}

/// The Python that has the clients.
#[derive(Clone, Debug)]
pub struct Python {
    interpreter: PathBuf,
    /// Where compiled modules are kept.
    compiled: PathBuf,
}

impl Python {
    /// The environment that `cargo xtask fetch-clients` installs.
    ///
    /// # Panics
    /// When it was not installed, or for another list of clients than there is now.
    pub fn installed() -> Self {
        let wanted = std::fs::read(root().join("tests/clients/requirements.txt"));
        let wanted = wanted.expect("the list of clients is part of the repository");
        let folder = root().join(".cache/clients");
        let installed = std::fs::read(folder.join("requirements.txt"));
        assert!(
            installed.is_ok_and(|installed| installed == wanted),
            "{} does not hold what tests/clients/requirements.txt lists: run `cargo xtask fetch-clients` first",
            folder.display()
        );
        Self { interpreter: folder.join("bin/python"), compiled: folder.join("compiled") }
    }

    /// Runs scripts in one pytest, to its end or until `patience` is over. An error is all that it printed.
    ///
    /// # Panics
    /// When the interpreter does not start.
    pub async fn run(&self, scripts: &[&str], server: &Server, patience: Duration) -> Result<(), String> {
        let mut command = Command::new(&self.interpreter);
        command.args(["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--disable-warnings"]);
        command.args(scripts.iter().map(|script| format!("{script}.py")));
        command.current_dir(root().join("tests/clients"));
        command.env("BATON_HTTP", &server.http).env("BATON_GRPC", &server.grpc).env("BATON_MODEL", MODEL);
        command.envs(server.variables.iter().map(|(name, value)| (name, value)));
        // What is compiled is kept with the environment, whoever else may not want it kept.
        command.env_remove("PYTHONDONTWRITEBYTECODE").env("PYTHONPYCACHEPREFIX", &self.compiled);
        // Clients stay on this machine: no proxy for the server, no list of prices, no tokenizer, no report of use.
        command.env("NO_PROXY", "*").env("LITELLM_LOCAL_MODEL_COST_MAP", "True");
        command.env("LANGSMITH_TRACING", "false").env("HF_HUB_OFFLINE", "1");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let output = match tokio::time::timeout(patience, command.output()).await {
            Ok(output) => output.expect("the interpreter starts"),
            Err(_) => return Err(format!("{scripts:?} end within {patience:?}")),
        };
        let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        // Shown with `--nocapture`: how many tests there were.
        println!("{scripts:?}: {}", printed.lines().last().unwrap_or_default());
        if output.status.success() { Ok(()) } else { Err(format!("{scripts:?}:\n{printed}")) }
    }
}
