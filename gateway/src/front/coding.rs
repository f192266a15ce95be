//! Answers of gRPC are compressed for clients that compress.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderName, HeaderValue};

const CODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPTED: HeaderName = HeaderName::from_static("grpc-accept-encoding");

/// Every client of gRPC's own libraries says that it takes gzip, wanted or not, and compressing a token costs more
/// than sending it. So an answer is coded only where the request was.
pub(super) async fn mirror(mut request: Request, next: Next) -> Response {
    let headers = request.headers_mut();
    let coding = headers.get(CODING).filter(|coding| *coding != "identity").cloned();
    let accepted = headers.remove(ACCEPTED);
    if let Some(coding) = coding
        && accepts(accepted.as_ref(), &coding)
    {
        headers.insert(ACCEPTED, coding);
    }
    next.run(request).await
}

fn accepts(accepted: Option<&HeaderValue>, coding: &HeaderValue) -> bool {
    let (Some(Ok(accepted)), Ok(coding)) = (accepted.map(HeaderValue::to_str), coding.to_str()) else {
        return false;
    };
    accepted.split(',').any(|one| one.trim() == coding)
}
