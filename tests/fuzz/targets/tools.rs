//! Texts of models, and the calls in them.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::tools(data));
