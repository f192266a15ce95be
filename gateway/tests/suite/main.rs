//! The gateway from outside: its APIs over HTTP and gRPC, its behaviour under faults, its resumption.

#![expect(clippy::unwrap_used, reason = "a wrong unwrap is a failed test")]

mod apis;
mod bodies;
mod calls;
mod faults;
mod front;
mod kserve;
mod kserve_grpc;
mod leaving;
mod limits;
mod manage;
mod peers;
mod resume;
mod support;
mod tgi;
mod tls;
mod tokens;
