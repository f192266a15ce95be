//! KServe's inference protocol, version 2, with Triton's extensions: named tensors in, named tensors out.
//!
//! A request comes as JSON ([`http_request`]) or as a message ([`messages`]) and becomes an [`inference::Inference`];
//! [`request`] makes the domain request of it. Pieces become tensors in [`compose`], and tensors a body
//! ([`http_response`]) or a message.

mod binary;
pub(crate) mod catalogue;
pub(crate) mod compose;
mod contents;
pub(crate) mod describe;
pub(crate) mod http_request;
pub(crate) mod http_response;
pub(crate) mod inference;
mod json_data;
pub(crate) mod messages;
mod options;
pub(crate) mod request;
pub(crate) mod tensor;
#[cfg(test)]
mod tensor_strategy;
