//! The manifests of the demo, run as they are: every init container, command, variable, port, probe and grace period. Then
//! each workload is rolled, one pod at a time, while clients stream; every stream must be what it is when nothing happens.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use baton_tests::cluster::binary;
use baton_tests::golden;
use serde_json::{Value, json};

use crate::manifests::{Manifests, root};
use crate::node::{Node, Published};
use crate::pod::Machine;
use crate::registry::{self, Registry};
use crate::{images, rollout, rules};

/// What clients ask, again and again.
const QUESTIONS: [&str; 3] = [
    "What is the capital of Japan?",
    "Tell me of the sea, at length.",
    "How does one bake bread? Explain each step.",
];
/// Tokens of each answer: it goes on for seconds.
const TOKENS: usize = 160;

/// What a stream gave.
#[derive(Clone, Debug, PartialEq)]
struct Told {
    text: String,
    finish: String,
}

/// A stream of a client, from its request to its end.
struct Stream {
    question: usize,
    began: Instant,
    ended: Instant,
    told: Result<Told, String>,
}

/// A client that finds gateways as a service leads to them, over a connection of its own for each request.
#[derive(Clone)]
struct Client {
    published: Published,
    served_name: String,
}

impl Client {
    async fn ask(&self, question: usize) -> Stream {
        let began = Instant::now();
        let told = self.stream(question).await;
        Stream { question, began, ended: Instant::now(), told }
    }

    async fn stream(&self, question: usize) -> Result<Told, String> {
        let gateways = self.published.lock().expect("nobody panics while it is held").get("gateway").cloned();
        let gateways = gateways.unwrap_or_default();
        let address = gateways.get(question % gateways.len().max(1)).ok_or("no gateway is ready")?;
        let body = json!({
            "model": self.served_name, "stream": true, "temperature": 0.7, "seed": 17, "max_tokens": TOKENS,
            "ignore_eos": true, "messages": [{"role": "user", "content": QUESTIONS[question]}],
        });
        let http = reqwest::Client::new();
        let answer = http.post(format!("http://{address}:8000/v1/chat/completions")).json(&body).send().await;
        let answer = answer.map_err(|error| format!("{address}: {error:?}"))?;
        let status = answer.status();
        let text = answer.text().await.map_err(|error| format!("{address}: {error:?}"))?;
        if !status.is_success() {
            return Err(format!("{address}: {status} {text}"));
        }
        read(&text)
    }
}

/// Reads a whole stream of events.
fn read(events: &str) -> Result<Told, String> {
    let mut told = Told { text: String::new(), finish: String::new() };
    let mut is_done = false;
    for event in events.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if event == "[DONE]" {
            is_done = true;
            continue;
        }
        let event: Value = serde_json::from_str(event).map_err(|error| format!("{error} in {event}"))?;
        let choice = &event["choices"][0];
        told.text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        told.finish.push_str(choice["finish_reason"].as_str().unwrap_or_default());
        if !event["error"].is_null() {
            return Err(event.to_string());
        }
    }
    if is_done { Ok(told) } else { Err(format!("a stream without an end: {events}")) }
}

/// Does what blocks beside the runtime's own threads.
async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// A node with the images that the manifests name, and the hub that they fetch from.
async fn machine(manifests: &Manifests, folder: &Path, hub: &str) -> (Machine, Registry) {
    let model =
        manifests.of("ConfigMap").find(|map| map["data"]["source"].is_string()).expect("what is fetched");
    let text = |key: &str| model["data"][key].as_str().expect("a text").to_owned();
    let registry = Registry::start(folder, hub, &text("source"), &text("files"), &golden::model()).await;
    let etcd = root().join(".cache/etcd/etcd");
    let images = vec![
        ("baton:", binary(), images::entry_point()),
        ("registry.k8s.io/etcd:", etcd, "/usr/local/bin/etcd".to_owned()),
    ];
    (Machine { folder: folder.to_owned(), authorities: registry.authorities.clone(), images }, registry)
}

/// Every stream is whole and says what it says undisturbed.
fn assert_undisturbed(streams: &[Stream], expected: &[Told], logs: &str) {
    for Stream { question, told, .. } in streams {
        match told {
            Ok(told) => assert_eq!(*told, expected[*question], "question {question}\n{logs}"),
            Err(error) => panic!("question {question}: a stream was lost: {error}\n{logs}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_serves_and_no_stream_is_lost_while_every_pod_is_replaced() {
    let manifests = Manifests::render("cpu-demo");
    let series = rules::series(&Manifests::render("autoscale"), &Manifests::render("keda"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    // Readable for those whom pods run as.
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("a mode");
    let network = 64 + (std::process::id() % 128) as u8;
    let hub = format!("127.{network}.1.1");
    let (machine, _registry) = machine(&manifests, folder.path(), &hub).await;
    let served_name = "SmolLM2-135M-Instruct".to_owned();
    let mut node = Node::new(manifests, machine, network, vec![(hub, registry::HOST.to_owned())]);
    let client = Client { published: node.published.clone(), served_name };

    let start = Instant::now();
    let node = beside(move || {
        rollout::deploy(&mut node);
        node.wait("clients know a gateway", |node| {
            node.published
                .lock()
                .is_ok_and(|known| known.get("gateway").is_some_and(|known| !known.is_empty()))
        });
        node
    })
    .await;
    println!("ready after {:.1?}", start.elapsed());

    // What is expected of streams is what each is alone.
    let mut expected = Vec::new();
    for question in 0..QUESTIONS.len() {
        let told = client.ask(question).await.told.unwrap_or_else(|error| panic!("{error}\n{}", node.logs()));
        expected.push(told);
    }
    assert!(expected[0].text.contains("Tokyo"), "{expected:?}");
    assert!(expected.iter().all(|told| told.finish == "length"), "{expected:?}");
    metrics_are_there(&node, &series).await;

    let is_over = Arc::new(AtomicBool::new(false));
    let streams: Arc<Mutex<Vec<Stream>>> = Arc::default();
    let clients = (0..QUESTIONS.len()).map(|question| {
        let (client, is_over, streams) = (client.clone(), is_over.clone(), streams.clone());
        async move {
            while !is_over.load(Ordering::Relaxed) {
                let stream = client.ask(question).await;
                let is_lost = stream.told.is_err();
                streams.lock().expect("nobody panics while it is held").push(stream);
                if is_lost {
                    break;
                }
            }
        }
    });
    let ends = is_over.clone();
    let rolling = beside(move || {
        let mut node = node;
        for workload in node.workloads() {
            let start = Instant::now();
            rollout::roll(&mut node, &workload);
            println!("{workload} rolled in {:.1?}", start.elapsed());
        }
        ends.store(true, Ordering::Relaxed);
        node
    });
    let (node, _) = tokio::join!(rolling, futures::future::join_all(clients));

    let streams = std::mem::take(&mut *streams.lock().expect("nobody panics while it is held"));
    let logs = node.logs();
    assert_undisturbed(&streams, &expected, &logs);
    for pod in &node.gone {
        assert!(!pod.killed, "{} was done before its grace was over\n{logs}", pod.name);
        let during =
            |stream: &&Stream| pod.told.is_some_and(|told| stream.began < told && told < stream.ended);
        let running = streams.iter().filter(during).count();
        assert!(running > 0, "streams ran when {} was told to go", pod.name);
        if pod.owner != "etcd" {
            assert!(
                pod.ended.is_some_and(|status| status.success()),
                "{} ended {:?}\n{logs}",
                pod.name,
                pod.ended
            );
        }
        println!("{}: {running} streams ran when it was told to go", pod.name);
    }
    let replaced: BTreeSet<String> = node.gone.iter().map(|pod| pod.owner.clone()).collect();
    assert_eq!(replaced, node.workloads().into_iter().collect(), "every workload was rolled");
    println!("{} streams, none lost", streams.len());
}

/// Every series that a scaler reads is one of a running pod, under the port and path that the monitor reads.
async fn metrics_are_there(node: &Node, series: &BTreeSet<String>) {
    let mut found = BTreeSet::new();
    for pod in node.pods.iter().filter(|pod| pod.owner != "etcd") {
        let url = format!("http://{}:{}/metrics", pod.address, Node::port(pod, "metrics"));
        let page = reqwest::get(url).await.expect("a page of metrics").text().await.expect("text");
        let names = page.lines().filter(|line| !line.starts_with('#'));
        found.extend(names.filter_map(|line| Some(line.split(['{', ' ']).next()?.to_owned())));
    }
    let missing: Vec<_> = series.difference(&found).collect();
    assert!(missing.is_empty(), "no pod has {missing:?}");
}
