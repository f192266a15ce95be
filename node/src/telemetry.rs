//! What a process tells of itself while it runs: logs on stderr ([`init`]), and traces of requests across processes
//! ([`Traces`], [`Span`], [`TraceContext`]). Its figures are in [`crate::metrics`].

mod export;
mod span;

use tracing_subscriber::EnvFilter;

use crate::Error;

pub use export::{TraceConfig, Traces};
pub use span::{Span, TraceContext};
pub(crate) use span::{incoming, outgoing};

/// The target of events that say what happens to each request.
pub const REQUESTS: &str = "baton::requests";

/// Starts logging: lines of text, or of JSON with the fields of each event beside its message. `filter` is a level, or
/// directives such as `info,router=debug`. The first call in a process counts; later ones change nothing.
///
/// # Errors
/// [`Error::Option`] when the filter cannot be read.
pub fn init(filter: &str, json: bool) -> Result<(), Error> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        Error::option("--log", format!("expected a level or directives, got {filter:?}: {error}"))
    })?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // An error means that logging was started before, by a test or another service of the process.
    let _ = if json {
        subscriber.json().flatten_event(true).with_span_list(false).try_init()
    } else {
        subscriber.with_ansi(false).try_init()
    };
    Ok(())
}
