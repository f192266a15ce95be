//! `/generate`, as vLLM 0.6.4 had it and MindIE documents it.

mod request;
mod response;

pub(crate) use request::parse;
pub(crate) use response::VllmWriter;
