//! The binary, as scripts call it.

#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::{TcpListener, TcpStream};
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
fn help_names_every_command_and_the_defaults() {
    let (code, help, _) = output(&mut baton(&["--help"]));
    assert_eq!(code, Some(0));
    for command in ["serve", "gateway", "router", "prefill-worker", "decode-worker"] {
        assert!(help.contains(&format!("\n  {command} ")), "{command} in {help}");
    }
    // Which option has a flag is checked against the configurations; here, that the defaults come with them.
    for (command, expected) in [
        ("serve", "HTTP port [default: 8000]"),
        ("serve", "[MODEL]"),
        ("gateway", "Address to serve HTTP at [default: 127.0.0.1:8000]"),
        ("router", "--placement <MODE>"),
        ("prefill-worker", "Tokens per KV block [default: 16]"),
        ("decode-worker", "Most sequences that run at once [default: 64, or less by the mode]"),
    ] {
        let (code, help, _) = output(&mut baton(&[command, "--help"]));
        assert_eq!(code, Some(0));
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains(expected), "{expected} in {help}");
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
        (&["serve", "nobody", "--models-dir", "/no/such"], "the name of a model in /no/such, which has none"),
        (&["serve", "HF://mlc-ai/Llama-3"], "--model: models are not fetched from HF:// yet"),
        (
            &["serve", "sim:", "--device", "cuda:0"],
            "device: cuda is not there; this machine and this build have cpu",
        ),
        (&["serve", "sim:", "--device", "metal:1"], "device: metal:1 is not there"),
        (
            &["serve", "sim:", "--device", "gpu"],
            "--device: expected one of auto, cpu, cuda, metal, vulkan, rocm",
        ),
        (
            &["serve", "sim:", "--mode", "fast"],
            "--mode: expected one of local, interactive, server, got fast",
        ),
        (&["serve", "sim:", "--kv-memory", "5X"], "--kv-memory: expected bytes, or a number and a unit"),
        (
            &["serve", "sim:", "--overrides", "batch=1"],
            "--overrides: unknown key \"batch\", expected one of max_num",
        ),
        (
            &["serve", "sim:", "--overrides", "tensor_parallel_shards=2"],
            "--overrides: tensor_parallel_shards: must be 1, since tensor parallelism comes later; got 2",
        ),
        (
            &["serve", "sim:", "--overrides", "max_total_seq_length=64", "--kv-blocks", "4"],
            "kv_tokens: expected no",
        ),
        (
            &["serve", "sim:", "--speculative-mode", "eagle"],
            "--speculative-mode: speculative decoding comes later",
        ),
        (
            &["serve", "sim:", "--speculative-mode", "fast"],
            "--speculative-mode: expected one of disable, small_draft, eagle, medusa",
        ),
        (
            &["serve", "sim:", "--additional-models", "a", "b,c"],
            "--additional-models: further models come later",
        ),
        (
            &["serve", "sim:", "--prefill-mode", "whole"],
            "--prefill-mode: expected hybrid or chunked, got \"whole\"",
        ),
        (&["serve", "sim:", "--max-seq-len", "1"], "max_seq_len: expected at least 2, got 1"),
        (&["serve", "sim:", "--dialect", "grok"], "--dialect: expected one of openai, mlc, got grok"),
        (
            &["decode-worker", "sim:", "--discovery", &discovery, "--sequences-max", "0"],
            "sequences_max: at least 1",
        ),
        (&["serve", "sim:1,2"], "sim:LAYERS,KV_HEADS,HEAD_DIM,VOCAB,CONTEXT_LEN"),
        (
            &["serve", "sim:", "--placement", "both"],
            "--placement: expected one of auto, split, fused, got both",
        ),
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

/// The options that `--print-config` prints, and what went to stderr.
fn printed(command: &mut Command) -> (toml::Table, String) {
    let (code, stdout, stderr) = output(command.arg("--print-config"));
    assert_eq!(code, Some(0), "{stderr}");
    (stdout.parse().unwrap_or_else(|error| panic!("{error} in {stdout}")), stderr)
}

#[test]
fn each_layer_wins_over_those_below_it() {
    let folder = Folder::new();
    let file = folder.options(
        "max_iter_times = 3\nplacement = 'fused'\nkv_memory = '3MiB'\noverrides = 'max_num_sequence=3'",
    );
    let options = ["max_iter_times", "placement", "kv_memory", "sequences_max"];
    let is = |command: &mut Command, expected: [Option<&str>; 4]| {
        let (printed, _) = printed(command);
        let found = options.map(|option| printed.get(option).map(ToString::to_string));
        assert_eq!(found.each_ref().map(Option::as_deref), expected);
    };
    let default = || baton(&["serve", "sim:"]);
    is(&mut default(), [None, Some("\"auto\""), None, None]);
    let file = || baton(&["serve", "sim:", "--config", &file]);
    is(&mut file(), [Some("3"), Some("\"fused\""), Some("\"3MiB\""), Some("3")]);
    let environment = || {
        let mut command = file();
        command
            .env("BATON_MAX_ITER_TIMES", "4")
            .env("BATON_PLACEMENT", "split")
            .env("BATON_KV_MEMORY", "4MiB");
        command.env("BATON_OVERRIDES", "max_num_sequence=4");
        command
    };
    is(&mut environment(), [Some("4"), Some("\"split\""), Some("\"4MiB\""), Some("4")]);
    let said =
        ["--max-iter-times", "5", "--placement", "auto", "--kv-memory", "5MiB", "--sequences-max", "5"];
    is(environment().args(said), [Some("5"), Some("\"auto\""), Some("\"5MiB\""), Some("5")]);
    let said = ["--sequences-max", "5", "--overrides", "max_num_sequence=6"];
    is(environment().args(said), [Some("4"), Some("\"split\""), Some("\"4MiB\""), Some("6")]);
}

#[test]
fn what_is_printed_sets_the_same_again() {
    let folder = Folder::new();
    let said = [
        "--mode",
        "server",
        "--dialect",
        "mlc",
        "--vllm-separator",
        "",
        "--watermark-gamma",
        "0.1",
        "--timeout-seconds",
        "1.5",
        "--allowed-origins",
        r#"["https://example.org"]"#,
        "--api-key",
        "a secret",
    ];
    let (first, _) = printed(baton(&["serve", "sim:vocab=300", "--port", "0"]).args(said));
    for (option, expected) in [("mode", "\"server\""), ("port", "0"), ("timeout_seconds", "1.5")] {
        assert_eq!(first[option].to_string(), expected);
    }
    let file = folder.options(&first.to_string());
    let (second, _) = printed(&mut baton(&["serve", "--config", &file]));
    assert_eq!(first, second);
    let (code, text, _) = output(baton(&["serve", "sim:", "--print-config"]).args(said));
    assert_eq!(code, Some(0));
    assert!(text.contains("# api_key: not shown") && text.contains("# watermark_key: not shown"), "{text}");
    assert!(!text.contains("secret"), "{text}");

    let discovery = folder.discovery();
    for arguments in [&["gateway"][..], &["router"], &["prefill-worker", "sim:"], &["decode-worker", "sim:"]]
    {
        let (first, _) = printed(baton(arguments).args(["--discovery", &discovery]));
        assert_eq!(first["discovery"].as_str(), Some(discovery.as_str()));
        let file = folder.options(&first.to_string());
        assert_eq!(printed(&mut baton(&[arguments[0], "--config", &file])).0, first);
    }
}

#[test]
fn options_have_their_names_of_other_servers() {
    let folder = Folder::new();
    let file = folder.options(
        "maxSeqLen = 2560\nmaxInputTokenLen = 2048\nmaxIterTimes = 512\nfullTextEnabled = true\nmaxLinkNum = 300\n\
         max_num_sequence = 7\nmax_total_seq_length = 4096\nprefill_chunk_size = 64\ncontext_window_size = 768\n\
         allow_origins = ['x']",
    );
    let expected: toml::Table = "max_seq_len = 2560\nmax_input_token_len = 2048\nmax_iter_times = 512\n\
         full_text_enabled = true\nrequests_max = 300\nsequences_max = 7\nkv_tokens = 4096\nstep_tokens = 64\n\
         context_len = 768\nallowed_origins = ['x']"
        .parse()
        .unwrap();
    let said = [
        "--maxSeqLen=2560",
        "--maxInputTokenLen=2048",
        "--maxIterTimes=512",
        "--fullTextEnabled",
        "--maxLinkNum=300",
        "--overrides",
        "max_num_sequence=7;max_total_seq_length=4096;prefill_chunk_size=64;context_window_size=768",
        "--allow-origins=[\"x\"]",
    ];
    for command in [&mut baton(&["serve", "sim:", "--config", &file]), baton(&["serve", "sim:"]).args(said)] {
        let (printed, _) = printed(command);
        for (option, value) in &expected {
            assert_eq!(printed.get(option), Some(value), "{option}");
        }
    }
    let file = folder.options("maxSeqLen = 'long'");
    assert_refused(&mut baton(&["serve", "sim:", "--config", &file]), &format!("maxSeqLen in {file}: "));
    let file = folder.options("maxSeqLen = 5\nmax_seq_len = 5");
    assert_refused(
        &mut baton(&["serve", "sim:", "--config", &file]),
        "maxSeqLen and max_seq_len are the same option",
    );
    let file = folder.options("maxSeqLength = 5");
    assert_refused(&mut baton(&["serve", "sim:", "--config", &file]), "unknown option \"maxSeqLength\"");
}

#[test]
fn what_mlc_users_type_is_understood() {
    // The command of MLC-LLM's page on its REST API, all of its options in its order.
    let mut command =
        baton(&["serve", "sim:", "--model-lib", "/models/lib.so", "--device", "auto", "--mode", "local"]);
    command.args(["--speculative-mode", "disable"]);
    command.args([
        "--overrides",
        "max_num_sequence=32;max_total_seq_length=4096;tensor_parallel_shards=1;opt=O3",
    ]);
    command.args(["--enable-tracing", "--host", "127.0.0.1", "--port", "8080", "--allow-credentials"]);
    command.args([
        "--allowed-origins",
        r#"["*"]"#,
        "--allowed-methods",
        r#"["*"]"#,
        "--allowed-headers",
        r#"["*"]"#,
    ]);
    command.args(["--prefix-cache-mode", "disable", "--prefill-mode", "chunked"]);
    let (printed, notes) = printed(&mut command);
    let expected: toml::Table = "model = 'sim:layers=2,kv_heads=1,head_dim=4,vocab=256,context_len=1024'\n\
         device = 'auto'\nmode = 'local'\nsequences_max = 32\nkv_tokens = 4096\nenable_tracing = true\n\
         host = '127.0.0.1'\nport = 8080\nallow_credentials = true\nprefix_cache = false"
        .parse()
        .unwrap();
    for (option, value) in &expected {
        assert_eq!(printed.get(option), Some(value), "{option}");
    }
    let notes: Vec<_> = notes.lines().collect();
    assert_eq!(
        notes,
        [
            "baton: --prefill-mode: chunked has no effect: steps always hold chunks of prefills beside decodes",
            "baton: --overrides: opt=O3: no effect, since models are not compiled",
            "baton: --model-lib: /models/lib.so is ignored, since models are not compiled",
        ]
    );
    for (dialect, mode) in [("openai", None), ("mlc", Some("local"))] {
        let (printed, notes) = self::printed(&mut baton(&["serve", "sim:", "--dialect", dialect]));
        assert_eq!((printed.get("mode").and_then(toml::Value::as_str), notes.as_str()), (mode, ""));
    }
}

#[test]
fn a_mode_sizes_the_workers() {
    // 2 layers × 2 × 1 head × 4 elements × 2 bytes = 32 bytes a token: 16 KiB hold 512 tokens, which is 32 blocks.
    let sizes = "context_len=512 kv_blocks=32";
    for (mode, sequences) in [("local", 4), ("interactive", 1), ("server", 64)] {
        let mut running = Running::start(serve_sim().args(["--mode", mode, "--kv-memory", "16KiB"]));
        running.wait_log(&[&format!("{sizes} sequences_max={sequences} step_tokens=128")]);
    }
    let overrides = "max_num_sequence=2;max_total_seq_length=64;prefill_chunk_size=8;context_window_size=48";
    let mut running = Running::start(serve_sim().args(["--overrides", overrides]));
    running.wait_log(&["context_len=48 kv_blocks=4 sequences_max=2 step_tokens=8"]);
}

/// Sends a request to `/generate` of a server that logs its address, until it is served.
fn generate(log: &[String]) {
    let line = log.iter().find(|line| line.contains("serving http service=\"gateway\"")).unwrap();
    let address = line.split_whitespace().find_map(|word| word.strip_prefix("address=")).unwrap();
    let body = r#"{"prompt": "abc", "max_tokens": 2}"#;
    let start = Instant::now();
    loop {
        let mut socket = TcpStream::connect(address.trim_matches('"')).unwrap();
        let head = "POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close";
        write!(socket, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        if answer.starts_with("HTTP/1.1 200") {
            return;
        }
        assert!(answer.starts_with("HTTP/1.1 503") && start.elapsed() < PATIENCE, "{answer}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn requests_are_traced_when_asked_for() {
    let events = [
        "arrived dialect=\"vllm\"",
        "read model=\"sim\"",
        "admitted",
        "runs",
        "first token",
        "ended status=200",
    ];
    for traced in [true, false] {
        let mut running = Running::start(serve_sim().arg(format!("--enable-tracing={traced}")));
        let log = running.wait_log(&["serving http service=\"gateway\"", "local:decode-0"]);
        generate(&log);
        running.signal("TERM");
        assert_eq!(running.exit_code(), Some(0));
        let mut rest = String::new();
        running.0.stderr.take().unwrap().read_to_string(&mut rest).unwrap();
        for event in events {
            let found = rest.lines().any(|line| line.contains("baton::requests") && line.contains(event));
            assert_eq!(found, traced, "{event} in {rest}");
        }
    }
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
        // Ready, so past everything that comes before the signals are heard.
        running.wait_log(&["local:decode-0", "ready: a probe went through"]);
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
