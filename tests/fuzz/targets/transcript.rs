//! Any tokens, decoded one by one and cut at stop strings.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::transcript(data));
