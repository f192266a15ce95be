//! Properties that hold for any bytes. Each takes what a fuzzer gives it and panics where Baton breaks its word; the
//! programs in `targets` hand them to libFuzzer, and an ordinary test runs them on the committed corpus.
//!
//! `cargo xtask fuzz` builds and runs them on stable Rust; `cargo fuzz run --fuzz-dir tests/fuzz TARGET` works too.

mod front;
mod gguf;
mod infer;
mod json;
mod model;
mod pieces;
mod said;
mod sse;
mod streams;
mod tools;
mod transcript;
mod wire;

pub use front::{json_chat, json_completions, json_tgi, json_triton, json_vllm};
pub use gguf::{bundle, gguf};
pub use infer::{infer, infer_message};
pub use streams::streams;
pub use tools::tools;
pub use transcript::transcript;
pub use wire::{grpc_request, wire};

/// A property of any bytes.
pub type Property = fn(&[u8]);

/// Every target by name.
pub const TARGETS: [(&str, Property); 14] = [
    ("bundle", bundle),
    ("gguf", gguf),
    ("grpc_request", grpc_request),
    ("infer", infer),
    ("infer_message", infer_message),
    ("json_chat", json_chat),
    ("json_completions", json_completions),
    ("json_tgi", json_tgi),
    ("json_triton", json_triton),
    ("json_vllm", json_vllm),
    ("streams", streams),
    ("tools", tools),
    ("transcript", transcript),
    ("wire", wire),
];
