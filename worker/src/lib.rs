//! What prefill and decode workers share.
//!
//! The rules of the hand-off are sans-IO: [`core`] says what a worker's core and its shell tell each other,
//! [`holds`] is an owner's lease table, [`fences`] knows which attempts are welcome, [`sending`] is a fetch as its
//! owner serves it, and [`owner`] is what of that both roles do alike.
//!
//! Around a core stands its shell: [`shell`] runs it on the engine's thread and opens calls, and the gRPC services
//! turn those calls into messages: [`kv_transfer`] and [`worker_service`] here, `Prefill` and `Decode` in the crates
//! of the two roles. [`load`] makes the engine ([`sim`] the one without a model) within its [`limits`], [`run`] is a worker
//! from start to drain, in one of its [`lives`] after the other. [`fail_points`] lists where tests can stop it. Routers that watch are told by `watcher` what there is to do, and, out of `feed`, which blocks
//! the prefix cache has.

mod call;
mod config;
pub mod core;
pub mod core_config;
pub mod device;
pub mod dump;
mod engine_loop;
pub mod fail_points;
mod feed;
pub mod fences;
pub mod holds;
mod inbox;
pub mod items;
mod kernels;
pub mod kv_transfer;
pub mod limits;
pub mod lives;
pub mod load;
mod memory;
mod meters;
pub mod owner;
mod owners;
mod peers;
pub mod planted;
pub mod run;
pub mod sending;
pub mod shell;
pub mod sim;
mod watcher;
pub mod worker_service;

pub use call::{CallStream, Item};
pub use config::Config;
pub use load::Source;
