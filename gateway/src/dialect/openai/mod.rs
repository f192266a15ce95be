//! `/v1`: chat completions and models, as the OpenAI API has them.

mod chat_format;
mod chat_messages;
mod chat_plan;
mod chat_reader;
mod chat_request;
mod chat_response;
mod chat_shapes;
mod chat_tools;
mod completion_request;
mod completion_response;
mod error;
mod events;
mod logprobs;
mod models;
mod parameters;
#[cfg(test)]
mod tests;
mod tokenize;

pub(crate) use chat_request::{Setting, parse as parse_chat};
pub(crate) use chat_response::ChatWriter;
pub(crate) use completion_request::parse as parse_completion;
pub(crate) use error::OpenAi;
pub(crate) use models::{model, models};
#[cfg(test)]
pub(crate) use parameters::WITHOUT_EFFECT;
pub(crate) use tokenize::{detokenized, tokenized};
