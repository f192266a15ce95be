//! The binary, as scripts call it.

#![expect(clippy::unwrap_used, reason = "these are tests")]

mod harness;
mod options;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use harness::{Folder, PATIENCE, Running, Taken, assert_refused, baton, output, serve_sim};

#[test]
fn help_names_every_command_and_the_defaults() {
    let (code, help, _) = output(&mut baton(&["--help"]));
    assert_eq!(code, Some(0));
    for command in ["serve", "gateway", "router", "prefill-worker", "decode-worker", "fetch", "role"] {
        assert!(help.contains(&format!("\n  {command} ")), "{command} in {help}");
    }
    // Which option has a flag is checked against the configurations; here, that the defaults come with them.
    for (command, expected) in [
        ("serve", "HTTP port [default: 8000]"),
        ("serve", "[MODEL]"),
        ("gateway", "Address to serve HTTP at [default: 127.0.0.1:8000]"),
        ("router", "--placement <MODE>"),
        ("prefill-worker", "Tokens per KV block [default: 16]"),
        ("decode-worker", "Most sequences that run at once [default: 64, on a GPU 256, or less by the mode]"),
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
        (&["role", "cook", "--worker", "127.0.0.1:9101"], "ROLE: expected prefill or decode, got \"cook\""),
        (&["role", "prefill"], "--worker: expected HOST:PORT, where the worker serves gRPC"),
        (&["role", "prefill", "--worker", "local:x"], "--worker: expected HOST:PORT"),
        (&["cook"], "unrecognized subcommand 'cook'"),
        (&["serve"], "--model: no model was named; `cargo xtask fetch-model` fetches one"),
        (&["prefill-worker", "--discovery", &discovery], "`cargo xtask fetch-model`"),
        (&["serve", "/no/such.gguf"], "found none at /no/such.gguf"),
        (&["serve", "sim:", "--model", "other.gguf"], "two models were named, sim: and other.gguf"),
        (&["serve", "nobody", "--models-dir", "/no/such"], "the name of a model in /no/such, which has none"),
        (&["serve", "HF://mlc-ai/Llama-3"], "--model: a worker fetches nothing, and so no HF:// either"),
        (
            &["serve", "sim:", "--device", "metal:1"],
            "device: metal:1 is not there; this build computes on cpu and cuda",
        ),
        (
            &["serve", "sim:", "--gpu-memory-utilization", "1.5"],
            "gpu_memory_utilization: a number above 0 and up to 1 expected, 1.5 came",
        ),
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
            &["serve", "sim:", "--speculative-mode", "small_draft"],
            "--speculative-mode: speculative decoding comes later",
        ),
        (
            &["serve", "sim:", "--speculative-mode", "medusa"],
            "--speculative-mode: speculative decoding comes later",
        ),
        (&["serve", "sim:", "--port", "65536"], "invalid value '65536' for '--port <PORT>'"),
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
        (
            &["router", "--discovery", "etcd:http://127.0.0.1:2379"],
            "--discovery: expected etcd:http://HOST:PORT,…/PREFIX, got \"http://127.0.0.1:2379\"; the prefix is",
        ),
        (
            &["router", "--discovery", "etcd:http://127.0.0.1:2379/b", "--etcd-lease-seconds", "0.5"],
            "--etcd-lease-seconds: expected whole seconds from 1 to 3600, got 0.5",
        ),
        (
            &["router", "--discovery", "etcd:https://127.0.0.1:2379/b"],
            "--etcd-tls-ca: expected a PEM file beside an https URL",
        ),
        (
            &["router", "--discovery", &discovery, "--cluster-tls-key", "k.pem"],
            "--cluster-tls-ca: expected a PEM file beside --cluster-tls-key",
        ),
        (
            &["router", "--discovery", "etcd:http://127.0.0.1:9/b", "--listen", "0.0.0.0:0"],
            "advertise: expected the address under which others reach this process, got 0.0.0.0:",
        ),
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
        ["request arrived", "dialect=\"vllm\""],
        ["request read", "model=\"sim\""],
        ["request admitted", ""],
        ["request runs", "waited_seconds="],
        ["first token", "ttft_seconds="],
        ["request ended", "status=200"],
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
            let mut of_requests = rest.lines().filter(|line| line.contains("baton::requests"));
            let found = of_requests.any(|line| event.iter().all(|part| line.contains(part)));
            assert_eq!(found, traced, "{event:?} in {rest}");
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
        // Long before it is ready: what is told to go while it starts goes well.
        running.wait_log(&["serving http"]);
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
        running.wait_log(&["serving operators", "serving grpc"]);
        running.signal("TERM");
        assert_eq!(running.exit_code(), Some(0), "{service}");
        let mut stdout = String::new();
        running.0.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        assert!(stdout.is_empty(), "{stdout}");
    }
}

#[test]
fn services_find_each_other_by_name() {
    let taken = Taken::new(5);
    let [router, prefill, decode, http, grpc] = [0, 1, 2, 3, 4].map(|index| taken.address(index));
    drop(taken);
    let discovery = format!("dns:router={router},prefill={prefill},decode={decode}");
    let common = ["--metrics-listen", "127.0.0.1:0", "--discovery", &discovery];
    let services: [(&str, &[&str]); 4] = [
        ("router", &["--listen", &router]),
        ("prefill-worker", &["sim:", "--threads", "1", "--listen", &prefill]),
        ("decode-worker", &["sim:", "--threads", "1", "--listen", &decode]),
        ("gateway", &["--listen", &http, "--grpc-listen", &grpc]),
    ];
    let _running = services.map(|(name, own)| Running::start(baton(&[name]).args(common).args(own)));
    // Ready is a gateway once a request has gone all the way.
    let start = Instant::now();
    while !get(&http, "/v2/health/ready").is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 ")) {
        assert!(start.elapsed() < PATIENCE, "the gateway is ready");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What a server answers, head and all.
fn get(address: &str, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: baton\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
