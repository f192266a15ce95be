//! What the end-to-end tests share: a cluster of real processes, a client, and readings of its metrics.

pub mod client;
pub mod cluster;
pub mod golden;
pub mod metrics;
