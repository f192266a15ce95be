//! The router against text scenarios, against chance, and against scripted workers over the network.

#![allow(clippy::unwrap_used, reason = "it is how a test fails")]

mod dispatch_text;
mod fake;
mod follow;
mod index;
mod pools_text;
mod random;
mod script;
mod service;
