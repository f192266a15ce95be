//! Logs of the process, on stderr.

use tracing_subscriber::EnvFilter;

use crate::Error;

/// The target of events that say what happens to each request.
pub const REQUESTS: &str = "baton::requests";

/// Starts logging: lines of text, or of JSON. `filter` is a level, or directives such as `info,router=debug`. The first
/// call in a process counts; later ones change nothing.
///
/// # Errors
/// [`Error::Option`] when the filter cannot be read.
pub fn init(filter: &str, json: bool) -> Result<(), Error> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        Error::option("--log", format!("expected a level or directives, got {filter:?}: {error}"))
    })?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // An error means that logging was started before, by a test or another service of the process.
    let _ = if json { subscriber.json().try_init() } else { subscriber.with_ansi(false).try_init() };
    Ok(())
}
