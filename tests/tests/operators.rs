//! What operators see of real processes, on the port of their own.

use std::time::{Duration, Instant};

use baton_tests::client::{Ask, Client};
use baton_tests::cluster::{Cluster, Name, PATIENCE, Service, Settings};
use serde_json::Value;

const GATEWAY: Name = (Service::Gateway, 0);
const ROUTER: Name = (Service::Router, 0);
const PREFILL: Name = (Service::Prefill, 0);
const DECODE: Name = (Service::Decode, 0);
const SERVE: Name = (Service::Serve, 0);

const LIVE: &str = "/health/live";
const READY: &str = "/health/ready";

/// Workers of made-up words, and more time to look at a drain than a slow machine needs.
fn settings() -> Settings {
    let worker = ["--model", "sim:vocab=512", "--drain-notice-seconds", "60"];
    Settings { worker: worker.map(str::to_owned).to_vec(), ..Settings::default() }
}

/// Waits until a process says that it does not take work, and what it waits for: all of `obstacles`.
async fn wait_obstacles(cluster: &Cluster, name: Name, obstacles: &[&str]) {
    let until = Instant::now() + PATIENCE;
    loop {
        let reason = cluster.wait_operators(name, READY, 503).await;
        if obstacles.iter().all(|obstacle| reason.contains(obstacle)) {
            assert!(reason.starts_with("not ready: "), "{reason}");
            return;
        }
        assert!(Instant::now() < until, "{obstacles:?} in {reason}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A process is alive from its start, ready when it takes work, and says what is missing until then and at its end.
#[tokio::test(flavor = "multi_thread")]
async fn every_process_says_whether_it_takes_work() {
    let mut cluster = Cluster::new(settings());
    let alive = (200, "alive\n".to_owned());
    cluster.spawn_armed(DECODE, "worker.loading=return");
    wait_obstacles(&cluster, DECODE, &["decode: the model is being loaded"]).await;
    assert_eq!(cluster.operators(DECODE, LIVE).await, Some(alive.clone()));

    cluster.spawn(ROUTER);
    assert_eq!(cluster.wait_operators(ROUTER, READY, 200).await, "ready\n");
    cluster.spawn(GATEWAY);
    wait_obstacles(&cluster, GATEWAY, &["gateway: no model can be placed"]).await;
    assert_eq!(cluster.operators(GATEWAY, LIVE).await, Some(alive.clone()));

    cluster.kill(DECODE);
    cluster.spawn(DECODE);
    cluster.spawn(PREFILL);
    for name in [DECODE, PREFILL, GATEWAY] {
        assert_eq!(cluster.wait_operators(name, READY, 200).await, "ready\n");
        assert_eq!(cluster.operators(name, LIVE).await, Some(alive.clone()));
    }

    cluster.signal(PREFILL, "TERM");
    wait_obstacles(&cluster, PREFILL, &["draining"]).await;
    assert_eq!(cluster.operators(PREFILL, LIVE).await, Some(alive));
    assert!(cluster.metrics(PREFILL).await.has("baton_worker_leases", &[]), "metrics are served in a drain");
}

/// With everything in one process, all its services have to take work.
#[tokio::test(flavor = "multi_thread")]
async fn one_process_is_ready_when_all_its_services_are() {
    let serve = ["--model", "sim:vocab=512"].map(str::to_owned).to_vec();
    let mut cluster = Cluster::new(Settings { serve, ..Settings::default() });
    cluster.spawn_armed(SERVE, "worker.loading=return");
    let loading = ["decode-0", "prefill-0"].map(|worker| format!("{worker}: the model is being loaded"));
    wait_obstacles(&cluster, SERVE, &[&loading[0], &loading[1], "gateway: no "]).await;
    cluster.kill(SERVE);
    cluster.spawn(SERVE);
    assert_eq!(cluster.wait_operators(SERVE, READY, 200).await, "ready\n");
}

/// A dump of a process, once it says what is waited for.
async fn dump_that(cluster: &Cluster, name: Name, dump: &str, says: impl Fn(&Value) -> bool) -> Value {
    let until = Instant::now() + PATIENCE;
    loop {
        let json = cluster.wait_operators(name, &format!("/debug/{dump}"), 200).await;
        assert!(
            !json.contains("token_ids") && !json.contains("prompt"),
            "a dump has nothing of a prompt: {json}"
        );
        let value = serde_json::from_str(&json).expect("a dump is JSON");
        if says(&value) {
            return value;
        }
        assert!(Instant::now() < until, "{dump} of {name:?} says otherwise: {json}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Whoever looks at a process in the middle of a request sees where it is, at every process that has to do with it.
#[tokio::test(flavor = "multi_thread")]
async fn dumps_tell_where_a_request_is() {
    let worker =
        ["--model", "sim:vocab=512,context_len=8192,decode_token_us=20000"].map(str::to_owned).to_vec();
    let mut cluster = Cluster::new(Settings { worker, ..Settings::default() });
    for name in [PREFILL, DECODE, ROUTER, GATEWAY] {
        cluster.spawn(name);
    }
    cluster.wait_ready().await;
    let index = cluster.wait_operators(GATEWAY, "/debug", 200).await;
    for dump in ["gateway", "process", "overview.gateway"] {
        assert!(index.contains(&format!("\"/debug/{dump}\"")), "{index}");
    }
    let process = dump_that(&cluster, DECODE, "process", |_| true).await;
    assert_eq!(process["services"]["decode"], Value::Null);
    assert_eq!(process["members"]["count"], 3);

    // In the middle of its transfer.
    cluster.arm(DECODE, "decode.transferring=return(4000)").await;
    let client = Client::new(cluster.grpc_port());
    let call = client.clone().start(Ask::greedy(&[7; 100], 4000));
    let is_client = |request: &Value| request["probe"] == false;
    let of_clients = |dump: &Value, state: &str| {
        let requests = dump["requests"]["shown"].as_array().expect("a list");
        requests.iter().any(|request| is_client(request) && request["state"] == state)
    };
    let router = dump_that(&cluster, ROUTER, "router", |dump| of_clients(dump, "transferring")).await;
    let request =
        router["requests"]["shown"].as_array().and_then(|all| all.iter().find(|one| is_client(one)));
    let request = request.expect("the request is there").clone();
    let decode = dump_that(&cluster, DECODE, "decode", |dump| {
        dump["engine"]["sequences"]["shown"][0]["state"] == "fetching"
    })
    .await;
    let sequence = &decode["engine"]["sequences"]["shown"][0];
    assert_eq!(sequence["request"], request["id"]);
    assert_eq!(sequence["fetch"]["tokens"], 100);
    assert_eq!(sequence["fetch"]["owner"], request["prefill"]);
    assert_eq!(decode["engine"]["fetches"], 1);
    let prefill = dump_that(&cluster, PREFILL, "prefill", |dump| dump["leases"] == 1).await;
    let hold = &prefill["engine"]["holds"]["shown"][0];
    assert_eq!((&hold["request"], &hold["tokens"]), (&request["id"], &100.into()));
    assert!(hold["lease_left_seconds"].as_f64().is_some_and(|left| left > 0.0 && left <= 10.0), "{hold}");
    assert!(prefill["kv_blocks"]["held"].as_u64().is_some_and(|held| held >= 7), "{prefill}");

    // In the middle of its tokens.
    let generated = |request: &Value| request["tokens"].as_u64().unwrap_or(0);
    let router = dump_that(&cluster, ROUTER, "router", |dump| {
        of_clients(dump, "decoding")
            && dump["requests"]["shown"]
                .as_array()
                .is_some_and(|all| all.iter().any(|one| generated(one) > 3))
    })
    .await;
    let members = router["members"]["shown"].as_array().expect("a list");
    assert_eq!(members.iter().filter(|member| member["state"] == "live" && member["placed"] == 1).count(), 2);
    let gateway = dump_that(&cluster, GATEWAY, "gateway", |dump| dump["running"] == 1).await;
    let answered = &gateway["requests"]["shown"][0];
    assert_eq!((&answered["state"], &answered["id"]), (&"running".into(), &request["id"]));
    let decode = dump_that(&cluster, DECODE, "decode", |dump| {
        dump["engine"]["sequences"]["shown"][0]["state"] == "decoding"
    })
    .await;
    assert_eq!(decode["engine"]["calls"]["decode"], 1);
    assert_eq!(decode["sequences_by_state"]["running"], 1);
    call.abort();
    dump_that(&cluster, DECODE, "decode", |dump| dump["engine"]["sequences"]["count"] == 0).await;

    // An engine that stands still is told as such, and holds nothing else up.
    cluster.arm(PREFILL, "prefill.computing=return").await;
    let call = client.clone().start(Ask::greedy(&[9; 50], 4));
    let prefill = dump_that(&cluster, PREFILL, "prefill", |dump| dump["engine"].is_null()).await;
    assert!(prefill["kv_blocks"]["total"].as_u64().is_some_and(|total| total > 0), "{prefill}");
    assert_eq!(cluster.operators(PREFILL, LIVE).await, Some((200, "alive\n".to_owned())));
    call.abort();
}

/// The pages can be left out, and with them nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn debug_pages_can_be_switched_off() {
    let mut cluster = Cluster::new(settings());
    cluster.spawn_with(ROUTER, &["--debug-pages=false"]);
    assert_eq!(cluster.wait_operators(ROUTER, READY, 200).await, "ready\n");
    for path in ["/debug", "/debug/router", "/dashboard", "/dashboard/state"] {
        assert_eq!(cluster.operators(ROUTER, path).await.map(|(status, _)| status), Some(404), "{path}");
    }
    assert!(cluster.metrics(ROUTER).await.has("baton_router_requests", &[]));
}
