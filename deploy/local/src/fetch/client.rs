//! HTTP as a fetch needs it: one request at a time, redirects followed, and nobody silent for long.

use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, HeaderMap, LOCATION, RANGE, USER_AGENT};
use http::{HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as Connections;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

/// Redirects after which nothing is expected to come any more.
const REDIRECTS_MAX: usize = 10;
/// Most bytes of an answer that is read as a whole.
const TEXT_BYTES_MAX: usize = 64 << 20;
/// The header in which a hub tells the digest of the file that its redirect leads to.
const LINKED_TAG: &str = "x-linked-etag";

/// What a request came to, once it was answered with success.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// The SHA-256 of the file, where a hub told it on the way.
    pub(super) sha256: Option<String>,
    body: Incoming,
    silence_max: Duration,
}

/// Why a request brought nothing.
#[derive(Debug)]
pub(super) enum Failure {
    /// Asking again leads nowhere.
    Final(String),
    /// It may go better next time, and not before this long from now where the server says so.
    Passing(String, Option<Duration>),
    /// The server's file ends before the byte that was asked for.
    OutOfRange(String),
}

/// Asks servers, each over a connection of its own kind.
#[derive(Clone, Debug)]
pub(super) struct Client {
    connections: Connections<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    silence_max: Duration,
    /// Told to the server that is asked, and to none that it redirects to.
    token: Option<String>,
}

/// Parses a URL that can be fetched.
pub(super) fn url(text: &str) -> Result<Uri, String> {
    let parsed: Uri = text.parse().map_err(|error| format!("{error}, got {text:?}"))?;
    let is_whole = parsed.host().is_some_and(|host| !host.is_empty());
    if is_whole && matches!(parsed.scheme_str(), Some("http" | "https")) {
        return Ok(parsed);
    }
    Err(format!("got {text:?}"))
}

/// A URL without its query.
pub(super) fn shown(url: &Uri) -> String {
    let authority = url.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    // A password may stand before the host.
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{}://{host}{}", url.scheme_str().unwrap_or_default(), url.path())
}

impl Client {
    /// A client that trusts the authorities that this machine does.
    pub(super) fn new(silence_max: Duration, token: Option<String>) -> Self {
        let mut roots = rustls::RootCertStore::empty();
        let known = rustls_native_certs::load_native_certs();
        for error in known.errors {
            tracing::warn!(%error, "authorities of this machine");
        }
        roots.add_parsable_certificates(known.certs);
        let tls =
            rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
                .with_safe_default_protocol_versions()
                .expect("ring knows the default versions")
                .with_root_certificates(roots)
                .with_no_client_auth();
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(silence_max));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let connections = Connections::builder(TokioExecutor::new()).build(connector);
        Self { connections, silence_max, token }
    }

    /// Gets what is at the URL, from a byte on where `from` is more than 0 and the server still has the version of that
    /// tag.
    pub(super) async fn get(&self, url: &Uri, from: u64, tag: Option<&str>) -> Result<Answer, Failure> {
        let (mut at, mut sha256) = (url.clone(), None);
        for _ in 0..=REDIRECTS_MAX {
            let mut request = Request::get(at.clone())
                .header(USER_AGENT, concat!("baton/", env!("CARGO_PKG_VERSION")))
                .header("accept-encoding", "identity");
            if from > 0 {
                request = request.header(RANGE, format!("bytes={from}-"));
                if let Some(tag) = tag {
                    request = request.header("if-range", tag);
                }
            }
            if let Some(token) = &self.token
                && is_same_server(&at, url)
            {
                let mut value = HeaderValue::try_from(format!("Bearer {token}"))
                    .map_err(|_| Failure::Final("the token has characters that no header may have".into()))?;
                value.set_sensitive(true);
                request = request.header(AUTHORIZATION, value);
            }
            let request = request.body(Empty::new()).map_err(|error| Failure::Final(error.to_string()))?;
            let answer = self.ask(request, &at).await?;
            sha256 = sha256.or_else(|| linked_digest(answer.headers()));
            let status = answer.status();
            if status.is_redirection() && status != StatusCode::NOT_MODIFIED {
                at = redirect(&at, answer.headers())?;
                continue;
            }
            if status.is_success() {
                let (parts, body) = answer.into_parts();
                let headers = parts.headers;
                return Ok(Answer { status, headers, sha256, body, silence_max: self.silence_max });
            }
            return Err(refusal(status, answer.headers(), &at, self.token.is_some()));
        }
        Err(Failure::Final(format!("more than {REDIRECTS_MAX} redirects")))
    }

    async fn ask(
        &self,
        request: Request<Empty<Bytes>>,
        at: &Uri,
    ) -> Result<http::Response<Incoming>, Failure> {
        match tokio::time::timeout(self.silence_max, self.connections.request(request)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(Failure::Passing(format!("{}: {}", shown(at), causes(&error)), None)),
            Err(_) => Err(Failure::Passing(format!("{}: {}", shown(at), silence(self.silence_max)), None)),
        }
    }
}

impl Answer {
    /// The next bytes; nothing at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let frame = match tokio::time::timeout(self.silence_max, self.body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(error))) => return Err(Failure::Passing(causes(&error), None)),
                Ok(None) => return Ok(None),
                Err(_) => return Err(Failure::Passing(silence(self.silence_max), None)),
            };
            if let Ok(bytes) = frame.into_data() {
                return Ok(Some(bytes));
            }
        }
    }

    /// All of a short answer.
    pub(super) async fn whole(mut self) -> Result<Vec<u8>, Failure> {
        let mut all = Vec::new();
        while let Some(bytes) = self.next().await? {
            if all.len() + bytes.len() > TEXT_BYTES_MAX {
                return Err(Failure::Final(format!("an answer of more than {TEXT_BYTES_MAX} bytes")));
            }
            all.extend_from_slice(&bytes);
        }
        Ok(all)
    }

    /// The header as text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

fn silence(longest: Duration) -> String {
    format!("nothing came for {} s", longest.as_secs_f64())
}

/// An error with what caused it: the outermost says least.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn is_same_server(a: &Uri, b: &Uri) -> bool {
    (a.scheme(), a.authority()) == (b.scheme(), b.authority())
}

/// The digest that a hub tells of a large file; its tags of small files are of another kind.
fn linked_digest(headers: &HeaderMap) -> Option<String> {
    let tag = headers.get(LINKED_TAG)?.to_str().ok()?.trim_matches('"');
    super::folder::is_digest(tag).then(|| tag.to_ascii_lowercase())
}

fn redirect(at: &Uri, headers: &HeaderMap) -> Result<Uri, Failure> {
    let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
    let fault = || Failure::Final(format!("{} redirects to {location:?}", shown(at)));
    let location = location.ok_or_else(fault)?;
    let whole = if location.contains("://") {
        location.to_owned()
    } else if location.starts_with('/') && !location.starts_with("//") {
        let authority = at.authority().map(http::uri::Authority::as_str).unwrap_or_default();
        format!("{}://{authority}{location}", at.scheme_str().unwrap_or_default())
    } else {
        return Err(fault());
    };
    let next = url(&whole).map_err(|_| fault())?;
    if at.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
        return Err(Failure::Final(format!("{} redirects to plain text", shown(at))));
    }
    Ok(next)
}

fn refusal(status: StatusCode, headers: &HeaderMap, at: &Uri, has_token: bool) -> Failure {
    let hint = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if has_token => "; the token gives no leave",
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "; a hub wants a token, which HF_TOKEN names",
        _ => "",
    };
    let message = format!("{} answers {status}{hint}", shown(at));
    if status == StatusCode::RANGE_NOT_SATISFIABLE {
        return Failure::OutOfRange(message);
    }
    let is_passing = status.is_server_error()
        || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS);
    if !is_passing {
        return Failure::Final(message);
    }
    let after = headers.get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
    Failure::Passing(message, after.map(Duration::from_secs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(from: &str, location: &str) -> Result<String, String> {
        let headers = HeaderMap::from_iter([(LOCATION, HeaderValue::try_from(location).unwrap())]);
        match redirect(&from.parse().unwrap(), &headers) {
            Ok(to) => Ok(to.to_string()),
            Err(Failure::Final(message)) => Err(message),
            Err(failure) => panic!("a redirect passes not by waiting: {failure:?}"),
        }
    }

    #[test]
    fn redirects() {
        assert_eq!(to("https://a/b", "https://c/d?e").unwrap(), "https://c/d?e");
        assert_eq!(to("http://a:1/b", "/d?e=f").unwrap(), "http://a:1/d?e=f");
        for (from, location, expected) in [
            ("https://a/b", "http://a/b", "https://a/b redirects to plain text"),
            ("https://a/b?secret", "c", "https://a/b redirects to Some(\"c\")"),
            ("https://a/b", "//c/d", "redirects to"),
            ("https://a/b", "file:///etc/passwd", "redirects to"),
        ] {
            assert!(to(from, location).unwrap_err().contains(expected), "{from} to {location}");
        }
    }

    #[test]
    fn tokens_stay_with_the_server_that_they_are_for() {
        let is_same = |a: &str, b: &str| is_same_server(&a.parse().unwrap(), &b.parse().unwrap());
        assert!(is_same("https://a/b", "https://a/c"));
        for other in ["http://a/b", "https://a:444/b", "https://b/b"] {
            assert!(!is_same("https://a/b", other), "{other}");
        }
    }
}
