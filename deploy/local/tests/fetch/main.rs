//! `baton fetch` against servers that cut, change, redirect, refuse and lie.

#![expect(clippy::unwrap_used, reason = "these are tests")]

mod server;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use baton::fetch::{Config, Hub, run};
use node::{Public, Tls, TlsFiles};
use rcgen::{CertificateParams, KeyPair};
use sha2::{Digest as _, Sha256};

use server::{Asked, Held, Mood, Server};

/// The token that the hub of these tests wants.
const TOKEN: &str = "hf_token_of_the_tests";

/// Bytes of which no two parts are alike.
fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|index| (index * index / 7 + index) as u8).collect()
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A server with these bytes that does everything right.
fn held(bytes: Vec<u8>) -> Held {
    Held { bytes, tag: Some("\"v1\"".into()), knows_ranges: true, ..Held::default() }
}

fn config(source: &str, to: &Path) -> Config {
    Config {
        source: Some(source.to_owned()),
        to: Some(to.to_owned()),
        failures_max: 3,
        pause_max_seconds: Duration::from_millis(100),
        silence_max_seconds: Duration::from_secs(20),
        ..Config::default()
    }
}

/// A hub at an address that nobody listens at, for what needs none.
fn no_hub() -> Hub {
    Hub { endpoint: "http://127.0.0.1:9".to_owned(), token: None }
}

async fn fetch(config: &Config) -> Result<Vec<PathBuf>, String> {
    run(config.clone(), no_hub()).await.map_err(|error| error.to_string())
}

/// The files of a folder, but for the lock.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != ".baton-fetch.lock");
    names.sort();
    names
}

#[tokio::test]
async fn a_url_is_fetched_once() {
    let folder = tempfile::tempdir().unwrap();
    let model = bytes(100_000);
    let server = Server::start(held(model.clone())).await;
    let plain = config(&server.url("/deep/model.gguf?sig=x"), &folder.path().join("new/models"));
    let file = folder.path().join("new/models/model.gguf");
    assert_eq!(fetch(&plain).await.unwrap(), [file.as_path()]);
    assert_eq!(fs::read(&file).unwrap(), model);
    assert_eq!(names(file.parent().unwrap()), ["model.gguf"]);
    assert_eq!(server.take_asked().len(), 1);
    // Without a digest the server is asked for the length, and with one nobody is asked anything.
    fetch(&plain).await.unwrap();
    assert_eq!(server.take_asked().len(), 1);
    let proven = Config { sha256: Some(digest(&model).to_uppercase()), ..plain.clone() };
    fetch(&proven).await.unwrap();
    assert_eq!(server.take_asked(), []);
    // What lies there and is another file is replaced: shorter, or as long with another digest.
    fs::write(&file, &model[1..]).unwrap();
    fetch(&plain).await.unwrap();
    assert_eq!(fs::read(&file).unwrap(), model);
    fs::write(&file, vec![0; model.len()]).unwrap();
    fetch(&proven).await.unwrap();
    assert_eq!(fs::read(&file).unwrap(), model);
    let named = Config { file_name: Some("other.gguf".into()), ..proven };
    assert_eq!(fetch(&named).await.unwrap(), [file.with_file_name("other.gguf")]);
}

#[tokio::test]
async fn a_fetch_that_is_cut_off_goes_on_where_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let model = bytes(300_000);
    let server = Server::start(held(model.clone())).await;
    let config = config(&server.url("/model.gguf"), folder.path());
    // More cuts than failures are allowed: each brought something.
    server.held.lock().unwrap().moods.extend([50_000; 4].map(Mood::CutAfter));
    fetch(&config).await.unwrap();
    assert_eq!(fs::read(folder.path().join("model.gguf")).unwrap(), model);
    assert_eq!(server.sent(), model.len(), "no byte came twice");
    let asked = server.take_asked();
    assert_eq!((asked.len(), asked[0].range.as_deref()), (5, None));
    assert_eq!(asked[4].range.as_deref(), Some("bytes=200000-"));
    assert_eq!(asked[4].if_range.as_deref(), Some("\"v1\""));
    assert_eq!(names(folder.path()), ["model.gguf"]);
}

#[tokio::test]
async fn a_fetch_goes_on_after_a_process_that_ended() {
    let folder = tempfile::tempdir().unwrap();
    let model = bytes(300_000);
    let server = Server::start(held(model.clone())).await;
    let once = Config { failures_max: 1, ..config(&server.url("/model.gguf"), folder.path()) };
    server.held.lock().unwrap().moods.push_back(Mood::CutAfter(100_000));
    let error = fetch(&once).await.unwrap_err();
    assert!(error.starts_with("cannot fetch model.gguf: ") && error.ends_with("failure 1 of 1"), "{error}");
    assert_eq!(names(folder.path()), ["model.gguf.part", "model.gguf.part.version"], "no half of a model");
    fetch(&once).await.unwrap();
    assert_eq!(fs::read(folder.path().join("model.gguf")).unwrap(), model);
    assert_eq!(server.sent(), model.len());
}

#[tokio::test]
async fn parts_of_two_versions_are_never_joined() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (bytes(200_000), bytes(200_001)[1..].to_vec());
    let server = Server::start(held(old)).await;
    let once = Config { failures_max: 1, ..config(&server.url("/model.gguf"), folder.path()) };
    server.held.lock().unwrap().moods.push_back(Mood::CutAfter(100_000));
    fetch(&once).await.unwrap_err();
    {
        let mut held = server.held.lock().unwrap();
        (held.bytes, held.tag) = (new.clone(), Some("\"v2\"".into()));
    }
    fetch(&once).await.unwrap();
    assert_eq!(fs::read(folder.path().join("model.gguf")).unwrap(), new);
    assert_eq!(server.take_asked()[1].range.as_deref(), Some("bytes=100000-"), "it was asked for the rest");
}

#[tokio::test]
async fn a_server_without_ranges_or_versions_sends_all_again() {
    let folder = tempfile::tempdir().unwrap();
    let model = bytes(200_000);
    for (knows_ranges, tag) in
        [(false, Some("\"v1\"".to_owned())), (true, None), (true, Some("W/\"v1\"".into()))]
    {
        let server = Server::start(Held { tag, knows_ranges, ..held(model.clone()) }).await;
        server.held.lock().unwrap().moods.push_back(Mood::CutAfter(100_000));
        fetch(&config(&server.url("/model.gguf"), folder.path())).await.unwrap();
        assert_eq!(fs::read(folder.path().join("model.gguf")).unwrap(), model);
        assert_eq!(server.sent(), 300_000);
        fs::remove_file(folder.path().join("model.gguf")).unwrap();
        // One that never gets further does not go on for ever.
        server.held.lock().unwrap().moods.extend([100_000; 9].map(Mood::CutAfter));
        let error = fetch(&config(&server.url("/model.gguf"), folder.path())).await.unwrap_err();
        assert!(error.contains("failure 3 of 3"), "{error}");
        fs::remove_file(folder.path().join("model.gguf.part")).unwrap();
    }
}

#[tokio::test]
async fn a_digest_proves_what_was_joined_and_refuses_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let model = bytes(200_000);
    // Without a version's name the digest alone says whether the parts belong together: here they do...
    let server = Server::start(Held { tag: None, ..held(model.clone()) }).await;
    let url = server.url("/model.gguf");
    let proven = Config { sha256: Some(digest(&model)), ..config(&url, folder.path()) };
    server.held.lock().unwrap().moods.push_back(Mood::CutAfter(100_000));
    fetch(&proven).await.unwrap();
    assert_eq!(server.sent(), model.len());
    fs::remove_file(folder.path().join("model.gguf")).unwrap();
    // ...and here not, so all comes again.
    let once = Config { failures_max: 1, ..proven.clone() };
    server.held.lock().unwrap().moods.push_back(Mood::CutAfter(100_000));
    fetch(&once).await.unwrap_err();
    fs::write(folder.path().join("model.gguf.part"), vec![1; 100_000]).unwrap();
    fetch(&proven).await.unwrap();
    assert_eq!(fs::read(folder.path().join("model.gguf")).unwrap(), model);
    fs::remove_file(folder.path().join("model.gguf")).unwrap();
    // A wrong one is refused at once, and leaves nothing.
    server.take_asked();
    let wrong = Config { sha256: Some("ab".repeat(32)), ..proven };
    let error = fetch(&wrong).await.unwrap_err();
    let expected = format!("expected sha256 {}, got {}", "ab".repeat(32), digest(&model));
    assert!(error.contains(&expected), "{error}");
    assert_eq!((server.take_asked().len(), names(folder.path())), (1, vec![]));
}

#[tokio::test]
async fn what_may_pass_is_tried_again_and_what_may_not_is_said_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(held(bytes(1000))).await;
    let config = config(&server.url("/model.gguf"), folder.path());
    server.held.lock().unwrap().moods.extend([Mood::Status(503), Mood::Status(429)]);
    fetch(&config).await.unwrap();
    assert_eq!(server.take_asked().len(), 3);
    fs::remove_file(folder.path().join("model.gguf")).unwrap();
    for (status, asked, expected) in [
        (404, 1, "/model.gguf answers 404 Not Found"),
        (401, 1, "answers 401 Unauthorized; a hub wants a token, which HF_TOKEN names"),
        (500, 3, "answers 500 Internal Server Error; that was failure 3 of 3"),
    ] {
        server.held.lock().unwrap().moods = [Mood::Status(status); 3].into();
        let error = fetch(&config).await.unwrap_err();
        assert!(error.ends_with(expected), "{error}");
        assert_eq!(server.take_asked().len(), asked, "{status}");
    }
    server.held.lock().unwrap().moods = [Mood::Silent; 3].into();
    let impatient = Config { silence_max_seconds: Duration::from_millis(50), ..config };
    let error = fetch(&impatient).await.unwrap_err();
    assert!(error.contains("nothing came for 0.05 s; that was failure 3 of 3"), "{error}");
}

/// A hub whose files lie on another server.
async fn hub(model: &[u8], listed_digest: &str) -> (Server, Server, Hub) {
    let files = Server::start(held(model.to_vec())).await;
    let listing = serde_json::json!({"sha": "c0ffee", "siblings": [
        {"rfilename": "README.md", "size": 3},
        {"rfilename": "q/model-q8_0.gguf", "size": model.len(), "lfs": {"sha256": listed_digest, "size": model.len()}},
        {"rfilename": "q/model-q4_0.gguf", "size": 1, "lfs": {"sha256": "00", "size": 1}},
    ]});
    let held = Held {
        listing: Some((listing.to_string(), TOKEN)),
        linked: Some((files.url("/storage/blob?sig=secret"), digest(model))),
        ..Held::default()
    };
    let hub = Server::start(held).await;
    let known = Hub { endpoint: format!("http://{}", hub.address), token: Some(TOKEN.to_owned()) };
    (hub, files, known)
}

#[tokio::test]
async fn a_repository_of_a_hub_is_fetched_at_one_commit() {
    let folder = tempfile::tempdir().unwrap();
    let model = bytes(150_000);
    let (server, files, hub) = hub(&model, &digest(&model)).await;
    let config = Config { files: "*q8_0.gguf".into(), ..config("hf:owner/name@v1", folder.path()) };
    files.held.lock().unwrap().moods.push_back(Mood::CutAfter(50_000));
    let file = folder.path().join("q/model-q8_0.gguf");
    assert_eq!(run(config.clone(), hub.clone()).await.unwrap(), [file.as_path()]);
    assert_eq!(fs::read(&file).unwrap(), model);
    assert_eq!(files.sent(), model.len());
    let bearer = Some(format!("Bearer {TOKEN}"));
    let asked = server.take_asked();
    let paths: Vec<_> = asked.iter().map(|asked| asked.path.as_str()).collect();
    let resolve = "/owner/name/resolve/c0ffee/q/model-q8_0.gguf";
    assert_eq!(paths, ["/api/models/owner/name/revision/v1?blobs=true", resolve, resolve]);
    assert!(asked.iter().all(|asked| asked.authorization == bearer), "the hub knows who asks");
    let elsewhere = files.take_asked();
    assert!(elsewhere.iter().all(|asked| asked.authorization.is_none()), "and nobody else: {elsewhere:?}");
    assert_eq!(elsewhere[1].range.as_deref(), Some("bytes=50000-"));
    // The second time only what the repository holds is asked.
    run(config.clone(), hub.clone()).await.unwrap();
    assert_eq!(server.take_asked().len(), 1);
    assert_eq!(files.take_asked(), Vec::<Asked>::new());
    let named = Config { file_name: Some("model.gguf".into()), ..config.clone() };
    assert_eq!(run(named, hub.clone()).await.unwrap(), [folder.path().join("model.gguf")]);
    for (config, expected) in [
        (
            Config { files: "*.safetensors".into(), ..config.clone() },
            "which has README.md, q/model-q4_0.gguf, q/",
        ),
        (
            Config { files: "*".into(), sha256: Some("ab".repeat(32)), ..config.clone() },
            "--sha256: expected one file like \"*\" in hf:owner/name@v1, found 3",
        ),
        (Config { sha256: Some("ab".repeat(32)), ..config.clone() }, "hf:owner/name@v1 has "),
    ] {
        let error = run(config, hub.clone()).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let stranger = Hub { token: None, ..hub };
    let error = run(config, stranger).await.unwrap_err().to_string();
    assert!(error.contains("401 Unauthorized; a hub wants a token, which HF_TOKEN names"), "{error}");
}

#[tokio::test]
async fn the_digest_on_the_way_to_a_file_counts_where_the_listing_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let model = bytes(10_000);
    let (server, files, hub) = hub(&model, "none").await;
    let config = Config { files: "*q8_0.gguf".into(), ..config("hf:owner/name", folder.path()) };
    run(config.clone(), hub.clone()).await.unwrap();
    fs::remove_file(folder.path().join("q/model-q8_0.gguf")).unwrap();
    files.held.lock().unwrap().bytes.reverse();
    let error = run(config, hub).await.unwrap_err().to_string();
    assert!(error.contains(&format!("expected sha256 {}, got ", digest(&model))), "{error}");
    assert_eq!(server.take_asked()[0].path, "/api/models/owner/name/revision/main?blobs=true");
}

#[tokio::test]
async fn files_of_this_machine_are_copied_once() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = bytes(5000);
    fs::write(from.path().join("a.gguf"), &model).unwrap();
    fs::write(from.path().join("b.txt"), "no model").unwrap();
    let of_folder = config(&from.path().display().to_string(), to.path());
    let copy = to.path().join("a.gguf");
    assert_eq!(fetch(&of_folder).await.unwrap(), [copy.as_path()]);
    assert_eq!((fs::read(&copy).unwrap(), names(to.path())), (model.clone(), vec!["a.gguf".to_owned()]));
    let written = fs::metadata(&copy).unwrap().modified().unwrap();
    let of_file = config(&from.path().join("a.gguf").display().to_string(), to.path());
    let proven = Config { sha256: Some(digest(&model)), ..of_file.clone() };
    for config in [&of_folder, &of_file, &proven] {
        fetch(config).await.unwrap();
        assert_eq!(fs::metadata(&copy).unwrap().modified().unwrap(), written);
    }
    fs::write(&copy, vec![0; model.len()]).unwrap();
    fetch(&of_file).await.unwrap();
    assert_eq!(fs::read(&copy).unwrap(), model, "as long, but another file");
    fs::write(&copy, vec![0; model.len()]).unwrap();
    let wrong = Config { sha256: Some("ab".repeat(32)), ..of_file };
    assert!(fetch(&wrong).await.unwrap_err().contains("expected sha256 abab"));
    assert_eq!(names(to.path()), ["a.gguf"], "what was there is left alone");
    let error = fetch(&config("/no/such", to.path())).await.unwrap_err();
    assert_eq!(error, "cannot fetch /no/such: No such file or directory (os error 2)");
}

#[tokio::test]
async fn two_that_share_a_volume_fetch_once() {
    let folder = tempfile::tempdir().unwrap();
    let model = bytes(100_000);
    let server = Server::start(held(model.clone())).await;
    let config = Config { sha256: Some(digest(&model)), ..config(&server.url("/m.gguf"), folder.path()) };
    let (first, second) = tokio::join!(fetch(&config), fetch(&config));
    assert_eq!(first.unwrap(), second.unwrap());
    assert_eq!(server.take_asked().len(), 1);
    assert_eq!(names(folder.path()), ["m.gguf"]);
}

/// The binary, as a container runs it.
fn baton(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("fetch").args(arguments).stdin(Stdio::null()).stderr(Stdio::piped());
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn over_https_the_authorities_of_the_machine_are_asked() {
    let folder = tempfile::tempdir().unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    let (cert_file, key_file) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    fs::write(&cert_file, certificate.pem()).unwrap();
    fs::write(&key_file, key.serialize_pem()).unwrap();
    let tls = Tls::read(TlsFiles { cert: Some(&cert_file), key: Some(&key_file), client_ca: None }).unwrap();
    let server = Server::start_public(held(bytes(5000)), &Public { tls, ..Public::default() }).await;
    let port = server.address.rsplit(':').next().unwrap();
    let (url, to) = (format!("https://localhost:{port}/m.gguf"), folder.path().join("to"));
    let to_text = to.display().to_string();
    let fetch = |authorities: &Path| {
        let mut command = baton(&[&url, "--to", &to_text, "--failures-max", "1"]);
        command.env("SSL_CERT_FILE", authorities).env_remove("SSL_CERT_DIR").output().unwrap()
    };
    let refused = fetch(&key_file);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("certificate") && refused.status.code() == Some(1), "{said}");
    assert!(!to.join("m.gguf").exists());
    let taken = fetch(&cert_file);
    assert!(taken.status.success(), "{}", String::from_utf8(taken.stderr).unwrap());
    assert_eq!(fs::read(to.join("m.gguf")).unwrap(), bytes(5000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_a_fetch_and_the_environment_names_the_hub() {
    let folder = tempfile::tempdir().unwrap();
    let model = bytes(10_000);
    let (server, _files, hub) = hub(&model, &digest(&model)).await;
    let environment = |command: &mut Command| {
        command
            .env("BATON_TO", folder.path())
            .env("BATON_FILES", "*q8_0.gguf")
            .env("HF_ENDPOINT", &hub.endpoint)
            .env("HF_TOKEN", TOKEN)
            .spawn()
            .unwrap()
    };
    server.held.lock().unwrap().moods.push_back(Mood::Silent);
    let child = environment(&mut baton(&["hf:owner/name"]));
    let start = Instant::now();
    while server.held.lock().unwrap().asked.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(20), "the hub is asked");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Command::new("kill").arg(child.id().to_string()).status().unwrap();
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(said.contains("a signal came") && ended.status.code() == Some(1), "{said}");
    let fetched = environment(&mut baton(&["--source", "hf:owner/name"])).wait_with_output().unwrap();
    let said = String::from_utf8(fetched.stderr).unwrap();
    assert!(fetched.status.success() && said.contains("came") && said.contains("100"), "{said}");
    assert!(!said.contains(TOKEN) && !said.contains("secret"), "neither token nor signature is in the log");
    assert_eq!(fs::read(folder.path().join("q/model-q8_0.gguf")).unwrap(), model);
}
