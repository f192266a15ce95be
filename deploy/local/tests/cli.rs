//! The binary, as scripts call it.

#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

fn baton(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).stdin(Stdio::null()).env_remove("BATON_CONFIG");
    command
}

fn output(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Asserts that the command is refused with one line that contains `expected`.
fn assert_refused(command: &mut Command, expected: &str) {
    let (code, stdout, stderr) = output(command);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stdout.is_empty(), "{stdout}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("baton: ") && stderr.contains(expected), "{stderr:?} says {expected:?}");
}

/// Ports that something listens on as long as this lives, and the address of each.
struct Taken(Vec<TcpListener>);

impl Taken {
    fn new(count: usize) -> Self {
        Self((0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect())
    }

    fn address(&self, index: usize) -> String {
        self.0[index].local_addr().unwrap().to_string()
    }
}

/// A folder with an empty member file and, perhaps, options.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        std::fs::write(folder.path("members.toml"), "").unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn discovery(&self) -> String {
        format!("fixed:{}", self.path("members.toml").display())
    }

    fn options(&self, text: &str) -> String {
        std::fs::write(self.path("baton.toml"), text).unwrap();
        self.path("baton.toml").display().to_string()
    }
}

/// A running `baton`, killed when dropped.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Reads the log until it says all of this, in this order.
    fn wait_log(&mut self, all: &[&str]) -> Vec<String> {
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

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.0.id().to_string()]).status();
        assert!(status.unwrap().success());
    }

    fn exit_code(&mut self) -> Option<i32> {
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
fn serve_sim() -> Command {
    let ports = ["--port", "0", "--grpc-port", "0", "--metrics-port", "0"];
    let mut command = baton(&["serve", "sim:", "--threads", "1"]);
    command.args(ports);
    command
}

#[test]
fn help_names_every_command_and_option() {
    let (code, help, _) = output(&mut baton(&["--help"]));
    assert_eq!(code, Some(0));
    for command in ["serve", "gateway", "router", "prefill-worker", "decode-worker"] {
        assert!(help.contains(&format!("\n  {command} ")), "{command} in {help}");
    }
    let serve = "--model --served-name --host --port --grpc-port --metrics-port --prefill --decode --placement \
                 --threads --config --grace --log --kv-blocks --block-tokens --step-tokens --sequences-max [MODEL]";
    let cluster = "--listen --discovery --metrics-listen --config --grace --log";
    let worker = "--listen --advertise --model --served-name --threads --kv-blocks --block-tokens --step-tokens \
                  --sequences-max --discovery --metrics-listen";
    let cases = [
        ("serve", serve),
        ("gateway", "--grpc-listen"),
        ("gateway", cluster),
        ("router", "--placement"),
        ("router", cluster),
        ("prefill-worker", worker),
        ("decode-worker", worker),
    ];
    for (command, options) in cases {
        let (code, help, _) = output(&mut baton(&[command, "--help"]));
        assert_eq!(code, Some(0));
        for option in options.split_whitespace() {
            assert!(help.contains(option), "{option} in {help}");
        }
    }
    let (code, version, _) = output(&mut baton(&["--version"]));
    assert_eq!((code, version.trim()), (Some(0), concat!("baton ", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn what_cannot_be_is_refused_with_one_line() {
    let folder = Folder::new();
    let discovery = folder.discovery();
    let cases: &[(&[&str], &str)] = &[
        (&["serve", "--prot", "1"], "unexpected argument '--prot' found"),
        (&["serve", "--port", "http"], "invalid value 'http' for '--port <PORT>'"),
        (&["cook"], "unrecognized subcommand 'cook'"),
        (&["serve"], "--model: no model was named; `cargo xtask fetch-model` fetches one"),
        (&["prefill-worker", "--discovery", &discovery], "`cargo xtask fetch-model`"),
        (&["serve", "/no/such.gguf"], "found none at /no/such.gguf"),
        (&["serve", "sim:", "--model", "other.gguf"], "two models were named, sim: and other.gguf"),
        (&["serve", "sim:1,2"], "sim:LAYERS,KV_HEADS,HEAD_DIM,VOCAB,CONTEXT_LEN"),
        (&["serve", "sim:", "--placement", "both"], "--placement: unknown variant: found `both`, expected `"),
        (&["serve", "sim:", "--decode", "0"], "--decode: expected at least 1, got 0"),
        (&["serve", "sim:", "--prefill", "0", "--placement", "split"], "--prefill: expected at least 1"),
        (&["serve", "sim:", "--log", "=x="], "--log: expected a level or directives"),
        (&["serve", "sim:", "--grace=-1"], "--grace: expected seconds, got -1"),
        (&["serve", "sim:", "--config", "/no/such.toml"], "/no/such.toml: "),
        (&["router"], "--discovery: expected fixed:FILE"),
        (&["router", "--discovery", "etcd:http://127.0.0.1:2379"], "etcd is not built in yet"),
        (&["router", "--discovery", "fixed:/no/such.toml"], "/no/such.toml: "),
        (&["router", "--discovery", &discovery, "--listen", "9000"], "listen: expected host:port"),
        (
            &["gateway", "--discovery", &discovery, "--grpc-listen", "here"],
            "--grpc-listen: expected host:port",
        ),
    ];
    for (arguments, expected) in cases {
        assert_refused(
            baton(arguments).args(["--log", "off"].iter().filter(|_| !arguments.contains(&"--log"))),
            expected,
        );
    }
    let (code, _, help) = output(&mut baton(&[]));
    assert_eq!(code, Some(2));
    assert!(help.contains("Usage: baton <COMMAND>"), "{help}");
}

#[test]
fn faults_in_the_file_and_the_environment_are_named_as_they_were_written() {
    let folder = Folder::new();
    let file = folder.options("port = 'http'");
    assert_refused(&mut baton(&["serve", "sim:", "--config", &file]), &format!("port in {file}: "));
    let file = folder.options("port = 0\nprefil = 2");
    assert_refused(
        &mut baton(&["serve", "sim:", "--config", &file]),
        "unknown option \"prefil\", expected one of",
    );
    assert_refused(baton(&["serve", "sim:"]).env("BATON_METRICS_PORT", "many"), "BATON_METRICS_PORT: ");
    assert_refused(baton(&["serve", "sim:"]).env("BATON_CONFIG", "/no/such.toml"), "/no/such.toml: ");
}

/// Which address a router wants is seen by its complaint that it is taken.
#[test]
fn the_command_line_wins_over_the_environment_and_the_environment_over_the_file() {
    let (taken, folder) = (Taken::new(3), Folder::new());
    let file =
        folder.options(&format!("listen = '{}'\ndiscovery = '{}'", taken.address(0), folder.discovery()));
    let wants = |command: &mut Command, index| {
        let (code, _, stderr) = output(command);
        assert_eq!(code, Some(1), "{stderr}");
        let last = stderr.lines().last().unwrap();
        let expected = format!("baton: cannot listen on {}: Address already in use", taken.address(index));
        assert!(last.starts_with(&expected), "{expected} in {stderr}");
    };
    let from_file = || baton(&["router", "--config", &file, "--log", "error"]);
    wants(&mut from_file(), 0);
    wants(from_file().env("BATON_LISTEN", taken.address(1)), 1);
    wants(from_file().env("BATON_LISTEN", taken.address(1)).args(["--listen", &taken.address(2)]), 2);
    wants(baton(&["router", "--log", "error"]).env("BATON_CONFIG", &file), 0);
}

#[test]
fn a_taken_port_of_serve_is_one_line() {
    let taken = Taken::new(1);
    let port = taken.0[0].local_addr().unwrap().port().to_string();
    for option in ["--port", "--grpc-port", "--metrics-port"] {
        let (code, _, stderr) = output(serve_sim().args([option, &port, "--log", "error"]));
        assert_eq!(code, Some(1), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.starts_with(&format!("baton: cannot listen on 127.0.0.1:{port}: ")), "{stderr}");
    }
}

#[test]
fn serve_drains_on_either_signal() {
    for signal in ["TERM", "INT"] {
        let mut running = Running::start(&mut serve_sim());
        running.wait_log(&["local:decode-0"]);
        running.signal(signal);
        assert_eq!(running.exit_code(), Some(0), "{signal}");
    }
}

#[test]
fn each_service_runs_alone_and_drains() {
    let folder = Folder::new();
    let discovery = folder.discovery();
    let common = ["--metrics-listen", "127.0.0.1:0", "--discovery", &discovery];
    let worker = ["sim:", "--threads", "1", "--listen", "127.0.0.1:0", "--advertise", "127.0.0.1:9"];
    let services: [(&str, &[&str]); 4] = [
        ("gateway", &["--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0"]),
        ("router", &["--listen", "127.0.0.1:0"]),
        ("prefill-worker", &worker),
        ("decode-worker", &worker),
    ];
    for (service, arguments) in services {
        let mut running = Running::start(baton(&[service]).args(common).args(arguments));
        running.wait_log(&["serving http", "serving grpc"]);
        running.signal("TERM");
        assert_eq!(running.exit_code(), Some(0), "{service}");
        let mut stdout = String::new();
        running.0.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        assert!(stdout.is_empty(), "{stdout}");
    }
}
