//! What browsers let pages of other origins do, by the rules of the Fetch standard.

use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use http::header::{
    ACCEPT, ACCEPT_LANGUAGE, ACCESS_CONTROL_REQUEST_METHOD, CONTENT_LANGUAGE, CONTENT_TYPE, ORIGIN,
};
use http::{HeaderName, HeaderValue, Method, Uri};
use node::Error;
use tower::{ServiceExt, service_fn};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use super::request_id::X_REQUEST_ID;
use crate::Config;

/// How long a browser may rely on what it was told.
const MAX_AGE: Duration = Duration::from_mins(10);

/// Stands for every value of a list.
const ALL: &str = "*";

/// The rules, as headers of answers.
pub(super) struct Cors(CorsLayer);

impl Cors {
    pub(super) fn read(config: &Config) -> Result<Self, Error> {
        let layer = CorsLayer::new()
            .allow_origin(origins(config)?)
            .allow_methods(methods(config)?)
            .allow_headers(headers(config)?)
            .expose_headers([X_REQUEST_ID])
            .max_age(MAX_AGE);
        // Where it is not allowed the header is left out: its only value is `true`.
        Ok(Self(if config.allow_credentials { layer.allow_credentials(true) } else { layer }))
    }

    /// Answers what browsers ask before a request, and tells them of each answer who may read it. Any other `OPTIONS`
    /// is a request like others.
    pub(super) fn around(&self, routes: Router) -> Router {
        let (open, guarded) = (routes.clone(), routes.layer(self.0.clone()));
        Router::new().fallback_service(service_fn(move |request: Request| {
            let routes = if is_plain_options(&request) { &open } else { &guarded };
            routes.clone().oneshot(request)
        }))
    }
}

fn is_plain_options(request: &Request) -> bool {
    let asks = |name| request.headers().contains_key(name);
    request.method() == Method::OPTIONS && !(asks(ORIGIN) && asks(ACCESS_CONTROL_REQUEST_METHOD))
}

fn is_all(list: &[String]) -> bool {
    list.iter().any(|value| value == ALL)
}

/// `*` is no answer to a request with credentials: then the origin that asked is named.
fn origins(config: &Config) -> Result<AllowOrigin, Error> {
    let list = &config.allowed_origins;
    if is_all(list) {
        return Ok(if config.allow_credentials { AllowOrigin::mirror_request() } else { AllowOrigin::any() });
    }
    let origins = list.iter().map(|value| origin(value)).collect::<Result<Vec<_>, _>>()?;
    Ok(AllowOrigin::list(origins))
}

/// A scheme, a host and perhaps a port, as browsers write it; or `null`, which is what they write for a local file.
fn origin(value: &str) -> Result<HeaderValue, Error> {
    let written = value.to_ascii_lowercase();
    let parts = written.parse::<Uri>().ok().map(Uri::into_parts);
    let is_origin = parts.is_some_and(|parts| {
        let (scheme, authority) = (parts.scheme, parts.authority);
        scheme.zip(authority).is_some_and(|(scheme, authority)| format!("{scheme}://{authority}") == written)
    });
    match HeaderValue::from_str(&written) {
        Ok(header) if is_origin || written == "null" => Ok(header),
        _ => {
            let message = format!("expected {ALL:?} or an origin such as https://example.org, got {value:?}");
            Err(Error::option("--allowed-origins", message))
        }
    }
}

fn methods(config: &Config) -> Result<AllowMethods, Error> {
    let list = &config.allowed_methods;
    if is_all(list) {
        return Ok(if config.allow_credentials {
            AllowMethods::mirror_request()
        } else {
            AllowMethods::any()
        });
    }
    let method = |value: &String| {
        Method::from_bytes(value.to_ascii_uppercase().as_bytes()).map_err(|_| {
            let message = format!("expected {ALL:?} or a method such as POST, got {value:?}");
            Error::option("--allowed-methods", message)
        })
    };
    Ok(AllowMethods::list(list.iter().map(method).collect::<Result<Vec<_>, _>>()?))
}

/// `*` would not cover `Authorization`, so what was asked for is named. What a page without scripts could send is
/// always allowed, and JSON as well.
fn headers(config: &Config) -> Result<AllowHeaders, Error> {
    let list = &config.allowed_headers;
    if is_all(list) {
        return Ok(AllowHeaders::mirror_request());
    }
    let header = |value: &String| {
        HeaderName::from_bytes(value.as_bytes()).map_err(|_| {
            let message = format!("expected {ALL:?} or the name of a header, got {value:?}");
            Error::option("--allowed-headers", message)
        })
    };
    let listed = list.iter().map(header).collect::<Result<Vec<_>, _>>()?;
    let always = [ACCEPT, ACCEPT_LANGUAGE, CONTENT_LANGUAGE, CONTENT_TYPE];
    Ok(AllowHeaders::list(always.into_iter().chain(listed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_as_browsers_write_them() {
        for (value, written) in [
            ("https://example.org", "https://example.org"),
            ("http://Localhost:3000", "http://localhost:3000"),
            ("http://[::1]:8080", "http://[::1]:8080"),
            ("chrome-extension://abcdef", "chrome-extension://abcdef"),
            ("null", "null"),
        ] {
            assert_eq!(origin(value).unwrap(), written);
        }
        for value in ["", "example.org", "https://", "https://example.org/", "https://a.org/path", "h t://x"]
        {
            let error = origin(value).unwrap_err().to_string();
            let expected = format!(
                "--allowed-origins: expected \"*\" or an origin such as https://example.org, got {value:?}"
            );
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn a_fault_names_its_option() {
        let fault = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            Cors::read(&config).map(drop).unwrap_err().to_string()
        };
        let methods = fault(|config| config.allowed_methods = vec!["PO ST".into()]);
        assert_eq!(methods, "--allowed-methods: expected \"*\" or a method such as POST, got \"PO ST\"");
        let headers = fault(|config| config.allowed_headers = vec!["x:y".into()]);
        assert_eq!(headers, "--allowed-headers: expected \"*\" or the name of a header, got \"x:y\"");
    }
}
