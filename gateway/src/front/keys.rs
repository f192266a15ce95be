//! API keys. A request names one as `Authorization: Bearer KEY`, over gRPC as metadata of that name.

use std::path::Path;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::HeaderMap;
use http::header::AUTHORIZATION;
use node::Error;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};
use tonic::Status;

use crate::Config;
use crate::fault::Fault;
use crate::http::refusal_at;

const KEY: &str = "--api-key";
const FILE: &str = "--api-key-file";

/// The keys that are let in, as digests: all of one length, so that comparing takes the same time for every key, and
/// of no use to whoever reads them in memory.
#[derive(Clone)]
pub(super) struct Keys(Arc<[[u8; 32]]>);

impl Keys {
    /// The keys of both options; `None` when neither was given.
    pub(super) fn read(config: &Config) -> Result<Option<Self>, Error> {
        let mut digests = Vec::new();
        for key in config.api_key.iter() {
            digests.push(digest(key).ok_or_else(|| Error::option(KEY, EXPECTED))?);
        }
        if let Some(path) = &config.api_key_file {
            read_file(path, &mut digests)?;
        }
        Ok((!digests.is_empty()).then(|| Self(digests.into())))
    }

    /// Lets in a request that names one of the keys.
    fn check(&self, headers: &HeaderMap) -> Result<(), Fault> {
        let named = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(bearer);
        let Some(named) = named else {
            return Err(Fault::Unauthorized("no API key: expected the header authorization: Bearer KEY"));
        };
        let named: [u8; 32] = Sha256::digest(named).into();
        let known = self.0.iter().fold(Choice::from(0), |known, key| known | key.ct_eq(&named));
        if known.into() {
            Ok(())
        } else {
            Err(Fault::Unauthorized("the API key is not one of this server's"))
        }
    }
}

/// What a key has to be, without what came: a key is never shown.
const EXPECTED: &str = "expected keys of printable ASCII characters without blanks";

fn digest(key: &str) -> Option<[u8; 32]> {
    let well_formed = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
    well_formed.then(|| Sha256::digest(key).into())
}

fn read_file(path: &Path, digests: &mut Vec<[u8; 32]>) -> Result<(), Error> {
    let fault = |message: String| Error::option(FILE, format!("{}: {message}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
    let before = digests.len();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if !line.is_empty() && !line.starts_with('#') {
            digests.push(digest(line).ok_or_else(|| fault(format!("line {}: {EXPECTED}", number + 1)))?);
        }
    }
    if digests.len() == before {
        return Err(fault("expected a key a line, found none".to_owned()));
    }
    Ok(())
}

/// The key that the header's value names.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, key) = value.trim().split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim_start())
}

/// Lets a request of HTTP pass, or refuses it as its path's family does.
pub(super) async fn check_http(State(keys): State<Keys>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if !is_open(path)
        && let Err(fault) = keys.check(request.headers())
    {
        return refusal_at(path, &fault);
    }
    next.run(request).await
}

/// Lets a call of gRPC pass, or refuses it.
pub(super) async fn check_grpc(State(keys): State<Keys>, request: Request, next: Next) -> Response {
    if !is_open_call(request.uri().path())
        && let Err(fault) = keys.check(request.headers())
    {
        return Status::unauthenticated(fault.to_string()).into_http::<axum::body::Body>().into_response();
    }
    next.run(request).await
}

/// Paths for whoever watches the server or wants to read how to use it.
#[expect(clippy::match_like_matches_macro, reason = "a line for each kind of path")]
fn is_open(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    match parts[..] {
        ["health" | "docs", ..] | ["v2", "health", ..] => true,
        ["ping" | "metrics" | "openapi.json"] => true,
        ["v2", "models", _, "ready"] | ["v2", "models", _, "versions", _, "ready"] => true,
        _ => false,
    }
}

/// The same of gRPC.
fn is_open_call(path: &str) -> bool {
    let Some((service, call)) = path.trim_start_matches('/').split_once('/') else { return false };
    match service {
        "grpc.health.v1.Health" => true,
        "grpc.reflection.v1.ServerReflection" | "grpc.reflection.v1alpha.ServerReflection" => true,
        "inference.GRPCInferenceService" => matches!(call, "ServerLive" | "ServerReady" | "ModelReady"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(listed: &[&str], file: Option<&str>) -> Result<Option<Keys>, Error> {
        let kept = file.map(|text| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            file
        });
        let config = Config {
            api_key: listed.iter().copied().collect(),
            api_key_file: kept.as_ref().map(|file| file.path().to_owned()),
            ..Config::default()
        };
        Keys::read(&config)
    }

    fn lets_in(keys: &Keys, authorization: &str) -> bool {
        keys.check(&HeaderMap::from_iter([(AUTHORIZATION, authorization.parse().unwrap())])).is_ok()
    }

    #[test]
    fn one_of_the_keys_must_be_named() {
        assert!(keys(&[], None).unwrap().is_none());
        let keys = keys(&["sk-one"], Some("# of the batch jobs\n\n sk-two \n")).unwrap().unwrap();
        for good in ["Bearer sk-one", "bearer  sk-two", "BEARER sk-one "] {
            assert!(lets_in(&keys, good), "{good}");
        }
        for bad in ["", "Bearer", "Bearer ", "sk-one", "Basic sk-one", "Bearer sk-on", "Bearer sk-one2"] {
            assert!(!lets_in(&keys, bad), "{bad}");
        }
        let fault = keys.check(&HeaderMap::new()).unwrap_err().to_string();
        assert!(fault.starts_with("no API key: "), "{fault}");
    }

    #[test]
    fn a_fault_names_its_option_and_no_key() {
        let fault = |listed, file| keys(listed, file).map(drop).unwrap_err().to_string();
        assert_eq!(fault(&["sk one"], None), format!("--api-key: {EXPECTED}"));
        assert_eq!(fault(&[""], None), format!("--api-key: {EXPECTED}"));
        let lines = fault(&[], Some("ok\nsk-é\n"));
        assert!(lines.starts_with("--api-key-file: ") && lines.ends_with(&format!("line 2: {EXPECTED}")));
        assert!(fault(&["sk"], Some("# none\n")).ends_with("expected a key a line, found none"));
        let config = Config { api_key_file: Some("/no/such/keys".into()), ..Config::default() };
        let missing = Keys::read(&config).map(drop).unwrap_err().to_string();
        assert!(missing.starts_with("--api-key-file: /no/such/keys: "), "{missing}");
    }

    #[test]
    fn only_health_readiness_metrics_and_documents_are_open() {
        for open in [
            "/health",
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/m/ready",
            "/v2/models/m/versions/1/ready",
            "/metrics",
            "/docs",
            "/docs/page.css",
            "/openapi.json",
        ] {
            assert!(is_open(open), "{open}");
        }
        for shut in [
            "/",
            "/healthy",
            "/generate",
            "/v1/models",
            "/v2",
            "/v2/models/ready",
            "/v2/models/ready/generate",
            "/v2/models/m/versions/ready",
            "//health",
            "/metrics/x",
        ] {
            assert!(!is_open(shut), "{shut}");
        }
        assert!(is_open_call("/grpc.health.v1.Health/Check"));
        assert!(is_open_call("/inference.GRPCInferenceService/ServerReady"));
        assert!(!is_open_call("/inference.GRPCInferenceService/ModelInfer"));
        assert!(!is_open_call("/baton.v1.GenerationService/Generate"));
    }
}
