//! What the end-to-end tests share: a cluster of real processes, clients of it, and readings of its metrics.

pub mod browser;
pub mod certificates;
pub mod client;
pub mod cluster;
pub mod collector;
pub mod etcd;
pub mod golden;
pub mod harness;
pub mod metrics;
pub mod net;
pub mod quiet;
pub mod script;
