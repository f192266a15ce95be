//! Answers of any text, as every API writes them.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::streams(data));
