//! Generated messages, clients and servers of `baton.v1`. Field comments are in the `.proto` files.

tonic::include_proto!("baton.v1");

/// The descriptor set of every service, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/baton.bin"));
