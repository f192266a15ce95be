//! The routes of the protocol below `/v2`, but for `generate`, which is another dialect's.

use std::io::Read;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use flate2::read::{GzDecoder, ZlibDecoder};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::Deserialize;
use uuid::Uuid;

use super::{DIALECT, Running, listed, statistics};
use crate::dialect::Family;
use crate::dialect::kserve::describe;
use crate::dialect::kserve::http_request::{HEADER_LENGTH, parse};
use crate::dialect::kserve::http_response::{Body, Encoding, write};
use crate::dialect::kserve::inference::{Inference, check_version};
use crate::dialect::mindie::MindIe;
use crate::docs::{
    ConfigAnswer, IndexEntry, IndexRequest, InferAnswer, InferRequest, MetadataAnswer, MindIeRefusals,
    ServerAnswer, StatisticsAnswer,
};
use crate::fault::Fault;
use crate::http::{enter, json_body, read_body, refusal, unknown_path};
use crate::models::Model;
use crate::service::{Service, Ticket};

const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// Bodies of at least so many bytes are read where that holds up nobody.
const READ_INLINE_BYTES_MAX: usize = 64 << 10;

pub(crate) type Shared = State<Arc<Service>>;

/// A model in the path, and perhaps its version.
#[derive(Debug, Deserialize)]
pub(crate) struct Named {
    model: String,
    #[serde(default)]
    version: String,
}

pub(crate) type NamedPath = Result<Path<Named>, PathRejection>;

/// The routes.
pub(crate) fn routes() -> Router<Arc<Service>> {
    let mut routes = Router::new()
        .route("/v2", get(server))
        .route("/v2/models/stats", get(all_statistics))
        .route("/v2/repository/index", post(index));
    for model in ["/v2/models/{model}", "/v2/models/{model}/versions/{version}"] {
        routes = routes
            .route(model, get(metadata))
            .route(&format!("{model}/ready"), get(ready))
            .route(&format!("{model}/config"), get(config))
            .route(&format!("{model}/stats"), get(model_statistics))
            .route(&format!("{model}/infer"), post(infer));
    }
    for refused in [
        "/v2/repository/models/{model}/load",
        "/v2/repository/models/{model}/unload",
        "/v2/repository/{repository}/index",
        "/v2/repository/{repository}/models/{model}/load",
        "/v2/repository/{repository}/models/{model}/unload",
        "/v2/systemsharedmemory/{*rest}",
        "/v2/cudasharedmemory/{*rest}",
        "/v2/trace/setting",
        "/v2/models/{model}/trace/setting",
        "/v2/models/{model}/versions/{version}/trace/setting",
        "/v2/logging",
    ] {
        routes = routes.route(refused, any(unsupported));
    }
    routes
}

/// Status of a refusal.
pub(super) fn refusal_status(fault: &Fault) -> StatusCode {
    MindIe::refusal(fault).0
}

/// What the server is.
#[utoipa::path(get, path = "/v2", tag = "KServe",
    responses((status = 200, description = "the server", body = ServerAnswer)))]
pub(crate) async fn server() -> Response {
    json_body(describe::server_json())
}

/// What the protocol has and this server does not.
async fn unsupported(request: Request) -> Response {
    let path = request.uri().path();
    let what = if path.contains("sharedmemory") {
        "shared memory: tensors travel in the request"
    } else if path.starts_with("/v2/repository") {
        "changing what is served: that is decided where workers are started"
    } else {
        "changing what is traced and logged: that is set where the server is started"
    };
    refusal::<MindIe>(&Fault::Unsupported(what))
}

/// Answers with what `write` makes of the model in the path.
async fn describe(
    service: &Service,
    path: NamedPath,
    request: Request,
    write: impl FnOnce(&Service, &Model) -> Bytes,
) -> Response {
    let Ok(Path(named)) = path else { return unknown_path(request).await };
    match find(service, &named) {
        Ok(model) => json_body(write(service, &model)),
        Err(fault) => refusal::<MindIe>(&fault),
    }
}

/// What a model takes and gives.
#[utoipa::path(get, path = "/v2/models/{model}", tag = "KServe",
    params(("model" = String, Path, description = "the model")),
    responses((status = 200, description = "its tensors", body = MetadataAnswer), MindIeRefusals))]
pub(crate) async fn metadata(State(service): Shared, path: NamedPath, request: Request) -> Response {
    describe(&service, path, request, |_, model| describe::metadata_json(model)).await
}

/// A model's configuration.
#[utoipa::path(get, path = "/v2/models/{model}/config", tag = "KServe",
    params(("model" = String, Path, description = "the model")),
    responses((status = 200, description = "its configuration", body = ConfigAnswer), MindIeRefusals))]
pub(crate) async fn config(State(service): Shared, path: NamedPath, request: Request) -> Response {
    describe(&service, path, request, |_, model| describe::config_json(model)).await
}

/// What a model has served.
#[utoipa::path(get, path = "/v2/models/{model}/stats", tag = "KServe",
    params(("model" = String, Path, description = "the model")),
    responses((status = 200, description = "counts and times", body = StatisticsAnswer), MindIeRefusals))]
pub(crate) async fn model_statistics(State(service): Shared, path: NamedPath, request: Request) -> Response {
    describe(&service, path, request, |service, model| {
        describe::statistics_json(&statistics(service, Some(model)))
    })
    .await
}

/// What all models have served.
#[utoipa::path(get, path = "/v2/models/stats", tag = "KServe",
    responses((status = 200, description = "counts and times", body = StatisticsAnswer)))]
pub(crate) async fn all_statistics(State(service): Shared) -> Response {
    json_body(describe::statistics_json(&statistics(&service, None)))
}

/// Whether a model can answer.
#[utoipa::path(get, path = "/v2/models/{model}/ready", tag = "KServe",
    params(("model" = String, Path, description = "the model")),
    responses((status = 200, description = "it can"), MindIeRefusals))]
pub(crate) async fn ready(State(service): Shared, path: NamedPath, request: Request) -> Response {
    let Ok(Path(named)) = path else { return unknown_path(request).await };
    match find(&service, &named) {
        Ok(_) if service.is_ready() => StatusCode::OK.into_response(),
        Ok(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Err(fault) => refusal::<MindIe>(&fault),
    }
}

/// The body of a request for the index.
#[derive(Debug, Default, Deserialize)]
struct IndexBody {
    #[serde(default)]
    ready: Option<bool>,
}

/// The models there are.
#[utoipa::path(post, path = "/v2/repository/index", tag = "KServe", request_body = Option<IndexRequest>,
    responses((status = 200, description = "the models", body = Vec<IndexEntry>), MindIeRefusals))]
pub(crate) async fn index(State(service): Shared, request: Request) -> Response {
    let body = match read_body(&service, request).await {
        Ok(body) => body,
        Err(fault) => return refusal::<MindIe>(&fault),
    };
    let read = if body.trim_ascii().is_empty() {
        Ok(IndexBody::default())
    } else {
        serde_json::from_slice::<IndexBody>(&body)
    };
    match read {
        Ok(read) => json_body(describe::index_json(&listed(&service), read.ready.unwrap_or(false))),
        Err(error) => refusal::<MindIe>(&Fault::Body(format!("expected a JSON object: {error}"))),
    }
}

/// The model in the path, in the only version that there is.
fn find(service: &Service, named: &Named) -> Result<Arc<Model>, Fault> {
    let model = service.model(Some(&named.model), "model")?;
    check_version(&named.model, &named.version)?;
    Ok(model)
}

/// Continues a prompt by tensors.
#[utoipa::path(post, path = "/v2/models/{model}/infer", tag = "KServe",
    params(("model" = String, Path, description = "the model")), request_body = InferRequest,
    responses((status = 200, description = "the outputs", content(
        (InferAnswer = "application/json"), (Vec<u8> = "application/octet-stream"))), MindIeRefusals))]
pub(crate) async fn infer(State(service): Shared, path: NamedPath, request: Request) -> Response {
    let Ok(Path(named)) = path else { return unknown_path(request).await };
    let mut ticket = match enter::<MindIe>(&service, DIALECT) {
        Ok(ticket) => ticket,
        Err(refused) => return *refused,
    };
    match answer(&service, &named, request, &mut ticket).await {
        Ok(Body { bytes, json_len }) => {
            ticket.ended(StatusCode::OK.as_u16());
            match json_len {
                None => json_body(bytes),
                Some(length) => {
                    let length = HeaderValue::from(length);
                    let header = HeaderName::from_static(HEADER_LENGTH);
                    ([(CONTENT_TYPE, OCTETS), (header, length)], bytes).into_response()
                }
            }
        }
        Err(fault) => {
            ticket.ended(refusal_status(&fault).as_u16());
            refusal::<MindIe>(&fault)
        }
    }
}

async fn answer(
    service: &Arc<Service>,
    named: &Named,
    request: Request,
    ticket: &mut Ticket,
) -> Result<Body, Fault> {
    let inference = read(service, request, || find(service, named)).await?;
    let (model, mut inference) = inference;
    // Triton leaves out what was not given; MindIE gives every request a name.
    if inference.id.is_empty() && !service.config.triton_strict {
        inference.id = Uuid::new_v4().simple().to_string();
    }
    let id = Some(inference.id.clone()).filter(|id| !id.is_empty());
    let encoding =
        Encoding { binary: inference.reserved.binary_data_output, outputs: inference.outputs.clone() };
    let mut running = Running::start(service, &model, inference, ticket).await?;
    let outputs = running.whole().await?;
    Ok(write(id.as_deref(), &named.model, &outputs, &encoding))
}

/// The body read, decoded and parsed; an unknown model comes before a fault of the body.
async fn read(
    service: &Arc<Service>,
    mut request: Request,
    find: impl FnOnce() -> Result<Arc<Model>, Fault>,
) -> Result<(Arc<Model>, Inference), Fault> {
    let coding = Coding::of(request.headers())?;
    if coding != Coding::Identity {
        request.headers_mut().remove(CONTENT_ENCODING);
    }
    let header = request.headers().get(HEADER_LENGTH).map(|value| value.as_bytes().to_vec());
    let body = read_body(service, request).await?;
    let model = find()?;
    let limit = service.config.body_bytes_max;
    let inline = coding == Coding::Identity && body.len() <= READ_INLINE_BYTES_MAX;
    let parse = move || parse(&coding.decode(body, limit)?, header.as_deref());
    let inference = if inline { parse()? } else { service.tasks.spawn_blocking("parse", parse).await?? };
    Ok((model, inference))
}

/// How a body is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Identity,
    Gzip,
    /// What HTTP calls so: deflate within zlib's frame.
    Deflate,
}

impl Coding {
    fn of(headers: &HeaderMap) -> Result<Self, Fault> {
        let mut values = headers.get_all(CONTENT_ENCODING).iter();
        let (first, second) = (values.next(), values.next());
        let text = first.map(|value| String::from_utf8_lossy(value.as_bytes()).trim().to_ascii_lowercase());
        match (text.as_deref(), second) {
            (None | Some("" | "identity"), None) => Ok(Self::Identity),
            (Some("gzip" | "x-gzip"), None) => Ok(Self::Gzip),
            (Some("deflate"), None) => Ok(Self::Deflate),
            (text, _) => Err(Fault::Encoding(text.unwrap_or_default().chars().take(40).collect())),
        }
    }

    /// The body as it was before, of at most `limit` bytes.
    fn decode(self, body: Bytes, limit: usize) -> Result<Bytes, Fault> {
        match self {
            Self::Identity => Ok(body),
            Self::Gzip => inflate(GzDecoder::new(&*body), limit),
            Self::Deflate => inflate(ZlibDecoder::new(&*body), limit),
        }
    }
}

fn inflate(decoder: impl Read, limit: usize) -> Result<Bytes, Fault> {
    let mut inflated = Vec::new();
    let read = decoder.take(limit as u64 + 1).read_to_end(&mut inflated);
    read.map_err(|error| Fault::Body(format!("cannot be decompressed: {error}")))?;
    if inflated.len() > limit {
        return Err(Fault::BodyTooLarge { limit });
    }
    Ok(inflated.into())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::{GzEncoder, ZlibEncoder};

    use super::*;

    #[test]
    fn compressed_bodies_are_read_within_the_limit() {
        let text = vec![b'x'; 1000];
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&text).unwrap();
        let mut deflate = ZlibEncoder::new(Vec::new(), Compression::fast());
        deflate.write_all(&text).unwrap();
        let bodies = [(Coding::Gzip, gzip.finish().unwrap()), (Coding::Deflate, deflate.finish().unwrap())];
        for (coding, body) in bodies {
            let body = Bytes::from(body);
            assert!(body.len() < 100);
            assert_eq!(coding.decode(body.clone(), 1000).unwrap(), text);
            assert_eq!(coding.decode(body.clone(), 999), Err(Fault::BodyTooLarge { limit: 999 }));
            let cut = coding.decode(body.slice(..body.len() / 2), 1000).unwrap_err().to_string();
            assert!(cut.starts_with("body: cannot be decompressed: "), "{cut}");
        }
    }

    #[test]
    fn other_codings_are_named() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(CONTENT_ENCODING, HeaderValue::from_static(value));
            }
            Coding::of(&headers)
        };
        assert_eq!(of(&[]), Ok(Coding::Identity));
        assert_eq!(of(&["GZIP"]), Ok(Coding::Gzip));
        assert_eq!(of(&["br"]), Err(Fault::Encoding("br".into())));
        assert!(of(&["gzip", "gzip"]).is_err() && of(&["gzip, gzip"]).is_err());
    }
}
