//! What this gateway measures, and the cluster as its routers see it: for the dashboard.
//!
//! Latencies and throughput are the gateway's own, as clients have them; members and their load are the routers', each of
//! which is asked when somebody looks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::join_all;
use node::figures::{Buckets, Figures};
use node::history::History;
use node::{Context, Readiness};
use proto::Role;
use proto::wire::LookRequest;
use proto::wire::overview_client::OverviewClient;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::metrics::{CLIENT_GONE, ITL, REQUESTS, REQUESTS_TOTAL, TTFT};

/// Pause between two moments.
const EVERY: Duration = Duration::from_secs(2);
/// Moments whose latencies are taken together: of fewer there is seldom enough to tell a percentile.
const WINDOW: usize = 5;
/// Longest wait for a router.
const ROUTER_TIME_MAX: Duration = Duration::from_secs(1);
/// Most routers that are asked.
const ROUTERS_MAX: usize = 16;

/// Requests of clients, not of probes.
const CLIENTS: &[(&str, &str)] = &[("probe", "false")];

/// What was measured in the last minutes.
#[derive(Default)]
pub(crate) struct Overview {
    measured: Mutex<Measured>,
}

#[derive(Default)]
struct Measured {
    own: Figures,
    history: History,
    /// Latencies as they were at the last moments.
    window: VecDeque<(Buckets, Buckets)>,
}

/// An overview as it is shown.
#[derive(Debug, Serialize)]
pub(crate) struct Page {
    gateway: GatewayPage,
    routers: Vec<RouterPage>,
}

#[derive(Debug, Serialize)]
struct GatewayPage {
    /// When it was made, milliseconds of Unix time.
    at_ms: u64,
    /// Pause between two moments of the history.
    every_ms: u64,
    /// What this process waits for before it takes work.
    obstacle: Option<String>,
    /// Requests by state.
    requests: BTreeMap<String, f64>,
    /// Requests that ended since it started, by HTTP status.
    ended: BTreeMap<String, f64>,
    history: History,
}

#[derive(Debug, Serialize)]
struct RouterPage {
    address: String,
    /// What it sees; none when it did not answer, or has not looked yet.
    overview: Option<Box<RawValue>>,
    /// Why there is none.
    error: Option<String>,
}

impl Overview {
    /// Measures again and again. Runs until dropped.
    pub(crate) async fn keep(self: Arc<Self>) {
        let mut every = tokio::time::interval(EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            if let Ok(figures) = Figures::own() {
                self.measured().take(figures, unix_milliseconds());
            }
        }
    }

    /// What is measured here, and what each router sees now.
    pub(crate) async fn page(self: Arc<Self>, context: Context) -> Page {
        let members = context.members.borrow().clone();
        let routers = members.iter().filter(|member| member.role == Role::Router).take(ROUTERS_MAX);
        let routers = join_all(routers.map(|router| look(&context, router.address.clone()))).await;
        Page { gateway: self.measured().page(&context.readiness), routers }
    }

    fn measured(&self) -> MutexGuard<'_, Measured> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks a router what it sees.
async fn look(context: &Context, address: String) -> RouterPage {
    let mut client = node::limits!(OverviewClient::new(context.network.connect(&address)));
    let mut request = tonic::Request::new(LookRequest {});
    request.set_timeout(ROUTER_TIME_MAX);
    let overview = match client.look(request).await {
        Ok(page) => serde_json::from_slice::<Option<Box<RawValue>>>(&page.into_inner().json)
            .map_err(|error| format!("its overview cannot be read: {error}")),
        Err(status) => Err(status.message().to_owned()),
    };
    match overview {
        Ok(Some(overview)) => RouterPage { address, overview: Some(overview), error: None },
        Ok(None) => RouterPage { address, overview: None, error: Some("it has not looked yet".to_owned()) },
        Err(error) => RouterPage { address, overview: None, error: Some(error) },
    }
}

impl Measured {
    fn take(&mut self, now: Figures, at_ms: u64) {
        let latencies = (now.buckets(TTFT, CLIENTS), now.buckets(ITL, CLIENTS));
        let (ttft, itl) = match self.window.front() {
            Some((ttft, itl)) => (latencies.0.since(ttft), latencies.1.since(itl)),
            None => Default::default(),
        };
        let is_first = self.window.is_empty();
        let before = &self.own;
        let counted = |name: &str, labels: &[(&str, &str)]| {
            let count = now.sum(name, labels).unwrap_or(0.0) - before.sum(name, labels).unwrap_or(0.0);
            (!is_first).then_some(count.max(0.0))
        };
        let gone = CLIENT_GONE.to_string();
        let milliseconds = |seconds: Option<f64>| seconds.map(|seconds| seconds * 1e3);
        let count = |name: &str| counted(&format!("{name}_count"), CLIENTS);
        // Every token was somebody's first, or came after another.
        let tokens = count(TTFT).zip(count(ITL)).map(|(first, next)| first + next);
        let row = [
            ("ttft_p50_ms", milliseconds(ttft.quantile(0.5))),
            ("ttft_p95_ms", milliseconds(ttft.quantile(0.95))),
            ("itl_p50_ms", milliseconds(itl.quantile(0.5))),
            ("itl_p95_ms", milliseconds(itl.quantile(0.95))),
            ("tokens_per_second", tokens.map(|tokens| tokens / EVERY.as_secs_f64())),
            ("requests", Some(now.sum(REQUESTS, &[]).unwrap_or(0.0))),
            ("ended", counted(REQUESTS_TOTAL, CLIENTS)),
            ("refused", counted(REQUESTS_TOTAL, &[("status", "429")])),
            ("gone", counted(REQUESTS_TOTAL, &[("status", gone.as_str())])),
        ];
        self.history.push(at_ms, &row);
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(latencies);
        self.own = now;
    }

    fn page(&self, readiness: &Readiness) -> GatewayPage {
        GatewayPage {
            at_ms: unix_milliseconds(),
            every_ms: EVERY.as_millis() as u64,
            obstacle: readiness.obstacle(),
            requests: self.own.by(REQUESTS, &[], "state"),
            ended: self.own.by(REQUESTS_TOTAL, CLIENTS, "status"),
            history: self.history.clone(),
        }
    }
}

fn unix_milliseconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(first: u32, next: u32) -> Figures {
        Figures::parse(&format!(
            "baton_gateway_ttft_seconds_bucket{{probe=\"false\",le=\"0.1\"}} {first}\n\
             baton_gateway_ttft_seconds_bucket{{probe=\"false\",le=\"+Inf\"}} {first}\n\
             baton_gateway_ttft_seconds_count{{probe=\"false\"}} {first}\n\
             baton_gateway_itl_seconds_bucket{{probe=\"false\",le=\"0.01\"}} {next}\n\
             baton_gateway_itl_seconds_bucket{{probe=\"false\",le=\"+Inf\"}} {next}\n\
             baton_gateway_itl_seconds_count{{probe=\"false\"}} {next}\n\
             baton_gateway_itl_seconds_count{{probe=\"true\"}} 99\n"
        ))
    }

    #[test]
    fn a_moment_shows_what_came_since_the_last() {
        let mut measured = Measured::default();
        measured.take(figures(5, 50), 1000);
        measured.take(figures(7, 90), 3000);
        measured.take(figures(7, 90), 5000);
        let history = serde_json::to_value(&measured.history).unwrap();
        let column = |name: &str| history["columns"][name].clone();
        assert_eq!(history["at_ms"], serde_json::json!([1000, 3000, 5000]));
        assert_eq!(column("tokens_per_second"), serde_json::json!([null, 21.0, 0.0]));
        assert_eq!(column("ttft_p50_ms"), serde_json::json!([null, 50.0, 50.0]));
        assert_eq!(column("itl_p50_ms"), serde_json::json!([null, 5.0, 5.0]));
        // After the window nothing is known any more.
        for moment in 0..WINDOW as u64 {
            measured.take(figures(7, 90), 7000 + moment);
        }
        let history = serde_json::to_value(&measured.history).unwrap();
        assert_eq!(
            history["columns"]["ttft_p50_ms"].as_array().unwrap().last().unwrap(),
            &serde_json::Value::Null
        );
    }
}
