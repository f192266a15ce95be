//! Where options come from, what they are called, and what comes of them.

use std::process::Command;

use crate::harness::{Folder, assert_refused, baton, output};

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
    for (dialect, mode, requests_max) in [("openai", None, 1000), ("mlc", Some("local"), 4)] {
        let (printed, notes) = self::printed(&mut baton(&["serve", "sim:", "--dialect", dialect]));
        assert_eq!((printed.get("mode").and_then(toml::Value::as_str), notes.as_str()), (mode, ""));
        assert_eq!(printed["requests_max"].as_integer(), Some(requests_max));
    }
}
