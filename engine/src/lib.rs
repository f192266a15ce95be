//! Model execution: tokens in, tokens and KV blocks out.
//!
//! The engine is synchronous. It never awaits, opens a socket, reads the environment or a clock; whoever owns an
//! [`Engine`] calls [`Engine::step`] as long as [`Engine::has_work`], and everything else (requests, leases,
//! deadlines, threads) is built around that. Reading order:
//!
//! - [`sequence`]: what is computed, and what is known of it;
//! - `kv`: blocks, their owners, the prefix cache;
//! - `scheduler`: which tokens of which sequences make up the next step;
//! - [`batch`] and [`model`]: the seam below, a step as a value and who computes it;
//! - [`sampling`]: from logits to a token, and `grammar`, which bounds the choice;
//! - [`engine`]: the loop that joins them, and `handoff`, the half of it that moves KV between engines;
//! - [`sim`]: a model without arithmetic, for tests of everything above.

pub mod backend;
pub mod batch;
pub mod digest;
pub mod engine;
mod exp;
mod grammar;
mod handoff;
mod kv;
pub mod model;
pub mod planted;
mod random;
pub mod report;
pub mod sampling;
mod scheduler;
pub mod sequence;
pub mod sim;
pub mod watermark;

pub use crate::engine::{Engine, EngineConfig};
pub use crate::report::{
    EngineEvent, HandedOver, KvBlock, KvCounts, Reservation, SequenceCounts, StepReport, TokenCounts,
};
pub use crate::sequence::{SequenceId, SequenceSpec, Until};
