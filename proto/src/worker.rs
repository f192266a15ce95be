//! What a worker says about itself when asked.

use serde::{Deserialize, Serialize};

use crate::{Digest, Error, KvLayout, Reason, WorkerEpoch};

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
    /// Every role.
    pub const ALL: [Self; 3] = [Self::Router, Self::Prefill, Self::Decode];

    /// The role of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }

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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// What must fit for workers to work together, and does not change in a worker's life: what it registers with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// See [`PROTOCOL_VERSION`].
    pub protocol: u32,
    /// The model.
    pub model: ModelDescription,
    /// The KV layout.
    pub layout: KvLayout,
}

impl Capabilities {
    /// See [`WorkerDescription::mismatch`].
    pub fn mismatch(&self, other: &Self) -> Option<Error> {
        let of = |one: &Self| (one.protocol, one.layout);
        mismatch((of(self), &self.model), (of(other), &other.model))
    }
}

/// What a worker has to do and has room for, at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct WorkerLoad {
    /// Sequences that wait to be computed, or to be computed again.
    pub waiting: usize,
    /// Sequences that take part in steps, or whose KV is on its way here.
    pub running: usize,
    /// Tokens whose KV is still to be computed here, of waiting and running sequences.
    pub waiting_tokens: usize,
    /// Tokens of the sequences that take part in steps.
    pub running_tokens: usize,
    /// KV blocks that are free or reclaimable.
    pub blocks_free: usize,
    /// KV blocks in all.
    pub blocks_total: usize,
    /// True once a shutdown began.
    pub draining: bool,
}

impl WorkerLoad {
    /// Sequences waiting or running.
    pub fn sequences(&self) -> usize {
        self.waiting + self.running
    }
}

impl WorkerDescription {
    /// The first field in which a prefill and a decode worker cannot work together (invariant I9), as the reason
    /// and a message that names the field and both values; `None` when they can.
    pub fn mismatch(&self, other: &Self) -> Option<Error> {
        let of = |one: &Self| (one.protocol, one.layout);
        mismatch((of(self), &self.model), (of(other), &other.model))
    }
}

/// Protocol version and layout, and the model.
type Compared<'a> = ((u32, KvLayout), &'a ModelDescription);

fn mismatch(own: Compared<'_>, other: Compared<'_>) -> Option<Error> {
    let ((own_protocol, own_layout), own_model) = own;
    let ((other_protocol, other_layout), other_model) = other;
    if own_protocol != other_protocol {
        let message = format!("protocol version: {own_protocol} here, {other_protocol} there");
        return Some(Error::new(Reason::LayoutMismatch, message));
    }
    let digests = [
        ("checkpoint fingerprint", own_model.fingerprint, other_model.fingerprint),
        ("tokenizer digest", own_model.tokenizer, other_model.tokenizer),
    ];
    if let Some((field, own, other)) = digests.into_iter().find(|(_, own, other)| own != other) {
        let message = format!("{field}: {own} here, {other} there");
        return Some(Error::new(Reason::FingerprintMismatch, message));
    }
    own_layout.mismatch(&other_layout).map(|message| Error::new(Reason::LayoutMismatch, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_reads_back() {
        for role in Role::ALL {
            assert_eq!(Role::from_name(role.name()), Some(role));
        }
        assert_eq!(Role::from_name("cook"), None);
    }
}
