//! The binary as a child of a test, and what it is given.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn baton(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).stdin(Stdio::null()).env_remove("BATON_CONFIG");
    command
}

pub(crate) fn output(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Asserts that the command is refused with one line that contains `expected`.
pub(crate) fn assert_refused(command: &mut Command, expected: &str) {
    let (code, stdout, stderr) = output(command);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stdout.is_empty(), "{stdout}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("baton: ") && stderr.contains(expected), "{stderr:?} says {expected:?}");
}

/// Ports that something listens on as long as this lives, and the address of each.
pub(crate) struct Taken(pub(crate) Vec<TcpListener>);

impl Taken {
    pub(crate) fn new(count: usize) -> Self {
        Self((0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect())
    }

    pub(crate) fn address(&self, index: usize) -> String {
        self.0[index].local_addr().unwrap().to_string()
    }
}

/// A folder with an empty member file and, perhaps, options.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        std::fs::write(folder.path("members.toml"), "").unwrap();
        folder
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn discovery(&self) -> String {
        format!("fixed:{}", self.path("members.toml").display())
    }

    pub(crate) fn options(&self, text: &str) -> String {
        std::fs::write(self.path("baton.toml"), text).unwrap();
        self.path("baton.toml").display().to_string()
    }
}

/// A running `baton`, killed when dropped.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Reads the log until it says all of this, in this order.
    pub(crate) fn wait_log(&mut self, all: &[&str]) -> Vec<String> {
        let log = BufReader::new(self.0.stderr.as_mut().unwrap());
        let mut left = all.iter();
        let mut next = left.next();
        let mut lines = Vec::new();
        for line in log.lines() {
            let line = line.unwrap();
            if next.is_some_and(|text| line.contains(text)) {
                next = left.next();
            }
            lines.push(line);
            if next.is_none() {
                return lines;
            }
        }
        panic!("the log ended before {next:?}: {lines:?}");
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.0.id().to_string()]).status();
        assert!(status.unwrap().success());
    }

    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(start.elapsed() < PATIENCE, "the process ends");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `baton serve` of the simulated model, at ports that the system chooses.
pub(crate) fn serve_sim() -> Command {
    let ports = ["--port", "0", "--grpc-port", "0", "--metrics-port", "0"];
    let mut command = baton(&["serve", "sim:", "--threads", "1"]);
    command.args(ports);
    command
}
