//! What a worker says about itself when asked.

use serde::{Deserialize, Serialize};

use crate::{Digest, KvLayout, WorkerEpoch};

/// Version of the protocol between services. Two services of different versions do not talk.
pub const PROTOCOL_VERSION: u32 = 1;

/// Which service a member of the cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Assigns requests.
    Router,
    /// Turns tokens into held KV.
    Prefill,
    /// Turns held KV into tokens.
    Decode,
}

impl Role {
    /// The name used in discovery files and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// The model that a worker serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelDescription {
    /// Public name.
    pub name: String,
    /// Digest of the checkpoint.
    pub fingerprint: Digest,
    /// Digest of the tokenizer bundle, which the worker serves by this name.
    pub tokenizer: Digest,
    /// Most tokens a sequence may have, prompt and output together.
    pub context_len: usize,
    /// Vocabulary size, tokens.
    pub vocab_size: usize,
    /// Names the arithmetic: equal ids give bit-equal results.
    pub numerics: String,
}

/// Answer to `Describe`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerDescription {
    /// See [`PROTOCOL_VERSION`].
    pub protocol: u32,
    /// This life of the worker.
    pub epoch: WorkerEpoch,
    /// Prefill or decode.
    pub role: Role,
    /// The model.
    pub model: ModelDescription,
    /// The KV layout.
    pub layout: KvLayout,
    /// True once a shutdown began: running work finishes, new work is refused.
    pub draining: bool,
    /// KV blocks in all.
    pub blocks_total: usize,
    /// KV blocks that are free or reclaimable now.
    pub blocks_free: usize,
    /// Sequences waiting or running.
    pub sequences: usize,
}

impl WorkerDescription {
    /// The first field in which a prefill and a decode worker cannot work together (invariant I9), as the reason
    /// and a message that names the field and both values; `None` when they can.
    pub fn mismatch(&self, other: &Self) -> Option<crate::Error> {
        use crate::{Error, Reason};
        if self.protocol != other.protocol {
            let message = format!("protocol version: {} here, {} there", self.protocol, other.protocol);
            return Some(Error::new(Reason::LayoutMismatch, message));
        }
        if self.model.fingerprint != other.model.fingerprint {
            let message = format!(
                "checkpoint fingerprint: {} here, {} there",
                self.model.fingerprint, other.model.fingerprint
            );
            return Some(Error::new(Reason::FingerprintMismatch, message));
        }
        if self.model.tokenizer != other.model.tokenizer {
            let message =
                format!("tokenizer digest: {} here, {} there", self.model.tokenizer, other.model.tokenizer);
            return Some(Error::new(Reason::FingerprintMismatch, message));
        }
        self.layout.mismatch(&other.layout).map(|message| Error::new(Reason::LayoutMismatch, message))
    }
}
