//! Bodies of `/v2/models/{model}/generate` and `/generate_stream`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::json_triton(data));
