//! What a worker tells whoever watches it: its load, and which KV blocks its prefix cache has.
//!
//! A watch begins with the names of all blocks that the worker knows, in chunks, and goes on with every change. Changes
//! are numbered through a worker's life, the same for all who watch, so that whoever misses some knows it.

use crate::{BlockHash, WorkerEpoch, WorkerLoad};

/// One block came into a prefix cache, or left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockChange {
    /// Its KV can be had there from now on.
    Stored(BlockHash),
    /// It was evicted, or is not to be trusted.
    Removed(BlockHash),
}

/// One message of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchEvent {
    /// The life of the worker that speaks.
    pub epoch: WorkerEpoch,
    /// Orders the message among its kind; see [`News`].
    pub sequence: u64,
    /// What it says.
    pub news: News,
}

/// What a message of a watch says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// What there is to do. Numbered one by one: of two reports the later one holds.
    Load(WorkerLoad),
    /// A part of what is known. Its sequence is the number of the change that comes next, the same in all parts.
    Known {
        /// Counts the parts from 0.
        chunk: u32,
        /// The changes follow.
        last: bool,
        /// Names, each once in all parts together.
        blocks: Vec<BlockHash>,
    },
    /// Blocks came. Its sequence is the number of the first; the others have the numbers after it.
    Stored(Vec<BlockHash>),
    /// Blocks left, numbered likewise.
    Removed(Vec<BlockHash>),
}
