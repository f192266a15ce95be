//! Generated messages, clients and servers of `baton.v1`. Field comments are in the `.proto` files.

/// The KServe inference protocol, version 2, with Triton's extensions: what its own clients speak.
pub mod inference {
    tonic::include_proto!("inference");
}

tonic::include_proto!("baton.v1");

/// The descriptor set of every service, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/baton.bin"));
