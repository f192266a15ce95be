//! What stands before the routes: names of requests, other origins, keys.

use std::io::Write;
use std::sync::{Arc, Mutex};

use http::{HeaderMap, Method};
use proto::wire::ListServedModelsRequest;
use serde_json::{Value, json};
use tracing_subscriber::fmt::MakeWriter;

use crate::support::{Cluster, MODEL};

const NAME: &str = "x-request-id";

#[tokio::test]
async fn every_answer_bears_the_request_s_name() {
    let cluster = Cluster::start(&["r0"], |config| config.api_key = ["sk-1"].into_iter().collect()).await;
    cluster.script.says("ok");
    for (method, path, key, body, status) in [
        ("GET", "/v2/health/live", "", "", 200),
        ("POST", "/generate", "sk-1", "{\"prompt\":\"x\"}", 200),
        ("POST", "/generate", "sk-1", "{\"prompt\":\"x\",\"stream\":true}", 200),
        ("POST", "/generate", "sk-1", "{", 422),
        ("GET", "/nowhere", "sk-1", "", 404),
        ("GET", "/generate", "sk-1", "", 405),
        ("GET", "/v1/models", "", "", 401),
    ] {
        let send = |name: Option<&[u8]>| {
            let mut request =
                cluster.client().request(method.parse().unwrap(), cluster.url(path)).body(body.to_owned());
            request = request.bearer_auth(key);
            if let Some(name) = name {
                request = request.header(NAME, name);
            }
            request.send()
        };
        let answer = send(Some(b"order 7")).await.unwrap();
        assert_eq!(
            (answer.status().as_u16(), &answer.headers()[NAME]),
            (status, &"order 7".parse().unwrap())
        );
        let drawn = [send(None).await.unwrap(), send(Some("é".as_bytes())).await.unwrap()];
        let drawn = drawn.map(|answer| answer.headers()[NAME].to_str().unwrap().to_owned());
        assert!(drawn.iter().all(|name| name.len() == 32) && drawn[0] != drawn[1], "{path}: {drawn:?}");
    }
}

#[tokio::test]
async fn a_long_name_is_no_part_of_the_body() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    cluster.script.says("ok");
    let name = "n".repeat(7 << 10);
    for stream in [false, true] {
        let request = cluster.client().post(cluster.url("/v1/chat/completions")).header(NAME, &name);
        let chat = json!({"messages": [{"role": "user", "content": "x"}], "stream": stream});
        let answer = request.json(&chat).send().await.unwrap();
        assert_eq!((answer.status().as_u16(), answer.headers()[NAME].len()), (200, name.len()));
        assert!(!answer.text().await.unwrap().contains("nnnnnnnn"));
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// What is logged of a request bears its name, and nothing that is logged holds a key.
#[tokio::test]
async fn a_request_s_log_bears_its_name_and_no_key() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    let _logging = tracing::subscriber::set_default(subscriber);
    let cluster = Cluster::start(&["r0"], |config| {
        config.api_key = ["sk-secret"].into_iter().collect();
        tracing::info!(?config, "the whole configuration");
    })
    .await;
    cluster.script.says("ok");
    for key in ["sk-secret", "sk-guess", "sk-secret"] {
        let request = cluster.client().post(cluster.url("/generate")).bearer_auth(key);
        request.header(NAME, "order-7").json(&json!({"prompt": "x"})).send().await.unwrap();
        // Another test may have come by first, on a thread without a log, and what it met is held to be logged nowhere.
        tracing::callsite::rebuild_interest_cache();
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    // The probes of the server itself are admitted too, and are nobody's request.
    let mut admitted = log.lines().filter(|line| line.contains("request admitted"));
    let span = "request{id=\"order-7\" method=\"POST\" path=\"/generate\"}";
    assert!(admitted.any(|line| line.contains(span)), "{log}");
    let ours = log.lines().filter(|line| line.contains(" gateway::") || line.contains(" node::"));
    for line in ours {
        assert!(!line.contains("sk-secret") && !line.contains("sk-guess"), "{line}");
    }
}

/// The answer's headers to what a browser asks before a request.
async fn preflight(cluster: &Cluster, origin: &str, method: &str, headers: &str) -> (u16, HeaderMap) {
    let request = cluster
        .client()
        .request(Method::OPTIONS, cluster.url("/v1/chat/completions"))
        .header("origin", origin)
        .header("access-control-request-method", method)
        .header("access-control-request-headers", headers);
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.headers().clone())
}

fn said<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(format!("access-control-{name}")).map_or("", |value| value.to_str().unwrap())
}

fn list(values: &[&str]) -> Vec<String> {
    values.iter().map(|&value| value.to_owned()).collect()
}

#[tokio::test]
async fn by_default_every_origin_may_call() {
    let cluster = Cluster::start(&["r0"], |config| config.api_key = ["sk-1"].into_iter().collect()).await;
    // A browser asks without a key.
    let (status, headers) =
        preflight(&cluster, "https://a.example", "POST", "authorization,content-type").await;
    assert_eq!((status, said(&headers, "allow-origin"), said(&headers, "allow-methods")), (200, "*", "*"));
    // A star does not cover this one.
    assert!(said(&headers, "allow-headers").contains("authorization"));
    assert_eq!(said(&headers, "allow-credentials"), "");
    // A page can read a refusal, too.
    let refused =
        cluster.client().get(cluster.url("/v1/models")).header("origin", "https://a.example").send().await;
    let refused = refused.unwrap();
    let allowed = said(refused.headers(), "allow-origin").to_owned();
    assert_eq!((refused.status().as_u16(), allowed.as_str()), (401, "*"));
    assert!(said(refused.headers(), "expose-headers").contains(NAME));
}

#[tokio::test]
async fn with_credentials_the_origin_that_asks_is_named() {
    let cluster = Cluster::start(&["r0"], |config| config.allow_credentials = true).await;
    let (status, headers) = preflight(&cluster, "https://a.example", "PUT", "x-own").await;
    assert_eq!(status, 200);
    let answers = ["allow-origin", "allow-methods", "allow-headers", "allow-credentials"]
        .map(|name| said(&headers, name));
    assert_eq!(answers, ["https://a.example", "PUT", "x-own", "true"]);
    let answer =
        cluster.client().get(cluster.url("/v1/models")).header("origin", "https://b.example").send().await;
    let headers = answer.unwrap().headers().clone();
    let answers = [said(&headers, "allow-origin"), said(&headers, "allow-credentials")];
    assert_eq!(answers, ["https://b.example", "true"]);
    assert!(headers.get_all("vary").iter().any(|vary| vary.to_str().unwrap().contains("origin")));
}

#[tokio::test]
async fn lists_name_who_may_do_what() {
    let cluster = Cluster::start(&["r0"], |config| {
        config.allowed_origins = list(&["https://a.example", "http://localhost:3000"]);
        config.allowed_methods = list(&["GET", "POST"]);
        config.allowed_headers = list(&["Authorization"]);
    })
    .await;
    let (_, headers) = preflight(&cluster, "http://localhost:3000", "POST", "authorization").await;
    assert_eq!(said(&headers, "allow-origin"), "http://localhost:3000");
    assert_eq!(said(&headers, "allow-methods"), "GET,POST");
    let allowed = said(&headers, "allow-headers");
    assert!(["authorization", "content-type"].iter().all(|name| allowed.contains(name)), "{allowed}");
    let (_, headers) = preflight(&cluster, "https://evil.example", "POST", "authorization").await;
    assert_eq!(said(&headers, "allow-origin"), "");
}

#[tokio::test]
async fn a_plain_options_request_is_one_of_a_wrong_method() {
    let cluster = Cluster::start(&["r0"], |_| ()).await;
    let answer = cluster.client().request(Method::OPTIONS, cluster.url("/generate")).send().await.unwrap();
    assert_eq!(answer.status(), 405);
}

#[tokio::test]
async fn without_a_key_there_is_a_refusal_in_the_family_s_words() {
    let cluster = Cluster::start(&["r0"], |config| {
        config.api_key = ["sk-1", "sk-2"].into_iter().collect();
        config.grpc_listen = "127.0.0.1:0".to_owned();
    })
    .await;
    cluster.script.says("ok");
    let triton = format!("/v2/models/{MODEL}/generate");
    let chat = json!({"messages": [{"role": "user", "content": "x"}]});
    let calls = [
        ("/v1/chat/completions", chat),
        ("/generate", json!({"prompt": "x"})),
        (triton.as_str(), json!({"text_input": "x"})),
    ];
    for (path, body) in &calls {
        let send = |key: Option<&str>| {
            let request = cluster.client().post(cluster.url(path)).json(body);
            key.into_iter().fold(request, reqwest::RequestBuilder::bearer_auth).send()
        };
        for key in ["sk-1", "sk-2"] {
            assert_eq!(send(Some(key)).await.unwrap().status(), 200, "{path}");
        }
        for key in [None, Some("sk-3"), Some("sk")] {
            let refused = send(key).await.unwrap();
            let challenge = refused.headers()["www-authenticate"].clone();
            assert_eq!((refused.status().as_u16(), challenge), (401, "Bearer".parse().unwrap()));
            let error: Value = refused.json().await.unwrap();
            if path.starts_with("/v1") {
                let error = &error["error"];
                assert_eq!(error["type"], "invalid_request_error");
                assert_eq!((&error["code"], &error["param"]), (&json!("invalid_api_key"), &Value::Null));
            } else {
                assert_eq!(error["error_type"], "Unauthorized");
                assert!(error["error"].as_str().unwrap().contains("API key"), "{error}");
            }
        }
    }
    for path in ["/health", "/v2/health/ready", "/v2/health/live"] {
        assert_eq!(cluster.get(path).await.status(), 200, "{path} is open");
    }

    let list = async |authorization: Option<&str>| {
        let mut request = tonic::Request::new(ListServedModelsRequest {});
        if let Some(value) = authorization {
            request.metadata_mut().insert("authorization", value.parse().unwrap());
        }
        cluster.grpc().list_served_models(request).await
    };
    assert_eq!(list(Some("Bearer sk-2")).await.unwrap().into_inner().models, [MODEL]);
    for wrong in [None, Some("Bearer sk-3"), Some("sk-1")] {
        let status = list(wrong).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unauthenticated);
        assert!(status.message().contains("API key") && status.metadata().contains_key(NAME), "{status}");
    }
}
