//! Requests to the public gRPC service.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::grpc_request(data));
