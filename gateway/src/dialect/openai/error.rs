//! The error object of `/v1`.

use bytes::Bytes;
use http::StatusCode;
use proto::Reason;
use serde::Serialize;

use crate::dialect::{Family, json};
use crate::fault::Fault;

/// The family of `/v1`.
pub(crate) struct OpenAi;

#[derive(Serialize)]
struct ErrorBody {
    error: ErrorObject,
}

#[derive(Serialize)]
struct ErrorObject {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

/// The error object, as text.
pub(super) fn error_json(fault: &Fault) -> String {
    let (_, kind, code) = class_of(fault);
    let param = match fault {
        Fault::Field { field, .. } | Fault::Context { field, .. } => Some(field.clone()),
        Fault::Model(_) => Some("model".to_owned()),
        _ => None,
    };
    json(&ErrorBody { error: ErrorObject { message: fault.to_string(), kind, param, code } })
}

impl Family for OpenAi {
    fn refusal(fault: &Fault) -> (StatusCode, Bytes) {
        (class_of(fault).0, error_json(fault).into())
    }
}

/// Status, type and code.
fn class_of(fault: &Fault) -> (StatusCode, &'static str, Option<&'static str>) {
    const REQUEST: &str = "invalid_request_error";
    const SERVER: &str = "server_error";
    const BUSY: &str = "rate_limit_error";
    match fault {
        Fault::Field { .. } | Fault::Body(_) => (StatusCode::BAD_REQUEST, REQUEST, None),
        Fault::Context { .. } => (StatusCode::BAD_REQUEST, REQUEST, Some("context_length_exceeded")),
        Fault::BodyTooLarge { .. } => (StatusCode::PAYLOAD_TOO_LARGE, REQUEST, None),
        Fault::BodyTimeout { .. } => (StatusCode::REQUEST_TIMEOUT, REQUEST, Some("timeout")),
        Fault::Encoding(_) => (StatusCode::UNSUPPORTED_MEDIA_TYPE, REQUEST, None),
        Fault::Unauthorized(_) => (StatusCode::UNAUTHORIZED, REQUEST, Some("invalid_api_key")),
        Fault::Path(_) => (StatusCode::NOT_FOUND, REQUEST, Some("unknown_url")),
        Fault::Unsupported(_) => (StatusCode::NOT_IMPLEMENTED, REQUEST, None),
        Fault::Method { .. } => (StatusCode::METHOD_NOT_ALLOWED, REQUEST, Some("method_not_supported")),
        Fault::Model(_) => (StatusCode::NOT_FOUND, REQUEST, Some("model_not_found")),
        Fault::Request(_) => (StatusCode::NOT_FOUND, REQUEST, None),
        Fault::Busy { .. } => (StatusCode::TOO_MANY_REQUESTS, BUSY, Some("rate_limit_exceeded")),
        Fault::NotReady(_) => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("overloaded")),
        Fault::Stopped => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, None),
        Fault::Service(error) => match error.reason {
            Reason::InvalidArgument => (StatusCode::BAD_REQUEST, REQUEST, None),
            Reason::ModelNotFound => (StatusCode::NOT_FOUND, REQUEST, Some("model_not_found")),
            Reason::QueueFull | Reason::OutOfBlocks => {
                (StatusCode::TOO_MANY_REQUESTS, BUSY, Some("rate_limit_exceeded"))
            }
            Reason::WorkerLost => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("overloaded")),
            Reason::Deadline => (StatusCode::REQUEST_TIMEOUT, SERVER, Some("timeout")),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, None),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_an_object_within_an_object() {
        let fault = Fault::field("temperature", "expected a number");
        let (status, body) = OpenAi::refusal(&fault);
        assert_eq!(status, 400);
        assert_eq!(
            body,
            "{\"error\":{\"message\":\"temperature: expected a number\",\"type\":\"invalid_request_error\",\
             \"param\":\"temperature\",\"code\":null}}"
        );
        let (status, body) = OpenAi::refusal(&Fault::Model("x".into()));
        assert_eq!(status, 404);
        assert!(body.ends_with(b"\"param\":\"model\",\"code\":\"model_not_found\"}}"));
        assert_eq!(OpenAi::refusal(&Fault::Busy { running: 1, waiting: 2 }).0, 429);
        assert_eq!(OpenAi::refusal(&proto::Error::new(Reason::Deadline, "late").into()).0, 408);
    }
}
