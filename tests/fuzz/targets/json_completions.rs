//! Bodies of `/v1/completions`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::json_completions(data));
