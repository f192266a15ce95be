//! Workers on a GPU that a stand-in for the driver gives them: the same tokens as on the processor, wherever the prompt is
//! computed and wherever it is decoded; and what becomes of a worker without a GPU, or whose GPU is lost.
//!
//! Needs `cargo xtask cuda-stand-in`, `cargo xtask e2e-binary` and the default model.

use std::sync::OnceLock;

use baton_tests::client::{Answer, Ask, Client};
use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use baton_tests::golden;

/// Tokens of an answer.
const TOKENS: usize = 8;
/// The prompt.
const PROMPT: [u32; 5] = [504, 3575, 282, 4649, 314];
/// A stand-in has few fibers to spare, and its memory is the machine's.
const SIZES: &str = "--kv-blocks 16 --step-tokens 64 --sequences-max 4 --threads 1";

const PREFILL: Name = (Service::Prefill, 0);
const DECODE: Name = (Service::Decode, 0);

/// One test at a time: a probe that takes ten seconds has failed, and fibers need a core each.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The default model's first three layers: a step of all takes a stand-in seconds. The others' weights stay in the file, and
/// nothing reads them.
fn three_layers() -> &'static str {
    static FILE: OnceLock<(tempfile::TempDir, String)> = OnceLock::new();
    let (_, path) = FILE.get_or_init(|| {
        let mut bytes = std::fs::read(golden::model()).expect("the default model");
        // After the key come the type's code, 4 for u32, and the value.
        let key = b"llama.block_count";
        let at = bytes.windows(key.len()).position(|window| window == key).expect("the number of layers");
        let value = &mut bytes[at + key.len()..][..8];
        assert_eq!(value, [4, 0, 0, 0, 30, 0, 0, 0]);
        value[4] = 3;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("three-layers.gguf");
        std::fs::write(&path, bytes).expect("the temporary folder can be written");
        let path = path.into_os_string().into_string().expect("UTF-8");
        (folder, path)
    });
    path
}

/// A cluster whose workers find the stand-in when they look for a driver; it is like that.
fn settings(stand_in: &[(&str, &str)]) -> Settings {
    let root = golden::root();
    let libraries = [root.join(".cache/cuda-stand-in"), root.join(".cache/cuda-nvrtc")];
    let libraries =
        std::env::join_paths(libraries).expect("no colon in a path").into_string().expect("UTF-8");
    let stand_in = stand_in.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let mut worker: Vec<String> = SIZES.split(' ').map(str::to_owned).collect();
    worker.extend(["--cache-dir".to_owned(), root.join(".cache").display().to_string()]);
    Settings {
        model: three_layers().to_owned(),
        environment: stand_in.chain([("LD_LIBRARY_PATH".to_owned(), libraries)]).collect(),
        router: vec!["--placement".to_owned(), "split".to_owned()],
        worker,
        ..Settings::default()
    }
}

/// A cluster that is ready, with a prefill worker and a decode worker on those devices.
async fn cluster(stand_in: &[(&str, &str)], prefill: &str, decode: &str) -> Cluster {
    let mut cluster = Cluster::new(settings(stand_in));
    cluster.spawn_with(PREFILL, &["--device", prefill]);
    cluster.spawn_with(DECODE, &["--device", decode]);
    for service in [Service::Router, Service::Gateway] {
        cluster.spawn((service, 0));
    }
    cluster.wait_ready().await;
    cluster
}

/// The answer of such a cluster, and the KV bytes that went between its workers.
async fn answer(prefill: &str, decode: &str) -> (Answer, f64) {
    let cluster = cluster(&[], prefill, decode).await;
    let answer = Client::new(cluster.grpc_port()).ask(&Ask::greedy(&PROMPT, TOKENS)).await;
    let bytes =
        cluster.metrics(DECODE).await.sum("baton_worker_kv_transfer_bytes_total", &["direction=\"in\""]);
    for (name, device) in [(PREFILL, prefill), (DECODE, decode)] {
        let on_gpu = cluster.log(name).contains("computing on a GPU");
        assert_eq!(on_gpu, device == "cuda", "{name:?}; log:\n{}", cluster.log(name));
    }
    (answer, bytes)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tokens_are_the_same_on_either_side_of_a_hand_off() {
    let _alone = ALONE.lock().await;
    let (expected, _) = answer("cpu", "cpu").await;
    assert_eq!((expected.error, expected.tokens.len()), (None, TOKENS));
    for (prefill, decode) in [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")] {
        let (answer, bytes) = answer(prefill, decode).await;
        assert_eq!(answer.error, None, "{prefill} to {decode}");
        assert_eq!(answer.tokens, expected.tokens, "{prefill} to {decode}");
        assert!(bytes > 0.0, "{prefill} to {decode}: KV went from one to the other");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_on_elsewhere_when_its_gpu_is_lost() {
    let _alone = ALONE.lock().await;
    let (expected, _) = answer("cpu", "cpu").await;
    // Three layers of 16 launches and four for all else are 52 for a step: it is lost some steps after the probe's.
    let mut cluster = cluster(&[("STAND_IN_FAIL", "cuLaunchKernel:250")], "cpu", "cuda").await;
    let client = Client::new(cluster.grpc_port());
    let ask = Ask::greedy(&PROMPT, TOKENS);
    let replaced = async {
        cluster.wait_log(DECODE, "the engine's thread panicked; this worker ends").await;
        cluster.spawn_with((Service::Decode, 1), &["--device", "cpu"]);
    };
    let (answer, ()) = tokio::join!(client.ask(&ask), replaced);
    assert_eq!(answer.error, None);
    assert_eq!(answer.tokens, expected.tokens);
    let status = cluster.wait_exit(DECODE, PATIENCE);
    assert!(!status.success(), "whoever started it sees that it failed: {status}");
    let log = cluster.log(DECODE);
    assert!(log.contains("unspecified launch failure (CUDA_ERROR_LAUNCH_FAILED)"), "{log}");
}

/// Starts a worker that cannot run; gives the last line that it said.
fn refused(settings: Settings, arguments: &[&str]) -> String {
    let mut cluster = Cluster::new(settings);
    cluster.spawn_with(DECODE, arguments);
    let status = cluster.wait_exit(DECODE, PATIENCE);
    assert!(!status.success(), "{status}");
    cluster.log(DECODE).lines().last().unwrap_or_default().to_owned()
}

#[test]
fn a_device_that_is_not_there_is_one_clear_line() {
    let _alone = ALONE.blocking_lock();
    let without = Settings { environment: Vec::new(), ..settings(&[]) };
    let on_gpu = ["--device", "cuda"];
    let little = settings(&[("STAND_IN_MEMORY_MIB", "20")]);
    for (settings, arguments, expected) in [
        (
            without,
            &on_gpu[..],
            "device: no NVIDIA driver on this machine (libcuda.so.1): install one, or use --device cpu",
        ),
        (
            settings(&[]),
            &["--device", "cuda:1"],
            "device: cuda:1 is not there: this machine has 1, numbered from 0",
        ),
        (little, &on_gpu, "device: out of GPU memory: "),
        (
            settings(&[]),
            &["--device", "cuda", "--gpu-memory-utilization", "0.001"],
            "kv_blocks: 589824 bytes are needed for 16 blocks of 16 tokens, gpu_memory_utilization leaves 0",
        ),
    ] {
        let line = refused(settings, arguments);
        assert!(line.contains(expected), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn auto_takes_the_gpu_if_there_is_one_of_use() {
    let _alone = ALONE.lock().await;
    for (stand_in, on_gpu) in [(("STAND_IN_DEVICES", "1"), true), (("STAND_IN_CAPABILITY", "75"), false)] {
        let mut cluster = Cluster::new(settings(&[stand_in]));
        cluster.spawn(DECODE);
        cluster.wait_log(DECODE, "model loaded").await;
        assert_eq!(cluster.count_log(DECODE, "computing on a GPU") == 1, on_gpu, "{}", cluster.log(DECODE));
        assert_eq!(cluster.count_log(DECODE, "the GPU is not used") == 0, on_gpu, "{}", cluster.log(DECODE));
    }
}
