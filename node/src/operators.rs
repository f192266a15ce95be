//! The port for operators: metrics and health, in plain HTTP whatever secures the other ports.
//!
//! It answers from the start of the process, before a model is loaded, to its end: a drain does not close it, and no
//! call of it holds a drain open.

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::serve::serve_operators;
use crate::{Context, Error, Serving, metrics};

/// What is shown is true for the moment that it is asked for.
const NOT_KEPT: (axum::http::HeaderName, &str) = (CACHE_CONTROL, "no-store");

/// Serves operators at `host:port`:
///
/// | path | answer |
/// |---|---|
/// | `/metrics` | all metrics, in Prometheus's text format |
/// | `/health/live` | 200: the process lives |
/// | `/health/ready` | 200 when every service of the process takes work; else 503, and the body says what it waits for |
///
/// # Errors
/// Those of [`metrics::install`], and [`Error::Bind`] when the address cannot be listened on.
pub async fn serve(address: &str, context: &Context) -> Result<Serving, Error> {
    metrics::install()?;
    metrics::keep_up(context);
    let (readiness, shutdown) = (context.readiness.clone(), context.shutdown.clone());
    let ready = move || {
        let draining = shutdown.is_draining().then(|| "draining".to_owned());
        let answer = match draining.or_else(|| readiness.obstacle()) {
            None => (StatusCode::OK, "ready\n".to_owned()),
            Some(obstacle) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {obstacle}\n")),
        };
        async move { ([NOT_KEPT], answer).into_response() }
    };
    let routes = Router::new()
        .route("/metrics", get(page_of_metrics))
        .route("/health/live", get(async || ([NOT_KEPT], "alive\n")))
        .route("/health/ready", get(ready));
    serve_operators(address, routes, context).await
}

async fn page_of_metrics() -> Response {
    match metrics::render() {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}
