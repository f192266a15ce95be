//! Bodies of `/generate`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::json_vllm(data));
