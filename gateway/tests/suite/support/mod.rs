//! A gateway in this process, in front of routers that follow a script.

mod authority;
pub(crate) mod bundle;
mod cluster;
mod script;

pub(crate) use authority::Authority;
pub(crate) use cluster::{Cluster, MODEL};
pub(crate) use script::Trouble;

/// Tokens of several bytes, which only a model would produce.
pub(crate) const ABC: u32 = 258;
pub(crate) const DEF: u32 = 259;
pub(crate) const GH: u32 = 260;
