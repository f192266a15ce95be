//! The one error enum. gRPC details, HTTP answers, logs, metrics and tests all use these names.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why something was refused or failed. The names are stable: they are labels of metrics and part of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Reason {
    /// The reference names an earlier life of this worker.
    StaleEpoch,
    /// A later attempt of the same request is known here.
    StaleAttempt,
    /// No hand-off of that id is held here: never issued, released, or forged.
    UnknownHandoff,
    /// The hand-off's lease ran out and its blocks were freed.
    LeaseExpired,
    /// Bytes that arrived do not have the checksum that was taken when their block was sealed.
    ChecksumMismatch,
    /// A transfer ended before everything it announced had arrived.
    Truncated,
    /// The two sides loaded different checkpoints.
    FingerprintMismatch,
    /// The two sides disagree about protocol version, layer and head geometry, or KV dtype.
    LayoutMismatch,
    /// Not enough free KV blocks.
    OutOfBlocks,
    /// A bounded queue is full.
    QueueFull,
    /// The request's total deadline passed.
    Deadline,
    /// The caller went away or cancelled.
    Cancelled,
    /// A worker (or the last of a pool) died or is not reachable.
    WorkerLost,
    /// No such model is served.
    ModelNotFound,
    /// A field of the request is missing or out of its range; the message names it.
    InvalidArgument,
    /// A fault of Baton's own: a broken invariant, a panic that was contained.
    Internal,
}

impl Reason {
    /// Every reason, in the order of the enum.
    pub const ALL: [Self; 16] = [
        Self::StaleEpoch,
        Self::StaleAttempt,
        Self::UnknownHandoff,
        Self::LeaseExpired,
        Self::ChecksumMismatch,
        Self::Truncated,
        Self::FingerprintMismatch,
        Self::LayoutMismatch,
        Self::OutOfBlocks,
        Self::QueueFull,
        Self::Deadline,
        Self::Cancelled,
        Self::WorkerLost,
        Self::ModelNotFound,
        Self::InvalidArgument,
        Self::Internal,
    ];

    /// The stable name, as in metrics labels and gRPC metadata.
    pub fn name(self) -> &'static str {
        match self {
            Self::StaleEpoch => "STALE_EPOCH",
            Self::StaleAttempt => "STALE_ATTEMPT",
            Self::UnknownHandoff => "UNKNOWN_HANDOFF",
            Self::LeaseExpired => "LEASE_EXPIRED",
            Self::ChecksumMismatch => "CHECKSUM_MISMATCH",
            Self::Truncated => "TRUNCATED",
            Self::FingerprintMismatch => "FINGERPRINT_MISMATCH",
            Self::LayoutMismatch => "LAYOUT_MISMATCH",
            Self::OutOfBlocks => "OUT_OF_BLOCKS",
            Self::QueueFull => "QUEUE_FULL",
            Self::Deadline => "DEADLINE",
            Self::Cancelled => "CANCELLED",
            Self::WorkerLost => "WORKER_LOST",
            Self::ModelNotFound => "MODEL_NOT_FOUND",
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::Internal => "INTERNAL",
        }
    }

    /// The reason of that stable name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.name() == name)
    }

    /// True when another attempt, perhaps on other workers, may succeed.
    pub fn is_retryable(self) -> bool {
        !matches!(self, Self::Deadline | Self::Cancelled | Self::ModelNotFound | Self::InvalidArgument)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A refusal or failure: a stable reason for machines, and a message for people that says what was expected,
/// what came, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({reason})")]
pub struct Error {
    /// What kind of failure.
    pub reason: Reason,
    /// Lower case, no full stop; values included.
    pub message: String,
}

impl Error {
    /// An error of that reason.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// A fault in the named field of a request.
    pub fn invalid(field: &str, expected: impl fmt::Display) -> Self {
        Self::new(Reason::InvalidArgument, format!("{field}: {expected}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_name(reason.name()), Some(reason));
        }
        assert_eq!(Reason::from_name("NO_SUCH"), None);
    }
}
