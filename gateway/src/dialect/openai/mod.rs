//! `/v1`: chat completions and models, as the OpenAI API has them.

mod chat_request;
mod chat_response;
mod error;
mod models;

pub(crate) use chat_request::parse as parse_chat;
pub(crate) use chat_response::ChatWriter;
pub(crate) use error::OpenAi;
pub(crate) use models::{model, models};
