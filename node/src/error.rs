//! Why a process could not start, or had to stop.

use std::io;
use std::path::PathBuf;

/// A fault of a process as a whole. Faults of a single call are [`proto::Error`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option, wherever it was set, has no valid value.
    #[error("{option}: {message}")]
    Option {
        /// As the user wrote it: `--listen`, `BATON_PORT`, `port in baton.toml`.
        option: String,
        /// What was expected, and what came.
        message: String,
    },
    /// A file named by an option cannot be used.
    #[error("{path}: {message}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// Something that was to be fetched is not to be had, or is not what it should be.
    #[error("cannot fetch {what}: {message}")]
    Fetch {
        /// A file or a repository.
        what: String,
        /// What was expected, and what came.
        message: String,
    },
    /// A task panicked, and the process stopped because of it.
    #[error("task {task} panicked: {message}")]
    Panic {
        /// The task's name.
        task: &'static str,
        /// The panic's message.
        message: String,
    },
    /// A service ended although nobody had asked it to.
    #[error("service {0} ended by itself")]
    Ended(String),
    /// A fault with a stable reason, from a call or a service's own start.
    #[error(transparent)]
    Service(#[from] proto::Error),
}

impl Error {
    /// An option without a valid value.
    pub fn option(option: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Option { option: option.into(), message: message.into() }
    }

    /// True when the fault is in what the user asked for, not in how it went.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Option { .. } | Self::File { .. } => true,
            Self::Service(error) => error.reason == proto::Reason::InvalidArgument,
            Self::Bind { .. } | Self::Fetch { .. } | Self::Panic { .. } | Self::Ended(_) => false,
        }
    }
}
