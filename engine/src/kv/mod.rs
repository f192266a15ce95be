//! KV blocks as property: who owns which, which can be given out again, and what the prefix cache knows.
//!
//! The bytes themselves are in a [`KvMemory`](crate::model::KvMemory); nothing here looks at them, except that
//! `slab` takes their checksums.

mod pool;
pub(crate) mod slab;

pub(crate) use pool::BlockPool;
