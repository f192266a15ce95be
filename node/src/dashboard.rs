//! The dashboard: a page for people, and the state that it shows.
//!
//! The page is one for routers and gateways. It asks nobody but the process that serves it, needs no network beyond, and
//! has no script or style but its own two files, which its security policy says.

use axum::Router;
use axum::extract::State;
use axum::http::HeaderName;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::debug::Dumps;
use crate::operators::{NOT_KEPT, answer};

/// The dumps that a dashboard shows, the best first: a gateway's has its routers' in it.
const OVERVIEWS: [&str; 2] = ["overview.gateway", "overview.router"];

const POLICY: (HeaderName, &str) = (
    CONTENT_SECURITY_POLICY,
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'",
);

/// `/dashboard`, what it is made of, and `/dashboard/state`.
pub(crate) fn routes(dumps: &Dumps) -> Router {
    Router::new()
        .route("/dashboard", get(page))
        .route("/dashboard/style.css", get(async || file("text/css", include_str!("dashboard/style.css"))))
        .route(
            "/dashboard/script.js",
            get(async || file("text/javascript", include_str!("dashboard/script.js"))),
        )
        .route("/dashboard/icon.svg", get(async || file("image/svg+xml", include_str!("dashboard/icon.svg"))))
        .route("/dashboard/state", get(state))
        .with_state(dumps.clone())
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        POLICY,
        NOT_KEPT,
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CONTENT_TYPE, kind),
    ];
    (headers, text).into_response()
}

async fn page(State(dumps): State<Dumps>) -> Response {
    if offered(&dumps).is_none() {
        let reason = "a worker has no dashboard, its routers' and gateways' show it\n";
        return (axum::http::StatusCode::NOT_FOUND, reason).into_response();
    }
    file("text/html; charset=utf-8", include_str!("dashboard/page.html"))
}

async fn state(State(dumps): State<Dumps>) -> Response {
    answer(dumps.make(offered(&dumps).unwrap_or_default()).await)
}

fn offered(dumps: &Dumps) -> Option<&'static str> {
    OVERVIEWS.into_iter().find(|name| dumps.has(name))
}
