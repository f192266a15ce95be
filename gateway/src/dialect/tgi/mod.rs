//! `/generate`, `/generate_stream`, `/` and `/info`, as text-generation-inference (TGI) has them and `MindIE` documents
//! them.

mod describe;
mod request;
mod response;

pub(crate) use describe::described;
pub(crate) use request::{Route, parse};
pub(crate) use response::TgiWriter;
