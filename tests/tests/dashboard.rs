//! The dashboard of real processes in a real browser; and that what dashboards and alerts name is really there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use baton_tests::browser::{Browser, promtool};
use baton_tests::client::{Ask, Client};
use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use serde_json::Value;
use tokio::task::JoinHandle;

const GATEWAY: Name = (Service::Gateway, 0);
const ROUTER: Name = (Service::Router, 0);
const PREFILL: Name = (Service::Prefill, 0);
const DECODE: Name = (Service::Decode, 0);
const VICTIM: Name = (Service::Decode, 1);

/// Clients that ask at the same time.
const CLIENTS: u32 = 4;

/// Workers of made-up words.
async fn cluster() -> Cluster {
    let worker = ["--model", "sim:vocab=512,decode_token_us=2000", "--kv-blocks", "256"];
    let worker = worker.map(str::to_owned).to_vec();
    let mut cluster = Cluster::new(Settings { worker, ..Settings::default() });
    for name in [PREFILL, DECODE, VICTIM, ROUTER, GATEWAY] {
        cluster.spawn(name);
    }
    cluster.wait_ready().await;
    cluster
}

/// Clients that ask again and again until told to stop.
#[expect(clippy::disallowed_methods, reason = "the test that holds the handles owns the tasks")]
fn load(cluster: &Cluster, stop: &Arc<AtomicBool>) -> Vec<JoinHandle<()>> {
    let one = |client: u32| {
        let (calls, stop) = (Client::new(cluster.grpc_port()), Arc::clone(stop));
        tokio::spawn(async move {
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                round += 1;
                // A start that the prefix cache has, and an end that nobody had before.
                let token = |at: u32| if at < 32 { at } else { (at * (client + 1) + round * 13) % 500 };
                let prompt: Vec<u32> = (0..80).map(token).collect();
                let answer = calls.ask(&Ask::greedy(&prompt, 40)).await;
                assert!(answer.error.is_none(), "{answer:?}");
            }
        })
    };
    (0..CLIENTS).map(one).collect()
}

/// An expression: the state that the page shows for each worker of a role.
fn states(role: &str) -> String {
    format!(
        "[...document.querySelectorAll('#pools table')].filter((table) => table.caption.textContent.startsWith('{role}')) \
         .flatMap((table) => [...table.querySelectorAll('.state')].map((state) => state.textContent))"
    )
}

/// An expression: what a chart says of itself.
fn chart(title: &str) -> String {
    format!(
        "([...document.querySelectorAll('.chart')].find((chart) => chart.querySelector('h3').textContent === '{title}') \
         .querySelector('.values').textContent)"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_shows_the_cluster_live() {
    let mut cluster = cluster().await;
    let stop = Arc::new(AtomicBool::new(false));
    let clients = load(&cluster, &stop);
    let origin = format!("http://127.0.0.1:{}", cluster.operators_port(GATEWAY));
    let mut browser = Browser::start(1280, 1000);
    browser.open(&format!("{origin}/dashboard"));

    // The workers are there, with their KV.
    browser.wait(&format!("{}.join() === 'live'", states("Prefill")), PATIENCE).await;
    browser.wait(&format!("{}.join() === 'live,live'", states("Decode")), PATIENCE).await;
    browser.wait("document.querySelectorAll('#pools .bar').length === 3", PATIENCE).await;
    let label = browser.value("document.querySelector('#pools .bar').getAttribute('aria-label')");
    assert!(label.as_str().is_some_and(|label| label.ends_with("of 256")), "{label}");

    // Numbers are there, and move.
    for title in ["Throughput", "Time to first token", "Time between tokens", "KV transferred", "KV in use"] {
        let value = chart(title);
        browser.wait(&format!("/[1-9]/.test({value})"), PATIENCE).await;
        let first = browser.value(&value);
        let first = first.as_str().expect("a chart has a text").to_owned();
        browser.wait(&format!("{value} !== {first:?}"), PATIENCE).await;
    }
    browser.wait("document.getElementById('freshness').textContent === 'Live'", PATIENCE).await;
    browser.wait("document.getElementById('verdict').dataset.level === 'good'", PATIENCE).await;

    // A worker that dies shows up, and so does its return.
    cluster.kill(VICTIM);
    browser.wait(&format!("{}.includes('lost')", states("Decode")), PATIENCE).await;
    browser.wait("document.getElementById('verdict').dataset.level === 'fault'", PATIENCE).await;
    browser.wait("document.getElementById('alerts').innerText.includes('is lost')", PATIENCE).await;
    cluster.spawn(VICTIM);
    browser.wait(&format!("{}.join() === 'live,live'", states("Decode")), PATIENCE).await;

    // A router that does not answer is said to, and the last that it told stays.
    cluster.signal(ROUTER, "STOP");
    browser.wait("document.getElementById('alerts').innerText.includes('does not answer')", PATIENCE).await;
    assert_eq!(browser.value("document.querySelectorAll('#pools tbody tr').length"), 3);
    cluster.signal(ROUTER, "CONT");
    browser.wait("document.getElementById('alerts').hidden", PATIENCE).await;

    // By keyboard: a chart reads out earlier moments, and the theme changes.
    browser.value("document.querySelector('.plot').focus()");
    browser.call("Input.dispatchKeyEvent", serde_json::json!({"type": "keyDown", "key": "ArrowLeft"}));
    browser.wait("document.querySelector('.readout').textContent.includes('0 s ago')", PATIENCE).await;
    browser.value("document.getElementById('theme').click()");
    assert_eq!(browser.value("document.documentElement.dataset.theme"), "light");

    // On a phone nothing is wider than the screen.
    let phone = serde_json::json!({"width": 375, "height": 800, "deviceScaleFactor": 2, "mobile": true});
    browser.call("Emulation.setDeviceMetricsOverride", phone);
    browser.wait("document.documentElement.scrollWidth <= 375", PATIENCE).await;

    assert_eq!(browser.complaints(), [""; 0]);
    let requests = browser.requests();
    assert!(requests.len() > 5, "{requests:?}");
    let foreign: Vec<_> = requests.iter().filter(|url| !url.starts_with(&format!("{origin}/"))).collect();
    assert!(foreign.is_empty(), "{foreign:?}");

    // The router has the same page of its own, without what gateways alone measure.
    browser.open(&format!("http://127.0.0.1:{}/dashboard", cluster.operators_port(ROUTER)));
    browser.wait(&format!("{}.join() === 'live'", states("Prefill")), PATIENCE).await;
    browser
        .wait(&format!("{}.includes('measured by gateways')", chart("Time to first token")), PATIENCE)
        .await;
    assert_eq!(browser.complaints(), [""; 0]);

    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.expect("no client was let down");
    }

    // When the process is gone, the page says so.
    cluster.kill(ROUTER);
    browser.wait("document.getElementById('freshness').textContent.startsWith('No answer')", PATIENCE).await;
    assert_eq!(browser.value("document.documentElement.classList.contains('stale')"), true);
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/dashboards")
}

fn read(name: &str) -> String {
    let path = folder().join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|fault| panic!("{}: {fault}", path.display()))
}

/// The names of metrics in an expression.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
    let is_metric = |word: &&str| word.starts_with("baton_") || word.starts_with("process_");
    words.filter(is_metric).map(str::to_owned).collect()
}

/// A series' metric: that of its histogram or summary.
fn family(name: &str, known: &BTreeSet<String>) -> String {
    let mut stems = ["_bucket", "_sum", "_count"].iter().filter_map(|ending| name.strip_suffix(ending));
    stems.find(|stem| known.contains(*stem)).unwrap_or(name).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_of_dashboards_and_alerts_is_served() {
    let cluster = cluster().await;
    let answer = Client::new(cluster.grpc_port()).ask(&Ask::greedy(&[5; 40], 8)).await;
    assert!(answer.error.is_none(), "{answer:?}");
    let mut served = BTreeSet::new();
    let mut pages = String::new();
    for name in [GATEWAY, ROUTER, PREFILL, DECODE] {
        let page = cluster.wait_operators(name, "/metrics", 200).await;
        let families = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        served.extend(families.map(str::to_owned));
        pages += &page;
    }
    // A counter of what goes wrong is there once something has.
    let seldom = ["baton_worker_kv_transfer_failures_total", "baton_router_retries_total"].map(str::to_owned);
    let known: BTreeSet<String> = served.into_iter().chain(seldom).collect();
    let mut wanted = named(&read("alerts.yml"));
    let board: Value = serde_json::from_str(&read("grafana.json")).expect("the dashboard is JSON");
    let panels = board["panels"].as_array().expect("the dashboard has panels");
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    for target in targets {
        wanted.extend(named(target["expr"].as_str().expect("a target has an expression")));
    }
    assert!(wanted.len() > 25, "{wanted:?}");
    let missing: Vec<_> = wanted.iter().filter(|name| !known.contains(&family(name, &known))).collect();
    assert!(missing.is_empty(), "{missing:?} in {known:?}");
    assert!(
        pages.contains("baton_gateway_ttft_seconds_bucket{probe=\"false\",le=\"1\"}"),
        "the objective's bucket"
    );
}

#[test]
fn the_grafana_dashboard_is_well_formed() {
    let board: Value = serde_json::from_str(&read("grafana.json")).expect("the dashboard is JSON");
    assert!(
        board["schemaVersion"].as_u64().is_some_and(|version| version >= 36),
        "{}",
        board["schemaVersion"]
    );
    assert_eq!(board["uid"], "baton");
    let variables: Vec<_> = board["templating"]["list"].as_array().expect("variables").iter().collect();
    assert_eq!(variables.iter().map(|variable| &variable["name"]).collect::<Vec<_>>(), ["datasource", "job"]);
    let panels = board["panels"].as_array().expect("panels");
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().expect("an id")).collect();
    assert_eq!(ids.len(), panels.len(), "ids are unique");
    let mut taken = BTreeSet::new();
    for panel in panels {
        let place = |side: &str| panel["gridPos"][side].as_u64().expect("a place");
        assert!(place("x") + place("w") <= 24, "{panel}");
        for (x, y) in (0..place("w")).flat_map(|x| (0..place("h")).map(move |y| (x, y))) {
            assert!(taken.insert((place("x") + x, place("y") + y)), "two panels at one place: {panel}");
        }
        assert!(panel["title"].as_str().is_some_and(|title| !title.is_empty()), "{panel}");
        if panel["type"] == "row" {
            continue;
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{panel}");
        let targets = panel["targets"].as_array().expect("targets");
        assert!(!targets.is_empty(), "{panel}");
        let letters: BTreeSet<_> = targets.iter().map(|target| target["refId"].as_str()).collect();
        assert_eq!(letters.len(), targets.len(), "{panel}");
    }
    let rows = panels.iter().filter(|panel| panel["type"] == "row").count();
    assert_eq!(rows, 7, "one for each stage");
}

#[test]
fn promtool_takes_the_alerts_and_they_fire_when_they_should() {
    for arguments in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]] {
        let output =
            Command::new(promtool()).args(arguments).current_dir(folder()).output().expect("promtool");
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
    }
}
