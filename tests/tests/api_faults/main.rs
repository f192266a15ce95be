//! What other servers of these APIs were found to do wrong, tried on real processes with a real model. What needs no
//! model is tried in `gateway/tests/suite/peers.rs`; `docs/api.md` has the whole list.

mod bodies;
mod load;
mod server;
mod text;
