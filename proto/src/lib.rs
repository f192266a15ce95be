//! The vocabulary of Baton: what services say to each other, as plain Rust types and as `.proto` files.
//!
//! Everything that two crates must agree on lives here and nowhere else. The plain half (ids, requests,
//! sampling, the KV layout, hand-off references, errors) has no dependency on gRPC, so the engine can use it.
//! The wire half (feature `wire`) holds the generated messages, clients and servers ([`wire`]) and the one
//! module that names both halves ([`convert`]).

pub mod block;
pub mod error;
pub mod handoff;
pub mod id;
pub mod kv;
pub mod mix;
pub mod placement;
pub mod planted;
pub mod request;
pub mod watch;
pub mod worker;

#[cfg(feature = "wire")]
pub mod codec;
#[cfg(feature = "wire")]
pub mod convert;
#[cfg(feature = "wire")]
pub mod wire;

pub use block::{BlockHash, HashChain};
pub use error::{Error, Reason};
pub use handoff::{Attempt, Handoff};
pub use id::{Digest, HandoffId, RequestId, TokenId, WorkerEpoch};
pub use kv::{KvDtype, KvLayout};
pub use placement::{Placed, PlacementKind};
pub use request::{
    FinishReason, Generation, Grammar, LOGPROBS_MAX, Priority, PromptLogprobs, PromptReport, SamplingParams,
    StopConditions, Token, TokenLogprob, Watermark,
};
pub use worker::{Capabilities, ModelDescription, Role, WorkerDescription, WorkerLoad};
