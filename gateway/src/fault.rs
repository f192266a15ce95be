//! What can go wrong with a request, before any API's words and status codes are put to it.

use std::time::Duration;

use proto::{Error, Reason};

/// Most characters of a message, and of a name that came. What came may be megabytes, a client wants to know which
/// part of it is at fault, and a gRPC status has room for some kilobytes.
const MESSAGE_CHARS_MAX: usize = 600;
const NAME_CHARS_MAX: usize = 200;

/// A refusal or failure. Each dialect writes it with its own status and error object.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// A field is missing, of the wrong type, out of its range, or asks for what is not there.
    #[error("{field}: {message}")]
    Field {
        /// Path of the field in the request, as the client wrote it.
        field: String,
        /// What was expected and what came.
        message: String,
    },
    /// Prompt and output do not fit the model's context.
    #[error("{field}: {message}")]
    Context {
        /// The field that is too long.
        field: String,
        /// Both numbers.
        message: String,
    },
    /// The body is not a JSON object.
    #[error("body: {}", beginning(.0, MESSAGE_CHARS_MAX))]
    Body(String),
    /// The body is larger than is read.
    #[error("body: more than {limit} bytes")]
    BodyTooLarge {
        /// Most bytes that are read.
        limit: usize,
    },
    /// The body did not arrive in time.
    #[error("body: not complete within {} s", .limit.as_secs_f64())]
    BodyTimeout {
        /// How long it may take.
        limit: Duration,
    },
    /// The body is compressed, or coded in some other way.
    #[error("content-encoding: only identity is taken, got {0:?}")]
    Encoding(String),
    /// The request names no key, or one that is not known.
    #[error("{0}")]
    Unauthorized(&'static str),
    /// No route has this path.
    #[error("no such path: {}", beginning(.0, NAME_CHARS_MAX))]
    Path(String),
    /// The path exists, for another method.
    #[error("method {} is not allowed on {}", beginning(.method, NAME_CHARS_MAX), beginning(.path, NAME_CHARS_MAX))]
    Method {
        /// The method that came.
        method: String,
        /// The path.
        path: String,
    },
    /// No request of this name is running.
    #[error("request {:?} is not running here", beginning(.0, NAME_CHARS_MAX))]
    Request(String),
    /// No model of this name is served.
    #[error("model {:?} is not served here", beginning(.0, NAME_CHARS_MAX))]
    Model(String),
    /// As many requests as may run and wait do.
    #[error("{running} requests are running and {waiting} wait, which is the most; try again later")]
    Busy {
        /// How many run.
        running: usize,
        /// How many wait.
        waiting: usize,
    },
    /// The protocol has it, and this server does not.
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// Another call has ended this one.
    #[error("the request was stopped")]
    Stopped,
    /// Nothing can be served yet, or no longer.
    #[error("{0}")]
    NotReady(String),
    /// The service behind failed or refused.
    #[error("{}", .0.message)]
    Service(Error),
}

impl Fault {
    /// A fault of the field. Of a long name or message only the beginning is kept.
    pub fn field(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Field {
            field: beginning(&field.into(), NAME_CHARS_MAX),
            message: beginning(&message.into(), MESSAGE_CHARS_MAX),
        }
    }

    /// The service's stable name for this kind of fault.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Field { .. } | Self::Context { .. } | Self::Body(_) => Reason::InvalidArgument,
            Self::BodyTooLarge { .. } | Self::Encoding(_) => Reason::InvalidArgument,
            Self::Unauthorized(_) | Self::Path(_) | Self::Method { .. } => Reason::InvalidArgument,
            Self::Unsupported(_) => Reason::InvalidArgument,
            Self::BodyTimeout { .. } => Reason::Deadline,
            Self::Model(_) | Self::Request(_) => Reason::ModelNotFound,
            Self::Busy { .. } => Reason::QueueFull,
            Self::Stopped => Reason::Cancelled,
            Self::NotReady(_) => Reason::WorkerLost,
            Self::Service(error) => error.reason,
        }
    }
}

/// The text, or where it is long its beginning.
fn beginning(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Service(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::new(fault.reason(), fault.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_shows_a_little_of_what_came() {
        let long = "é".repeat(10_000);
        let faults = [
            Fault::field(&long, &long),
            Fault::Body(long.clone()),
            Fault::Path(long.clone()),
            Fault::Method { method: long.clone(), path: long.clone() },
            Fault::Request(long.clone()),
            Fault::Model(long.clone()),
        ];
        for fault in faults {
            let shown = fault.to_string();
            assert!(shown.contains("é…") && shown.chars().count() < 1000, "{shown}");
        }
        assert_eq!(Fault::field("a", "b").to_string(), "a: b");
    }
}
