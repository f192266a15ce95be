//! The events of a stream.

use bytes::Bytes;
use serde::Serialize;

use super::error::error_json;
use crate::dialect;
use crate::fault::Fault;

/// What begins an event.
const DATA: &str = "data: ";

/// The end of a stream.
pub(super) const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// An event.
pub(super) fn event(value: &impl Serialize) -> Bytes {
    dialect::event(DATA, value)
}

/// A fault as the last event.
pub(super) fn fault_event(fault: &Fault) -> Bytes {
    format!("{DATA}{}\n\n", error_json(fault)).into()
}
