//! `/v2/models/{model}/generate` and `generate_stream`, as MindIE has them beside Triton's.

mod request;
mod response;

pub(crate) use request::{Envelope, parse};
pub(crate) use response::TritonWriter;
