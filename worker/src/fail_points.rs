//! The places where the fault tests can stop a worker, each in one phase of a request, or have a transfer go wrong.
//!
//! Without the cargo feature `failpoints` of `node` they do nothing. With it, a process whose configuration names
//! one stands still there, so that a test can kill it (or a peer of it) in exactly that phase.

/// The worker has started; its model is not loaded yet.
pub const WORKER_LOADING: &str = "worker.loading";

/// A prefill call was received; the core has not heard of it.
pub const PREFILL_QUEUED: &str = "prefill.queued";

/// The engine computed the first chunk of a prefill; its hand-off is not issued yet. Stops the engine's thread.
pub const PREFILL_COMPUTING: &str = "prefill.computing";

/// The hand-off was issued and decode asks for it; no block was sent yet.
pub const PREFILL_ISSUED: &str = "prefill.issued";

/// The owner sent the first block of a hand-off.
pub const PREFILL_TRANSFERRING: &str = "prefill.transferring";

/// A block of a hand-off has a bit turned over on its way out.
pub const TRANSFER_CORRUPTED: &str = "transfer.corrupted";

/// A fetch ends in place of a block.
pub const TRANSFER_CUT: &str = "transfer.cut";

/// A decode call was received; the core has not heard of it.
pub const DECODE_QUEUED: &str = "decode.queued";

/// The fetching side got the first block of a hand-off.
pub const DECODE_TRANSFERRING: &str = "decode.transferring";

/// The third token of a decode call was sent.
pub const DECODE_DECODING: &str = "decode.decoding";

/// Tokens after which [`DECODE_DECODING`] is reached.
pub const DECODE_DECODING_TOKENS: usize = 3;
