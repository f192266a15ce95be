//! The port for operators: metrics, health, dumps of state and the dashboard, in plain HTTP whatever secures the other
//! ports.
//!
//! It answers from the start of the process, before a model is loaded, to its end: a drain does not close it, and no
//! call of it holds a drain open.

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use serde::Serialize;

use crate::debug::{Dumps, Excerpt, Missing};
use crate::serve::serve_operators;
use crate::{Context, Error, Member, Serving, dashboard, metrics};

/// What is shown is true for the moment that it is asked for.
pub(crate) const NOT_KEPT: (axum::http::HeaderName, &str) = (CACHE_CONTROL, "no-store");

/// What the port serves beside metrics and health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Dumps of state at `/debug`, and the dashboard at `/dashboard` where a service offers one.
    Shown,
    /// Neither.
    Hidden,
}

/// Serves operators at `host:port`:
///
/// | path | answer |
/// |---|---|
/// | `/metrics` | all metrics, in Prometheus's text format |
/// | `/health/live` | 200: the process lives |
/// | `/health/ready` | 200 when every service of the process takes work; else 503, and the body says what it waits for |
/// | `/debug` | which dumps of state there are; each is JSON at `/debug/NAME` |
/// | `/dashboard` | a page for people: the cluster as a router or gateway sees it |
///
/// # Errors
/// Those of [`metrics::install`], and [`Error::Bind`] when the address cannot be listened on.
pub async fn serve(address: &str, pages: Pages, context: &Context) -> Result<Serving, Error> {
    metrics::install()?;
    let (readiness, shutdown) = (context.readiness.clone(), context.shutdown.clone());
    let ready = move || {
        let draining = shutdown.is_draining().then(|| "draining".to_owned());
        let answer = match draining.or_else(|| readiness.obstacle()) {
            None => (StatusCode::OK, "ready\n".to_owned()),
            Some(obstacle) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {obstacle}\n")),
        };
        async move { ([NOT_KEPT], answer).into_response() }
    };
    let mut routes = Router::new()
        .route("/metrics", get(page_of_metrics))
        .route("/health/live", get(async || ([NOT_KEPT], "alive\n")))
        .route("/health/ready", get(ready));
    if pages == Pages::Shown {
        let process = context.clone();
        let dump = context.debug.add("process", move || {
            let dump = ProcessDump::of(&process);
            async move { dump }
        });
        // The dump is there for as long as its page is.
        let dump = std::sync::Arc::new(dump);
        let index = move |State(dumps): State<Dumps>| {
            let _dump = dump.clone();
            async move { list(&dumps) }
        };
        let dumps = Router::new()
            .route("/debug", get(index))
            .route("/debug/{name}", get(dump_of))
            .with_state(context.debug.clone());
        routes = routes.merge(dumps).merge(dashboard::routes(&context.debug));
    }
    serve_operators(address, routes, context).await
}

async fn page_of_metrics() -> Response {
    match metrics::render() {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// The page of all dumps. Names are the process's own, of letters, digits, points and hyphens.
fn list(dumps: &Dumps) -> Response {
    let items: String =
        dumps.names().iter().map(|name| format!("<li><a href=\"/debug/{name}\">{name}</a></li>\n")).collect();
    let page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>Baton: state</title>\n\
         <h1>State of this process</h1>\n<p>Each is JSON, made when it is asked for.</p>\n<ul>\n{items}</ul>\n\
         <p><a href=\"/metrics\">metrics</a>, <a href=\"/health/ready\">readiness</a></p>\n</html>\n"
    );
    ([NOT_KEPT], Html(page)).into_response()
}

async fn dump_of(State(dumps): State<Dumps>, Path(name): Path<String>) -> Response {
    answer(dumps.make(&name).await)
}

/// A dump as an answer: JSON, or in one line why there is none.
pub(crate) fn answer(made: Result<Vec<u8>, Missing>) -> Response {
    let status = match made {
        Ok(json) => return ([NOT_KEPT, (CONTENT_TYPE, "application/json")], json).into_response(),
        Err(Missing::Unknown) => StatusCode::NOT_FOUND,
        Err(Missing::Late) => StatusCode::SERVICE_UNAVAILABLE,
        Err(Missing::TooLarge | Missing::Unwritten) => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let reason = made.err().map(|missing| missing.to_string()).unwrap_or_default();
    (status, [NOT_KEPT], format!("{reason}\n")).into_response()
}

/// What the process is, whatever its services are.
#[derive(Debug, Serialize)]
struct ProcessDump {
    version: &'static str,
    pid: u32,
    uptime_seconds: f64,
    draining: bool,
    /// Each service, and what it waits for before it takes work.
    services: std::collections::BTreeMap<String, Option<String>>,
    /// Who else there is, as discovery knows them.
    members: Excerpt<Member>,
    /// Tasks that run.
    tasks: usize,
    /// Tasks that wait for one of `threads`, the runtime's, to take them.
    tasks_waiting: usize,
    threads: usize,
}

impl ProcessDump {
    fn of(context: &Context) -> Self {
        let members = context.members.borrow().clone();
        let runtime = tokio::runtime::Handle::current();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            pid: std::process::id(),
            uptime_seconds: context.clock.now().as_secs_f64(),
            draining: context.shutdown.is_draining(),
            services: context.readiness.all(),
            members: Excerpt::of(members.len(), members.iter().cloned()),
            tasks: context.tasks.count(),
            tasks_waiting: runtime.metrics().global_queue_depth(),
            threads: runtime.metrics().num_workers(),
        }
    }
}
